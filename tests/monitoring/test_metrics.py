"""The numbers of a step: taken over ranks as if there were one."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.batches import rows_of, whole_batch

from reinforce_rl.algorithms.moments import RunningMoments
from reinforce_rl.megatron.optimizer import OptimizerUpdate
from reinforce_rl.monitoring.metrics import (
    Mean,
    group_spread,
    reinforce_means,
    rollout_means,
    take_means,
    update_metrics,
)


def alone(value):
    return [value]


def test_means_and_deviations_over_ranks_are_those_of_one():
    numbers = torch.tensor([1.0, 5.0, -2.0, 8.0, 8.0])
    parts = [{"mean": Mean.of(part), "deviation": RunningMoments.of(part)} for part in numbers.split([2, 0, 3])]
    found = take_means(parts[0], lambda _: parts)
    assert found == pytest.approx({"mean": 4.0, "deviation": float(numbers.std())})


def test_what_was_not_counted_is_nan_and_what_a_rank_lacks_is_taken_from_the_others():
    parts = [{"a": Mean(0.0, 0.0)}, {"a": Mean(0.0, 0.0), "b": Mean(6.0, 2.0)}]
    found = take_means(parts[0], lambda _: parts)
    assert math.isnan(found["a"]) and found["b"] == 3.0
    assert math.isnan(take_means({"d": RunningMoments()}, alone)["d"])


def test_a_batch_gives_the_same_numbers_however_its_groups_lie_on_ranks():
    batch = whole_batch()
    parts = [rows_of(batch, rows) for rows in ([0, 1, 2, 6, 7, 8], [], [3, 4, 5, 9, 10, 11])]
    for statistics in (reinforce_means, lambda b: rollout_means(b.rollouts)):
        one = take_means(statistics(batch), alone)
        several = take_means(statistics(parts[0]), lambda _, s=statistics: [s(part) for part in parts])
        assert several == pytest.approx(one, nan_ok=True)
        assert not all(map(math.isnan, one.values()))


def test_spread_within_groups():
    rewards = torch.tensor([1.0, 3.0, 2.0, 2.0, 9.0, math.nan, 4.0])
    groups = torch.tensor([7, 7, 1, 1, 5, 5, 6])
    valid = ~rewards.isnan()
    spread, has_none = group_spread(rewards, groups, valid)
    assert spread.tolist() == [0.0, pytest.approx(2**0.5)] and has_none.tolist() == [True, False]
    empty = group_spread(rewards[:0], groups[:0], valid[:0])
    assert [len(part) for part in empty] == [0, 0]


class TestUpdates:
    SUMS = (
        {"loss": 1.0, "tokens": 3.0, "clipped": 1.0, "weights": 3.0, "squares": 5.0, "entropy": 6.0},
        {"loss": 0.5},
    )

    def metrics(self, *updates: OptimizerUpdate) -> dict[str, float]:
        return update_metrics(self.SUMS[0], updates or (OptimizerUpdate(2.0, 0.1, False),), lambda _: self.SUMS)

    def test_sums_are_taken_a_token(self):
        found = self.metrics()
        assert found["actor_loss"] == 1.5
        assert found["entropy"] == 2.0 and found["clip_fraction"] == pytest.approx(1 / 3)
        assert found["effective_sample_size"] == pytest.approx(9 / (3 * 5))
        assert "generator_kl" not in found, "no generator reported log-probs"

    def test_several_optimizer_steps(self):
        found = self.metrics(OptimizerUpdate(2.0, 0.1, False), OptimizerUpdate(math.inf, 0.2, True))
        assert (found["actor_loss"], found["lr"], found["skipped_step"], found["optimizer_steps"]) == (0.75, 0.2, 1, 2)

    def test_a_step_with_nothing_to_train_on(self):
        found = update_metrics({"loss": 0.0}, [OptimizerUpdate(0.0, 0.1, False)], alone)
        assert found["actor_loss"] == 0.0 and "clip_fraction" not in found and "entropy" not in found
