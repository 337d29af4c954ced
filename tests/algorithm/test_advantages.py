"""Leave-one-out advantages against brute force; credit and whitening against sums by hand."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from helpers.choices import KL_PLACEMENTS
from helpers.thread_ranks import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforce_rl.algorithm.advantages import (
    VARIANCE_EPSILON,
    Advantages,
    RewardGroups,
    assign_credit,
    batch_mean,
    leave_one_out,
    returns_to_go,
    rloo,
    token_credit,
    whiten,
)
from reinforce_rl.algorithm.kl import sequence_kl
from reinforce_rl.data.batches import length_mask

WORKED = Path(__file__).with_name("worked_example.json")


def brute_force(rewards: list[float], groups: list[int], valid: list[bool]) -> list[float]:
    """Return each reward minus the mean of the group's other valid rewards, by a loop."""
    out = []
    for i, reward in enumerate(rewards):
        others = []
        for j, other in enumerate(rewards):
            if j != i and groups[j] == groups[i] and valid[j]:
                others.append(other)
        if valid[i] and others:
            out.append(reward - math.fsum(others) / len(others))
        else:
            out.append(0.0)
    return out


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


reward_values = st.floats(-1e6, 1e6, allow_nan=False, width=64)
samples = st.lists(
    st.tuples(reward_values, st.sampled_from([-(2**62), -7, 0, 1, 3, 10**12]), st.booleans()),
    min_size=1,
    max_size=24,
)


@settings(deadline=None, max_examples=200)
@given(samples)
def test_equals_brute_force_for_any_groups_in_any_order(rows):
    rewards, groups, valid = map(list, zip(*rows, strict=True))
    advantages = rloo(double(rewards), torch.tensor(groups), torch.tensor(valid))
    assert advantages.dtype == torch.float64
    assert advantages.shape == (len(rows),)
    expected = double(brute_force(rewards, groups, valid))
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-8)


@settings(deadline=None, max_examples=100)
@given(samples, st.randoms(use_true_random=False))
def test_a_permutation_of_the_samples_permutes_the_advantages(rows, random):
    rewards, groups, valid = (torch.tensor(column) for column in zip(*rows, strict=True))
    rewards = rewards.double()
    order = list(range(len(rows)))
    random.shuffle(order)
    direct = rloo(rewards, groups, valid)[order]
    reordered = rloo(rewards[order], groups[order], valid[order])
    torch.testing.assert_close(reordered, direct, rtol=1e-12, atol=1e-8)


@settings(deadline=None, max_examples=100)
@given(samples, st.dictionaries(st.sampled_from([-(2**62), -7, 0, 1, 3, 10**12]), reward_values))
def test_a_constant_added_to_a_group_changes_nothing(rows, constants):
    rewards, groups, valid = map(list, zip(*rows, strict=True))
    # so that the sum stays below the largest accepted reward
    rewards = [reward / 2 for reward in rewards]
    moved = [
        reward + constants.get(group, 0.0) / 2
        for reward, group in zip(rewards, groups, strict=True)
    ]
    before = rloo(double(rewards), torch.tensor(groups), torch.tensor(valid))
    after = rloo(double(moved), torch.tensor(groups), torch.tensor(valid))
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-7)


@settings(deadline=None, max_examples=100)
@given(samples)
def test_the_advantages_of_a_group_sum_to_zero(rows):
    rewards, groups, valid = map(list, zip(*rows, strict=True))
    advantages = rloo(double(rewards), torch.tensor(groups), torch.tensor(valid)).tolist()
    for group in set(groups):
        pairs = zip(advantages, groups, strict=True)
        total = math.fsum(advantage for advantage, other in pairs if other == group)
        assert abs(total) < 1e-7


@settings(deadline=None, max_examples=100)
@given(samples, st.sampled_from([math.nan, math.inf, -math.inf]))
def test_the_value_of_an_invalid_sample_does_not_matter(rows, anything):
    rewards, groups, valid = map(list, zip(*rows, strict=True))
    spoilt = [reward if ok else anything for reward, ok in zip(rewards, valid, strict=True)]
    arguments = torch.tensor(groups), torch.tensor(valid)
    advantages = rloo(double(spoilt), *arguments)
    assert torch.isfinite(advantages).all()
    assert torch.isfinite(leave_one_out(RewardGroups.of(double(spoilt), *arguments)).baseline).all()
    assert torch.equal(advantages, rloo(double(rewards), *arguments))
    assert (advantages[~arguments[1]] == 0).all()


def test_equals_the_scaled_distance_from_the_groups_mean():
    """verl's form: G / (G - 1) * (R - mean)."""
    rewards = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = 4 / 3 * (rewards - rewards.mean(dim=1, keepdim=True))
    groups = torch.arange(6).repeat_interleave(4)
    torch.testing.assert_close(rloo(rewards.flatten(), groups).view(6, 4), expected)
    # Interleaved: sample s of every prompt, then sample s + 1.
    interleaved = rloo(rewards.t().flatten(), torch.arange(6).repeat(4))
    torch.testing.assert_close(interleaved.view(4, 6).t(), expected)


def test_two_samples_are_each_others_baseline():
    groups = RewardGroups.of(torch.tensor([1.0, 3.0]), torch.tensor([5, 5]))
    assert leave_one_out(groups).baseline.tolist() == [
        3.0,
        1.0,
    ]
    advantages = rloo(torch.tensor([1.0, 3.0]), torch.tensor([5, 5]))
    assert advantages.tolist() == [-2.0, 2.0]


def test_advantage_is_reward_less_baseline():
    rewards = torch.tensor([1.0, 2.0, 6.0, 5.0, 9.0])
    groups = torch.tensor([0, 0, 0, 1, 1])
    assert leave_one_out(RewardGroups.of(rewards, groups)).baseline.tolist() == [
        4.0,
        3.5,
        1.5,
        9.0,
        5.0,
    ]
    baseline = leave_one_out(RewardGroups.of(rewards, groups)).baseline
    torch.testing.assert_close(rloo(rewards, groups), rewards - baseline)


def test_a_truncated_sample_does_not_count():
    """All rewards are 1, and one of four samples is excluded.

    If it counted in the denominator, the others would get a non-zero advantage.
    """
    valid = torch.tensor([True, True, True, False])
    advantages = rloo(torch.ones(4), torch.zeros(4, dtype=torch.long), valid)
    assert advantages.tolist() == [0.0] * 4
    groups = RewardGroups.of(torch.ones(4), torch.zeros(4, dtype=torch.long), valid)
    assert leave_one_out(groups).baseline.tolist() == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("count", [0, 1])
def test_with_nothing_to_compare_to_the_advantage_is_zero(count):
    rewards = torch.tensor([7.0, math.nan, math.nan, 1.0, 2.0])
    groups = torch.tensor([0, 0, 0, 1, 1])
    valid = torch.tensor([count == 1, False, False, True, True])
    expected = [0.0, 0.0, 0.0, -1.0, 1.0]
    assert rloo(rewards, groups, valid).tolist() == expected


def test_equal_rewards_but_one_stay_small():
    """Divided by the leave-one-out deviation, the first advantage once became -2075."""
    rewards = torch.tensor([0.0] + [0.95] * 7)
    advantages = rloo(rewards, torch.zeros(8, dtype=torch.long))
    assert advantages.abs().max() < 1
    torch.testing.assert_close(advantages[0], torch.tensor(-0.95))
    expected = torch.full((7,), 0.95 - 6 * 0.95 / 7)
    torch.testing.assert_close(advantages[1:], expected)


def test_large_equal_rewards_cancel_exactly_enough_in_float32():
    rewards = torch.full((7,), 1e6 - 1 / 3)
    advantages = rloo(rewards, torch.zeros(7, dtype=torch.long))
    assert advantages.abs().max() <= 0.25, (
        "more than a few units in the last place of a float32 of 1e6"
    )


@pytest.mark.parametrize("mean", [RewardGroups.mean, RewardGroups.mean_by_group])
def test_the_mean_of_many_large_rewards_is_exact_to_float32(mean):
    rewards = 9e5 + 1e5 * torch.rand(5000, generator=torch.Generator().manual_seed(0))
    baseline = mean(RewardGroups.of(rewards, torch.zeros(5000, dtype=torch.long)))
    # half a unit in the last place
    assert float((baseline.double() - rewards.double().mean()).abs().max()) <= 0.032


def test_equal_prompts_with_different_ids_are_different_groups():
    rewards = torch.tensor([0.0, 1.0, 10.0, 11.0])
    expected = [-1.0, 1.0, -1.0, 1.0]
    group_ids = torch.tensor([3, 3, 8, 8])
    assert rloo(rewards, group_ids).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_it_carries_no_gradient_and_keeps_the_dtype(dtype, ids):
    rewards = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
    groups = torch.tensor([0, 0], dtype=ids)
    for result in (rloo(rewards, groups), batch_mean(RewardGroups.of(rewards, groups)).values):
        assert not result.requires_grad
        assert result.dtype == dtype


def test_whole_numbers_are_rewards_too():
    advantages = rloo(torch.tensor([1, 2, 4]), torch.tensor([0, 0, 0]))
    assert advantages.tolist() == [-2.0, -0.5, 2.5]


def test_no_samples_give_no_advantages():
    assert rloo(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "groups", "valid", "text"),
    [
        (
            torch.zeros(4),
            torch.zeros(3, dtype=torch.long),
            None,
            r"rewards.*\(4,\).*group_ids.*\(3,\)",
        ),
        (torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.long), None, "1-D"),
        (
            torch.zeros(2),
            torch.zeros(2, dtype=torch.long),
            torch.ones(3, dtype=torch.bool),
            r"valid.*\(3,\)",
        ),
        (torch.zeros(2), torch.zeros(2), None, "integers.*float32"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.long), torch.ones(2), "bool.*float32"),
    ],
)
def test_wrong_shapes_and_types_are_refused(rewards, groups, valid, text):
    with pytest.raises(ValueError, match=text):
        rloo(rewards, groups, valid)


def test_batch_mean_leaves_out_what_is_not_valid():
    rewards = torch.tensor([1.0, math.nan, 4.0])
    ids = torch.zeros(3, dtype=torch.long)
    valid = torch.tensor([1, 0, 1])
    groups = RewardGroups.of(rewards, ids, valid.bool())
    assert batch_mean(groups).baseline.tolist() == [
        2.5,
        0.0,
        2.5,
    ]
    invalid = RewardGroups.of(rewards, ids, torch.zeros(3).bool())
    assert batch_mean(invalid).baseline.tolist() == [0.0, 0.0, 0.0]


@pytest.fixture(scope="module")
def worked() -> dict:
    return json.loads(WORKED.read_text())


def sequence_rewards(example: dict) -> tuple[Tensor, Tensor]:
    """Return rewards minus the KL, [G, P] or [N], and the log-probs."""
    log_probs = double(example["logprobs"])
    rows = log_probs.flatten(0, -2)
    reference = double(example["reference_logprobs"]).flatten(0, -2)
    kl = sequence_kl(rows, reference, torch.ones(rows.shape, dtype=torch.bool))
    rewards = double(example["rewards"])
    return rewards - example["kl_coef"] * kl.view(rewards.shape), log_probs


def test_the_worked_example_of_rloo(worked):
    rewards, _ = sequence_rewards(worked["rloo"])
    expected = double(worked["rloo"]["sequence_rewards"])
    torch.testing.assert_close(rewards, expected)
    expected = double(worked["rloo"]["advantages"])
    # Each row is a prompt; a swapped axis would change the expected numbers.
    columns = torch.arange(3).repeat(3)
    rows = torch.arange(3).repeat_interleave(3)
    candidates = [rloo(rewards.flatten(), groups).view(3, 3) for groups in (rows, columns)]
    fits = [torch.allclose(candidate, expected, atol=1e-9) for candidate in candidates]
    assert fits == [True, False]


def test_the_worked_example_of_a_batch_mean(worked):
    rewards, _ = sequence_rewards(worked["reinforce_batch_mean"])
    expected = double(worked["reinforce_batch_mean"]["sequence_rewards"])
    torch.testing.assert_close(rewards, expected)
    groups = RewardGroups.of(rewards, torch.arange(len(rewards)))
    advantages = batch_mean(groups).values
    expected = double(worked["reinforce_batch_mean"]["advantages"])
    torch.testing.assert_close(advantages, expected)


NAN = math.nan


def rows(seed: int, count: int, width: int) -> tuple[Tensor, Tensor]:
    """Return values with NaN in the padding, and the mask; some rows may be empty."""
    generator = torch.Generator().manual_seed(seed)
    values = 10 * torch.randn(count, width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(0, width + 1, (count,), generator=generator)
    mask = length_mask(lengths, width)
    return torch.where(mask, values, NAN), mask


seeds = st.integers(0, 10**6)
counts = st.integers(0, 6)
widths = st.integers(0, 6)
some = settings(deadline=None, max_examples=40)


def with_gaps(mask: torch.Tensor, seed: int) -> torch.Tensor:
    """Take random tokens out of the mask, as those that an environment wrote."""
    return mask & (torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.6)


def discounted_sum(values: list[float], discount: float) -> float:
    return math.fsum(discount**steps * value for steps, value in enumerate(values))


class TestReturnsToGo:
    @some
    @given(seeds, counts, widths, st.sampled_from([1.0, 0.9, 0.5, 1e-3]), st.booleans())
    def test_each_is_the_discounted_sum_of_what_is_to_come(
        self, seed, count, width, discount, has_gaps
    ):
        rewards, mask = rows(seed, count, width)
        if has_gaps:
            mask = with_gaps(mask, seed)
        expected = torch.zeros(count, width, dtype=torch.float64)
        for i, t in itertools.product(range(count), range(width)):
            if mask[i, t]:
                later = rewards[i, t:][mask[i, t:]].tolist()
                expected[i, t] = discounted_sum(later, discount)
        returns = returns_to_go(rewards, mask, discount)
        torch.testing.assert_close(returns, expected, rtol=1e-12, atol=1e-12)

    def test_by_hand(self):
        rewards = double([[1.0, 10.0, 100.0, NAN]])
        mask = torch.tensor([[True, True, True, False]])
        assert returns_to_go(rewards, mask).tolist() == [[111.0, 110.0, 100.0, 0.0]]
        assert returns_to_go(rewards, mask, 0.5).tolist() == [[31.0, 60.0, 100.0, 0.0]]


class TestTokenCredit:
    @some
    @given(seeds, counts, widths, st.sampled_from([1.0, 0.8]), st.booleans())
    def test_is_the_formula_of_the_documentation(self, seed, count, width, discount, has_gaps):
        """gamma^(T - 1 - t) r - sum_{s >= t} gamma^(s - t) penalty_s - b."""
        penalty, mask = rows(seed, count, width)
        if has_gaps:
            mask = with_gaps(mask, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        terminal, baseline = torch.randn(2, count, generator=generator, dtype=torch.float64)
        lengths = mask.sum(1).tolist()
        expected = torch.zeros(count, width, dtype=torch.float64)
        for i in range(count):
            places = mask[i].nonzero()[:, 0].tolist()
            for t, place in enumerate(places):
                charged = discounted_sum(penalty[i, places[t:]].tolist(), discount)
                gain = discount ** (lengths[i] - 1 - t) * terminal[i]
                expected[i, place] = gain - charged - baseline[i]
        credit = token_credit(terminal, baseline, penalty, mask, discount)
        torch.testing.assert_close(credit, expected, rtol=1e-12, atol=1e-11)

    def test_the_baseline_is_not_discounted(self):
        mask = torch.ones(1, 3, dtype=torch.bool)
        credit = token_credit(double([4.0]), double([1.0]), torch.zeros(1, 3), mask, 0.5)
        assert credit.tolist() == [[0.0, 1.0, 3.0]]


class TestAssignCredit:
    MASK = torch.tensor([[True, True, False], [True, False, False]])
    TOKEN_KL = double([[0.5, -1.0, 0.0], [2.0, 0.0, 0.0]])
    KL = double([-0.5, 2.0])
    REWARDS = double([3.0, 7.0])
    TRAINS = torch.tensor([True, True])
    ADVANTAGES = Advantages(double([10.0, 20.0]), double([1.0, 2.0]), TRAINS)

    def credit(self, **options) -> list[list[float]]:
        return assign_credit(
            self.ADVANTAGES, self.REWARDS, self.KL, self.TOKEN_KL, self.MASK, beta=0.1, **options
        ).tolist()

    def test_by_response(self):
        for placement in ("reward", "loss"):
            expected = [[10.0, 10.0, 0.0], [20.0, 0.0, 0.0]]
            assert self.credit(kl_placement=placement) == expected
        assert self.credit(kl_placement="advantage") == [[10.05, 10.05, 0.0], [19.8, 0.0, 0.0]]

    @pytest.mark.parametrize("placement", KL_PLACEMENTS)
    def test_by_token(self, placement):
        expected = {
            # Reward minus its own penalties minus the estimator's baseline.
            "reward": [[3.0 + 0.05 - 1.0, 3.0 + 0.1 - 1.0, 0.0], [7.0 - 0.2 - 2.0, 0.0, 0.0]],
            "advantage": [[10.05, 10.1, 0.0], [19.8, 0.0, 0.0]],
            "loss": [[10.0, 10.0, 0.0], [20.0, 0.0, 0.0]],
        }[placement]
        credit = self.credit(kl_placement=placement, assignment="token")
        torch.testing.assert_close(double(credit), double(expected))

    def test_the_discount_falls_on_the_reward_of_early_tokens(self):
        credit = self.credit(kl_placement="loss", assignment="token", discount=0.5)
        assert credit == [[5.0, 10.0, 0.0], [20.0, 0.0, 0.0]]

    @some
    @given(seeds, st.integers(1, 6))
    def test_the_first_token_has_what_the_response_has(self, seed, width):
        """Without a discount, credit by token and by response agree at the first token."""
        tokens, mask = rows(seed, 5, width)
        tokens = torch.where(mask, tokens, 0.0)
        kl = tokens.sum(1)
        rewards = torch.arange(5.0, dtype=torch.float64)
        for placement in KL_PLACEMENTS:
            values = rewards - 0.1 * kl - 0.5 if placement == "reward" else rewards - 0.5
            advantages = Advantages(values, torch.full_like(rewards, 0.5), mask.any(1))
            sequence = assign_credit(
                advantages,
                rewards,
                kl,
                tokens,
                mask,
                beta=0.1,
                kl_placement=placement,
                assignment="sequence",
            )
            token = assign_credit(
                advantages,
                rewards,
                kl,
                tokens,
                mask,
                beta=0.1,
                kl_placement=placement,
                assignment="token",
            )
            torch.testing.assert_close(token[:, 0], sequence[:, 0], rtol=1e-12, atol=1e-11)


def by_hand(values: Tensor, mask: Tensor, unit: str) -> Tensor:
    """Return whitened values with a weight per token, by exact sums."""
    lengths = mask.sum(1).tolist()
    entries = []
    for i, length in enumerate(lengths):
        weight = 1.0 if unit == "token" else 1.0 / max(length, 1)
        entries += [(value, weight) for value in values[i, :length].tolist()]
    count = len(entries) if unit == "token" else sum(length > 0 for length in lengths)
    if count < 2:
        return torch.zeros_like(values)
    mean = math.fsum(value * weight for value, weight in entries) / count
    squares = math.fsum(weight * (value - mean) ** 2 for value, weight in entries)
    variance = squares / (count - 1)
    return torch.where(mask, (values - mean) / math.sqrt(variance + VARIANCE_EPSILON), 0.0)


@pytest.mark.parametrize("unit", ["token", "sequence"])
class TestWhiten:
    @some
    @given(seed=seeds, count=counts, width=widths)
    def test_is_its_formula(self, unit, seed, count, width):
        values, mask = rows(seed, count, width)
        torch.testing.assert_close(
            whiten(values, mask, unit=unit), by_hand(values, mask, unit), rtol=1e-9, atol=1e-9
        )

    @settings(deadline=None, max_examples=20)
    @given(seed=seeds, ranks=st.integers(1, 4))
    def test_ranks_share_one_mean_and_deviation(self, unit, seed, ranks):
        values, mask = rows(seed, 9, 4)
        values[4:] += 1e3  # whitening each rank by its own mean would show
        parts = torch.arange(9).tensor_split(ranks)
        parts_whitened = on_ranks(
            ranks,
            lambda rank, total: whiten(
                values[parts[rank]], mask[parts[rank]], unit=unit, total=total
            ),
        )
        torch.testing.assert_close(
            torch.cat(parts_whitened), whiten(values, mask, unit=unit), rtol=1e-9, atol=1e-9
        )

    def test_has_mean_0_and_deviation_1(self, unit):
        values, mask = rows(3, 6, 5)
        whitened = whiten(values, mask, unit=unit)
        weights = mask.double()
        if unit != "token":
            weights = weights / mask.sum(1, keepdim=True).clamp(min=1)
        count = weights.sum()
        assert abs((weights * whitened).sum()) < 1e-9
        variance = (weights * whitened**2).sum() / (count - 1)
        assert variance.item() == pytest.approx(1.0, abs=1e-6)

    @pytest.mark.parametrize("constant", [0.0, -3.0, 1e6 - 1 / 3])
    def test_equal_advantages_stay_at_zero(self, unit, constant):
        mask = length_mask(torch.tensor([3, 1, 2]), 3)
        assert whiten(torch.full((3, 3), constant), mask, unit=unit).abs().max() < 1e-4

    def test_of_one_response_or_token_nothing_is_left(self, unit):
        """The deviation of a single number is 0 or NaN.

        A peer that divided by it trained on noise.
        """
        single = torch.tensor([[True, False], [False, False]])
        assert not whiten(torch.full((2, 2), 5.0), single, unit=unit).any()
        nothing = torch.zeros(2, 2, dtype=torch.bool)
        assert not whiten(torch.full((2, 2), 5.0), nothing, unit=unit).any()
        empty = torch.zeros(0, 2)
        assert whiten(empty, empty.bool(), unit=unit).shape == (0, 2)

    def test_keeps_the_dtype_and_the_precision(self, unit):
        values = 1e5 + torch.tensor([[1.0], [2.0], [4.0]])
        whitened = whiten(values, torch.ones(3, 1, dtype=torch.bool), unit=unit)
        assert whitened.dtype == torch.float32
        expected = by_hand(values.double(), torch.ones(3, 1).bool(), unit).float()
        torch.testing.assert_close(whitened, expected)


def test_several_tokens_of_a_single_response_are_one_unit():
    values = double([[1.0, 2.0, 3.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert not whiten(values, mask, unit="sequence").any()
    whitened = whiten(values, mask, unit="token")
    assert whitened[0].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)


def test_long_responses_weigh_more_by_token_only():
    values = double([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    mask = length_mask(torch.tensor([4, 1]), 4)
    assert whiten(values, mask, unit="sequence")[:, 0].sum().abs() < 1e-9
    token = whiten(values, mask, unit="token")[:, 0]
    torch.testing.assert_close(token[1], -4 * token[0])
