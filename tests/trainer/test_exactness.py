"""Exactness by enumeration: each option's expected gradient against E[r] - beta KL's gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import enumeration
from helpers.choices import IMPORTANCE_RATIOS, KL_ESTIMATORS, KL_LOSS_WEIGHTS, LOSS_AGGREGATIONS
from helpers.enumeration import (
    NUM_SEQUENCES,
    TREE,
    Options,
    World,
    expected_gradient,
    gradient_variance,
    make_world,
    relative_error,
)
from torch import Tensor

from reinforce_rl.algorithm.advantages import ADVANTAGE_ESTIMATORS
from reinforce_rl.algorithm.loss import LossSettings

EXACT = {"none", "running_mean", "moving_average", "exponential_moving_average", "rloo"}


@pytest.fixture(scope="module")
def world() -> World:
    return make_world()


def bias(world: World, samples: int = 2, **options) -> float:
    return relative_error(
        expected_gradient(world, Options(**options), samples), world.true_gradient
    )


def test_the_tree_has_a_dozen_sequences_of_unequal_length():
    assert NUM_SEQUENCES == 15
    lengths = TREE.mask.sum(1).tolist()
    assert sorted(set(lengths)) == [1, 2, 3]


@pytest.mark.parametrize("estimator", sorted(EXACT))
@pytest.mark.parametrize("placement", ["reward", "advantage", "loss"])
@pytest.mark.parametrize("credit", ["sequence", "token"])
def test_exact_estimators_have_the_true_gradient(world, estimator, placement, credit):
    """Summed k1, detached, in the reward or the advantage, or in the loss with prefix weights.

    By response or by token.
    """
    options = {
        "advantage_estimator": estimator,
        "kl_placement": placement,
        "credit_assignment": credit,
    }
    assert bias(world, **options) < 1e-8


def test_exact_with_three_samples_too(world):
    assert bias(world, samples=3) < 1e-8


@pytest.mark.parametrize("estimator", ["batch_mean", "prompt_mean"])
def test_a_baseline_that_includes_the_sample_shortens_the_gradient(world, estimator):
    gradient = expected_gradient(world, Options(advantage_estimator=estimator), 2)
    assert relative_error(2 * gradient, world.true_gradient) < 1e-8


def test_the_others_are_biased_and_this_test_would_see_it(world):
    for estimator in ADVANTAGE_ESTIMATORS.keys() - EXACT:
        assert bias(world, advantage_estimator=estimator) > 0.1
    for unit in ("sequence", "token"):
        assert bias(world, advantage_whitening=unit) > 0.05
    assert bias(world, credit_assignment="token", discount_factor=0.9) > 0.01


@pytest.mark.parametrize("kl", KL_ESTIMATORS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("placement", ["reward", "advantage"])
def test_only_summed_k1_in_the_reward_is_exact(world, kl, reduction, placement):
    error = bias(world, kl_estimator=kl, kl_reduction=reduction, kl_placement=placement)
    assert error < 1e-8 if (kl, reduction) == ("k1", "sum") else error > 0.05


@pytest.mark.parametrize("kl", KL_ESTIMATORS)
@pytest.mark.parametrize("weights", KL_LOSS_WEIGHTS)
def test_in_the_loss_only_prefix_weights_are_exact_and_only_for_unbiased_values(world, kl, weights):
    error = bias(world, kl_estimator=kl, kl_placement="loss", kl_loss_weights=weights)
    assert error < 1e-8 if kl in ("k1", "k3") and weights == "prefix" else error > 0.01


def test_k1_in_the_loss_without_score_weights_is_no_kl_at_all(world, monkeypatch):
    """A known trap: its expected gradient is zero, so nothing restrains the policy."""
    options = Options(kl_placement="loss", kl_loss_weights="none")
    without = expected_gradient(world, options, 2)
    monkeypatch.setattr(enumeration, "BETA", 100 * enumeration.BETA)
    assert relative_error(expected_gradient(world, options, 2), without) < 1e-8


@pytest.mark.parametrize("ratio", IMPORTANCE_RATIOS)
@pytest.mark.parametrize("aggregation", LOSS_AGGREGATIONS)
def test_on_policy_no_ratio_changes_the_gradient(world, ratio, aggregation):
    plain = expected_gradient(world, Options(loss=LossSettings(aggregation)), 2)
    loss = LossSettings(aggregation, importance_ratio=ratio)
    assert relative_error(expected_gradient(world, Options(loss=loss), 2), plain) < 1e-12


class TestOffPolicy:
    """Samples of another policy, with the default's advantages and without a KL."""

    @pytest.fixture
    def behaviour(self) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        return TREE.log_probs(
            torch.randn(TREE.num_prefixes, 3, generator=generator, dtype=torch.float64)
        )

    @pytest.mark.parametrize(
        ("settings", "exact"),
        [
            ({"generator_correction": "none"}, False),
            ({"generator_correction": "token", "generator_ratio_cap": 1e9}, False),
            ({"generator_correction": "sequence", "generator_ratio_cap": 1e9}, True),
            ({"generator_correction": "sequence", "generator_ratio_cap": 1.5}, False),
        ],
    )
    def test_a_generator_of_its_own(self, world, behaviour, settings, exact):
        error = self.error(world, behaviour, LossSettings(**settings), as_old=False)
        assert error < 1e-8 if exact else error > 0.02

    @pytest.mark.parametrize(
        ("ratio", "exact"), [("sequence", True), ("token", False), ("sequence_geometric", False)]
    )
    def test_an_earlier_policy(self, world, behaviour, ratio, exact):
        """Without clipping, only the ratio of the whole response is exact; clipping biases it."""
        free = LossSettings(importance_ratio=ratio, ratio_clip_low=1.0, ratio_clip_high=1e9)
        error = self.error(world, behaviour, free, as_old=True)
        assert error < 1e-8 if exact else error > 0.02
        assert (
            self.error(world, behaviour, LossSettings(importance_ratio=ratio), as_old=True) > 0.02
        )

    def error(self, world: World, behaviour: Tensor, loss: LossSettings, *, as_old: bool) -> float:
        # A KL is the policy's, which samples of another policy do not estimate.
        world = replace(world, reference=TREE.log_probs(world.parameters).detach())
        objective = TREE.log_probs(world.parameters).sum(1).exp() @ world.rewards
        (true,) = torch.autograd.grad(objective, world.parameters)
        gradient = expected_gradient(
            world, Options(loss=loss), 2, behaviour=behaviour, as_old=as_old
        )
        return relative_error(gradient, true)


class TestVariance:
    def test_more_samples_a_prompt_are_worth_more_than_more_groups(self, world):
        """Four samples as one group against the mean of two groups of two.

        The mean of two groups has half the variance of one group.
        """
        four, two = (gradient_variance(world, Options(), samples) for samples in (4, 2))
        assert four <= two / 2

    def test_samples_without_a_baseline_are_independent(self, world):
        of_one_group, of_two_groups = (
            gradient_variance(world, Options(advantage_estimator="none"), samples)
            for samples in (1, 2)
        )
        assert of_two_groups == pytest.approx(of_one_group / 2, rel=1e-12)

    @pytest.mark.slow
    def test_no_baseline_wins_near_a_mean_of_zero_and_loses_far_from_it(self):
        def ratio(mean: float) -> float:
            world = make_world(mean)
            none = gradient_variance(world, Options(advantage_estimator="none"), 4)
            return gradient_variance(world, Options(), 4) / none

        assert ratio(3.0) < 0.3
        ratios = [ratio(mean / 10) for mean in range(-10, 11)]
        assert min(ratios) < 1 < max(ratios)
