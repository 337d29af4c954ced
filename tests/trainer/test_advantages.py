"""From scored rollouts to advantages: rows of ranks, the KL, and samples that train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.thread_ranks import gathering_ranks
from torch import Tensor

from reinforce_rl.config.actor import ReinforceConfig
from reinforce_rl.data.batches import ReinforceBatch, RolloutBatch
from reinforce_rl.trainer.advantages import reinforce_batch
from reinforce_rl.trainer.state import RunningBaselines

BETA = 0.5
REWARDS = [1.0, 4.0, 2.0, 2.5, 0.0, 3.0, 5.0]
GROUPS = [0, 0, 0, 1, 1, 2, 2]
LENGTHS = [2, 1, 3, 2, 2, 1, 3]
REASONS = ["stop", "length", "stop", "stop", "length", "stop", "stop"]
# log pi - log pi_ref of every response token.
LOG_RATIO = 0.25


def batch_of(rows: list[int]) -> RolloutBatch:
    """A batch of these samples; log-probs beyond a response are garbage."""
    count = len(rows)
    width = max((LENGTHS[row] for row in rows), default=0)
    lengths = torch.tensor([LENGTHS[row] for row in rows], dtype=torch.long)
    mask = torch.arange(width)[None, :] < lengths[:, None]
    garbage = torch.tensor(float("nan"))
    log_probs = torch.full((count, width), -1.0).where(mask, garbage)
    return RolloutBatch(
        sequences=torch.zeros(count, 1 + width, dtype=torch.long),
        prompt_lengths=torch.ones(count, dtype=torch.long),
        response_lengths=lengths,
        group_ids=torch.tensor([GROUPS[row] for row in rows], dtype=torch.long),
        sample_ids=torch.zeros(count, dtype=torch.long),
        finish_reasons=tuple(REASONS[row] for row in rows),
        rewards=torch.tensor([REWARDS[row] for row in rows]),
        valid=torch.ones(count, dtype=torch.bool),
        log_probs=log_probs,
        init_log_probs=log_probs - LOG_RATIO,
    )


def made(rows: list[int], **keys: Any) -> ReinforceBatch:
    cfg = ReinforceConfig(**{"initial_policy_kl_penalty": BETA, "kl_estimator": "k1", **keys})
    return reinforce_batch(batch_of(rows), cfg, RunningBaselines(cfg), step=1, max_length=8)


ALL = list(range(7))
KL = torch.tensor(LENGTHS) * LOG_RATIO  # k1, summed over a response
MASK = torch.arange(3)[None, :] < torch.tensor(LENGTHS)[:, None]


def test_the_kl_is_of_the_policy_from_the_reference_and_lowers_the_reward():
    """By hand: k1 is log pi - log pi_ref, 0.25 a token."""
    batch = made(ALL, advantage_estimator="none")
    torch.testing.assert_close(batch.kl, KL)
    torch.testing.assert_close(batch.rewards_with_kl, torch.tensor(REWARDS) - BETA * KL)
    rewards_less_kl = torch.tensor(REWARDS) - BETA * KL
    torch.testing.assert_close(batch.advantages[:, 0], rewards_less_kl)
    assert batch.shaped_rewards is not None
    torch.testing.assert_close(batch.shaped_rewards, torch.tensor(REWARDS))


@pytest.mark.parametrize("placement", ["advantage", "loss"])
def test_elsewhere_the_kl_is_not_in_the_reward(placement):
    batch = made(ALL, advantage_estimator="none", kl_placement=placement)
    torch.testing.assert_close(batch.rewards_with_kl, torch.tensor(REWARDS))
    less = BETA * KL if placement == "advantage" else 0.0 * KL
    torch.testing.assert_close(batch.advantages[:, 0], torch.tensor(REWARDS) - less)


def test_a_beta_that_has_adapted_is_the_one_that_counts():
    cfg = ReinforceConfig(
        initial_policy_kl_penalty=BETA,
        kl_target=1.0,
        advantage_estimator="none",
        kl_placement="advantage",
    )
    past = RunningBaselines(cfg)
    past.beta.value = 2.0
    batch = reinforce_batch(batch_of(ALL), cfg, past, step=1, max_length=8)
    torch.testing.assert_close(batch.advantages[:, 0], torch.tensor(REWARDS) - 2.0 * batch.kl)


def test_advantages_are_0_beyond_a_response():
    batch = made(ALL)
    assert bool((batch.advantages[~MASK] == 0).all())
    assert not batch.advantages.isnan().any()


def test_truncated_samples_are_compared_with_and_do_not_train():
    whole = made(ALL, truncated_samples="keep")
    masked = made(ALL, truncated_samples="mask")
    ended = torch.tensor([reason == "stop" for reason in REASONS])
    assert whole.trains.all()
    assert masked.trains.tolist() == ended.tolist()
    torch.testing.assert_close(masked.advantages[ended], whole.advantages[ended])
    assert bool((masked.advantages[~ended] == 0).all())


def test_whitening_counts_the_samples_that_train_alone():
    """Over their tokens the mean is 0 and, but for epsilon, the deviation is 1."""
    batch = made(ALL, truncated_samples="mask", advantage_whitening="token")
    kept = batch.advantages[MASK & batch.trains[:, None]].double()
    assert float(kept.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(kept.std()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    "shares", [[[0, 1, 2], [3, 4, 5, 6]], [[0, 1, 2, 3, 4], [5, 6]], [[0, 1, 2], [], ALL[3:]]]
)
def test_ranks_of_unequal_shares_have_their_own_rows(shares):
    """Groups lie on one rank each here; the mean of the batch is over all ranks."""

    def of_rank(rank: int, gather: Callable[[Any], list[Any]]) -> tuple[Tensor, Tensor]:
        cfg = ReinforceConfig(
            initial_policy_kl_penalty=BETA, kl_estimator="k1", advantage_estimator="batch_mean"
        )
        batch = reinforce_batch(
            batch_of(shares[rank]),
            cfg,
            RunningBaselines(cfg),
            step=1,
            max_length=8,
            gather_over_ranks=gather,
            rank=rank,
        )
        first = batch.advantages[:, 0] if len(shares[rank]) else torch.zeros(0)
        return first, batch.rewards_with_kl

    shares_of_ranks = gathering_ranks(len(shares), of_rank)
    whole = made(ALL, advantage_estimator="batch_mean")
    joined = torch.cat([advantages for advantages, _ in shares_of_ranks])
    torch.testing.assert_close(joined, whole.advantages[:, 0])
    torch.testing.assert_close(
        torch.cat([rewards for _, rewards in shares_of_ranks]), whole.rewards_with_kl
    )
