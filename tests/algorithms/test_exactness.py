"""Exactness by enumeration, no Monte Carlo: the expected gradient of each estimator against the true gradient.

The policy is a tree of conditional distributions over a vocabulary of 3 with an end token, so its sequences have
unequal lengths and can be listed. Summing over every G-tuple gives the expectation itself, in float64.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from reinforce_rl.algorithms.advantages import RewardGroups, estimator_of
from reinforce_rl.algorithms.choices import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS
from reinforce_rl.algorithms.kl import sequence_kl
from reinforce_rl.algorithms.loss import Denominators, reinforce_loss

BETA = 0.3
PAST_MEAN = 0.4
VOCABULARY, MAX_LENGTH, END = 3, 3, 0


@dataclass(frozen=True)
class Tree:
    """Every sequence, and the tables that give its token log-probs from the policy's parameters."""

    mask: Tensor  # bool [sequences, T]
    prefix: Tensor  # int64 [sequences, T], row of the parameters
    token: Tensor  # int64 [sequences, T]
    num_prefixes: int

    @classmethod
    def build(cls) -> Tree:
        def grow(start: tuple[int, ...]) -> list[tuple[int, ...]]:
            out = []
            for token in range(VOCABULARY):
                longer = (*start, token)
                out += [longer] if token == END or len(longer) == MAX_LENGTH else grow(longer)
            return out

        sequences = grow(())
        prefixes = sorted({s[:i] for s in sequences for i in range(len(s))})
        shape = (len(sequences), MAX_LENGTH)
        mask, prefix, token = (
            torch.zeros(shape, dtype=torch.bool),
            torch.zeros(shape).long(),
            torch.zeros(shape).long(),
        )
        for row, sequence in enumerate(sequences):
            for column, value in enumerate(sequence):
                mask[row, column] = True
                prefix[row, column] = prefixes.index(sequence[:column])
                token[row, column] = value
        return cls(mask, prefix, token, len(prefixes))

    def log_probs(self, parameters: Tensor) -> Tensor:
        return torch.where(self.mask, parameters.log_softmax(-1)[self.prefix, self.token], 0.0)


TREE = Tree.build()
NUM_SEQUENCES = len(TREE.mask)


@pytest.fixture(scope="module")
def world() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parameters, the reference's log-probs, rewards, and the true gradient of E[r] - beta KL."""
    generator = torch.Generator().manual_seed(0)
    shape = (TREE.num_prefixes, VOCABULARY)
    parameters = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    reference = TREE.log_probs(torch.randn(shape, generator=generator, dtype=torch.float64))
    rewards = torch.randn(NUM_SEQUENCES, generator=generator, dtype=torch.float64) + 0.7
    log_probs = TREE.log_probs(parameters)
    objective = log_probs.sum(1).exp() @ (rewards - BETA * (log_probs - reference).sum(1))
    (gradient,) = torch.autograd.grad(objective, parameters)
    return parameters, reference, rewards, gradient


def expected_gradient(world, estimator: str, samples: int, kl: str = "k1", reduction: str = "sum") -> Tensor:
    """Of the objective: minus the loss's, summed over every tuple of samples with its probability."""
    parameters, reference, rewards, _ = world
    log_probs = TREE.log_probs(parameters)
    probability = log_probs.sum(1).exp().detach()
    penalty = sequence_kl(log_probs, reference, TREE.mask, estimator=kl, reduction=reduction)
    with_kl = rewards - BETA * penalty
    total = torch.zeros((), dtype=torch.float64)
    for rows in map(list, itertools.product(range(NUM_SEQUENCES), repeat=samples)):
        group = torch.zeros(samples, dtype=torch.long)
        found = estimator_of(estimator)(RewardGroups.of(with_kl[rows], group, None, PAST_MEAN))
        denominators = Denominators(float(found.trains.sum()), 0.0, 0.0)
        loss = reinforce_loss(log_probs[rows], TREE.mask[rows], found.values, found.trains, denominators)
        total = total - probability[rows].prod() * loss
    (gradient,) = torch.autograd.grad(total, parameters)
    return gradient


def relative_error(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


def test_the_tree_has_a_dozen_sequences_of_unequal_length():
    assert NUM_SEQUENCES == 15
    assert sorted(set(TREE.mask.sum(1).tolist())) == [1, 2, 3]


@pytest.mark.parametrize("estimator", ["none", "running_mean", "rloo"])
def test_exact_estimators_have_the_true_gradient(world, estimator):
    assert relative_error(expected_gradient(world, estimator, 2), world[-1]) < 1e-8


@pytest.mark.parametrize("estimator", ["batch_mean", "prompt_mean"])
def test_a_baseline_that_includes_the_sample_shortens_the_gradient(world, estimator):
    assert relative_error(2 * expected_gradient(world, estimator, 2), world[-1]) < 1e-8


def test_the_others_are_biased_and_this_test_would_see_it(world):
    exact = {"none", "running_mean", "rloo"}
    for estimator in ADVANTAGE_ESTIMATORS.keys() - exact:
        assert relative_error(expected_gradient(world, estimator, 2), world[-1]) > 0.1


@pytest.mark.parametrize("kl", KL_ESTIMATORS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_only_summed_k1_in_the_reward_is_exact(world, kl, reduction):
    error = relative_error(expected_gradient(world, "rloo", 2, kl, reduction), world[-1])
    assert error < 1e-8 if (kl, reduction) == ("k1", "sum") else error > 0.05
