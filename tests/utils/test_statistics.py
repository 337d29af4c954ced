"""Errors, pass@k, tests and intervals, against definitions, tables, brute force and simulation."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest
import torch

from reinforce_rl.utils.statistics import (
    Difference,
    WinRate,
    estimate,
    finite_mean,
    paired,
    pass_at_k,
    quantile,
    two_sided_p,
    unpaired,
)

NAN = math.nan


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, NAN, 4.0], 2.5), ([math.inf, 3], 3.0), ([NAN, -math.inf], NAN), ([], NAN)],
)
def test_a_mean_is_over_the_finite_values(values: list[float], expected: float) -> None:
    assert finite_mean(values) == pytest.approx(expected, nan_ok=True)


def test_with_one_sample_a_prompt_the_error_is_the_usual_one() -> None:
    values = [0.5, 1.0, -2.0, 0.25]
    mean = estimate({i: [value] for i, value in enumerate(values)})
    assert mean.mean == statistics.fmean(values)
    assert mean.standard_error == pytest.approx(statistics.stdev(values) / 2)


def test_samples_of_one_prompt_that_are_all_alike_are_worth_one() -> None:
    once = {i: [value] for i, value in enumerate([1.0, 0.0, 0.0, 1.0, 1.0])}
    often = {i: group * 8 for i, group in once.items()}
    assert estimate(often).standard_error == pytest.approx(estimate(once).standard_error)
    assert estimate(often).mean == 0.6
    assert estimate(often).count == 40


def test_the_error_is_the_means_spread_over_repeated_draws() -> None:
    draw = random.Random(3)
    means = []
    errors = []
    for _ in range(400):
        groups = {}
        for prompt in range(12):
            level = draw.gauss(0, 1)
            groups[prompt] = [level + draw.gauss(0, 1) for _ in range(4)]
        mean = estimate(groups)
        means.append(mean.mean)
        errors.append(mean.standard_error)
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(means), rel=0.1)


def test_failed_samples_count_neither_as_zero_nor_at_all() -> None:
    assert estimate({0: [1.0, NAN], 1: [NAN], 2: [3.0]}) == estimate({0: [1.0], 2: [3.0]})
    assert estimate({0: [NAN]}).count == 0
    assert math.isnan(estimate({}).mean)
    assert math.isnan(estimate({0: [1.0, 2.0]}).standard_error), (
        "one prompt says nothing about others"
    )


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_that_of_all_subsets(k: int) -> None:
    groups = {
        0: [1.0, 0.0, 0.0, 1.0, 0.0],
        1: [0.0] * 5,
        2: [1.0] * 5,
        3: [0.0, 1.0, 0.0, 0.0, NAN],
    }
    expected = []
    for group in groups.values():
        subsets = list(
            itertools.combinations([value for value in group if not math.isnan(value)], k)
        )
        expected.append(statistics.fmean(max(subset) for subset in subsets))
    assert pass_at_k(groups, k).mean == pytest.approx(statistics.fmean(expected))
    assert pass_at_k({**groups, 4: [1.0] * (k - 1)}, k).count == 4, "too few samples to say"


def test_a_win_rate_counts_ties_half_and_its_interval_covers_the_true_rate() -> None:
    rate = WinRate.of([1.0, 0.5, 0.0, 1.0], failed=2)
    assert rate.wins == 2
    assert rate.ties == 1
    assert rate.losses == 1
    assert rate.failed == 2
    assert rate.rate == 0.625
    low, high = WinRate(8, 0, 2).interval
    assert (low, high) == (pytest.approx(0.4902, abs=1e-3), pytest.approx(0.9433, abs=1e-3)), (
        "Wilson 1927"
    )
    assert WinRate(5, 0, 0).interval[1] == 1.0
    assert math.isnan(WinRate(0, 0, 0).rate)
    draw = random.Random(1)
    held = 0
    for _ in range(1000):
        wins = sum(draw.random() < 0.7 for _ in range(40))
        low, high = WinRate(wins, 0, 40 - wins).interval
        held += low <= 0.7 <= high
    assert 930 <= held <= 975


def of(differences: list[float]) -> Difference:
    return paired(dict.fromkeys(range(len(differences)), 0.0), dict(enumerate(differences)))


@pytest.mark.parametrize(
    ("share", "degrees", "t"),  # a printed table of Student's t
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 5, 2.571),
        (0.975, 10, 2.228),
        (0.975, 30, 2.042),
        (0.975, 120, 1.980),
        (0.975, math.inf, 1.960),
        (0.995, 10, 3.169),
        (0.8, 1, 1.376),
        (0.8, 5, 0.920),
        (0.8, math.inf, 0.842),
    ],
)
def test_quantiles_are_those_of_the_table(share, degrees, t):
    assert quantile(share, degrees) == pytest.approx(t, abs=6e-4)


@pytest.mark.parametrize("degrees", [1, 2.5, 7, 63, 400, 999, 2000])
@pytest.mark.parametrize("t", [0.0, 0.01, 0.7, -1.9, 2.5, 4.0])
def test_p_is_the_integral_of_the_density(t, degrees):
    """Integrated by the midpoint rule."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(
        degrees * math.pi
    )
    x = (torch.arange(20_000, dtype=torch.float64) + 0.5) * abs(t) / 20_000
    inside = 2 * scale * float((1 + x**2 / degrees).pow(-(degrees + 1) / 2).sum()) * abs(t) / 20_000
    assert two_sided_p(t, degrees) == pytest.approx(1 - inside, abs=1e-7)


def test_p_of_a_large_t_keeps_its_digits():
    assert two_sided_p(2.0, 2) == pytest.approx(1 - 2 / math.sqrt(6)), (
        "two degrees of freedom have a closed form"
    )
    assert two_sided_p(1e5, 2) == pytest.approx(1e-10, rel=1e-6)
    assert two_sided_p(math.inf, 5) == 0.0


@pytest.mark.parametrize("gain", [0.4, -0.4, 0.0])
def test_equal_differences_are_not_tested(gain):
    rewards = [0.1, 0.9, 0.4, -0.3]  # the differences are equal but for rounding
    difference = paired(
        dict(enumerate(rewards)), {i: reward + gain for i, reward in enumerate(rewards)}
    )
    assert difference.standard_error == 0
    assert math.isnan(difference.p)
    assert math.isnan(difference.smallest_gain)
    assert difference.sentence() == (
        f"0.275 -> {0.275 + gain:.3f}: {difference.mean_difference:+.3f} ± 0.000 on the same "
        "4 prompts: all differences are equal, so there is no spread to test them by"
    )


def test_p_agrees_with_that_of_all_permutations():
    """Without an effect each difference has either sign with equal probability."""
    generator = random.Random(5)
    for gain in (0.0, 0.4, 0.9):
        differences = [gain + generator.gauss(0, 1) for _ in range(12)]
        total = abs(math.fsum(differences))
        signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=12)), dtype=torch.float64)
        sums = (signs @ torch.tensor(differences, dtype=torch.float64)).abs()
        exact = float((sums >= total - 1e-12).double().mean())
        assert of(differences).p == pytest.approx(exact, abs=0.03)


@pytest.mark.parametrize("n", [3, 10, 64])
def test_intervals_hold_the_truth_and_the_smallest_gain_is_found_as_often_as_they_say(n):
    generator = torch.Generator().manual_seed(n)
    noise = torch.randn(20_000, n, dtype=torch.float64, generator=generator)
    errors = noise.std(1) / math.sqrt(n)
    difference = Difference(n, 0.0, 0.0, 1.0, n - 1)
    half = difference.interval[1]  # in standard errors
    assert float((noise.mean(1).abs() <= half * errors).double().mean()) == pytest.approx(
        0.95, abs=0.01
    )
    gain = Difference(n, 0.0, 0.0, 1 / math.sqrt(n), n - 1).smallest_gain  # with the true spread
    power = float(((noise.mean(1) + gain).abs() > half * errors).double().mean())
    assert power == pytest.approx(0.8, abs=0.01 if n > 3 else 0.04)


def test_welchs_intervals_hold_the_truth_with_sides_of_other_sizes_and_spreads():
    generator = random.Random(3)
    hits = 0
    for _ in range(2000):
        first = [generator.gauss(0, 1) for _ in range(5)]
        last = [1 + generator.gauss(0, 3) for _ in range(9)]
        low, high = unpaired(first, last).interval
        hits += low <= 1 <= high
    assert hits / 2000 == pytest.approx(0.95, abs=0.015)


def test_welch_by_hand():
    difference = unpaired([1.0, 2.0, 3.0, NAN], [2.0, 6.0])
    assert difference.n == 3
    assert difference.unpaired == 2
    assert difference.left_out == 1
    assert difference.mean_difference == 2.0
    v = 1 / 3
    w = 8 / 2
    assert difference.standard_error == pytest.approx(math.sqrt(v + w))
    assert difference.degrees == pytest.approx((v + w) ** 2 / (v**2 / 2 + w**2 / 1))
    assert "+2.000 ± 2.082 over 3 and 2 seeds (p = " in difference.sentence()
    assert " in all; 1 left" in difference.sentence()
    pairs = replace(difference, unpaired=0)
    assert difference.needed == pytest.approx(pairs.needed * (3 + 2) / 3)
    alike = unpaired([1.0, 1.0], [2.0, 2.0])
    assert alike.standard_error == 0
    assert "no spread" in alike.sentence()
    assert unpaired([NAN], [1.0]).sentence() == "no seed was scored on both sides"
    assert (
        unpaired([1.0], [1.0, 2.0])
        .sentence()
        .endswith("over 1 and 2 seeds: this says nothing about other seeds")
    )


@pytest.mark.parametrize("n", [4, 64])
def test_as_many_as_are_said_to_be_needed_show_the_gain(n):
    generator = random.Random(n)
    difference = of([0.05 + generator.gauss(0, 1) for _ in range(n)])
    spread = difference.standard_error * math.sqrt(n)
    needed = difference.needed
    assert needed > n
    there = Difference(0, 0.0, 0.0, spread / math.sqrt(needed), needed - 1)
    assert there.smallest_gain == pytest.approx(abs(difference.mean_difference), rel=1e-3)


def test_sentences():
    values = [0.1 * (-1) ** i for i in range(64)]
    difference = of([0.05 + value for value in values])
    error = statistics.stdev(values) / 8
    assert difference.sentence() == (
        f"0.000 -> 0.050: +0.050 ± {error:.3f} on the same 64 prompts (p < 0.001): "
        "a significant gain at the 5 % level; this many prompts can detect gains of "
        f"{(1.9983 + 0.8474) * error:.3f} or more"
    )
    assert (
        ": a significant loss at the 5 % level" in of([value - 0.05 for value in values]).sentence()
    )
    assert of([0.02 + value for value in values]).sentence(".1%") == (
        "0.0% -> 2.0%: +2.0% ± 1.3% on the same 64 prompts (p = 0.117): indistinguishable from "
        "noise; this many prompts can detect gains of 3.6% or more; detecting 2.0% needs about 200"
    )
    assert of(values).sentence().endswith("detecting 0.000 needs more than a million")
