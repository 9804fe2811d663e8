"""The race detector finds what a small program forgets, and nothing where nothing is."""

from __future__ import annotations

import random

import pytest
import torch

from race_detector import COMPUTE, HOST, IN, OUT, Recorder

CHUNKS, BYTES = 4, 64


def stream(recorder: Recorder, rounds: int = 2, slots: int = 2) -> torch.Tensor:
    """Adds one to each chunk on the "device", in slots that are used again; 5 waits for each chunk.

    Returns the host's memory, shape (CHUNKS, BYTES), which the host may read.
    """
    host = torch.zeros(CHUNKS, BYTES, dtype=torch.uint8)
    memory = [recorder.allocate(BYTES) for _ in range(slots)]
    recorder.wait(IN, recorder.record(COMPUTE))
    free = [None] * slots
    with recorder.watching():
        for number in range(rounds * CHUNKS):
            slot, chunk = memory[number % slots], host[number % CHUNKS]
            if free[number % slots] is not None:
                recorder.wait(IN, free[number % slots])
            recorder.copy(IN, [slot], [chunk])
            recorder.wait(COMPUTE, recorder.record(IN))
            slot.add_(1)
            recorder.wait(OUT, recorder.record(COMPUTE))
            recorder.copy(OUT, [chunk], [slot])
            free[number % slots] = recorder.record(OUT)
        recorder.wait(COMPUTE, free[-1])
        recorder.wait(COMPUTE, free[0])
        for slot in memory:
            recorder.free(slot)
    recorder.synchronize(recorder.record(OUT))
    return host


def test_a_program_that_waits_has_no_race():
    recorder = Recorder()
    host = stream(recorder)
    recorder.touched(host, write=False, by=HOST)
    assert recorder.races == []
    assert host.eq(2).all()
    assert recorder.waits == ["stream"] * len(recorder.waits)
    assert recorder.allocated_bytes == 0 and recorder.peak_bytes == 2 * BYTES


def test_each_wait_that_is_dropped_is_missed_unless_a_later_one_does_its_work():
    number = Recorder()
    stream(number)
    # free[-1] is the last copy out, so waiting for the other slot's adds nothing.
    for place in range(len(number.waits) - 1):
        recorder = Recorder(dropped={place})
        stream(recorder)
        assert recorder.races, f"wait {place} of {len(number.waits)}"
    recorder = Recorder(dropped={len(number.waits) - 1})
    stream(recorder)
    assert recorder.races == []


@pytest.mark.parametrize("waits", [True, False])
def test_freeing_while_a_copy_out_is_under_way_is_a_race(waits):
    recorder = Recorder()
    host, slot = torch.zeros(BYTES, dtype=torch.uint8), recorder.allocate(BYTES)
    recorder.wait(OUT, recorder.record(COMPUTE))
    recorder.copy(OUT, [host], [slot])
    if waits:
        recorder.wait(COMPUTE, recorder.record(OUT))
    recorder.free(slot)
    assert bool(recorder.races) != waits


def test_using_what_was_freed_is_a_race():
    recorder = Recorder()
    slot = recorder.allocate(BYTES)
    recorder.free(slot)
    assert recorder.races == []
    with recorder.watching():
        slot[3:5].zero_()
    assert len(recorder.races) == 1 and "compute writes (zero_) what was freed" in recorder.races[0]


OPERATIONS = {
    "read": lambda t: t + 1,
    "read in a list": lambda t: torch._foreach_add([t], 1),
    "write": lambda t: t.zero_(),
    "write in a list": lambda t: torch._foreach_zero_([t]),
    "write to out": lambda t: torch.add(torch.ones_like(t), 1, out=t),
    "write through a view": lambda t: t.view(8, -1)[1:3, ::2].add_(1),
    "read through a view": lambda t: t.view(8, -1).t().sum(0),
    "item": lambda t: t[5].item(),
}
LOOKS = {
    "views": lambda t: t.view(8, -1)[2].t().detach().chunk(2),
    "empty_like": torch.empty_like,
    "new_zeros": lambda t: t.new_zeros(3),
    "shape": lambda t: (t.shape, t.data_ptr(), t.numel()),
}


@pytest.mark.parametrize("what", [*OPERATIONS, *LOOKS])
def test_operations_read_and_write_and_views_do_nothing(what):
    for by_reading in (True, False):
        recorder = Recorder()
        met, other = torch.ones(BYTES), torch.zeros(BYTES)
        if by_reading:
            recorder.copy(IN, [other], [met])
        else:
            recorder.copy(IN, [met], [other])
        with recorder.watching():
            {**OPERATIONS, **LOOKS}[what](met)
            torch.ones(3) + 1  # of no interest
        expected = what in OPERATIONS and ("write" in what or not by_reading)
        assert len(recorder.races) == expected, recorder.races


def random_program(seed: int) -> tuple[Recorder, bool]:
    """Also: whether it races, by the definition: each pair of accesses, byte by byte.

    An access is known by the set of those before it: of its queue, of what its queue waited for,
    and of what the host knew.
    """
    draw = random.Random(seed)
    recorder, memory = Recorder(), torch.zeros(16, dtype=torch.uint8)
    before: dict[str, set[int]] = {queue: set() for queue in (COMPUTE, IN, OUT, HOST)}
    accesses: list[tuple[range, bool]] = []
    events = [(recorder.record(IN), set(before[IN]))]
    races = False
    for _ in range(draw.randrange(4, 40)):
        queue = draw.choice([COMPUTE, IN, OUT])
        event, behind = draw.choice(events[-3:])
        what = draw.random()
        if what < 0.35:
            queue, write = draw.choice([queue, queue, HOST]), draw.random() < 0.5
            start = draw.randrange(16)
            place = range(start, draw.randrange(start, 16) + 1)
            recorder.touched(memory[place.start : place.stop], write, by=queue)
            before[queue] |= before[HOST]
            for number, (other, wrote) in enumerate(accesses):
                if number not in before[queue] and (write or wrote):
                    races |= bool(set(place) & set(other))
            before[queue].add(len(accesses))
            accesses.append((place, write))
        elif what < 0.6:
            before[queue] |= before[HOST]
            events.append((recorder.record(queue), set(before[queue])))
        elif what < 0.95:
            recorder.wait(queue, event)
            before[queue] |= before[HOST] | behind
        else:
            recorder.synchronize(event)
            before[HOST] |= behind
    return recorder, races


def test_random_programs_race_as_the_definition_has_it():
    outcomes = []
    for seed in range(1500):
        recorder, races = random_program(seed)
        assert bool(recorder.races) == races, f"seed {seed}: {recorder.races}"
        outcomes.append(races)
    assert 300 < sum(outcomes) < 1200
