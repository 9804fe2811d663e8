"""What holds of every training, whatever its shapes, layouts, options, gradients, or garbage.

`hypothesis` draws them, and shows the smallest example of a failure. Runs are alike each time;
``pytest --hypothesis-profile=night`` looks further (conftest.py).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from breaking import contents, fingerprint
from comparisons import through_torch_save
from kernel import as_arguments, optimizer
from layouts import EXACT, MEMORY, STEPS, Twins, build, params_of, set_gradients
from rank_pool import RankPool
from strategies import (
    ADAMW_OPTIONS,
    MUON_OPTIONS,
    cases,
    clip_garbage,
    garbage,
    garbage_tensors,
    matrix_shapes,
    qk_garbage,
    some_of,
)
from trainings import (
    Case,
    assert_equal,
    give_gradients,
    refuse_garbage_of_one_rank,
    takes_the_steps_of_one_process,
    twins_of,
)
from wrong_input import assert_steps_like, good_groups, muon_group, trained

Muon = optimizer.Muon
GROUP_OPTIONS = sorted(trained(0).param_groups[0].keys() - {"params", "use_muon", "rounding_step"})
CONSTRUCTOR = sorted(inspect.signature(Muon).parameters.keys() - {"params", "process_group"})

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.usefixtures("one_thread"),
]

# Of examples: a few, and as many as a minute or two allow.
TIMES = [1, pytest.param(10, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param) as ranks:
        yield ranks


on_ranks = pytest.mark.parametrize("pool", [1, 2, 3, 4], indirect=True)


def holds(count: int, /, **drawn: st.SearchStrategy[Any]) -> Callable[[Any], Any]:
    """A test that a function raises for none of what is drawn, a few and, slowly, many times.

    Args:
        count: of examples, a few.
        drawn: the function's arguments.
    """

    def decorate(function: Callable[..., None]) -> Any:
        @pytest.mark.parametrize("times", TIMES)
        def test(times: int) -> None:
            check(function, times * count, **drawn)

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        return test

    return decorate


def check(function: Callable[..., None], count: int, /, **drawn: st.SearchStrategy[Any]) -> None:
    examples = max(1, round(count * settings.default.max_examples / 100))
    settings(max_examples=examples)(given(**drawn)(function))()


# -- layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", TIMES)
@on_ranks
def test_any_training_takes_the_steps_of_one_process_and_changes_nothing_else(pool, times):
    def on_all(case: Case) -> None:
        pool(takes_the_steps_of_one_process, case)

    check(on_all, 6 * times, case=cases(pool.ranks))


# -- the rule --------------------------------------------------------------------------------------

shapes_of = st.lists(matrix_shapes(), min_size=1, max_size=4)
rules = some_of(MUON_OPTIONS)


def matrices(shapes: Any, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@contextlib.contextmanager
def ignored_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def train(groups: list[dict[str, Any]], gradients: Any, **options: Any) -> Any:
    """Steps with ``gradients(step)``, one for each parameter in order."""
    with ignored_warnings():  # of schedules that end early
        optim = Muon(groups, **as_arguments({**EXACT, **options}))
    params = params_of(optim)
    for step in range(STEPS):
        for p, grad in zip(params, gradients(step), strict=True):
            p.grad = grad.clone()
        optim.step()
    return optim


def group_of(values: Any, **options: Any) -> dict[str, Any]:
    return {"params": [nn.Parameter(v.clone()) for v in values], "use_muon": True, **options}


def results(optim: Any) -> list[dict[str, torch.Tensor]]:
    """Returns each parameter and its state."""
    params = params_of(optim)
    return [{"weight": p.detach(), **optim.state[p]} for p in params]


def assert_equal_results(found: Any, expected: Any) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key], f"{key} of parameter {number}")


@holds(12, shapes=shapes_of, options=rules, adamw=some_of(ADAMW_OPTIONS), data=st.data())
def test_neither_order_nor_the_division_into_groups_matters(shapes, options, adamw, data):
    kinds = [{**options, "use_muon": True}, {**adamw, "use_muon": False}]
    order = data.draw(st.permutations(range(2 * len(shapes))), label="order")
    values, both = matrices(shapes, 0), [*shapes, *shapes]
    whole = [group_of(values, **kind) for kind in kinds]
    expected = results(train(whole, lambda step: matrices(both, step)))
    pieces: list[dict[str, Any]] = []
    for index in order:
        joins = bool(pieces) and data.draw(st.booleans(), label=f"{index} joins the one before")
        kind = kinds[index // len(shapes)]
        if not (joins and pieces[-1]["use_muon"] == kind["use_muon"]):
            pieces.append(group_of([], **kind))
        pieces[-1]["params"].append(nn.Parameter(values[index % len(shapes)].clone()))

    def in_order(step: int) -> list[torch.Tensor]:
        gradients = matrices(both, step)
        return [gradients[index] for index in order]

    found = results(train(pieces, in_order))
    assert_equal_results(found, [expected[index] for index in order])


# -- saved and loaded ------------------------------------------------------------------------------


def through_distributed(saved: Any) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        dcp.save({"optim": saved}, checkpoint_id=directory, no_dist=True)
        empty = copy.deepcopy(saved)
        for own in empty["state"].values():
            for value in own.values():
                value.zero_()
        dcp.load({"optim": empty}, checkpoint_id=directory, no_dist=True)
    return empty


AS_PLAIN = {"absent on one rank": "absent", **dict.fromkeys(MEMORY, "contiguous")}


def plain(case: Case) -> Case:
    """The same training of plain tensors, on one process."""
    groups = [
        dataclasses.replace(
            group, weights=[dataclasses.replace(w, mesh=None) for w in group.weights]
        )
        for group in case.groups
    ]
    gradients = [
        [AS_PLAIN.get(kind, kind) for kind in kinds]  # which both are to have alike
        for kinds in case.gradients
    ]
    return dataclasses.replace(case, groups=groups, gradients=gradients, replicas=None)


def built_again(case: Case, twins: Twins) -> Any:
    """A new optimizer of the same parameters."""
    params = iter([p for _, p, _ in twins.pairs])
    groups = [
        group.param_group([next(params) for _ in group.weights], number)
        for number, group in enumerate(case.groups)
    ]
    return build(groups, **{**EXACT, **case.options})


WAYS = [
    copy.deepcopy,
    lambda saved: pickle.loads(pickle.dumps(saved)),
    through_torch_save,
    through_distributed,
]


@holds(
    10,
    case=cases(1),
    at=st.lists(st.integers(0, 2), max_size=3),
    way=st.sampled_from(WAYS),
    fresh=st.booleans(),
)
def test_a_training_saved_and_loaded_at_any_point_goes_on_as_if_it_had_not_been(
    case, at, way, fresh
):
    case = plain(case)
    with ignored_warnings():
        twins = twins_of(case)
        generator = torch.Generator().manual_seed(1)
        for step, kinds in enumerate(case.gradients):
            for _ in range(at.count(step)):
                saved = way(twins.ours.state_dict())
                if fresh:
                    twins.ours = built_again(case, twins)
                before = fingerprint(saved)
                twins.ours.load_state_dict(saved)
                assert fingerprint(saved) == before
            give_gradients(twins, kinds, case.frozen, generator)
            logits = None if case.logits is None else {0: torch.tensor(case.logits[step])}
            twins.ours.step(qk_logits=logits)
            twins.reference.step(qk_logits=logits)
        for _, p, q in twins.pairs:
            assert_equal(p.detach(), q.detach(), "weight")
        ours, reference = (optim.state_dict() for optim in (twins.ours, twins.reference))
        assert fingerprint(ours) == fingerprint(reference)


# -- garbage ---------------------------------------------------------------------------------------


def refused_or_used(optim: Any, twin: Any, undo: Callable[[], Any], **step: Any) -> None:
    """A step works, or raises and changes nothing, and after ``undo()`` works as the twin's."""
    before = fingerprint(contents(optim))
    try:
        with ignored_warnings():
            optim.step(**step)
    except ValueError as error:
        assert str(error)
        assert fingerprint(contents(optim)) == before
        undo()
        with ignored_warnings():
            if twin is not None:
                assert_steps_like(optim, twin)


@holds(80, key=st.sampled_from(GROUP_OPTIONS), value=garbage(), is_set_later=st.booleans())
def test_garbage_as_an_option_of_a_group_is_refused_or_used(key, value, is_set_later):
    optim = trained(1)
    group = optim.param_groups[2]
    if is_set_later:
        twin, good = copy.deepcopy(optim), group[key]
        group[key] = value
        refused_or_used(optim, twin, lambda: group.update({key: good}))
        return
    named = {"names": ["layers.9.weight"]}
    added_or_refused(optim, muon_group(nn.Parameter(torch.ones(4, 4)), **named, **{key: value}))


def added_or_refused(optim: Any, group: dict[str, Any], errors: Any = ValueError) -> None:
    before, twin = fingerprint(contents(optim)), copy.deepcopy(optim)
    try:
        with ignored_warnings():
            optim.add_param_group(group)
    except errors as error:
        assert str(error)
        assert fingerprint(contents(optim)) == before
        assert_steps_like(optim, twin)
    else:
        for p in params_of(optim):
            p.grad = torch.ones_like(p) if p.is_leaf else None
        refused_or_used(optim, twin, lambda: empty_the_last(optim))


def empty_the_last(optim: Any) -> None:
    """A group can't be taken back."""
    group = optim.param_groups[-1]
    group.clear()
    group.update({**optim.param_groups[2], "params": [], "names": []})


def made_or_refused(make: Callable[[], Any], **step: Any) -> None:
    try:
        with ignored_warnings():
            optim = make()
    except ValueError as error:
        assert str(error)
    else:
        set_gradients(params_of(optim))
        refused_or_used(optim, copy.deepcopy(optim), lambda: None, **step)


@holds(60, key=st.sampled_from(CONSTRUCTOR), value=garbage())
def test_garbage_as_an_argument_is_refused_or_used(key, value):
    made_or_refused(lambda: Muon(good_groups(), **as_arguments({key: value})))


@holds(
    40,
    key=st.sampled_from(["params", "names", "use_muon", "lr", "unheard_of"]),
    value=st.one_of(garbage(), st.lists(garbage_tensors(), max_size=3)),
    has_rest=st.booleans(),
)
def test_garbage_as_a_group_adds_nothing(key, value, has_rest):
    rest = muon_group(nn.Parameter(torch.ones(4, 4))) if has_rest else {}
    added_or_refused(trained(1), {**rest, key: value}, (ValueError, TypeError))


@holds(40, logits=qk_garbage())
def test_garbage_as_logits_is_refused_or_used(logits):
    names = ["layers.0.wq.weight", "layers.0.wk.weight", "layers.1.wq.weight", "layers.1.wk.weight"]
    params = [nn.Parameter(m) for m in matrices([(4, 3), (2, 3)] * 2, 0)]
    group = muon_group(*params, names=names)
    optim = Muon([group], clip_config={"head_dim": 2, "threshold": 1.0})
    for step in range(2):
        set_gradients(params_of(optim), step)
        with ignored_warnings():
            optim.step()
    set_gradients(params_of(optim), 2)
    given_logits = fingerprint(logits)
    refused_or_used(optim, copy.deepcopy(optim), lambda: None, qk_logits=logits)
    assert fingerprint(logits) == given_logits


@holds(60, config=clip_garbage())
def test_garbage_as_a_clip_config_is_refused_or_used(config):
    names = ["layers.0.wq.weight", "layers.0.wk.weight"]
    params = [nn.Parameter(m) for m in matrices([(4, 3), (2, 3)], 0)]
    kept, group = fingerprint(config), muon_group(*params, names=names)
    logits = {0: torch.tensor([3.0, 0.5])}
    made_or_refused(lambda: Muon([group], clip_config=config), qk_logits=logits)
    assert fingerprint(config) == kept


@holds(60, data=st.data(), steps=st.integers(0, 1))
def test_a_garbled_checkpoint_is_refused_or_loaded_as_a_whole(data, steps):
    saved = copy.deepcopy(trained(2, beta2=0.9).state_dict())
    for _ in range(data.draw(st.integers(1, 3), label="edits")):
        garble(saved, data.draw)
    optim = trained(steps, beta2=0.9)
    before, twin, kept = fingerprint(contents(optim)), copy.deepcopy(optim), fingerprint(saved)
    try:
        with ignored_warnings():
            optim.load_state_dict(saved)
    except (ValueError, TypeError, KeyError) as error:
        assert str(error)
        assert fingerprint(contents(optim)) == before and fingerprint(saved) == kept
        assert_steps_like(optim, twin)
    else:
        assert fingerprint(saved) == kept
        set_gradients(params_of(optim))
        refused_or_used(optim, None, lambda: None)


def garble(saved: Any, draw: Callable[..., Any]) -> None:
    """Changes something somewhere in a state dict."""
    place, keys = saved, []
    while isinstance(place, (dict, list)) and place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys), label="key")
        below = place[key]
        if not (isinstance(below, (dict, list)) and below) or draw(st.integers(0, 3)) == 3:
            break
        place = below
    else:
        return
    how = draw(st.sampled_from(["drop", "replace", "rename", "reshape", "cast"]), label="how")
    if how == "drop":
        del place[key]
    elif how == "replace":
        place[key] = draw(garbage(), label="value")
    elif how == "rename" and isinstance(place, dict):
        place[draw(st.one_of(st.text(max_size=3), st.integers(0, 9)), label="name")] = place.pop(
            key
        )
    elif isinstance(place[key], torch.Tensor):
        shape = place[key].shape
        if how == "reshape":
            other = draw(st.lists(st.integers(0, 4), max_size=3), label="shape")
            place[key] = torch.ones(other)
        elif how == "cast":
            dtypes = [torch.int32, torch.bool, torch.complex64, torch.float64, torch.float8_e4m3fn]
            place[key] = torch.ones(shape).to(draw(st.sampled_from(dtypes), label="dtype"))


@holds(
    40,
    number=st.integers(0, 5),
    value=garbage_tensors(),
    what=st.sampled_from(["data", "grad", "param", "requires_grad"]),
)
def test_garbage_in_place_of_tensors_is_refused_or_used(number, value, what):
    optim = trained(1)
    groups = optim.param_groups
    place = [(group, index) for group in groups for index in range(len(group["params"]))][number]
    group, index = place
    p = group["params"][index]
    kept, grad, twin = p.data, p.grad, copy.deepcopy(optim)
    if what == "requires_grad":
        p.requires_grad_(False)
    elif what == "param":
        group["params"][index] = value
    else:
        try:
            setattr(p, what, value)
        except (RuntimeError, TypeError):  # torch refuses it
            return

    def undo() -> None:
        group["params"][index] = p
        p.data, p.grad = kept, grad
        p.requires_grad_(True)

    refused_or_used(optim, twin, undo)


# What means nothing, whichever option it is given as.
REFUSED = [1 + 2j, Decimal("0.5"), Fraction(1, 3), b"x", torch.complex32, "x", ["x", 1], {"x": "y"}]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("pool", [3], indirect=True)
def test_garbage_that_one_rank_is_given_raises_on_all_and_changes_nothing(pool, times):
    def on_one(where: str, value: Any, bad: int) -> None:
        pool(refuse_garbage_of_one_rank, where, value, bad)

    check(
        on_one,
        5 * times,
        where=st.sampled_from([*GROUP_OPTIONS, "names", "logits", "gradient"]),
        value=st.sampled_from(REFUSED),
        bad=st.integers(0, 2),
    )
