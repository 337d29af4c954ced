"""The numbers of a step over samples, groups and ranks, and the slowest rank of each phase."""

from __future__ import annotations

import io
import math
import os
import random
import socket
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.choices import KL_ESTIMATORS
from helpers.ranks import call_on_ranks
from helpers.thread_ranks import gathering_ranks, on_ranks
from helpers.tiny_run import metrics_of, tiny_overrides, train_on_ranks, without_times
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from reinforce_rl.algorithm.kl import sequence_kl
from reinforce_rl.algorithm.rewards import RunningMoments
from reinforce_rl.data.batches import ReinforceBatch, RolloutBatch
from reinforce_rl.data.finish_reasons import FINISH_LENGTH, FINISH_STOP
from reinforce_rl.megatron.optimizer import OptimizerUpdate
from reinforce_rl.monitoring.loggers import Loggers
from reinforce_rl.monitoring.metrics import (
    GAP_SHARES,
    Mean,
    Statistics,
    gap_by_age,
    gap_quantiles,
    generator_gaps,
    group_spread,
    reduce_metrics,
    reinforce_means,
    rollout_means,
    trained_token_metrics,
    update_metrics,
    weight_ages,
)
from reinforce_rl.monitoring.progress import TrainingProgress
from reinforce_rl.monitoring.run import REPEAT_STEPS, RunMonitor
from reinforce_rl.monitoring.stragglers import (
    RankSeconds,
    Slowest,
    of_this_rank,
    slowest_of_phases,
    timing_metrics,
)
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel
from reinforce_rl.runtime.phases import WaitMeter

NAN = math.nan


def alone(value):
    return [value]


def scored(rewards: list[float], groups: list[int], valid: list[bool]) -> RolloutBatch:
    count = len(rewards)
    lengths = torch.arange(count) % 3 + 1
    generator = torch.Generator().manual_seed(count)
    log_probs = -torch.rand(count, int(lengths.max()) if count else 0, generator=generator)
    finish_reasons = tuple(FINISH_STOP if i % 2 else FINISH_LENGTH for i in range(count))
    source_rewards = {"one": torch.tensor(rewards).float() + 1}
    return RolloutBatch(
        sequences=torch.zeros(count, 8, dtype=torch.long),
        prompt_lengths=torch.arange(count) % 5,
        response_lengths=lengths,
        group_ids=torch.tensor(groups).long(),
        sample_ids=torch.zeros(count).long(),
        finish_reasons=finish_reasons,
        rewards=torch.tensor(rewards).float(),
        valid=torch.tensor(valid).bool(),
        log_probs=log_probs,
        init_log_probs=log_probs - 0.1,
        source_rewards=source_rewards,
    )


def trained(rollouts: RolloutBatch) -> ReinforceBatch:
    numbers = torch.arange(float(len(rollouts.valid)))
    trains = rollouts.response_mask & rollouts.valid[:, None]
    advantages = torch.where(trains, numbers[:, None] - 2, 0.0)
    return ReinforceBatch(
        rollouts,
        numbers,
        2 * numbers,
        3 * numbers,
        advantages,
        rollouts.valid & (numbers != 0),
    )


BATCH = scored(
    [1.0, 3.0, NAN, 5.0, 5.0, 9.0], [4, 4, 4, 7, 7, 7], [True, True, False, True, True, False]
)


class TestRolloutMeans:
    def test_by_hand(self):
        means = reduce_metrics(rollout_means(BATCH), alone)
        # A failed sample is no reward of 0; one that was left out for another reason was scored.
        expected = statistics.mean([1, 3, 5, 5, 9])
        assert means["rewards"] == pytest.approx(expected)
        expected = statistics.stdev([1, 3, 5, 5, 9])
        assert means["reward_std"] == pytest.approx(expected)
        expected = statistics.mean([2, 4, 6, 6, 10])
        assert means["rewards_one"] == pytest.approx(expected)
        assert means["fraction_of_samples_scored"] == pytest.approx(5 / 6)
        assert means["fraction_of_samples_valid"] == pytest.approx(4 / 6)
        assert means["fraction_of_samples_properly_ended"] == 0.5
        assert means["response_lengths"] == 2.0
        assert means["prompt_lengths"] == pytest.approx(10 / 6)

    def test_nothing_scored_is_nan_and_not_0(self):
        nothing = replace(BATCH, rewards=torch.full((6,), NAN), source_rewards={})
        means = reduce_metrics(rollout_means(nothing), alone)
        assert math.isnan(means["rewards"])
        assert math.isnan(means["reward_std"])
        assert means["fraction_of_samples_scored"] == 0.0


class TestReinforceMeans:
    def test_by_hand(self):
        means = reduce_metrics(reinforce_means(trained(BATCH)), alone)
        valid = [0, 1, 3, 4]
        trains = [1, 3, 4]
        for name, factor in (("init_policy_kl", 1), ("rewards_with_kl", 2), ("baseline", 3)):
            assert means[name] == pytest.approx(factor * statistics.mean(valid)), name
        expected = statistics.mean(i - 2 for i in trains)
        assert means["advantage_mean"] == pytest.approx(expected)
        expected = statistics.stdev(i - 2 for i in trains)
        assert means["advantage_std"] == pytest.approx(expected)
        expected = statistics.mean(abs(i - 2) for i in valid)
        assert means["advantage_magnitude"] == pytest.approx(expected)
        assert means["fraction_of_samples_trained"] == 0.5
        assert means["reward_group_std"] == pytest.approx(statistics.mean([math.sqrt(2), 0.0]))
        assert means["fraction_of_groups_with_zero_std"] == 0.5

    def test_every_estimate_of_the_kl(self):
        means = reduce_metrics(reinforce_means(trained(BATCH)), alone)
        assert BATCH.log_probs is not None
        assert BATCH.init_log_probs is not None
        for name in KL_ESTIMATORS:
            values = sequence_kl(
                BATCH.log_probs, BATCH.init_log_probs, BATCH.response_mask, estimator=name
            )
            expected = values[BATCH.valid].mean().item()
            assert means[f"kl_{name}"] == pytest.approx(expected)
        without = reduce_metrics(
            reinforce_means(trained(replace(BATCH, init_log_probs=None))), alone
        )
        assert not any(name.startswith("kl_") for name in without)


class TestGroupSpread:
    @settings(deadline=None, max_examples=50)
    @given(
        st.lists(
            st.tuples(st.sampled_from([0.0, 1.0, 2.5, -7.0]), st.integers(-2, 2), st.booleans()),
            max_size=10,
        )
    )
    def test_by_brute_force(self, rows):
        groups = {
            group: [r for r, other, ok in rows if ok and other == group] for _, group, _ in rows
        }
        members = [rewards for _, rewards in sorted(groups.items()) if len(rewards) > 1]
        group_ids = torch.tensor([row[1] for row in rows]).long()
        valid = torch.tensor([row[2] for row in rows]).bool()
        known = torch.tensor([r if ok else NAN for r, _, ok in rows])
        spread, has_zero_std = group_spread(known, group_ids, valid)
        expected = [statistics.stdev(rewards) for rewards in members]
        assert spread.tolist() == pytest.approx(expected)
        expected = [len(set(rewards)) == 1 for rewards in members]
        assert has_zero_std.tolist() == expected


class TestTakeMeans:
    @settings(deadline=None, max_examples=15)
    @given(
        st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=12),
        st.integers(0, 99),
    )
    def test_the_ranks_layout_does_not_matter(self, rows, seed):
        """One to four ranks with whole groups; a rank may have none."""
        rows = sorted(rows, key=lambda row: row[0])
        generator = torch.Generator().manual_seed(seed)
        rewards = (1e3 + torch.randn(len(rows), generator=generator)).tolist()
        groups = [row[0] for row in rows]
        valid = [row[1] and row[2] for row in rows]
        known = [r if row[1] else NAN for r, row in zip(rewards, rows, strict=True)]
        batch = trained(
            scored(
                known,
                groups,
                valid,
            )
        )
        whole = {**rollout_means(batch.rollouts), **reinforce_means(batch)}
        expected = reduce_metrics(whole, alone)
        for ranks in (2, 3, 4):
            parts = []
            for rank in range(ranks):
                owners = torch.tensor(groups).long() % ranks
                local_rows = (owners == rank).nonzero()[:, 0]
                rollouts = batch.rollouts.select(local_rows)
                advantages = batch.advantages[local_rows, : rollouts.width]
                part = ReinforceBatch(
                    rollouts,
                    batch.kl[local_rows],
                    batch.rewards_with_kl[local_rows],
                    batch.baseline[local_rows],
                    advantages,
                    batch.trains[local_rows],
                )
                parts.append({**rollout_means(part.rollouts), **reinforce_means(part)})
            means_of_ranks = [reduce_metrics(part, lambda _, parts=parts: parts) for part in parts]
            for means in means_of_ranks:
                assert means == pytest.approx(expected, rel=1e-6, abs=1e-6, nan_ok=True)

    def test_a_deviation_over_ranks_is_not_the_mean_of_theirs(self):
        parts: list[Statistics] = [
            {"x": RunningMoments.of(torch.full((2,), value))} for value in (0.0, 10.0)
        ]
        expected = statistics.stdev([0, 0, 10, 10])
        assert reduce_metrics(parts[0], lambda _: parts)["x"] == pytest.approx(expected)

    def test_ranks_count_by_their_samples(self):
        parts: list[Statistics] = [
            {"x": Mean(3.0, 3.0)},
            {"x": Mean(0.0, 0.0)},
            {"x": Mean(5.0, 1.0)},
        ]
        assert reduce_metrics(parts[0], lambda _: parts) == {"x": 2.0}

    def test_a_name_that_a_rank_lacks_is_of_the_others(self):
        moments = RunningMoments.of(torch.tensor([1.0, 3.0]))
        parts = [{}, {"x": Mean(4.0, 2.0), "y": moments}]
        expected = {
            "x": 2.0,
            "y": pytest.approx(math.sqrt(2)),
        }
        assert reduce_metrics(parts[0], lambda _: parts) == expected

    def test_nothing_counted_is_nan(self):
        means = reduce_metrics({"x": Mean(0.0, 0.0), "y": RunningMoments()}, alone)
        assert math.isnan(means["x"])
        assert math.isnan(means["y"])


class TestGapQuantiles:
    @staticmethod
    def by_sorting(gaps: Tensor) -> dict[str, float]:
        ordered = gaps.abs().sort().values.tolist()
        return {name: ordered[math.ceil(q * len(ordered)) - 1] for name, q in GAP_SHARES.items()}

    @settings(deadline=None, max_examples=60)
    @given(
        st.lists(
            st.floats(-(2.0**90), 2.0**90, width=32) | st.sampled_from([0.0, -0.0, 0.5, -0.5]),
            min_size=1,
            max_size=300,
        ),
        st.integers(1, 4),
        st.integers(0, 99),
    )
    def test_they_are_those_of_all_ranks_together(self, numbers, ranks, seed):
        gaps = torch.tensor(numbers)
        owner = torch.randint(ranks, (len(gaps),), generator=torch.Generator().manual_seed(seed))
        quantiles = on_ranks(ranks, lambda rank, total: gap_quantiles(gaps[owner == rank], total))
        assert quantiles == [self.by_sorting(gaps)] * ranks

    def test_many_small_numbers(self):
        gaps = 1e-3 * torch.randn(20_000, generator=torch.Generator().manual_seed(0))
        assert gap_quantiles(gaps, lambda local_sums: local_sums) == self.by_sorting(gaps)

    def test_what_is_not_finite_is_the_largest(self):
        gaps = torch.tensor([1.0, -math.nan, 2.0])
        quantiles = gap_quantiles(gaps, lambda local_sums: local_sums)
        assert quantiles["generator_logprob_diff_median"] == 2.0
        assert math.isnan(quantiles["generator_logprob_diff_max"])
        assert (
            gap_quantiles(torch.tensor([-math.inf]), lambda local_sums: local_sums)[
                "generator_logprob_diff_max"
            ]
            == math.inf
        )

    def test_without_tokens_there_are_none(self):
        assert gap_quantiles(torch.zeros(0), lambda local_sums: local_sums) == {}


def test_gaps_by_age_over_ranks():
    gaps = torch.tensor([0.5, -1.5, 0.25, 3.0])
    ages = torch.tensor([0, 1, 0, 1])
    first = gap_by_age(gaps[:3], ages[:3])
    second = gap_by_age(gaps[3:], ages[3:])
    parts = [first, second]
    means = reduce_metrics(parts[0], lambda local_means: parts)
    assert means == {"generator_logprob_diff_age_0": 0.375, "generator_logprob_diff_age_1": 2.25}


class TestTrainedTokens:
    """The policy's log-probs beside the generator's, whose tables have two columns of padding."""

    def batch(self, rows: list[int]) -> ReinforceBatch:
        batch = trained(BATCH)
        log_probs = torch.full((len(BATCH.rewards), BATCH.width + 2), -1.0)
        versions = torch.arange(len(BATCH.rewards))[:, None].expand(log_probs.shape)
        rollouts = replace(BATCH, generator_log_probs=log_probs, weight_versions=versions)
        chosen = torch.tensor(rows, dtype=torch.long)
        per_sample = ("kl", "rewards_with_kl", "baseline", "advantages", "trains")
        columns = {name: getattr(batch, name)[chosen] for name in per_sample}
        return replace(batch, rollouts=rollouts.select(chosen), **columns)

    def log_probs(self, batch: ReinforceBatch) -> Tensor:
        """-1.25 for the tokens of row 0, 0.25 less for each later row."""
        rows = batch.rollouts.sample_ids + batch.kl  # `trained` numbers the rows in `kl`
        return (-1.25 - 0.25 * rows)[:, None].expand(batch.rollouts.response_mask.shape)

    def test_only_tokens_of_samples_that_train_count(self):
        batch = self.batch(list(range(6)))
        # Rows 1, 3 and 4 train, with responses of 2, 1 and 2 tokens.
        expected = [0, 2, 0, 1, 2, 0]
        assert batch.trained_tokens.sum(dim=1).tolist() == expected
        gaps = generator_gaps(batch, self.log_probs(batch))
        expected = [-0.5, -0.5, -1.0, -1.25, -1.25]
        assert gaps.tolist() == expected
        assert weight_ages(batch, 5).tolist() == [4, 4, 2, 1, 1]

    def test_without_the_generators_log_probs_there_are_no_gaps(self):
        batch = trained(BATCH)
        assert generator_gaps(batch, self.log_probs(batch)).tolist() == []
        with pytest.raises(ValueError, match="not known"):
            weight_ages(batch, 5)

    @pytest.mark.parametrize("version", [None, 5])
    def test_a_rank_without_samples_takes_part(self, version):
        """It has no log-probs and no versions; the numbers equal a single rank's."""

        def run(shares: list[list[int]]) -> list[dict[str, float]]:
            def metrics(rank: int, gather) -> dict[str, float]:
                batch = self.batch(shares[rank])
                if not shares[rank]:
                    unknown = replace(
                        batch.rollouts, generator_log_probs=None, weight_versions=None
                    )
                    batch = replace(batch, rollouts=unknown)
                return trained_token_metrics(
                    batch,
                    self.log_probs(batch),
                    version=version,
                    sum_over_ranks=lambda value: torch.stack(gather(value)).sum(0),
                    gather_over_ranks=gather,
                )

            return gathering_ranks(len(shares), metrics)

        (whole,) = run([list(range(6))])
        expected = (1.5 + 1.5 + 2.0 + 2.25 + 2.25) / 5
        assert whole["entropy_sampled"] == pytest.approx(expected)
        assert whole["generator_logprob_diff_max"] == 1.25
        expected = (
            []
            if version is None
            else [
                "generator_logprob_diff_age_1",
                "generator_logprob_diff_age_2",
                "generator_logprob_diff_age_4",
            ]
        )
        assert [name for name in whole if "age" in name] == (expected)
        for means in run([[0, 1, 2], [], [3, 4, 5]]):
            assert means == pytest.approx(whole)


class TestUpdateMetrics:
    UPDATES = (OptimizerUpdate(1.0, 0.1, False), OptimizerUpdate(3.0, 0.2, True))
    SUMS = (
        {
            "loss": 1.0,
            "tokens": 4.0,
            "clipped": 1.0,
            "weights": 4.0,
            "squares": 5.0,
            "entropy": 8.0,
        },
        {
            "loss": 2.0,
            "tokens": 6.0,
            "clipped": 4.0,
            "weights": 8.0,
            "squares": 11.0,
            "generator_logprob_diff": 3.0,
        },
        {"loss": 3.0},  # a rank without rows to train on
    )

    def test_by_hand(self):
        metrics = update_metrics(
            self.SUMS[0], self.UPDATES, lambda local_sums: [local_sums, *self.SUMS[1:]]
        )
        expected = {
            "actor_loss": 3.0,
            "grad_norm": 2.0,
            "lr": 0.2,
            "skipped_step": 1.0,
            "optimizer_steps": 2.0,
            "clip_fraction": 0.5,
            "effective_sample_size": 12.0**2 / (10 * 16),
            "entropy": 0.8,
            "generator_logprob_diff": 0.3,
        }
        assert metrics == pytest.approx(expected)

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
        effective = update_metrics(sums[0], self.UPDATES, lambda _: sums)["effective_sample_size"]
        squares = math.fsum(w * w for w in weights)
        expected = math.fsum(weights) ** 2 / (len(weights) * squares)
        assert effective == pytest.approx(expected)
        assert 1 / len(weights) - 1e-9 <= effective <= 1 + 1e-9

    def test_on_policy_every_sample_counts(self):
        sums = {"loss": 0.0, "tokens": 7.0, "clipped": 0.0, "weights": 7.0, "squares": 7.0}
        assert update_metrics(sums, self.UPDATES[:1], alone)["effective_sample_size"] == 1.0

    def test_weights_that_are_all_0_do_not_end_the_run(self):
        sums = {"loss": 0.0, "tokens": 7.0, "clipped": 0.0, "weights": 0.0, "squares": 0.0}
        assert update_metrics(sums, self.UPDATES[:1], alone)["effective_sample_size"] == 0.0

    def test_without_a_token_there_are_no_shares(self):
        metrics = update_metrics(
            {"loss": 0.0, "tokens": 0.0, "entropy": 0.0}, self.UPDATES[:1], alone
        )
        assert "clip_fraction" not in metrics
        assert math.isnan(metrics["entropy"])


def test_what_is_reported_of_the_slowest_rank(tmp_path):
    ranks = [
        RankSeconds(f"node{rank // 2}", {"generate": 2.1, "train_time": 1.0}) for rank in range(6)
    ]
    ranks[5] = RankSeconds("node2", {"generate": 3.2, "train_time": 1.1})
    slowest = slowest_of_phases(ranks)
    assert str(slowest[0]) == (
        "generate 3.2 s on rank 5 (node2), median 2.1 s (1.5x), slowest node node2, 2.7 s a rank"
    )
    expected = {
        "generate/max": 3.2,
        "generate/median": 2.1,
        "generate/rank": 5,
        "train_time/max": 1.1,
        "train_time/median": 1.0,
        "train_time/rank": 5,
    }
    assert timing_metrics(slowest) == expected
    expected = [f"straggler: {slowest[0]}"]
    assert straggler_lines(tmp_path, 1.5, {1: ranks}, 5.0) == expected
    assert straggler_lines(tmp_path, 1.6, {1: ranks}, 5.0) == []
    expected = [(f"straggler: {slowest[0]}; {slowest[1]}")]
    assert straggler_lines(tmp_path, 1.0, {1: ranks}, 1.0) == expected


def straggler_lines(
    folder: Path, factor: float, ranks: dict[int, list[RankSeconds]], step_seconds: float
) -> list[str]:
    """Return the lines of a log about each step's ranks."""
    progress = TrainingProgress(99, console=Console(file=io.StringIO()))
    monitor = RunMonitor(folder, Loggers(), progress, straggler_factor=factor)
    for step, seconds in ranks.items():
        monitor.log_ranks(step, seconds, step_seconds)
    return progress.console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_slowest_rank_by_brute_force():
    draw = random.Random(3)
    for _ in range(200):
        count = draw.randint(2, 9)
        hosts = [f"h{draw.randint(0, 2)}" for _ in range(count)]
        seconds = [round(draw.uniform(0, 4), 3) for _ in range(count)]
        ranks = [RankSeconds(h, {"p": s}) for h, s in zip(hosts, seconds, strict=True)]
        (slowest,) = slowest_of_phases(ranks)
        most = seconds.index(max(seconds))
        assert slowest.seconds == seconds[most]
        assert slowest.rank == most
        assert slowest.host == hosts[most]
        expected = sorted(seconds)[(count - 1) // 2]
        assert slowest.median == expected
        if len(set(hosts)) == 1:
            assert slowest.node is None
            continue
        means = {
            h: statistics.fmean(s for s, of in zip(seconds, hosts, strict=True) if of == h)
            for h in hosts
        }
        assert slowest.node_seconds == max(means.values())
        assert means[str(slowest.node)] == slowest.node_seconds


def test_noise_is_no_straggler_and_two_ranks_are_compared_with_the_faster_one():
    def slowest(*seconds: float) -> Slowest:
        ranks = [RankSeconds("a", {"generate": value}) for value in seconds]
        return slowest_of_phases(ranks)[0]

    assert slowest(1.0, 1.6).stands_out(1.5, 2.0)
    assert not slowest(1.0, 1.4).stands_out(1.5, 2.0)
    assert not slowest(0.01, 0.1).stands_out(1.5, 0.2), "milliseconds"
    assert not slowest(1.0, 1.6).stands_out(1.5, 100.0), "a step of minutes"
    assert slowest(0.0, 1.0).stands_out(1.5, 1.0)
    assert "x)" not in str(slowest(0.0, 1.0))


def test_only_ranks_that_ask_wait_for_rewards():
    seconds = {"generate": 1.0, "reward_wait": 0.0}
    assert of_this_rank(seconds, asks_for_rewards=False) == RankSeconds(
        socket.gethostname(), {"generate": 1.0}
    )
    asking = RankSeconds("a", {"generate": 1.0, "reward_wait": 2.0})
    slowest = {
        s.phase: s
        for s in slowest_of_phases([asking, of_this_rank(seconds, asks_for_rewards=False)])
    }
    assert slowest["reward_wait"].median == 2.0


def test_what_stays_the_same_is_said_again_after_a_while(tmp_path):
    slow = [RankSeconds("a", {"p": s}) for s in (1.0, 3.0)]
    other = [RankSeconds("a", {"p": s}) for s in (3.0, 1.0)]
    steps = dict.fromkeys(range(1, 2 * REPEAT_STEPS), slow) | {5: other, 6: []}
    said = straggler_lines(tmp_path, 1.5, steps, 4.0)
    expected = [f"straggler: p 3.0 s on rank {rank}" for rank in (1, 0, 1)]
    warnings = [line.split(" (")[0] for line in said]
    assert warnings == expected, "at step 1, 5 and 11"


def test_only_waits_in_collectives_are_measured(monkeypatch, tmp_path):
    """A function in a file with a collective's name stands for a collective."""
    path = tmp_path / "torch" / "distributed" / "distributed_c10d.py"
    path.parent.mkdir(parents=True)
    path.write_text("def wait(sleep, seconds):\n    sleep(seconds)\n")
    namespace: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    meter = WaitMeter(threading.get_ident())
    before = threading.active_count()
    with meter.measuring():
        time.sleep(0.5)
        namespace["wait"](time.sleep, 1.0)
    assert threading.active_count() == before
    assert 0.5 < meter.seconds < 1.4
    with pytest.raises(RuntimeError), meter.measuring():
        raise RuntimeError
    assert meter.seconds == 0.0
    assert threading.active_count() == before
    assert Path(dist.distributed_c10d.__file__).parts[-3:] == (
        "torch",
        "distributed",
        "distributed_c10d.py",
    )


def run_with_a_slow_rank(folder, slow, base):
    """Run to the end in `folder`, each pass of one rank 2 s longer."""
    overrides = (*base, f"exp_manager.explicit_log_dir={folder / 'run'}")
    if os.environ["RANK"] == str(slow):
        for name in ("infer", "get_loss_and_metrics"):
            slow_down(name)
    train_on_ranks(overrides)


def slow_down(name):
    function = getattr(MegatronGPTReinforceActorModel, name)

    def slow_function(*args, **options):
        time.sleep(2.0)
        return function(*args, **options)

    setattr(MegatronGPTReinforceActorModel, name, slow_function)


@pytest.mark.more
@pytest.mark.parametrize(
    ("ranks", "tensor", "slow"),
    [
        (2, 1, 1),
        pytest.param(4, 1, 2, marks=pytest.mark.slow),
        # its neighbour waits for it within each pass
        pytest.param(4, 2, 3, marks=pytest.mark.slow),
    ],
)
def test_a_slow_rank_is_named(tmp_path, capfd, ranks, tensor, slow):
    base = [
        *tiny_overrides(tmp_path),
        f"model.tensor_model_parallel_size={tensor}",
        f"trainer.devices={ranks}",
    ]
    call_on_ranks(run_with_a_slow_rank, ranks, tmp_path / "plain", None, base, timeout=140)
    call_on_ranks(run_with_a_slow_rank, ranks, tmp_path / "slow", slow, base, timeout=140)
    lines = metrics_of(tmp_path / "slow")
    steps = [line["step"] for line in lines]
    assert steps == [1, 2]
    for line in lines:
        for phase in ("generate", "train_time"):
            assert line[f"timing/{phase}/rank"] == slow
            # of 2 s; waiting is measured by sampling
            assert line[f"timing/{phase}/max"] >= 1.0
            assert line[f"timing/{phase}/max"] > line[f"timing/{phase}/median"] + 0.4
    seconds = lines[0]["timing/generate/max"]
    named = f"generate {seconds:.1f} s on rank {slow} ({socket.gethostname()})"
    assert f"straggler: {named}, median " in capfd.readouterr().out
    plain = metrics_of(tmp_path / "plain")
    numbers = [without_times(line) for line in plain]
    assert numbers == [without_times(line) for line in lines], "numbers are the same"
