"""State between steps: reward moments, beta, the best checkpoints."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.errors import raises_error
from helpers.thread_ranks import gathering_ranks

from reinforce_rl.config.actor import ReinforceConfig
from reinforce_rl.data.batches import ReinforceBatch, RolloutBatch
from reinforce_rl.errors import DivergedError
from reinforce_rl.trainer.state import BestCheckpoints, NonFiniteGuard, RunningBaselines

ESTIMATORS = ["running_mean", "moving_average", "exponential_moving_average"]
WINDOW = 3
DECAY = 0.8
Rewards = list[list[float]]  # of each step; NaN if a sample is not valid


def new_past() -> RunningBaselines:
    return RunningBaselines(
        ReinforceConfig(initial_policy_kl_penalty=0.1, baseline_window=WINDOW, baseline_decay=DECAY)
    )


def batch_of(rewards: list[float], kl: float = 0.0) -> ReinforceBatch:
    """Responses of one token.

    `rewards` are without the KL; they are NaN for samples that are not valid.
    """
    count = len(rewards)
    scores = torch.tensor(rewards, dtype=torch.float64)
    ids = torch.arange(count)
    valid = ~scores.isnan()
    each = torch.full((count,), kl, dtype=torch.float64)
    rollouts = RolloutBatch(
        sequences=torch.zeros(count, 2, dtype=torch.long),
        prompt_lengths=torch.ones(count, dtype=torch.long),
        response_lengths=torch.ones(count, dtype=torch.long),
        group_ids=ids,
        sample_ids=ids,
        finish_reasons=("stop",) * count,
        rewards=scores,
        valid=valid,
    )
    return ReinforceBatch(rollouts, each, scores - 0.1 * each, each, scores[:, None], valid)


def alone(value: Any) -> list[Any]:
    return [value]


def brute_force(steps: Rewards, estimator: str) -> float:
    """Return the mean of all valid rewards, weighted by step."""
    weighted = []
    for age, rewards in enumerate(reversed(steps)):
        weights = {"running_mean": 1.0, "moving_average": float(age < WINDOW)}
        weight = weights.get(estimator, DECAY**age)
        weighted += [(weight, reward) for reward in rewards if not math.isnan(reward)]
    total = math.fsum(weight for weight, _ in weighted)
    if total == 0:
        return 0.0
    return math.fsum(weight * reward for weight, reward in weighted) / total


def random_steps(seed: int, count: int = 12) -> Rewards:
    """Steps with different numbers of samples and moving rewards.

    Some samples are not valid; none of the sixth step is.
    """
    draw = random.Random(seed)
    steps = []
    for step in range(count):
        num_samples = draw.randint(1, 9)
        steps.append([draw.gauss(5.0 * step, 1.0) for _ in range(num_samples)])
    steps = [[reward if draw.random() < 0.8 else math.nan for reward in step] for step in steps]
    steps[5] = [math.nan] * 4
    return steps


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", range(5))
def test_each_is_the_weighted_mean_of_all_past_rewards(estimator, seed):
    past = new_past()
    steps = random_steps(seed)
    for step, rewards in enumerate(steps):
        expected = brute_force(steps[:step], estimator)
        assert past.reward_mean(estimator) == pytest.approx(expected, rel=1e-13, abs=1e-13)
        past.add(batch_of(rewards), alone)
    assert past.reward_mean(estimator) == pytest.approx(brute_force(steps, estimator), rel=1e-13)


def test_the_three_differ_where_rewards_move():
    past = new_past()
    for rewards in random_steps(0):
        past.add(batch_of(rewards), alone)
    running, moving, exponential = (past.reward_mean(name) for name in ESTIMATORS)
    assert running < exponential < moving, (
        "the less of the past is remembered, the nearer to the newest rewards"
    )


def test_before_the_first_step_and_after_steps_without_a_valid_sample_they_are_0():
    past = new_past()
    for _ in range(WINDOW + 1):
        assert [past.reward_mean(name) for name in ESTIMATORS] == [0.0] * 3
        past.add(batch_of([math.nan] * 2), alone)


@pytest.mark.parametrize("saved_after", [1, 6, 11])
def test_a_state_through_json_goes_on_bit_for_bit(saved_after):
    whole = new_past()
    parts = new_past()
    steps = random_steps(1)
    for step, rewards in enumerate(steps):
        for past in (whole, parts):
            past.add(batch_of(rewards), alone)
        if step == saved_after:
            state = json.loads(json.dumps(parts.state_dict()))
            parts = new_past()
            parts.load_state_dict(state)
        reward_means = [parts.reward_mean(name) for name in ESTIMATORS]
        assert reward_means == [whole.reward_mean(name) for name in ESTIMATORS]
    assert parts.state_dict() == whole.state_dict()


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_have_the_same_bit_for_bit(ranks):
    """Ranks are threads, each with its own and possibly empty share of a step's samples."""
    steps = random_steps(2)

    def run(rank: int, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        past = new_past()
        for rewards in steps:
            past.add(batch_of(rewards[rank::ranks]), gather)
        return {**past.state_dict(), **{name: past.reward_mean(name) for name in ESTIMATORS}}

    first, *others = gathering_ranks(ranks, run)
    for other in others:
        assert other == first
    for name in ESTIMATORS:
        assert first[name] == pytest.approx(brute_force(steps, name), rel=1e-13)


def test_rewards_are_those_less_their_kl_and_scores_are_not():
    past = new_past()
    past.add(batch_of([1.0, 3.0], kl=0.5), alone)
    assert past.scores.mean == 2.0
    reward_means = [past.reward_mean(name) for name in ESTIMATORS]
    assert reward_means == pytest.approx([1.95] * 3, rel=1e-14)


VALUES = {1: 0.3, 2: 0.5, 3: math.nan, 4: 0.5, 5: 0.1, 6: 0.7}


@pytest.mark.parametrize(
    ("keep", "mode", "expected"),
    [
        (0, "max", []),
        (1, "max", [6]),
        (2, "max", [6, 2]),
        (2, "min", [5, 1]),
        (9, "max", [6, 2, 4, 1, 5]),
    ],
)
def test_best(keep, mode, expected):
    best = BestCheckpoints(keep, "val/rewards", mode)
    for step, value in VALUES.items():
        best.add(step, {"rewards": value, "other": 1.0})
    assert best.steps == expected


def test_resumed():
    best = BestCheckpoints(2, "val/rewards", "max")
    best.add(1, {"rewards": 0.3})
    best.add(2, {"rewards": 0.5})
    state = json.loads(json.dumps(best.state_dict()))

    def steps(other: BestCheckpoints, is_there=lambda step: True) -> list[int]:
        other.load_state_dict(state, is_there)
        return other.steps

    assert steps(BestCheckpoints(2, "val/rewards", "max")) == [2, 1]
    assert steps(BestCheckpoints(1, "val/rewards", "max")) == [2]
    assert steps(BestCheckpoints(2, "val/rewards", "max"), lambda step: step != 2) == [1]
    assert steps(BestCheckpoints(2, "val/rewards", "min")) == []
    assert steps(BestCheckpoints(2, "val/response_lengths", "max")) == []


def test_unknown_metric():
    named = ("best_metric is 'val/reward'", "val/rewards, val/other")
    with raises_error("checkpoint.best_metric.unknown", *named):
        BestCheckpoints(1, "val/reward").add(1, {"rewards": 1.0, "other": 2.0})


def test_a_beta_that_adapts_goes_on_and_a_fixed_one_is_the_configurations():
    adapted = RunningBaselines(
        ReinforceConfig(initial_policy_kl_penalty=0.1, kl_target=1.0, kl_horizon=2.0)
    )
    adapted.add(batch_of([1.0, 2.0], kl=5.0), alone)
    assert adapted.beta.value == pytest.approx(0.12)
    state = json.loads(json.dumps(adapted.state_dict()))
    resumed = RunningBaselines(
        ReinforceConfig(initial_policy_kl_penalty=0.1, kl_target=1.0, kl_horizon=2.0)
    )
    resumed.load_state_dict(state)
    assert resumed.beta.value == adapted.beta.value
    fixed = RunningBaselines(ReinforceConfig(initial_policy_kl_penalty=0.3))
    fixed.load_state_dict(state)
    assert fixed.beta.value == 0.3


class TestNonFiniteGuard:
    MESH: Any = SimpleNamespace(any_rank=lambda value: value)

    def update(self, *, skipped: bool = False, weights_lost: bool = False) -> Any:
        return SimpleNamespace(skipped=skipped, weights_lost=weights_lost)

    def check(self, guard: NonFiniteGuard, *skipped: bool, loss: float = 0.5) -> None:
        updates = [self.update(skipped=is_skipped) for is_skipped in skipped]
        guard.check(
            1,
            updates,
            loss,
            self.MESH,
            lambda text: None,
        )

    @pytest.mark.parametrize("most", [1, 2, 3])
    def test_the_run_ends_at_so_many_skipped_optimizer_steps_in_a_row(self, most):
        guard = NonFiniteGuard(most)
        for _ in range(most - 1):
            self.check(guard, True)
        with raises_error("trainer.gradient.not_finite"):
            self.check(guard, True)

    def test_one_that_is_not_skipped_begins_a_new_row(self):
        guard = NonFiniteGuard(3)
        for _ in range(4):
            self.check(guard, True, True, False)
        self.check(guard, True, True)
        with raises_error("trainer.gradient.not_finite"):
            self.check(guard, True)

    @pytest.mark.parametrize("loss", [math.nan, math.inf])
    def test_weights_after_a_loss_that_is_not_finite_are_not_kept(self, loss):
        guard = NonFiniteGuard(3)
        assert guard.is_sound
        self.check(guard, False, loss=loss)
        assert not guard.is_sound
        with raises_error("trainer.loss.not_finite", "step 1"):
            guard.check_end(1)
        self.check(guard, False, loss=0.5)
        assert guard.is_sound
        guard.check_end(2)

    def test_lost_weights_end_it_at_once(self):
        with raises_error("trainer.weights.not_finite", "step 4") as error:
            updates = [self.update(weights_lost=True)]
            NonFiniteGuard(9).check(4, updates, 0.5, self.MESH, lambda text: None)
        assert isinstance(error.value, DivergedError)


@pytest.mark.parametrize(
    ("placement", "expected"), [("loss", 0.25), ("reward", None), ("advantage", None)]
)
def test_beta_is_a_coefficient_of_the_loss_only_where_the_kl_is_in_it(placement, expected):
    cfg = ReinforceConfig(kl_placement=placement, initial_policy_kl_penalty=0.25)
    assert RunningBaselines(cfg).loss_kl_coefficient == expected
