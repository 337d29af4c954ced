"""A policy small enough to enumerate: exact sums instead of Monte Carlo estimates.

It is a tree of conditional distributions over a vocabulary of 3 with an end token, so sequences
have unequal lengths. Summing over every G-tuple gives the expected gradient of an estimator in
float64.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from reinforce_rl.algorithm.advantages import (
    ADVANTAGE_ESTIMATORS,
    RewardGroups,
    assign_credit,
    whiten,
)
from reinforce_rl.algorithm.kl import reduce_over_tokens, token_kl
from reinforce_rl.algorithm.loss import Denominators, LossInputs, LossSettings, policy_loss

BETA = 0.3
PAST_MEAN = 0.4
VOCABULARY = 3
MAX_LENGTH = 3
END = 0


@dataclass(frozen=True)
class Tree:
    """All sequences, and tables for their token log-probs."""

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
        mask = torch.zeros(shape, dtype=torch.bool)
        prefix = torch.zeros(shape).long()
        token = torch.zeros(shape).long()
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
    """Parameters, and reference log-probs and rewards of all sequences.

    `true_gradient` is the gradient of E[r] - beta KL.
    """

    parameters: Tensor
    reference: Tensor
    rewards: Tensor
    true_gradient: Tensor


@dataclass(frozen=True)
class Options:
    """Algorithm options under their config names; the defaults are RLOO."""

    advantage_estimator: str = "rloo"
    kl_estimator: str = "k1"
    kl_reduction: str = "sum"
    kl_placement: str = "reward"
    kl_loss_weights: str = "prefix"
    credit_assignment: str = "sequence"
    discount_factor: float = 1.0
    advantage_whitening: str = "none"
    loss: LossSettings = field(default_factory=LossSettings)

    @property
    def loss_settings(self) -> LossSettings:
        return replace(
            self.loss, kl_estimator=self.kl_estimator, kl_loss_weights=self.kl_loss_weights
        )


def make_world(reward_mean: float = 0.7) -> World:
    generator = torch.Generator().manual_seed(0)
    shape = (TREE.num_prefixes, VOCABULARY)
    parameters = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    reference = TREE.log_probs(torch.randn(shape, generator=generator, dtype=torch.float64))
    rewards = torch.randn(NUM_SEQUENCES, generator=generator, dtype=torch.float64) + reward_mean
    log_probs = TREE.log_probs(parameters)
    kl = (log_probs - reference).sum(1)
    objective = log_probs.sum(1).exp() @ (rewards - BETA * kl)
    (gradient,) = torch.autograd.grad(objective, parameters)
    return World(parameters, reference, rewards, gradient)


def tuples(samples: int) -> Tensor:
    """Return all tuples of `samples` sequences: int64 [15 ** samples, samples]."""
    return torch.tensor(list(itertools.product(range(NUM_SEQUENCES), repeat=samples)))


def advantages(world: World, options: Options, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Return advantages [tuples, G, T] and which samples train; each tuple is a group."""
    rows = drawn.flatten()
    groups = torch.arange(len(drawn)).repeat_interleave(drawn.shape[1])
    log_probs = TREE.log_probs(world.parameters).detach()
    tokens = token_kl(log_probs, world.reference, TREE.mask, estimator=options.kl_estimator)
    kl = reduce_over_tokens(tokens, TREE.mask, options.kl_reduction)
    in_reward = BETA if options.kl_placement == "reward" else 0.0
    rewards = world.rewards - in_reward * kl
    reward_groups = RewardGroups.of(rewards[rows], groups, None, PAST_MEAN)
    estimator = ADVANTAGE_ESTIMATORS[options.advantage_estimator]
    group_advantages = estimator.function(reward_groups)
    values = assign_credit(
        group_advantages,
        world.rewards[rows],
        kl[rows],
        tokens[rows],
        TREE.mask[rows],
        beta=BETA,
        kl_placement=options.kl_placement,
        assignment=options.credit_assignment,
        discount=options.discount_factor,
    )
    return values.view(*drawn.shape, MAX_LENGTH), group_advantages.trains.view(drawn.shape)


def expected_gradient(
    world: World,
    options: Options,
    samples: int,
    *,
    behaviour: Tensor | None = None,
    as_old: bool = False,
) -> Tensor:
    """Return the objective's expected gradient over all tuples.

    Args:
        behaviour: token log-probs [sequences, T] of another sampling policy.
        as_old: `behaviour` is an earlier actor; otherwise it is another generator.
    """
    log_probs = TREE.log_probs(world.parameters)
    probability = (log_probs if behaviour is None else behaviour).sum(1).exp().detach()
    total = torch.zeros((), dtype=torch.float64)
    every = tuples(samples)
    # Batch-wide estimators must see one tuple at a time; the others take all tuples together.
    batch_wide = options.advantage_estimator == "batch_mean"
    for drawn in every.split(1 if batch_wide else len(every)):
        values, trains = advantages(world, options, drawn)
        for rows, value, counts in zip(drawn, values, trains, strict=True):
            mask = TREE.mask[rows]
            if options.advantage_whitening != "none":
                value = whiten(value, mask, unit=options.advantage_whitening)
            drawn_with = None if behaviour is None else behaviour[rows]
            inputs = LossInputs(
                mask,
                value,
                counts,
                old_log_probs=drawn_with if as_old else None,
                generator_log_probs=None if as_old else drawn_with,
                reference_log_probs=world.reference[rows],
            )
            denominators = Denominators(
                float(counts.sum()), float(mask[counts].sum()), float(MAX_LENGTH)
            )
            in_loss = BETA if options.kl_placement == "loss" else 0.0
            loss, _ = policy_loss(
                log_probs[rows], None, inputs, denominators, options.loss_settings, in_loss
            )
            total = total - probability[rows].prod() * loss
    (gradient,) = torch.autograd.grad(total, world.parameters)
    return gradient


def gradient_variance(world: World, options: Options, samples: int) -> float:
    """Return the trace of the covariance of one group's gradient estimate.

    There is no KL in the loss.
    """
    log_probs = TREE.log_probs(world.parameters)
    rows = torch.eye(NUM_SEQUENCES * MAX_LENGTH, dtype=torch.float64)
    gradients = []
    for row in rows:
        (gradient,) = torch.autograd.grad(
            log_probs, world.parameters, row.view_as(log_probs), retain_graph=True
        )
        gradients.append(gradient)
    scores = torch.stack(gradients).view(NUM_SEQUENCES, MAX_LENGTH, -1)
    probability = log_probs.sum(1).exp().detach()
    drawn = tuples(samples)
    values, _ = advantages(world, options, drawn)
    estimates = torch.einsum("ngt,ngtd->nd", values, scores[drawn]) / samples
    weights = probability[drawn].prod(dim=1)
    mean = weights @ estimates
    return float(weights @ estimates.square().sum(1) - mean.square().sum())


def relative_error(estimate: Tensor, true: Tensor) -> float:
    return float((estimate - true).norm() / true.norm())
