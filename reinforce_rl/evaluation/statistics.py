"""Means with their errors, pass@k and win rates. Numbers in, numbers out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Z_95 = statistics.NormalDist().inv_cdf(0.975)


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
    found = [[value for value in group if math.isfinite(value)] for group in groups.values()]
    found = [group for group in found if group]
    count = sum(map(len, found))
    if not count:
        return Estimate(math.nan, math.nan, 0)
    mean = math.fsum(value for group in found for value in group) / count
    if len(found) < 2:
        return Estimate(mean, math.nan, count)
    squares = math.fsum(math.fsum(value - mean for value in group) ** 2 for group in found)
    return Estimate(mean, math.sqrt(squares * len(found) / (len(found) - 1)) / count, count)


def pass_at_k(groups: Mapping[int, Sequence[float]], k: int) -> Estimate:
    """Return the chance that at least one of k samples of a prompt is right, from n >= k samples of 0 or 1 each.

    Unbiased: 1 - C(n - c, k) / C(n, k) with c right ones (Chen et al. 2021, arXiv:2107.03374). Prompts with fewer
    than k scored samples are left out.
    """
    chances = {}
    for prompt, group in groups.items():
        values = [value for value in group if math.isfinite(value)]
        if len(values) >= k:
            wrong = values.count(0.0)
            chances[prompt] = [1.0 - math.comb(wrong, k) / math.comb(len(values), k)]
    return estimate(chances)


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
        centre, square = p + Z_95**2 / (2 * n), Z_95**2 / n
        half = Z_95 * math.sqrt(p * (1 - p) / n + square / (4 * n))
        return max(0.0, (centre - half) / (1 + square)), min(1.0, (centre + half) / (1 + square))

    @classmethod
    def of(cls, preferences: Sequence[float], failed: int = 0) -> WinRate:
        """Count preferences: 1 a win, 0.5 a tie, 0 a loss."""
        wins, losses = preferences.count(1.0), preferences.count(0.0)
        return cls(wins, len(preferences) - wins - losses, losses, failed)
