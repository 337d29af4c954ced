"""Losses and measures of reward models against formulas written out."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from reinforce_rl.reward_model.data import EncodedPair, EncodedRating
from reinforce_rl.reward_model.objectives import (
    NUM_BINS,
    Ranking,
    Regression,
    attribute_fit,
    bradley_terry,
    calibration,
    correlation,
    pair_accuracy,
    ranks,
    squared_error,
)

NAN = math.nan


def doubles(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_bradley_terry_is_a_sum_over_pairs():
    chosen = 3 * doubles(50, 0)
    rejected = 3 * doubles(50, 1)
    margins = (chosen - rejected).tolist()
    expected = 0.0
    for margin in margins:
        likelihood = 1 / (1 + math.exp(-margin))
        expected -= math.log(likelihood)
    assert float(bradley_terry(chosen, rejected)) == pytest.approx(expected, rel=1e-12)
    head = bradley_terry(chosen[:13], rejected[:13])
    rest = bradley_terry(chosen[13:], rejected[13:])
    assert float(head + rest) == pytest.approx(expected, rel=1e-12)
    far = bradley_terry(torch.tensor([-800.0]), torch.tensor([800.0]))
    assert float(far) == 1600.0  # no overflow


def test_missing_targets_give_neither_loss_nor_gradient():
    predicted = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    targets = torch.tensor([[0.5, NAN], [NAN, 7.0]])
    loss = squared_error(predicted, targets)
    assert loss.item() == pytest.approx(0.25 + 9)
    (gradient,) = torch.autograd.grad(loss, predicted)
    expected = [[1.0, 0.0], [0.0, -6.0]]
    assert gradient.tolist() == expected


def test_accuracy_counts_ties_half():
    chosen = torch.tensor([1.0, 2.0, 3.0, 0.0])
    rejected = torch.tensor([0.0, 2.0, 1.0, 1.0])
    accuracy = pair_accuracy(chosen, rejected)
    assert accuracy.value == pytest.approx(0.625)
    assert accuracy.standard_error == pytest.approx(math.sqrt(0.171875 / 4))


def test_calibration_bin_by_bin():
    generator = random.Random(0)
    pairs = [(generator.gauss(0, 2), generator.gauss(0, 2)) for _ in range(400)]
    pairs += [(1.0, 1.0)] * 5
    sides = (torch.tensor(side) for side in zip(*pairs, strict=True))
    found_error, bins = calibration(*sides)
    buckets: dict[int, list[tuple[float, float]]] = {}
    for chosen, rejected in pairs:
        margin = abs(chosen - rejected)
        confidence = 1 / (1 + math.exp(-margin))
        right = 0.5
        if chosen != rejected:
            right = float(chosen > rejected)
        share = (confidence - 0.5) / 0.5
        number = min(int(share * NUM_BINS), NUM_BINS - 1)
        buckets.setdefault(number, []).append((confidence, right))
    expected = [len(buckets[i]) for i in sorted(buckets)]
    assert [confidence_bin.count for confidence_bin in bins] == expected
    error = 0.0
    for i, confidence_bin in zip(sorted(buckets), bins, strict=True):
        count = len(buckets[i])
        predicted = sum(confidence for confidence, _ in buckets[i]) / count
        observed = sum(right for _, right in buckets[i]) / count
        assert confidence_bin.predicted == pytest.approx(predicted)
        assert confidence_bin.observed == pytest.approx(observed)
        assert confidence_bin.low <= confidence_bin.predicted <= confidence_bin.high
        assert confidence_bin.high - confidence_bin.low == pytest.approx(0.5 / NUM_BINS)
        weight = count / len(pairs)
        error += weight * abs(predicted - observed)
    assert found_error == pytest.approx(error)


def test_a_calibrated_model_has_little_calibration_error():
    margins = 2 * doubles(20_000, 3)
    draws = torch.rand(20_000, generator=torch.Generator().manual_seed(4))
    chosen_first = draws < torch.sigmoid(margins)
    chosen = torch.where(chosen_first, margins, 0)
    rejected = torch.where(chosen_first, 0, margins)
    assert calibration(chosen, rejected)[0] < 0.01
    assert calibration(3 * chosen, 3 * rejected)[0] > 0.05  # overconfident


def test_ranks_share_ties():
    values = torch.tensor([3.0, 1.0, 3.0, -2.0, 3.0, 1.0])
    expected = []
    for value in values:
        smaller = sum(other < value for other in values)
        equal = sum(other == value for other in values)
        expected.append(smaller + (equal + 1) / 2)
    assert ranks(values).tolist() == [float(rank) for rank in expected]


def test_correlations():
    x = doubles(40, 5)
    y = doubles(40, 6)
    pairs = list(zip(x.tolist(), y.tolist(), strict=True))
    mean_x = sum(a for a, _ in pairs) / 40
    mean_y = sum(b for _, b in pairs) / 40
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in pairs)
    squares_x = sum((a - mean_x) ** 2 for a, _ in pairs)
    squares_y = sum((b - mean_y) ** 2 for _, b in pairs)
    spread = math.sqrt(squares_x * squares_y)
    assert correlation(x, y) == pytest.approx(covariance / spread)
    # Without ties Spearman's is 1 - 6 sum d^2 / (n (n^2 - 1)).
    rank_differences = (ranks(x) - ranks(y)).tolist()
    differences = sum(difference**2 for difference in rank_differences)
    targets = torch.cat((y, torch.tensor([NAN, NAN])))
    predicted = torch.cat((x, torch.ones(2)))
    fit = attribute_fit(predicted, targets)
    expected = 1 - 6 * differences / (40 * (40**2 - 1))
    assert fit["spearman"] == pytest.approx(expected)
    assert fit["pearson"] == pytest.approx(covariance / spread)
    expected = sum((a - b) ** 2 for a, b in pairs) / 40
    assert fit["mse"] == pytest.approx(expected)
    constant = attribute_fit(torch.ones(3), torch.arange(3.0))
    assert math.isnan(constant["pearson"])
    unrated = attribute_fit(torch.ones(3), torch.full((3,), NAN))
    assert math.isnan(unrated["mse"])


def test_the_objectives_agree_with_their_parts():
    examples = [EncodedPair(str(i), (1,), (2,) * (i + 1), (3,) * 2) for i in range(4)]
    pair_scores = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [3.0, 0.0]])
    scores = pair_scores[:, :, None]
    loss, sums = Ranking().loss(scores, examples)
    evaluation = Ranking().evaluate(scores, examples)
    assert evaluation.loss == pytest.approx(loss.item() / 4)
    assert evaluation.metrics["accuracy"] == sums["accuracy"] / 4 == 0.625
    assert evaluation.metrics["length_baseline_accuracy"] == 0.625  # lengths 1, 2, 3, 4 against 2
    assert evaluation.metrics["margin"] == pytest.approx(sums["margin"] / 4) == 0.5
    assert sum(confidence_bin.count for confidence_bin in evaluation.reliability) == 4
    expected = ((1, 2, 2), (1, 3, 3))
    assert Ranking().sequences_of(examples[1]) == expected

    rated = [EncodedRating("", (1,), (0.0, NAN)), EncodedRating("", (1,), (2.0, 1.0))]
    objective = Regression(["a", "b"])
    predicted = torch.tensor([[[1.0, 5.0]], [[2.0, 3.0]]])
    loss, _ = objective.loss(predicted, rated)
    assert objective.count(rated) == 3
    fit = objective.evaluate(predicted, rated)
    assert fit.loss == pytest.approx(loss.item() / 3) == 5 / 3
    assert fit.metrics["mse_b"] == pytest.approx(4.0)


@pytest.mark.parametrize("cut", list(itertools.pairwise((0, 3, 7))))
def test_a_loss_is_the_sum_of_its_cuts(cut):
    examples = []
    for i in range(7):
        second = NAN if i % 2 else 1.0
        examples.append(EncodedRating("", (1,), (float(i), second)))
    predicted = doubles(14, 8).view(7, 1, 2)
    objective = Regression(["a", "b"])
    whole, _ = objective.loss(predicted, examples)
    inside = slice(*cut)
    rest = [i for i in range(7) if i not in range(*cut)]
    parts = objective.loss(predicted[inside], examples[inside])[0]
    rest_loss = objective.loss(predicted[rest], [examples[i] for i in rest])[0]
    parts = parts + rest_loss
    torch.testing.assert_close(parts, whole)
