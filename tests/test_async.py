"""The order of chunks: a few are under way at once, and it is the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kernel import optimizer

interleave = optimizer.async_utils.interleave

GATHER, COMPUTE, FINISH = "gather", "compute", "finish"
MEANWHILE = ("meanwhile", -1)
Event = tuple[str, int]
COUNTS, DEPTHS = range(9), range(1, 9)


def chunk(number: int, events: list[Event]) -> Iterator[None]:
    events.append((GATHER, number))
    yield
    events.append((COMPUTE, number))
    yield
    events.append((FINISH, number))


def events_of(count: int, in_flight: int, with_work: bool = True) -> list[Event]:
    events: list[Event] = []
    work = (lambda: events.append(MEANWHILE)) if with_work else None
    interleave((chunk(number, events) for number in range(count)), in_flight, work)
    return events


def every_run() -> Iterator[tuple[int, int, list[Event]]]:
    for count in COUNTS:
        for in_flight in DEPTHS:
            yield count, in_flight, events_of(count, in_flight)


@pytest.mark.kernels_ci
def test_every_chunk_is_gathered_computed_and_finished_once_and_each_in_order():
    for count, _, events in every_run():
        for stage in (GATHER, COMPUTE, FINISH):
            assert [number for what, number in events if what == stage] == list(range(count))
        for number in range(count):
            places = [events.index((stage, number)) for stage in (GATHER, COMPUTE, FINISH)]
            assert places == sorted(places)
        assert len(events) == 3 * count + 1


def test_no_more_than_in_flight_are_begun_and_not_finished():
    for count, in_flight, events in every_run():
        most = under_way = 0
        for what, _ in events:
            under_way += (what == GATHER) - (what == FINISH)
            most = max(most, under_way)
        assert most == min(count, in_flight)


def test_the_order_depends_on_nothing_but_count_and_depth():
    for count, in_flight, events in every_run():
        assert events_of(count, in_flight) == events
        without = [event for event in events if event != MEANWHILE]
        assert events_of(count, in_flight, with_work=False) == without
        if in_flight > count > 0:
            assert events == events_of(count, count)


def test_the_next_chunk_is_gathered_before_one_is_computed():
    for count, in_flight, events in every_run():
        for number in range(count - 1) if in_flight >= 2 else ():
            assert events.index((GATHER, number + 1)) < events.index((COMPUTE, number))


def test_a_chunk_goes_back_while_the_next_is_computed():
    for count, in_flight, events in every_run():
        for number in range(1, count) if in_flight >= 3 else ():
            assert events.index((COMPUTE, number)) < events.index((FINISH, number - 1))


def seconds(count: int, in_flight: int, gather: float, compute: float, scatter: float) -> float:
    """Of chunks on a device with two streams, for arithmetic and for collectives, both in order."""
    arithmetic = wire = 0.0

    def launch(collective: float) -> float:
        nonlocal wire
        wire = max(wire, arithmetic) + collective
        return wire

    def timed() -> Iterator[None]:
        nonlocal arithmetic
        gathered = launch(gather)
        yield
        arithmetic = max(arithmetic, gathered) + compute
        returned = launch(scatter)
        yield
        arithmetic = max(arithmetic, returned)

    interleave((timed() for _ in range(count)), in_flight)
    return arithmetic


def test_two_in_flight_hide_one_way_of_the_traffic_and_three_both():
    one, two, three = (seconds(100, depth, 0.4, 1.0, 0.4) / 100 for depth in (1, 2, 3))
    assert one == pytest.approx(1.8)
    assert two == pytest.approx(1.4, rel=0.01)
    assert three == pytest.approx(1.0, rel=0.01)


def test_one_in_flight_is_one_after_the_other():
    assert events_of(2, 1) == [
        (GATHER, 0),
        MEANWHILE,
        (COMPUTE, 0),
        (FINISH, 0),
        (GATHER, 1),
        (COMPUTE, 1),
        (FINISH, 1),
    ]


def test_other_work_is_done_once_when_the_first_gathers_are_under_way():
    for count, in_flight, events in every_run():
        assert events.count(MEANWHILE) == 1
        assert events.index(MEANWHILE) == min(count, in_flight)


def test_other_work_is_done_also_when_there_are_no_chunks():
    assert events_of(0, 3) == [MEANWHILE]
    interleave([], 1)


def failing(stage: int, events: list[Event]) -> Iterator[None]:
    """Raises instead of gathering, computing or finishing."""
    for at in range(3):
        if at == stage:
            raise ConnectionError(f"at stage {stage}")
        events.append((GATHER, at))
        yield


@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_in_a_chunk_is_raised(stage, in_flight):
    events: list[Event] = []
    tasks = [chunk(0, events), failing(stage, events), chunk(2, events)]
    with pytest.raises(ConnectionError, match=f"at stage {stage}"):
        interleave(tasks, in_flight)
    assert (FINISH, 2) not in events


def test_an_error_in_other_work_or_in_making_chunks_is_raised():
    def fail() -> None:
        raise ZeroDivisionError("other work")

    def chunks(events: list[Event]) -> Iterator[Iterator[None]]:
        yield chunk(0, events)
        raise LookupError("second chunk")

    events: list[Event] = []
    with pytest.raises(ZeroDivisionError, match="other work"):
        interleave([chunk(0, events)], 2, fail)
    assert events == [(GATHER, 0)]
    with pytest.raises(LookupError, match="second chunk"):
        interleave(chunks([]), 2)


def test_chunks_are_not_made_before_their_turn():
    events: list[Event] = []
    made: list[int] = []

    def chunks() -> Iterator[Iterator[None]]:
        for number in range(5):
            made.append(number)
            yield chunk(number, events)

    def look(expected: list[int]) -> Callable[[], None]:
        def check() -> None:
            assert made == expected

        return check

    interleave(chunks(), 2, look([0, 1, 2]))  # the next one lies ready
    assert made == [0, 1, 2, 3, 4]
