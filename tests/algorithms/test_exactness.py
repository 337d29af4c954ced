"""Exactness by enumeration: the expected gradient of each estimator against the true gradient."""

from __future__ import annotations

import pytest
from helpers.enumeration import NUM_SEQUENCES, TREE, World, expected_gradient, make_world, relative_error

from reinforce_rl.algorithms.choices import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS


@pytest.fixture(scope="module")
def world() -> World:
    return make_world()


def test_the_tree_has_a_dozen_sequences_of_unequal_length():
    assert NUM_SEQUENCES == 15
    assert sorted(set(TREE.mask.sum(1).tolist())) == [1, 2, 3]


@pytest.mark.parametrize("estimator", ["none", "running_mean", "rloo"])
def test_exact_estimators_have_the_true_gradient(world, estimator):
    assert relative_error(expected_gradient(world, estimator, 2), world.true_gradient) < 1e-8


@pytest.mark.parametrize("estimator", ["batch_mean", "prompt_mean"])
def test_a_baseline_that_includes_the_sample_shortens_the_gradient(world, estimator):
    assert relative_error(2 * expected_gradient(world, estimator, 2), world.true_gradient) < 1e-8


def test_the_others_are_biased_and_this_test_would_see_it(world):
    exact = {"none", "running_mean", "rloo"}
    for estimator in ADVANTAGE_ESTIMATORS.keys() - exact:
        assert relative_error(expected_gradient(world, estimator, 2), world.true_gradient) > 0.1


@pytest.mark.parametrize("kl", KL_ESTIMATORS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_only_summed_k1_in_the_reward_is_exact(world, kl, reduction):
    error = relative_error(expected_gradient(world, "rloo", 2, kl, reduction), world.true_gradient)
    assert error < 1e-8 if (kl, reduction) == ("k1", "sum") else error > 0.05
