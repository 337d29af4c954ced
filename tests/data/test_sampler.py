"""The order of prompts over epochs and ranks, once each or by weight, and its resumption."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import chain

import pytest
from helpers.errors import raises_error
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.prompts import PromptDataset, PromptLoader
from reinforce_rl.data.sampler import Blend, PromptSampler, shard, step_seed

EPOCHS = 4


def epoch_of(sampler: PromptSampler) -> list[list[int]]:
    start = sampler.epoch
    batches = []
    while sampler.epoch == start:
        batches.append(next(sampler))
    return batches


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 7), st.integers(0, 5), st.data())
def test_every_prompt_once_an_epoch_through_resumes_and_shards(
    num_prompts, step, ranks, seed, data
):
    whole = PromptSampler(num_prompts, step, seed=seed)
    expected = [next(whole) for _ in range(3 * whole.steps_per_epoch)]

    sampler = PromptSampler(num_prompts, step, seed=seed)
    seen: list[Counter[int]] = [Counter(), Counter(), Counter()]
    got = []
    while sampler.epoch < 3:
        if data.draw(st.booleans()):
            state = json.loads(json.dumps(sampler.state_dict()))
            sampler = PromptSampler(num_prompts, step, seed=seed)
            sampler.load_state_dict(state)
        epoch = sampler.epoch
        batch = next(sampler)
        shards = [shard(batch, rank, ranks) for rank in range(ranks)]
        assert [index for part in shards for index in part] == batch
        for part in shards:
            seen[epoch].update(part)
        got.append(batch)
    assert got == expected
    for counts in seen:
        assert counts == Counter(range(num_prompts))
    assert sampler.consumed_prompts == 3 * num_prompts


def test_epochs_differ_and_depend_on_the_seed():
    sampler = PromptSampler(30, 30, seed=1)
    first = next(sampler)
    second = next(sampler)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != list(range(30))
    assert next(PromptSampler(30, 30, seed=2)) != first
    # (seed, epoch) is a pair: epoch 1 of seed 0 differs from epoch 0 of seed 1.
    other = PromptSampler(30, 30, seed=0)
    next(other)
    assert next(other) != first


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.integers(1, 7), st.integers(0, 6))
def test_an_epoch_has_the_batches_that_it_says(full, step, rest):
    """The last batch may be smaller; if it is full, it counts too."""
    rest = rest % step if full else rest % step + 1
    sampler = PromptSampler(full * step + rest, step, seed=0)
    expected = [step] * full
    if rest:
        expected.append(rest)
    assert sampler.batch_sizes == expected
    for epoch in (1, 2):
        lengths = [len(batch) for batch in epoch_of(sampler)]
        assert lengths == sampler.batch_sizes
        assert sampler.epoch == epoch
        assert sampler.position == 0
        assert sampler.consumed_prompts == epoch * sampler.num_prompts


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
    given_before = next(sampler)
    resumed = PromptSampler(10, 3, seed=3)
    resumed.load_state_dict(sampler.state_dict())
    after = epoch_of(resumed)
    lengths = [len(batch) for batch in after]
    assert lengths == [3, 3]
    assert sorted(chain(given_before, *after)) == list(range(10))


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"num_prompts": 11}, ("num_prompts was 10", 11)),
        ({"seed": 4}, ("seed was 3", 4)),
        ({"shuffle": False}, ("shuffle was True", False)),
    ],
)
def test_a_state_of_another_run_is_refused(change, values):
    state = PromptSampler(10, 4, seed=3).state_dict()
    arguments = {"num_prompts": 10, "seed": 3, "shuffle": True} | change
    sampler = PromptSampler(
        arguments["num_prompts"], 4, seed=arguments["seed"], shuffle=arguments["shuffle"]
    )
    with raises_error("checkpoint.sampler.other_run", *values):
        sampler.load_state_dict(state)


def test_a_broken_state_is_refused_and_changes_nothing():
    sampler = PromptSampler(10, 4, seed=3)
    with raises_error("checkpoint.sampler.other_run", "num_prompts was None", 10):
        sampler.load_state_dict({})
    for bad in (
        {"position": None},
        {"position": 10},
        {"position": -1},
        {"epoch": "1"},
        {"consumed_prompts": 1.5},
    ):
        ((name, value),) = bad.items()
        with raises_error("checkpoint.sampler.invalid", f"{name!r}: {value!r}"):
            sampler.load_state_dict({**sampler.state_dict(), **bad})
    assert sampler.epoch == 0
    assert sampler.position == 0
    assert sampler.consumed_prompts == 0


def test_shards_are_contiguous_and_near_equal():
    expected = [[0, 1], [2, 3], [4, 5, 6]]
    assert [shard(range(7), rank, 3) for rank in range(3)] == expected
    assert [shard([5], rank, 2) for rank in range(2)] == [[], [5]]


@st.composite
def blends(draw) -> Blend:
    files = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(3, 25), min_size=files, max_size=files))
    weights = draw(st.lists(st.floats(0.2, 1.0), min_size=files, max_size=files))
    return Blend(tuple(sizes), tuple(weights))


def file_of(blend: Blend, number: int) -> int:
    index = number % blend.num_prompts
    file = 0
    while index >= sum(blend.sizes[: file + 1]):
        file += 1
    return file


def sampler_of(blend: Blend, step: int = 5, seed: int = 3, **options) -> PromptSampler:
    return PromptSampler(
        blend.num_prompts, step, seed=seed, max_epochs=EPOCHS, blend=blend, **options
    )


@settings(max_examples=60, deadline=None)
@given(blends(), st.integers(1, 12), st.integers(0, 3), st.booleans())
def test_shares_and_passes(blend, step, seed, shuffle):
    total = math.fsum(blend.weights)
    stream: dict[int, list[int]] = {file: [] for file in range(len(blend.sizes))}
    for epoch in range(EPOCHS):
        numbers = blend.epoch(seed, epoch, shuffle=shuffle)
        assert len(numbers) == blend.num_prompts
        counts = Counter(file_of(blend, number) for number in numbers)
        for file, weight in enumerate(blend.weights):
            share = weight / total
            assert abs(counts[file] - share * len(numbers)) < 1, "the epoch's share"
            for start in range(0, len(numbers) - step + 1, step):
                in_batch = sum(
                    file_of(blend, number) == file for number in numbers[start : start + step]
                )
                assert abs(in_batch - share * step) < 2.5, "and each batch's"
            stream[file] += [number for number in numbers if file_of(blend, number) == file]
    for file, numbers in stream.items():
        size = blend.sizes[file]
        first = sum(blend.sizes[:file])
        for pass_ in range(len(numbers) // size + 1):
            given_ = numbers[pass_ * size : (pass_ + 1) * size]
            indices = [number - pass_ * blend.num_prompts - first for number in given_]
            assert len(set(indices)) == len(indices), "none twice in a pass"
            assert set(indices) <= set(range(size))
            if not shuffle:
                assert indices == list(range(len(indices)))
    everything = list(chain(*stream.values()))
    assert len(set(everything)) == len(everything), "a prompt that comes again has another number"


@settings(max_examples=30, deadline=None)
@given(blends(), st.integers(1, 12), st.integers(1, 4), st.data())
def test_resumes_and_ranks_change_nothing(blend, step, ranks, data):
    expected = list(sampler_of(blend, step))
    assert len(expected) == EPOCHS * sampler_of(blend, step).steps_per_epoch
    sampler = sampler_of(blend, step)
    got = []
    while not sampler.finished:
        if data.draw(st.booleans()):
            state = json.loads(json.dumps(sampler.state_dict()))
            sampler = sampler_of(blend, step)
            sampler.load_state_dict(state)
        batch = next(sampler)
        assert [number for rank in range(ranks) for number in shard(batch, rank, ranks)] == batch
        got.append(batch)
    assert got == expected


def test_passes_differ_and_depend_on_the_seed():
    blend = Blend((20, 20), (3.0, 1.0))
    epochs = [blend.epoch(1, epoch, shuffle=True) for epoch in range(2)]
    draws = [number % 40 for number in chain(*epochs) if number % 40 < 20]
    passes = [draws[start : start + 20] for start in (0, 20, 40)]
    expected = [list(range(20))] * 3
    assert [sorted(numbers) for numbers in passes] == expected
    assert passes[0] != passes[1] != passes[2]
    assert passes[0] != list(range(20))
    assert blend.epoch(2, 0, shuffle=True) != blend.epoch(1, 0, shuffle=True)


def test_draws_of_files_alternate_evenly():
    """The epoch is divided into equal parts; each file's draws are at their centres."""
    expected = [2, 0, 3, 4, 1, 5]
    assert Blend((2, 4), (1.0, 2.0)).epoch(0, 0, shuffle=False) == expected


def test_only_the_ratio_of_weights_counts():
    assert Blend((10, 30), (3, 1)).draws == Blend((10, 30), (0.75, 0.25)).draws == (30, 10)
    assert Blend((1, 1, 1), (1, 1, 1)).draws == (1, 1, 1)
    assert "file 1 gives 30 (3.00 times its 10 prompts), file 2 gives 10 (0.33" in str(
        Blend((10, 30), (3, 1))
    )


def test_a_small_file_of_a_large_weight_gives_groups_of_their_own():
    """Two draws of a prompt in a batch have the same text and different ids."""
    prompts = [Prompt(i, f"prompt {i}", (i + 4,)) for i in range(8)]
    blend = Blend((2, 6), (0.75, 0.25))
    loader = PromptLoader(PromptDataset(prompts, blend=blend), sampler_of(blend, 8))
    batch = next(loader)
    counts = Counter(prompt.text for prompt in batch)
    assert counts["prompt 0"] == counts["prompt 1"] == 3
    assert len({prompt.id for prompt in batch}) == 8
    for prompt in batch:
        assert prompt.tokens == (prompt.id % 8 + 4,)
        assert prompt.text == f"prompt {prompt.id % 8}"


@pytest.mark.parametrize(
    ("other", "values"),
    [
        (Blend((4, 6), (1, 2)), ("weights was [1, 1]", [1, 2])),
        (Blend((5, 5), (1, 1)), ("file_sizes was [4, 6]", [5, 5])),
        (None, ("weights was [1, 1]", None)),
    ],
)
def test_a_resume_with_another_blend_is_refused(other, values):
    blend = Blend((4, 6), (1, 1))
    state = sampler_of(blend).state_dict()
    with raises_error("checkpoint.sampler.other_run", *values):
        PromptSampler(10, 5, seed=3, blend=other).load_state_dict(state)
    with raises_error("checkpoint.sampler.other_run", "weights was None"):
        sampler_of(Blend((4, 6), (1, 1))).load_state_dict(PromptSampler(10, 5, seed=3).state_dict())


@pytest.mark.parametrize(
    ("sizes", "weights", "key", "values"),
    [
        ((4, 0), (1, 1), "data.weights.file_without_prompts", ("number 2 ",)),
        ((4, 6), (1000, 1), "data.weights.too_small", ("number 2 ", "1 of 1001.0", 10)),
    ],
)
def test_weights_that_cannot_work(sizes, weights, key, values):
    with raises_error(key, *values):
        Blend(sizes, weights)


def test_no_two_steps_of_runs_with_other_seeds_have_the_same_noise():
    schedule = [step_seed(seed, step) for seed in range(5) for step in range(1000)]
    assert len(set(schedule)) == len(schedule)
    assert step_seed(1234, 7) == 1234 * 1_000_003 + 7, "a recorded run is repeated by its seeds"
