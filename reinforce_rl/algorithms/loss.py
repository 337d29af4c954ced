"""The policy-gradient loss of a micro-batch.

Notation: N sequences, T response tokens, l = log pi(token), A = advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Denominators:
    """What the sums over tokens and sequences are divided by. Counted over the global batch.

    Attributes:
        sequences: sequences that train.
        tokens: their response tokens.
        fixed_length: tokens, the constant of Dr. GRPO; the run's max_length.
    """

    sequences: float
    tokens: float
    fixed_length: float


def reinforce_loss(
    log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    trains: Tensor,
    denominators: Denominators,
    aggregation: str = "sequence_sum",
) -> Tensor:
    """REINFORCE: -sum_i A_i sum_t w_it l_it, with weights w that the aggregation says.

    The denominators are those of the global batch, so that the sum of this value over all micro-batches and ranks is
    the loss, and the gradient does not depend on how the batch was cut.

    Args:
        log_probs: [N, T], with gradient.
        mask: bool [N, T], True on response tokens.
        advantages: [N], detached here.
        trains: bool [N]; False contributes nothing.
        denominators: of the global batch; zeros give a loss of 0.
        aggregation: one of `LOSS_AGGREGATIONS`:
            sequence_sum: tokens summed, sequences averaged: the response is one action, so its log-probability is the
                sum of its tokens' (RLOO, Ahmadian et al. 2024, arXiv:2402.14740, equation 6). Unbiased.
            sequence_mean: tokens averaged within their sequence, then sequences (GRPO, arXiv:2402.03300). Biased:
                a token of a long response weighs less than one of a short response.
            token_mean: all tokens of the batch averaged (DAPO, arXiv:2503.14476). The direction of sequence_sum; its
                size falls with the batch's mean length, which the samples decide.
            fixed_length: tokens summed and divided by a constant, sequences averaged (Dr. GRPO, arXiv:2503.20783):
                sequence_sum divided by max_length.

    Returns:
        scalar, this micro-batch's share of the loss.
    """
    # where, not multiplication: 0 * inf is NaN, in the gradient too.
    kept = mask & trains[:, None]
    per_sequence = torch.where(kept, log_probs, 0.0).sum(dim=-1)
    sequences = max(denominators.sequences, 1.0)
    if aggregation == "token_mean":
        divisor = torch.full_like(per_sequence, max(denominators.tokens, 1.0))
    elif aggregation == "sequence_mean":
        divisor = sequences * mask.sum(dim=-1).clamp(min=1)
    elif aggregation == "fixed_length":
        divisor = torch.full_like(per_sequence, sequences * denominators.fixed_length)
    else:
        divisor = torch.full_like(per_sequence, sequences)
    weights = torch.where(trains, advantages.detach(), 0.0)
    return -(weights * per_sequence / divisor).sum()
