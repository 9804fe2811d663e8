"""The order of chunks: a few are under way at once, and it is the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernel import optimizer

Do, chunk_order = optimizer.async_utils.Do, optimizer.async_utils.chunk_order

GATHER, COMPUTE, FINISH = Do.GATHER, Do.ORTHOGONALIZE, Do.UPDATE
COUNTS, DEPTHS = range(9), range(1, 9)


def every_order() -> Iterator[tuple[int, int, list]]:
    for count in COUNTS:
        for in_flight in DEPTHS:
            yield count, in_flight, list(chunk_order(count, in_flight))


@pytest.mark.kernels_ci
def test_every_chunk_is_gathered_computed_and_finished_once_and_each_in_order():
    for count, _, events in every_order():
        for stage in (GATHER, COMPUTE, FINISH):
            assert [number for what, number in events if what == stage] == list(range(count))
        for number in range(count):
            places = [events.index((stage, number)) for stage in (GATHER, COMPUTE, FINISH)]
            assert places == sorted(places)
        assert len(events) == 3 * count


def test_no_more_than_in_flight_are_begun_and_not_finished():
    for count, in_flight, events in every_order():
        most = under_way = 0
        for what, _ in events:
            under_way += (what == GATHER) - (what == FINISH)
            most = max(most, under_way)
        assert most == min(count, in_flight)


def test_more_in_flight_than_there_are_chunks_change_nothing():
    for count, in_flight, events in every_order():
        if in_flight > count > 0:
            assert events == list(chunk_order(count, count))


def test_the_next_chunk_is_gathered_before_one_is_computed():
    for count, in_flight, events in every_order():
        for number in range(count - 1) if in_flight >= 2 else ():
            assert events.index((GATHER, number + 1)) < events.index((COMPUTE, number))


def test_a_chunk_goes_back_while_the_next_is_computed():
    for count, in_flight, events in every_order():
        for number in range(1, count) if in_flight >= 3 else ():
            assert events.index((COMPUTE, number)) < events.index((FINISH, number - 1))


def seconds(count: int, in_flight: int, gather: float, compute: float, scatter: float) -> float:
    """Of chunks on a device with two streams, for arithmetic and for collectives, both in order."""
    arithmetic = wire = 0.0

    def launch(collective: float) -> float:
        nonlocal wire
        wire = max(wire, arithmetic) + collective
        return wire

    arrivals: dict[int, float] = {}
    for do, chunk in chunk_order(count, in_flight):
        if do is GATHER:
            arrivals[chunk] = launch(gather)
        elif do is COMPUTE:
            arithmetic = max(arithmetic, arrivals[chunk]) + compute
            arrivals[chunk] = launch(scatter)
        else:
            arithmetic = max(arithmetic, arrivals[chunk])
    return arithmetic


def test_two_in_flight_hide_one_way_of_the_traffic_and_three_both():
    one, two, three = (seconds(100, depth, 0.4, 1.0, 0.4) / 100 for depth in (1, 2, 3))
    assert one == pytest.approx(1.8)
    assert two == pytest.approx(1.4, rel=0.01)
    assert three == pytest.approx(1.0, rel=0.01)


def test_one_in_flight_is_one_after_the_other():
    assert list(chunk_order(2, 1)) == [
        (GATHER, 0),
        (COMPUTE, 0),
        (FINISH, 0),
        (GATHER, 1),
        (COMPUTE, 1),
        (FINISH, 1),
    ]
