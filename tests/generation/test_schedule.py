"""Continuous batching: when each sample is decoded, and that the bound holds."""

from __future__ import annotations

import random

import pytest

from reinforce_rl.generation.native.schedule import Schedule


def run(
    schedule: Schedule, lengths: list[int], num_samples: int, ends: list[int], max_length: int
) -> list[int]:
    """End each sample after a given number of tokens; return samples in starting order."""
    begun: list[int] = []
    read: list[int] = []
    while True:
        before = len(schedule.running)
        read += schedule.admit()
        if not schedule.running:
            break
        begun += [sequence.sample for sequence in schedule.running[before:]]
        assert len(schedule.running) <= schedule.rows
        places = {sequence.prompt: sequence.slot for sequence in schedule.running}
        # no prompt overwrites another prompt's keys
        assert len(set(places.values())) == len(places) <= schedule.slots
        for slot in places.values():
            assert 0 <= slot < schedule.slots
        expected = [sequence.sample for sequence in schedule.running]
        stopped = [
            row
            for row, sequence in enumerate(schedule.running)
            if sequence.written + 1 == ends[sequence.sample]
        ]
        order = schedule.advance(stopped)
        assert (order is None) == (
            not stopped and not any(w == max_length for w in _written(schedule))
        )
        if order is not None:
            samples = [sequence.sample for sequence in schedule.running]
            assert samples == [expected[row] for row in order]
    assert sorted(read) == list(range(len(lengths)))  # each prompt once
    return begun


def _written(schedule: Schedule) -> list[int]:
    return [sequence.written for sequence in schedule.running]


@pytest.mark.parametrize("max_tokens", [None, 1, 30, 45, 60, 100, 10**6])
@pytest.mark.parametrize("seed", range(5))
def test_every_sample_is_decoded_once_within_the_bound(max_tokens, seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 20) for _ in range(6)]
    num_samples = draw.randint(1, 5)
    max_length = 10
    schedule = Schedule(lengths, num_samples, max_length, max_tokens)
    total = len(lengths) * num_samples
    ends = [draw.randint(1, 10) for _ in range(total)]
    begun = run(schedule, lengths, num_samples, ends, max_length)
    assert sorted(begun) == list(range(total))
    held = schedule.rows * max_length + schedule.slots * max(lengths)
    if max_tokens is None or max_tokens == 10**6:
        assert schedule.rows == total
        assert schedule.slots == len(lengths)
    elif max_tokens >= max_length + max(lengths):
        assert held <= max_tokens
    else:
        assert schedule.rows == 1
        assert schedule.slots == 1


def test_a_sample_that_ends_makes_room_at_once():
    schedule = Schedule([4, 4], num_samples=2, max_length=5, max_tokens=18)
    assert schedule.rows == 2
    assert schedule.slots == 2
    assert schedule.admit() == [0]
    assert schedule.advance([0]) == [1]
    assert schedule.admit() == [1]
    expected = [
        (1, 0, 1),
        (2, 1, 0),
    ]
    assert [
        (sequence.sample, sequence.slot, sequence.written) for sequence in schedule.running
    ] == expected
    assert schedule.longest == 1
    assert schedule.advance([]) is None
    assert schedule.advance([0]) == [1]
    assert schedule.admit() == []
    expected = [
        (2, 1, 2),
        (3, 1, 0),
    ]
    assert [
        (sequence.sample, sequence.slot, sequence.written) for sequence in schedule.running
    ] == expected


def test_the_last_rows_fill_the_gaps():
    schedule = Schedule([1], num_samples=6, max_length=9, max_tokens=None)
    schedule.admit()
    assert schedule.advance([0, 3, 5]) == [4, 1, 2]
    samples = [sequence.sample for sequence in schedule.running]
    assert samples == [4, 1, 2]
    assert schedule.advance([0, 1, 2]) == []


@pytest.mark.parametrize("seed", range(20))
def test_parked_sequences_keep_their_lanes(seed):
    """Simulate the cache's lanes: each sequence finds what it wrote, whatever moved."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 5) for _ in range(4)]
    schedule = Schedule(lengths, 3, 10, draw.choice([None, 40, 60]), parks=True)
    lanes: list[int | None] = [None] * schedule.rows  # the sample whose tokens a lane holds
    turns = dict.fromkeys(range(12), 0)
    was_parked_at_work = False
    for _ in range(1000):
        schedule.admit()
        for sample in list(schedule.parked):
            if schedule.running and draw.random() < 0.7:
                continue
            if turns[sample] == 3:
                schedule.leave(sample)
            else:
                sequence = schedule.parked[sample]
                schedule.resume(sample, sequence.before + sequence.written, draw.randint(1, 4))
        if not schedule.running and not schedule.parked and not schedule.unfinished:
            break
        held = {sequence.sample: sequence.lane for sequence in schedule.running}
        moves = schedule.settle()
        copied = [(new, lanes[old]) for new, old in moves]
        for new, sample in copied:
            lanes[new] = sample
        assert len(schedule.running) + len(schedule.parked) <= schedule.rows
        for row, sequence in enumerate(schedule.running):
            assert sequence.lane == row
            if held[sequence.sample] is None:
                lanes[row] = sequence.sample
            assert lanes[row] == sequence.sample
        for sample, sequence in schedule.parked.items():
            assert sequence.lane is not None
            assert lanes[sequence.lane] == sample
        was_parked_at_work |= bool(schedule.parked and schedule.running)
        earlier = set(schedule.parked)
        schedule.advance([row for row in range(len(schedule.running)) if draw.random() < 0.3])
        for sample in schedule.parked.keys() - earlier:
            turns[sample] += 1
    assert not schedule.unfinished
    assert was_parked_at_work
