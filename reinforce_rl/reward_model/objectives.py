"""Reward-model objectives, ranking pairs or predicting ratings, and their held-out metrics.

Losses are sums, so that they add up over ranks and micro-batches. The caller divides them by counts
over the global batch.

Notation: P pairs, N sequences, E examples of a micro-batch, G sequences of an example, K scores of
a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from reinforce_rl.reward_model.data import EncodedPair, EncodedRating

NUM_BINS = 10


@dataclass(frozen=True)
class ReliabilityBin:
    """Pairs with similar predicted probabilities."""

    low: float  # of the predicted probability
    high: float
    count: int  # pairs
    predicted: float  # mean predicted probability that the higher-scored answer is preferred
    observed: float  # share of pairs where it is


@dataclass(frozen=True)
class Evaluation:
    loss: float  # mean training loss; used for early stopping
    metrics: dict[str, float]
    reliability: tuple[ReliabilityBin, ...] = ()  # pairs only


@dataclass(frozen=True)
class Best:
    """The evaluation with the lowest loss so far."""

    step: int
    evaluation: Evaluation


class Ranking:
    """Bradley-Terry loss on pairs."""

    names: tuple[str, ...] = ()  # of the scores; empty for a single one

    def sequences_of(self, example: EncodedPair) -> tuple[tuple[int, ...], ...]:
        """Return the G sequences to score."""
        return example.prompt + example.chosen, example.prompt + example.rejected

    def count(self, examples: Sequence[EncodedPair]) -> int:
        """Return the denominator of the mean loss."""
        return len(examples)

    def loss(
        self, scores: Tensor, examples: Sequence[EncodedPair]
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the summed loss of E examples with scores [E, G, K], and sums of metrics.

        The loss has a gradient.
        """
        chosen = scores[:, 0, 0]
        rejected = scores[:, 1, 0]
        margin = float((chosen - rejected).detach().sum())
        return bradley_terry(chosen, rejected), {
            "accuracy": float(_hits(chosen, rejected).sum()),
            "margin": margin,
        }

    def evaluate(self, scores: Tensor, examples: Sequence[EncodedPair]) -> Evaluation:
        """Evaluate all held-out examples, scores [E, G, K]."""
        chosen = scores[:, 0, 0].double()
        rejected = scores[:, 1, 0].double()
        accuracy = pair_accuracy(chosen, rejected)
        error, bins = calibration(chosen, rejected)
        longer = pair_accuracy(
            *torch.tensor([[len(e.chosen), len(e.rejected)] for e in examples]).t()
        )
        metrics = {
            "accuracy": accuracy.value,
            "accuracy_standard_error": accuracy.standard_error,
            "length_baseline_accuracy": longer.value,
            "calibration_error": error,
            "margin": float((chosen - rejected).mean()),
            "score_mean": float(scores.double().mean()),
            "score_std": float(scores.double().std()),
        }
        return Evaluation(float(bradley_terry(chosen, rejected)) / len(examples), metrics, bins)


class Regression:
    """Mean squared error over the present ratings; `names` are in their order.

    For the methods see `Ranking`.
    """

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)

    def sequences_of(self, example: EncodedRating) -> tuple[tuple[int, ...], ...]:
        return (example.tokens,)

    def count(self, examples: Sequence[EncodedRating]) -> int:
        return sum(not math.isnan(rating) for example in examples for rating in example.ratings)

    def loss(
        self, scores: Tensor, examples: Sequence[EncodedRating]
    ) -> tuple[Tensor, dict[str, float]]:
        return squared_error(scores[:, 0], _targets(examples).to(scores)), {}

    def evaluate(self, scores: Tensor, examples: Sequence[EncodedRating]) -> Evaluation:
        predicted = scores[:, 0].double()
        targets = _targets(examples)
        metrics = {
            f"{measure}_{name}": value
            for i, name in enumerate(self.names)
            for measure, value in attribute_fit(predicted[:, i], targets[:, i]).items()
        }
        return Evaluation(
            float(squared_error(predicted, targets)) / max(self.count(examples), 1), metrics
        )


Objective = Ranking | Regression


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the sum of -log sigmoid(s_chosen - s_rejected), in nats (Bradley and Terry, 1952).

    Scores are [P].
    """
    return F.softplus(rejected - chosen).sum()


def squared_error(predicted: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of (predicted - target)^2 over [N, K].

    NaN targets are ignored and give no gradient.
    """
    given = ~targets.isnan()
    difference = torch.where(given, predicted - targets.nan_to_num(), 0.0)
    return difference.square().sum()


@dataclass(frozen=True)
class Accuracy:
    """Share of correctly ordered pairs, ties counting half, with its standard error."""

    value: float
    standard_error: float

    def __str__(self) -> str:
        return f"{self.value:.3f}±{self.standard_error:.3f}"


def pair_accuracy(chosen: Tensor, rejected: Tensor) -> Accuracy:
    """Compute the accuracy of scores [P]."""
    hits = _hits(chosen, rejected)
    value = float(hits.mean())
    return Accuracy(value, math.sqrt(float(((hits - value) ** 2).mean()) / len(hits)))


def calibration(chosen: Tensor, rejected: Tensor) -> tuple[float, tuple[ReliabilityBin, ...]]:
    """Compare predicted and observed preferences in equal-width bins from 0.5 to 1.

    The prediction is the sigmoid of the absolute difference of the scores [P]. Returns the expected
    calibration error (arXiv:1706.04599), mean |predicted - observed| weighted by the bins' pairs,
    and the bins that are not empty.
    """
    predicted = torch.sigmoid((chosen.double() - rejected.double()).abs())
    hits = _hits(chosen, rejected)
    number = ((predicted - 0.5) * 2 * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    bins = []
    for i in number.unique().tolist():
        rows = number == i
        edges = (0.5 + 0.5 * i / NUM_BINS, 0.5 + 0.5 * (i + 1) / NUM_BINS)
        bins.append(
            ReliabilityBin(
                *edges, int(rows.sum()), float(predicted[rows].mean()), float(hits[rows].mean())
            )
        )
    error = sum(b.count * abs(b.predicted - b.observed) for b in bins) / max(len(hits), 1)
    return error, tuple(bins)


def attribute_fit(predicted: Tensor, targets: Tensor) -> dict[str, float]:
    """Return `mse`, `pearson` and `spearman` of an attribute, from predicted and target [N].

    Missing targets are NaN. `mse` is NaN without a rating; the correlations are NaN if one side is
    constant.
    """
    given = ~targets.isnan()
    x = predicted[given].double()
    y = targets[given].double()
    mse = float((x - y).square().mean())
    return {"mse": mse, "pearson": correlation(x, y), "spearman": correlation(ranks(x), ranks(y))}


def correlation(x: Tensor, y: Tensor) -> float:
    """Return Pearson's correlation of float64 [N]; NaN if one side is constant."""
    if len(x) < 2 or (x == x[0]).all() or (y == y[0]).all():
        return math.nan
    x = x - x.mean()
    y = y - y.mean()
    return float((x @ y) / (x.norm() * y.norm()))


def ranks(values: Tensor) -> Tensor:
    """Return ranks as float64 [N], from 1; ties share their mean rank."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[inverse]


def _hits(chosen: Tensor, rejected: Tensor) -> Tensor:
    return (chosen > rejected).double() + 0.5 * (chosen == rejected).double()


def _targets(examples: Sequence[EncodedRating]) -> Tensor:
    return torch.tensor([example.ratings for example in examples], dtype=torch.float64)
