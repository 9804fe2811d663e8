"""What `hypothesis` draws: weights and layouts, options, gradients, garbage.

What is drawn prints as the call that makes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from layouts import MEMORY, STEPS, Group, Weight, axes_of
from trainings import Case

MESHES = {
    1: [(1,), (1, 1)],
    2: [(2,), (1, 2), (2, 1)],
    3: [(3,), (3, 1)],
    4: [(4,), (2, 2), (4, 1), (1, 4)],
}
NARROW = (torch.float32, torch.bfloat16, torch.float16)
# fp16 has no moments for AdamW: the square of a small gradient is zero there.
ADAMW_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)

FAMILIES = ["polar_express", "quintic", "you", "cans", "cubic5", ((2.0, -1.5, 0.5),) * 3]


# Of groups, all that is no fact of the model and no question of bits; None of `ns_steps` is that of
# the coefficients.
MUON_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "lr": st.sampled_from([0.02, 0.0, torch.tensor(0.05)]),
    "momentum": st.sampled_from([0.95, 0.0, 0.5]),
    "nesterov": st.booleans(),
    "ns_coefficients": st.sampled_from(FAMILIES),
    "weight_decay": st.sampled_from([0.1, 0.0]),
    "none_grad": st.booleans(),
    "adjust_lr": st.sampled_from(["match_rms_adamw", "original", "none", 0.18]),
    "momentum_style": st.sampled_from(["classical", "ema"]),
    "ns_algorithm": st.sampled_from(["auto", "standard", "gram"]),
    "ns_eps": st.sampled_from([1e-7, 1e-3]),
    "ns_eps_absolute": st.sampled_from([None, 1e-3]),
    "ns_norm_factor": st.sampled_from([None, 1.1]),
    "ns_equilibrate": st.booleans(),
    "ns_renormalize": st.booleans(),
    "beta2": st.sampled_from([None, 0.9, 0.0]),
    "second_moment_side": st.sampled_from(["longer", "rows"]),
    "cautious": st.booleans(),
    "decay_lr": st.sampled_from(["base", "adjusted"]),
    "momentum_dtype": st.sampled_from([None, torch.bfloat16, torch.float32]),
    "missing_grad": st.sampled_from(["raise", "zero"]),
    "maximize": st.booleans(),
}
ADAMW_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    **{key: MUON_OPTIONS[key] for key in ("weight_decay", "none_grad", "maximize")},
    **{key: MUON_OPTIONS[key] for key in ("missing_grad", "lr")},
    "adamw_betas": st.sampled_from([(0.9, 0.95), (0.0, 0.999), [0.9, 0.0]]),
    "adamw_eps": st.sampled_from([1e-8, 1e-3]),
}
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "warmup_step": st.integers(0, 5),
    "chunk_size": st.sampled_from([-1, 1, 2, 3]),
    "consistency_check": st.sampled_from(["step", "plan", "off"]),
    "hsdp": st.sampled_from(["auto", "redundant", "spread"]),
    "triton": st.booleans(),
    "debug": st.booleans(),
}


def some_of(options: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the options; examples shrink to none."""
    return st.fixed_dictionaries({}, optional=dict(options))


@st.composite
def placed(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype, ranks: int) -> Weight:
    memory = draw(st.sampled_from(list(MEMORY)))
    mesh = draw(st.sampled_from([None, *MESHES[ranks]]))
    if mesh is None:
        return Weight(shape, dtype=dtype, memory=memory)
    dims = tuple(draw(st.sampled_from([*range(len(shape)), None])) for _ in mesh)
    nested = len(mesh) > 1 and draw(st.booleans())
    return Weight(shape, mesh, dims, nested, dtype, memory)


sizes = st.one_of(st.integers(1, 40), st.just(0))


@st.composite
def matrix_shapes(draw: st.DrawFn) -> tuple[int, int]:
    short = draw(st.integers(1, 20))
    long = draw(st.one_of(st.integers(short, 40), st.just(0)))
    return draw(st.sampled_from([(long, short), (short, long)]))


@st.composite
def muon_groups(draw: st.DrawFn, ranks: int, number: int, wide: bool) -> Group:
    options = draw(some_of(MUON_OPTIONS))
    flatten = draw(st.booleans()) and draw(st.booleans())
    if flatten:
        options["flatten"] = True
    dtypes = (torch.float64,) if wide else draw(st.sampled_from([NARROW[:1], NARROW]))
    weights = []
    splits: dict[str, Any] = {}
    for index in range(draw(st.integers(0, 4))):
        shape: tuple[int, ...] = draw(matrix_shapes())
        kind = draw(st.sampled_from(["matrix", "stacked", "stacked twice", "convolution"]))
        if flatten and kind != "matrix":
            short = draw(st.integers(1, 20))
            more = {"stacked": (20,), "stacked twice": (4, 5), "convolution": (5, 2, 2)}[kind]
            shape = (short, draw(st.integers(1, 3)), *more)
        elif kind in ("stacked", "stacked twice"):
            counts = [draw(st.integers(1, 6)) for _ in range(1 + (kind == "stacked twice"))]
            shape = (*counts, *shape)
        dtype = draw(st.sampled_from(dtypes))
        weights.append(draw(placed(shape, dtype, ranks)))
        is_expert = len(shape) > 2 and not flatten
        rows = shape[-2 if is_expert else 0]
        if rows and draw(st.integers(0, 3)) == 3:
            name = f"{'experts' if is_expert else 'layers'}.{number}.{index}.weight"
            splits[name] = draw(splits_of(rows, None if flatten and len(shape) > 2 else shape[-1]))
    return Group(weights, {**options, "split": splits} if splits else options)


@st.composite
def splits_of(draw: st.DrawFn, rows: int, cols: int | None) -> int | list[int] | str:
    """Any ``split`` of a matrix; columns are None where they are flattened."""

    def choose(options: Sequence[Any]) -> Any:
        return draw(st.sampled_from(options))

    if draw(st.booleans()) and cols != 0:
        whole = cols is None or draw(st.booleans())
        return f"{axes_of(rows, choose)} {'rest' if whole else axes_of(cols, choose)}"
    if draw(st.booleans()):
        return draw(st.sampled_from([size for size in range(1, 13) if rows % size == 0]))
    counts: list[int] = []
    while sum(counts) < rows:
        counts.append(min(draw(st.integers(1, 12)), rows - sum(counts)))
    return counts


@st.composite
def adamw_groups(draw: st.DrawFn, ranks: int) -> Group:
    options = draw(some_of(ADAMW_OPTIONS))
    shapes = draw(st.lists(st.lists(sizes, max_size=3).map(tuple), max_size=3))
    dtype = st.sampled_from(ADAMW_DTYPES)
    weights = []
    for shape in shapes:
        weight = draw(placed(shape, draw(dtype), ranks)) if shape else Weight((), dtype=draw(dtype))
        weights.append(weight)
    return Group(weights, {**options, "use_muon": False})


@st.composite
def projections(draw: st.DrawFn, ranks: int) -> tuple[Group, dict[str, Any], int]:
    """A group, its ``clip_config``, and how many logits there are."""
    kv_heads, each = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim = draw(st.integers(1, 6))
    rows = (kv_heads * each * head_dim, kv_heads * head_dim)
    cols = draw(st.integers(1, min(20, min(rows))))
    mesh = draw(st.sampled_from(MESHES[ranks]))
    dims = tuple(draw(st.sampled_from([0, 1, None])) for _ in mesh)
    weights = [Weight((count, cols), mesh, dims) for count in rows]
    names = ("layers.0.attention.wq.weight", "layers.0.attention.wk.weight")
    config = {"head_dim": head_dim, "threshold": draw(st.sampled_from([1.0, 100]))}
    return Group(weights, draw(some_of(MUON_OPTIONS)), names), config, kv_heads * each


@st.composite
def cases(draw: st.DrawFn, ranks: int) -> Case:
    """Any training that a single process can take as well, to the same bits."""
    count = draw(st.integers(1, 3))
    # An update rounds once more in an fp32 weight than on an fp64 wire: all are wide, or none.
    wide = draw(st.integers(0, 3)) == 3
    groups: list[Group] = [draw(muon_groups(ranks, 0, wide))]
    for number in range(1, count):
        groups.append(draw(st.one_of(muon_groups(ranks, number, wide), adamw_groups(ranks))))
    options = draw(some_of(SETTINGS))
    logits = None
    if not wide and draw(st.integers(0, 2)) == 2:
        group, options["clip_config"], heads = draw(projections(ranks))
        groups.append(group)
        logit = st.sampled_from([0.5, 2.0, 1e3, 1e6, math.inf, math.nan, -math.inf])
        logits = [[draw(logit) for _ in range(heads)] for _ in range(STEPS)]
    # The mean of the same gradient of three ranks is that only but for rounding.
    replicas = draw(st.sampled_from([None, "DDP"] if ranks == 3 else [None, "DDP", "ZeRO-2"]))
    weights = [(weight, group) for group in groups for weight in group.weights]
    gradients = [
        [draw(st.sampled_from(gradients_of(weight, group))) for weight, group in weights]
        for _ in range(STEPS)
    ]
    frozen = [n for n in range(len(weights)) if draw(st.integers(0, 7)) == 7]
    options["comm_dtype"] = torch.float64 if wide else torch.float32
    return Case(groups, options, gradients, frozen, logits, replicas)


def gradients_of(weight: Weight, group: Group) -> list[str]:
    """What a gradient may be like where every rank is to do the same as one process."""
    found = [*MEMORY, "absent", "zeros", "tiny", "large"]
    is_muon = group.options.get("use_muon", True)
    if not is_muon or weight.dtype == torch.float16:
        found = [kind for kind in found if kind not in ("tiny", "large")]
    cut = weight.mesh is not None and all(
        dim is not None for dim, size in zip(weight.dims, weight.mesh) if size > 1
    )
    if is_muon and cut and group.options.get("missing_grad") == "zero":
        found.append("absent on one rank")
    return found


# -- garbage ---------------------------------------------------------------------------------------

TENSORS = [
    lambda: torch.ones(2, 2),
    lambda: torch.ones(()),
    lambda: torch.ones(0),
    lambda: torch.ones(3, dtype=torch.int64),
    lambda: torch.ones(4, 6, dtype=torch.bool),
    lambda: torch.ones(4, 6, dtype=torch.complex64),
    lambda: torch.ones(4, 6).to(torch.float8_e4m3fn),
    lambda: torch.ones(4, 6).to_sparse(),
    lambda: torch.ones(4, 6, device="meta"),
    lambda: torch.full((4, 6), math.nan),
    lambda: torch.ones(6, 4).mT,
    lambda: torch.ones(1, 6).expand(4, 6),
    lambda: torch.ones(2, 3, 4, requires_grad=True),
    lambda: torch.ones(4, 6, requires_grad=True),
    lambda: torch.ones(4, 6, requires_grad=True) * 2,
    lambda: torch.quantize_per_tensor(torch.ones(4, 6), 0.1, 0, torch.qint8),
]


def garbage_tensors() -> st.SearchStrategy[torch.Tensor]:
    return st.integers(0, len(TENSORS) - 1).map(lambda index: TENSORS[index]())


def garbage() -> st.SearchStrategy[Any]:
    """Anything; among it values that mean something."""
    # Not more steps of the iteration than it takes to see what they do.
    numbers = st.one_of(st.integers(-3, 9), st.just(10**400), st.floats(), st.just(Fraction(1, 3)))
    words = ["auto", "none", "zero", "skip", "gram", "torch.bfloat16", "torch.nn", "experts", ""]
    simple = st.one_of(
        st.none(),
        st.booleans(),
        numbers,
        st.sampled_from(words),
        st.text(max_size=3),
        st.binary(max_size=3),
        st.sampled_from([torch.int8, torch.float64, torch.float8_e5m2, torch.complex32]),
        st.just(1 + 2j),
        st.builds(np.float32, st.floats(-1, 1, width=16)),
        st.builds(np.ones, st.integers(0, 3)),
        st.builds(object),
        st.just(int),
        st.just(str),
        st.builds(Decimal, st.just("0.5")),
        garbage_tensors(),
    )
    return st.recursive(
        simple,
        lambda below: st.one_of(
            st.lists(below, max_size=3),
            st.lists(below, max_size=3).map(tuple),
            st.dictionaries(st.one_of(st.text(max_size=2), st.integers(0, 3)), below, max_size=2),
        ),
        max_leaves=5,
    )


def qk_garbage() -> st.SearchStrategy[Any]:
    """Candidates for logits of two layers with two heads each; most are invalid."""
    keys = [0, 1, "layers.0", "layers.1", "layers", True, 0.0, (0,), None, torch.tensor(0)]
    key = st.one_of(st.sampled_from(keys), st.integers(), st.text(max_size=3))
    number = st.one_of(st.floats(), st.integers(-3, 3), garbage())
    value = st.one_of(
        st.lists(st.floats(width=16), min_size=2, max_size=2).map(torch.tensor),
        st.lists(number, min_size=2, max_size=2),
        garbage(),
    )
    pairs = st.fixed_dictionaries({0: value, 1: value})
    return st.one_of(pairs, st.dictionaries(key, value, max_size=3), garbage())


def clip_garbage() -> st.SearchStrategy[Any]:
    """Draws `clip_config`s for two query heads and one key head, with two rows each."""
    heads = st.one_of(st.lists(st.integers(-1, 3), max_size=3), st.just(range(2)), garbage())
    rows = st.dictionaries(st.sampled_from(["wq", "x", "wqkv"]), garbage(), max_size=2)
    known = {
        "head_dim": st.one_of(st.integers(0, 3), garbage()),
        "threshold": st.one_of(st.floats(), garbage()),
        "q_indices": heads,
        "k_indices": heads,
        "is_mla": st.one_of(st.booleans(), garbage()),
        "qk_nope_head_dim": st.integers(-1, 2),
        "qk_rope_head_dim": st.integers(-1, 2),
        "v_head_dim": st.integers(-1, 2),
        "row_map": st.one_of(rows, garbage()),
    }
    of_layer = st.fixed_dictionaries({"head_dim": known.pop("head_dim")}, optional=known)
    by_layer = st.dictionaries(st.sampled_from([0, 1, "layers.0", None, 2.5]), of_layer, max_size=2)
    return st.one_of(of_layer, by_layer, garbage())
