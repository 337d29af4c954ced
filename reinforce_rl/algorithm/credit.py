"""Credit assignment from responses to tokens, and advantage whitening.

Notation: N sequences, T response tokens, r = reward at the response's end, k = KL per token, gamma = discount.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reinforce_rl.algorithm.advantages import Advantages

# Variance epsilon, as in verl and OpenRLHF: equal advantages stay at zero.
VARIANCE_EPSILON = 1e-8


def sequence_credit(advantages: Tensor, mask: Tensor) -> Tensor:
    """Give each response token its response's advantage: [N] and bool [N, T] to [N, T]."""
    return torch.where(mask, advantages[:, None], 0.0)


def returns_to_go(token_rewards: Tensor, mask: Tensor, discount: float = 1.0) -> Tensor:
    """Compute sum_{s >= t} discount^(s - t) reward_s: [N, T], 0 outside the mask, from [N, T] and bool [N, T].

    A token cannot change earlier rewards, so omitting them is unbiased if discount is 1 (Williams 1992; Schulman et
    al. 2015, arXiv:1506.02438); below 1 it is biased. Response tokens come first; other rewards are ignored.
    """
    rewards = torch.where(mask, token_rewards, 0.0)
    if discount == 1.0:
        later = rewards.flip(-1).cumsum(-1).flip(-1)
    else:
        later = torch.zeros_like(rewards)
        running = rewards.new_zeros(len(rewards))
        for t in range(rewards.shape[1] - 1, -1, -1):
            running = rewards[:, t] + discount * running
            later[:, t] = running
    return torch.where(mask, later, 0.0)


def token_credit(
    terminal: Tensor, baseline: Tensor, token_penalty: Tensor, mask: Tensor, discount: float = 1.0
) -> Tensor:
    """Compute return-to-go of reward and KL less a baseline: [N, T], 0 outside the mask.

    Args:
        terminal, baseline: [N]; the reward of the last token, and what is subtracted at every token, undiscounted.
        token_penalty, mask: [N, T] and bool [N, T]; beta times each token's KL.
    """
    is_last = mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))
    rewards = torch.where(is_last, terminal[:, None], 0.0) - torch.where(mask, token_penalty, 0.0)
    return torch.where(mask, returns_to_go(rewards, mask, discount) - baseline[:, None], 0.0)


def assign_credit(
    found: Advantages,
    rewards: Tensor,
    kl: Tensor,
    token_kl: Tensor,
    mask: Tensor,
    *,
    beta: float,
    kl_placement: str = "reward",
    assignment: str = "sequence",
    discount: float = 1.0,
) -> Tensor:
    """Return the advantage of each token: [N, T], 0 outside the mask.

    Args:
        found: advantages of the rewards, less beta times the KL if `kl_placement` is `reward`.
        rewards, kl: [N]; the rewards shaped, without the KL.
        token_kl, mask: [N, T] and bool [N, T]; the KL is 0 outside the mask.
        kl_placement: a value of the key `kl_placement`; a KL in the loss enters no advantage.
        discount: gamma of `returns_to_go`; only with `token`.
    """
    if assignment == "sequence":
        return sequence_credit(found.values - beta * kl if kl_placement == "advantage" else found.values, mask)
    charged = 0.0 * token_kl if kl_placement == "loss" else beta * token_kl
    if kl_placement == "reward":
        # The estimator has the KL of whole responses in it; here each token is charged its own, so only the baseline
        # is taken from it.
        return token_credit(rewards, found.baseline, charged, mask, discount)
    return token_credit(found.values, torch.zeros_like(found.values), charged, mask, discount)


def whiten(
    values: Tensor, mask: Tensor, *, unit: str = "token", total: Callable[[Tensor], Tensor] = lambda sums: sums
) -> Tensor:
    """Return (A - mean) / sqrt(variance + 1e-8) over the batch: REINFORCE++ (Hu 2025, 2501.03262).

    By token as in verl and OpenRLHF, where long responses weigh more. Biased: the scale depends on the samples.

    Args:
        values, mask: [N, T] and bool [N, T].
        unit: `token`: every token has weight 1; `sequence`: every response has weight 1, shared by its tokens.
        total: sums a float64 tensor over the ranks that hold the batch.

    Returns:
        [N, T], 0 outside the mask; all 0 with fewer than two units or without variance.
    """
    weights = units = mask.double()
    if unit == "sequence":
        weights, units = weights / weights.sum(-1, keepdim=True).clamp(min=1), mask.any(-1).double()
    exact = torch.where(mask, values, 0.0).double()
    count, sum_of_values = total(torch.stack((units.sum(), (weights * exact).sum()))).cpu()
    mean = sum_of_values / count.clamp(min=1)
    (squares,) = total((weights * (exact - mean) ** 2).sum()[None]).cpu()
    variance = squares / (count - 1).clamp(min=1)
    # A single response has nothing to compare with, even if its tokens differ.
    counted = mask & (count.item() > 1)
    return torch.where(counted, (exact - mean) * (variance + VARIANCE_EPSILON).rsqrt(), 0.0).to(values.dtype)
