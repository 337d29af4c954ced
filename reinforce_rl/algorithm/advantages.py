"""Baselines, advantages and their credit to tokens, chosen by name in the configuration.

Notation: N samples, T response tokens; the samples of a group answer one prompt. r = reward of a
sequence, less the KL where it is part of the reward. Everything is detached. Invalid samples are
excluded; their rewards may be NaN.

To add an estimator, decorate a function of a `RewardGroups` with `@estimator` (CONTRIBUTING.md).
The configuration is checked against `ADVANTAGE_ESTIMATORS` before torch is loaded, so functions
here only use tensor methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_REWARD = 1e6  # above it float32 cannot resolve differences within a group
# GRPO's epsilon, as in TRL; it swamps the deviation of about 1e-7 that rounding gives.
EPSILON = 1e-4
# Added to a variance, as in verl and OpenRLHF, so that equal advantages stay at zero.
VARIANCE_EPSILON = 1e-8


@dataclass(frozen=True)
class RewardGroups:
    """The rewards of a global batch."""

    rewards: Tensor  # [N], any floating type
    group_ids: Tensor  # [N], any integers; two equal prompts are two groups
    valid: Tensor  # bool [N]
    past_mean: float = 0.0  # mean valid reward of past steps; see `RunningBaselines.reward_mean`

    @classmethod
    def of(
        cls, rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None, past_mean: float = 0.0
    ) -> RewardGroups:
        """Check and detach the inputs. All samples are valid if `valid` is None.

        Raises:
            ValueError: shapes differ, ids are not integers, or a valid reward is not finite or
                larger in size than `MAX_REWARD`.
        """
        import torch

        rewards = rewards.detach()
        if not rewards.is_floating_point():
            rewards = rewards.to(torch.get_default_dtype())
        valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
        shapes = {"rewards": rewards.shape, "group_ids": group_ids.shape, "valid": valid.shape}
        if len(set(shapes.values())) > 1 or rewards.dim() != 1:
            shapes_by_name = ", ".join(
                f"{name} of {tuple(shape)}" for name, shape in shapes.items()
            )
            raise ValueError(f"expected 1-D tensors of one length, found {shapes_by_name}")
        if group_ids.is_floating_point():
            raise ValueError(f"group_ids must be integers, found {group_ids.dtype}")
        if valid.dtype != torch.bool:
            raise ValueError(f"valid must be a bool mask, found {valid.dtype}")
        if not bool((rewards[valid].abs() <= MAX_REWARD).all()):
            raise ValueError(
                f"a valid reward is not finite or beyond {MAX_REWARD:g} in size; "
                "scale or clip rewards"
            )
        return cls(rewards.where(valid, 0.0), group_ids, valid, past_mean)

    def group_index(self) -> Tensor:
        return self.group_ids.unique(return_inverse=True)[1]

    def sum_by_group(self, values: Tensor) -> Tensor:
        """Sum `values` [N] over the valid samples of each sample's group: [N]."""
        index = self.group_index()
        totals = values.new_zeros(int(index.max()) + 1 if index.numel() else 0)
        return totals.index_add(0, index, values.where(self.valid, 0.0))[index]

    def count_by_group(self) -> Tensor:
        """Count the valid samples of each sample's group: [N], in the rewards' dtype."""
        return self.sum_by_group(self.rewards.new_ones(self.rewards.shape))

    def mean_by_group(self) -> Tensor:
        """Return the mean valid reward of each sample's group: [N]; 0 if none is valid."""
        counts = self.count_by_group().clamp(min=1)
        means = self.sum_by_group(self.rewards) / counts
        # A second pass over the deviations removes the rounding error of large equal rewards.
        return means + self.sum_by_group(self.rewards - means) / counts

    def mean(self) -> Tensor:
        """Return the mean valid reward, a scalar; 0 if none is valid."""
        count = self.valid.sum().clamp(min=1)
        mean = self.rewards.sum() / count
        return mean + (self.rewards - mean).where(self.valid, 0.0).sum() / count

    def advantages(self, baseline: Tensor | float, scale: Tensor | float = 1.0) -> Advantages:
        """Return (reward - baseline) * scale for the valid samples, all of which train.

        `baseline` and `scale` are [N] or scalars.
        """
        values = ((self.rewards - baseline) * scale).where(self.valid, 0.0)
        baselines = (self.rewards.new_zeros(self.rewards.shape) + baseline).where(self.valid, 0.0)
        return Advantages(values, baselines, self.valid)


@dataclass(frozen=True)
class Advantages:
    values: Tensor  # [N], detached; 0 where a sample does not train
    baseline: Tensor  # [N], subtracted before any division; 0 if there is none
    trains: Tensor  # bool [N], the samples that the loss averages over

    def select(self, rows: slice) -> Advantages:
        return Advantages(self.values[rows], self.baseline[rows], self.trains[rows])


Estimator = Callable[[RewardGroups], Advantages]


@dataclass(frozen=True)
class EstimatorEntry:
    function: Estimator
    compares_samples: bool  # needs at least two samples per prompt
    only_subtracts: bool  # reward less a baseline, without scaling or selection


ADVANTAGE_ESTIMATORS: dict[str, EstimatorEntry] = {}


def estimator(
    *names: str, compares_samples: bool, only_subtracts: bool = True
) -> Callable[[Estimator], Estimator]:
    """Register a function under values of `trainer.reinforce.advantage_estimator`.

    `EstimatorEntry` describes the two flags.
    """

    def enter(function: Estimator) -> Estimator:
        ADVANTAGE_ESTIMATORS.update(
            dict.fromkeys(names, EstimatorEntry(function, compares_samples, only_subtracts))
        )
        return function

    return enter


@estimator("none", compares_samples=False)
def no_baseline(groups: RewardGroups) -> Advantages:
    """A = r: vanilla REINFORCE (Williams 1992). Unbiased; variance grows with the mean reward."""
    return groups.advantages(0.0)


@estimator("running_mean", "moving_average", "exponential_moving_average", compares_samples=False)
def past_mean(groups: RewardGroups) -> Advantages:
    """A = r - `RunningBaselines.reward_mean`.

    Williams 1992; "REINFORCE with baseline" in arXiv:2402.14740.

    Unbiased, since the past does not depend on this step's samples.
    """
    return groups.advantages(groups.past_mean)


@estimator("batch_mean", compares_samples=False)
def batch_mean(groups: RewardGroups) -> Advantages:
    """A = r - batch mean, itself included: in expectation (N-1)/N of the true gradient."""
    return groups.advantages(groups.mean())


@estimator("prompt_mean", compares_samples=True)
def prompt_mean(groups: RewardGroups) -> Advantages:
    """A = r - group mean, itself included: (G-1)/G of RLOO.

    Source: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783.
    """
    return groups.advantages(groups.mean_by_group())


@estimator("rloo", compares_samples=True)
def leave_one_out(groups: RewardGroups) -> Advantages:
    """RLOO: A = r - mean of the group's other samples = G/(G-1) (r - mean).

    Unbiased; A = 0 for a lone valid sample. Source: Kool et al. (2019), "Buy 4 REINFORCE Samples,
    Get a Baseline for Free!"; arXiv:2402.14740, equation 8.
    """
    means = groups.mean_by_group()
    # mean of the others = mean + (mean - r) / (G - 1), without cancellation of large sums.
    others = (groups.count_by_group() - 1).clamp(min=1)
    return groups.advantages(means + (means - groups.rewards) / others)


@estimator("grpo", compares_samples=True, only_subtracts=False)
def group_normalised(groups: RewardGroups) -> Advantages:
    """GRPO: A = (r - group mean) / (group standard deviation + 1e-4).

    Source: Shao et al. 2024, arXiv:2402.03300. The deviation divides by G-1, as in TRL and verl.
    Biased: groups with small differences weigh as much as others. A group of one, or of equal
    rewards, has A = 0.
    """
    means = groups.mean_by_group()
    degrees = (groups.count_by_group() - 1).clamp(min=1)
    variance = groups.sum_by_group((groups.rewards - means) ** 2) / degrees
    return groups.advantages(means, 1.0 / (variance.sqrt() + EPSILON))


@estimator("raft", compares_samples=True, only_subtracts=False)
def best_of_group(groups: RewardGroups) -> Advantages:
    """RAFT: the best sample of each group trains alone, with A = 1 (Dong et al. 2023, 2304.06767).

    The first of equal best samples is taken.
    """
    import torch

    index = groups.group_index()
    num_groups = int(index.max()) + 1 if index.numel() else 0
    masked = groups.rewards.where(groups.valid, float("-inf"))
    best = masked.new_full((num_groups,), float("-inf")).scatter_reduce(0, index, masked, "amax")
    ties = groups.valid & (masked == best[index])
    position = torch.arange(len(index), device=index.device)
    places = torch.where(ties, position, len(index))
    first = position.new_full((num_groups,), len(index)).scatter_reduce(0, index, places, "amin")
    trains = groups.valid & (position == first[index])
    return Advantages(
        trains.to(groups.rewards.dtype), groups.rewards.new_zeros(len(trains)), trains
    )


def rloo(rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None) -> Tensor:
    """Compute `leave_one_out` advantages [N] from plain tensors; 0 where invalid.

    Takes the arguments and raises the errors of `RewardGroups.of`.
    """
    return leave_one_out(RewardGroups.of(rewards, group_ids, valid)).values


def returns_to_go(token_rewards: Tensor, mask: Tensor, discount: float = 1.0) -> Tensor:
    """Compute sum_{s >= t} discount^(s - t) reward_s: [N, T], 0 outside the mask.

    `token_rewards` is [N, T], `mask` bool [N, T]. A token cannot change earlier rewards, so
    omitting them is unbiased if discount is 1 (Williams 1992; Schulman et al. 2015,
    arXiv:1506.02438); below 1 it is biased. s - t counts tokens within the mask; rewards outside it
    are ignored.
    """
    rewards = token_rewards.where(mask, 0.0)
    if discount == 1.0:
        later = rewards.flip(-1).cumsum(-1).flip(-1)
    else:
        later = rewards.new_zeros(rewards.shape)
        running = rewards.new_zeros(len(rewards))
        for t in range(rewards.shape[1] - 1, -1, -1):
            # Tokens that an environment wrote are no steps of the policy.
            running = (rewards[:, t] + discount * running).where(mask[:, t], running)
            later[:, t] = running
    return later.where(mask, 0.0)


def token_credit(
    terminal: Tensor, baseline: Tensor, token_penalty: Tensor, mask: Tensor, discount: float = 1.0
) -> Tensor:
    """Compute return-to-go of reward and KL less a baseline: [N, T], 0 outside the mask.

    `terminal` [N] is the reward of the last token, `baseline` [N] is subtracted at every token,
    undiscounted, and `token_penalty` [N, T] is beta times each token's KL.
    """
    is_last = mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))
    rewards = terminal[:, None].where(is_last, 0.0) - token_penalty.where(mask, 0.0)
    return (returns_to_go(rewards, mask, discount) - baseline[:, None]).where(mask, 0.0)


def turn_starts(mask: Tensor) -> Tensor:
    """Return the first token of each run of the policy's tokens: bool [N, T] to bool [N, T]."""
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    return starts


def turn_credit(groups: RewardGroups, turn_rewards: Tensor, mask: Tensor) -> Tensor:
    """Compute each turn's return less the others' mean return from the same turn: [N, T].

    The return of a turn is the episode's reward less those of earlier turns, so the last turn has
    all that no turn has given. Others that ended earlier have a return of 0. 0 outside the mask.
    Unbiased: neither the earlier rewards nor the other samples depend on the turn's tokens.

    Args:
        groups: rewards of N whole episodes.
        turn_rewards: [N, T], what single tokens have given of it, less the KL if it is in the
            reward.
        mask: bool [N, T], the policy's tokens; each run of them is a turn.
    """
    starts = turn_starts(mask)
    turn_of = starts.cumsum(-1) - 1
    credit = turn_rewards.new_zeros(turn_rewards.shape)
    for turn in range(int(starts.sum(-1).max()) if len(mask) else 0):
        is_turn = mask & (turn_of == turn)
        # `turn_of` is also of the environment's tokens, which follow their turn.
        earlier = turn_rewards.where(turn_of < turn, 0.0).sum(-1)
        has_turn = is_turn.any(-1) & groups.valid
        returns = (groups.rewards - earlier).where(has_turn, 0.0)
        values = leave_one_out(replace(groups, rewards=returns)).values
        credit = values[:, None].where(is_turn, credit)
    return credit


def assign_credit(
    advantages: Advantages,
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
        advantages: of the rewards, less beta times the KL if `kl_placement` is `reward`.
        rewards, kl: [N]; the rewards shaped, without the KL.
        token_kl, mask: [N, T] and bool [N, T]; the KL is 0 outside the mask. With `loss` it enters
            no advantage.
        discount: gamma of `returns_to_go`; only with `token`.
    """
    if assignment == "sequence":
        values = advantages.values - beta * kl if kl_placement == "advantage" else advantages.values
        return values[:, None].where(mask, 0.0)
    charged = 0.0 * token_kl if kl_placement == "loss" else beta * token_kl
    if kl_placement == "reward":
        # The estimator already includes the KL of whole responses. Here each token is charged its
        # own KL, so only the baseline is taken from the estimator.
        return token_credit(rewards, advantages.baseline, charged, mask, discount)
    return token_credit(
        advantages.values,
        advantages.values.new_zeros(len(advantages.values)),
        charged,
        mask,
        discount,
    )


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    unit: str = "token",
    total: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:
    """Return (A - mean) / sqrt(variance + 1e-8) over the batch: REINFORCE++ (Hu 2025, 2501.03262).

    By token, each of weight 1, as in verl and OpenRLHF, or by `sequence`, each of weight 1 shared
    by its tokens. Biased: the scale depends on the samples. From [N, T] and bool [N, T] to [N, T],
    0 outside the mask; all 0 with fewer than two units or without variance. `total` sums a float64
    tensor over the ranks that hold the batch.
    """
    import torch

    units = mask.double()
    weights = units
    if unit == "sequence":
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1)
        units = mask.any(-1).double()
    exact = values.where(mask, 0.0).double()
    count, sum_of_values = total(torch.stack((units.sum(), (weights * exact).sum()))).cpu()
    mean = sum_of_values / count.clamp(min=1)
    (squares,) = total((weights * (exact - mean) ** 2).sum()[None]).cpu()
    variance = squares / (count - 1).clamp(min=1)
    # A single response cannot be compared with others, even if its tokens differ.
    counted = mask & (count.item() > 1)
    return torch.where(counted, (exact - mean) * (variance + VARIANCE_EPSILON).rsqrt(), 0.0).to(
        values.dtype
    )
