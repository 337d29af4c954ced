"""Credit by token and whitening against loops."""

from __future__ import annotations

import math

import pytest
import torch

from reinforce_rl.algorithms.advantages import Advantages
from reinforce_rl.algorithms.credit import assign_credit, returns_to_go, token_credit, whiten

MASK = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
VALUES = torch.tensor([[1.0, 2.0, -4.0], [3.0, math.nan, math.inf], [0.5, -1.0, math.nan]], dtype=torch.float64)


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.5])
def test_returns_to_go_are_discounted_sums_of_what_comes(discount):
    found = returns_to_go(VALUES, MASK, discount)
    for row in range(3):
        length = int(MASK[row].sum())
        for t in range(3):
            expected = (
                sum(discount ** (s - t) * float(VALUES[row, s]) for s in range(t, length)) if t < length else 0.0
            )
            assert float(found[row, t]) == pytest.approx(expected, abs=1e-12)


def test_the_reward_comes_with_the_last_token_and_the_baseline_is_taken_from_each():
    terminal = torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64)
    baseline = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    penalty = torch.tensor([[0.1, 0.2, 0.3], [0.4, math.nan, 0], [0.5, 0.6, math.inf]], dtype=torch.float64)
    found = token_credit(terminal, baseline, penalty, MASK, 0.5)
    expected = [
        [10 * 0.25 - 0.1 - 0.5 * 0.2 - 0.25 * 0.3 - 1, 10 * 0.5 - 0.2 - 0.5 * 0.3 - 1, 10 - 0.3 - 1],
        [20 - 0.4 - 2, 0, 0],
        [30 * 0.5 - 0.5 - 0.5 * 0.6 - 3, 30 - 0.6 - 3, 0],
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_an_empty_batch_and_an_empty_response():
    nothing = torch.zeros(2, 0)
    assert returns_to_go(nothing, nothing.bool(), 0.5).shape == (2, 0)
    empty = torch.zeros(1, 2, dtype=torch.bool)
    assert token_credit(torch.ones(1), torch.zeros(1), torch.ones(1, 2), empty).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("placement", ["reward", "advantage", "loss"])
@pytest.mark.parametrize("assignment", ["sequence", "token"])
def test_each_placement_of_the_kl(placement, assignment):
    """rewards 5, 7 and 9, KL of a token 0.1 t; a baseline of 2."""
    token_kl = torch.where(MASK, torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64), 0.0)
    kl, beta = token_kl.sum(1), 2.0
    rewards = torch.tensor([5.0, 7.0, 9.0], dtype=torch.float64)
    in_reward = rewards - beta * kl if placement == "reward" else rewards
    found = Advantages(in_reward - 2.0, torch.full((3,), 2.0, dtype=torch.float64), torch.ones(3, dtype=torch.bool))
    values = assign_credit(
        found, rewards, kl, token_kl, MASK, beta=beta, kl_placement=placement, assignment=assignment
    )
    for row in range(3):
        for t in range(int(MASK[row].sum())):
            charged = kl[row] if assignment == "sequence" else token_kl[row, t:].sum()
            expected = rewards[row] - 2.0 - (0.0 if placement == "loss" else beta * charged)
            assert float(values[row, t]) == pytest.approx(float(expected), abs=1e-12)
    assert not values[~MASK].any()


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_whitening_gives_mean_zero_and_deviation_one(unit):
    found = whiten(VALUES, MASK, unit=unit)
    numbers = [float(v) for v, m in zip(VALUES.flatten(), MASK.flatten(), strict=True) if m]
    weights = [1.0] * 6 if unit == "token" else [1 / 3] * 3 + [1.0] + [1 / 2] * 2
    count = sum(weights)
    mean = sum(w * x for w, x in zip(weights, numbers, strict=True)) / count
    variance = sum(w * (x - mean) ** 2 for w, x in zip(weights, numbers, strict=True)) / (count - 1)
    expected = [(x - mean) / math.sqrt(variance + 1e-8) for x in numbers]
    assert found[MASK].tolist() == pytest.approx(expected, rel=1e-12)
    assert not found[~MASK].any()


def test_whitening_of_one_token_or_of_equal_ones_is_zero():
    one = torch.tensor([[True, False]])
    assert whiten(torch.tensor([[5.0, 1.0]]), one).tolist() == [[0.0, 0.0]]
    assert whiten(torch.full((2, 3), 1e6), torch.ones(2, 3, dtype=torch.bool)).abs().max() == 0
    assert whiten(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)).shape == (2, 0)
