"""The policy-gradient loss of a micro-batch.

Notation: N sequences, T response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reinforce_loss(log_probs: Tensor, mask: Tensor, advantages: Tensor, valid: Tensor, num_valid: float) -> Tensor:
    """REINFORCE over whole sequences: -sum_i A_i sum_t l_it / num_valid (Ahmadian et al. 2024, equation 6).

    The response is one action, so its log-probability is the sum over its tokens: there is no length normalisation.
    The denominator is that of the global batch, so that the sum of this value over all micro-batches and ranks is
    the loss, and the gradient does not depend on how the batch was cut.

    Args:
        log_probs: [N, T], with gradient.
        mask: bool [N, T], True on response tokens.
        advantages: [N], without gradient.
        valid: bool [N]; False contributes nothing.
        num_valid: valid sequences of the global batch; 0 gives a loss of 0.

    Returns:
        scalar, this micro-batch's share of the loss.
    """
    # where, not multiplication: 0 * inf is NaN, in the gradient too.
    per_sequence = torch.where(mask & valid[:, None], log_probs, 0.0).sum(dim=-1)
    weights = torch.where(valid, advantages.detach(), 0.0)
    return -(weights * per_sequence).sum() / max(num_valid, 1.0)
