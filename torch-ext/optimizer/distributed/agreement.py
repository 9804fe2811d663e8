"""Ranks compare notes before the first collective of a step, so that all go on or all raise.

A rank that raises leaves the ranks of its meshes waiting, those leave the ranks of theirs, and so
on. So all ranks that a chain of meshes connects decide together: they are the union of the sets of
ranks that meshes have. In each step every rank sends one record of fixed size to the whole union: a
hash of its plans, a hash of which gradients it has, whether its own checks failed. The exchange
runs on the CPU over gloo; hosts wait for each other, devices don't. Only when records differ do
ranks send more, to name what differs.
"""

from __future__ import annotations

import gc
import hashlib
import json
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from operator import or_
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.profiler import record_function

from .plan import ranks_sort_key
from .utils import GroupCache, world_timeout

CHECKS = ("step", "plan", "off")

# What a rank is about to do; in a record, its fourth field.
_GO, _SKIP, _FAIL = range(3)

Ranks = tuple[int, ...]  # global and ascending

# Every exchange starts with one record of six int64. Gloo aborts the process when ranks send
# different sizes, so even ranks that are not at the same exchange must send the same.
_DISCOVER, _STEP, _SETS, _NOTES = range(4)  # first field: which exchange the sender is at

_APART = (
    "ranks {} and {} step different optimizers; let all ranks make, copy, load and step theirs "
    "alike and in the same order"
)


@dataclass(frozen=True)
class Notes:
    """What this rank is about to do together with the ranks of one set.

    Args:
        plan: one line per fact that all ranks of the set must share: parameters, layouts, options.
        gradients: names of the sharded matrices that have a gradient.
        owners: a hash of the plan that follows from them.
        optimizer: which one of those that these ranks share this is, and how often it has stepped.
    """

    plan: Sequence[str]
    gradients: Sequence[str]
    owners: str = ""
    optimizer: str = ""


class _Disagreement(Exception):
    """Why ranks can't step; raised on all ranks of the set that has found it alike."""


@dataclass(frozen=True)
class _Topology:
    """Who steps with whom: the same on all ranks of the union, but for ``sets``.

    Args:
        sets: those this rank is in, `_in_order`.
        union: all ranks that a chain of sets connects with this one.
        identity: a hash of all sets of the union.
        world: a weak reference to the default process group that has these ranks.
    """

    sets: tuple[Ranks, ...]
    union: Ranks
    identity: int
    world: Callable[[], Any]


class Registration:
    """An optimizer's place in the order of construction, which tells it from one just like it.

    Any set of ranks counts the optimizers whose parameters it shares, as long as they live or if
    they have stepped. What a rank makes for itself alone, or makes and drops, shifts nothing.

    Args:
        sets: a method of the optimizer that returns the sets of ranks that share its parameters.
    """

    _all: list[Registration] = []  # in order of construction
    _is_settled = True  # nothing was made since what is unreachable was let go of

    def __init__(self, sets: Callable[[], set[Ranks]]):
        self._sets_now = weakref.WeakMethod(sets)
        self._sets = sets()
        self._numbers: dict[Ranks, int] = {}
        Registration._all.append(self)
        Registration._is_settled = False

    def number(self, ranks: Ranks) -> int:
        """How many of the optimizers that ``ranks`` share were made before this one."""
        if ranks not in self._numbers:
            if not Registration._is_settled and len(Registration._all) > 1:
                gc.collect()  # or what is unreachable would live on some ranks, and not on others
            Registration._is_settled = True
            kept = [o for o in Registration._all if o._numbers or o._sets_now() is not None]
            Registration._all = kept
            before = kept[: kept.index(self)]
            for other in before:
                sets = other._sets_now()
                if sets is not None:  # parameters may have been swapped since construction
                    other._sets |= sets()
            self._numbers[ranks] = sum(ranks in other._sets for other in before)
            self._sets.add(ranks)
        return self._numbers[ranks]


class Agreement:
    """What an optimizer keeps between comparisons: with whom this rank steps.

    Copies and pickles start afresh. All ranks of a union use theirs from the start, or none does.

    Attributes:
        may_go: whether others may go on to step since the last comparison, on this rank's word:
            also where it broke off, since they may have heard of all.
        has_compared: whether notes were compared in this step.
        steps: how many steps were made since this began.
    """

    def __init__(self) -> None:
        self.may_go = self.has_compared = False
        self.steps = 0
        self._topology: Optional[_Topology] = None
        self._structure: Optional[Mapping[Ranks, Any]] = None  # that was agreed on last

    def __reduce__(self) -> tuple:
        return Agreement, ()

    def begin(self) -> None:
        """To be called at the beginning of a step: nobody counts on this rank yet."""
        self.may_go = self.has_compared = False

    def decide(
        self,
        how_often: str,
        structure: Mapping[Ranks, Any],
        sets: Collection[Ranks],
        notes: Callable[[], Mapping[Ranks, Notes]],
        error: Optional[BaseException],
        skip: Optional[bool],
    ) -> bool:
        """Whether the ranks skip a step; raises on all alike where one of them can't make it.

        Args:
            how_often: of `CHECKS`.
            structure: what this rank shares with each of its sets, comparable.
            sets: the ranks that share parameters with this one, mesh by mesh.
            notes: makes those of this step, unless there is an error.
            error: what keeps this rank from making the step.
            skip: whether this rank is to skip it; None where none ever is.

        Raises:
            ValueError: ranks would do different things.
            RuntimeError: a rank did not come, or died meanwhile.
        """
        self.may_go = error is None and any(len(ranks) > 1 for ranks in sets)
        skips = bool(skip)
        if self._is_due(how_often, structure, skip is not None):
            try:
                with record_function("Muon.agree"):
                    ours = notes() if error is None else {}
                    skips = self.check(ours, _in_words(error), sets, skips)
                self.has_compared = True
            except (RuntimeError, ValueError):
                if error is None:  # else this rank's own is the cause, or says more
                    raise
        if error is not None:
            raise error
        if self.has_compared:
            self._structure = structure
        return skips

    def take_back(self) -> None:
        """Where all ranks find behind a comparison that they can't go on: the next step is to
        compare notes again."""
        self.may_go, self._structure = False, None

    def _is_due(self, how_often: str, structure: Mapping[Ranks, Any], may_skip: bool) -> bool:
        """Whether this step compares notes; with a fake process group there is nobody to ask.

        With ``"plan"`` that follows from what the whole union shares, which all its ranks see
        change alike. What only some of them share is no reason, as the others would not come.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "fake":
            return False
        if how_often != "plan" or may_skip or self._structure is None:
            return may_skip or how_often != "off"
        union = set(self._topology.union) if self._topology is not None else set()
        now, then = (
            {ranks: shared for ranks, shared in each.items() if union.issubset(ranks)}
            for each in (structure, self._structure)
        )
        return now != then

    def check(
        self,
        notes: Mapping[Ranks, Notes],
        error: Optional[str],
        sets: Iterable[Ranks],
        skip: bool = False,
    ) -> bool:
        """Compares notes with all ranks that this one depends on, however indirectly.

        Args:
            notes: what this rank is to share with the ranks of each set, or with some of them.
            error: why this rank can't step, or None. There need not be notes then.
            sets: the ranks that share parameters with this one, mesh by mesh. Sets of one rank, or
                without this one, don't matter. All ranks of each set make this call, and so do
                ranks that had sets at the last one, even if they have none any more.
            skip: whether this rank is to skip the step.

        Returns:
            Whether one of the ranks is to skip the step, so that all do.

        Raises:
            ValueError: why none of them can step, the same on every rank of the union.
            RuntimeError: a rank did not come, or died meanwhile.
        """
        self.may_go = False
        rank = dist.get_rank()
        sets = _in_order(ranks for ranks in sets if len(ranks) > 1 and rank in ranks)
        notes = {ranks: of_ranks for ranks, of_ranks in notes.items() if rank in ranks}
        topology, self._topology = self._topology, None  # until ranks are found to be in step
        if topology is not None and topology.world() is not dist.group.WORLD:
            topology = None
        try:
            while sets or topology is not None:
                if topology is None:
                    topology = _discover(sets)
                skips = self._compare(topology, sets, notes, error, skip)
                if skips is not None:
                    return skips
                topology = None
            return skip
        except _Disagreement as problem:
            self.may_go = False
            raise ValueError(str(problem)) from None
        except BaseException:
            # An exchange that broke off leaves its group unusable. Closing the others spares those
            # who wait for this rank their timeout.
            self._topology = None
            for ranks in (*sets, *((*topology.sets, topology.union) if topology else ())):
                _groups.pop(ranks, None)
            raise

    def _compare(
        self,
        topology: _Topology,
        sets: tuple[Ranks, ...],
        notes: Mapping[Ranks, Notes],
        error: Optional[str],
        skip: bool,
    ) -> Optional[bool]:
        """Whether ranks of a known union skip; None where all agree that the union has changed.

        Ranks whose sets have changed still meet those who count on them, for they can't know whose
        sets have changed as well.
        """
        union = topology.union
        intent = _FAIL if error is not None else _SKIP if skip else _GO
        record = _record(topology, sets, notes, intent)
        self.may_go = intent == _GO
        records = _exchange(union, record)
        have_changed, intents = bool(records[:, 2].any()), records[:, 3].tolist()
        differ = bool(records[:, 4:].sum(0).any())  # modulo 2⁶⁴
        agree, skips = not (have_changed or differ or _FAIL in intents), _SKIP in intents
        self.may_go = agree and not skips
        problem = None
        if have_changed:
            failure, sets_of = _ask(union, _SETS, error, sets)
            contradiction = _contradiction(sets_of)
            if contradiction is None:
                return None
            problem = failure or contradiction
        elif not agree:
            problem = _explain(union, notes, error)
        self._topology = topology
        if problem is not None:
            raise _Disagreement(problem)
        return skips


def _in_words(error: Optional[BaseException]) -> Optional[str]:
    if error is None:
        return None
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _in_order(sets: Iterable[Ranks]) -> tuple[Ranks, ...]:
    """The order in which all ranks go through their sets, or they would wait for each other.

    Larger ones first: their ranks see contradictions before anyone waits in a smaller one in vain.
    """
    return tuple(sorted(sets, key=ranks_sort_key))


def _record(
    topology: _Topology, sets: Sequence[Ranks], notes: Mapping[Ranks, Notes], intent: int
) -> list[int]:
    """What this rank sends in a step, of which `_exchange` makes the record.

    The place in the step (see `_exchange`) and the union, whether this rank's sets have changed,
    what the rank is about to do, and the hashes of plans and of gradients.

    The hashes of all its sets go in as one weighted sum, so that the size depends on nothing. The
    weights of a set add up to 0, and those of no part of it do: n − 1 for the first rank, −1 for
    each of the others. Where all ranks of each set have the same hash, the sum over the union is 0
    modulo 2⁶⁴. Where they don't, it is 0 by a chance of less than 1 in 2⁴⁸ (for up to 2¹⁶ ranks):
    each hash covers the ranks of its set as well, so sets with equal notes don't cancel out.
    """
    rank = dist.get_rank()
    plans = gradients = 0
    if intent != _FAIL and topology.sets == sets:
        for ranks in notes:
            weight = len(ranks) - 1 if rank == ranks[0] else -1
            plans += weight * _digest(ranks, [notes[ranks].optimizer, *notes[ranks].plan])
            present = sorted(set(notes[ranks].gradients))
            gradients += weight * _digest(ranks, [*present, notes[ranks].owners])
    plans, gradients = ((total + 2**63) % 2**64 - 2**63 for total in (plans, gradients))
    return [_STEP, topology.identity, int(topology.sets != sets), intent, plans, gradients]


def _ask(
    union: Ranks, which: int, error: Optional[str], content: Sequence
) -> tuple[Optional[str], dict[int, Any]]:
    """The first error of a rank of a union, and what else each of them has to say."""
    answers = dict(zip(union, _exchange_text(union, which, [error, content])))
    errors = (f"rank {rank}: {words}" for rank, (words, _) in answers.items() if words is not None)
    return next(errors, None), {rank: theirs for rank, (_, theirs) in answers.items()}


def _explain(union: Ranks, notes: Mapping[Ranks, Notes], error: Optional[str]) -> str:
    """What is wrong, for a union whose records don't agree; the same on all its ranks."""
    ours = [(ranks, list(of.plan), list(of.gradients), of.optimizer) for ranks, of in notes.items()]
    failure, answers = _ask(union, _NOTES, error, ours)
    if failure is not None:
        return failure
    everyone: dict[Ranks, dict[int, Notes]] = {}
    for rank, theirs in answers.items():
        for ranks, plan, gradients, optimizer in theirs:
            of_rank = Notes(plan, gradients, optimizer=optimizer)
            everyone.setdefault(tuple(ranks), {})[rank] = of_rank
    for ranks in _in_order(everyone):
        of_set = everyone[ranks]
        if not any(of.plan for of in of_set.values()):
            # Part of a mesh, of which a rank without any gradient there has no notes.
            for rank in ranks:
                of_set.setdefault(rank, Notes([], []))
        first = ranks[0]
        for rank in ranks:
            if rank not in of_set or first not in of_set:
                other = next(iter(of_set))
                return (
                    f"ranks {rank if rank not in of_set else first} and {other} would do different "
                    f"things: only the latter exchanges matrices with ranks {list(ranks)}"
                )
            if of_set[rank].optimizer != of_set[first].optimizer:
                return (
                    f"{_APART.format(first, rank)}. Rank {first} steps {of_set[first].optimizer}, "
                    f"rank {rank} {of_set[rank].optimizer}"
                )
            if of_set[rank].plan != of_set[first].plan:
                return (
                    f"ranks {first} and {rank} would do different things; give all ranks the "
                    f"same parameters and options in the same order. "
                    f"{_first_difference(first, of_set[first].plan, rank, of_set[rank].plan)}"
                )
    missing: list[str] = []
    for ranks in _in_order(everyone):
        present = {rank: set(everyone[ranks][rank].gradients) for rank in ranks}
        for name in sorted(set().union(*present.values())):
            lacking = [rank for rank in ranks if name not in present[rank]]
            if lacking:
                missing.append(f"{name} on ranks {lacking}")
    if not missing:
        return "ranks have planned different owners; do all load the same version of this package?"
    return (
        f"gradients are missing on some ranks only: {'; '.join(missing[:8])}. Let every rank "
        'compute one for it, or set missing_grad="zero": absent ones count as zeros then, but of '
        'replicas only where the step averages them, grad_reduce="mean"'
    )


def _first_difference(rank: int, plan: Sequence[str], other: int, others: Sequence[str]) -> str:
    pairs = zip_longest(plan, others)
    ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    if theirs is None or (theirs in plan and ours not in others):
        return f"Only rank {rank} has {ours!r}"
    if ours is None or (ours in others and theirs not in plan):
        return f"Only rank {other} has {theirs!r}"
    return f"Rank {rank} has {ours!r}, rank {other} has {theirs!r}"


def _digest(ranks: Ranks, lines: Sequence[str]) -> int:
    text = "\n".join([repr(ranks), *lines])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _discover(sets: tuple[Ranks, ...]) -> _Topology:
    """Finds the union that this rank belongs to, by passing on which ranks are in which sets.

    In a round, every rank exchanges what it has heard with the ranks of each of its sets. Let the
    distance of two ranks be the least number of sets that lead from one to the other, and D the
    largest in the union. After t rounds a rank has heard of the sets of every rank at distance t or
    less, by induction: the next rank on a shortest path knew them a round earlier. It has heard of
    everyone when it knows the sets of all ranks that are named in sets it knows. That is so after
    at most D rounds, no rank can take it for so earlier than it is, and from then on the rank knows
    D, which depends on nothing but the sets. So all ranks can stop after round D, having done the
    same exchanges: a round per set each, in an order of (round, set) that is the same everywhere,
    which rules out that two wait for each other. One set that holds all ranks makes D = 1.

    Raises:
        _Disagreement: a rank lacks a set that another says it is in. All ranks of the set in which
            this shows raise; ranks outside of it wait for their timeout.
    """
    rank = dist.get_rank()
    known: dict[int, tuple[Ranks, ...]] = {rank: sets}
    rounds = 0
    while True:
        rounds += 1
        heard = list(known.items())  # before this round: what it brings would multiply in it
        for ranks in sets:
            # Nothing to tell but the set at hand is sent as no text at all.
            news = heard if heard != [(rank, (ranks,))] else None
            reported: dict[int, tuple[Ranks, ...]] = {}
            for other, text in zip(ranks, _exchange_text(ranks, _DISCOVER, news)):
                for number, theirs in text if text is not None else [(other, [ranks])]:
                    reported[number] = tuple(tuple(members) for members in theirs)
            problem = _contradiction(reported)
            if problem is not None:
                raise _Disagreement(problem)
            known.update(reported)
        union = {member for theirs in known.values() for ranks in theirs for member in ranks}
        if union == set(known) and rounds >= _diameter(known):
            text = repr(sorted(set().union(*known.values())))
            identity = _digest((), [text])
            return _Topology(sets, tuple(sorted(union)), identity, weakref.ref(dist.group.WORLD))


def _diameter(sets_of: Mapping[int, tuple[Ranks, ...]]) -> int:
    """The largest distance of two ranks, given the sets of every rank of a union.

    It is the number of rounds until each has heard of all.
    """
    heard = {rank: 1 << number for number, rank in enumerate(sets_of)}  # of whom, as bits
    everyone = (1 << len(sets_of)) - 1
    members, rounds = set().union(*sets_of.values()), 0
    while any(ranks != everyone for ranks in heard.values()):
        told = {ranks: reduce(or_, (heard[rank] for rank in ranks)) for ranks in members}
        heard = {rank: reduce(or_, (told[s] for s in sets)) for rank, sets in sets_of.items()}
        rounds += 1
    return rounds


def _contradiction(sets_of: Mapping[int, Iterable[Sequence[int]]]) -> Optional[str]:
    """A rank in a set that it doesn't know of, among ranks whose sets are given."""
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


def _exchange(ranks: Ranks, fields: Sequence[int]) -> torch.Tensor:
    """The records of all ``ranks``, in order, of shape (ranks, fields), in int64.

    Raises:
        _Disagreement: they are not at the same exchange, or in a step not of the same union.
    """
    records = _all_gather(ranks, torch.tensor(fields, dtype=torch.int64, device="cpu"))
    for field in (0, 1) if fields[0] == _STEP else (0,):
        others = (records[:, field] != records[0, field]).nonzero()
        if len(others):
            raise _Disagreement(_APART.format(ranks[0], ranks[int(others[0])]))
    return records


def _exchange_text(ranks: Ranks, which: int, content: Optional[list]) -> list[Any]:
    """What all ``ranks`` have to say, in order: JSON, or None where a rank says nothing."""
    encoded = json.dumps(content).encode() if content is not None else b""
    sizes = _exchange(ranks, [which, len(encoded), 0, 0, 0, 0])[:, 1].tolist()
    if not any(sizes):
        return [None] * len(ranks)
    padded = torch.frombuffer(bytearray(encoded.ljust(max(sizes))), dtype=torch.uint8)
    gathered = _all_gather(ranks, padded)
    texts = bytearray(gathered.numel())
    torch.frombuffer(texts, dtype=torch.uint8).copy_(gathered.flatten())
    starts = range(0, len(texts), len(padded))
    spans = [texts[start : start + size] for start, size in zip(starts, sizes)]
    return [json.loads(span) if span else None for span in spans]


def _all_gather(ranks: Ranks, tensor: torch.Tensor) -> torch.Tensor:
    """Tensors of one shape from all ``ranks``, stacked.

    Raises:
        RuntimeError: a rank did not come.
    """
    gathered = tensor.new_empty((len(ranks), *tensor.shape))
    try:
        # To all at once: gloo's own all-gather passes tensors around a ring, one hop after another.
        copies = tensor.expand_as(gathered).contiguous()
        _group(ranks).alltoall_base(gathered, copies, [], []).wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"ranks {list(ranks)} have to call step() together, but one of them didn't within "
            f"{world_timeout()}, or failed meanwhile, or has consistency_check='off', or 'plan' "
            f"and options that were changed on other ranks only: {error}"
        ) from error
    return gathered


_groups = GroupCache()


def _group(ranks: Ranks) -> Any:
    """A gloo group of ``ranks``, for nothing else, which no other rank needs to hear of.

    A group that others use too, the world's for one, would have to be used in one order on all
    ranks: a checkpoint that is being saved in the background uses it when it likes.

    `dist.new_group` names groups by how many a rank is in already, so ranks that are in different
    numbers of groups would wait for each other under different names. So the first of ``ranks``
    draws a name. The store may outlive the process group, and gloo would read addresses of earlier
    groups of the same name: the name is new, and forgotten once all are connected, or nobody came.
    """
    groups = _groups.current()
    if ranks in groups:
        return groups[ranks]
    store, timeout = dist.distributed_c10d._get_default_store(), world_timeout()
    key = f"optimizer-agreement/{'-'.join(map(str, ranks))}"
    rank = ranks.index(dist.get_rank())
    if rank == 0:
        store.set(key, uuid.uuid4().hex)
    try:
        store.wait([key], timeout)
        prefixed = dist.PrefixStore(f"{key}/{store.get(key).decode()}", store)
        group: Any = dist.ProcessGroupGloo(prefixed, rank, len(ranks), timeout)
        group.barrier().wait()  # gloo may connect lazily, and others not have read the name yet
    finally:
        if rank == 0:
            store.delete_key(key)
    groups[ranks] = group
    return group
