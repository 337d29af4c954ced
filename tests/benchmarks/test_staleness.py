"""The benchmark of stale rollouts: its exact sums against the tests' sums, and its result."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.enumeration import (
    TREE,
    Options,
    World,
    expected_gradient,
    gradient_variance,
    relative_error,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from staleness import (
    CORRECTIONS,
    UNCAPPED,
    Estimate,
    Problem,
    learn,
    measure,
    plain_reward,
    rloo_advantage,
    rloo_baseline,
    scores_of,
    sequence_divergence,
)

STEP_KL = 0.01
LAGS = (0, 1, 2, 4)


@pytest.fixture(scope="module", params=[0, 1])
def problem(request) -> Problem:
    return Problem.draw(request.param)


@pytest.fixture(scope="module")
def path(problem) -> list[torch.Tensor]:
    return problem.path(STEP_KL)


def world_of(problem: Problem, parameters: torch.Tensor) -> World:
    leaf = parameters.clone().requires_grad_()
    return World(leaf, problem.reference, problem.rewards, problem.gradient(parameters))


def test_versions_are_a_given_kl_apart_and_get_better(problem, path):
    for before, after in itertools.pairwise(path):
        assert sequence_divergence(before, after) == pytest.approx(STEP_KL, rel=1e-6)
    objectives = [float(problem.objective(TREE.log_probs(version).sum(1))) for version in path]
    assert objectives == sorted(objectives)
    assert objectives[-1] < problem.objective(problem.optimum())


@pytest.mark.parametrize("name", CORRECTIONS)
def test_means_equal_all_ordered_pairs(problem, path, name):
    """The mean does not depend on G, so pairs suffice."""
    now = path[-1]
    behaviour = path[-3]
    options = Options(loss=CORRECTIONS[name])
    drawn_with = TREE.log_probs(behaviour)
    expected = expected_gradient(world_of(problem, now), options, 2, behaviour=drawn_with).flatten()
    mean = Estimate(problem, now, behaviour, CORRECTIONS[name], scores_of(now)).mean
    assert relative_error(mean, expected) < 1e-12


def test_variance_on_policy_equals_all_ordered_groups():
    problem = Problem.draw(0)
    now = problem.path(STEP_KL, versions=1)[-1]
    variance = Estimate(problem, now, now, CORRECTIONS["none"], scores_of(now)).variance
    expected = gradient_variance(world_of(problem, now), Options(), 4)
    assert variance == pytest.approx(expected, rel=1e-10)


def test_without_a_cap_the_weight_of_the_response_is_unbiased_and_no_weight_is_not(problem, path):
    measures = [measure(problem, path, lag, CORRECTIONS) for lag in LAGS]
    assert max(each[UNCAPPED].bias for each in measures) < 1e-12
    none = [each["none"].bias for each in measures]
    token = [each["token"].bias for each in measures]
    assert none[0] < 1e-12
    assert none == sorted(none)
    assert none[1] > 0.05
    assert token == sorted(token)
    assert token[1] > 0.05
    assert measures[-1]["sequence"].bias < token[-1] < none[-1]
    assert {name for name, each in measures[0].items() if each.bias < 1e-12} == {*CORRECTIONS}


def test_kl_by_the_generator_is_biased_though_the_weight_is_not(problem, path):
    assert measure(problem, path, 1, CORRECTIONS, kl_of_behaviour=True)[UNCAPPED].bias > 0.01


def test_baseline_leaves_the_mean_alone_where_weights_are_exact(problem, path):
    """E[w b score] = E[b] E[w score], and E[w score] is 0 only for the exact weight.

    With truncation, the baseline still removes a constant of the reward from the bias.
    """
    now = path[-1]
    behaviour = path[-5]
    scores = scores_of(now)
    true = problem.gradient(now).flatten()

    def mean(correction: str, credit=rloo_advantage, shift: float = 0.0) -> torch.Tensor:
        shifted = replace(problem, rewards=problem.rewards + shift)
        return Estimate(shifted, now, behaviour, CORRECTIONS[correction], scores, credit).mean

    assert mean(UNCAPPED, rloo_baseline).norm() / true.norm() < 1e-12
    assert mean("none", rloo_baseline).norm() / true.norm() > 0.05
    for name in CORRECTIONS:
        assert relative_error(mean(name, shift=2.0), mean(name)) < 1e-10
    assert relative_error(mean("none", plain_reward, 2.0), mean("none", plain_reward)) > 0.5


def test_learning_on_policy_does_not_depend_on_the_correction():
    names = ("none", "token", "sequence_mask", UNCAPPED)
    shares = {name: learn(0.1, 0, CORRECTIONS[name], seeds=3, steps=8).share for name in names}
    for share in shares.values():
        torch.testing.assert_close(share, shares["none"], rtol=1e-9, atol=1e-9)
    stale = {
        name: learn(0.1, 2, CORRECTIONS[name], seeds=3, steps=8).share
        for name in ("none", UNCAPPED)
    }
    assert not torch.equal(stale["none"], shares["none"])
    assert not torch.equal(stale["none"], stale[UNCAPPED])
    assert bool((shares["none"] > 0).any())
    assert bool((shares["none"] < 1).all())
