"""The order of prompts: each exactly once an epoch, through any saves, restores, batch sizes and shards."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_rl.data.sampler import PromptSampler, shard
from reinforce_rl.errors import CheckpointError, ConfigError


def epoch_of(sampler: PromptSampler) -> list[list[int]]:
    start = sampler.epoch
    batches = []
    while sampler.epoch == start:
        batches.append(sampler.next_batch())
    return batches


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 7), st.integers(0, 5), st.data())
def test_every_prompt_once_an_epoch_through_resumes_and_shards(num_prompts, step, ranks, seed, data):
    whole = PromptSampler(num_prompts, step, seed=seed)
    expected = [whole.next_batch() for _ in range(3 * whole.steps_per_epoch)]

    sampler = PromptSampler(num_prompts, step, seed=seed)
    seen: list[Counter[int]] = [Counter(), Counter(), Counter()]
    got = []
    while sampler.epoch < 3:
        if data.draw(st.booleans()):
            state = json.loads(json.dumps(sampler.state_dict()))
            sampler = PromptSampler(num_prompts, step, seed=seed)
            sampler.load_state_dict(state)
        epoch, batch = sampler.epoch, sampler.next_batch()
        shards = [shard(batch, rank, ranks) for rank in range(ranks)]
        assert [index for part in shards for index in part] == batch
        for part in shards:
            seen[epoch].update(part)
        got.append(batch)
    assert got == expected
    assert all(counts == Counter(range(num_prompts)) for counts in seen)
    assert sampler.consumed_prompts == 3 * num_prompts


def test_epochs_differ_and_depend_on_the_seed():
    sampler = PromptSampler(30, 30, seed=1)
    first, second = sampler.next_batch(), sampler.next_batch()
    assert first != second
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != list(range(30))
    assert PromptSampler(30, 30, seed=2).next_batch() != first
    # (seed, epoch) is a pair: epoch 1 of seed 0 is not epoch 0 of seed 1.
    other = PromptSampler(30, 30, seed=0)
    other.next_batch()
    assert other.next_batch() != first


def test_the_last_batch_is_ragged_or_dropped():
    kept = PromptSampler(10, 4, seed=0)
    assert [len(batch) for batch in epoch_of(kept)] == [4, 4, 2]
    assert (kept.steps_per_epoch, kept.consumed_prompts, kept.position) == (3, 10, 0)
    dropped = PromptSampler(10, 4, seed=0, drop_last=True)
    batches = epoch_of(dropped)
    assert [len(batch) for batch in batches] == [4, 4]
    assert len({index for batch in batches for index in batch}) == 8
    assert (dropped.steps_per_epoch, dropped.consumed_prompts) == (2, 8)
    assert PromptSampler(8, 4, seed=0).steps_per_epoch == 2
    assert [len(batch) for batch in epoch_of(PromptSampler(3, 5, seed=0))] == [3]


@pytest.mark.parametrize("drop_last", [False, True])
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 6))
def test_an_epoch_has_the_batches_that_it_says(drop_last, full, step, rest):
    """A last batch that is full belongs to it too; with `drop_last` no other one does."""
    rest = rest % step
    sampler = PromptSampler(full * step + rest, step, seed=0, drop_last=drop_last)
    expected = [step] * full + [rest] * (rest > 0 and not drop_last)
    assert sampler.batch_sizes == expected
    for _ in range(2):
        assert [len(batch) for batch in epoch_of(sampler)] == expected
    assert sampler.consumed_prompts == 2 * sum(expected)


def test_without_shuffle_the_order_is_the_data_sets():
    sampler = PromptSampler(5, 2, seed=0, shuffle=False)
    assert epoch_of(sampler) == epoch_of(sampler) == [[0, 1], [2, 3], [4]]


def test_max_epochs_end_the_iteration():
    sampler = PromptSampler(5, 2, seed=0, max_epochs=2)
    assert len(list(sampler)) == 6
    assert sampler.finished
    restored = PromptSampler(5, 2, seed=0, max_epochs=2)
    restored.load_state_dict(sampler.state_dict())
    assert list(restored) == []


def test_a_resume_with_another_batch_size_still_gives_each_prompt_once():
    sampler = PromptSampler(10, 4, seed=3)
    given_before = sampler.next_batch()
    resumed = PromptSampler(10, 3, seed=3)
    resumed.load_state_dict(sampler.state_dict())
    after = epoch_of(resumed)
    assert [len(batch) for batch in after] == [3, 3]
    assert sorted(chain(given_before, *after)) == list(range(10))
    dropping = PromptSampler(10, 7, seed=3, drop_last=True)
    dropping.load_state_dict(sampler.state_dict())
    assert dropping.epoch == 1  # six prompts were left, too few for a batch


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_prompts": 11}, "num_prompts was 10, now is 11"),
        ({"seed": 4}, "seed was 3, now is 4"),
        ({"shuffle": False}, "shuffle was True, now is False"),
    ],
)
def test_a_state_of_another_run_is_refused(change, text):
    state = PromptSampler(10, 4, seed=3).state_dict()
    arguments = {"num_prompts": 10, "seed": 3, "shuffle": True} | change
    sampler = PromptSampler(arguments["num_prompts"], 4, seed=arguments["seed"], shuffle=arguments["shuffle"])
    with pytest.raises(CheckpointError, match=text):
        sampler.load_state_dict(state)


def test_a_broken_state_is_refused_and_changes_nothing():
    sampler = PromptSampler(10, 4, seed=3)
    with pytest.raises(CheckpointError, match="lacks position"):
        sampler.load_state_dict({k: v for k, v in sampler.state_dict().items() if k != "position"})
    for bad in ({"position": 10}, {"position": -1}, {"epoch": "1"}, {"consumed_prompts": 1.5}):
        with pytest.raises(CheckpointError, match="expected whole numbers"):
            sampler.load_state_dict({**sampler.state_dict(), **bad})
    assert (sampler.epoch, sampler.position, sampler.consumed_prompts) == (0, 0, 0)


def test_wrong_arguments_are_told_together():
    with pytest.raises(ConfigError) as caught:
        PromptSampler(0, 0, seed=-1, max_epochs=0)
    assert len(caught.value.faults) == 4
    with pytest.raises(ConfigError, match="drop_last"):
        PromptSampler(3, 4, seed=0, drop_last=True)


def test_shards_are_contiguous_and_near_equal():
    assert [shard(range(7), rank, 3) for rank in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [shard([5], rank, 2) for rank in range(2)] == [[], [5]]
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match="rank"):
            shard([1], rank, size)
