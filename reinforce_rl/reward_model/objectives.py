"""What a reward model is trained for: to rank pairs, or to predict the ratings of attributes.

Notation: E examples of a micro-batch, G sequences of an example, K scores of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from reinforce_rl.reward_model.evaluation import ReliabilityBin, attribute_fit, calibration, pair_accuracy
from reinforce_rl.reward_model.losses import bradley_terry, squared_error
from reinforce_rl.reward_model.pairs import EncodedPair
from reinforce_rl.reward_model.ratings import EncodedRating

Example = TypeVar("Example", contravariant=True)
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Evaluation:
    """Of held-out examples.

    Attributes:
        loss: the mean that training minimises; early stopping goes by it.
        metrics: everything else, by name.
        reliability: of pairs.
    """

    loss: float
    metrics: dict[str, float]
    reliability: tuple[ReliabilityBin, ...] = field(default=())


class Objective(Protocol[Example]):
    """What differs between ranking and regression.

    Attributes:
        names: of the K scores; none where there is a single one.
        sequences_per_example: G.
    """

    names: tuple[str, ...]
    sequences_per_example: int

    def sequences_of(self, example: Example) -> tuple[Tokens, ...]:
        """The G sequences that are scored."""
        ...

    def count(self, examples: Sequence[Example]) -> int:
        """What the loss of these is a mean over: its denominator."""
        ...

    def loss(self, scores: Tensor, examples: Sequence[Example]) -> tuple[Tensor, dict[str, float]]:
        """The sum of the losses, with gradient, and sums of metrics over the same count.

        Args:
            scores: [E, G, K].
            examples: E.
        """
        ...

    def evaluate(self, scores: Tensor, examples: Sequence[Example]) -> Evaluation:
        """Of all held-out examples, scores [E, G, K]."""
        ...


class Ranking:
    """Bradley-Terry on pairs: the chosen answer's score should be above the rejected one's."""

    names: tuple[str, ...] = ()
    sequences_per_example = 2

    def sequences_of(self, example: EncodedPair) -> tuple[Tokens, ...]:
        return example.prompt + example.chosen, example.prompt + example.rejected

    def count(self, examples: Sequence[EncodedPair]) -> int:
        return len(examples)

    def loss(self, scores: Tensor, examples: Sequence[EncodedPair]) -> tuple[Tensor, dict[str, float]]:
        chosen, rejected = scores[:, 0, 0], scores[:, 1, 0]
        detached = (chosen - rejected).detach()
        hits = (detached > 0).double() + 0.5 * (detached == 0).double()
        return bradley_terry(chosen, rejected), {"accuracy": float(hits.sum()), "margin": float(detached.sum())}

    def evaluate(self, scores: Tensor, examples: Sequence[EncodedPair]) -> Evaluation:
        chosen, rejected = scores[:, 0, 0].double(), scores[:, 1, 0].double()
        accuracy, calibrated = pair_accuracy(chosen, rejected), calibration(chosen, rejected)
        longer = pair_accuracy(*torch.tensor([[len(e.chosen), len(e.rejected)] for e in examples]).t())
        metrics = {
            "accuracy": accuracy.value,
            "accuracy_standard_error": accuracy.standard_error,
            "accuracy_of_longer_wins": longer.value,
            "calibration_error": calibrated.error,
            "margin": float((chosen - rejected).mean()),
            "score_mean": float(scores.double().mean()),
            "score_deviation": float(scores.double().std()),
        }
        return Evaluation(float(bradley_terry(chosen, rejected)) / len(examples), metrics, calibrated.bins)


class Regression:
    """Mean squared error over the ratings that are given.

    Args:
        names: of the attributes, in the order of the examples' ratings.
    """

    sequences_per_example = 1

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)

    def sequences_of(self, example: EncodedRating) -> tuple[Tokens, ...]:
        return (example.tokens,)

    def count(self, examples: Sequence[EncodedRating]) -> int:
        return sum(not math.isnan(rating) for example in examples for rating in example.ratings)

    def loss(self, scores: Tensor, examples: Sequence[EncodedRating]) -> tuple[Tensor, dict[str, float]]:
        return squared_error(scores[:, 0], _targets(examples).to(scores)), {}

    def evaluate(self, scores: Tensor, examples: Sequence[EncodedRating]) -> Evaluation:
        predicted, targets = scores[:, 0].double(), _targets(examples)
        metrics = {}
        for i, name in enumerate(self.names):
            fit = attribute_fit(predicted[:, i], targets[:, i])
            metrics |= {f"mse_{name}": fit.mse, f"pearson_{name}": fit.pearson, f"spearman_{name}": fit.spearman}
        return Evaluation(float(squared_error(predicted, targets)) / max(self.count(examples), 1), metrics)


def _targets(examples: Sequence[EncodedRating]) -> Tensor:
    return torch.tensor([example.ratings for example in examples], dtype=torch.float64)
