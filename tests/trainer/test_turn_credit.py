"""Credit by turn: its formula, and exactness by enumeration.

A policy draws one token of two a turn. The episode ends after one to three turns:

    0 | 1 1 | 1 0 0 | 1 0 1
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from reinforce_rl.algorithm.advantages import RewardGroups, rloo, turn_credit
from reinforce_rl.config.actor import ReinforceConfig
from reinforce_rl.data.batches import RolloutBatch
from reinforce_rl.data.finish_reasons import FINISH_LENGTH, FINISH_STOP
from reinforce_rl.errors import DataError
from reinforce_rl.trainer.advantages import reinforce_batch
from reinforce_rl.trainer.state import RunningBaselines

EPISODES = [(0,), (1, 1), (1, 0, 0), (1, 0, 1)]
STATES = [(), (1,), (1, 0)]
BETA = 0.3
TURNS = 3
# An environment writes a token between two answers.
WIDTH = 2 * TURNS - 1


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PARAMETERS = random(len(STATES), 2, seed=0).requires_grad_()
REFERENCE = random(len(STATES), 2, seed=1)
MASK = torch.zeros((len(EPISODES), WIDTH), dtype=torch.bool)
# A turn's reward depends on what was drawn up to it, and another source's on the whole episode.
REWARD_OF_TURN = 2 + random(len(STATES), 2, seed=2)
TURN_REWARDS = torch.zeros(MASK.shape, dtype=torch.float64)
for number, tokens in enumerate(EPISODES):
    MASK[number, : 2 * len(tokens) : 2] = True
    for turn, token in enumerate(tokens):
        TURN_REWARDS[number, 2 * turn] = REWARD_OF_TURN[STATES.index(tokens[:turn]), token]
REWARDS = TURN_REWARDS.sum(1) + random(len(EPISODES), seed=3)


def log_probs_of(table: Tensor) -> Tensor:
    """Return log-probs [episodes, T] of the policy's tokens."""
    log_probs = table.log_softmax(-1)
    rows = []
    for tokens in EPISODES:
        row = [torch.zeros((), dtype=torch.float64)] * WIDTH
        for turn, token in enumerate(tokens):
            row[2 * turn] = log_probs[STATES.index(tokens[:turn]), token]
        rows.append(torch.stack(row))
    return torch.stack(rows)


def by_turn(drawn: Tensor, kl: Tensor) -> Tensor:
    rewards = (REWARDS - BETA * kl.sum(1))[drawn]
    groups = RewardGroups.of(rewards, torch.zeros(len(drawn), dtype=torch.long))
    return turn_credit(groups, (TURN_REWARDS - BETA * kl)[drawn], MASK[drawn])


def by_episode(drawn: Tensor, kl: Tensor) -> Tensor:
    rewards = (REWARDS - BETA * kl.sum(1))[drawn]
    values = rloo(rewards, torch.zeros(len(drawn), dtype=torch.long))
    return values[:, None].where(MASK[drawn], 0.0)


def normalised(drawn: Tensor, kl: Tensor) -> Tensor:
    credit = by_turn(drawn, kl)
    rewards = (REWARDS - BETA * kl.sum(1))[drawn]
    return credit / (rewards.std() + 1e-4)


def estimates(credit, samples: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of each tuple of samples, and the tuple's probability."""
    log_probs = log_probs_of(PARAMETERS)
    kl = (log_probs - log_probs_of(REFERENCE)).detach()
    probabilities = log_probs.sum(1).exp().detach()
    gradients = []
    weights = []
    for drawn in itertools.product(range(len(EPISODES)), repeat=samples):
        rows = torch.tensor(drawn)
        objective = (credit(rows, kl) * log_probs[rows]).sum() / samples
        (gradient,) = torch.autograd.grad(objective, PARAMETERS, retain_graph=True)
        gradients.append(gradient.flatten())
        weights.append(probabilities[rows].prod())
    return torch.stack(gradients), torch.stack(weights)


def true_gradient() -> Tensor:
    log_probs = log_probs_of(PARAMETERS)
    kl = (log_probs - log_probs_of(REFERENCE)).sum(1)
    objective = log_probs.sum(1).exp() @ (REWARDS - BETA * kl)
    (gradient,) = torch.autograd.grad(objective, PARAMETERS)
    return gradient.flatten()


@pytest.mark.parametrize("samples", [2, 3])
def test_it_is_unbiased(samples):
    expected = true_gradient()
    for credit in (by_episode, by_turn):
        gradients, weights = estimates(credit, samples)
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-12)
        assert weights @ gradients == pytest.approx(expected, abs=1e-12)
    gradients, weights = estimates(normalised, samples)
    assert weights @ gradients != pytest.approx(expected, abs=1e-2)


def rollouts(episodes: list[int]) -> RolloutBatch:
    """Two prompts with three samples each; the second sample is invalid, the last one cut."""
    count = len(episodes)
    rows = torch.tensor(episodes)
    mask = MASK[rows]
    log_probs = log_probs_of(PARAMETERS).detach()[rows].float()
    reference = log_probs_of(REFERENCE)[rows].float()
    rewards = REWARDS[rows].float()
    rewards[1] = torch.nan
    return RolloutBatch(
        sequences=torch.zeros((count, WIDTH + 1), dtype=torch.long),
        prompt_lengths=torch.ones(count, dtype=torch.long),
        response_lengths=mask.cumsum(-1).argmax(-1) + 1,
        group_ids=torch.arange(count) // 3,
        sample_ids=torch.arange(count) % 3,
        finish_reasons=(*(FINISH_STOP,) * (count - 1), FINISH_LENGTH),
        rewards=rewards,
        valid=torch.arange(count) != 1,
        policy_mask=mask,
        log_probs=log_probs,
        init_log_probs=reference,
        turn_rewards=TURN_REWARDS[rows].float(),
    )


SETTINGS = {
    "credit_assignment": "turn",
    "initial_policy_kl_penalty": BETA,
    "num_rollouts_per_prompt": 3,
    "truncated_samples": "mask",
}


def batch_of(batch: RolloutBatch, **keys):
    cfg = ReinforceConfig(**{**SETTINGS, **keys})
    return reinforce_batch(batch, cfg, RunningBaselines(cfg), step=1, max_length=WIDTH)


def test_a_batch_is_a_loop_over_episodes_and_turns():
    episodes = [2, 3, 0, 1, 3, 2]
    batch = batch_of(rollouts(episodes))
    kl = (log_probs_of(PARAMETERS) - log_probs_of(REFERENCE)).detach()

    def return_of(row: int, turn: int) -> float:
        episode = episodes[row]
        if turn >= len(EPISODES[episode]):
            return 0.0
        value = float(REWARDS[episode]) - BETA * float(kl[episode].sum())
        for earlier in range(turn):
            column = 2 * earlier
            value -= float(TURN_REWARDS[episode, column] - BETA * kl[episode, column])
        return value

    for row, episode in enumerate(episodes):
        others = [i for i in range(6) if i // 3 == row // 3 and i not in (1, row)]
        expected = [0.0] * batch.rollouts.width
        # the invalid one, and the one that was cut, which counts in the others' baselines
        for turn in range(len(EPISODES[episode]) if row not in (1, 5) else 0):
            baseline = sum(return_of(i, turn) for i in others) / len(others)
            expected[2 * turn] = return_of(row, turn) - baseline
        assert batch.advantages[row].tolist() == pytest.approx(expected, abs=1e-5)
    assert batch.trains.tolist() == [True, False, True, True, True, False]


def test_episodes_of_one_turn_have_the_credit_of_the_episode():
    one_turn = replace(
        rollouts([2, 3, 0, 1, 3, 2]), policy_mask=None, response_lengths=torch.full((6,), WIDTH)
    )
    by_turns, whole = (
        batch_of(one_turn, credit_assignment=assignment) for assignment in ("turn", "sequence")
    )
    assert torch.equal(by_turns.advantages, whole.advantages)
    assert bool(by_turns.advantages.any())


def test_samples_without_rewards_of_turns_are_refused():
    without = replace(rollouts([0, 1, 2]), turn_rewards=None)
    with pytest.raises(DataError) as raised:
        batch_of(without)
    assert raised.value.key == "advantages.turn_rewards.missing"
