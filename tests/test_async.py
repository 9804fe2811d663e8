"""The order of chunks: a few are under way at once, so that traffic hides behind arithmetic."""

from __future__ import annotations

import itertools

import pytest

from kernel import optimizer

Do, chunk_order = optimizer.async_utils.Do, optimizer.async_utils.chunk_order
GATHER, COMPUTE, FINISH = STAGES = Do.GATHER, Do.ORTHOGONALIZE, Do.UPDATE


@pytest.mark.kernels_ci
@pytest.mark.parametrize("in_flight", range(1, 9))
@pytest.mark.parametrize("chunks", range(9))
def test_chunks_go_through_all_stages_in_order_and_a_few_are_under_way_at_once(chunks, in_flight):
    events = list(chunk_order(chunks, in_flight))
    place = {event: at for at, event in enumerate(events)}
    assert len(place) == len(events) == 3 * chunks
    for stage in STAGES:
        assert [number for do, number in events if do is stage] == list(range(chunks))
    for number in range(chunks):
        places = [place[stage, number] for stage in STAGES]
        assert places == sorted(places)
        if number and in_flight >= 2:  # the next chunk is gathered while one is computed
            assert place[GATHER, number] < place[COMPUTE, number - 1]
        if number and in_flight >= 3:  # and the one before goes back
            assert place[COMPUTE, number] < place[FINISH, number - 1]
        if number >= 2:  # and no other waits for its update
            assert place[FINISH, number - 2] < place[COMPUTE, number]
    under_way = itertools.accumulate((do is GATHER) - (do is FINISH) for do, _ in events)
    assert max(under_way, default=0) == min(chunks, in_flight)
    if in_flight > chunks > 0:
        assert events == list(chunk_order(chunks, chunks))


@pytest.mark.parametrize("in_flight", range(1, 5))
def test_what_a_lane_updates_last_waits_for_the_first_product_of_the_next_lane_and_no_more(
    in_flight,
):
    lanes = [(3, in_flight), (1, 1), (4, in_flight), (2, 2)]
    events = list(optimizer.async_utils.lanes_order(lanes))
    for lane, (chunks, _) in enumerate(lanes[:-1]):
        computed = events.index((COMPUTE, lane, chunks - 1))
        left = [event for event in events[computed:] if event[:2] == (FINISH, lane)]
        after = events.index((COMPUTE, lane + 1, 0)) + 1
        assert left and events[after:][: len(left)] == left
