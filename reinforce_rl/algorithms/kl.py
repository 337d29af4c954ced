"""KL of the policy from the reference policy, estimated on the sampled tokens, as it enters the reward.

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


def k2(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """(l - l_ref)^2 / 2 a token: never negative, of little variance, and biased. [N, T] to [N, T]."""
    return k1(log_probs, reference_log_probs).square() / 2


def k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """exp(l_ref - l) - 1 - (l_ref - l) a token: unbiased as a value, never negative. [N, T] to [N, T]."""
    difference = k1(log_probs, reference_log_probs)
    return torch.expm1(-difference) + difference


def token_kl(log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, *, estimator: str = "k1") -> Tensor:
    """An estimate a token, 0 outside the mask: [N, T]. Padding may hold anything, infinity included."""
    safe = torch.where(mask, log_probs, 0.0)
    safe_reference = torch.where(mask, reference_log_probs, 0.0)
    return torch.where(mask, globals()[estimator](safe, safe_reference), 0.0)


@torch.no_grad()
def sequence_kl(
    log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, *, estimator: str = "k1", reduction: str = "sum"
) -> Tensor:
    """The KL estimate of each sequence, as it enters the reward (Ahmadian et al. 2024: k1, summed).

    Args:
        log_probs: [N, T] under the policy.
        reference_log_probs: [N, T] under the reference.
        mask: bool [N, T], True on response tokens.
        estimator: of `KL_ESTIMATORS`.
        reduction: `sum` over the response's tokens, or their `mean`, as NeMo-Aligner; the mean is biased.

    Returns:
        [N], in nats a response (a token under `mean`), without gradient; 0 for an empty response.
    """
    total = token_kl(log_probs, reference_log_probs, mask, estimator=estimator).sum(dim=-1)
    return total if reduction == "sum" else total / mask.sum(dim=-1).clamp(min=1)
