"""Means with their errors, Student's t-tests over prompts or seeds, pass@k and win rates.

Functions take and return numbers. scipy is imported where it is used: a run starts without it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEVEL = 0.05  # of significance
POWER = 0.8
_ROUNDING = 1e-6  # relative to the values; differences that spread less are equal


def finite_mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values; NaN without any."""
    finite = [float(value) for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


@dataclass(frozen=True)
class Estimate:
    mean: float  # over all values; NaN without any
    standard_error: float  # NaN below two groups
    count: int  # values


def estimate(groups: Mapping[int, Sequence[float]]) -> Estimate:
    """Return the mean over all finite values, with its standard error over independent groups.

    The values of a group, such as samples of one prompt, may depend on each other in any way. With
    one value in each group the error is the usual deviation / sqrt(n).
    """
    finite_groups = []
    for group in groups.values():
        values = [value for value in group if math.isfinite(value)]
        if values:
            finite_groups.append(values)
    count = sum(len(values) for values in finite_groups)
    if not count:
        return Estimate(math.nan, math.nan, 0)
    mean = math.fsum(value for values in finite_groups for value in values) / count
    squares = math.fsum(
        math.fsum(value - mean for value in values) ** 2 for values in finite_groups
    )
    group_count = len(finite_groups)
    factor = group_count / (group_count - 1) if group_count > 1 else math.nan
    return Estimate(mean, math.sqrt(squares * factor) / count, count)


def pass_at_k(groups: Mapping[int, Sequence[float]], k: int) -> Estimate:
    """Return the probability that one of k samples of a prompt is right.

    Each prompt needs n >= k scored samples of 0 or 1; prompts with fewer are left out.

    Unbiased: 1 - C(n - c, k) / C(n, k) with c right samples (Chen et al. 2021, arXiv:2107.03374).
    """
    chances = {}
    for prompt, group in groups.items():
        scored = [value for value in group if math.isfinite(value)]
        if len(scored) >= k:
            all_wrong = math.comb(scored.count(0.0), k) / math.comb(len(scored), k)
            chances[prompt] = [1.0 - all_wrong]
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
        """Wilson's 95 % interval of the rate. With ties the true interval is narrower.

        Wilson 1927, Journal of the American Statistical Association 22(158), 209-212.
        """
        from scipy.special import ndtri

        n = self.count
        if not n:
            return math.nan, math.nan
        rate = self.rate
        z = float(ndtri(1 - LEVEL / 2))
        shrink = 1 + z**2 / n
        centre = (rate + z**2 / (2 * n)) / shrink
        half = z * math.sqrt(rate * (1 - rate) / n + z**2 / (4 * n * n)) / shrink
        return max(0.0, centre - half), min(1.0, centre + half)

    @classmethod
    def of(cls, preferences: Sequence[float], failed: int = 0) -> WinRate:
        """Count preferences: 1 a win, 0.5 a tie, 0 a loss."""
        wins = preferences.count(1.0)
        losses = preferences.count(0.0)
        ties = len(preferences) - wins - losses
        return cls(wins, ties, losses, failed)


@dataclass(frozen=True)
class Difference:
    """Means of two sides over units, which are prompts or seeds; unknown values are NaN."""

    n: int  # units: pairs, or the units of the first side
    mean_before: float
    mean_after: float
    standard_error: float = math.nan  # of mean_difference; 0 if all differences are equal
    degrees: float = math.nan  # of freedom
    left_out: int = 0  # units without a value on both sides
    unpaired: int = 0  # units of the second side; 0 for pairs
    unit: str = "prompt"

    @property
    def mean_difference(self) -> float:
        return self.mean_after - self.mean_before

    @property
    def _error(self) -> float:
        return self.standard_error or math.nan

    @property
    def p(self) -> float:
        """The p-value of the two-sided test."""
        return two_sided_p(self.mean_difference / self._error, self.degrees)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the difference."""
        half = quantile(1 - LEVEL / 2, self.degrees) * self._error
        return self.mean_difference - half, self.mean_difference + half

    @property
    def smallest_gain(self) -> float:
        """The true difference that the test detects with a probability of about `POWER`.

        (t_0.975 + t_0.8) x standard error: Bloom 1995, Evaluation Review 19(5), 547-556.
        """
        return _multiplier(self.degrees) * self._error

    @property
    def needed(self) -> float:
        """How many units, of both sides together, would make this difference the smallest gain."""
        size = self.mean_difference / self._error
        if not size:
            return math.inf
        factor = 1.0
        for _ in range(30):
            # `factor` times the units have 1 / sqrt(factor) of the error. The outer root keeps the
            # steps from oscillating.
            degrees = factor * (self.degrees + 1) - 1
            factor = max(1.0, math.sqrt(factor) * abs(_multiplier(degrees) / size))
        return (self.n + self.unpaired) * factor

    def change(self, form: str = ".3f") -> str:
        if not self.n:
            return "-"
        change = f"{self.mean_difference:+{form}}"
        if math.isfinite(self.standard_error):
            change += f" ± {self.standard_error:{form}}"
        return change

    def sentence(self, form: str = ".3f") -> str:
        """Describe the change, its units, whether it is noise, and what so many units can show."""
        unit = self.unit
        if not self.n:
            return f"no {unit} was scored on both sides"
        means = f"{self.mean_before:{form}} -> {self.mean_after:{form}}"
        change = f"{means}: {self.change(form)} {self._where()}"
        left_out = f"; {self.left_out} left out, not scored on both sides" if self.left_out else ""
        if math.isnan(self.standard_error):
            return f"{change}: this says nothing about other {unit}s{left_out}"
        if not self.standard_error:
            why = "all differences are equal, so there is no spread to test them by"
            return f"{change}: {why}{left_out}"
        can_detect = f"this many {unit}s can detect gains of {self.smallest_gain:{form}} or more"
        if self.p < LEVEL:
            kind = "gain" if self.mean_difference > 0 else "loss"
            verdict = f"a significant {kind} at the 5 % level"
            return f"{change} ({chance(self.p)}): {verdict}; {can_detect}{left_out}"
        needed = "more than a million"
        if self.needed < 1e6:
            needed = f"about {float(f'{math.ceil(self.needed):.2g}'):,.0f}"
        if self.unpaired:
            needed += " in all"
        can_detect += f"; detecting {abs(self.mean_difference):{form}} needs {needed}"
        return f"{change} ({chance(self.p)}): indistinguishable from noise; {can_detect}{left_out}"

    def _where(self) -> str:
        if self.unpaired:
            return f"over {self.n} and {self.unpaired} {self.unit}s"
        if self.n > 1:
            return f"on the same {self.n} {self.unit}s"
        return f"on one {self.unit}"


def chance(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def paired(
    before: Mapping[Any, float], after: Mapping[Any, float], unit: str = "prompt"
) -> Difference:
    """Compare units with a finite value on both sides, by Student's t-test of the differences."""
    pairs = []
    for name, value in before.items():
        if math.isfinite(value - after.get(name, math.nan)):
            pairs.append((value, after[name]))
    n = len(pairs)
    left_out = len(before.keys() | after.keys()) - n
    if not n:
        return Difference(0, math.nan, math.nan, left_out=left_out, unit=unit)
    deviation = math.nan
    if n > 1:
        deviation = statistics.stdev(last - first for first, last in pairs)
    if deviation <= _ROUNDING * max(abs(value) for pair in pairs for value in pair):
        deviation = 0.0
    return Difference(
        n=n,
        mean_before=statistics.fmean(first for first, _ in pairs),
        mean_after=statistics.fmean(last for _, last in pairs),
        standard_error=deviation / math.sqrt(n),
        degrees=n - 1 or math.nan,
        left_out=left_out,
        unit=unit,
    )


def unpaired(before: Sequence[float], after: Sequence[float], unit: str = "seed") -> Difference:
    """Compare sides whose units are not pairs, by Welch's t-test; finite values only."""
    first = [value for value in before if math.isfinite(value)]
    last = [value for value in after if math.isfinite(value)]
    left_out = len(before) + len(after) - len(first) - len(last)
    if not first or not last:
        return Difference(0, math.nan, math.nan, left_out=left_out, unit=unit)
    first_error = _squared_error(first)
    last_error = _squared_error(last)
    squared_error = first_error + last_error
    degrees = math.nan
    if squared_error > 0:
        # Welch and Satterthwaite's degrees of freedom.
        parts = first_error**2 / (len(first) - 1) + last_error**2 / (len(last) - 1)
        degrees = squared_error**2 / parts
    return Difference(
        n=len(first),
        mean_before=statistics.fmean(first),
        mean_after=statistics.fmean(last),
        standard_error=math.sqrt(squared_error),
        degrees=degrees,
        left_out=left_out,
        unpaired=len(last),
        unit=unit,
    )


def _squared_error(values: Sequence[float]) -> float:
    """Return the square of the standard error of the mean; NaN for one value."""
    return statistics.variance(values) / len(values) if len(values) > 1 else math.nan


def two_sided_p(t: float, degrees: float) -> float:
    """Return the probability that Student's T is at least as far from 0 as `t`."""
    from scipy.special import stdtr

    return 2 * float(stdtr(degrees, -abs(t)))


def quantile(share: float, degrees: float) -> float:
    """Return the `share` quantile of Student's T."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, share))


def _multiplier(degrees: float) -> float:
    return quantile(1 - LEVEL / 2, degrees) + quantile(POWER, degrees)
