"""Compares what ranks are about to do before a step's first collective: all step or all raise.

If one rank raised alone, the ranks of its meshes would wait for it, the ranks of their meshes for
them, and so on. So all ranks that a chain of meshes connects, a *union*, decide together. Before
each step every rank sends its union one record of fixed size: hashes of its notes, and its vote on
whether to step. The exchange runs on the CPU over gloo; hosts wait for each other, devices don't.
Only when records differ do ranks send their notes as text, to name what differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from operator import or_
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.profiler import record_function

from .connections import NoConnection, Ranks, close_connections, connections_of
from .plan import ranks_sort_key
from .utils import this_rank, world_timeout

CHECKS = ("step", "plan", "off")

# The vote of a rank, the fourth field of its record. A rank for which the step only creates state
# adds _ONLY_CREATES.
_GO, _SKIP, _FAIL = range(3)
_ONLY_CREATES = 4

# Every exchange starts with one record of six int64. Gloo aborts the process when ranks send
# different sizes, so ranks must send the same size even when they are at different exchanges.
_DISCOVER, _STEP, _SETS, _NOTES = range(4)  # first field of a record: what its sender exchanges

_OPTIMIZERS_DIFFER = (
    "ranks {} and {} step different optimizers; let all ranks make, copy, load and step theirs "
    "alike and in the same order"
)


@dataclass(frozen=True)
class StepNotes:
    """What this rank is about to do in a step together with the ranks of one set.

    Args:
        lines: what all ranks of the set must have alike: parameters, their placements, options.
        gradients: names of the parameters that have a gradient.
        owners: a hash of the plan that follows from lines and gradients.
        optimizer: text that says how many optimizers the ranks made before this one, and how often
            this one has stepped.
    """

    lines: Sequence[str]
    gradients: Sequence[str]
    owners: str = ""
    optimizer: str = ""


class _Disagreement(Exception):
    """Why ranks can't step; all ranks that compared raise it with the same text."""


@dataclass(frozen=True)
class _Union:
    """The ranks that step together; on all of them the fields are equal, except for ``sets``.

    Args:
        sets: the sets that this rank is in, `_in_order`.
        ranks: all ranks that a chain of sets connects with this one.
        identity: a hash of all sets of the union.
        world: a weak reference to the default process group that has these ranks.
    """

    sets: tuple[Ranks, ...]
    ranks: Ranks
    identity: int
    world: Callable[[], Any]


class Registration:
    """Numbers an optimizer in the order of construction, to tell it from others that are equal.

    Each set of ranks counts the optimizers whose parameters it shares, if they are alive or have
    stepped. So an optimizer of one rank alone shifts no number. One that a single rank makes of
    shared parameters, and that is alive when numbers are given, makes the next step raise.

    Args:
        sets: a method of the optimizer that returns the sets of ranks that share its parameters.
    """

    _all: list[Registration] = []  # in order of construction

    def __init__(self, sets: Callable[[], set[Ranks]]):
        self._sets_now = weakref.WeakMethod(sets)
        self._sets = sets()
        self._numbers: dict[Ranks, int] = {}
        Registration._all.append(self)

    @property
    def optimizer(self) -> Any:
        """The optimizer, which may be asked for through a wrapper of it."""
        return self._sets_now().__self__  # type: ignore[union-attr]

    def number(self, ranks: Ranks) -> int:
        """How many of the optimizers that ``ranks`` share were made before this one."""
        if ranks not in self._numbers:
            living = [o for o in Registration._all if o._numbers or o._sets_now() is not None]
            Registration._all = living
            earlier = living[: living.index(self)]
            for other in earlier:
                sets = other._sets_now()
                if sets is not None:  # parameters may have been swapped since construction
                    other._sets |= sets()
            self._numbers[ranks] = sum(ranks in other._sets for other in earlier)
            self._sets.add(ranks)
        return self._numbers[ranks]


class Agreement:
    """Decides with the other ranks whether they step; remembers which ranks these are.

    Copies and pickles start afresh. So either all ranks of a union go on with a fresh one, or none.

    Attributes:
        may_go: whether other ranks may step, given this rank's vote in the last comparison. If this
            rank has voted to go and its comparison then breaks off, it stays True, since other
            ranks may have received all records.
        has_compared: whether notes were compared in this step.
        only_creates: whether the step only creates state, on all ranks: there was no state, the
            learning rate is 0, and all gradients are zeros.
        steps: how many steps were made since this object was made.
        has_parted: whether a step broke off on this rank, and was accepted, where ranks can no
            longer step together.
    """

    def __init__(self) -> None:
        self.may_go = self.has_compared = self.only_creates = self.has_parted = False
        self.steps = 0
        self._union: Optional[_Union] = None
        self._structure: Optional[Mapping[Ranks, Any]] = None  # of the last agreement

    def __reduce__(self) -> tuple:
        return Agreement, ()

    def begin(self) -> None:
        """Begins a step, in which this rank has not voted yet."""
        self.may_go = self.has_compared = False

    def check_together(self) -> None:
        """Raises RuntimeError where ranks can no longer step together."""
        if self.has_parted:
            raise RuntimeError(
                "step() broke off on this rank, which other ranks exchange matrices or share "
                "parameters with, and they can't know how far it came: save state_dict() and start "
                "a fresh launch from it"
            )

    def decide(
        self,
        how_often: str,
        structure: Mapping[Ranks, Any],
        sets: Collection[Ranks],
        notes: Callable[[], Mapping[Ranks, StepNotes]],
        error: Optional[BaseException],
        skip: Optional[bool],
        only_creates: bool = False,
    ) -> bool:
        """Whether the ranks skip a step; if one of them can't make the step, all of them raise.

        Args:
            how_often: one of `CHECKS`.
            structure: what this rank shares with each of its sets; compared with that of the last
                agreement.
            sets: the ranks that share parameters with this one, mesh by mesh.
            notes: makes the notes of this step; not called if there is an error.
            error: what keeps this rank from making the step, or None.
            skip: whether this rank is to skip the step; None unless a GradScaler calls every step.
            only_creates: whether the step only creates state, as far as this rank knows.

        Raises:
            ValueError: ranks would do different things.
            RuntimeError: a rank did not come, or died meanwhile.
        """
        is_due = self._is_due(how_often, structure, skip is not None)
        has_others = any(len(ranks) > 1 for ranks in sets)
        self.may_go = error is None and has_others
        self.only_creates = only_creates and (is_due or not has_others)
        skips = bool(skip)
        if is_due:
            try:
                with record_function("Muon.agree"):
                    step_notes = notes() if error is None else {}
                    skips = self.check(step_notes, _error_text(error), sets, skips)
                self.has_compared = True
            except (RuntimeError, ValueError):
                if error is None:  # else this rank's own error is the cause, or says more
                    raise
        if error is not None:
            raise error
        if self.has_compared:
            self._structure = structure
        return skips

    def revoke(self) -> None:
        """Revokes what all ranks have agreed on, so that they compare notes in the next step."""
        self.may_go, self._structure = False, None

    def _is_due(self, how_often: str, structure: Mapping[Ranks, Any], may_skip: bool) -> bool:
        """Whether this step compares notes.

        With ``"plan"`` it does if what the whole union shares has changed, since all its ranks see
        that. A change of what only some ranks share does not count: the other ranks would not come
        to compare.
        """
        if not _can_compare():
            return False
        if how_often != "plan" or may_skip or self._structure is None:
            return may_skip or how_often != "off"
        union = set(self._union.ranks) if self._union is not None else set()
        now, then = (
            {ranks: shared for ranks, shared in by_set.items() if union.issubset(ranks)}
            for by_set in (structure, self._structure)
        )
        return now != then

    def check(
        self,
        notes: Mapping[Ranks, StepNotes],
        error: Optional[str],
        sets: Iterable[Ranks],
        skip: bool = False,
    ) -> bool:
        """Compares notes with all ranks of this rank's union.

        Args:
            notes: by ranks, what this rank must have in common with them; the ranks are a set or a
                part of one.
            error: why this rank can't step, or None. If there is an error, notes are ignored.
            sets: the ranks that share parameters with this one, mesh by mesh. Sets of one rank, or
                without this one, are ignored. All ranks of each set make this call, and so do
                ranks that had sets at the last call, even if they have none any more.
            skip: whether this rank is to skip the step.

        Returns:
            Whether one of the ranks skips the step, so that all do.

        Raises:
            ValueError: the ranks can't step; the text is the same on every rank of the union.
            RuntimeError: a rank did not come, or died meanwhile.
        """
        self.may_go = False
        rank, sets = dist.get_rank(), self._shared(sets)
        notes = {ranks: notes[ranks] for ranks in notes if rank in ranks}
        union, self._union = self._union, None  # until the records of the ranks have come
        if union is not None and union.world() is not dist.group.WORLD:
            union = None
        with self._closing((*sets, *((*union.sets, union.ranks) if union else ()))):
            while sets or union is not None:
                if union is None:
                    union = _discover(sets)
                skips = self._compare(union, sets, notes, error, skip)
                if skips is not None:
                    return skips
                union = None
            return skip

    def _shared(self, sets: Iterable[Ranks]) -> tuple[Ranks, ...]:
        """The sets that have this rank and others, `_in_order`."""
        rank = this_rank()
        return _in_order(ranks for ranks in sets if len(ranks) > 1 and rank in ranks)

    @contextlib.contextmanager
    def _closing(self, groups: Iterable[Ranks]) -> Iterator[None]:
        """A context for exchanges: if one breaks off, the connections of these groups are closed.

        The exchange leaves the group it was in unusable. Closing the other groups spares the ranks
        that wait for this one their timeout.
        """
        try:
            yield
        except _Disagreement as disagreement:
            self.may_go = False
            raise ValueError(str(disagreement)) from None
        except BaseException:
            self._union = None
            for ranks in groups:
                close_connections(ranks)
            raise

    def _compare(
        self,
        union: _Union,
        sets: tuple[Ranks, ...],
        notes: Mapping[Ranks, StepNotes],
        error: Optional[str],
        skip: bool,
    ) -> Optional[bool]:
        """Whether the ranks of a union skip the step; None if the union itself has changed.

        A rank whose sets have changed still sends its record to the union as it was, since it can't
        know which other ranks have changed their sets, too.
        """
        vote = _FAIL if error is not None else _SKIP if skip else _GO
        record = _record(union, sets, notes, vote)
        record[3] += _ONLY_CREATES * self.only_creates
        self.may_go = vote == _GO
        records = _exchange_records(union.ranks, record)
        have_changed, votes = bool(records[:, 2].any()), (records[:, 3] % _ONLY_CREATES).tolist()
        only_creates = bool((records[:, 3] & _ONLY_CREATES).all())
        differ = bool(records[:, 4:].sum(0).any())  # modulo 2⁶⁴
        agree, skips = not (have_changed or differ or _FAIL in votes), _SKIP in votes
        self.may_go = agree and not skips
        problem = None
        if have_changed:
            failure, sets_of = _exchange_details(union.ranks, _SETS, error, sets)
            contradiction = _contradiction(sets_of)
            if contradiction is None:
                return None
            problem = failure or contradiction
        elif not agree:
            problem = _find_difference(union.ranks, notes, error)
        self._union, self.only_creates = union, only_creates
        if problem is not None:
            raise _Disagreement(problem)
        return skips


def _error_text(error: Optional[BaseException]) -> Optional[str]:
    if error is None:
        return None
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _in_order(sets: Iterable[Ranks]) -> tuple[Ranks, ...]:
    """Sorts sets into the one order in which all ranks exchange; else ranks would block each other.

    Larger sets come first: they show contradictions before a rank waits in vain in a smaller set.
    """
    return tuple(sorted(sets, key=ranks_sort_key))


def _record(
    union: _Union, sets: Sequence[Ranks], notes: Mapping[Ranks, StepNotes], vote: int
) -> list[int]:
    """The record of this rank in a step.

    Its fields are the stage, the union, whether this rank's sets have changed, its vote, and the
    hashes of lines and of gradients.

    The hashes of all sets are added with weights, so that every record has the same size. In a set
    of n ranks the first rank's weight is n − 1, and that of each other rank −1: the weights of the
    set add up to 0, those of any part of it don't. If all ranks of each set have the same hash, the
    sum over the union is 0 modulo 2⁶⁴. If they don't, it is 0 by a chance of less than 1 in 2⁴⁸
    (for up to 2¹⁶ ranks). Each hash covers the ranks of its set as well, so that sets with equal
    notes don't cancel out.
    """
    rank = dist.get_rank()
    lines = gradients = 0
    if vote != _FAIL and union.sets == sets:
        for ranks in notes:
            weight = len(ranks) - 1 if rank == ranks[0] else -1
            lines += weight * _digest(ranks, [notes[ranks].optimizer, *notes[ranks].lines])
            names = sorted(set(notes[ranks].gradients))
            gradients += weight * _digest(ranks, [*names, notes[ranks].owners])
    lines, gradients = ((total + 2**63) % 2**64 - 2**63 for total in (lines, gradients))
    return [_STEP, union.identity, int(union.sets != sets), vote, lines, gradients]


def _exchange_details(
    ranks: Ranks, stage: int, error: Optional[str], content: Sequence
) -> tuple[Optional[str], dict[int, Any]]:
    """Exchanges errors and contents: the error of the first rank that has one, and all contents."""
    texts = _exchange_text(ranks, stage, [error, content])
    details = dict(zip(ranks, texts))
    errors = (f"rank {rank}: {text}" for rank, (text, _) in details.items() if text is not None)
    return next(errors, None), {rank: content for rank, (_, content) in details.items()}


def _find_difference(union: Ranks, notes: Mapping[Ranks, StepNotes], error: Optional[str]) -> str:
    """Says, from the notes of all its ranks, what keeps a union from stepping; the same on each."""
    content = [(ranks, list(n.lines), list(n.gradients), n.optimizer) for ranks, n in notes.items()]
    failure, contents = _exchange_details(union, _NOTES, error, content)
    if failure is not None:
        return failure
    notes_by_set: dict[Ranks, dict[int, StepNotes]] = {}
    for rank, content in contents.items():
        for ranks, lines, gradients, optimizer in content:
            rank_notes = StepNotes(lines, gradients, optimizer=optimizer)
            notes_by_set.setdefault(tuple(ranks), {})[rank] = rank_notes
    for ranks in _in_order(notes_by_set):
        by_rank, first = notes_by_set[ranks], ranks[0]
        if not any(rank_notes.lines for rank_notes in by_rank.values()):
            # These ranks are part of a mesh; one without any gradient there has taken no notes.
            for rank in ranks:
                by_rank.setdefault(rank, StepNotes([], []))
        for rank in ranks:
            if rank not in by_rank or first not in by_rank:
                return (
                    f"ranks {rank if rank not in by_rank else first} and {next(iter(by_rank))} "
                    "would do different things: only the latter exchanges matrices with ranks "
                    f"{list(ranks)}"
                )
            reference, compared = by_rank[first], by_rank[rank]
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
    missing = _missing_gradients(notes_by_set)
    if not missing:
        return "ranks have planned different owners; do all load the same version of this package?"
    return (
        f"gradients are missing on some ranks only: {'; '.join(missing[:8])}. Let every rank "
        'compute one for it, or set missing_grad="zero": absent ones count as zeros then, but of '
        'replicas only where the step averages them, grad_reduce="mean"'
    )


def _missing_gradients(notes_by_set: Mapping[Ranks, Mapping[int, StepNotes]]) -> list[str]:
    """Says for each parameter with a gradient on some ranks only which ranks lack it."""
    missing = []
    for ranks in _in_order(notes_by_set):
        names = {rank: set(notes_by_set[ranks][rank].gradients) for rank in ranks}
        for name in sorted(set().union(*names.values())):
            lacking = [rank for rank in ranks if name not in names[rank]]
            if lacking:
                missing.append(f"{name} on ranks {lacking}")
    return missing


def _first_different_line(a: int, lines_a: Sequence[str], b: int, lines_b: Sequence[str]) -> str:
    """Says where the lines of ranks ``a`` and ``b`` begin to differ."""
    pairs = zip_longest(lines_a, lines_b)
    line_a, line_b = next(pair for pair in pairs if pair[0] != pair[1])
    if line_b is None or (line_b in lines_a and line_a not in lines_b):
        return f"Only rank {a} has {line_a!r}"
    if line_a is None or (line_a in lines_b and line_b not in lines_a):
        return f"Only rank {b} has {line_b!r}"
    return f"Rank {a} has {line_a!r}, rank {b} has {line_b!r}"


def _digest(ranks: Ranks, lines: Sequence[str]) -> int:
    text = "\n".join([repr(ranks), *lines])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _can_compare() -> bool:
    """Whether there are ranks to compare with; in a fake process group there are none."""
    return dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"


def _discover(sets: tuple[Ranks, ...]) -> _Union:
    """Finds the union that this rank belongs to, by passing on which ranks are in which sets.

    In a round, every rank tells the ranks of each of its sets which sets it has heard of. Let the
    distance of two ranks be the least number of sets that lead from one to the other, and D the
    largest distance in the union. After t rounds a rank has heard of the sets of every rank at
    distance t or less, by induction: the next rank on a shortest path knew them a round earlier. A
    rank has heard of all sets exactly when it knows the sets of every rank that is named in sets it
    knows, which takes at most D rounds. Then it knows D, which depends only on the sets. So all
    ranks stop after round D. Each has then done its exchanges in the same order of (round, set), in
    which no two ranks block each other. With one set of all ranks, D is 1.

    Raises:
        _Disagreement: a rank lacks a set that another says it is in. All ranks of the set in which
            this shows raise; ranks outside of it wait for their timeout.
    """
    rank = dist.get_rank()
    sets_of: dict[int, tuple[Ranks, ...]] = {rank: sets}
    rounds = 0
    while True:
        rounds += 1
        heard = list(sets_of.items())  # before this round: its news go out in the next one, once
        for ranks in sets:
            # A rank that has heard of no set but this one sends no text at all.
            content = heard if heard != [(rank, (ranks,))] else None
            reported: dict[int, tuple[Ranks, ...]] = {}
            for sender, report in zip(ranks, _exchange_text(ranks, _DISCOVER, content)):
                for member, its_sets in report if report is not None else [(sender, [ranks])]:
                    reported[member] = tuple(map(tuple, its_sets))
            problem = _contradiction(reported)
            if problem is not None:
                raise _Disagreement(problem)
            sets_of.update(reported)
        all_sets: set[Ranks] = set().union(*sets_of.values())
        union = set().union(*all_sets)
        if union == set(sets_of) and rounds >= _diameter(sets_of):
            identity = _digest((), [repr(sorted(all_sets))])
            world = weakref.ref(dist.group.WORLD)
            return _Union(sets, tuple(sorted(union)), identity, world)


def _diameter(sets_of: Mapping[int, tuple[Ranks, ...]]) -> int:
    """The largest distance of two ranks of a union: the rounds until each has heard of all."""
    heard = {rank: 1 << number for number, rank in enumerate(sets_of)}  # a bit for each rank
    everyone = (1 << len(sets_of)) - 1
    all_sets, rounds = set().union(*sets_of.values()), 0
    while any(bits != everyone for bits in heard.values()):
        exchanged = {ranks: reduce(or_, (heard[rank] for rank in ranks)) for ranks in all_sets}
        heard = {rank: reduce(or_, (exchanged[s] for s in sets)) for rank, sets in sets_of.items()}
        rounds += 1
    return rounds


def _contradiction(sets_of: Mapping[int, Iterable[Sequence[int]]]) -> Optional[str]:
    """Says which rank lacks a set that another one names, among ranks whose sets are known."""
    named_by: dict[Ranks, list[int]] = {}
    for rank in sorted(sets_of):
        for ranks in sets_of[rank]:
            named_by.setdefault(tuple(ranks), []).append(rank)
    for ranks in _in_order(named_by):
        lacking = sorted(set(ranks).intersection(sets_of).difference(named_by[ranks]))
        if lacking:
            return (
                f"rank {named_by[ranks][0]} has parameters on a mesh of ranks {list(ranks)}, rank "
                f"{lacking[0]} has none there; give all ranks of a mesh the same parameters"
            )
    return None


def _exchange_records(ranks: Ranks, fields: Sequence[int]) -> torch.Tensor:
    """The records of all ``ranks``, in order, of shape (ranks, fields), in int64.

    Raises:
        _Disagreement: ranks are at different stages, or in a step of different unions.
    """
    records = _all_gather(ranks, torch.tensor(fields, dtype=torch.int64, device="cpu"))
    for field in (0, 1) if fields[0] == _STEP else (0,):
        different = (records[:, field] != records[0, field]).nonzero()
        if len(different):
            raise _Disagreement(_OPTIMIZERS_DIFFER.format(ranks[0], ranks[int(different[0])]))
    return records


def _exchange_text(ranks: Ranks, stage: int, content: Optional[list]) -> list[Any]:
    """The content of all ``ranks``, in order, sent as JSON; None for a rank that sends none."""
    encoded = json.dumps(content).encode() if content is not None else b""
    records = _exchange_records(ranks, [stage, len(encoded), 0, 0, 0, 0])
    sizes = records[:, 1].tolist()
    if not any(sizes):
        return [None] * len(ranks)
    padded = torch.frombuffer(bytearray(encoded.ljust(max(sizes))), dtype=torch.uint8)
    gathered = _all_gather(ranks, padded)
    buffer = bytearray(gathered.numel())
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(gathered.flatten())
    starts = range(0, len(buffer), len(padded))
    texts = [buffer[start : start + size] for start, size in zip(starts, sizes)]
    return [json.loads(text) if text else None for text in texts]


def _all_gather(ranks: Ranks, tensor: torch.Tensor) -> torch.Tensor:
    """Gathers tensors of one shape from all ``ranks``: (ranks, *shape).

    Raises:
        RuntimeError: a rank did not come, or gloo can't connect the ranks.
    """
    try:
        return connections_of(ranks).all_gather(tensor)
    except NoConnection as error:
        raise RuntimeError(str(error)) from error.__cause__
    except RuntimeError as error:
        raise RuntimeError(
            f"ranks {list(ranks)} have to call step() together, but one of them didn't within "
            f"{world_timeout()}, or failed meanwhile, or has consistency_check='off', or 'plan' "
            f"and options that were changed on other ranks only: {error}"
        ) from error
