"""Bradley-Terry training of a linear reward head on pooled features of a frozen trunk.

The loss of P pairs is the mean of -log sigmoid(s_chosen - s_rejected), plus l2 / 2 * |w|^2. It is convex and the data
fit in memory, so it is minimised to convergence in float64: the result depends on neither seed nor batch order.

Notation: P pairs, h hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from reinforce_rl.errors import ConfigError, DataError
from reinforce_rl.megatron.model.reward_head import RewardHead
from reinforce_rl.reward_model.data import prompt_position
from reinforce_rl.reward_model.head import PairFeatures
from reinforce_rl.reward_model.objectives import Accuracy, pair_accuracy


@dataclass(frozen=True)
class FoldScore:
    loss: float  # mean per pair, in nats
    accuracy: float


@dataclass(frozen=True)
class TrainedHead:
    head: RewardHead  # standardised: training scores have mean 0 and deviation 1
    l2: float
    raw_mean: float  # of the scores before standardisation, in log-odds
    raw_std: float
    validation: dict[float, FoldScore]  # L2 strength to its cross-validation; may be empty

    @property
    def chosen_validation(self) -> FoldScore:
        """Cross-validation at `l2`; NaN if not run."""
        return self.validation.get(self.l2, FoldScore(math.nan, math.nan))


def scores(head: RewardHead, features: Tensor) -> Tensor:
    """Score features [n, h]; return float64 [n]."""
    return features.double() @ head.weight.double() + head.bias.double()


def head_accuracy(head: RewardHead, features: PairFeatures) -> Accuracy:
    return pair_accuracy(scores(head, features.chosen), scores(head, features.rejected))


def fit_direction(differences: Tensor, l2: float) -> Tensor:
    """Return the w, float64 [h], that minimises mean(softplus(-differences @ w)) + l2 / 2 * |w|^2.

    `differences` [P, h] are chosen minus rejected features; `l2` is above 0, so that the minimum is unique.
    """
    if not l2 > 0:
        raise ConfigError([f"the L2 strength is {l2}; expected above 0"])
    x = differences.double()
    w = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [w], max_iter=1000, tolerance_grad=1e-8, tolerance_change=0.0, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.softplus(-(x @ w)).mean() + 0.5 * l2 * w.dot(w)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return w.detach()


def cross_validate(
    features: PairFeatures,
    l2_grid: Sequence[float],
    *,
    folds: int,
    seed: int,
    extra: PairFeatures | None = None,
) -> dict[float, FoldScore]:
    """Return held-out loss and accuracy of each L2 strength. Folds share no prompt; `extra` pairs are only fitted on.

    Raises:
        DataError: a fold would have no prompt.
    """
    fold_of, extra_fold_of = (
        torch.tensor(
            [int(prompt_position(key, seed) * folds) for key in (part.keys if part else ())], dtype=torch.long
        )
        for part in (features, extra)
    )
    if any(not (fold_of == fold).any() for fold in range(folds)):
        raise DataError(
            f"{len(set(features.keys))} prompts are too few for {folds} folds of cross-validation; "
            "use more pairs, or give one L2 strength"
        )
    scaled = _ScaledDifferences.from_features(features, extra)
    result = {}
    for l2 in l2_grid:
        loss = hits = 0.0
        for fold in range(folds):
            out = fold_of == fold
            fitted_on = torch.cat((scaled.pairs[~out], scaled.extra[extra_fold_of != fold]))
            margins = scaled.pairs[out] @ fit_direction(fitted_on, l2)
            loss += float(F.softplus(-margins).sum())
            hits += float((margins > 0).sum()) + 0.5 * float((margins == 0).sum())
        result[l2] = FoldScore(loss / len(fold_of), hits / len(fold_of))
    return result


def train_head(
    features: PairFeatures,
    pooling: str,
    *,
    l2_grid: Sequence[float],
    folds: int,
    seed: int = 0,
    extra: PairFeatures | None = None,
    cross_validate_always: bool = False,
) -> TrainedHead:
    """Choose the L2 strength by cross-validation, fit on all training pairs, standardise.

    Features are scaled so that chosen minus rejected has mean squared length 1: strengths are then comparable between
    trunks and poolings.

    Args:
        l2_grid: a single strength is used as it is.
        seed: assigns prompts to folds. Not the seed of the held-out split: the same hash would leave folds empty.
        extra: pairs to fit on only, not used in measuring or standardising.
        cross_validate_always: also with a single strength, to compare poolings.

    Raises:
        DataError: too few prompts, or chosen and rejected have the same features throughout.
    """
    needed = len(l2_grid) > 1 or cross_validate_always
    validation = cross_validate(features, l2_grid, folds=folds, seed=seed, extra=extra) if needed else {}
    l2 = min(validation, key=lambda strength: validation[strength].loss) if validation else l2_grid[0]
    scaled = _ScaledDifferences.from_features(features, extra)
    w = fit_direction(torch.cat((scaled.pairs, scaled.extra)), l2) / scaled.size
    raw = torch.cat((features.chosen, features.rejected)).double() @ w
    mean, std = float(raw.mean()), float(raw.std())
    if not std > 0:
        raise DataError("all training answers get one score; chosen and rejected cannot be told apart")
    head = RewardHead((w / std).float(), torch.tensor(-mean / std, dtype=torch.float32), pooling)
    return TrainedHead(head, l2, mean, std, validation)


@dataclass(frozen=True)
class _ScaledDifferences:
    """Chosen minus rejected in float64, divided by `size`: `pairs` then has mean squared length 1."""

    pairs: Tensor
    extra: Tensor
    size: float

    @classmethod
    def from_features(cls, features: PairFeatures, extra: PairFeatures | None) -> _ScaledDifferences:
        pairs = features.chosen.double() - features.rejected.double()
        more = pairs[:0] if extra is None else extra.chosen.double() - extra.rejected.double()
        size = float(pairs.square().sum(1).mean().sqrt())
        if not size > 0:
            raise DataError("chosen and rejected have the same features throughout")
        return cls(pairs / size, more / size, size)
