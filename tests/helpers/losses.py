"""The loss where only its policy gradient matters."""

from __future__ import annotations

from torch import Tensor

from reinforce_rl.algorithms.loss import Denominators, LossInputs, LossSettings, policy_loss


def reinforce_loss(
    log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    trains: Tensor,
    denominators: Denominators,
    aggregation: str = "sequence_sum",
) -> Tensor:
    """REINFORCE with one advantage a response: [N]."""
    inputs = LossInputs(mask, advantages[:, None].expand(mask.shape), trains)
    return policy_loss(log_probs, None, inputs, denominators, LossSettings(aggregation))[0]
