"""Mean and deviation of numbers that come in parts: step after step, or rank by rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass
class RunningMoments:
    """Of everything seen so far; its fields are its whole state.

    Attributes:
        count: numbers seen.
        mean: of them; 0 before the first.
        squares: sum of their squared distances from the mean.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Tensor) -> RunningMoments:
        """Of the numbers of a tensor."""
        if values.numel() == 0:
            return cls()
        exact = values.double()
        mean = exact.mean()
        return cls(float(values.numel()), float(mean), float((exact - mean).square().sum()))

    @property
    def deviation(self) -> float:
        """With count - 1 in the denominator; 0 before the second number."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def merge(self, other: RunningMoments) -> None:
        """Add what another has seen (Chan et al. 1979): no large sums are cancelled."""
        total = self.count + other.count
        if not total:
            return
        shift = other.mean - self.mean
        self.squares += other.squares + shift * shift * self.count * other.count / total
        self.mean += shift * other.count / total
        self.count = total

    def decay(self, factor: float) -> None:
        """Let each number seen so far count `factor` times as much as before."""
        self.count *= factor
        self.squares *= factor

    def update(self, values: Tensor) -> None:
        """Add the numbers of a tensor."""
        self.merge(RunningMoments.of(values))
