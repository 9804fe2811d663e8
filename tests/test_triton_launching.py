"""Compiled kernels are kept by keys of the package's own: launches of one key need one kernel.

Of internals, since a mistaken key would launch a kernel that was compiled for other numbers: Triton
makes a 1 in a tuple a constant, and weights would be wrong without a word.
"""

from __future__ import annotations

import itertools
import random
from importlib import import_module

import pytest
import torch

from kernel import optimizer

pytest.importorskip("triton")
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

elementwise, launching, symmetric = (
    import_module(f"{optimizer.__name__}.triton_kernels.{name}")
    for name in ("elementwise", "launching", "symmetric")
)
SHAPES = [(2048,), (5008,), (4096,), (1,), (33000,), (3, 2048), (16, 40), (40, 16), (2, 9, 80)]
CONFIGS = [None, launching.SymmetricConfig(32, 32, 4, 3, width=2, descriptors=True)]
MEMORY = {dtype: torch.zeros(1 << 18, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}


class Launches:
    """Takes the place of `launching.launch`; holds each launch against the first of its key."""

    def __init__(self):
        self.first = {}
        self.again = 0

    def __call__(self, kernel, key, device, programs, arguments, constants, **options):
        needed = native_specialize_impl(CUDABackend, tuple(arguments), False, True, True)
        needed = (kernel, needed, sorted(constants.items(), key=str), options)
        self.again += (key, device) in self.first
        assert self.first.setdefault((key, device), needed) == needed, key


@pytest.fixture
def launches(monkeypatch):
    found = Launches()
    monkeypatch.setattr(launching, "launch", found)
    return found


def tensor(shape, dtype, offset):
    """A view of memory that others of the dtype share: little is written, and nothing read."""
    return MEMORY[dtype][offset:][: torch.Size(shape).numel()].view(shape)


def columns(random_, dtypes):
    """Lists of tensors, item by item of one shape, some at addresses that no vector fits."""
    shapes = [random_.choice(SHAPES) for _ in range(random_.choice([1, 2, 2, 3, 5, 33]))]
    offset = random_.choice([0, 0, 0, 1, 8])
    return [[tensor(shape, dtype, offset) for shape in shapes] for dtype in dtypes]


def test_launches_of_lists_have_one_key_only_where_they_need_one_kernel(launches):
    random_ = random.Random(0)
    for _ in range(1500):
        B, G, out = columns(random_, [torch.float32, torch.float32, torch.bfloat16])
        how = {"momentum": random_.choice([0.9, 1.0]), "weight": 1.0, "nesterov": True}
        elementwise.update_momentum(B, G, out, **how)
        rates = {"rate": random_.choice([0.1, 1, torch.tensor(0.1)]), "decay": 0.0}
        elementwise.update_weights(out, B, cautious=False, **rates)
    assert launches.again > 1000


def test_launches_of_batches_have_one_key_only_where_they_need_one_kernel(launches):
    for n, rows, cols, offset in itertools.product((1, 2, 16), (1, 16, 33), (1, 40, 64), (0, 1, 8)):
        X = tensor((n, rows, cols), torch.float32, offset)
        numbers = torch.zeros(n + 1)[offset % 2 :][:n]
        for divided_by, factor in itertools.product((None, numbers), (1.01, 1)):
            sixteen = tensor(X.shape, torch.bfloat16, 0)
            elementwise.normalize(X, sixteen, factor, 1e-7, 0.0, divided_by, 1e18, 4.0)
        out = torch.zeros(n, rows, rows)
        for alpha, beta, config in itertools.product((1.0, 1), (0.0, 0.5), CONFIGS):
            symmetric.symmetric_product(X, X.mT, alpha, beta, out, out, config)
    assert launches.again > 100
