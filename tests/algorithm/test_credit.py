"""Credit by response and by token, and whitening, against sums written out by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.thread_ranks import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforce_rl.algorithm.advantages import (
    VARIANCE_EPSILON,
    Advantages,
    assign_credit,
    returns_to_go,
    token_credit,
    whiten,
)
from reinforce_rl.config.actor import KL_PLACEMENTS
from reinforce_rl.data.batches import length_mask

NAN = math.nan


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rows(seed: int, count: int, width: int) -> tuple[Tensor, Tensor]:
    """Values with NaN on the padding, and the mask; some rows may be empty."""
    generator = torch.Generator().manual_seed(seed)
    values = 10 * torch.randn(count, width, generator=generator, dtype=torch.float64)
    mask = length_mask(torch.randint(0, width + 1, (count,), generator=generator), width)
    return torch.where(mask, values, NAN), mask


seeds, counts, widths = st.integers(0, 10**6), st.integers(0, 6), st.integers(0, 6)
some = settings(deadline=None, max_examples=40)


class TestReturnsToGo:
    @some
    @given(seeds, counts, widths, st.sampled_from([1.0, 0.9, 0.5, 1e-3]))
    def test_each_is_the_discounted_sum_of_what_is_to_come(self, seed, count, width, discount):
        rewards, mask = rows(seed, count, width)
        expected = torch.zeros(count, width, dtype=torch.float64)
        for i, t in itertools.product(range(count), range(width)):
            if mask[i, t]:
                later = [s for s in range(t, width) if mask[i, s]]
                expected[i, t] = math.fsum(discount ** (s - t) * float(rewards[i, s]) for s in later)
        torch.testing.assert_close(returns_to_go(rewards, mask, discount), expected, rtol=1e-12, atol=1e-12)

    def test_by_hand(self):
        rewards = double([[1.0, 10.0, 100.0, NAN]])
        mask = torch.tensor([[True, True, True, False]])
        assert returns_to_go(rewards, mask).tolist() == [[111.0, 110.0, 100.0, 0.0]]
        assert returns_to_go(rewards, mask, 0.5).tolist() == [[31.0, 60.0, 100.0, 0.0]]


class TestTokenCredit:
    @some
    @given(seeds, counts, widths, st.sampled_from([1.0, 0.8]))
    def test_is_the_formula_of_the_documentation(self, seed, count, width, discount):
        """gamma^(T - 1 - t) r - sum_{s >= t} gamma^(s - t) penalty_s - b."""
        penalty, mask = rows(seed, count, width)
        generator = torch.Generator().manual_seed(seed + 1)
        terminal, baseline = torch.randn(2, count, generator=generator, dtype=torch.float64)
        lengths = mask.sum(1).tolist()
        expected = torch.zeros(count, width, dtype=torch.float64)
        for i in range(count):
            for t in range(lengths[i]):
                charged = math.fsum(discount ** (s - t) * float(penalty[i, s]) for s in range(t, lengths[i]))
                expected[i, t] = discount ** (lengths[i] - 1 - t) * terminal[i] - charged - baseline[i]
        found = token_credit(terminal, baseline, penalty, mask, discount)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-11)

    def test_the_baseline_is_not_discounted(self):
        mask = torch.ones(1, 3, dtype=torch.bool)
        found = token_credit(double([4.0]), double([1.0]), torch.zeros(1, 3), mask, 0.5)
        assert found.tolist() == [[0.0, 1.0, 3.0]]


class TestAssignCredit:
    MASK = torch.tensor([[True, True, False], [True, False, False]])
    TOKEN_KL = double([[0.5, -1.0, 0.0], [2.0, 0.0, 0.0]])
    KL = double([-0.5, 2.0])
    REWARDS = double([3.0, 7.0])
    FOUND = Advantages(double([10.0, 20.0]), double([1.0, 2.0]), torch.tensor([True, True]))

    def credit(self, **options) -> list[list[float]]:
        return assign_credit(self.FOUND, self.REWARDS, self.KL, self.TOKEN_KL, self.MASK, beta=0.1, **options).tolist()

    def test_by_response(self):
        for placement in ("reward", "loss"):
            assert self.credit(kl_placement=placement) == [[10.0, 10.0, 0.0], [20.0, 0.0, 0.0]]
        assert self.credit(kl_placement="advantage") == [[10.05, 10.05, 0.0], [19.8, 0.0, 0.0]]

    @pytest.mark.parametrize("placement", KL_PLACEMENTS)
    def test_by_token(self, placement):
        expected = {
            # Reward less its own charges less the estimator's baseline.
            "reward": [[3.0 + 0.05 - 1.0, 3.0 + 0.1 - 1.0, 0.0], [7.0 - 0.2 - 2.0, 0.0, 0.0]],
            "advantage": [[10.05, 10.1, 0.0], [19.8, 0.0, 0.0]],
            "loss": [[10.0, 10.0, 0.0], [20.0, 0.0, 0.0]],
        }[placement]
        found = self.credit(kl_placement=placement, assignment="token")
        torch.testing.assert_close(double(found), double(expected))

    def test_the_discount_falls_on_the_reward_of_early_tokens(self):
        found = self.credit(kl_placement="loss", assignment="token", discount=0.5)
        assert found == [[5.0, 10.0, 0.0], [20.0, 0.0, 0.0]]

    @some
    @given(seeds, st.integers(1, 6))
    def test_the_first_token_has_what_the_response_has(self, seed, width):
        """Without a discount nothing came before it, so that credit by token and by response agree there."""
        tokens, mask = rows(seed, 5, width)
        tokens = torch.where(mask, tokens, 0.0)
        kl, rewards = tokens.sum(1), torch.arange(5.0, dtype=torch.float64)
        for placement in KL_PLACEMENTS:
            values = rewards - 0.1 * kl - 0.5 if placement == "reward" else rewards - 0.5
            found = Advantages(values, torch.full_like(rewards, 0.5), mask.any(1))
            sequence, token = (
                assign_credit(found, rewards, kl, tokens, mask, beta=0.1, kl_placement=placement, assignment=a)
                for a in ("sequence", "token")
            )
            torch.testing.assert_close(token[:, 0], sequence[:, 0], rtol=1e-12, atol=1e-11)


def by_hand(values: Tensor, mask: Tensor, unit: str) -> Tensor:
    """Each token with its weight, in exact sums."""
    lengths = mask.sum(1).tolist()
    entries = [
        (float(values[i, t]), 1.0 if unit == "token" else 1.0 / lengths[i])
        for i in range(len(values))
        for t in range(lengths[i])
    ]
    count = len(entries) if unit == "token" else sum(length > 0 for length in lengths)
    if count < 2:
        return torch.zeros_like(values)
    mean = math.fsum(value * weight for value, weight in entries) / count
    variance = math.fsum(weight * (value - mean) ** 2 for value, weight in entries) / (count - 1)
    return torch.where(mask, (values - mean) / math.sqrt(variance + VARIANCE_EPSILON), 0.0)


@pytest.mark.parametrize("unit", ["token", "sequence"])
class TestWhiten:
    @some
    @given(seed=seeds, count=counts, width=widths)
    def test_is_its_formula(self, unit, seed, count, width):
        values, mask = rows(seed, count, width)
        torch.testing.assert_close(whiten(values, mask, unit=unit), by_hand(values, mask, unit), rtol=1e-9, atol=1e-9)

    @settings(deadline=None, max_examples=20)
    @given(seed=seeds, ranks=st.integers(1, 4))
    def test_ranks_share_one_mean_and_deviation(self, unit, seed, ranks):
        values, mask = rows(seed, 9, 4)
        values[4:] += 1e3  # ranks with a mean of their own would show
        parts = torch.arange(9).tensor_split(ranks)
        found = on_ranks(
            ranks, lambda rank, total: whiten(values[parts[rank]], mask[parts[rank]], unit=unit, total=total)
        )
        torch.testing.assert_close(torch.cat(found), whiten(values, mask, unit=unit), rtol=1e-9, atol=1e-9)

    def test_has_mean_0_and_deviation_1(self, unit):
        values, mask = rows(3, 6, 5)
        found = whiten(values, mask, unit=unit)
        weights = mask.double() if unit == "token" else mask.double() / mask.sum(1, keepdim=True).clamp(min=1)
        count = weights.sum()
        assert abs((weights * found).sum()) < 1e-9
        assert ((weights * found**2).sum() / (count - 1)).item() == pytest.approx(1.0, abs=1e-6)

    @pytest.mark.parametrize("constant", [0.0, -3.0, 1e6 - 1 / 3])
    def test_equal_advantages_stay_at_zero(self, unit, constant):
        mask = length_mask(torch.tensor([3, 1, 2]), 3)
        assert whiten(torch.full((3, 3), constant), mask, unit=unit).abs().max() < 1e-4

    def test_of_one_response_or_token_nothing_is_left(self, unit):
        """A deviation of one number is 0, or NaN: dividing by it trained users of a peer on noise."""
        one = torch.tensor([[True, False], [False, False]])
        assert not whiten(torch.full((2, 2), 5.0), one, unit=unit).any()
        assert not whiten(torch.full((2, 2), 5.0), torch.zeros(2, 2, dtype=torch.bool), unit=unit).any()
        assert whiten(torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.bool), unit=unit).shape == (0, 2)

    def test_keeps_the_dtype_and_the_precision(self, unit):
        values = 1e5 + torch.tensor([[1.0], [2.0], [4.0]])
        found = whiten(values, torch.ones(3, 1, dtype=torch.bool), unit=unit)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, by_hand(values.double(), torch.ones(3, 1).bool(), unit).float())


def test_several_tokens_of_a_single_response_are_one_unit():
    values, mask = double([[1.0, 2.0, 3.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert not whiten(values, mask, unit="sequence").any()
    assert whiten(values, mask, unit="token").tolist()[0] == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)


def test_long_responses_weigh_more_by_token_only():
    values = double([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    mask = length_mask(torch.tensor([4, 1]), 4)
    assert whiten(values, mask, unit="sequence")[:, 0].sum().abs() < 1e-9
    token = whiten(values, mask, unit="token")[:, 0]
    torch.testing.assert_close(token[1], -4 * token[0])
