"""Errors, pass@k and intervals, against definitions and brute force."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from reinforce_rl.evaluation.statistics import WinRate, estimate, pass_at_k

NAN = math.nan


def test_with_one_sample_a_prompt_the_error_is_the_usual_one() -> None:
    values = [0.5, 1.0, -2.0, 0.25]
    found = estimate({i: [value] for i, value in enumerate(values)})
    assert found.mean == statistics.fmean(values)
    assert found.standard_error == pytest.approx(statistics.stdev(values) / 2)


def test_samples_of_one_prompt_that_are_all_alike_are_worth_one() -> None:
    once = {i: [value] for i, value in enumerate([1.0, 0.0, 0.0, 1.0, 1.0])}
    often = {i: group * 8 for i, group in once.items()}
    assert estimate(often).standard_error == pytest.approx(estimate(once).standard_error)
    assert (estimate(often).mean, estimate(often).count) == (0.6, 40)


def test_the_error_is_the_means_spread_over_repeated_draws() -> None:
    draw = random.Random(3)
    means, errors = [], []
    for _ in range(400):
        groups = {}
        for prompt in range(12):
            level = draw.gauss(0, 1)
            groups[prompt] = [level + draw.gauss(0, 1) for _ in range(4)]
        found = estimate(groups)
        means.append(found.mean)
        errors.append(found.standard_error)
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(means), rel=0.1)


def test_failed_samples_count_neither_as_zero_nor_at_all() -> None:
    assert estimate({0: [1.0, NAN], 1: [NAN], 2: [3.0]}) == estimate({0: [1.0], 2: [3.0]})
    assert estimate({0: [NAN]}).count == 0 and math.isnan(estimate({}).mean)
    assert math.isnan(estimate({0: [1.0, 2.0]}).standard_error), "one prompt says nothing about others"


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_that_of_all_subsets(k: int) -> None:
    groups = {0: [1.0, 0.0, 0.0, 1.0, 0.0], 1: [0.0] * 5, 2: [1.0] * 5, 3: [0.0, 1.0, 0.0, 0.0, NAN]}
    expected = []
    for group in groups.values():
        subsets = list(itertools.combinations([value for value in group if not math.isnan(value)], k))
        expected.append(statistics.fmean(max(subset) for subset in subsets))
    assert pass_at_k(groups, k).mean == pytest.approx(statistics.fmean(expected))
    assert pass_at_k({**groups, 4: [1.0] * (k - 1)}, k).count == 4, "too few samples to say"


def test_a_win_rate_counts_ties_half_and_its_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rate = WinRate.of([1.0, 0.5, 0.0, 1.0], failed=2)
    assert (rate.wins, rate.ties, rate.losses, rate.failed, rate.rate) == (2, 1, 1, 2, 0.625)
    low, high = WinRate(8, 0, 2).interval
    assert (low, high) == (pytest.approx(0.4902, abs=1e-3), pytest.approx(0.9433, abs=1e-3)), "Wilson 1927"
    assert WinRate(5, 0, 0).interval[1] == 1.0 and math.isnan(WinRate(0, 0, 0).rate)
    draw, held = random.Random(1), 0
    for _ in range(1000):
        wins = sum(draw.random() < 0.7 for _ in range(40))
        low, high = WinRate(wins, 0, 40 - wins).interval
        held += low <= 0.7 <= high
    assert 930 <= held <= 975
