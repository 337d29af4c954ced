"""The trainer's steps from scores to the gradient, on given log-probs in place of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from peers.random_groups import Batch
from torch import Tensor

from reinforce_rl.algorithm.loss import Denominators, LossInputs, policy_loss
from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.data.batches import ReinforceBatch, RolloutBatch
from reinforce_rl.data.finish_reasons import FINISH_LENGTH, FINISH_STOP
from reinforce_rl.megatron.optimizer import OptimizerUpdate
from reinforce_rl.policy.build import loss_settings
from reinforce_rl.policy.model import LossShare
from reinforce_rl.trainer.reinforce import ReinforceTrainer


@dataclass(frozen=True)
class Trained:
    """What an update did.

    Attributes:
        advantages: [N, T].
        loss: of the last optimizer step on the batch.
        gradient: [N, T], of that loss with respect to the token log-probabilities.
        kl_coefficient: beta for the next step.
    """

    advantages: Tensor
    loss: Tensor
    gradient: Tensor
    kl_coefficient: float


class OneRank:
    """Stands in for a mesh."""

    dp_rank = 0
    world_size = 1
    device = torch.device("cpu")

    def gather_over_dp(self, value: Any) -> list[Any]:
        return [value]

    def sum_over_dp(self, values: Tensor) -> Tensor:
        return values

    def any_rank(self, flag: bool) -> bool:
        return flag


class GivenLogProbs:
    """Stands in for the policy: log-probs are the batch's, and optimizer steps change nothing.

    The first optimizer step on a batch is on-policy by definition, as in the policy. The second has
    a ratio.
    """

    def __init__(self, config: TrainConfig, batch: Batch):
        self.mesh = OneRank()
        self.lora = None
        self.settings = config.model.model_copy(update={"seed": 0})
        self.max_response_tokens = config.max_response_tokens
        self.generator = SimpleNamespace(refit=lambda: None)
        self._loss = loss_settings(config.trainer.reinforce)
        self._batch = batch
        self.last_loss = torch.zeros(())
        self.last_gradient = torch.zeros(())

    def get_loss_and_metrics(
        self,
        batch: ReinforceBatch,
        denominators: Denominators,
        *,
        rows: Tensor,
        kl_coefficient: float,
        on_policy: bool,
    ) -> LossShare:
        rollouts = batch.rollouts
        old_log_probs = (
            None if on_policy or rollouts.log_probs is None else rollouts.log_probs[rows]
        )
        generator_log_probs = (
            None if rollouts.generator_log_probs is None else rollouts.generator_log_probs[rows]
        )
        reference_log_probs = (
            None if rollouts.init_log_probs is None else rollouts.init_log_probs[rows]
        )
        inputs = LossInputs(
            mask=rollouts.response_mask[rows],
            advantages=batch.advantages[rows],
            trains=batch.trains[rows],
            old_log_probs=old_log_probs,
            generator_log_probs=generator_log_probs,
            reference_log_probs=reference_log_probs,
        )
        leaf = self._batch.log_probs[rows].clone().requires_grad_()
        entropy = self._batch.entropy[rows]
        loss, sums = policy_loss(leaf, entropy, inputs, denominators, self._loss, kl_coefficient)
        (self.last_gradient,) = torch.autograd.grad(loss, leaf)
        self.last_loss = loss.detach()
        return LossShare(
            float(self.last_loss), {name: float(value) for name, value in sums.items()}
        )


def train(
    config: TrainConfig,
    batch: Batch,
    *,
    scored: Tensor | None = None,
    truncated: Sequence[int] = (),
) -> Trained:
    """Pass a rollout batch through the trainer: advantages, then the configured passes.

    Args:
        config: of the run.
        batch: the numbers.
        scored: bool [N], False where there is no reward; None means that all have one.
        truncated: rows that were cut at the length limit.
    """
    valid = torch.ones_like(batch.scored) if scored is None else scored
    cut = torch.zeros_like(valid)
    cut[list(truncated)] = True
    if config.trainer.reinforce.truncated_samples == "drop":
        valid = valid & ~cut  # the rollout source's part
    lengths = batch.mask.sum(-1)
    finish_reasons = tuple(FINISH_LENGTH if is_cut else FINISH_STOP for is_cut in cut.tolist())
    sequences = torch.zeros(batch.mask.shape, dtype=torch.long)
    rewards = torch.where(valid, batch.rewards, torch.nan)
    rollouts = RolloutBatch(
        sequences=sequences,
        prompt_lengths=torch.zeros_like(lengths),
        response_lengths=lengths,
        group_ids=batch.group_ids,
        sample_ids=torch.zeros_like(batch.group_ids),
        finish_reasons=finish_reasons,
        rewards=rewards,
        valid=valid,
        generator_log_probs=batch.generator_log_probs,
        log_probs=batch.old_log_probs,
        init_log_probs=batch.reference_log_probs,
    )
    model = GivenLogProbs(config, batch)
    optimizer = SimpleNamespace(step=lambda: OptimizerUpdate(grad_norm=1.0, lr=0.0, skipped=False))
    nothing: Any = SimpleNamespace(state_dict=dict, note=print)
    loader: Any = _Loader()
    trainer = ReinforceTrainer(
        config.trainer.reinforce,
        model,  # type: ignore[arg-type]
        optimizer,
        nothing,
        lambda collate_fn: loader,
        None,
        list,
        nothing,
        nothing,
        nothing,
        nothing,
        nothing,
    )
    data, _ = trainer.generate_reinforce_data(rollouts)
    trainer.run_training(data)
    return Trained(
        data.advantages,
        model.last_loss,
        model.last_gradient,
        trainer.state_dict()["kl_coefficient"],
    )


class _Loader:
    """Stands in for a loader of prompts: one batch, never drawn."""

    finished = False

    def __len__(self) -> int:
        return 1

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 0, "consumed_prompts": 0}
