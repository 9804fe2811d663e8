"""ZeRO-2: means of gradients by rows, rows gathered back, AdamW with state divided over ranks."""

from __future__ import annotations

import itertools
import math
import random
import warnings
import weakref
from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from counters import count
from kernel import optimizer
from layouts import ADAMW_ROUNDING, case, local
from ranks import run_ranks

adamw = optimizer.adamw
specs = optimizer.state.specs
replicas, zero2 = (
    import_module(f"{optimizer.__name__}.distributed.{m}") for m in ("replicas", "zero2")
)
shard_interval = optimizer.regions.shard_interval
MeanGradients, RowAllGather, is_divided = (
    zero2.MeanGradients,
    zero2.RowAllGather,
    replicas.is_divided,
)

SMALL_BUCKET = 64 << 10  # so that few bytes fill several
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Even and uneven, fewer rows than ranks, one row, nothing, small ones.
SHAPES = [
    *((64, 32), (7, 300), (5, 1024), (3, 400), (1, 2000), (129, 3, 5), (2048,), (1025,)),
    *((0, 5), (6, 0), (0,), (10,), (1,), ()),
]


def numbers(shape: Sequence[int], dtype: torch.dtype, seed: Any, exact: bool) -> torch.Tensor:
    """Random ones; or multiples of 2^-8, few enough that sums over 8 ranks are exact in bf16."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**60)
    if exact:
        integers = torch.randint(-16, 16, tuple(shape), generator=generator)
        return (integers.double() / 256).to(dtype)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def rows_here(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    return tensor[slice(*shard_interval(len(tensor), ranks, rank))]


def in_small_buckets(fn: Callable[..., Any], *args: Any) -> Any:
    """For ranks, which are processes of their own. torch's warnings are errors there."""
    zero2.BUCKET_BYTES["cpu"] = SMALL_BUCKET
    warnings.simplefilter("error")
    return fn(*args)


def run_in_small_buckets(fn: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    return run_ranks(in_small_buckets, ranks, fn, *args)


class Replicas:
    """Parameters of this rank, their gradients, and the float64 means over a group.

    ``divided=None`` divides what has rows, as for Muon's matrices; else by `is_divided`. Some
    gradients are transposed in memory, expanded or, on some ranks, missing.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        group: Any = None,
        exact: bool = False,
        by_size: bool = False,
        odd: bool = True,
    ):
        self.group, self.ranks = group, dist.get_world_size(group)
        self.params, self.means, self.divided = [], [], []
        for number, (shape, dtype) in enumerate(zip(shapes, itertools.cycle(dtypes))):
            grads = []
            for rank in range(self.ranks):
                grad = numbers(shape, dtype, (number, rank), exact)
                if odd and number % 3 == 1:  # strides of another order
                    grad = grad.movedim(0, -1).contiguous().movedim(-1, 0) if shape else grad
                if odd and number % 5 == 4 and 0 not in shape:
                    grad = grad.flatten()[0].expand(shape)
                if odd and number % 4 == 3 and (rank + number) % 3 == 0:
                    grad = None
                grads.append(grad)
            self.params.append(nn.Parameter(torch.zeros(shape, dtype=dtype)))
            self.params[-1].grad = grads[dist.get_rank(group)]
            wide = torch.promote_types(dtype, torch.float64)
            present = (g.to(wide) for g in grads if g is not None)
            self.means.append(sum(present, torch.zeros(shape, dtype=wide)) / self.ranks)
            self.divided.append(is_divided(shape, self.ranks) if by_size else len(shape) > 0)

    def averaging(self, **kwargs: Any) -> Any:
        return MeanGradients(self.params, self.divided, self.group, **kwargs)

    def expected(self, index: int) -> torch.Tensor:
        mean = self.means[index]
        return rows_here(mean, self.group) if self.divided[index] else mean

    def check(self, results: Sequence[torch.Tensor], exact: bool) -> None:
        for index, (result, param) in enumerate(zip(results, self.params)):
            with case(f"{tuple(param.shape)}, {param.dtype}, {self.ranks} ranks"):
                expected = self.expected(index)
                assert result.dtype == param.dtype and result.is_contiguous()
                assert result.shape == expected.shape
                # Each of the sums of P numbers is rounded, and what they are summed to.
                atol = 0.0 if exact else self.ranks * 4 * torch.finfo(param.dtype).eps
                torch.testing.assert_close(result.to(expected.dtype), expected, rtol=0, atol=atol)


def launch_through(means: Any, index: int) -> None:
    while means.launched < means.bucket_plan.prefix_counts[index + 1]:
        means.launch()


def results_of(means: Any, count: int) -> list[torch.Tensor]:
    results = []
    for index in range(count):
        launch_through(means, index)
        results.append(means.result(index))
    return results


# What is divided, and what travels together


@pytest.mark.kernels_ci
def test_small_tensors_and_those_of_few_rows_are_not_divided():
    assert is_divided((1024,), 4) and is_divided((4, 256), 4) and is_divided((32, 8, 4), 8)
    assert not is_divided((1023,), 4)
    assert not is_divided((3, 4096), 4)
    assert not is_divided((), 1)
    assert not is_divided((0, 4096), 1)


# Means


def average(shapes: Any, dtypes: Any, exact: bool, by_size: bool) -> None:
    replicas = Replicas(shapes, dtypes, exact=exact, by_size=by_size)
    replicas.check(results_of(replicas.averaging(), len(shapes)), exact)


@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_means_whose_sums_are_exact_are_exact(ranks, by_size):
    run_in_small_buckets(average, ranks, SHAPES * 4, DTYPES, True, by_size)


def test_means_of_any_numbers_are_those_of_float64_within_rounding():
    run_in_small_buckets(average, 4, SHAPES * 4, DTYPES, False, False)
    run_in_small_buckets(average, 4, SHAPES, [torch.complex64], True, False)


def average_in_groups() -> None:
    rank = dist.get_rank()
    for sets in ([[0], [1, 2, 3]], [[1, 3], [0, 2]], [[0], [1], [2], [3]]):
        groups = [dist.new_group(ranks) for ranks in sets]
        group = next(group for group, ranks in zip(groups, sets) if rank in ranks)
        replicas = Replicas(SHAPES, DTYPES, group, exact=False)
        replicas.check(results_of(replicas.averaging(), len(SHAPES)), exact=False)
        update_own_rows_and_gather(group)


def test_groups_may_be_parts_of_the_world_and_single_ranks():
    run_in_small_buckets(average_in_groups, 4)


def average_large_fp16() -> torch.Tensor:
    params = [nn.Parameter(torch.zeros(s, dtype=torch.float16)) for s in ((64, 64), (3,))]
    for p in params:
        p.grad = torch.full_like(p, 60000.0)
    results = results_of(MeanGradients(params, [True, False], None), 2)
    assert all(bool((p.grad == 60000.0).all()) for p in params)
    return torch.cat([r.flatten() for r in results])


def test_fp16_sums_do_not_overflow():
    for means in run_ranks(average_large_fp16, 2):
        assert bool((means == 60000.0).all())


def keep_gradients() -> None:
    replicas = Replicas(SHAPES * 2, DTYPES, odd=True)
    grads = [p.grad for p in replicas.params]
    before = [None if g is None else (g.clone(), g._version) for g in grads]
    for result in results_of(replicas.averaging(), len(grads)):
        result.zero_()
    for grad, old, p in zip(grads, before, replicas.params):
        assert p.grad is grad
        if grad is not None:
            assert torch.equal(grad, old[0]) and grad._version == old[1]


def test_gradients_are_not_changed():
    run_in_small_buckets(keep_gradients, 2)


def average_conjugated() -> None:
    """Lazily conjugated gradients, and negated ones, hold other numbers in memory."""
    params = [torch.zeros(64, 32, dtype=dtype) for dtype in (torch.complex64, torch.float32)]
    params[0].grad = torch.full((64, 32), 1 + 2j).conj()
    params[1].grad = torch._neg_view(torch.ones(64, 32))
    means = MeanGradients(params, [True, True], dist.group.WORLD)
    assert bool((results_of(means, 2)[0] == 1 - 2j).all())
    means = MeanGradients(params[1:], [True], dist.group.WORLD)
    assert bool((results_of(means, 1)[0] == -1).all())


def test_lazily_conjugated_gradients():
    run_ranks(average_conjugated, 2)


def free_gradients() -> None:
    shapes = [(64, 32), (7, 300), (5,), (128, 512), (128, 512)]  # the last fill buckets
    replicas = Replicas(shapes, [torch.float32], odd=False, exact=True, by_size=True)
    params = replicas.params
    alive = [weakref.ref(p.grad.untyped_storage()) for p in params]
    held = params[4].grad
    content, read = held.clone(), []

    def on_read(index: int) -> None:
        read.append(index)
        params[index].grad = None

    means = replicas.averaging(on_read=on_read)
    launch_through(means, 4)
    assert sorted(read) == list(range(5))
    assert [ref() is None for ref in alive] == [True, True, True, False, False]
    results = [means.result(index) for index in range(5)]
    replicas.check(results, exact=True)
    assert [ref() is None for ref in alive] == [True, True, True, True, False]
    assert torch.equal(held, content)


def test_gradients_can_go_once_they_were_read():
    run_in_small_buckets(free_gradients, 2)


def launches(seed_by_rank: bool) -> list[tuple[str, float]]:
    """Names and bytes of all collectives; results are asked for in an order of each rank's own."""
    shapes = [(random.Random(i).randrange(1, 300), 70) for i in range(30)] + SHAPES
    replicas = Replicas(shapes, DTYPES, exact=True, odd=False)
    choose = random.Random(dist.get_rank() if seed_by_rank else 0)
    results: dict[int, torch.Tensor] = {}

    def run() -> None:
        means = replicas.averaging()
        for last in (0, 7, 3, 21, len(shapes) - 1):
            launch_through(means, last)
            ready = [i for i in range(last + 1) if i not in results]
            for index in choose.sample(ready, len(ready) // 2):
                results[index] = means.result(index)
        for index in set(range(len(shapes))) - set(results):
            results[index] = means.result(index)

    counter = count(run)
    replicas.check([results[i] for i in range(len(shapes))], exact=True)
    return [(c.name, c.sent) for c in counter.collectives]


def test_collectives_come_in_one_order_whichever_results_ranks_ask_for_first():
    found = run_in_small_buckets(launches, 4, True)
    assert all(of_rank == found[0] for of_rank in found)
    assert len(found[0]) > 8
    assert run_in_small_buckets(launches, 4, False)[0] == found[0]


# What it costs


def cost_of_means(shapes: Any, dtype: torch.dtype, by_size: bool) -> Any:
    replicas = Replicas(shapes, [dtype], by_size=by_size, odd=False)

    def run() -> None:
        means = replicas.averaging()
        launch_through(means, len(shapes) - 1)
        results_of(means, len(shapes))

    counter = count(run)
    return counter.peak_bytes, [(c.name, c.sent) for c in counter.messages]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_moves_one_reduce_scatter_of_the_gradients(dtype):
    shapes = [(64, 96), (256, 32), (128,), (2048,), (10,), ()]
    for _, messages in run_in_small_buckets(cost_of_means, 4, shapes, dtype, True):
        (divided, _), (whole, _) = ((name, sent) for name, sent in messages)
        assert ("reduce_scatter" in divided, "allreduce" in whole) == (True, True)
        divided_numel = sum(math.prod(s) for s in shapes if is_divided(s, 4))
        whole_numel = sum(math.prod(s) for s in shapes if not is_divided(s, 4))
        sent = [sent for _, sent in messages]
        assert sent == [
            divided_numel * dtype.itemsize * 3 / 4,
            whole_numel * dtype.itemsize * 2 * 3 / 4,
        ]


def test_staging_is_a_few_buckets_and_none_for_large_even_gradients():
    small, large = [(30, 64)] * 64, [(128, 512)] * 4
    staging = zero2.BUCKETS_IN_FLIGHT * SMALL_BUCKET
    for shapes, bound in ((small, staging), (large, 1024)):
        for peak, messages in run_in_small_buckets(cost_of_means, 4, shapes, torch.float32, True):
            numels = [-(-rows // 4) * cols for rows, cols in shapes]
            assert len(messages) >= 4
            assert peak <= sum(numels) * 4 + bound


# Rows


ROWS = [
    *((64, 32), (7, 300), (5, 1024), (3, 40), (1, 20), (129, 3, 5), (2048,), (1025,)),
    *((0, 5), (6, 0), (0,), (2,), (128, 512)),
]


def update_own_rows_and_gather(group: Any) -> None:
    rank = dist.get_rank(group)
    whole, tensors = [], []
    for number, (shape, dtype) in enumerate(zip(ROWS, itertools.cycle(DTYPES))):
        whole.append(numbers(shape, dtype, number, exact=False))
        tensor = torch.full(shape, float("nan"), dtype=dtype)
        if number % 3 == 1:
            tensor = tensor.movedim(0, -1).contiguous().movedim(-1, 0)
        if number % 5 == 4:
            tensor = tensor.repeat_interleave(2, dim=-1)[..., ::2]
        rows_here(tensor, group).copy_(rows_here(whole[-1], group))
        tensors.append(nn.Parameter(tensor))
    versions = [t._version for t in tensors]
    with torch.no_grad():
        gathering = RowAllGather(tensors, group)
        gathering.launch()
        gathering.wait()
        gathering.wait()
    for tensor, expected, version in zip(tensors, whole, versions):
        with case(f"{tuple(expected.shape)}, {expected.dtype}, rank {rank}"):
            assert torch.equal(tensor, expected)
            others = tensor.numel() > rows_here(tensor, group).numel()
            assert tensor._version > version or not others


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_of_any_tensor_reach_all_ranks(ranks):
    run_in_small_buckets(update_own_rows_and_gather, ranks, None)


def gather_and_change() -> None:
    tensors = [torch.full((9, 200), float(dist.get_rank())) for _ in range(3)]
    gathering = RowAllGather(tensors, None)
    gathering.launch()
    for tensor in tensors:
        rows_here(tensor).fill_(7.0)
    gathering.wait()
    for tensor in tensors:
        assert bool((rows_here(tensor) == 7.0).all())


def test_rows_of_a_rank_changed_meanwhile_stay_so_on_it():
    run_ranks(gather_and_change, 4)


def cost_of_gathering(shapes: Any) -> Any:
    tensors = [torch.zeros(shape) for shape in shapes]

    def gather() -> None:
        gathering = RowAllGather(tensors, None)
        gathering.launch()
        gathering.wait()

    counter = count(gather)
    return counter.peak_bytes, [(c.name, c.sent) for c in counter.messages]


def test_gathering_sends_each_rank_the_rows_once_with_little_staging():
    small, large = [(32, 60)] * 64, [(128, 512)] * 4
    staging = zero2.BUCKETS_IN_FLIGHT * SMALL_BUCKET
    for shapes, bound in ((small, staging), (large, 1024)):  # the latter are received in place
        for peak, messages in run_in_small_buckets(cost_of_gathering, 4, shapes):
            assert all("allgather" in name for name, _ in messages)
            assert sum(sent for _, sent in messages) == sum(a * b * 4 * 3 / 4 for a, b in shapes)
            assert len(messages) >= 4
            assert peak <= bound


# AdamW

MODEL = [
    *((1000, 64), (64, 192), (192, 64), (7, 300), (65, 33), (1027,), (64,), (192,), (3, 900), ()),
]

OPTIONS: dict[str, dict[str, Any]] = {
    "fused": {},
    "maximize": {"maximize": True},
    "tensor lr": {"lr": torch.tensor(0.02)},
}


def group_of(params: Sequence[torch.Tensor], **options: Any) -> Any:
    group = {"params": list(params), "use_muon": False}
    return optimizer.Muon([group], **{"lr": 0.02, **options})._read_groups()[0]


def init_state(
    param: torch.Tensor, own: dict[str, torch.Tensor], group: Any, divided: Any = None
) -> None:
    """What a step makes first, of one AdamW parameter, with the replicas that divide it."""
    adamw.init_step(param, own, group)
    wide = SimpleNamespace(replicas=divided, zero2_replicas=divided)
    for key, spec in specs.specs_of(param, None, group, wide).items():
        own[key] = specs.zeros(spec, param)


class Training:
    """AdamW of replicas with divided state, beside torch's of the same parameters and means."""

    def __init__(self, shapes: Any, options: dict[str, Any], transposed: bool = False):
        def initial(number: int, shape: tuple[int, ...]) -> nn.Parameter:
            value = numbers(shape, torch.float32, number, exact=False)
            return nn.Parameter(
                value.mT.contiguous().mT if transposed and value.ndim > 1 else value
            )

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.params = [initial(*item) for item in enumerate(shapes)]
        self.twins = [initial(*item) for item in enumerate(shapes)]
        group = {"params": self.params, "use_muon": False}
        replicated = {"process_group": mesh, "grad_reduce": "mean"}
        self.optim = optimizer.Muon([group], **{"lr": 0.02, **options}, **replicated)
        self.state, options = self.optim.state, self.optim.param_groups[0]
        self.reference = torch.optim.AdamW(
            self.twins,
            lr=options["lr"],
            betas=options["adamw_betas"],
            eps=options["adamw_eps"],
            weight_decay=options["weight_decay"],
            maximize=options["maximize"],
            fused=False,
            foreach=False,
        )

    @torch.no_grad()
    def step(self, seed: int) -> None:
        ranks = dist.get_world_size()
        for number, (p, q) in enumerate(zip(self.params, self.twins)):
            grads = [numbers(p.shape, p.dtype, (number, seed, r), True) for r in range(ranks)]
            p.grad, q.grad = grads[dist.get_rank()], sum(grads) / ranks
        self.optim.step()
        self.reference.step()


def train(shapes: Any, options: dict[str, Any], transposed: bool = False) -> list[torch.Tensor]:
    training = Training(shapes, options, transposed)
    versions = [p._version for p in training.params]
    for seed in range(3):
        training.step(seed)
    for p, q, version in zip(training.params, training.twins, versions):
        with case(f"{tuple(p.shape)}, {options}"):
            torch.testing.assert_close(p, q, rtol=0.0, atol=ADAMW_ROUNDING)
            assert p._version > version
            assert p.stride() == q.stride()
            state, expected = training.state[p], training.reference.state[q]
            assert state["step"].item() == 3
            for key in ("exp_avg", "exp_avg_sq"):
                moment = state[key]
                assert isinstance(moment, DTensor) == is_divided(p.shape, dist.get_world_size())
                if isinstance(moment, DTensor):
                    assert moment.shape == p.shape and moment.placements == (Shard(0),)
                    assert local(moment).shape == rows_here(p).shape
                    moment = moment.full_tensor()
                torch.testing.assert_close(moment, expected[key], rtol=0.0, atol=ADAMW_ROUNDING)
    return [p.detach() for p in training.params]


def assert_bit_identical(of_ranks: Sequence[Sequence[torch.Tensor]]) -> None:
    for replicas in zip(*of_ranks):
        assert all(torch.equal(replica, replicas[0]) for replica in replicas)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_adamw_with_divided_state_is_adamw_and_keeps_replicas_identical(options):
    assert_bit_identical(run_in_small_buckets(train, 4, MODEL, options))


def test_adamw_divides_over_2_ranks_and_updates_tensors_of_other_strides():
    assert_bit_identical(run_in_small_buckets(train, 2, MODEL, {}))
    assert_bit_identical(run_in_small_buckets(train, 2, MODEL, {}, True))


def train_beside_dtensors() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = numbers((10, 300), torch.float32, 0, exact=False)
    sharded = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    replica = nn.Parameter(whole.clone())
    twins = [nn.Parameter(whole.clone()), nn.Parameter(whole.clone())]
    grad = numbers((10, 300), torch.float32, 1, exact=True)
    sharded.grad = distribute_tensor(grad, mesh, [Shard(0)])
    replica.grad = grad
    for p in twins:
        p.grad = grad
    replicated = {"process_group": mesh, "grad_reduce": "mean", "consistency_check": "off"}
    group = {"params": [sharded, replica], "use_muon": False}
    ours = optimizer.Muon([group], lr=0.02, **replicated)
    optimizer.Muon([{"params": twins, "use_muon": False}], lr=0.02).step()
    before = sharded._version
    counter = count(ours.step)
    assert ours.state[sharded]["exp_avg"].placements == sharded.placements
    names = [c.name for c in counter.messages]
    assert ["reduce" in name for name in names] == [True, False]  # of the replica alone
    assert sharded._version > before
    torch.testing.assert_close(sharded.full_tensor(), twins[0], rtol=0, atol=ADAMW_ROUNDING)
    torch.testing.assert_close(replica, twins[1], rtol=0, atol=ADAMW_ROUNDING)


def test_dtensors_in_the_same_group_are_updated_without_traffic():
    run_ranks(train_beside_dtensors, 4)


def state_bytes() -> tuple[int, int, int]:
    """Held, held at most while it was made, and of undivided state."""
    ranks, width = dist.get_world_size(), 256
    shapes = [(50257, width), (1024, width), (width,)]  # a small GPT-2, all of it
    for _ in range(6):
        shapes += [(3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,)]
        shapes += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    params = [nn.Parameter(torch.empty(shape)) for shape in shapes]
    options = group_of(params)
    mesh: DeviceMesh = init_device_mesh("cpu", (ranks,))
    state: list[dict[str, torch.Tensor]] = [{} for _ in params]

    def make() -> None:
        for p, own in zip(params, state):
            init_state(p, own, options, replicas.Replicas(mesh))

    peak = count(make).peak_bytes
    moments = [local(own[key]) for own in state for key in ("exp_avg", "exp_avg_sq")]
    held = sum(moment.untyped_storage().nbytes() for moment in moments)
    return held, peak, 2 * sum(p.numel() * 4 for p in params)


def test_adamw_holds_its_share_of_the_state_and_never_more():
    for held, peak, whole in run_ranks(state_bytes, 4):
        assert held <= 1.01 * whole / 4
        assert peak <= 1.01 * held


def average_gradients_of_any_dtype() -> None:
    torch.set_num_threads(1)
    params = [nn.Parameter(torch.zeros(64, 32, dtype=torch.bfloat16)) for _ in range(3)]
    groups = [{"params": params[:2], "use_muon": True, "momentum": 0.0, "missing_grad": "zero"}]
    groups.append({"params": params[2:], "use_muon": False, "weight_rounding": "exact"})
    optim = optimizer.Muon(groups, process_group=dist.group.WORLD, grad_reduce="mean")
    grads = [
        [numbers((64, 32), torch.float32, (number, rank), False) for rank in range(2)]
        for number in range(3)
    ]
    grads[1][1] = None
    for param, by_rank in zip(params, grads):
        param.grad_dtype = None
        param.grad = by_rank[dist.get_rank()]
    optim.step()
    for param, by_rank in zip(params, grads):
        mean = sum(grad for grad in by_rank if grad is not None) / 2
        state = optim.state[param]
        average = state["momentum_buffer"] if "exp_avg" not in state else state["exp_avg"] / 0.1
        assert average.dtype == torch.float32
        torch.testing.assert_close(local(average), rows_here(mean))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have one dtype")
def test_fp32_gradients_of_bf16_weights_that_take_any_dtype_are_averaged_in_fp32():
    run_ranks(average_gradients_of_any_dtype, 2)
