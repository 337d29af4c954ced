"""Did validation rewards rise? The paired comparison of two validations of the same prompts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from reinforce_rl.monitoring.rollouts import RolloutRow


@dataclass(frozen=True)
class PairedComparison:
    """Rewards of the same prompts before and after.

    Attributes:
        n: prompts compared.
        mean_before: mean reward of these prompts before; NaN when n is 0.
        mean_after: the same, after.
        mean_difference: after minus before.
        standard_error: of `mean_difference`, from the spread of the n differences; NaN when n < 2.
        z: `mean_difference / standard_error`; infinite where all differences are equal and not 0, NaN where undefined.
    """

    n: int
    mean_before: float
    mean_after: float
    mean_difference: float
    standard_error: float
    z: float

    def __str__(self) -> str:
        if self.n == 0:
            return "no prompt was scored both before and after"
        head = f"{self.mean_before:.3f} -> {self.mean_after:.3f}, {self.mean_difference:+.3f}"
        if math.isnan(self.standard_error):
            return f"{head} (1 prompt)"
        return f"{head} ± {self.standard_error:.3f} ({self.z:.1f} standard errors, {self.n} prompts)"


def compare_validation(before: Sequence[RolloutRow], after: Sequence[RolloutRow]) -> PairedComparison:
    """Pair two validations by `prompt_id` and compare their rewards.

    A prompt with several samples counts once, by their mean. A prompt that is absent on one side, or has a failed
    reward (NaN) on either side, is left out of both.
    """
    first, last = rewards_by_prompt(before), rewards_by_prompt(after)
    shared = sorted(first.keys() & last.keys())
    n = len(shared)
    if n == 0:
        return PairedComparison(0, *[math.nan] * 5)
    differences = [last[prompt] - first[prompt] for prompt in shared]
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(n) if n > 1 else math.nan
    z = mean / error if error else math.copysign(math.inf, mean) if mean else math.nan
    return PairedComparison(
        n=n,
        mean_before=statistics.fmean(first[prompt] for prompt in shared),
        mean_after=statistics.fmean(last[prompt] for prompt in shared),
        mean_difference=mean,
        standard_error=error,
        z=z,
    )


def rewards_by_prompt(rows: Sequence[RolloutRow]) -> dict[int, float]:
    """Mean reward of each prompt; a prompt with a failed reward is absent."""
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row.prompt_id, []).append(row.reward)
    return {
        prompt: statistics.fmean(rewards) for prompt, rewards in groups.items() if all(map(math.isfinite, rewards))
    }
