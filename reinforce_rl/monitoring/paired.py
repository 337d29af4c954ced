"""Is a difference real? Student's t-test over prompts or seeds, and the smallest gain that it can show."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from reinforce_rl.monitoring.records import RolloutRow

LEVEL, POWER = 0.05, 0.8
REWARD: Callable[[RolloutRow], float] = attrgetter("reward")
_ROUNDING = 1e-6  # of the values: differences that spread less are equal
_NORMAL = 1000  # degrees of freedom above which Student's t is the normal distribution
_TERMS = 100  # pairs of terms of the continued fraction


@dataclass(frozen=True)
class Difference:
    """Two sides' means over units, prompts or seeds; what is unknown is NaN."""

    n: int  # units: pairs, or those of the first side
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
        """Return the true difference that the test finds with a chance of about `POWER`.

        (t_0.975 + t_0.8) x standard error: Bloom 1995, Evaluation Review 19(5), 547-556.
        """
        return _multiplier(self.degrees) * self._error

    @property
    def needed(self) -> float:
        """Return for how many units, of both sides together, this difference would be the smallest gain."""
        size, more = self.mean_difference / self._error, 1.0
        for _ in range(30 if size else 0):
            # `more` times the units have 1 / sqrt(more) of the error; the outer root keeps the steps from swinging
            more = max(1.0, math.sqrt(more) * abs(_multiplier(more * (self.degrees + 1) - 1) / size))
        return (self.n + self.unpaired) * more if size else math.inf

    def change(self, form: str = ".3f") -> str:
        error = f" ± {self.standard_error:{form}}" if math.isfinite(self.standard_error) else ""
        return f"{self.mean_difference:+{form}}{error}" if self.n else "-"

    def sentence(self, form: str = ".3f") -> str:
        """Say what changed, on what, whether that is noise, and what this many units can show."""
        one, n, m = self.unit, self.n, self.unpaired
        if not n:
            return f"no {one} was scored on both sides"
        where = f"over {n} and {m} {one}s" if m else f"on the same {n} {one}s" if n > 1 else f"on one {one}"
        text = f"{self.mean_before:{form}} -> {self.mean_after:{form}}: {self.change(form)} {where}"
        left = f"; {self.left_out} left out, not scored on both sides" if self.left_out else ""
        if math.isnan(self.standard_error):
            return f"{text}: this says nothing about other {one}s{left}"
        if not self.standard_error:
            return f"{text}: all differences are equal, so there is no spread to test them by{left}"
        can = f"this many {one}s can detect gains of {self.smallest_gain:{form}} or more"
        if self.p < LEVEL:
            kind = "gain" if self.mean_difference > 0 else "loss"
            return f"{text} ({chance(self.p)}): a real {kind} at the 5 % level; {can}{left}"
        about = f"about {float(f'{math.ceil(self.needed):.2g}'):,.0f}" if self.needed < 1e6 else "more than a million"
        can += f"; detecting {abs(self.mean_difference):{form}} needs {about}{' in all' if m else ''}"
        return f"{text} ({chance(self.p)}): indistinguishable from noise; {can}{left}"


def chance(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def compare_validation(
    before: Sequence[RolloutRow], after: Sequence[RolloutRow], value: Callable[[RolloutRow], float] = REWARD
) -> Difference:
    """Compare two validations by prompt; samples of a prompt count as their mean."""
    return paired(by_prompt(before, value), by_prompt(after, value))


def by_prompt(rows: Sequence[RolloutRow], value: Callable[[RolloutRow], float] = REWARD) -> dict[int, float]:
    """Return the mean of each prompt's samples, NaN if one of them has no value."""
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row.prompt_id, []).append(value(row))
    return {key: statistics.fmean(one) if all(map(math.isfinite, one)) else math.nan for key, one in groups.items()}


def paired(before: Mapping[Any, float], after: Mapping[Any, float], unit: str = "prompt") -> Difference:
    """Compare the units that have a value on both sides; NaN is none."""
    pairs = {key: (before[key], after[key]) for key in before if math.isfinite(before[key] - after.get(key, math.nan))}
    n, left_out = len(pairs), len((before.keys() | after.keys()) - pairs.keys())
    if not n:
        return Difference(0, math.nan, math.nan, left_out=left_out, unit=unit)
    old, new = map(statistics.fmean, zip(*pairs.values(), strict=True))
    spread = statistics.stdev(b - a for a, b in pairs.values()) if n > 1 else math.nan
    if spread <= _ROUNDING * max(abs(value) for pair in pairs.values() for value in pair):
        spread = 0.0
    return Difference(n, old, new, spread / math.sqrt(n), n - 1 or math.nan, left_out, unit=unit)


def unpaired(before: Sequence[float], after: Sequence[float], unit: str = "seed") -> Difference:
    """Compare sides whose units are no pairs, by Welch's t-test; NaN is no value."""
    first, last = ([value for value in side if math.isfinite(value)] for side in (before, after))
    n, m, left_out = len(first), len(last), len(before) + len(after) - len(first) - len(last)
    if not n or not m:
        return Difference(0, math.nan, math.nan, left_out=left_out, unit=unit)
    v, w = (statistics.variance(side) / len(side) if len(side) > 1 else math.nan for side in (first, last))
    degrees = (v + w) ** 2 / (v**2 / (n - 1) + w**2 / (m - 1)) if v + w > 0 else math.nan
    return Difference(n, statistics.fmean(first), statistics.fmean(last), math.sqrt(v + w), degrees, left_out, m, unit)


def two_sided_p(t: float, degrees: float) -> float:
    """Return the chance that Student's T is at least as far from 0 as `t`."""
    if degrees > _NORMAL:
        return math.erfc(abs(t) / math.sqrt(2))
    return _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)


@functools.lru_cache(4096)
def quantile(share: float, degrees: float) -> float:
    """Return the t below which Student's T stays with a chance of `share`, at least 0.5."""
    low, high = 0.0, 1.0
    while two_sided_p(high, degrees) > 2 * (1 - share):
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, degrees) > 2 * (1 - share) else (low, middle)
    return high


def _multiplier(degrees: float) -> float:
    return quantile(1 - LEVEL / 2, degrees) + quantile(POWER, degrees)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function, by https://dlmf.nist.gov/8.17.E22 from its last term on."""
    if x <= 0:
        return 0.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    found = 1.0
    for m in range(_TERMS, 0, -1):
        found = 1 + m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)) / found
        found = 1 - (a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1)) / found
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(scale) / a / found
