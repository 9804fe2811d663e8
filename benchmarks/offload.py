"""What CPU offload costs a step: off and streamed, beside the link between host and device.

    make bench BENCHMARKS=benchmarks/offload.py
    make bench BENCHMARKS=benchmarks/offload.py ARGS="--share llama-3-8b --slot-bytes 268435456"

One table for each share: what one rank of --ranks has of a model, without the traffic between
them. It orthogonalizes whole matrices of its share of the layers and, of a mixture of experts, its
share of every layer's experts, stacked; of other tensors it has as many rows. Weights are bf16,
momentum is fp32 and AdamW's moments have the weights' dtype. On an accelerator both take turns
(A B A B …), each with its own state, and so do the copies that tell the link's rate.

- × off: a step over the step without offload.
- exposed: the time of a step above that without offload; "–" where its sign is noise.
- one way: the time of carrying the state in one direction at the link's rate, of both at once.
- ratio: a step over the least that a streamed one can take, the longer of the step without offload
  and one way.
- peak: device memory above what was there before the step; at rest: state there between steps.

Where there is no accelerator, or with --simulate, the step is simulated: see simulated.py. Loads
are what was brought one after the other, copies issued those of both directions. --host-cost times
the host's part of a step of 1000 small matrices instead, where kernels and copies take no time.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import math
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

OFFLOAD = {"off": False, "on": True}
SHARES = ("llama-3-8b", "qwen3-30b-a3b")
LINK_BYTES = 256 << 20  # of the copies that tell the link's rate
SMALL_MATRICES = 1000  # of --host-cost
LEAST_HOST_ROUNDS = 5  # of it
SURE = 0.9  # share of rounds whose differences have the same sign, if it is no noise

LEGEND = "exposed = step − step without offload; ratio = step ÷ max(step without offload, one way)"

Shapes = list[tuple[str, tuple[int, ...]]]


# -- shares ----------------------------------------------------------------------------------------


def layers_of(model: str, ranks: int) -> int:
    """Whose matrices one rank has: a fair share of all, rounded down, but a whole one at least."""
    return max(1, MODELS[model]["num_hidden_layers"] // ranks)


def experts_of(model: str) -> int | None:
    """In one layer; None where there are none."""
    return next((MODELS[model][key] for key in EXPERTS if key in MODELS[model]), None)


def share_of(model: str, ranks: int, layers: int | None = None) -> tuple[Shapes, Shapes]:
    """Names and shapes of what one rank has: Muon's parameters, and AdamW's.

    Args:
        model: of `MODELS`.
        ranks: that share it.
        layers: whose matrices it has; None is a share of all.
    """
    config = dict(MODELS[model])
    layers = layers_of(model, ranks) if layers is None else layers
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


def title_of(model: str, options: argparse.Namespace, share: tuple[Shapes, Shapes]) -> str:
    numel = [sum(torch.Size(shape).numel() for _, shape in shapes) / 1e6 for shapes in share]
    return (
        f"{model}, one rank of {options.ranks}: {numel[0]:.0f} M parameters of Muon, "
        f"{numel[1]:.0f} M of AdamW, momentum in {options.momentum_dtype}"
    )


def tell_below(model: str, options: argparse.Namespace) -> None:
    """What the columns of a table are, and whether the share is more than a fair one."""
    layers = options.layers or layers_of(model, options.ranks)
    fair = MODELS[model]["num_hidden_layers"] / options.ranks
    if layers > fair:
        whole = "a whole layer" if layers == 1 else f"{layers} whole layers"
        print(f"{whole} for this rank: {layers / fair:.2f} × its fair share of {fair:.2f} layers")
    print(LEGEND)


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
    *("offload", "least ms", "median ms", "× off", "exposed ms", "ratio", "GB each way"),
    *("one way ms", "GB/s each way", "of link", "peak MiB", "at rest MiB"),
)


def difference(samples: Sequence[float], others: Sequence[float]) -> float | None:
    """Difference between the two minima; None if the rounds disagree on its sign."""
    found = min(samples) - min(others)
    agree = sum((one - other) * found > 0 for one, other in zip(samples, others, strict=True))
    return found if agree >= SURE * len(samples) else None


def measure(model: str, options: argparse.Namespace, device: torch.device) -> None:
    share = share_of(model, options.ranks, options.layers)
    params = [params_of(shapes, device, torch.bfloat16) for shapes in share]
    optimizers, resting = {}, {}
    for name, is_on in OFFLOAD.items():
        before = torch.accelerator.memory_allocated()
        optimizer = optimizer_of(share, params, momentum_dtype=options.momentum)
        if is_on:
            optimizer.turn_on_cpu_offload(slot_bytes=options.slot_bytes)
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
        nbytes = sum(t.host.nbytes for t in optimizer._offload._offloaded.values())
        least = min(seconds[name])
        is_on = OFFLOAD[name]
        exposed = difference(seconds[name], seconds["off"])
        rows.append(
            [
                *(name, *milliseconds(seconds[name])),
                f"{least / off:.2f}" if is_on else "–",
                "–" if exposed is None else f"{exposed * 1e3:.1f}",
                f"{least / max(off, nbytes / rate):.3f}" if is_on else "–",
                f"{nbytes / 1e9:.2f}",
                f"{nbytes / rate * 1e3:.1f}" if is_on else "–",
                f"{nbytes / least / 1e9:.1f}" if is_on else "–",
                f"{nbytes / least / rate:.2f}" if is_on else "–",
                f"{peak_of(optimizer.step) / 2**20:.0f}",
                f"{resting[name] / 2**20:.0f}",
            ]
        )
    title = f"One step, {title_of(model, options, share)}, {options.repeats} rounds, {device.type}"
    show(title, MEASURED, rows, markdown=options.markdown)
    tell_below(model, options)
    print(f"{machine(device)}; {link}")


# -- simulated -------------------------------------------------------------------------------------


SIMULATED = (
    *("offload", "step ms", "× off", "exposed ms", "ratio", "GB each way", "one way ms"),
    *("loads", "copies issued", "peak MiB", "at rest MiB"),
)


def tell_simulation(model: str, options: argparse.Namespace, simulated: Machine) -> None:
    share = share_of(model, options.ranks, options.layers)

    def make() -> tuple[Any, list[Tensor]]:
        params = [params_of(s, torch.device("cpu"), torch.bfloat16) for s in share]
        given = {"momentum_dtype": options.momentum, "ns_dtype": torch.float16}
        return optimizer_of(share, params, **given), [*params[0], *params[1]]

    off, rows = simulate(make, simulated, is_offloaded=False), []
    for name, is_on in OFFLOAD.items():
        step = simulate(make, simulated, is_on, options.slot_bytes) if is_on else off
        rows.append(
            [
                *(name, f"{step.seconds * 1e3:.1f}"),
                f"{step.seconds / off.seconds:.2f}" if is_on else "–",
                f"{(step.seconds - off.seconds) * 1e3:.1f}" if is_on else "–",
                f"{step.seconds / max(off.seconds, step.carrying):.3f}" if is_on else "–",
                f"{step.nbytes / 1e9:.2f}",
                f"{step.carrying * 1e3:.1f}" if is_on else "–",
                *(f"{step.loads}", f"{step.copies}"),
                *(f"{step.peak / 2**20:.0f}", f"{step.resting / 2**20:.0f}"),
            ]
        )
    title = f"SIMULATED step, {title_of(model, options, share)}"
    show(title, SIMULATED, rows, markdown=options.markdown)
    tell_below(model, options)


# -- the host's part -------------------------------------------------------------------------------


def tell_host_cost(options: argparse.Namespace) -> None:
    """Host time of a step of small matrices, planned as for an accelerator."""
    shapes: Shapes = [(f"layers.{number}.weight", (16, 16)) for number in range(SMALL_MATRICES)]
    clocks, cpu = Clocks(Machine()), torch.device("cpu")
    optimizers = {}
    with as_on_accelerators(clocks):
        for name, is_on in OFFLOAD.items():
            params = params_of(shapes, cpu, torch.bfloat16)
            optimizer = optimizer_of((shapes, []), (params, []), ns_dtype=torch.float16)
            if is_on:
                backend = Simulated(clocks)
                optimizer.turn_on_cpu_offload(slot_bytes=options.slot_bytes, backend=backend)
            optimizers[name] = optimizer
        steps = {name: optimizer.step for name, optimizer in optimizers.items()}
        rounds = max(LEAST_HOST_ROUNDS, options.repeats)
        seconds = take_turns(steps, rounds)
        profile = cProfile.Profile()
        profile.runcall(seconds_of, optimizers["on"].step, 5)
    rows = []
    for name in OFFLOAD:
        more = difference(seconds[name], seconds["off"])
        median = statistics.median(seconds[name]) / statistics.median(seconds["off"])
        rows.append(
            [
                *(name, *milliseconds(seconds[name])),
                "–" if more is None else f"{more / SMALL_MATRICES * 1e6:.1f}",
                "–" if name == "off" else f"{median:.2f}",
            ]
        )
    columns = ("offload", "least ms", "median ms", "µs more for each matrix", "× off")
    title = f"The host's part of a step of {SMALL_MATRICES} matrices of 16 × 16, {rounds} rounds"
    show(title, columns, rows, markdown=options.markdown)
    print("µs more, by the leasts: “–” where its sign is noise; × off, by the medians")
    print(f"{machine(cpu)}. Where 5 streamed steps, under a profiler, spend it:\n")
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(12)


# -- command line ----------------------------------------------------------------------------------


OF_THE_MACHINE = {
    "flops": "FLOP/s of dense 16-bit products, at their peak",
    "achieved": "share of the peak that products reach, at most 1",
    "memory": "bytes/s of the device's memory",
    "link": "bytes/s each way between host and device",
    "launch": "seconds of any kernel beyond its work",
    "latency": "seconds of any copy beyond its bytes",
}
LEAST_RATE = 1e6  # per second; any lower is in another unit


def number(
    kind: type, least: float = -math.inf, most: float = math.inf, above: float = -math.inf
) -> Callable[[str], Any]:
    """Parses one within bounds, for argparse."""

    def parse(text: str) -> Any:
        value = kind(text)
        if math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text} is not finite")
        if not (least <= value <= most and above < value):  # so for a NaN
            given = (("at least", least), ("above", above), ("at most", most))
            bounds = [f"{word} {short(end)}" for word, end in given if math.isfinite(end)]
            raise argparse.ArgumentTypeError(f"{text} is not {' and '.join(bounds)}")
        return value

    parse.__name__ = kind.__name__  # in what argparse says of what is no number
    return parse


def short(value: float) -> str:
    """As 55e9 or 0.7, with exponents by threes."""
    if not value or 1e-3 <= abs(value) < 1e6:
        return f"{value:g}"
    exponent = 3 * math.floor(math.log10(abs(value)) / 3)
    return f"{value / 10**exponent:g}e{exponent}"


def parser_of_options() -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--share",
        nargs="+",
        choices=MODELS,
        default=SHARES,
        help=f"models, with one table each (default: {' '.join(SHARES)})",
    )
    add(
        "--ranks",
        type=number(int, 1),
        default=8,
        help="ranks that share the model; one rank's part is timed (default %(default)s)",
    )
    add(
        "--layers",
        type=number(int, 1),
        help="layers whose matrices this rank has (default: all layers ÷ ranks, at least 1)",
    )
    add(
        "--slot-bytes",
        type=number(int, 1),
        help="bytes of device memory for what is streamed (default: 5 %% of the state, or 512 MiB "
        "if that is more)",
    )
    add(
        "--momentum-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of Muon's momentum (default %(default)s)",
    )
    add(
        "--repeats",
        type=number(int, 1),
        default=9,
        help="rounds in which each is measured once; of --host-cost, at least "
        f"{LEAST_HOST_ROUNDS} (default %(default)s)",
    )
    add(
        "--host-cost",
        action="store_true",
        help=f"time only the host's part, of a step of {SMALL_MATRICES} small matrices "
        "(default: off)",
    )
    add(
        "--simulate",
        action="store_true",
        help="simulate, too, where there is an accelerator to measure (default: off; without an "
        "accelerator all is simulated)",
    )
    add("--markdown", action="store_true", help="print tables in markdown (default: as text)")
    of_machine = parser.add_argument_group("the simulated machine")
    for each in dataclasses.fields(Machine):
        bounds: dict[str, float] = {"least": LEAST_RATE}
        if each.name == "achieved":
            bounds = {"above": 0.0, "most": 1.0}
        elif each.name in ("launch", "latency"):
            bounds = {"least": 0.0, "most": 1.0}
        default = getattr(Machine, each.name)
        of_machine.add_argument(
            f"--{each.name}",
            type=number(float, **bounds),
            default=default,
            help=f"{OF_THE_MACHINE[each.name]} (default {short(default)})",
        )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of_options()
    options = parser.parse_args(arguments)
    for model in options.share:
        experts = experts_of(model)
        if experts is not None and options.ranks > experts:
            parser.error(f"argument --ranks: {options.ranks} is more than {model}'s experts")
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
