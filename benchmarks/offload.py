"""What CPU offload costs a step: off, bulk and streamed, beside the link between host and device.

    make bench BENCHMARKS=benchmarks/offload.py
    make bench BENCHMARKS=benchmarks/offload.py ARGS="--share llama-3-8b --slot-bytes 268435456"

One table for each share: what one rank of --ranks has of a model, without the traffic between
them. It orthogonalizes whole matrices of its share of the layers and, of a mixture of experts, its
share of every layer's experts, stacked; of other tensors it has as many rows. Weights are bf16,
momentum is fp32 and AdamW's moments have the weights' dtype. On an accelerator the modes take turns
(A B C A B C …), each with its own state, and so do the copies that tell the link's rate.

- exposed: the time of a step above that with offload off.
- ratio: a step over what it can't be under, the longer of the step without offload and of carrying
  the state at the link's rate, both directions at once.
- peak: device memory above what was there before the step; at rest: state there between steps.

The mode "backward" is left out: what it hides is hidden under a backward and a forward.

Where there is no accelerator, or with --simulate, the step is simulated: see simulated.py. Windows
are what was brought one after the other, copies those of both directions. --host-cost times the
host's part of a step of 1000 small matrices instead, where kernels and copies take no time.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import platform
import pstats
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simulated import Clocks, Machine, Simulated, as_on_accelerators, kernel, simulate
from timing import machine, milliseconds, pick_device, seconds_of, show, synchronize, take_turns

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from planner.architectures import EXPERTS, MODELS, weights_of

MODES = {"off": None, "bulk": "bulk", "stream": "stream"}
SHARES = ("llama-3-8b", "qwen3-30b-a3b")
LINK_BYTES = 256 << 20  # of the copies that tell the link's rate
SMALL_MATRICES = 1000  # of --host-cost

Shapes = list[tuple[str, tuple[int, ...]]]


# -- shares ----------------------------------------------------------------------------------------


def share_of(model: str, ranks: int, layers: int | None = None) -> tuple[Shapes, Shapes]:
    """Names and shapes of what one rank has: Muon's parameters, and AdamW's.

    Args:
        model: of `MODELS`.
        ranks: that share it.
        layers: whose matrices it has; None is a share of all.
    """
    config = dict(MODELS[model])
    layers = max(1, config["num_hidden_layers"] // ranks) if layers is None else layers
    config["num_hidden_layers"] = layers * ranks
    config.update({key: config[key] // ranks for key in EXPERTS if key in config})
    muon: Shapes = []
    adamw: Shapes = []
    for weight in weights_of(config):
        first, *others = weight.name.split(".")
        if first == "layers" and int(others[0]) >= layers and len(weight.shape) < 3:
            continue
        if weight.muon:
            muon.append((weight.name, weight.shape))
        else:
            rows, *cols = weight.shape
            adamw.append((weight.name, (-(-rows // ranks), *cols)))
    return muon, adamw


def params_of(shapes: Shapes, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """With gradients; of values that are normal on accelerators, and of none elsewhere."""
    params: list[Tensor] = []
    for _, shape in shapes:
        param = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        param.grad = torch.empty_like(param)
        if device.type != "cpu":
            torch.nn.init.normal_(param, std=0.02)
            torch.nn.init.normal_(param.grad)
        params.append(param)
    return params


def optimizer_of(
    share: tuple[Shapes, Shapes], params: Sequence[list[Tensor]], **options: Any
) -> Any:
    names = [name for name, _ in share[0]]
    groups = [
        {"params": params[0], "names": names, "use_muon": True, "none_grad": False},
        {"params": params[1], "use_muon": False},
    ]
    return kernel.Muon([g for g in groups if g["params"]], expert_keys=["experts"], **options)


# -- measured --------------------------------------------------------------------------------------


class Link:
    """Copies of page-locked memory to the device, from it, and both at once."""

    def __init__(self, device: torch.device):
        host = [torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        there = [torch.empty(LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
        streams = [torch.Stream(device) for _ in range(2)]

        def copy(*ways: int) -> None:
            for way in ways:
                with streams[way]:
                    pair = (there[0], host[0]) if way == 0 else (host[1], there[1])
                    pair[0].copy_(pair[1], non_blocking=True)

        self.contenders: dict[str, Callable[[], object]] = {
            "to the device": partial(copy, 0),
            "to the host": partial(copy, 1),
            "both": partial(copy, 0, 1),
        }
        self.rates: dict[str, float] = {}  # bytes per second, each way

    def take(self, seconds: dict[str, list[float]]) -> None:
        self.rates = {name: LINK_BYTES / min(seconds.pop(name)) for name in self.contenders}

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in self.rates.items())
        return f"link, GB/s each way: {rates}"


def peak_of(step: Callable[[], object]) -> int:
    """Bytes of device memory above what is there before."""
    synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    step()
    synchronize()
    return torch.accelerator.max_memory_allocated() - before


MEASURED = (
    *("offload", "least ms", "median ms", "exposed ms", "ratio", "GB each way", "GB/s each way"),
    *("of link", "peak MiB", "at rest MiB"),
)


def measure(model: str, options: argparse.Namespace, device: torch.device) -> None:
    share = share_of(model, options.ranks, options.layers)
    params = [params_of(shapes, device, torch.bfloat16) for shapes in share]
    optimizers, resting = {}, {}
    for name in dict.fromkeys(["off", *options.mode]):
        before = torch.accelerator.memory_allocated()
        optimizer = optimizer_of(share, params, momentum_dtype=options.momentum)
        if MODES[name] is not None:
            optimizer.turn_on_cpu_offload(MODES[name], slot_bytes=options.slot_bytes)
        optimizer.step()
        synchronize()
        optimizers[name] = optimizer
        resting[name] = torch.accelerator.memory_allocated() - before
    link = Link(device)
    steps = {name: optimizer.step for name, optimizer in optimizers.items()}
    seconds = take_turns({**steps, **link.contenders}, options.repeats)
    link.take(seconds)
    off, rate = min(seconds["off"]), link.rates["both"]
    rows = []
    for name, optimizer in optimizers.items():
        nbytes = optimizer._offload.held_bytes
        least = min(seconds[name])
        is_on = name != "off"
        rows.append(
            [
                *(name, *milliseconds(seconds[name])),
                f"{(least - off) * 1e3:.1f}" if is_on else "–",
                f"{least / max(off, nbytes / rate):.3f}" if is_on else "–",
                f"{nbytes / 1e9:.2f}",
                f"{nbytes / least / 1e9:.1f}" if is_on else "–",
                f"{nbytes / least / rate:.2f}" if is_on else "–",
                f"{peak_of(optimizer.step) / 2**20:.0f}",
                f"{resting[name] / 2**20:.0f}",
            ]
        )
    title = f"One step, {title_of(model, options, share)}, {options.repeats} rounds, {device.type}"
    show(title, MEASURED, rows, markdown=options.markdown)
    print(f"{machine(device)}; {link}")


# -- simulated -------------------------------------------------------------------------------------


SIMULATED = (
    *("offload", "step ms", "products etc. ms", "copies ms", "exposed ms", "ratio"),
    *("GB each way", "windows", "copies", "peak MiB", "at rest MiB"),
)


def tell_simulation(model: str, options: argparse.Namespace, simulated: Machine) -> None:
    share = share_of(model, options.ranks, options.layers)

    def make() -> tuple[Any, list[Tensor]]:
        params = [params_of(s, torch.device("cpu"), torch.bfloat16) for s in share]
        given = {"momentum_dtype": options.momentum, "ns_dtype": torch.float16}
        return optimizer_of(share, params, **given), [*params[0], *params[1]]

    off, rows = simulate(make, simulated, None), []
    for name in dict.fromkeys(["off", *options.mode]):
        step = simulate(make, simulated, MODES[name], options.slot_bytes)
        is_on = name != "off"
        rows.append(
            [
                *(name, f"{step.seconds * 1e3:.1f}", f"{off.seconds * 1e3:.1f}"),
                f"{step.carrying * 1e3:.1f}",
                f"{(step.seconds - off.seconds) * 1e3:.1f}" if is_on else "–",
                f"{step.seconds / max(off.seconds, step.carrying):.3f}" if is_on else "–",
                *(f"{step.nbytes / 1e9:.2f}", f"{step.windows}", f"{step.copies}"),
                *(f"{step.peak / 2**20:.0f}", f"{step.resting / 2**20:.0f}"),
            ]
        )
    title = f"SIMULATED step, {title_of(model, options, share)}"
    show(title, SIMULATED, rows, markdown=options.markdown)


def title_of(model: str, options: argparse.Namespace, share: tuple[Shapes, Shapes]) -> str:
    numel = [sum(torch.Size(shape).numel() for _, shape in shapes) / 1e6 for shapes in share]
    return (
        f"{model}, one rank of {options.ranks}: {numel[0]:.0f} M parameters of Muon, "
        f"{numel[1]:.0f} M of AdamW, momentum in {options.momentum_dtype}"
    )


# -- the host's part -------------------------------------------------------------------------------


def tell_host_cost(options: argparse.Namespace) -> None:
    """Of a step of small matrices, planned for as an accelerator's."""
    shapes: Shapes = [(f"layers.{number}.weight", (16, 16)) for number in range(SMALL_MATRICES)]
    clocks, cpu = Clocks(Machine()), torch.device("cpu")
    optimizers = {}
    with as_on_accelerators(clocks):
        for name, mode in MODES.items():
            params = params_of(shapes, cpu, torch.bfloat16)
            optimizer = optimizer_of((shapes, []), (params, []), ns_dtype=torch.float16)
            if mode is not None:
                backend = Simulated(clocks)
                optimizer.turn_on_cpu_offload(mode, slot_bytes=options.slot_bytes, backend=backend)
            optimizers[name] = optimizer
        steps = {name: optimizer.step for name, optimizer in optimizers.items()}
        seconds = take_turns(steps, max(5, options.repeats))
        profile = cProfile.Profile()
        profile.runcall(seconds_of, optimizers["stream"].step, 5)
    off = min(seconds["off"])
    rows = [
        [
            *(name, *milliseconds(seconds[name])),
            f"{(min(seconds[name]) - off) / SMALL_MATRICES * 1e6:.1f}",
            f"{statistics.median(seconds[name]) / statistics.median(seconds['off']):.2f}",
        ]
        for name in MODES
    ]
    columns = ("offload", "least ms", "median ms", "µs more for each matrix", "× off")
    title = f"The host's part of a step of {SMALL_MATRICES} matrices of 16 × 16"
    show(title, columns, rows, markdown=options.markdown)
    print(f"{machine(cpu)}. Where 5 streamed steps, under a profiler, spend it:\n")
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(12)


# -- command line ----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--share", nargs="+", choices=MODELS, default=SHARES, help="of which models"
    )
    parser.add_argument("--ranks", type=int, default=8, help="that share a model")
    parser.add_argument("--layers", type=int, help="whose matrices a rank has; a share of all")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), help="which")
    parser.add_argument("--slot-bytes", type=int, help="device memory for what is streamed")
    parser.add_argument("--momentum-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=9, help="rounds")
    parser.add_argument("--host-cost", action="store_true", help="time the host's part instead")
    parser.add_argument("--simulate", action="store_true", help="also where it can be measured")
    parser.add_argument("--markdown", action="store_true", help="print tables in markdown")
    for each in dataclasses.fields(Machine):
        name = f"--{each.name}"
        parser.add_argument(name, type=float, default=each.default, help="of the simulated machine")
    options = parser.parse_args(arguments)
    options.momentum = getattr(torch, options.momentum_dtype)
    print(f"python benchmarks/offload.py {shlex.join(arguments)}".rstrip())
    if options.host_cost:
        tell_host_cost(options)
        return
    device = pick_device()
    if device.type != "cpu":
        for model in options.share:
            measure(model, options, device)
    if device.type == "cpu" or options.simulate:
        given = {each.name: getattr(options, each.name) for each in dataclasses.fields(Machine)}
        simulated = Machine(**given)
        if device.type == "cpu":
            print("There is no accelerator here. What follows is a SIMULATION, not a measurement.")
        for model in options.share:
            tell_simulation(model, options, simulated)
        print(f"simulated machine: {simulated}; torch {torch.__version__}, {platform.machine()}")


if __name__ == "__main__":
    main()
