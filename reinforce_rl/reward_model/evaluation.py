"""How good a reward model is on held-out data: accuracy and calibration of pairs, errors and correlations of ratings.

Notation: P pairs, N sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reinforce_rl.errors import DataError

NUM_BINS = 10


@dataclass(frozen=True)
class Accuracy:
    """Share of pairs that are ordered rightly; a tie counts half.

    Attributes:
        value: between 0 and 1.
        standard_error: of the mean over pairs.
        count: pairs.
    """

    value: float
    standard_error: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.3f}±{self.standard_error:.3f}"


def pair_accuracy(chosen: Tensor, rejected: Tensor) -> Accuracy:
    """How often the chosen answer's score, [P], is above the rejected one's."""
    if not len(chosen):
        raise DataError("no pair to measure accuracy on")
    hits = _hits(chosen, rejected)
    value, count = float(hits.mean()), len(hits)
    return Accuracy(value, math.sqrt(float(((hits - value) ** 2).mean()) / count), count)


@dataclass(frozen=True)
class ReliabilityBin:
    """Pairs whose predictions are alike.

    Attributes:
        low, high: of the predicted probability.
        count: pairs.
        predicted: their mean predicted probability that the answer with the higher score is the preferred one.
        observed: how often it is.
    """

    low: float
    high: float
    count: int
    predicted: float
    observed: float


@dataclass(frozen=True)
class Calibration:
    """What a difference of scores, read as log-odds, is worth as a prediction.

    Attributes:
        error: the expected calibration error (arXiv:1706.04599): the mean of |predicted - observed| over the bins,
            weighted by their pairs.
        bins: those that hold a pair.
    """

    error: float
    bins: tuple[ReliabilityBin, ...]


def calibration(chosen: Tensor, rejected: Tensor, num_bins: int = NUM_BINS) -> Calibration:
    """Predicted against observed preferences, in bins of equal width from 0.5 to 1.

    Args:
        chosen, rejected: scores [P].
        num_bins: at least 1.
    """
    predicted = torch.sigmoid((chosen.double() - rejected.double()).abs())
    hits = _hits(chosen, rejected)
    number = ((predicted - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    bins = []
    for i in range(num_bins):
        rows = number == i
        if rows.any():
            edges = (0.5 + 0.5 * i / num_bins, 0.5 + 0.5 * (i + 1) / num_bins)
            bins.append(
                ReliabilityBin(*edges, int(rows.sum()), float(predicted[rows].mean()), float(hits[rows].mean()))
            )
    error = sum(b.count * abs(b.predicted - b.observed) for b in bins) / max(len(hits), 1)
    return Calibration(error, tuple(bins))


@dataclass(frozen=True)
class AttributeFit:
    """How predictions of one attribute agree with its ratings.

    Attributes:
        mse: mean squared error; NaN where no rating is given.
        pearson, spearman: correlations of values and of ranks; NaN where one side does not vary.
        count: ratings that are given.
    """

    mse: float
    pearson: float
    spearman: float
    count: int


def attribute_fit(predicted: Tensor, targets: Tensor) -> AttributeFit:
    """Of one attribute.

    Args:
        predicted: [N].
        targets: [N]; NaN where none is given.
    """
    given = ~targets.isnan()
    x, y = predicted[given].double(), targets[given].double()
    mse = float((x - y).square().mean())
    return AttributeFit(mse, correlation(x, y), correlation(ranks(x), ranks(y)), len(x))


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's, of float64 [N] twice."""
    if len(x) < 2 or (x == x[0]).all() or (y == y[0]).all():
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x.norm() * y.norm()))


def ranks(values: Tensor) -> Tensor:
    """float64 [N], from 1; equal values share the mean of their ranks."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[inverse]


def _hits(chosen: Tensor, rejected: Tensor) -> Tensor:
    return (chosen > rejected).double() + 0.5 * (chosen == rejected).double()
