"""What QK-Clip adds to a step, beside a loop over heads that reads each logit on the host.

    make bench BENCHMARKS=benchmarks/qk_clip.py ARGS="--rounds 9"

The contenders take the same step of the query and key projections of some layers, in turn: without
QK-Clip, with it, and followed by the loop, which waits for the device once per head. Every second
head is clipped, by a factor so near to 1 that weights stay what they are over many calls.
Operations are those that torch dispatches in one step.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from timing import least_sample, load_kernel, machine, milliseconds, pick_device, show, take_turns

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from counters import count

THRESHOLD = 100.0
HEAD_DIM = 128

# Layers, model width, query heads, key heads.
SIZES = {"cpu": (16, 256, 16, 4)}
DEFAULT_SIZES = (32, 4096, 32, 8)  # of Llama 3 8B

WITHOUT, WITH, LOOP = "step", "step with QK-Clip", "step, then a loop over heads"
COLUMNS = ("", "least ms", "median ms", "added ms", "operations", "added")


class Layers:
    """Query and key projections with gradients, and logits of which every second is too large."""

    def __init__(self, layers: int, dim: int, heads: int, kv_heads: int, device: torch.device):
        self.group = heads // kv_heads
        self.named: list[tuple[str, nn.Parameter]] = []
        self.logits: dict[int, Tensor] = {}
        for layer in range(layers):
            for name, count_of in (("wq", heads), ("wk", kv_heads)):
                param = nn.Parameter(torch.randn(count_of * HEAD_DIM, dim, device=device))
                param.grad = torch.randn_like(param)
                self.named.append((f"layers.{layer}.{name}.weight", param))
            large = torch.arange(heads, device=device) % 2 == 0
            self.logits[layer] = torch.where(large, THRESHOLD * (1 + 1e-6), 1.0)

    def optimizer(self, kernel: Any, clip: bool) -> Any:
        group = {"params": self.named, "use_muon": True, "none_grad": False}
        config = {"head_dim": HEAD_DIM, "threshold": THRESHOLD} if clip else None
        return kernel.Muon([group], lr=1e-3, clip_config=config)

    def clip_head_by_head(self) -> None:
        """The textbook: a number of each head, read by the host, and its rows."""
        for layer, logits in self.logits.items():
            (_, q), (_, k) = self.named[2 * layer : 2 * layer + 2]
            scales_q, scales_k = [1.0] * len(logits), [1.0] * (len(logits) // self.group)
            for head in range(len(logits)):
                logit = logits[head].item()
                if logit > THRESHOLD:
                    scales_q[head] = math.sqrt(THRESHOLD / logit)
                    key = head // self.group
                    scales_k[key] = min(scales_k[key], scales_q[head])
            for param, scales in ((q, scales_q), (k, scales_k)):
                if min(scales) < 1:
                    rows = torch.tensor(scales).to(param.device)
                    param.data.view(len(scales), -1).mul_(rows[:, None])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs=4, metavar=("LAYERS", "DIM", "HEADS", "KV"))
    parser.add_argument("--rounds", type=int, default=7, help="samples of each contender")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    options = parser.parse_args(arguments)
    kernel, device = load_kernel(), pick_device()
    sizes = options.sizes or SIZES.get(device.type, DEFAULT_SIZES)
    count_of_layers, dim, heads, kv_heads = sizes
    layers = Layers(count_of_layers, dim, heads, kv_heads, device)
    plain, clipping = (layers.optimizer(kernel, clip) for clip in (False, True))

    def loop() -> None:
        plain.step()
        layers.clip_head_by_head()

    contenders: dict[str, Callable[[], object]] = {
        WITHOUT: plain.step,
        WITH: lambda: clipping.step(qk_logits=layers.logits),
        LOOP: loop,
    }
    seconds = take_turns(contenders, options.rounds, least_sample(device))
    operations = {name: count(call).operations for name, call in contenders.items()}
    rows = []
    for name in contenders:
        added = (min(seconds[name]) - min(seconds[WITHOUT])) * 1e3
        more = operations[name] - operations[WITHOUT]
        rows.append(
            [name, *milliseconds(seconds[name]), f"{added:.2f}", f"{operations[name]}", f"{more}"]
        )
    title = (
        f"QK-Clip in {count_of_layers} layers, {heads} query and {kv_heads} key heads of "
        f"{HEAD_DIM} × {dim}; {machine(device)}"
    )
    show(title, COLUMNS, rows, markdown=options.markdown)


if __name__ == "__main__":
    main()
