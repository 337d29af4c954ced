"""KL of the policy from the reference policy, estimated on the sampled tokens.

Notation: N sequences, T response tokens. l = log pi(token), l_ref = log pi_ref(token); the tokens were drawn from pi.

Source of the estimators' names: J. Schulman, "Approximating KL Divergence" (2020).
"""

from __future__ import annotations

import torch
from torch import Tensor


def k1(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """l - l_ref a token: unbiased, of either sign. [N, T] to [N, T]."""
    return log_probs - reference_log_probs


def absolute_k1(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """|l - l_ref| a token, NeMo-Aligner's `use_absolute_kl`: never negative, and biased. [N, T] to [N, T]."""
    return k1(log_probs, reference_log_probs).abs()


def sequence_kl(
    log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, *, use_absolute_kl: bool = False
) -> Tensor:
    """The KL estimate of each sequence, as it enters the reward (Ahmadian et al. 2024: k1, summed).

    Args:
        log_probs: [N, T] under the policy.
        reference_log_probs: [N, T] under the reference.
        mask: bool [N, T], True on response tokens.
        use_absolute_kl: |k1| in place of k1.

    Returns:
        [N], in nats a response, without gradient; 0 for an empty response.
    """
    estimator = absolute_k1 if use_absolute_kl else k1
    with torch.no_grad():
        # where, not multiplication: padding may hold anything, infinity included.
        per_token = torch.where(mask, estimator(log_probs, reference_log_probs), 0.0)
        return per_token.sum(dim=-1)
