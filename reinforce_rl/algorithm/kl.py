"""Estimates of the KL from the reference policy on sampled tokens.

Source: J. Schulman, "Approximating KL Divergence", 2020.

Notation: N sequences, T response tokens. l = log pi(token), l_ref = log pi_ref(token); the tokens
were drawn from pi.

To add an estimate, decorate a function with `@kl_estimator` (CONTRIBUTING.md). The configuration is
checked against `KL_ESTIMATORS` before torch is loaded, so functions here only use tensor methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    KLFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class KLEstimator:
    """An estimate, and the entry of its metric `train/kl_NAME` in the glossary."""

    function: KLFunction  # of l and l_ref, [N, T] to [N, T]
    meaning: str  # of the metric
    look: str  # signs of good and bad values of the metric


KL_ESTIMATORS: dict[str, KLEstimator] = {}


def kl_estimator(name: str, *, meaning: str, look: str) -> Callable[[KLFunction], KLFunction]:
    """Register a function under a value of `trainer.reinforce.kl_estimator`.

    Every estimate is also a metric, whichever one the run uses.
    """

    def enter(function: KLFunction) -> KLFunction:
        KL_ESTIMATORS[name] = KLEstimator(function, meaning, look)
        return function

    return enter


@kl_estimator(
    "k1",
    meaning="unbiased estimate of the KL, summed over tokens",
    look="as init_policy_kl; below 0: noise",
)
def k1(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Return l - l_ref: unbiased, of either sign. Shapes of all estimators: [N, T] to [N, T]."""
    return log_probs - reference_log_probs


@kl_estimator(
    "absolute_k1",
    meaning="sum of the absolute log-ratios",
    look="bounds the drift from above; biased",
)
def absolute_k1(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Return |l - l_ref|, NeMo-Aligner's `use_absolute_kl`: non-negative, biased."""
    return k1(log_probs, reference_log_probs).abs()


@kl_estimator(
    "k2",
    meaning="half the sum of squared log-ratios",
    look="as kl_k1 while small; biased",
)
def k2(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Return (l - l_ref)^2 / 2: non-negative, low variance, biased."""
    return k1(log_probs, reference_log_probs).square() / 2


@kl_estimator(
    "k3",
    meaning="estimate that is never below 0",
    look="as kl_k1; far above it: a few tokens moved far",
)
def k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Return exp(l_ref - l) - 1 - (l_ref - l): non-negative, unbiased as a value."""
    difference = k1(log_probs, reference_log_probs)
    return (-difference).expm1() + difference


def token_kl(
    log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, *, estimator: str = "k1"
) -> Tensor:
    """Return the estimate per token [N, T], 0 outside the mask.

    Inputs may hold anything outside the mask, infinity included.
    """
    safe = log_probs.where(mask, 0.0)
    safe_reference = reference_log_probs.where(mask, 0.0)
    return KL_ESTIMATORS[estimator].function(safe, safe_reference).where(mask, 0.0)


def reduce_over_tokens(values: Tensor, mask: Tensor, reduction: str = "sum") -> Tensor:
    """Reduce values per token to values per sequence: [N, T], 0 outside the mask, to [N].

    `reduction` is `sum` or `mean`; NeMo-Aligner uses the mean, which is biased for a KL.
    """
    total = values.sum(dim=-1)
    return total if reduction == "sum" else total / mask.sum(dim=-1).clamp(min=1)


def sequence_kl(
    log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, *, estimator: str = "k1"
) -> Tensor:
    """Estimate the KL of each sequence as it enters the reward (Ahmadian et al. 2024: k1, summed).

    From log-probs and mask [N, T] to [N], detached, in nats per response; 0 if empty.
    """
    values = token_kl(log_probs.detach(), reference_log_probs.detach(), mask, estimator=estimator)
    return values.sum(dim=-1)


def kl_loss_terms(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    mask: Tensor,
    *,
    estimator: str = "k3",
    weights: str = "prefix",
) -> Tensor:
    """Return the KL as a loss term per token, [N, T].

    The value is the estimate; `weights` selects the gradient.

    Tokens were sampled from the policy, so the gradient of the expected estimate is the estimate's
    own gradient plus a score-function part. `weights` selects how much of that part is kept:

        none: nothing (GRPO, TRL, verl). Biased; for k1 it is zero in expectation, so the KL is not
            constrained at all.
        token: the token's own, sg(k_t) l_t. Biased: ignores the divergence of later tokens.
        prefix: sg(k_t) sum_{s <= t} l_s, the gradient of the expected sum of estimates; exact for
            k1 and k3.

    `log_probs` [N, T] have a gradient and are of the policy that sampled the tokens. The result is
    0 outside the mask.
    """
    terms = token_kl(log_probs, reference_log_probs.detach(), mask, estimator=estimator)
    if weights == "none":
        return terms
    masked_log_probs = log_probs.where(mask, 0.0)
    # Zero in value; it carries the score-function gradient.
    score = masked_log_probs - masked_log_probs.detach()
    if weights == "prefix":
        score = score.cumsum(dim=-1)
    return terms + (terms.detach() * score).where(mask, 0.0)


@dataclass
class KLCoefficient:
    """Beta, constant or adapted to a target KL.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    value: float
    target: float | None = None  # nats per response; None keeps beta constant
    # Number of responses over which an error of at least 20 % changes beta by 20 %, the most per
    # step.
    horizon: float = 10_000.0

    def update(self, measured: float, responses: float) -> None:
        """Update beta from a step's mean KL over `responses`; a non-finite KL is ignored."""
        if self.target is None or not math.isfinite(measured):
            return
        error = min(max(measured / self.target - 1.0, -0.2), 0.2)
        # Otherwise a step of more than five horizons of responses would turn beta negative.
        self.value *= 1.0 + error * min(responses / self.horizon, 1.0)
