"""What is known of layouts, as tables: for terminals, for markdown, and of who owns what."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from planner.costs import HOST, NETWORK, RECEIVED, SENT, Costs, Ints
from planner.deployment import Layout
from planner.machine import Machine
from planner.timeline import Timeline

LEGEND = """\
owners: ranks that orthogonalize. makespan / bound: what a step waits for, chunk after chunk, over
  what no assignment of whole matrices can beat.
chunks: what matrices travel in. in flight: begun and not ended; at most --warmup-step + 1.
  --chunk-size makes chunks of so many matrices.
staged: buffers of the chunks in flight. Nothing here says that the model fits: activations, and
  what is being orthogonalized, come on top of this and of weights, gradients and state.
step: estimated, without element-wise work. limit: the longer of arithmetic and traffic, each on the
  rank that has most, and a sixth of the shorter, which is the part that cannot hide.
gradients: only zero2 averages them in the step. Elsewhere DDP or FSDP2 does it in backward, which
  no other row counts."""


@dataclass(frozen=True)
class Report:
    """What there is to know of a layout.

    Args:
        layout: which.
        entries: Muon's weights, as the plan sees them.
        local: elements of Muon's weights, (ranks,).
        held: elements of all weights, gradients and state, (ranks,).
        backward: elements that each rank sends to average gradients; None: in the step.
        itemsize: bytes of each.
        costs: of all ranks.
        timeline: of one of them.
        machine: that it is estimated for.
        seconds: that planning and counting took.
    """

    layout: Layout
    entries: list[Any]
    local: Ints
    held: Ints
    backward: float | None
    itemsize: int
    costs: Costs
    timeline: Timeline
    machine: Machine
    seconds: float

    def rows(self) -> dict[str, str]:
        """What is printed, by its label."""
        c, lanes = self.costs, self.costs.lanes
        return {
            "replicas": self._replicas(),
            "owners": f"{np.count_nonzero(c.flops):,} of {len(c.flops):,} ranks",
            "TFLOP per rank, mean": number(c.flops.mean() / 1e12),
            "most / mean": f"{c.flops.max() / c.flops.mean():.2f}",
            "makespan / bound": f"{c.makespan / c.bound:.2f}",
            **self._traffic(),
            "Muon's local weights, GB, most": self._gigabytes(self.local.max()),
            "weights, gradients and state, GB, most": self._gigabytes(self.held.max()),
            "staged, GB, most": number(self.timeline.staged / 1e9),
            "chunks": str(max((len(lane.flops) for lane in lanes), default=0)),
            "chunks in flight": str(max((lane.in_flight for lane in lanes), default=0)),
            **self._times(),
        }

    def _traffic(self) -> dict[str, str]:
        moved, around = self.costs.bytes, self._around()  # by every rank, sent and received
        sent, received = moved[:, SENT].sum(0) + around, moved[:, RECEIVED].sum(0) + around
        per_element = moved[:, SENT].sum() / self.local.sum()
        backward = "in the step" if self.backward is None else self._gigabytes(self.backward)
        return {
            "sent within a host, GB, most": number(sent[HOST].max() / 1e9),
            "sent to other hosts, GB, most": number(sent[NETWORK].max() / 1e9),
            "of which averages and AdamW's rows, GB": number(around.sum() / 1e9),
            "received, GB, most": number(received.sum(0).max() / 1e9),
            "bytes sent per local element": f"{per_element:.2f}",
            "gradients averaged in backward, GB": backward,
        }

    def _times(self) -> dict[str, str]:
        seconds, limit = self.timeline.seconds, self.costs.limit(self.machine)
        return {
            "step, ms": number(1e3 * seconds),
            "limit, ms": number(1e3 * limit),
            "step / limit": f"{seconds / limit:.2f}" if limit else "0",
        }

    def _gigabytes(self, elements: float) -> str:
        return number(elements * self.itemsize / 1e9)

    def _around(self) -> np.ndarray:
        """Bytes of ZeRO-2's averages and gathers that each rank sends, (links, 1)."""
        if self.costs.averages is None:
            return np.zeros((2, 1))
        ranks = len(self.local)
        by_link = self.costs.averages.all.by_link(ranks, -(-ranks // self.machine.ranks_per_host))
        return np.array(by_link)[:, None]

    def _replicas(self) -> str:
        """What those do that hold the same parts of a matrix."""
        told = {
            "share the work" if entry.spread else "each do all work"
            for entry in self.entries
            if len(entry.holders(0)) > len(entry.holders(0, replicas=False))
        }
        return " or ".join(sorted(told)) or "none"


# -- layouts side by side --------------------------------------------------------------------------


def compare(reports: Sequence[Report]) -> Table:
    """A column for each; rows that say nothing of any are left out."""
    table = Table()
    table.add_column("")
    columns = [report.rows() for report in reports]
    for report in reports:
        table.add_column(report.layout.text, justify="right")
    for label in columns[0]:
        cells = [column[label] for column in columns]
        if any(cell not in ("0", "none") for cell in cells):
            table.add_row(label, *cells)
    return table


MARKDOWN = (
    "TFLOP per rank, mean",
    "most / mean",
    "makespan / bound",
    "sent within a host, GB, most",
    "sent to other hosts, GB, most",
    "bytes sent per local element",
    "weights, gradients and state, GB, most",
    "staged, GB, most",
    "step, ms",
    "limit, ms",
    "step / limit",
)


def markdown_head() -> list[str]:
    head = ["model", "ranks", "layout", *MARKDOWN]
    return [f"| {' | '.join(head)} |", "|---|---|---|" + "---:|" * len(MARKDOWN)]


def markdown_row(model: str, ranks: int, report: Report) -> str:
    rows = report.rows()
    cells = [model, str(ranks), f"`{report.layout.text}`", *(rows[label] for label in MARKDOWN)]
    return f"| {' | '.join(cells)} |"


# -- owners ----------------------------------------------------------------------------------------


def owners_table(kernel: Any, report: Report, chunk_size: int, warmup_step: int) -> Table:
    """Who owns the matrices that one rank holds parts of; weights of all layers in one row."""
    rank = report.timeline.rank
    plan = kernel.distributed.plan.Planner(
        report.entries, rank, chunk_size=chunk_size, warmup_step=warmup_step
    ).plan()
    owned = [
        (unit, lane.peers[owner])
        for lane in (*plan.lanes, *plan.local_lanes)
        for unit, owner in lane.owners
    ]
    owners: dict[tuple, set[int]] = defaultdict(set)
    matrices: dict[tuple, int] = defaultdict(int)
    for unit, owner in (*owned, *plan.whole_on_peers):
        entry = plan.entries[unit.entry]
        name = re.sub(r"\.\d+\.", ".*.", entry.name.removesuffix(".weight"))
        key = (name, unit.block.rows, unit.block.cols, entry.cost(unit.block))
        owners[key].add(owner)
        matrices[key] += unit.count
    table = Table()
    for column in ("weight", "matrices", "shape", "GFLOP each", "owners", "ranks"):
        table.add_column(column, justify="left" if column in ("weight", "ranks") else "right")
    for key, count in matrices.items():
        name, rows, cols, flops = key
        ranks = sorted(owners[key])
        shown = (name, f"{count:,}", f"{rows}×{cols}", number(flops / 1e9), f"{len(ranks):,}")
        table.add_row(*shown, _ranges(ranks))
    return table


def _ranges(ranks: Sequence[int], most: int = 6) -> str:
    """0–3, 7, 9–12, …"""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [f"{a}" if a == b else f"{a}–{b}" for a, b in runs[:most]]
    return ", ".join(shown + ["…"] * (len(runs) > most))


def number(value: float) -> str:
    """Three digits."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
