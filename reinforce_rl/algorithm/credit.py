"""Credit: how much of a response's advantage each of its tokens gets, and the whitening of a batch's advantages.

Notation: N sequences, T response tokens, r = reward at the response's end, k = KL a token, gamma = discount.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reinforce_rl.algorithm.advantages import Advantages

# Added to a variance, as in verl and OpenRLHF: a batch of equal advantages stays at zero.
VARIANCE_EPSILON = 1e-8


def sequence_credit(advantages: Tensor, mask: Tensor) -> Tensor:
    """The response is one action: each of its tokens has the response's advantage. [N] and bool [N, T] to [N, T]."""
    return torch.where(mask, advantages[:, None], 0.0)


def returns_to_go(token_rewards: Tensor, mask: Tensor, discount: float = 1.0) -> Tensor:
    """The discounted sum of rewards from each token on: sum_{s >= t} discount^(s - t) reward_s.

    A token cannot change what came before it, so leaving earlier rewards out biases nothing where there is no discount
    (Williams 1992; Schulman et al. 2015, arXiv:1506.02438).

    Args:
        token_rewards: [N, T], the reward that each token earns; anything outside the mask.
        mask: bool [N, T], True on response tokens, which come first.
        discount: gamma, above 0 and at most 1. Below 1 it is biased.

    Returns:
        [N, T], 0 outside the mask.
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
    """Return-to-go less a baseline: each token has what is still to come of reward and KL.

    Args:
        terminal: [N], earned by a response's last token.
        baseline: [N], subtracted at every token, not discounted.
        token_penalty: [N, T], beta times the KL of each token.
        mask: bool [N, T].
        discount: gamma of `returns_to_go`.

    Returns:
        [N, T], 0 outside the mask.
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
    """The advantage of each token.

    Args:
        found: what the estimator made of the rewards, less beta times the KL where that is part of them.
        rewards: [N], shaped, without the KL.
        kl: [N], of each response.
        token_kl: [N, T], of each token, 0 outside the mask.
        mask: bool [N, T], the tokens that train.
        beta: of the KL.
        kl_placement: a value of the key `kl_placement`; a KL in the loss is no part of any advantage.
        assignment: a value of the key `credit_assignment`.
        discount: gamma of `returns_to_go`, for credit by token.

    Returns:
        [N, T], 0 outside the mask.
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
    """Advantages less their mean over the batch, times 1 / sqrt(variance + 1e-8): REINFORCE++ (Hu 2025, 2501.03262).

    Over tokens this is verl's and OpenRLHF's, where a long response weighs more. Biased: the scale depends on the
    samples.

    Args:
        values: [N, T].
        mask: bool [N, T], the tokens that count.
        unit: `token`: each token counts once; `sequence`: each response counts once, its tokens share that.
        total: sums a float64 tensor over the ranks that hold the rest of the batch.

    Returns:
        [N, T], 0 outside the mask. Fewer than two units, or none that differ, give 0.
    """
    weights = units = mask.double()
    if unit == "sequence":
        weights, units = weights / weights.sum(-1, keepdim=True).clamp(min=1), mask.any(-1).double()
    exact = torch.where(mask, values, 0.0).double()
    count, sum_of_values = total(torch.stack((units.sum(), (weights * exact).sum()))).cpu()
    mean = sum_of_values / count.clamp(min=1)
    (squares,) = total((weights * (exact - mean) ** 2).sum()[None]).cpu()
    variance = squares / (count - 1).clamp(min=1)
    # The tokens of a single response may differ, but there is nothing to compare them with.
    counted = mask & (count.item() > 1)
    return torch.where(counted, (exact - mean) * (variance + VARIANCE_EPSILON).rsqrt(), 0.0).to(values.dtype)
