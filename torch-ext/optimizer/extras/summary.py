"""`Muon.summary`: what a step does with every parameter, from its plan, as data and text."""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from torch import Tensor

from .. import adamw, regions
from ..async_utils import Do, Event
from ..distributed import dtensors, zero2
from ..distributed.chunks import MOMENT_BYTES, Chunk
from ..distributed.plan import Entry, Lane, Plan, Unit
from ..distributed.replicas import is_divided
from ..parameters.options import Group, Settings
from ..parameters.survey import Survey
from ..rules.heads import LARGE, POSITIONS

COLUMNS = ("parameter", "shape", "owner", "FLOPs", "moved by all")
NUMBERS = COLUMNS[3:]  # aligned to the right
WIDTH = 100  # of printed lines, except those with a longer name
_LAYER = re.compile(r"\.\d+\.")  # in names of parameters in a list of layers


@dataclass(frozen=True)
class Summary:
    """What a step does, from one rank's plan; ``print`` shows it as a table.

    Args:
        rows: one for each parameter: ``name``, ``group`` (number), ``shape``, ``dtype``,
            ``placement``, ``sharded``, ``algorithm``, ``matrices`` (count), ``owners`` (global
            ranks), ``whole`` (owned where they are, without communication), ``flops``
            (orthogonalization, all owners), ``bytes`` (sent for it), and ``clipped`` (True if
            QK-Clip scales it). For experts divided among ranks, these are the matrices of this rank
            and its peers.
        totals: for this rank: ``flops``, ``sent_bytes``, ``received_bytes``, ``chunks`` with
            communication, how many of them are ``in_flight``, ``balance`` (the maximum of the
            peers' FLOPs over their mean), and ``state`` (where it is).
        schedule: if requested, the events of the last step, in order: ``event``, its object
            ``what``, and for chunks this rank's ``matrices`` to orthogonalize, ``flops``, and
            ``sent_bytes``.
        notes: remarks, for example about Muon's matrices that may be embeddings or output heads.
    """

    rows: list[dict[str, Any]]
    totals: dict[str, Any]
    schedule: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        t = self.totals
        lines = [
            *_table(self.rows),
            f"this rank: {short(t['flops'])}FLOP per step; sends {short(t['sent_bytes'])}B and "
            f"receives {short(t['received_bytes'])}B in chunks: {t['chunks']}, in flight: "
            f"{t['in_flight']}",
            f"balance: {t['balance']:.2f} (the most FLOPs of any rank over the mean)",
            f"state: {t['state']}",
            *self.notes,
        ]
        if self.schedule:
            lines.append("order of the last step:")
        for number, event in enumerate(self.schedule):
            line = f"{number:4}  {event['event']:24}{event['what']:28}"
            if event["matrices"]:
                line += f"{event['matrices']} matrices, {short(event['flops'])}FLOP  "
            if event["sent_bytes"]:
                line += f"sends {short(event['sent_bytes'])}B"
            lines.append(line.rstrip())
        return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a table, in sections by algorithm, dtype, and placement.

    These three stand once above their parameters, because they would be the widest columns. A name
    that leaves no room for the other columns gets its own line.
    """
    sections: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for row in rows:
        sections[_title(row)].append(_cells(row))
    table = [COLUMNS, *(cells for section in sections.values() for cells in section)]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(COLUMNS))]
    widths[0] = max(len(COLUMNS[0]), min(widths[0], WIDTH - sum(w + 2 for w in widths[1:])))

    def line(cells: Sequence[str]) -> str:
        name, *others = cells
        others = [
            cell.rjust(width) if column in NUMBERS else cell.ljust(width)
            for cell, column, width in zip(others, COLUMNS[1:], widths[1:])
        ]
        own_line = f"{name}\n" if len(name) > widths[0] else ""
        return own_line + "  ".join([("" if own_line else name).ljust(widths[0]), *others])

    lines = [line(COLUMNS), "  ".join("-" * width for width in widths)]
    for title, section in sections.items():
        lines += ["", *textwrap.wrap(title, WIDTH, subsequent_indent="    "), *map(line, section)]
    return [*lines, ""]


def summarize(
    groups: Sequence[Group],
    survey: Survey,
    settings: Settings,
    offloads: bool,
    clipped: Collection[int],
    last: Optional[tuple[Plan, Sequence[Event]]] = None,
) -> Summary:
    """Summarizes this rank's plan of a step with all trainable parameters.

    Args:
        groups, survey, settings: what the plan is made from.
        offloads: True if CPU offload is on.
        clipped: ids of the parameters that QK-Clip scales.
        last: plan and schedule of the last step, if requested.
    """
    plan = survey.planner(groups, settings).plan()
    state = "in host memory" if settings.streams_state else "with its parameters"
    if offloads and not settings.streams_state:
        state += ": CPU offload is on, but the parameters are on the CPU"
    rows: dict[tuple[int, int], dict[str, Any]] = {}  # by group and index in it
    averaging = 0.0
    for number, (group, entries) in enumerate(zip(groups, survey.entries)):
        for index, (param, entry) in enumerate(zip(group.params, entries)):
            placement, traffic = dtensors.describe(param), 0
            if settings.replicas is not None and not dtensors.is_dtensor(param):
                ranks = len(settings.replicas.ranks)
                placement = f"on each of {ranks} ranks"
                if settings.zero2_replicas is not None and param.requires_grad:
                    sent = _bytes_of_zero2(param, group.use_muon, ranks)
                    averaging += sent
                    traffic = round(sent * ranks)
            rows[number, index] = {
                "name": survey.names[number][index],
                "group": number,
                "shape": tuple(param.shape),
                "dtype": param.dtype,
                "placement": placement,
                "sharded": dtensors.is_sharded(param),
                "algorithm": _algorithm(param, group, entry),
                "matrices": 0,
                "owners": set(),
                "whole": False,
                "flops": 0,
                "bytes": traffic,
                "clipped": param.requires_grad and id(param) in clipped,
            }
    # FLOPs of each rank, by the group of peers that share the work on an entry.
    loads: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    is_reference = settings.use_distributed_muon
    for unit, owners, lane in _gathered_units(plan) if is_reference else _units(plan):
        entry = plan.entries[unit.entry]
        flops = unit.count * entry.cost(unit.block)
        loads[owners if is_reference else entry.peers(plan.rank)].update(
            dict.fromkeys(owners, flops)
        )
        row = rows[entry.group, entry.index]
        row["matrices"] += unit.count
        row["whole"] = len(owners) == 1 and lane is None and (row["whole"] or not row["owners"])
        row["owners"].update(owners)
        row["flops"] += len(owners) * flops
        if lane is not None:
            row["bytes"] += sum(_bytes_moved(plan, lane, unit, rank) for rank in owners)
    for row in rows.values():
        row["owners"] = sorted(row["owners"])
    notes = [
        f"note: {name} has {why}; AdamW trains embeddings and heads better than Muon"
        for name, why in likely_embeddings(groups).items()
    ]
    if is_reference:
        notes.append(
            "note: every rank gathers and orthogonalizes every matrix; bytes are not counted"
        )
    totals = _totals(plan, loads, round(averaging), state)
    if last is not None and not last[1]:
        notes.append("no step has run yet, so there is no schedule to show")
    schedule = [] if last is None else _order_of(*last)
    return Summary(list(rows.values()), totals, notes=notes, schedule=schedule)


def _totals(
    plan: Plan, loads: Mapping[tuple[int, ...], Counter[int]], averaging: int, state: str
) -> dict[str, Any]:
    """Totals of this rank, which sends and receives ``averaging`` bytes to average gradients."""
    chunks = [_bytes_of_chunk(lane, chunk) for lane in plan.lanes for chunk in lane.chunks]
    balances = (
        max(load.values()) * len(peers) / sum(load.values())
        for peers, load in loads.items()
        if any(load.values())
    )
    return {
        "flops": sum(load[plan.rank] for load in loads.values()),
        "sent_bytes": averaging + sum(gather + scatter for gather, scatter, _ in chunks),
        "received_bytes": averaging + sum(received for _, _, received in chunks),
        "chunks": len(chunks),
        "in_flight": max((lane.in_flight for lane in plan.lanes), default=0),
        "balance": max(balances, default=1.0),
        "state": state,
    }


def _bytes_of_chunk(lane: Lane, chunk: Chunk) -> tuple[int, int, int]:
    """Bytes that this rank sends to gather a chunk, sends to scatter it, and receives."""
    size, moments = lane.wire.itemsize, (len(lane.peers) - 1) * chunk.moments_slot * MOMENT_BYTES
    received = sum((*chunk.gather.received, *chunk.scatter.received)) * size + moments
    return sum(chunk.gather.sent) * size, sum(chunk.scatter.sent) * size + moments, received


# Objects of the events that have no chunk, by the number of the event.
_OBJECTS = {Do.AVERAGE: "bucket {}", Do.ADAMW: "part {}", Do.SHARE_ROWS: "group {} of AdamW's"}


def _order_of(plan: Plan, schedule: Sequence[Event]) -> list[dict[str, Any]]:
    """The events of a step, as in `Summary.schedule`."""
    rows = []
    for event in schedule:
        row = {"event": event.do.value, "what": "", "matrices": 0, "flops": 0, "sent_bytes": 0}
        rows.append(row)
        if event.do in _OBJECTS:
            row["what"] = _OBJECTS[event.do].format(event.number)
            continue
        lane = plan.all_lanes[event.lane]
        chunk = lane.chunks[event.number]
        of_ranks = f"of {_ranks(lane.peers)}" if len(lane.peers) > 1 else "without traffic"
        row["what"] = f"chunk {event.number} {of_ranks}"
        gathered, scattered, _ = _bytes_of_chunk(lane, chunk)
        if event.do is Do.GATHER:
            row["sent_bytes"] = gathered
        elif event.do is Do.ORTHOGONALIZE:
            row["sent_bytes"] = scattered
            row["matrices"] = sum(batch.matrix_count for batch in chunk.batches)
            row["flops"] = sum(map(plan.flops, chunk.batches))
    return rows


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}–{ranks[-1]}"
    if len(ranks) > 4:
        return f"{len(ranks)} of ranks {ranks[0]}–{ranks[-1]}"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _units(plan: Plan) -> Iterator[tuple[Unit, tuple[int, ...], Optional[Lane]]]:
    """All units of this rank and its peers, with their owners and the lane they travel on."""
    for lane in plan.all_lanes:
        for unit, owner in lane.owners:
            yield unit, (lane.peers[owner],), lane if len(lane.peers) > 1 else None
    for unit, rank in plan.whole_on_peers:
        yield unit, (rank,), None


def _gathered_units(plan: Plan) -> Iterator[tuple[Unit, tuple[int, ...], None]]:
    """All units in `reference`, with the ranks that each orthogonalize them."""
    for number, entry in enumerate(plan.entries):
        ranks = (plan.rank,) if entry.sharding is None else tuple(sorted(entry.sharding.ranks))
        for block in entry.matrices.blocks:
            yield Unit(number, block, regions.whole(block.shape)), ranks, None


def _bytes_moved(plan: Plan, lane: Lane, unit: Unit, owner: int) -> int:
    """Bytes sent to one owner of a unit and back."""

    def held(region: regions.Region) -> int:
        return sum(map(regions.numel, unit.parts(region)))

    entry, numel = plan.entries[unit.entry], regions.numel(unit.box)
    elements = numel - held(entry.momentum_region(owner))
    elements += entry.replica_count(owner) * numel - held(entry.region(owner))
    moments = 0
    if entry.second_moment:
        moments = (len(lane.peers) - 1) * unit.count * entry.matrices.moments(unit.block)
    return elements * lane.wire.itemsize + moments * MOMENT_BYTES


def _algorithm(param: Tensor, group: Group, entry: Optional[Entry]) -> str:
    if not param.requires_grad:
        return "frozen"
    if entry is None:
        return "AdamW, fused" if adamw.is_fused(param) else "AdamW"
    family = group.ns_coefficients if isinstance(group.ns_coefficients, str) else "own coefficients"
    forms = []
    for shape in dict.fromkeys((block.rows, block.cols) for block in entry.matrices.blocks):
        form = entry.recipe.form(*shape)
        kind = "gram" if form.is_gram else "standard"
        if form.is_gram and form.restarts:
            kind += f", restarted after {' and '.join(map(str, form.restarts))}"
        forms.append(f"{kind} ({form.why})")
    chosen = " and ".join(dict.fromkeys(forms)) or "no rows"
    dtype = str(entry.recipe.dtype).removeprefix("torch.")
    return f"Muon, {family} ×{group.ns_steps}, {chosen}, {dtype}"


def _title(row: Mapping[str, Any]) -> str:
    """What the rows of one section of the table have in common."""
    dtype = str(row["dtype"]).removeprefix("torch.")
    clip = ", QK-Clip" if row["clipped"] else ""
    return f"{dtype}, {row['placement']}: {row['algorithm']}{clip}"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    shape = "×".join(map(str, row["shape"])) or "scalar"
    if row["matrices"] > 1:
        may_hold_experts = row["sharded"] and len(row["shape"]) > 2
        shape += f" ({row['matrices']} {'here' if may_hold_experts else 'matrices'})"
    owner = _ranks(row["owners"]) if row["owners"] else "–"
    if row["whole"] and (row["sharded"] or dtensors.world_size() > 1):
        owner = "each its own" if row["sharded"] else "each rank"
    return (
        row["name"],
        shape,
        owner,
        short(row["flops"]) if row["flops"] else "–",
        f"{short(row['bytes'])}B" if row["bytes"] else "–",
    )


def short(number: float) -> str:
    """Formats a number with three digits and a unit prefix: 1.23 M."""
    for unit in ("", "k", "M", "G", "T"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} P"


def likely_embeddings(groups: Sequence[Group]) -> dict[str, str]:
    """Muon's matrices that may be embeddings or heads, and why, judged without the model.

    These have as many rows as an embedding that AdamW trains, or at least a thousand rows and more
    than six times as many rows as columns. A number of rows counts as a hidden size, not a
    vocabulary, if it is also a side of a matrix in a layer, a number of columns, or the number of
    rows of more than two matrices.
    """

    def matrices(is_muon: bool) -> list[tuple[str, int, int, bool]]:
        """Names, rows, columns, and True if the matrix is known to be in a list of layers."""
        return [
            (name, *param.shape, bool(_LAYER.search(name)))
            for group in groups
            if group.use_muon is is_muon
            for name, param in zip(map(group.name_of, range(len(group.params))), group.params)
            if param.requires_grad and param.ndim == 2
        ]

    muons = matrices(True)
    hidden = {side for _, *sides, is_in_a_layer in muons if is_in_a_layer for side in sides}
    alike = Counter(rows for _, rows, _, _ in muons)
    hidden |= {rows for rows, count in alike.items() if count > 2}
    hidden |= {cols for _, _, cols, _ in muons}
    tables = {
        rows: f"as many rows as {name}"
        for name, rows, cols, is_in_a_layer in matrices(False)
        if rows > cols > 1 and not (is_in_a_layer or POSITIONS.search(name.removesuffix(".weight")))
    }
    reasons: dict[str, str] = {}
    for name, rows, cols, is_in_a_layer in muons:
        if is_in_a_layer or rows in hidden or "lora_" in name:
            continue
        if rows in tables:
            reasons[name] = tables[rows]
        elif rows >= LARGE and rows > 6 * cols:
            reasons[name] = f"{rows} rows, like a vocabulary"
    return reasons


def _bytes_of_zero2(param: Tensor, use_muon: bool, ranks: int) -> float:
    """Bytes that each rank sends to average a gradient and gather the rows that AdamW updates."""
    divided = use_muon or is_divided(param.shape, ranks)
    gradient = zero2.gradient_in_bucket(param, divided, ranks)
    size = (ranks - 1) * gradient.slot_numel(ranks) * gradient.dtype.itemsize
    sent = float(size) if gradient.in_slots else 2 * size / ranks
    if divided and not use_muon:
        rows = zero2.BucketTensor(gradient.shape, param.dtype, param.device, True)
        sent += (ranks - 1) * rows.slot_numel(ranks) * param.dtype.itemsize
    return sent
