"""What only a device shows of whole steps, in a minute or two: checks, and figures beside a floor.

    python scripts/gpu_checks.py --out FOLDER      # after `make build`; `make gpu` runs it
    python scripts/gpu_checks.py --out FOLDER --only offload waits

- cold: the first step's seconds with an empty Triton cache, and what compiling took of them.
- float64: one default step of odd shapes beside float64's polynomial of singular values.
- kernels: steps by Triton's kernels beside the same steps by torch's operations.
- repeat: the same steps twice, to the bit.
- offload: streamed steps, to the bit those without offload.
- waits: steps under torch's sync debug mode "error", which sees no wait for an event.
- rank: rank 0 of 8 of Llama 3 8B under FSDP2's layout, all but the wire: random numbers stand for
  what it receives. Its packing, batches and launches beside the floor of benchmarks/step.py, how
  long the host takes, and where the device's time goes, kernel by kernel (profile.txt, and
  trace.json.gz).

A check that fails stops no other; the exit code is 1 then. With --small sizes are tiny, and figures
say nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from benchmark import TOLERANCE, polynomial_of_singular_values
from step import OURS, flops_of_forms, of_model, share_of
from timing import (
    COPIED,
    DEFAULT_COPIED,
    Ceilings,
    least_sample,
    load_kernel,
    milliseconds,
    pick_device,
    seconds_of,
    show,
    synchronize,
    take_turns,
)

RANKS = 8
NO_WAIT = "no wait that torch reports"
NUMBERS = "random numbers in the place of traffic"
FP32, BF16 = torch.float32, torch.bfloat16
Shape = tuple[int, ...]

LARGE: list[Shape] = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
SMALL: list[Shape] = [(32, 48), (16, 32), (96, 32), (32, 96)]
ODD: list[Shape] = [(768, 768), (512, 2048), (1536, 384), (255, 650)]
SMALL_ODD: list[Shape] = [(64, 96), (96, 64), (33, 50)]

# Of steps that are repeated: the weights' dtype, and options.
STEPS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (FP32, {}),
    (BF16, {"weight_rounding": "exact", "beta2": 0.95}),
    (FP32, {"beta2": 0.95, "cautious": True}),
]


class Checks:
    """What the checks share, and what they found.

    Args:
        kernel: the package.
        options: of the command line.
    """

    def __init__(self, kernel: Any, options: argparse.Namespace) -> None:
        self.kernel, self.small, self.out = kernel, options.small, options.out
        self.device = pick_device()
        self.has_kernels = kernel.triton_kernels.is_used_on(self.device.type)
        self.rows: list[list[str]] = []

    def note(self, check: str, what: str, value: float | str, unit: str = "") -> None:
        text = value if isinstance(value, str) else f"{value:.4g}"
        self.rows.append([check, what, text, unit])
        print(f"  {check}: {what}: {text} {unit}", flush=True)

    def randn(self, shape: Shape, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=self.device).to(dtype)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def params(self, shapes: Iterable[Shape], dtype: torch.dtype = FP32) -> list[nn.Parameter]:
        """With gradients."""
        generator, found = self.generator(0), []
        for shape in shapes:
            param = nn.Parameter(self.randn(shape, generator, dtype).mul_(0.02))
            param.grad = self.randn(shape, generator, dtype)
            found.append(param)
        return found

    def muon(self, params: Sequence[Any], **options: Any) -> Any:
        group = {"params": params, "use_muon": True, "none_grad": False}
        return self.kernel.Muon([group], **{"lr": 1e-2, "weight_decay": 0.1, **options})

    def steps(
        self, dtype: torch.dtype = FP32, offload: bool = False, count: int = 4, **options: Any
    ) -> list[Tensor]:
        """Weights after steps with gradients that are the same whenever this is called."""
        shapes = SMALL if self.small else LARGE
        params = self.params(shapes, dtype)
        others = self.params([(1000, shapes[0][1]), (shapes[0][0],)], dtype)
        groups = [{"params": params, "use_muon": True}, {"params": others, "use_muon": False}]
        optim = self.kernel.Muon(groups, lr=1e-2, weight_decay=0.1, **options)
        if offload:
            optim.turn_on_cpu_offload()
        generator = self.generator(1)
        for _ in range(count):
            for param in (*params, *others):
                param.grad = self.randn(param.shape, generator, dtype)
            optim.step()
        synchronize()
        return [param.detach().clone() for param in (*params, *others)]


def words(dtype: torch.dtype, options: dict[str, Any]) -> str:
    """For a row of the table."""
    return ", ".join([str(dtype).removeprefix("torch."), *options])


@contextmanager
def without_waits(device: torch.device) -> Iterator[None]:
    """What makes the host wait for the device is an error."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- checks ----------------------------------------------------------------------------------------


def cold(checks: Checks) -> None:
    compiled: list[float] = []

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(times.total / 1e6)

    optim = checks.muon(checks.params(SMALL if checks.small else LARGE))
    if not checks.has_kernels:
        checks.note("cold", "first step", seconds_of(optim.step, 1), "s")
        return
    from triton import knobs

    with knobs.compilation.scope():
        knobs.compilation.listener = listen
        checks.note("cold", "first step, nothing compiled before", seconds_of(optim.step, 1), "s")
        checks.note("cold", "kernels compiled in it", len(compiled))
        checks.note("cold", "time of compiling in it", sum(compiled), "s")
        assert compiled, "no kernel was compiled: the first step was another one"
        first = len(compiled)
        for _ in range(3):
            optim.step()
        checks.note("cold", "kernels compiled in three more steps", len(compiled) - first)


def float64(checks: Checks) -> None:
    for dtype in (FP32, BF16):
        params = checks.params(SMALL_ODD if checks.small else ODD, dtype)
        before = [param.detach().double().clone() for param in params]
        lr = 1e-2 if dtype == FP32 else 1.0  # so that weights in bf16 show the update
        checks.muon(params, lr=lr, weight_decay=0.0).step()
        for param, old in zip(params, before):
            assert param.grad is not None
            update = polynomial_of_singular_values(checks.kernel, param.grad.float()[None])[0]
            expected = -lr * 0.2 * max(param.shape) ** 0.5 * update.double()
            error = (param.detach().double() - old - expected).norm() / expected.norm()
            what = f"{tuple(param.shape)} {dtype}: relative error".replace("torch.", "")
            checks.note("float64", what, error.item())
            assert error.item() < TOLERANCE, f"{what} {error.item()}"


def kernels(checks: Checks) -> None:
    """Both ways compute the same formulas, and round in other places."""
    if not checks.has_kernels:
        checks.note("kernels", "Triton's are not used here", "–")
        return
    shapes, weights = SMALL if checks.small else LARGE, []
    for what, triton in (("Triton's kernels", True), ("torch's operations", False)):
        params = checks.params(shapes)
        optim = checks.muon(params, triton=triton)
        for _ in range(2):
            optim.step()
        least = min(seconds_of(optim.step, 1) for _ in range(3))
        checks.note("kernels", f"step by {what}", least * 1e3, "ms")
        weights.append([param.detach().clone() for param in params])
    for start, one, other in zip(checks.params(shapes), *weights):
        off = ((one - other).norm() / (one - start.detach()).norm()).item()
        what = f"{tuple(one.shape)}: difference / change of weights"
        checks.note("kernels", what, off)
        assert off < TOLERANCE, f"{what} {off}"


def repeat(checks: Checks) -> None:
    for dtype, options in STEPS:
        one, two = (checks.steps(dtype, **options) for _ in range(2))
        what = words(dtype, options)
        assert all(map(torch.equal, one, two)), f"{what}: other bits"
        assert all(bool(weight.isfinite().all()) for weight in one), f"{what}: not finite"
        checks.note("repeat", what, "the same bits")


def offload(checks: Checks) -> None:
    for dtype, options in STEPS[:2]:
        plain = checks.steps(dtype, **options)
        streamed = checks.steps(dtype, offload=True, **options)
        what = words(dtype, options)
        assert all(map(torch.equal, plain, streamed)), f"{what}: other bits if streamed"
        checks.note("offload", what, "the bits of steps without offload")


def waits(checks: Checks) -> None:
    for is_offloaded in (False, True):
        params = checks.params(SMALL if checks.small else LARGE)
        others = checks.params([(1000, 512), (512,)])
        groups = [
            {"params": params, "use_muon": True, "none_grad": False},
            {"params": others, "use_muon": False},
        ]
        optim = checks.kernel.Muon(groups, lr=1e-3)
        if is_offloaded:
            optim.turn_on_cpu_offload()
        optim.step()  # makes state
        with without_waits(checks.device):
            for _ in range(2):
                optim.step()
        checks.note("waits", "streamed" if is_offloaded else "no offload", NO_WAIT)


def rank(checks: Checks) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        received = Received()
        with patch.object(dist, "all_to_all_single", received):
            step_of_rank(checks, received)
    finally:
        dist.destroy_process_group()


class Received:
    """In the place of an all-to-all: normal values, since zeros are multiplied faster.

    They take time that a step without traffic would not.
    """

    def __init__(self) -> None:
        self.sizes: list[tuple[int, torch.dtype]] = []

    def __call__(self, received: Tensor, *_: Any, **__: Any) -> Any:
        self.sizes.append((received.numel(), received.dtype))
        received.normal_()
        return SimpleNamespace(wait=lambda: None)

    def again(self, device: torch.device) -> Callable[[], None]:
        """What was received since the beginning, once more."""
        parts = [torch.empty(numel, dtype=dtype, device=device) for numel, dtype in self.sizes]

        def call() -> None:
            for part in parts:
                part.normal_()

        return call


def step_of_rank(checks: Checks, received: Received) -> None:
    optim, floor_of, params = rank_of_llama(checks)
    ceilings = Ceilings(
        checks.device,
        [floor_of.dtype],
        [32] if checks.small else None,
        1 << 20 if checks.small else COPIED.get(checks.device.type, DEFAULT_COPIED),
    )
    checks.note("rank", "first step", seconds_of(optim.step, 1), "s")
    received.sizes.clear()
    optim.step()
    numbers = received.again(checks.device)
    calls = {OURS: optim.step, NUMBERS: numbers, **ceilings.contenders}
    rounds = 1 if checks.small else 5
    seconds = take_turns(calls, rounds, least_sample(checks.device))
    ceilings.take(seconds)
    host = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        optim.step()
        host.append(time.perf_counter() - start)
    synchronize()
    floor = floor_of.flops / ceilings.flops_per_second(floor_of.dtype)
    floor += floor_of.nbytes / ceilings.bytes_per_second()
    least = min(seconds[OURS])
    over_floor = (least - min(seconds[NUMBERS])) / floor
    rows = [
        [OURS, *milliseconds(seconds[OURS]), milliseconds(host)[0], f"{over_floor:.3f}"]
        + [f"{min(host) / least:.3f}"],
        [f"of these, {NUMBERS}", *milliseconds(seconds[NUMBERS]), "–", "–", "–"],
        ["floor", milliseconds([floor])[0], "–", "–", "1.00", "–"],
    ]
    columns = ("optimizer", "least ms", "median ms", "host, least ms", "× floor", "host / step")
    title = f"Rank 0 of {RANKS}, llama-3-8b, fp32: all but the wire; × floor without the numbers"
    show(title, columns, rows)
    print(ceilings.tell())
    with without_waits(checks.device):
        optim.step()
    checks.note("rank", "the step of a rank", NO_WAIT)
    for param in params:
        assert param.to_local().isfinite().all(), "weights are not finite"
    profile(checks, optim.step)


@dataclass(frozen=True)
class Floor:
    """What a rank's step can't do without.

    Args:
        flops: of the matrices that it orthogonalizes.
        nbytes: of its parts of weights, gradients and momentum, as benchmarks/step.py counts them.
        dtype: of the arithmetic.
    """

    flops: int
    nbytes: int
    dtype: torch.dtype


def rank_of_llama(checks: Checks) -> tuple[Any, Floor, list[Any]]:
    """The optimizer of rank 0's parts of Llama 3 8B's matrices, with gradients; its parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh, generator = init_device_mesh(checks.device.type, (RANKS,)), checks.generator(0)
    shapes = [(4 * rows, cols) for rows, cols in SMALL] * 8
    if not checks.small:
        shapes = [(rows, cols) for rows, cols in of_model("llama-3-8b", None)]

    def part(shape: Shape) -> DTensor:
        local = checks.randn((shape[0] // RANKS, shape[1]), generator, FP32)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    params = [nn.Parameter(part(shape)) for shape in shapes]
    for param in params:
        param.grad = part(param.shape)
    optim = checks.muon(params, lr=1e-3, consistency_check="off")  # others say nothing
    recipe = checks.kernel.newton_schulz.recipe_for(
        "polar_express", None, "auto", None, FP32, checks.device
    )
    owned = share_of(shapes, RANKS, checks.device)
    numel = sum(rows * cols for rows, cols in shapes) // RANKS
    return optim, Floor(flops_of_forms(owned, recipe), 5 * 4 * numel, recipe.dtype), params


# -- profile ---------------------------------------------------------------------------------------


def profile(checks: Checks, step: Callable[[], object]) -> None:
    """Where the device's time goes in one step."""
    if checks.device.type != "cuda" or checks.small:
        return
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    for _ in range(2):  # once to start what records, which takes time of its own
        with torch.profiler.profile(activities=activities) as recorded:
            step()
            synchronize()
    table = recorded.key_averages().table(sort_by="self_device_time_total", row_limit=40)
    (checks.out / "profile.txt").write_text(table)
    recorded.export_chrome_trace(str(checks.out / "trace.json.gz"))
    work = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    rows, idle, largest = times_by_kernel(work)
    columns = ("kernel, of one step", "calls", "ms", "share")
    show(f"Rank 0 of {RANKS}: the device's time by kernel", columns, rows[:12])
    checks.note("rank", "the device does nothing for", idle / 1e3, "ms of a step")
    checks.note("rank", "the largest gap", largest / 1e3, "ms")


def times_by_kernel(
    work: Iterable[tuple[str, float, float]],
) -> tuple[list[list[str]], float, float]:
    """Rows by time; the sum of the gaps between all of them, and the largest.

    Args:
        work: names, begin and end in µs, which may overlap.
    """
    calls: dict[str, list[float]] = {}
    end, gaps = None, [0.0]
    for name, start, stop in sorted(work, key=lambda event: event[1]):
        calls.setdefault(name, []).append(stop - start)
        if end is not None:
            gaps.append(max(0.0, start - end))
        end = stop if end is None else max(end, stop)
    total = sum(map(sum, calls.values())) or 1.0
    by_time = sorted(calls.items(), key=lambda item: -sum(item[1]))
    rows = [
        [name[:70], f"{len(times)}", f"{sum(times) / 1e3:.3f}", f"{sum(times) / total:.3f}"]
        for name, times in by_time
    ]
    return rows, sum(gaps), max(gaps)


CHECKS = {check.__name__: check for check in (cold, float64, kernels, repeat, offload, waits, rank)}


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the profile")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITON_CACHE_DIR"] = empty
        return run(Checks(load_kernel(), options), options.only)


def run(checks: Checks, names: Sequence[str]) -> int:
    failed = []
    for name in names:
        start = time.perf_counter()
        try:
            CHECKS[name](checks)
            end = "passed"
        except Exception as error:
            traceback.print_exc()
            end = f"FAILED: {type(error).__name__}: {error}"[:300]
            failed.append(name)
        checks.note(name, end, time.perf_counter() - start, "s")
    show("Checks of whole steps", ("check", "what", "found", "unit"), checks.rows, left=2)
    print(f"FAILED: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
