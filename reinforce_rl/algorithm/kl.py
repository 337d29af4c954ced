"""KL of the policy from the reference policy, estimated on the sampled tokens: in the reward, or in the loss.

Notation: N sequences, T response tokens. l = log pi(token), l_ref = log pi_ref(token); the tokens were drawn from pi.

Source of the estimators' names: J. Schulman, "Approximating KL Divergence" (2020).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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


def reduce_over_tokens(values: Tensor, mask: Tensor, reduction: str = "sum") -> Tensor:
    """The `sum` of a response's tokens, or their `mean`, as NeMo-Aligner takes of the KL: [N, T] to [N].

    The mean of a KL is biased. Values outside the mask must be 0; an empty response gives 0.
    """
    total = values.sum(dim=-1)
    return total if reduction == "sum" else total / mask.sum(dim=-1).clamp(min=1)


@torch.no_grad()
def sequence_kl(
    log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, *, estimator: str = "k1", reduction: str = "sum"
) -> Tensor:
    """The KL estimate of each sequence, as it enters the reward (Ahmadian et al. 2024: k1, summed).

    Args:
        log_probs: [N, T] under the policy.
        reference_log_probs: [N, T] under the reference.
        mask: bool [N, T], True on response tokens.
        estimator: a value of the key `kl_estimator`.
        reduction: a value of the key `kl_reduction`; see `reduce_over_tokens`.

    Returns:
        [N], in nats a response (a token under `mean`), without gradient; 0 for an empty response.
    """
    return reduce_over_tokens(token_kl(log_probs, reference_log_probs, mask, estimator=estimator), mask, reduction)


def kl_loss_terms(
    log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, *, estimator: str = "k3", weights: str = "prefix"
) -> Tensor:
    """The KL as a term of the loss: the estimate a token as value, and a gradient that `weights` chooses.

    The tokens were drawn from the policy, so the gradient of an expected estimate has two parts: the estimate's own,
    and the score function's, by which each token that led there is made less likely. Systems differ in what they keep
    of the second:

        none: nothing (GRPO, TRL, verl). Biased; for k1 it is zero in expectation, so that the KL is not held at all.
        token: the token's own, sg(k_t) l_t. Biased: a token answers for no later token's divergence.
        prefix: all that came before, sg(k_t) sum_{s <= t} l_s. The gradient of the expected sum of estimates, which
            for k1 and k3, unbiased as values, is exactly that of the KL.

    Args:
        log_probs: [N, T] under the policy that drew the tokens, with gradient.
        reference_log_probs: [N, T] under the reference.
        mask: bool [N, T], True on response tokens.
        estimator: a value of the key `kl_estimator`.
        weights: a value of the key `kl_loss_weights`.

    Returns:
        [N, T] in nats, 0 outside the mask.
    """
    terms = token_kl(log_probs, reference_log_probs.detach(), mask, estimator=estimator)
    if weights == "none":
        return terms
    own = torch.where(mask, log_probs, 0.0)
    score = own - own.detach()  # zero in value
    if weights == "prefix":
        score = score.cumsum(dim=-1)
    return terms + torch.where(mask, terms.detach() * score, 0.0)


@dataclass
class KLCoefficient:
    """Beta, constant or steered towards a target KL (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    Attributes:
        value: beta now.
        target: nats a response to hold the measured KL at; None leaves beta alone.
        horizon: responses in which an error of 20 % or more changes beta by 20 %. One step never changes it by more.
    """

    value: float
    target: float | None = None
    horizon: float = 10_000.0

    def update(self, measured: float, responses: float) -> None:
        """Take account of a step's mean KL over so many responses. A KL that is not finite changes nothing."""
        if self.target is None or not math.isfinite(measured):
            return
        error = min(max(measured / self.target - 1.0, -0.2), 0.2)
        # A step of more responses than five horizons would else turn beta negative.
        self.value *= 1.0 + error * min(responses / self.horizon, 1.0)
