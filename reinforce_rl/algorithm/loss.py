"""The policy-gradient loss of a micro-batch.

Notation: N sequences, T response tokens, l = log pi(token), A = advantage. pi_old is the policy
before the first optimizer step on a rollout batch, pi_gen the policy that the generator sampled
with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reinforce_rl.algorithm.kl import kl_loss_terms

# Bound on log ratios, as in verl: an infinite ratio times a zero advantage or gradient is NaN.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossSettings:
    """Terms of the loss and their parameters: keys of `trainer.reinforce`."""

    loss_aggregation: str = "sequence_sum"  # see `token_weights`
    importance_ratio: str = "none"  # see `policy_terms`
    ratio_clip_low: float = 0.2  # ratio >= 1 - this
    ratio_clip_high: float = 0.2  # ratio <= 1 + this
    generator_correction: str = "none"  # see `generator_weights`
    # Upper bound of generator weights. Masks drop weights above it and below 1 / it.
    generator_ratio_cap: float = 2.0
    kl_estimator: str = "k1"  # of a KL in the loss
    kl_loss_weights: str = "prefix"  # see `kl_loss_terms`
    entropy_bonus: float = 0.0  # per nat of a token's entropy


@dataclass(frozen=True)
class Denominators:
    """Counts over the global batch of an optimizer step that normalise the loss."""

    sequences: float  # number of sequences that train
    tokens: float  # response tokens of those sequences
    fixed_length: float  # constant of Dr. GRPO, the run's max_length


@dataclass(frozen=True)
class LossInputs:
    """The detached inputs of a micro-batch."""

    mask: Tensor  # bool [N, T], True on response tokens
    advantages: Tensor  # [N, T]
    trains: Tensor  # bool [N]; False contributes nothing
    old_log_probs: Tensor | None = None  # [N, T]; None while the policy is pi_old
    generator_log_probs: Tensor | None = None  # [N, T] under pi_gen; None if not reported
    reference_log_probs: Tensor | None = None  # [N, T]; None without a KL in the loss


def token_weights(
    mask: Tensor,
    trains: Tensor,
    denominators: Denominators,
    aggregation: str,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the weight of each token's loss term, [N, T]; 0 where it does not count.

    `mask` is bool [N, T], `trains` bool [N]. Denominators of the global batch make the gradient
    independent of the split into micro-batches and ranks; zeros give a loss of 0. `aggregation` is
    a value of the key `loss_aggregation`:

        sequence_sum: sum over tokens, mean over sequences (RLOO, Ahmadian et al. 2024,
            arXiv:2402.14740, equation 6). Unbiased: the response is one action.
        sequence_mean: mean over tokens, then sequences (GRPO, arXiv:2402.03300). Biased against
            long responses.
        token_mean: mean over the batch's tokens (DAPO, arXiv:2503.14476). The direction of
            sequence_sum; the scale depends on the sampled lengths.
        fixed_length: sequence_sum divided by max_length (Dr. GRPO, arXiv:2503.20783).
    """
    kept = (mask & trains[:, None]).to(dtype)
    sequences = max(denominators.sequences, 1.0)
    if aggregation == "token_mean":
        return kept / max(denominators.tokens, 1.0)
    if aggregation == "sequence_mean":
        return kept / (sequences * mask.sum(dim=-1, keepdim=True).clamp(min=1))
    if aggregation == "fixed_length":
        return kept / (sequences * denominators.fixed_length)
    return kept / sequences


def policy_terms(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ratio: str = "none",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the policy-gradient term of each token.

    At pi = pi_old all ratios give the gradient of `none`. All tensors are [N, T]: log-probs are 0
    outside the mask, `log_probs` has a gradient, and advantages are constant within a response for
    the sequence ratios. `ratio` is a value of the key `importance_ratio`:

        none: -A l, REINFORCE; on-policy only.
        token: -min(rho A, clip(rho) A), rho = pi / pi_old per token (PPO, arXiv:1707.06347; GRPO).
        sequence: the same with rho of the whole response, as in TRL's RLOO.
        sequence_geometric: rho to the power of 1 / length (GSPO, arXiv:2507.18071).

    clip(rho) is within 1 - clip_low .. 1 + clip_high, and any rho is capped at
    exp(`MAX_LOG_RATIO`).

    Returns:
        terms [N, T] with gradient, rho [N, T] detached, and bool [N, T] where clipping stopped the
        gradient.
    """
    if ratio == "none":
        return -advantages * log_probs, torch.ones_like(log_probs), torch.zeros_like(mask)
    difference = log_probs - old_log_probs
    lengths = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    if ratio != "token":
        difference = difference.sum(dim=-1, keepdim=True)
        if ratio == "sequence_geometric":
            difference = difference / lengths
        difference = difference.expand_as(log_probs)
    rho = difference.clamp(max=MAX_LOG_RATIO).exp()
    free = rho * advantages
    bounded = rho.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    terms = -torch.minimum(free, bounded)
    if ratio == "sequence":
        # The ratio's gradient already sums over the response's tokens, so each gets 1 / length of
        # the term.
        terms = terms / lengths
    cut_off = (difference > MAX_LOG_RATIO) & (advantages < 0)
    return terms, rho.detach(), ((bounded < free) | cut_off) & mask


def generator_weights(
    old_log_probs: Tensor, generator_log_probs: Tensor, mask: Tensor, *, correction: str, cap: float
) -> Tensor:
    """Return detached importance weights [N, T] from log-probs and mask [N, T].

    The weights correct for another engine, other kernels or older weights. r = pi_old / pi_gen of
    each token, or of the response, which is unbiased but for the cap. The cap bounds the variance
    and adds bias.

        token, sequence: min(r, cap) (Ionides 2008; Yao et al. 2025, "Your Efficient RL Framework
            Secretly Brings You Off-Policy RL Training")
        token_mask, sequence_mask: r within 1 / cap .. cap, else 0 (IcePop, arXiv:2510.18855; Liu et
            al. 2025, "When Speed Kills Stability", with the upper bound only)
    """
    if correction == "none":
        return torch.ones_like(old_log_probs)
    difference = (old_log_probs - generator_log_probs).detach()
    if correction.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True).expand_as(difference)
    weights = difference.exp().clamp(max=cap)
    if correction.endswith("_mask"):
        weights = torch.where(difference.abs() <= math.log(cap), weights, 0.0)
    return torch.where(mask, weights, 1.0)


def policy_loss(
    log_probs: Tensor,
    entropy: Tensor | None,
    inputs: LossInputs,
    denominators: Denominators,
    settings: LossSettings,
    kl_coefficient: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute this micro-batch's share of the loss: policy gradient, KL term, entropy bonus.

    With the default settings it is REINFORCE: -1/M sum_i A_i sum_t l_it over M sequences.

    `log_probs` and `entropy` are [N, T] with gradient, and anything outside the mask. `entropy` is
    None if it was not computed, `kl_coefficient` is None if the loss has no KL.

    Returns:
        The scalar share, and float64 sums over training tokens for
        `monitoring.metrics.update_metrics`, additive over micro-batches and ranks.
    """
    kept = inputs.mask & inputs.trains[:, None]

    def clean(values: Tensor) -> Tensor:
        # torch.where, since 0 * inf is NaN, in the gradient too.
        return torch.where(kept, values, 0.0)

    masked_log_probs = clean(log_probs)
    # The ratio is exactly 1 on the first pass: recomputed log-probs differ by rounding, which adds
    # up over a long response and would clip on-policy samples.
    old = masked_log_probs.detach() if inputs.old_log_probs is None else clean(inputs.old_log_probs)
    weights = token_weights(
        inputs.mask, inputs.trains, denominators, settings.loss_aggregation, masked_log_probs.dtype
    )
    advantages = clean(inputs.advantages.detach())
    clip = settings.ratio_clip_low, settings.ratio_clip_high
    terms, rho, clipped = policy_terms(
        masked_log_probs, old, advantages, kept, settings.importance_ratio, *clip
    )
    ones = torch.ones_like(old)
    correction = ones
    generator = None if inputs.generator_log_probs is None else clean(inputs.generator_log_probs)
    cap = settings.generator_ratio_cap
    if generator is not None:
        correction = generator_weights(
            old, generator, kept, correction=settings.generator_correction, cap=cap
        )
    terms = terms * correction
    if kl_coefficient is not None and inputs.reference_log_probs is not None:
        kl_options = {"estimator": settings.kl_estimator, "weights": settings.kl_loss_weights}
        terms = terms + kl_coefficient * kl_loss_terms(
            masked_log_probs, clean(inputs.reference_log_probs), kept, **kl_options
        )
    if settings.entropy_bonus and entropy is not None:
        terms = terms - settings.entropy_bonus * clean(entropy)
    loss = torch.where(kept, weights * terms, 0.0).sum()

    def total(values: Tensor) -> Tensor:
        return torch.where(kept, values.detach().double(), 0.0).sum()

    used = rho * correction
    sums = {
        "tokens": total(ones),
        "clipped": total(clipped),
        "weights": total(used),
        "squares": total(used**2),
    }
    if entropy is not None:
        sums["entropy"] = total(entropy)
    if generator is not None:
        difference = old - generator
        sums["generator_logprob_diff"] = total(difference.abs())
        sums["generator_kl"] = total(torch.expm1(difference) - difference)
        sums["generator_capped"] = total(difference.exp() > cap)
        if settings.generator_correction.endswith("_mask"):
            sums["generator_masked"] = total(correction == 0)
    return loss, sums
