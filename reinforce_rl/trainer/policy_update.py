"""What the optimizer steps on one rollout batch add up to."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reinforce_rl.data.batches import RolloutBatch
from reinforce_rl.trainer.step_recorder import update_numbers

if TYPE_CHECKING:
    from reinforce_rl.actor.policy import LossShare
    from reinforce_rl.megatron.optimizer import OptimizerUpdate


@dataclass
class PolicyUpdate:
    """The optimizer steps on one rollout batch of N sequences with T response tokens."""

    # float32 [N, T] by the policy before the first step; NaN where no pass has computed them.
    log_probs: Tensor
    optimizer_steps: list[OptimizerUpdate] = field(default_factory=list)
    # This rank's loss and sums of `policy_loss`, over all steps; for `update_metrics`.
    loss_sums: Counter[str] = field(default_factory=Counter)
    # This rank's numbers of each step, for the `StepRecorder`.
    records: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def on(cls, rollouts: RolloutBatch) -> PolicyUpdate:
        """Return the update of a batch before its first optimizer step."""
        if rollouts.log_probs is None:
            return cls(torch.full(rollouts.response_mask.shape, math.nan))
        return cls(rollouts.log_probs[:, : rollouts.width])

    def add(self, share: LossShare, optimizer_step: OptimizerUpdate) -> None:
        """Add an optimizer step and this rank's share of its loss."""
        self.optimizer_steps.append(optimizer_step)
        self.records.append(update_numbers(share, optimizer_step))
        self.loss_sums.update({"loss": share.loss, **share.sums})
        if share.log_probs is not None:
            # A step has those of its own rows, and only if it is on-policy.
            is_unknown = share.log_probs.isnan()
            self.log_probs = torch.where(is_unknown, self.log_probs, share.log_probs)
