"""How a rollout batch is divided into optimizer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from helpers.thread_ranks import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforce_rl.config.actor import ReinforceConfig
from reinforce_rl.data.batches import ReinforceBatch, RolloutBatch
from reinforce_rl.data.sampler import shard
from reinforce_rl.trainer.updates import denominators_of, mini_batches, total_steps, total_updates


def steps(
    groups: list[int], samples: int, ranks: int, size: int | None, epochs: int, seed: int
) -> list[Counter[int]]:
    """Return how often each group is in each optimizer step, over all ranks."""
    ids = []
    for rank in range(ranks):
        local_groups = torch.tensor(shard(groups, rank, ranks)).long()
        ids.append(local_groups.repeat_interleave(samples))
    of_ranks = [list(mini_batches(ids, rank, size, epochs, seed)) for rank in range(ranks)]
    assert len({len(batches) for batches in of_ranks}) == 1, (
        "or a rank would wait for the others forever"
    )
    counters = [Counter[int]() for _ in of_ranks[0]]
    for local_ids, batches in zip(ids, of_ranks, strict=True):
        for counter, rows in zip(counters, batches, strict=True):
            assert rows.dtype == torch.int64
            assert len(set(rows.tolist())) == len(rows)
            counter.update(local_ids[rows].tolist())
    return counters


group_lists = st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=9, unique=True)


@settings(deadline=None, max_examples=50)
@given(group_lists, st.integers(1, 3), st.integers(1, 10), st.integers(1, 3), st.integers(0, 10**9))
def test_whole_groups_once_an_epoch_and_the_same_on_any_number_of_ranks(
    groups, samples, size, epochs, seed
):
    alone = steps(groups, samples, 1, size, epochs, seed)
    an_epoch = -(-len(groups) // size)
    assert len(alone) == epochs * an_epoch
    for start in range(0, len(alone), an_epoch):
        parts = alone[start : start + an_epoch]
        assert sum(parts, Counter()) == dict.fromkeys(groups, samples)
        sizes = [len(part) for part in parts[:-1]]
        assert sizes == [size] * (an_epoch - 1)
    for ranks in (2, 3, 4):
        assert steps(groups, samples, ranks, size, epochs, seed) == alone


@settings(deadline=None, max_examples=20)
@given(group_lists, st.integers(1, 4), st.integers(1, 3))
def test_without_a_size_a_step_takes_the_whole_batch(groups, ranks, epochs):
    each_twice = Counter(dict.fromkeys(groups, 2))
    assert steps(groups, 2, ranks, None, epochs, 0) == [each_twice] * epochs


def test_the_order_differs_by_epoch_and_by_seed():
    groups = list(range(20))
    first, second = (steps(groups, 1, 1, 20 // 5, 2, seed) for seed in (1, 2))
    assert first[:5] != first[5:]
    assert first[:5] != second[:5]
    assert first == steps(groups, 1, 1, 20 // 5, 2, 1)


def test_rows_stay_in_the_order_of_the_batch():
    ids = torch.tensor([5, 5, 3, 3, 4, 4])
    for rows in mini_batches([ids], 0, 2, 3, seed=0):
        assert rows.tolist() == sorted(rows.tolist())


def test_samples_of_a_group_need_not_lie_together():
    ids = torch.tensor([5, 3, 5, 3])
    parts = sorted(rows.tolist() for rows in mini_batches([ids], 0, 1, 1, seed=0))
    assert parts == [[0, 2], [1, 3]]


class TestCounts:
    def test_total_steps(self):
        assert total_steps(ReinforceConfig(max_epochs=3), 4) == 12
        assert total_steps(ReinforceConfig(max_epochs=3, max_steps=7), 4) == 7
        assert total_steps(ReinforceConfig(max_epochs=3, max_steps=50), 4) == 12

    @settings(deadline=None, max_examples=50)
    @given(
        st.lists(st.integers(1, 9), min_size=1, max_size=5),
        st.one_of(st.none(), st.integers(1, 10)),
        st.integers(1, 3),
        st.integers(1, 3),
        st.one_of(st.just(-1), st.integers(1, 20)),
    )
    def test_total_updates_counts_what_mini_batches_gives(
        self, sizes, size, passes, max_epochs, max_steps
    ):
        cfg = ReinforceConfig(reinforce_epochs=passes, max_epochs=max_epochs, max_steps=max_steps)
        made = 0
        for step in range(total_steps(cfg, len(sizes))):
            groups = torch.arange(sizes[step % len(sizes)])
            made += len(list(mini_batches([groups], 0, size, passes, 0)))
        assert total_updates(cfg, size, sizes) == made

    @pytest.mark.parametrize(("size", "expected"), [(None, 2 * 5), (2, 2 * (2 + 2 + 1 + 2 + 2))])
    def test_by_hand(self, size, expected):
        """An epoch of 4, 4 and 1 prompts; five steps; two passes over each."""
        cfg = ReinforceConfig(reinforce_epochs=2, max_epochs=9, max_steps=5)
        assert total_updates(cfg, size, [4, 4, 1]) == expected


class TestDenominators:
    """The divisors of an optimizer step's loss: counts of training samples over all ranks."""

    TRAINS = torch.tensor([True, False, True, True, False, True])  # two of the valid samples do not
    LENGTHS = (5, 7, 2, 0, 3, 4)
    MAX_LENGTH = 9

    def batch(self, rows: list[int]) -> ReinforceBatch:
        """These samples, all valid; their responses are shorter than the run's longest."""
        count = len(rows)
        lengths = torch.tensor([self.LENGTHS[row] for row in rows], dtype=torch.long)
        zeros = torch.zeros(count)
        rollouts = RolloutBatch(
            sequences=torch.zeros(count, 9, dtype=torch.long),
            prompt_lengths=torch.ones(count, dtype=torch.long),
            response_lengths=lengths,
            group_ids=torch.arange(count),
            sample_ids=torch.zeros(count, dtype=torch.long),
            finish_reasons=("stop",) * count,
            rewards=zeros,
            valid=torch.ones(count, dtype=torch.bool),
        )
        return ReinforceBatch(
            rollouts, zeros, zeros, zeros, torch.zeros(count, 7), self.TRAINS[rows]
        )

    def test_samples_that_do_not_train_are_in_none_of_them(self):
        """An empty response trains, and has no token."""
        whole = self.batch([0, 1, 2, 3, 4, 5])
        denominators = denominators_of(whole, torch.arange(6), self.MAX_LENGTH, lambda total: total)
        assert denominators.sequences == 4.0
        assert denominators.tokens == 5.0 + 2.0 + 0.0 + 4.0
        assert denominators.fixed_length == 9.0

    def test_they_are_of_the_rows_of_this_optimizer_step(self):
        whole = self.batch([0, 1, 2, 3, 4, 5])
        first = denominators_of(whole, torch.tensor([0, 1]), self.MAX_LENGTH, lambda total: total)
        rows = torch.tensor([2, 3, 4, 5])
        second = denominators_of(whole, rows, self.MAX_LENGTH, lambda total: total)
        assert first.sequences == 1.0
        assert first.tokens == 5.0
        assert second.sequences == 3.0
        assert second.tokens == 6.0
        nothing = denominators_of(
            whole, torch.tensor([], dtype=torch.long), self.MAX_LENGTH, lambda total: total
        )
        assert nothing.sequences == 0.0
        assert nothing.tokens == 0.0

    @pytest.mark.parametrize(
        "shares", [[[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3, 4, 5]], [[0], [1, 2, 3], [4, 5]]]
    )
    def test_any_number_of_ranks_has_the_same(self, shares):
        def of_rank(rank: int, total: Callable[[Tensor], Tensor]) -> tuple[float, float, float]:
            local_batch = self.batch(shares[rank])
            denominators = denominators_of(
                local_batch, torch.arange(len(shares[rank])), self.MAX_LENGTH, total
            )
            return denominators.sequences, denominators.tokens, denominators.fixed_length

        assert on_ranks(len(shares), of_rank) == [(4.0, 11.0, 9.0)] * len(shares)
