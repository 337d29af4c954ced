"""Baselines and advantages of sampled sequences, chosen by name in the configuration.

Notation: N samples of any number of groups; the samples of a group answer one prompt. r = reward of a sequence, KL
included where it is part of the reward. Everything here is detached: an advantage weighs a gradient, it does not carry
one. Samples that are not valid are out of every sum and every count; their rewards may hold anything, NaN included.

To add an estimator, decorate a function of a `RewardGroups` with `@estimator` (CONTRIBUTING.md). The configuration is
checked against `ADVANTAGE_ESTIMATORS` before torch is loaded, so functions here use the methods of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_REWARD = 1e6  # above it float32 cannot tell the rewards of a group apart
# What GRPO adds to a standard deviation, as in TRL. Rewards that differ by rounding alone have a deviation of about
# 1e-7, which this leaves without effect.
EPSILON = 1e-4


@dataclass(frozen=True)
class RewardGroups:
    """The rewards of a global batch.

    Attributes:
        rewards: [N], any floating type.
        group_ids: [N], any integers; equal within a group. Ids, never tokens: two equal prompts are two groups.
        valid: bool [N].
        past_mean: mean reward of past steps' valid samples; 0 before the first. See `PastSteps.reward_mean`.
    """

    rewards: Tensor
    group_ids: Tensor
    valid: Tensor
    past_mean: float = 0.0

    @classmethod
    def of(
        cls, rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None, past_mean: float = 0.0
    ) -> RewardGroups:
        """Check the inputs and detach them. `valid` None means all are.

        Raises:
            ValueError: shapes that do not fit, ids that are no integers, or a valid reward that is not finite or
                beyond `MAX_REWARD`.
        """
        import torch

        shapes = {"rewards": rewards.shape, "group_ids": group_ids.shape}
        if valid is not None:
            shapes["valid"] = valid.shape
        if len(set(shapes.values())) > 1 or rewards.dim() != 1:
            raise ValueError(
                f"expected 1-D tensors of one length, found { ({k: tuple(v) for k, v in shapes.items()}) }"
            )
        if group_ids.is_floating_point():
            raise ValueError(f"group_ids must be integers, found {group_ids.dtype}")
        if valid is not None and valid.dtype != torch.bool:
            raise ValueError(f"valid must be a bool mask, found {valid.dtype}")
        rewards = rewards.detach()
        if not rewards.is_floating_point():
            rewards = rewards.to(torch.get_default_dtype())
        if valid is None:
            valid = torch.ones_like(rewards, dtype=torch.bool)
        used = rewards[valid]
        if used.numel() and not bool((used.abs() <= MAX_REWARD).all()):
            raise ValueError(f"a valid reward is not finite or beyond {MAX_REWARD:g} in size; scale or clip rewards")
        return cls(rewards.where(valid, 0.0), group_ids, valid, past_mean)

    def group_index(self) -> Tensor:
        """int64 [N], groups numbered from 0."""
        return self.group_ids.unique(return_inverse=True)[1]

    def sum_by_group(self, values: Tensor) -> Tensor:
        """For each sample, the sum of `values` [N] over the valid samples of its group: [N]."""
        index = self.group_index()
        totals = values.new_zeros(int(index.max()) + 1 if index.numel() else 0)
        return totals.index_add(0, index, values.where(self.valid, 0.0))[index]

    def count_by_group(self) -> Tensor:
        """For each sample, how many valid samples its group has: [N] in the dtype of the rewards."""
        return self.sum_by_group(self.rewards.new_ones(self.rewards.shape))

    def mean_by_group(self) -> Tensor:
        """For each sample, the mean reward of its group's valid samples, itself included: [N]; 0 where none is."""
        counts = self.count_by_group().clamp(min=1)
        means = self.sum_by_group(self.rewards) / counts
        # A second pass over the deviations takes out the rounding of the first, which large equal rewards would show.
        return means + self.sum_by_group(self.rewards - means) / counts

    def mean(self) -> Tensor:
        """The mean reward of all valid samples: scalar; 0 where none is."""
        count = self.valid.sum().clamp(min=1)
        mean = self.rewards.sum() / count
        return mean + (self.rewards - mean).where(self.valid, 0.0).sum() / count

    def advantages(self, baseline: Tensor | float, scale: Tensor | float = 1.0) -> Advantages:
        """(reward - baseline) * scale of the valid samples, which all train; each is [N] or one number."""
        values = ((self.rewards - baseline) * scale).where(self.valid, 0.0)
        baselines = (self.rewards.new_zeros(self.rewards.shape) + baseline).where(self.valid, 0.0)
        return Advantages(values, baselines, self.valid)


@dataclass(frozen=True)
class Advantages:
    """What an estimator gives.

    Attributes:
        values: [N], without gradient; 0 where a sample does not train.
        baseline: [N], what was subtracted from the reward, before any division; 0 where there is none.
        trains: bool [N], the samples that the loss is averaged over.
    """

    values: Tensor
    baseline: Tensor
    trains: Tensor

    def select(self, rows: slice) -> Advantages:
        """Those of some samples."""
        return Advantages(self.values[rows], self.baseline[rows], self.trains[rows])


Estimator = Callable[[RewardGroups], Advantages]


@dataclass(frozen=True)
class EstimatorEntry:
    """An estimator of advantages.

    Attributes:
        function: computes them.
        compares_samples: it compares the samples of one prompt with each other, so it needs at least two.
        only_subtracts: an advantage is the reward less a baseline, neither divided nor chosen.
    """

    function: Estimator
    compares_samples: bool
    only_subtracts: bool


ADVANTAGE_ESTIMATORS: dict[str, EstimatorEntry] = {}


def estimator(*names: str, compares_samples: bool, only_subtracts: bool = True) -> Callable[[Estimator], Estimator]:
    """Enter a function under names that `trainer.reinforce.advantage_estimator` can choose; see `EstimatorEntry`."""

    def enter(function: Estimator) -> Estimator:
        for name in names:
            ADVANTAGE_ESTIMATORS[name] = EstimatorEntry(function, compares_samples, only_subtracts)
        return function

    return enter


@estimator("none", compares_samples=False)
def no_baseline(groups: RewardGroups) -> Advantages:
    """A = r: vanilla REINFORCE (Williams 1992). Unbiased; its variance grows with the rewards' mean."""
    return groups.advantages(0.0)


@estimator("running_mean", "moving_average", "exponential_moving_average", compares_samples=False)
def past_mean(groups: RewardGroups) -> Advantages:
    """A = r minus a mean reward of past steps (Williams 1992; "REINFORCE with baseline" in arXiv:2402.14740).

    Of all steps, of the last ones, or of all with exponentially decaying weights; `PastSteps` says which. Unbiased,
    since the past does not depend on this step's samples.
    """
    return groups.advantages(groups.past_mean)


@estimator("batch_mean", compares_samples=False)
def batch_mean(groups: RewardGroups) -> Advantages:
    """A = r minus the mean of the batch, itself included: the expected gradient is (N-1)/N of the true one."""
    return groups.advantages(groups.mean())


@estimator("prompt_mean", compares_samples=True)
def prompt_mean(groups: RewardGroups) -> Advantages:
    """A = r minus the mean of the group, itself included: (G-1)/G of RLOO (Dr. GRPO, Liu et al. 2025, 2503.20783)."""
    return groups.advantages(groups.mean_by_group())


@estimator("rloo", compares_samples=True)
def leave_one_out(groups: RewardGroups) -> Advantages:
    """RLOO: A = r minus the mean of the other samples of the group, which is G/(G-1) (r - mean). Unbiased.

    Source: Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for Free!" (2019); Ahmadian et al., "Back to Basics"
    (arXiv:2402.14740), equation 8. A valid sample without a valid neighbour has nothing to be compared with: its own
    reward is its baseline, and A = 0.
    """
    means = groups.mean_by_group()
    # mean of the others = mean + (mean - r) / (G - 1): no sum of large rewards is taken and cancelled.
    others = (groups.count_by_group() - 1).clamp(min=1)
    return groups.advantages(means + (means - groups.rewards) / others)


@estimator("grpo", compares_samples=True, only_subtracts=False)
def group_normalised(groups: RewardGroups) -> Advantages:
    """GRPO: A = (r - mean of the group) / (standard deviation of the group + 1e-4) (Shao et al. 2024, 2402.03300).

    The deviation has G-1 in its denominator, as TRL's and verl's. Biased: groups that differ little weigh as much as
    groups that differ a lot. A group of one, or of equal rewards, has A = 0.
    """
    means = groups.mean_by_group()
    degrees = (groups.count_by_group() - 1).clamp(min=1)
    variance = groups.sum_by_group((groups.rewards - means) ** 2) / degrees
    return groups.advantages(means, 1.0 / (variance.sqrt() + EPSILON))


@estimator("raft", compares_samples=True, only_subtracts=False)
def best_of_group(groups: RewardGroups) -> Advantages:
    """RAFT: the best sample of each group trains, with A = 1, and no other (Dong et al. 2023, 2304.06767).

    Of equally good ones the first is taken. The loss is then the mean over groups of -log pi(best).
    """
    import torch

    index = groups.group_index()
    num_groups = int(index.max()) + 1 if index.numel() else 0
    masked = groups.rewards.where(groups.valid, float("-inf"))
    best = masked.new_full((num_groups,), float("-inf")).scatter_reduce(0, index, masked, "amax")
    ties = groups.valid & (masked == best[index])
    position = torch.arange(len(index), device=index.device)
    first = position.new_full((num_groups,), len(index)).scatter_reduce(
        0, index, torch.where(ties, position, len(index)), "amin"
    )
    trains = groups.valid & (position == first[index])
    return Advantages(trains.to(groups.rewards.dtype), groups.rewards.new_zeros(len(trains)), trains)


def rloo(rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None) -> Tensor:
    """Leave-one-out advantages of plain tensors; see `leave_one_out`.

    Args:
        rewards: [N], any floating type.
        group_ids: [N], any integers; equal within a group.
        valid: bool [N]; None means all are valid.

    Returns:
        [N], without gradient; 0 where not valid.
    """
    return leave_one_out(RewardGroups.of(rewards, group_ids, valid)).values
