"""Time, memory and FLOPs of one optimizer step, beside other optimizers and beside a floor.

    make bench BENCHMARKS=benchmarks/step.py ARGS="--layers 12 --dim 512 --ffn 2048"
    make bench BENCHMARKS=benchmarks/step.py ARGS="--model llama-3-8b --share 8"

The optimizers share weights and gradients, each has its own state, and they take turns (A B C A B
C …), so that whatever else the machine does falls on all. Without --model the matrices are those of
a small transformer; with it all of a model's that are Muon's, stacked experts as matrices of their
own, or with --share the ones that rank 0 orthogonalizes where so many ranks share them by FSDP2.

- × floor: over the time of a Muon step that does nothing but its products, at the best rate of a
  square torch.mm, and reads and writes weights and momentum once and reads gradients, 20 bytes per
  parameter in fp32, at the rate of a copy. Both rates take turns with the optimizers.
- transient: what a step allocates beyond what it started with, at its highest point, counted in a
  step of its own.
- FLOPs: counted likewise; plain is 20·s²l + 10·s³ for each matrix of sides s ≤ l. Where Triton's
  kernels run, which the counter does not see, those of the forms that were chosen.

dion's Muon takes part where that package is installed; it compiles its updates, which hides them
from what counts memory and FLOPs. --snapshot records the allocator during three steps of this
package's, for https://pytorch.org/memory_viz, and compares their peak with the 1.5 × weights that a
step may take.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from orthogonalize import plain_flops
from timing import (
    COPIED,
    DEFAULT_COPIED,
    NS_DTYPES,
    Ceilings,
    add_cpu_time,
    least_sample,
    load_kernel,
    machine,
    milliseconds,
    pick_device,
    show,
    synchronize,
    take_turns,
)

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import counters
from planner.architectures import MODELS, weights_of

OURS, THEIRS, ADAMW = "Muon (this package)", "torch.optim.Muon", "AdamW (fused)"
DION = "Muon of dion"
CONTENDERS = {"ours": OURS, "torch": THEIRS, "adamw": ADAMW}
if importlib.util.find_spec("dion"):
    CONTENDERS["dion"] = DION
STATES = {OURS: 1, THEIRS: 1, ADAMW: 2, DION: 1}  # tensors like the weights

TRANSIENT_AIM = 1.5  # × weights, which a step may allocate (tests/test_costs.py)
SNAPSHOT_EVENTS = 100_000  # of the allocator, at most

Shapes = Counter[tuple[int, int]]


# -- matrices --------------------------------------------------------------------------------------


def small(layers: int, dim: int, ffn: int) -> Shapes:
    """Weights of a transformer: four (dim, dim) and three of the feed-forward in each layer."""
    shapes = Shapes()
    for shape, count in (((dim, dim), 4), ((ffn, dim), 2), ((dim, ffn), 1)):
        shapes[shape] += count * layers
    return shapes


def of_model(model: str, layers: int | None) -> list[tuple[int, ...]]:
    """Muon's parameters as they are stored, of all layers or the first ones."""
    config = dict(MODELS[model])
    if layers is not None:
        config["num_hidden_layers"] = min(layers, config["num_hidden_layers"])
    return [tuple(weight.shape) for weight in weights_of(config) if weight.muon]


def matrices_in(shapes: Sequence[tuple[int, ...]]) -> Shapes:
    found = Shapes()
    for *experts, rows, cols in shapes:
        found[rows, cols] += torch.Size(experts).numel()
    return found


def share_of(shapes: Sequence[tuple[int, ...]], ranks: int, device: torch.device) -> Shapes:
    """The matrices that rank 0 orthogonalizes in the plan of so many ranks."""
    import balance  # loads the kernel

    entries = balance.entries_of(shapes, ranks, dtype=torch.float32, device=device)
    plan = balance.planning.Planner(entries, rank=0).plan()
    found = Shapes()
    for lane in (*plan.lanes, *plan.local_lanes):
        for unit, owner in lane.owners:
            if owner == lane.this_peer:
                found[unit.block.rows, unit.block.cols] += unit.count
    return found


def tensors_of(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[Any]:
    torch.manual_seed(0)
    params = []
    for shape, count in shapes.items():
        for _ in range(count):
            weight = torch.randn(shape, device=device, dtype=dtype)
            param = torch.nn.Parameter(weight.mul_(0.02))
            param.grad = torch.randn(shape, device=device, dtype=dtype)
            params.append(param)
    return params


def room_for(numel: int, options: argparse.Namespace) -> float:
    """Bytes of weights, gradients and all states, with a tenth for what steps allocate."""
    tensors = 2 + sum(STATES[CONTENDERS[name]] for name in options.contenders)
    return 1.1 * numel * getattr(torch, options.dtype).itemsize * tensors


def check_room(numel: int, options: argparse.Namespace, device: torch.device) -> None:
    if device.type == "cpu":
        return
    needed, (free, _) = room_for(numel, options), torch.accelerator.get_memory_info()
    if needed > free:
        raise SystemExit(
            f"{needed / 2**30:.0f} GiB of weights, gradients and states, and "
            f"{free / 2**30:.0f} GiB are free: leave some out with --contenders, take --dtype "
            "bfloat16, a --share, or --layers fit"
        )


def layers_that_fit(options: argparse.Namespace) -> int:
    """How many of the model's layers the device has memory for."""
    free, _ = torch.accelerator.get_memory_info()
    for layers in range(MODELS[options.model]["num_hidden_layers"], 1, -1):
        if room_for(sum(map(math.prod, of_model(options.model, layers))), options) <= free:
            return layers
    return 1


# -- step ------------------------------------------------------------------------------------------


def optimizers_of(
    names: Sequence[str], params: list[Any], kernel: Any, ns_dtype: torch.dtype | None = None
) -> dict[str, Any]:
    def ours() -> Any:
        groups = [{"params": params, "use_muon": True, "none_grad": False}]
        return kernel.Muon(groups, lr=1e-3, weight_decay=0.1, ns_dtype=ns_dtype)

    def of_dion() -> Any:
        from dion import Muon  # type: ignore[import-not-found]

        return Muon(params, lr=1e-3, weight_decay=0.1, nesterov=True, adjust_lr="rms_norm")

    makers = {
        OURS: ours,
        THEIRS: lambda: torch.optim.Muon(
            params, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        ADAMW: lambda: torch.optim.AdamW(params, lr=1e-3, fused=True),
        DION: of_dion,
    }
    return {name: makers[name]() for name in names}


def flops_of_forms(shapes: Shapes, recipe: Any) -> int:
    return sum(recipe.form(*sides).flops(*sides) * count for sides, count in shapes.items())


def counted_flops(optimizer: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    return counter.get_total_flops()


COLUMNS = (
    *("optimizer", "least ms", "median ms", "× torch", "× floor"),
    *("transient / weights", "FLOPs / plain"),
)


def measure(shapes: Shapes, options: argparse.Namespace, device: torch.device) -> None:
    kernel, names = load_kernel(), [CONTENDERS[name] for name in options.contenders]
    dtype = getattr(torch, options.dtype)
    ns_dtype = getattr(torch, options.ns_dtype) if options.ns_dtype else None
    numel = sum(rows * cols * count for (rows, cols), count in shapes.items())
    check_room(numel, options, device)
    recipe = kernel.newton_schulz.recipe_for("polar_express", None, "auto", ns_dtype, dtype, device)
    forms = flops_of_forms(shapes, recipe)
    plain = sum(plain_flops(*sides) * count for sides, count in shapes.items())

    params = tensors_of(shapes, dtype, device)
    optimizers = optimizers_of(names, params, kernel, ns_dtype)
    copied = min(COPIED.get(device.type, DEFAULT_COPIED), max(1 << 20, numel))
    ceilings = Ceilings(device, [recipe.dtype], options.ceiling, copied)
    steps = {name: optimizer.step for name, optimizer in optimizers.items()}
    calls = {**steps, **ceilings.contenders}
    seconds = take_turns(calls, options.rounds, least_sample(device), options.clock)
    ceilings.take(seconds)

    traffic = 5 * dtype.itemsize * numel  # momentum has the gradients' dtype
    for_products = forms / ceilings.flops_per_second(recipe.dtype)
    for_traffic = traffic / ceilings.bytes_per_second()
    floor = for_products + for_traffic
    unseen = kernel.triton_kernels.is_used_on(device.type)
    rows = []
    for name, optimizer in optimizers.items():
        least = min(seconds[name])
        ratio = f"{least / min(seconds[THEIRS]):.3f}" if THEIRS in seconds else "–"
        transient = flops = "–"
        if name != DION:
            peak_bytes = counters.count(optimizer.step).peak_bytes
            transient = f"{peak_bytes / (numel * dtype.itemsize):.2f}"
        if name in (OURS, THEIRS):
            done = forms if name == OURS and unseen else counted_flops(optimizer)
            flops = f"{done / plain:.3f}"
        over_floor = "–" if name == ADAMW else f"{least / floor:.3f}"
        row = [name, *milliseconds(seconds[name]), ratio, over_floor, transient, flops]
        rows.append(row)
    rows.append(["floor", milliseconds([floor])[0], "–", "–", "1.00", "–", f"{forms / plain:.3f}"])
    what = options.model or "a small transformer"
    if options.layers is not None:
        what = f"{what}, layers: {options.layers}"
    share = f", rank 0's share of {options.share}" if options.share else ""
    title = (
        f"One step, {what}{share}: {len(params)} matrices, {numel / 1e6:.1f} M parameters, "
        f"{options.dtype}, {options.rounds} rounds, {device.type}"
    )
    show(title, COLUMNS, rows, markdown=options.markdown, width=110)
    print(
        f"floor: {floor * 1e3:.1f} ms = {for_products * 1e3:.1f} ms for {forms / 1e9:.0f} GFLOP "
        f"({forms / plain:.3f} × plain) + {for_traffic * 1e3:.1f} ms for {traffic / 2**20:.0f} MiB"
        f"\n{machine(device)}; {ceilings.tell()}"
    )
    if options.snapshot:
        tell_snapshot(optimizers[OURS], numel * dtype.itemsize, options)


def tell_snapshot(optimizer: Any, weights: int, options: argparse.Namespace) -> None:
    """Records three steps, whose peak is the allocator's."""
    synchronize()
    torch.accelerator.reset_peak_memory_stats()
    resting = torch.accelerator.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
    for _ in range(3):
        optimizer.step()
    synchronize()
    torch.cuda.memory._dump_snapshot(str(options.snapshot))
    torch.cuda.memory._record_memory_history(enabled=None)
    transient = torch.accelerator.max_memory_allocated() - resting
    row = [
        *(f"{weights / 2**20:.0f}", f"{resting / 2**20:.0f}", f"{transient / 2**20:.0f}"),
        *(f"{transient / weights:.2f}", f"{TRANSIENT_AIM}"),
    ]
    columns = ("weights MiB", "resting MiB", "transient MiB", "transient / weights", "aim")
    show("Memory of three steps", columns, [row], markdown=options.markdown, left=0)
    print(f"snapshot: {options.snapshot}")


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, help="all of its matrices that are Muon's")
    parser.add_argument("--share", type=int, help="of --model, rank 0's of so many ranks")
    parser.add_argument(
        "--layers",
        type=lambda text: text if text == "fit" else int(text),
        help="12, or all of --model; fit: of --model as many as the device has memory for",
    )
    parser.add_argument("--dim", type=int, default=512, help="without --model")
    parser.add_argument("--ffn", type=int, default=2048, help="without --model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--ns-dtype", choices=NS_DTYPES, help="this package's arithmetic")
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="which"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ceiling", nargs="+", type=int, help="sides of the square products")
    parser.add_argument("--snapshot", type=Path, help="file, on CUDA devices: see above")
    add_cpu_time(parser)
    parser.add_argument("--markdown", action="store_true", help="print the table in markdown")
    options = parser.parse_args(arguments)
    device = pick_device()
    if options.snapshot and (device.type != "cuda" or "ours" not in options.contenders):
        parser.error("--snapshot is for a CUDA device, and for ours among the --contenders")
    if options.layers == "fit":
        if options.model is None or options.share or device.type == "cpu":
            parser.error("--layers fit is for a --model without --share, on an accelerator")
        options.layers = layers_that_fit(options)
    if options.model is None:
        if options.share:
            parser.error("--share needs a --model")
        shapes = small(options.layers or 12, options.dim, options.ffn)
    else:
        if device.type == "cpu" and options.layers is None:
            parser.error(
                f"{options.model} is too large for a CPU: take its first layers with --layers, or "
                "run this on an accelerator"
            )
        stored = of_model(options.model, options.layers)
        shapes = share_of(stored, options.share, device) if options.share else matrices_in(stored)
    measure(shapes, options, device)


if __name__ == "__main__":
    main()
