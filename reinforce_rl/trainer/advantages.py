"""From scored rollouts to the batch of the loss: shaped rewards, KL, baselines, advantages.

The trainer calls it on a step's rollouts, `reinforce-rl replay` on stored ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reinforce_rl.algorithm.advantages import (
    ADVANTAGE_ESTIMATORS,
    RewardGroups,
    assign_credit,
    turn_credit,
    whiten,
)
from reinforce_rl.algorithm.kl import reduce_over_tokens, token_kl
from reinforce_rl.algorithm.rewards import (
    RunningMoments,
    shape_rewards,
    subtract_kl,
    subtract_truncation_penalty,
)
from reinforce_rl.data.batches import ReinforceBatch, RolloutBatch
from reinforce_rl.errors import DataError

if TYPE_CHECKING:
    from reinforce_rl.config.actor import ReinforceConfig
    from reinforce_rl.trainer.state import RunningBaselines


def response_kl(batch: RolloutBatch, cfg: ReinforceConfig) -> tuple[Tensor, Tensor]:
    """Return the KL of each response [N] and of each token [N, T].

    Both are zeros without log-probs of the reference.
    """
    mask = batch.response_mask
    kl_tokens = torch.zeros(mask.shape)
    if batch.log_probs is not None and batch.init_log_probs is not None:
        kl_tokens = token_kl(
            batch.log_probs, batch.init_log_probs, mask, estimator=cfg.kl_estimator_used
        )
    return reduce_over_tokens(kl_tokens, mask, cfg.kl_reduction), kl_tokens


def shaped_rewards(
    rewards: Tensor,
    valid: Tensor,
    response_lengths: Tensor,
    is_end: Tensor,
    cfg: ReinforceConfig,
    past: RunningMoments,
    *,
    max_length: int,
) -> Tensor:
    """Return rewards [N] after `reward_shaping` and `truncation_penalty`.

    Rewards of invalid samples are arbitrary.
    """
    shaped = shape_rewards(rewards, valid, response_lengths, cfg.reward_shaping, past)
    return subtract_truncation_penalty(
        shaped,
        response_lengths,
        is_end,
        penalty=cfg.truncation_penalty,
        buffer=cfg.overlong_buffer,
        max_length=max_length,
    )


def _turn_rewards(batch: RolloutBatch) -> Tensor:
    """Return the environment's rewards [N, T] of single turns.

    Raises DataError if the samples, as those of an earlier record, do not have them.
    """
    if batch.turn_rewards is not None:
        return batch.turn_rewards[:, : batch.width]
    if len(batch.rewards):
        raise DataError(
            "credit_assignment=turn needs the rewards of turns, which these samples do not have; "
            "expected samples of reward=environment. Set credit_assignment=sequence or token",
            key="advantages.turn_rewards.missing",
        )
    return torch.zeros(batch.response_mask.shape)


def reinforce_batch(
    batch: RolloutBatch,
    cfg: ReinforceConfig,
    past: RunningBaselines,
    *,
    step: int,
    max_length: int,
    gather_over_ranks: Callable[[Any], list[Any]] = lambda value: [value],
    rank: int = 0,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda value: value,
) -> ReinforceBatch:
    """Shape rewards, apply the KL and compute advantages; return this data-parallel rank's batch.

    Advantages use the global batch, so that they do not depend on its distribution over ranks.
    `max_length` is a response's maximum tokens. Raises as `subtract_kl`.
    """
    kl, kl_tokens = response_kl(batch, cfg)
    local_columns = (
        batch.rewards,
        kl,
        batch.policy_lengths,
        batch.is_end,
        batch.group_ids,
        batch.valid,
    )
    columns_of_ranks = gather_over_ranks(local_columns)
    start = sum(len(columns[0]) for columns in columns_of_ranks[:rank])
    local_rows = slice(start, start + len(batch.rewards))
    scores, all_kl, lengths, is_end, group_ids, valid = (
        torch.cat(parts) for parts in zip(*columns_of_ranks, strict=True)
    )

    # Of the global batch.
    rewards = shaped_rewards(
        scores, valid, lengths, is_end, cfg, past.scores, max_length=max_length
    )
    reward_beta = past.beta.value if cfg.kl_placement == "reward" else 0.0
    rewards_with_kl = subtract_kl(rewards, all_kl, reward_beta, valid, step)
    past_mean = past.reward_mean(cfg.advantage_estimator)
    groups = RewardGroups.of(rewards_with_kl, group_ids, valid, past_mean)
    all_advantages = ADVANTAGE_ESTIMATORS[cfg.advantage_estimator].function(groups)

    # Of this rank.
    local_rewards = rewards[local_rows]
    advantages = all_advantages.select(local_rows)
    trains = advantages.trains
    if cfg.truncated_samples == "mask":
        trains = trains & batch.is_end
    trained_tokens = batch.response_mask & trains[:, None]
    if cfg.credit_assignment == "turn":
        # A group lies on one rank.
        local_groups = RewardGroups(groups.rewards[local_rows], batch.group_ids, batch.valid)
        turn_rewards = _turn_rewards(batch) - reward_beta * kl_tokens
        credit = turn_credit(local_groups, turn_rewards, batch.response_mask)
        token_advantages = credit.where(trained_tokens, 0.0)
    else:
        token_advantages = assign_credit(
            advantages,
            local_rewards,
            kl,
            kl_tokens,
            trained_tokens,
            beta=past.beta.value,
            kl_placement=cfg.kl_placement,
            assignment=cfg.credit_assignment,
            discount=cfg.discount_factor,
        )
    if cfg.advantage_whitening != "none":
        token_advantages = whiten(
            token_advantages,
            trained_tokens,
            unit=cfg.advantage_whitening,
            total=sum_over_ranks,
        )
    return ReinforceBatch(
        rollouts=batch,
        kl=kl,
        rewards_with_kl=groups.rewards[local_rows],
        baseline=advantages.baseline,
        advantages=token_advantages,
        trains=trains,
        shaped_rewards=local_rewards,
    )
