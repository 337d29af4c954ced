"""Sums over the optimizer steps on one rollout batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from reinforce_rl.data.batches import RolloutBatch
from reinforce_rl.megatron.optimizer import OptimizerUpdate
from reinforce_rl.policy.model import LossShare
from reinforce_rl.trainer.updates import PolicyUpdate

NAN = math.nan


def rollouts_of(log_probs: Tensor | None) -> RolloutBatch:
    """Two responses, of one token and of two tokens."""
    return RolloutBatch(
        sequences=torch.zeros(2, 3, dtype=torch.long),
        prompt_lengths=torch.ones(2, dtype=torch.long),
        response_lengths=torch.tensor([1, 2]),
        group_ids=torch.arange(2),
        sample_ids=torch.zeros(2, dtype=torch.long),
        finish_reasons=("stop", "stop"),
        rewards=torch.zeros(2),
        valid=torch.ones(2, dtype=torch.bool),
        log_probs=log_probs,
    )


def test_before_the_first_step_log_probs_are_those_of_the_rollouts():
    # one column of padding too many
    known = torch.tensor([[-1.0, 0.0, 0.0], [-2.0, -3.0, 0.0]])
    update = PolicyUpdate.on(rollouts_of(known))
    assert update.log_probs.tolist() == [[-1.0, 0.0], [-2.0, -3.0]]
    unknown = PolicyUpdate.on(rollouts_of(None)).log_probs
    assert unknown.shape == (2, 2)
    assert unknown.isnan().all()


def test_each_step_adds_the_log_probs_of_its_rows():
    update = PolicyUpdate.on(rollouts_of(None))
    optimizer_step = OptimizerUpdate(grad_norm=1.0, lr=0.1, skipped=False)
    first_row = torch.tensor([[-1.0, NAN], [NAN, NAN]])
    update.add(LossShare(0.0, {}, first_row), optimizer_step)
    second_row = torch.tensor([[NAN, NAN], [-2.0, -3.0]])
    update.add(LossShare(0.0, {}, second_row), optimizer_step)
    # Steps that are not on-policy have none.
    update.add(LossShare(0.0, {}, torch.full((2, 2), NAN)), optimizer_step)
    update.add(LossShare(0.0, {}, None), optimizer_step)
    expected = torch.tensor([[-1.0, NAN], [-2.0, -3.0]])
    torch.testing.assert_close(
        update.log_probs,
        expected,
        equal_nan=True,
        rtol=0,
        atol=0,
    )


def test_sums_are_over_all_steps_and_records_are_of_each():
    update = PolicyUpdate.on(rollouts_of(None))
    first = OptimizerUpdate(grad_norm=1.0, lr=0.1, skipped=False)
    second = OptimizerUpdate(grad_norm=2.0, lr=0.2, skipped=True)
    update.add(LossShare(0.5, {"tokens": 2.0}), first)
    update.add(LossShare(-1.5, {"tokens": 1.0, "entropy": 4.0}), second)
    assert update.optimizer_steps == [first, second]
    assert update.loss_sums == {"loss": -1.0, "tokens": 3.0, "entropy": 4.0}
    assert [record["loss"] for record in update.records] == [0.5, -1.5]
    assert [record["grad_norm"] for record in update.records] == [1.0, 2.0]
    assert update.records[1]["sum_entropy"] == pytest.approx(4.0)
