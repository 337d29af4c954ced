"""A policy small enough to list its sequences, so that an expectation is a sum: no Monte Carlo.

It is a tree of conditional distributions over a vocabulary of 3 with an end token, so its sequences have unequal
lengths. Summing over every G-tuple of them gives the expected gradient of an estimator itself, in float64.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from helpers.losses import reinforce_loss
from torch import Tensor

from reinforce_rl.algorithms.advantages import RewardGroups, estimator_of
from reinforce_rl.algorithms.kl import sequence_kl
from reinforce_rl.algorithms.loss import Denominators

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


@dataclass(frozen=True)
class World:
    """Parameters, the reference's log-probs and rewards of every sequence, and the true gradient of E[r] - beta KL."""

    parameters: Tensor
    reference: Tensor
    rewards: Tensor
    true_gradient: Tensor


def make_world() -> World:
    generator = torch.Generator().manual_seed(0)
    shape = (TREE.num_prefixes, VOCABULARY)
    parameters = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    reference = TREE.log_probs(torch.randn(shape, generator=generator, dtype=torch.float64))
    rewards = torch.randn(NUM_SEQUENCES, generator=generator, dtype=torch.float64) + 0.7
    log_probs = TREE.log_probs(parameters)
    objective = log_probs.sum(1).exp() @ (rewards - BETA * (log_probs - reference).sum(1))
    (gradient,) = torch.autograd.grad(objective, parameters)
    return World(parameters, reference, rewards, gradient)


def expected_gradient(world: World, estimator: str, samples: int, kl: str = "k1", reduction: str = "sum") -> Tensor:
    """Of the objective: minus the loss's, summed over every tuple of samples with its probability."""
    log_probs = TREE.log_probs(world.parameters)
    probability = log_probs.sum(1).exp().detach()
    penalty = sequence_kl(log_probs, world.reference, TREE.mask, estimator=kl, reduction=reduction)
    with_kl = world.rewards - BETA * penalty
    total = torch.zeros((), dtype=torch.float64)
    for rows in map(list, itertools.product(range(NUM_SEQUENCES), repeat=samples)):
        group = torch.zeros(samples, dtype=torch.long)
        found = estimator_of(estimator)(RewardGroups.of(with_kl[rows], group, None, PAST_MEAN))
        denominators = Denominators(float(found.trains.sum()), 0.0, 0.0)
        loss = reinforce_loss(log_probs[rows], TREE.mask[rows], found.values, found.trains, denominators)
        total = total - probability[rows].prod() * loss
    (gradient,) = torch.autograd.grad(total, world.parameters)
    return gradient


def relative_error(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())
