"""Means with their errors, pass@k and win rates. Numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Z_95 = 1.959964  # of the normal distribution, two-sided


@dataclass(frozen=True)
class Estimate:
    mean: float  # over all values; NaN without any
    standard_error: float  # NaN below two groups
    count: int  # values


def estimate(groups: Mapping[int, Sequence[float]]) -> Estimate:
    """Return the mean over all finite values, with its standard error where only groups are independent.

    The values of a group, such as samples of one prompt, may depend on each other in any way. With one value in each
    group the error is the usual deviation / sqrt(n).
    """
    found = [group for values in groups.values() if (group := [value for value in values if math.isfinite(value)])]
    count = sum(map(len, found))
    if not count:
        return Estimate(math.nan, math.nan, 0)
    mean = math.fsum(value for group in found for value in group) / count
    squares = math.fsum(math.fsum(value - mean for value in group) ** 2 for group in found)
    factor = len(found) / (len(found) - 1) if len(found) > 1 else math.nan
    return Estimate(mean, math.sqrt(squares * factor) / count, count)


def pass_at_k(groups: Mapping[int, Sequence[float]], k: int) -> Estimate:
    """Return the chance that one of k samples of a prompt is right, from n >= k scored samples of 0 or 1 each.

    Unbiased: 1 - C(n - c, k) / C(n, k) with c right ones (Chen et al. 2021, arXiv:2107.03374). Prompts with fewer
    than k scored samples are left out.
    """
    scored = {prompt: [value for value in group if math.isfinite(value)] for prompt, group in groups.items()}
    return estimate(
        {
            prompt: [1.0 - math.comb(group.count(0.0), k) / math.comb(len(group), k)]
            for prompt, group in scored.items()
            if len(group) >= k
        }
    )


@dataclass(frozen=True)
class WinRate:
    wins: int
    ties: int
    losses: int
    failed: int = 0  # comparisons that could not be made, which do not count

    @property
    def count(self) -> int:
        return self.wins + self.ties + self.losses

    @property
    def rate(self) -> float:
        """Share of wins, ties counted half; NaN without comparisons."""
        return (self.wins + 0.5 * self.ties) / self.count if self.count else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval of 95 % around the rate. Ties make the true one narrower."""
        n, p = self.count, self.rate
        if not n:
            return math.nan, math.nan
        shrink = 1 + Z_95**2 / n
        centre = (p + Z_95**2 / (2 * n)) / shrink
        half = Z_95 * math.sqrt(p * (1 - p) / n + Z_95**2 / (4 * n * n)) / shrink
        return max(0.0, centre - half), min(1.0, centre + half)

    @classmethod
    def of(cls, preferences: Sequence[float], failed: int = 0) -> WinRate:
        """Count preferences: 1 a win, 0.5 a tie, 0 a loss."""
        wins, losses = preferences.count(1.0), preferences.count(0.0)
        return cls(wins, len(preferences) - wins - losses, losses, failed)
