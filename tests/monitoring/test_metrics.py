"""The numbers of a step: over samples, over groups, over ranks."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_rl.algorithm.kl import sequence_kl
from reinforce_rl.algorithm.rewards import RunningMoments
from reinforce_rl.config.actor import KL_ESTIMATORS
from reinforce_rl.data.batches import FINISH_LENGTH, FINISH_STOP, ReinforceBatch, RolloutBatch
from reinforce_rl.megatron.optimizer import OptimizerUpdate
from reinforce_rl.monitoring.metrics import (
    Mean,
    Statistics,
    group_spread,
    reinforce_means,
    rollout_means,
    take_means,
    update_metrics,
)

NAN = math.nan


def alone(value):
    return [value]


def scored(rewards: list[float], groups: list[int], valid: list[bool]) -> RolloutBatch:
    count = len(rewards)
    lengths = torch.arange(count) % 3 + 1
    generator = torch.Generator().manual_seed(count)
    log_probs = -torch.rand(count, int(lengths.max()) if count else 0, generator=generator)
    return RolloutBatch(
        sequences=torch.zeros(count, 8, dtype=torch.long),
        prompt_lengths=torch.arange(count) % 5,
        response_lengths=lengths,
        group_ids=torch.tensor(groups).long(),
        sample_ids=torch.zeros(count).long(),
        finish_reasons=tuple(FINISH_STOP if i % 2 else FINISH_LENGTH for i in range(count)),
        rewards=torch.tensor(rewards).float(),
        valid=torch.tensor(valid).bool(),
        log_probs=log_probs,
        init_log_probs=log_probs - 0.1,
        source_rewards={"one": torch.tensor(rewards).float() + 1},
    )


def trained(rollouts: RolloutBatch) -> ReinforceBatch:
    numbers = torch.arange(float(len(rollouts.valid)))
    return ReinforceBatch(
        rollouts,
        numbers,
        2 * numbers,
        3 * numbers,
        torch.where(rollouts.response_mask & rollouts.valid[:, None], numbers[:, None] - 2, 0.0),
        rollouts.valid & (numbers != 0),
    )


BATCH = scored([1.0, 3.0, NAN, 5.0, 5.0, 9.0], [4, 4, 4, 7, 7, 7], [True, True, False, True, True, False])


class TestRolloutMeans:
    def test_by_hand(self):
        found = take_means(rollout_means(BATCH), alone)
        # A failed sample is no reward of 0; one that was left out for another reason was scored.
        assert found["rewards"] == pytest.approx(statistics.mean([1, 3, 5, 5, 9]))
        assert found["reward_deviation"] == pytest.approx(statistics.stdev([1, 3, 5, 5, 9]))
        assert found["rewards_one"] == pytest.approx(statistics.mean([2, 4, 6, 6, 10]))
        assert found["fraction_of_samples_scored"] == pytest.approx(5 / 6)
        assert found["fraction_of_samples_valid"] == pytest.approx(4 / 6)
        assert found["fraction_of_samples_properly_ended"] == 0.5
        assert found["response_lengths"] == 2.0 and found["prompt_lengths"] == pytest.approx(10 / 6)

    def test_nothing_scored_is_nan_and_not_0(self):
        nothing = replace(BATCH, rewards=torch.full((6,), NAN), source_rewards={})
        found = take_means(rollout_means(nothing), alone)
        assert math.isnan(found["rewards"]) and math.isnan(found["reward_deviation"])
        assert found["fraction_of_samples_scored"] == 0.0


class TestReinforceMeans:
    def test_by_hand(self):
        found = take_means(reinforce_means(trained(BATCH)), alone)
        valid, trains = [0, 1, 3, 4], [1, 3, 4]
        for name, factor in (("init_policy_kl", 1), ("rewards_with_kl", 2), ("baseline", 3)):
            assert found[name] == pytest.approx(factor * statistics.mean(valid)), name
        assert found["advantage_mean"] == pytest.approx(statistics.mean(i - 2 for i in trains))
        assert found["advantage_deviation"] == pytest.approx(statistics.stdev(i - 2 for i in trains))
        assert found["advantage_magnitude"] == pytest.approx(statistics.mean(abs(i - 2) for i in valid))
        assert found["fraction_of_samples_trained"] == 0.5
        assert found["reward_group_deviation"] == pytest.approx(statistics.mean([math.sqrt(2), 0.0]))
        assert found["fraction_of_groups_without_spread"] == 0.5

    def test_every_estimate_of_the_kl(self):
        found = take_means(reinforce_means(trained(BATCH)), alone)
        assert BATCH.log_probs is not None and BATCH.init_log_probs is not None
        for name in KL_ESTIMATORS:
            values = sequence_kl(BATCH.log_probs, BATCH.init_log_probs, BATCH.response_mask, estimator=name)
            assert found[f"kl_{name}"] == pytest.approx(values[BATCH.valid].mean().item())
        without = take_means(reinforce_means(trained(replace(BATCH, init_log_probs=None))), alone)
        assert not any(name.startswith("kl_") for name in without)


class TestGroupSpread:
    @settings(deadline=None, max_examples=50)
    @given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.5, -7.0]), st.integers(-2, 2), st.booleans()), max_size=10))
    def test_by_brute_force(self, rows):
        groups = {group: [r for r, other, ok in rows if ok and other == group] for _, group, _ in rows}
        members = [rewards for _, rewards in sorted(groups.items()) if len(rewards) > 1]
        spread, has_none = group_spread(
            torch.tensor([r if ok else NAN for r, _, ok in rows]),
            torch.tensor([row[1] for row in rows]).long(),
            torch.tensor([row[2] for row in rows]).bool(),
        )
        assert spread.tolist() == pytest.approx([statistics.stdev(rewards) for rewards in members])
        assert has_none.tolist() == [len(set(rewards)) == 1 for rewards in members]


class TestTakeMeans:
    @settings(deadline=None, max_examples=15)
    @given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=12), st.integers(0, 99))
    def test_the_ranks_layout_does_not_matter(self, rows, seed):
        """One to four ranks, whole groups on each, some with nothing."""
        rows = sorted(rows, key=lambda row: row[0])
        generator = torch.Generator().manual_seed(seed)
        rewards = (1e3 + torch.randn(len(rows), generator=generator)).tolist()
        groups = [row[0] for row in rows]
        batch = trained(
            scored(
                [r if row[1] else NAN for r, row in zip(rewards, rows, strict=True)],
                groups,
                [row[1] and row[2] for row in rows],
            )
        )
        whole = {**rollout_means(batch.rollouts), **reinforce_means(batch)}
        expected = take_means(whole, alone)
        for ranks in (2, 3, 4):
            parts = []
            for rank in range(ranks):
                own = (torch.tensor(groups).long() % ranks == rank).nonzero()[:, 0]
                rollouts = batch.rollouts.select(own)
                part = ReinforceBatch(
                    rollouts,
                    batch.kl[own],
                    batch.rewards_with_kl[own],
                    batch.baseline[own],
                    batch.advantages[own, : rollouts.width],
                    batch.trains[own],
                )
                parts.append({**rollout_means(part.rollouts), **reinforce_means(part)})
            found = [take_means(part, lambda _, parts=parts: parts) for part in parts]
            for means in found:
                assert means == pytest.approx(expected, rel=1e-6, abs=1e-6, nan_ok=True)

    def test_a_deviation_over_ranks_is_not_the_mean_of_theirs(self):
        parts: list[Statistics] = [{"x": RunningMoments.of(torch.full((2,), value))} for value in (0.0, 10.0)]
        assert take_means(parts[0], lambda _: parts)["x"] == pytest.approx(statistics.stdev([0, 0, 10, 10]))

    def test_ranks_count_by_their_samples(self):
        parts: list[Statistics] = [{"x": Mean(3.0, 3.0)}, {"x": Mean(0.0, 0.0)}, {"x": Mean(5.0, 1.0)}]
        assert take_means(parts[0], lambda _: parts) == {"x": 2.0}

    def test_a_name_that_a_rank_lacks_is_of_the_others(self):
        parts = [{}, {"x": Mean(4.0, 2.0), "y": RunningMoments.of(torch.tensor([1.0, 3.0]))}]
        assert take_means(parts[0], lambda _: parts) == {"x": 2.0, "y": pytest.approx(math.sqrt(2))}

    def test_nothing_counted_is_nan(self):
        found = take_means({"x": Mean(0.0, 0.0), "y": RunningMoments()}, alone)
        assert math.isnan(found["x"]) and math.isnan(found["y"])


class TestUpdateMetrics:
    UPDATES = (OptimizerUpdate(1.0, 0.1, False), OptimizerUpdate(3.0, 0.2, True))
    SUMS = (
        {"loss": 1.0, "tokens": 4.0, "clipped": 1.0, "weights": 4.0, "squares": 5.0, "entropy": 8.0},
        {"loss": 2.0, "tokens": 6.0, "clipped": 4.0, "weights": 8.0, "squares": 11.0, "generator_gap": 3.0},
        {"loss": 3.0},  # a rank that had nothing to train on
    )

    def test_by_hand(self):
        found = update_metrics(self.SUMS[0], self.UPDATES, lambda own: [own, *self.SUMS[1:]])
        assert found == pytest.approx(
            {
                "actor_loss": 3.0,
                "grad_norm": 2.0,
                "lr": 0.2,
                "skipped_step": 1.0,
                "optimizer_steps": 2.0,
                "clip_fraction": 0.5,
                "effective_sample_size": 12.0**2 / (10 * 16),
                "entropy": 0.8,
                "generator_gap": 0.3,
            }
        )

    @settings(deadline=None, max_examples=40)
    @given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(1, 4))
    def test_the_effective_sample_size_is_that_of_the_weights(self, weights, ranks):
        parts = [weights[rank::ranks] for rank in range(ranks)]
        sums = [
            {
                "loss": 0.0,
                "tokens": float(len(part)),
                "clipped": 0.0,
                "weights": math.fsum(part),
                "squares": math.fsum(w * w for w in part),
            }
            for part in parts
        ]
        found = update_metrics(sums[0], self.UPDATES, lambda _: sums)["effective_sample_size"]
        expected = math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))
        assert found == pytest.approx(expected) and 1 / len(weights) - 1e-9 <= found <= 1 + 1e-9

    def test_on_policy_every_sample_counts(self):
        sums = {"loss": 0.0, "tokens": 7.0, "clipped": 0.0, "weights": 7.0, "squares": 7.0}
        assert update_metrics(sums, self.UPDATES[:1], alone)["effective_sample_size"] == 1.0

    def test_weights_that_are_all_0_do_not_end_the_run(self):
        sums = {"loss": 0.0, "tokens": 7.0, "clipped": 0.0, "weights": 0.0, "squares": 0.0}
        assert update_metrics(sums, self.UPDATES[:1], alone)["effective_sample_size"] == 0.0

    def test_without_a_token_there_are_no_shares(self):
        found = update_metrics({"loss": 0.0, "tokens": 0.0, "entropy": 0.0}, self.UPDATES[:1], alone)
        assert "clip_fraction" not in found and math.isnan(found["entropy"])
