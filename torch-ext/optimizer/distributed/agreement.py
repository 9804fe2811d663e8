"""Compares what ranks are about to do before a step's first collective: all step or all raise.

All ranks that a chain of meshes connects, a *union*, decide together: if one rank raised alone, the
others would wait for it. Before a step, depending on ``consistency_check``, every rank sends its
union one record of fixed size: a hash of its notes, and its vote on whether to step. The exchange
runs on the CPU over gloo, so hosts wait for each other and devices don't. Ranks send their notes as
text only if hashes differ, sets have changed, or a rank has an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch.profiler import record_function

from .connections import Ranks, all_gather, close_connections
from .dtensors import this_rank
from .plan import ranks_sort_key

CHECKS = ("step", "plan", "off")

# Every exchange starts with one record of three int64, because gloo aborts if sizes differ. The
# first field names the content: one of these, or a hash of the union for the vote on a step.
_SETS, _DETAILS = range(2)

# A rank's vote on a step, in the second field of its record: a sum of these flags.
_SKIPS, _FAILS, _HAS_CHANGED, _ONLY_CREATES = 1, 2, 4, 8

_OPTIMIZERS_DIFFER = (
    "ranks {} and {} step different optimizers; create, copy, load and step the same optimizers "
    "in the same order on all ranks"
)


class StepNotes(NamedTuple):
    """What this rank is about to do in a step with the ranks of one set."""

    lines: Sequence[str]  # what must be equal on all ranks: parameters, placements, options
    gradients: Sequence[str]  # names of the parameters that take part
    owners: str = ""  # hashes of lanes, which follow from lines and gradients
    optimizer: str = ""  # its number among the ranks' optimizers, and how often it has stepped


class _Union(NamedTuple):
    """The ranks that step together; all of them have equal fields, except for ``world``."""

    sets: list[Ranks]  # the sets of all its ranks, sorted by `_in_order`
    ranks: Ranks
    identity: int  # a hash of the sets
    world: Callable[[], Any]  # returns the default process group of that time; None once it's gone


class Registration:
    """Numbers optimizers in order of construction, to distinguish those with equal parameters.

    Each set of ranks counts the optimizers that have parameters on it and are alive or have
    stepped. If only one rank constructs an extra optimizer of shared parameters, optimizers
    constructed later have different numbers, and their steps raise. ``sets`` is the optimizer's
    method that returns the sets that share its parameters.
    """

    _all: list[Registration] = []  # in order of construction

    def __init__(self, sets: Callable[[], set[Ranks]]):
        self._sets = weakref.WeakMethod(sets)
        self._numbers: dict[Ranks, int] = {}
        Registration._all.append(self)

    @property
    def optimizer(self) -> Any:
        """The optimizer itself, even if the caller has only a wrapper around it."""
        return self._sets().__self__  # type: ignore[union-attr]

    def number(self, ranks: Ranks) -> int:
        """Counts the optimizers that ``ranks`` share and that were made before this one."""
        if ranks not in self._numbers:
            Registration._all = [o for o in Registration._all if o._numbers or o._sets()]
            earlier = Registration._all[: Registration._all.index(self)]
            self._numbers[ranks] = sum(other._is_shared_by(ranks) for other in earlier)
        return self._numbers[ranks]

    def _is_shared_by(self, ranks: Ranks) -> bool:
        sets = self._sets()
        return ranks in self._numbers or (sets is not None and ranks in sets())


class Agreement:
    """Decides together with the other ranks whether to step, and caches which ranks those are.

    Copies and pickles remember nothing: if one rank of a union continues with a copy, all must.

    Attributes:
        others_may_step: True if other ranks may go on to step. It stays True if the exchange fails
            here after this rank voted to step, since others may have received all records.
        has_compared: True if notes were compared in this step.
        only_creates: True if the step only creates state, on all ranks.
        steps: number of steps since this object was created.
    """

    def __init__(self) -> None:
        self.others_may_step = self.has_compared = self.only_creates = False
        self.steps = 0
        self._union: Optional[_Union] = None
        self._structure: Optional[Mapping[Ranks, Any]] = None  # of the last agreement

    def __reduce__(self) -> tuple:
        return Agreement, ()

    def begin(self) -> None:
        """Begins a step; this rank hasn't voted yet."""
        self.others_may_step = self.has_compared = False

    def decide(
        self,
        how_often: str,
        structure: Mapping[Ranks, Any],
        sets: Collection[Ranks],
        notes: Callable[[], Mapping[Ranks, StepNotes]],
        skip: Optional[bool],
        only_creates: bool = False,
    ) -> bool:
        """Returns True if the ranks skip this step.

        Args:
            how_often: one of `CHECKS`.
            structure: what this rank shares with each of its sets of ranks.
            sets: for each mesh, the ranks that share parameters with this rank.
            notes: returns the notes of this step.
            skip: True if this rank wants to skip; None unless a GradScaler lets the step decide.
            only_creates: True if, as far as this rank knows, the step only creates state.

        Raises:
            ValueError: ranks would do different things, or one has an error; the text is the same
                on all of them.
            RuntimeError: a rank didn't arrive, or died during the exchange.
        """
        self.others_may_step = any(len(ranks) > 1 for ranks in sets)
        is_due = self._is_due(how_often, structure, skip is not None)
        self.only_creates = only_creates and (is_due or not self.others_may_step)
        if not is_due:
            return bool(skip)
        with record_function("Muon.agree"):
            skips = self.check(notes(), None, sets, bool(skip))
        self.has_compared, self._structure = True, structure
        return skips

    def report(
        self,
        error: BaseException,
        how_often: str,
        structure: Mapping[Ranks, Any],
        sets: Collection[Ranks],
        skip: Optional[bool],
    ) -> None:
        """Sends the other ranks an error that keeps this rank from stepping; see `decide`."""
        if self._is_due(how_often, structure, skip is not None):
            is_plain = isinstance(error, ValueError)
            text = str(error) if is_plain else f"{type(error).__name__}: {error}"
            # Ignored: the caller raises this rank's own error, which is the cause or more specific.
            with contextlib.suppress(RuntimeError, ValueError):
                self.check({}, text, sets, bool(skip))

    def revoke(self) -> None:
        """Forgets the last agreement, so that ranks compare notes in the next step."""
        self.others_may_step, self._structure = False, None

    def _is_due(self, how_often: str, structure: Mapping[Ranks, Any], may_skip: bool) -> bool:
        """True if this step compares notes.

        With ``"plan"``, only a change that all ranks of the union see makes a step compare notes.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_backend() == "fake":
            return False
        if how_often != "plan" or may_skip or self._structure is None:
            return may_skip or how_often != "off"
        union = self._union.ranks if self._union is not None else ()
        before = self._structure
        common = [ranks for ranks in {*structure, *before} if set(ranks).issuperset(union)]
        return any(structure.get(ranks) != before.get(ranks) for ranks in common)

    def check(
        self,
        notes: Mapping[Ranks, StepNotes],
        error: Optional[str],
        sets: Iterable[Ranks],
        skip: bool = False,
    ) -> bool:
        """Compares notes with all ranks of this rank's union; True if one of them skips the step.

        All ranks of each set must make this call, and so must ranks that had sets at the last call,
        even if they have none now. Each key of ``notes`` is a set or a subset of one. Notes are
        ignored if there is an ``error``.
        """
        self.others_may_step, rank = False, this_rank()
        sets = _in_order(ranks for ranks in sets if len(ranks) > 1 and rank in ranks)
        notes = {ranks: notes[ranks] for ranks in notes if rank in ranks}
        union, self._union = self._union, None  # until all records have arrived
        if union is not None and union.world() is not dist.group.WORLD:
            union = None
        fails = error is not None
        vote = _SKIPS * skip + _FAILS * fails + _ONLY_CREATES * self.only_creates
        try:
            while sets or union is not None:
                union = union or _find_union(sets)
                # A rank whose sets have changed still sends its record to the old union: it can't
                # know which other ranks have changed their sets, too.
                has_changed = sets != [ranks for ranks in union.sets if rank in ranks]
                digest = 0 if fails or has_changed else _digest_of_notes(notes)
                self.others_may_step = not (fails or skip)
                record = [union.identity, vote + _HAS_CHANGED * has_changed, digest]
                _, votes, digests = _exchange_records(union.ranks, record).unbind(1)
                skips = bool((votes & _SKIPS).any())
                have_changed = bool((votes & _HAS_CHANGED).any())
                differ = have_changed or bool((votes & _FAILS).any() or digests.sum())  # mod 2⁶⁴
                self.others_may_step = not (differ or skips)
                if not differ:
                    self._union, self.only_creates = union, bool((votes & _ONLY_CREATES).all())
                    return skips
                details = [error, sets, list(notes.items())]
                by_rank = zip(union.ranks, _exchange_text(union.ranks, _DETAILS, details))
                problem = _find_problem(dict(by_rank), have_changed)
                if problem is not None:
                    self._union = union
                    raise ValueError(problem)
                union = None
        except ValueError:
            self.others_may_step = False
            raise
        except BaseException:
            # The failed exchange left its connections unusable. The others are closed, too, so that
            # ranks that wait for this one fail at once, not after their timeout.
            self._union = None
            for ranks in [*sets, *([*union.sets, union.ranks] if union is not None else ())]:
                close_connections(ranks)
            raise
        return skip


def _in_order(sets: Iterable[Ranks]) -> list[Ranks]:
    """Sorts sets, larger ones first, into the order in which all ranks exchange."""
    return sorted(set(sets), key=ranks_sort_key)


def _find_union(sets: Sequence[Ranks]) -> _Union:
    """Finds the union of a rank with these sets: in each round, ranks pass on the sets new to them.

    If one set has all ranks, one round is enough. Otherwise there are as many rounds as sets: in
    each round, any rank that lacks sets learns another one. Raises ValueError if a set that one
    rank reports is missing on another of its members. Only ranks in a set that contains both see
    this; the rest wait until the timeout.
    """
    known, sent = set(sets), set[Ranks]()
    rounds, needed = 0, 1
    while rounds < needed:
        news, sent = known - sent, set(known)
        for ranks in sets:
            texts = _exchange_text(ranks, _SETS, _in_order(news - {ranks}))
            reports = {rank: {ranks, *map(tuple, text)} for rank, text in zip(ranks, texts)}
            contradiction = _contradiction(reports) if rounds == 0 else None  # of own sets only
            if contradiction is not None:
                raise ValueError(contradiction)
            known.update(*reports.values())
        everyone = set().union(*known)
        rounds += 1
        needed = 1 if everyone in map(set, known) else len(known)
    all_sets, world = _in_order(known), weakref.ref(dist.group.WORLD)
    return _Union(all_sets, tuple(sorted(everyone)), _digest([repr(all_sets)]), world)


def _digest(lines: Iterable[str]) -> int:
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _digest_of_notes(notes: Mapping[Ranks, StepNotes]) -> int:
    """A number whose sum over a union is 0, modulo 2⁶⁴, if each set's ranks have equal notes.

    In a set of n ranks, the first rank's hash counts n − 1 times and every other hash −1 times. If
    notes differ, the sum is 0 with a probability below 2⁻⁴⁸ (for up to 2¹⁶ ranks).
    """
    total = 0
    for ranks, (lines, gradients, owners, optimizer) in notes.items():
        weight = len(ranks) - 1 if this_rank() == ranks[0] else -1
        names = sorted(set(gradients))
        total += weight * _digest([repr(ranks), optimizer, owners, *lines, "", *names])
    return (total + 2**63) % 2**64 - 2**63


def _find_problem(details: Mapping[int, Sequence[Any]], have_changed: bool) -> Optional[str]:
    """Explains why a union can't step, from each rank's error, sets, and notes.

    Returns None if sets have changed consistently: then ranks compare again with the new sets,
    which also reports any rank's error.
    """
    errors = (f"rank {rank}: {error}" for rank, (error, *_) in details.items() if error is not None)
    failure = next(errors, None)
    if not have_changed:
        return failure or _difference({rank: notes for rank, (*_, notes) in details.items()})
    contradiction = _contradiction(
        {rank: set(map(tuple, sets)) for rank, (_, sets, _) in details.items()}
    )
    return contradiction and (failure or contradiction)


def _contradiction(named: Mapping[int, Collection[Ranks]]) -> Optional[str]:
    """Says which rank lacks a set that another reports; ``named`` maps ascending ranks to sets."""
    for ranks in _in_order(set().union(*named.values())):
        lacking = [rank for rank in ranks if rank in named and ranks not in named[rank]]
        if lacking:
            naming = next(rank for rank in named if ranks in named[rank])
            return (
                f"rank {naming} has parameters on a mesh of ranks {list(ranks)}, but rank "
                f"{lacking[0]} has none there; give all ranks of a mesh the same parameters"
            )
    return None


def _difference(notes: Mapping[int, Sequence[Any]]) -> str:
    """Says how the notes of a union's ranks differ."""
    notes_by_set: dict[Ranks, dict[int, StepNotes]] = defaultdict(dict)
    for rank, notes_of_rank in notes.items():
        for ranks, fields in notes_of_rank:
            notes_by_set[tuple(ranks)][rank] = StepNotes(*fields)
    missing: list[str] = []
    for ranks in _in_order(notes_by_set):
        by_rank, first = notes_by_set[ranks], ranks[0]
        lacking = [rank for rank in ranks if rank not in by_rank]
        if not any(rank_notes.lines for rank_notes in by_rank.values()):
            # These ranks are part of a mesh. A rank without gradients there has written no notes.
            by_rank.update(dict.fromkeys(lacking, StepNotes([], [])))
        elif lacking:
            return (
                f"ranks {lacking[0]} and {next(iter(by_rank))} would do different things: only the "
                f"latter exchanges matrices with ranks {list(ranks)}"
            )
        reference = by_rank[first]
        for rank, compared in sorted(by_rank.items()):
            if compared.optimizer != reference.optimizer:
                return (
                    f"{_OPTIMIZERS_DIFFER.format(first, rank)}. Rank {first} steps "
                    f"{reference.optimizer}, rank {rank} {compared.optimizer}"
                )
            if compared.lines != reference.lines:
                return (
                    f"ranks {first} and {rank} would do different things; give all ranks the "
                    f"same parameters and options in the same order. "
                    f"{_first_different_line(first, reference.lines, rank, compared.lines)}"
                )
        present = {rank: set(by_rank[rank].gradients) for rank in ranks}
        for name in sorted(set().union(*present.values())):
            without = [rank for rank in ranks if name not in present[rank]]
            if without:
                missing.append(f"{name} on ranks {without}")
    if not missing:
        return "ranks have planned different owners; load the same package version on all ranks"
    return (
        f"gradients are missing on some ranks only: {'; '.join(missing[:8])}. Compute these "
        'gradients on every rank, or set missing_grad="zero", which counts them as zeros (on '
        'replicas only with grad_reduce="mean")'
    )


def _first_different_line(a: int, lines_a: Sequence[str], b: int, lines_b: Sequence[str]) -> str:
    """Describes the first difference between the lines of ranks ``a`` and ``b``."""
    line_a, line_b = next((x, y) for x, y in zip_longest(lines_a, lines_b) if x != y)
    if line_b is None or (line_b in lines_a and line_a not in lines_b):
        return f"Only rank {a} has {line_a!r}"
    if line_a is None or (line_a in lines_b and line_b not in lines_a):
        return f"Only rank {b} has {line_b!r}"
    return f"Rank {a} has {line_a!r}, rank {b} has {line_b!r}"


def _exchange_text(ranks: Ranks, what: int, content: Sequence) -> list[Any]:
    """Exchanges content as JSON, one item per rank in order; sends nothing if all are empty."""
    encoded = json.dumps(content).encode()
    records = _exchange_records(ranks, [what, len(encoded) if content else 0, 0])
    longest = int(records[:, 1].max())
    if longest == 0:
        return [[] for _ in ranks]
    padded = torch.frombuffer(bytearray(encoded.ljust(longest)), dtype=torch.uint8)
    return [json.loads(bytes(row.tolist())) for row in all_gather(ranks, padded)]


def _exchange_records(ranks: Ranks, fields: Sequence[int]) -> torch.Tensor:
    """The records of all ``ranks``, (ranks, fields), int64; raises if their first fields differ."""
    records = all_gather(ranks, torch.tensor(fields, dtype=torch.int64, device="cpu"))
    different = (records[:, 0] != records[0, 0]).nonzero()
    if len(different):
        raise ValueError(_OPTIMIZERS_DIFFER.format(ranks[0], ranks[int(different[0])]))
    return records
