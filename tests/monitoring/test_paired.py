"""The test of a difference against tables, brute force and simulation."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
import torch

from reinforce_rl.monitoring.paired import Difference, compare_validation, paired, quantile, two_sided_p, unpaired
from reinforce_rl.monitoring.records import RolloutRow

NAN = math.nan


def row(prompt_id: int = 0, reward: float = 0.5, sample_id: int = 0) -> RolloutRow:
    return RolloutRow(12, prompt_id, sample_id, f"prompt {prompt_id}", "response", reward, "stop", 3)


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
    """By the midpoint rule; from 1000 degrees on the normal distribution stands for Student's."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    x = (torch.arange(20_000, dtype=torch.float64) + 0.5) * abs(t) / 20_000
    inside = 2 * scale * float((1 + x**2 / degrees).pow(-(degrees + 1) / 2).sum()) * abs(t) / 20_000
    assert two_sided_p(t, degrees) == pytest.approx(1 - inside, abs=1e-7 if degrees < 1000 else 2e-4)


def test_p_of_a_large_t_keeps_its_digits():
    assert two_sided_p(2.0, 2) == pytest.approx(1 - 2 / math.sqrt(6)), "two degrees of freedom have a closed form"
    assert two_sided_p(1e5, 2) == pytest.approx(1e-10, rel=1e-6)
    assert two_sided_p(math.inf, 5) == 0.0


def test_by_hand():
    before = [row(0, 0.0), row(1, 1.0), row(2, 2.0), row(3, 5.0)]
    after = [row(3, 5.0), row(2, 4.0), row(1, 2.0), row(0, 1.0)]  # another order: pairs go by prompt
    found = compare_validation(before, after)
    assert (found.n, found.mean_before, found.mean_after, found.mean_difference) == (4, 2.0, 3.0, 1.0)
    # differences 1, 1, 2, 0: variance 2 / 3, over 4 prompts
    error = math.sqrt(2 / 3 / 4)
    assert (found.standard_error, found.degrees) == (pytest.approx(error), 3)
    assert found.interval == pytest.approx((1 - 3.1824 * error, 1 + 3.1824 * error), abs=1e-4)
    assert found.smallest_gain == pytest.approx((3.1824 + 0.9785) * error, abs=1e-4)
    assert found.p == pytest.approx(two_sided_p(1 / error, 3))


def test_pairing_makes_the_error_smaller_than_the_spread_of_prompts():
    before = [row(i, 10.0 * i) for i in range(50)]
    after = [row(i, 10.0 * i + 1 + 0.1 * (-1) ** i) for i in range(50)]
    assert compare_validation(before, after).p < 1e-30


def test_failed_and_absent_prompts_are_left_out_in_pairs_and_counted():
    before = [row(0, 0.0), row(1, NAN), row(2, 1.0), row(8, 100.0), row(4, 0.0)]
    after = [row(0, 1.0), row(1, 50.0), row(2, NAN), row(9, -100.0), row(4, 3.0)]
    found = compare_validation(before, after)
    assert (found.n, found.left_out, found.mean_before, found.mean_after) == (2, 4, 0.0, 2.0)
    assert found.sentence().endswith("; 4 left out, not scored on both sides")


def test_several_samples_of_a_prompt_count_once():
    before = [row(0, 0.0), row(0, 2.0, 1), row(1, 0.0), row(1, NAN, 1), row(2, 0.0)]
    found = compare_validation(before, [row(0, 4.0), row(1, 0.0), row(2, 1.0)])
    assert (found.n, found.left_out, found.mean_difference) == (2, 1, 2.0)
    many = compare_validation([row(i, 0.0, j) for i in range(3) for j in range(50)], [row(i, i) for i in range(3)])
    assert (many.n, many.standard_error) == (3, pytest.approx(1 / math.sqrt(3)))


def test_infinite_rewards_are_left_out_as_nan_is():
    found = compare_validation([row(0, math.inf), row(0, -math.inf, 1), row(1)], [row(0), row(1)])
    assert (found.n, found.left_out) == (1, 1)


@pytest.mark.parametrize("gain", [0.4, -0.4, 0.0])
def test_equal_differences_are_not_tested(gain):
    rewards = [0.1, 0.9, 0.4, -0.3]  # the differences are equal but for rounding
    found = paired(dict(enumerate(rewards)), {i: reward + gain for i, reward in enumerate(rewards)})
    assert found.standard_error == 0 and math.isnan(found.p) and math.isnan(found.smallest_gain)
    assert found.sentence() == (
        f"0.275 -> {0.275 + gain:.3f}: {found.mean_difference:+.3f} ± 0.000 on the same 4 prompts: all differences "
        "are equal, so there is no spread to test them by"
    )


def test_one_prompt_and_none():
    one = compare_validation([row(reward=0.25)], [row(reward=0.5)])
    assert one.sentence() == "0.250 -> 0.500: +0.250 on one prompt: this says nothing about other prompts"
    assert math.isnan(one.p) and math.isnan(one.smallest_gain) and math.isnan(one.interval[0])
    none = compare_validation([], [row()])
    assert (none.n, none.sentence(), none.change()) == (0, "no prompt was scored on both sides", "-")


def test_p_agrees_with_that_of_all_permutations():
    """Under no effect each difference may as well have the other sign."""
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
    found = Difference(n, 0.0, 0.0, 1.0, n - 1)
    half = found.interval[1]  # in standard errors
    assert float((noise.mean(1).abs() <= half * errors).double().mean()) == pytest.approx(0.95, abs=0.01)
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
    found = unpaired([1.0, 2.0, 3.0, NAN], [2.0, 6.0])
    assert (found.n, found.unpaired, found.left_out, found.mean_difference) == (3, 2, 1, 2.0)
    v, w = 1 / 3, 8 / 2
    assert found.standard_error == pytest.approx(math.sqrt(v + w))
    assert found.degrees == pytest.approx((v + w) ** 2 / (v**2 / 2 + w**2 / 1))
    assert "+2.000 ± 2.082 over 3 and 2 seeds (p = " in found.sentence() and " in all; 1 left" in found.sentence()
    alike = unpaired([1.0, 1.0], [2.0, 2.0])
    assert alike.standard_error == 0 and "no spread" in alike.sentence()
    assert unpaired([NAN], [1.0]).sentence() == "no seed was scored on both sides"
    assert unpaired([1.0], [1.0, 2.0]).sentence().endswith("over 1 and 2 seeds: this says nothing about other seeds")


@pytest.mark.parametrize("n", [4, 64])
def test_as_many_as_are_said_to_be_needed_show_the_gain(n):
    generator = random.Random(n)
    found = of([0.05 + generator.gauss(0, 1) for _ in range(n)])
    spread, needed = found.standard_error * math.sqrt(n), found.needed
    assert needed > n
    there = Difference(0, 0.0, 0.0, spread / math.sqrt(needed), needed - 1)
    assert there.smallest_gain == pytest.approx(abs(found.mean_difference), rel=1e-3)


def test_sentences():
    values = [0.1 * (-1) ** i for i in range(64)]
    found = of([0.05 + value for value in values])
    error = statistics.stdev(values) / 8
    assert found.sentence() == (
        f"0.000 -> 0.050: +0.050 ± {error:.3f} on the same 64 prompts (p < 0.001): a real gain at the 5 % level; "
        f"this many prompts can detect gains of {(1.9983 + 0.8474) * error:.3f} or more"
    )
    assert ": a real loss at the 5 % level" in of([value - 0.05 for value in values]).sentence()
    assert of([0.02 + value for value in values]).sentence(".1%") == (
        "0.0% -> 2.0%: +2.0% ± 1.3% on the same 64 prompts (p = 0.117): indistinguishable from noise; this many "
        "prompts can detect gains of 3.6% or more; detecting 2.0% needs about 200"
    )
    assert of(values).sentence().endswith("detecting 0.000 needs more than a million")
