"""KL estimates of sequences."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.choices import KL_ESTIMATORS, KL_LOSS_WEIGHTS, KL_REDUCTIONS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforce_rl.algorithm.kl import (
    KLCoefficient,
    absolute_k1,
    k1,
    k2,
    k3,
    kl_loss_terms,
    reduce_over_tokens,
    sequence_kl,
    token_kl,
)
from reinforce_rl.data.batches import length_mask


def test_the_estimators_a_token():
    log_probs = torch.tensor([[-1.0, -2.0, 0.0]])
    reference = torch.tensor([[-1.5, -1.0, 0.0]])
    assert k1(log_probs, reference).tolist() == [[0.5, -1.0, 0.0]]
    assert absolute_k1(log_probs, reference).tolist() == [[0.5, 1.0, 0.0]]
    assert k2(log_probs, reference).tolist() == [[0.125, 0.5, 0.0]]
    below = math.exp(-0.5) - 1 + 0.5
    above = math.exp(1.0) - 1 - 1.0
    by_hand = torch.tensor([[below, above, 0.0]])
    torch.testing.assert_close(k3(log_probs, reference), by_hand)


def test_k3_is_never_below_0():
    """This holds at any distance, although its two terms cancel for nearly equal policies."""
    normal = torch.randn(20_000, generator=torch.Generator().manual_seed(5))
    for scale in (1e-9, 1e-7, 1e-6, 1e-4, 1e-2, 1.0, 20.0):
        differences = normal * scale
        assert k3(differences, torch.zeros_like(differences)).min() >= 0, scale


def test_k3_of_nearly_equal_policies_is_not_cancelled():
    """exp(x) - 1 - x in float32 has no correct digit at 1e-4; some values would be negative."""
    log_probs = torch.linspace(-1e-3, 1e-3, 101)
    estimates = k3(log_probs, torch.zeros(101))
    torch.testing.assert_close(estimates, log_probs**2 / 2, rtol=1e-3, atol=1e-10)
    assert estimates.min() >= -1e-10


def test_a_sequences_kl_is_a_sum_over_its_response():
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]])
    reference = torch.tensor([[-1.5, -1.0, -9.0], [-2.0, -3.0, -4.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert sequence_kl(log_probs, reference, mask).tolist() == [-0.5, 6.0]
    assert sequence_kl(log_probs, reference, mask, estimator="absolute_k1").tolist() == [1.5, 6.0]


@pytest.mark.parametrize("padding", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("absolute", [False, True])
def test_padding_may_hold_anything(padding, absolute):
    log_probs = torch.tensor([[-1.0, padding, padding]])
    reference = torch.tensor([[-3.0, padding, 0.0]])
    mask = torch.tensor([[True, False, False]])
    assert sequence_kl(
        log_probs, reference, mask, estimator="absolute_k1" if absolute else "k1"
    ).tolist() == [2.0]


def test_an_empty_response_has_no_kl():
    nothing = torch.full((2, 3), math.nan)
    assert sequence_kl(nothing, nothing, torch.zeros(2, 3, dtype=torch.bool)).tolist() == [0.0, 0.0]
    nothing = torch.zeros(2, 0)
    assert sequence_kl(nothing, nothing, nothing.bool()).tolist() == [0.0] * 2


def test_it_carries_no_gradient():
    log_probs = torch.zeros(1, 2, requires_grad=True)
    assert not sequence_kl(
        log_probs, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    ).requires_grad


def test_k1_is_unbiased_and_its_absolute_value_is_not():
    """Compare exact expectations over all tokens of a small distribution."""
    policy = torch.tensor([0.5, 0.3, 0.2]).double()
    reference = torch.tensor([0.2, 0.2, 0.6]).double()
    true_kl = (policy * (policy / reference).log()).sum()
    mask = torch.ones(3, 1, dtype=torch.bool)
    columns = policy.log()[:, None], reference.log()[:, None], mask
    torch.testing.assert_close((policy * sequence_kl(*columns)).sum(), true_kl)
    assert (policy * sequence_kl(*columns, estimator="absolute_k1")).sum() > true_kl + 0.1


def test_k1_and_k3_are_unbiased_as_values_and_k2_is_not():
    policy, reference = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64)
    true_kl = float((policy * (policy / reference).log()).sum())
    expected = {}
    for estimator in (k1, absolute_k1, k2, k3):
        estimates = policy * estimator(policy.log(), reference.log())
        expected[estimator.__name__] = float(estimates.sum())
    unbiased = [name for name, value in expected.items() if abs(value - true_kl) < 1e-12]
    assert unbiased == ["k1", "k3"]


def test_reductions():
    values = torch.tensor([[1.0, 2.0, 0.0], [4.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    mask = length_mask(torch.tensor([2, 1, 0]), 3)
    assert reduce_over_tokens(values, mask).tolist() == [3.0, 4.0, 0.0]
    assert reduce_over_tokens(values, mask, "mean").tolist() == [1.5, 4.0, 0.0]
    nothing = torch.zeros(2, 0)
    assert reduce_over_tokens(nothing, nothing.bool(), "mean").tolist() == [0.0, 0.0]


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs of two policies, with NaN and infinity in the padding, and the mask.

    The first response is empty.
    """
    generator = torch.Generator().manual_seed(seed)
    log_probs, reference = -3 * torch.rand(2, 4, 5, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([0, 1, 3, 5])
    mask = length_mask(lengths, 5)
    return torch.where(mask, log_probs, math.nan), torch.where(mask, reference, -math.inf), mask


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("reduction", KL_REDUCTIONS)
def test_every_estimate_of_a_sequence_by_hand(estimator, reduction):
    formula = {
        "k1": lambda d: d,
        "absolute_k1": abs,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(-d) - 1 + d,
    }[estimator]
    log_probs, reference, mask = batch(1)
    expected = []
    for policy, other, kept in zip(log_probs, reference, mask, strict=True):
        tokens = [formula(ratio) for ratio in (policy[kept] - other[kept]).tolist()]
        count = max(len(tokens), 1) if reduction == "mean" else 1
        expected.append(math.fsum(tokens) / count)
    tokens_kl = token_kl(log_probs, reference, mask, estimator=estimator)
    reduced = reduce_over_tokens(tokens_kl, mask, reduction)
    assert reduced.tolist() == pytest.approx(expected, rel=1e-12)


class TestInTheLoss:
    @pytest.mark.parametrize("estimator", KL_ESTIMATORS)
    @pytest.mark.parametrize("weights", KL_LOSS_WEIGHTS)
    def test_value_and_gradient_are_written_out_by_hand(self, estimator, weights):
        """d/dl of w_t k_t: its own slope, and the estimates that the token influences."""
        slope = {
            "k1": lambda d: 1.0,
            "absolute_k1": lambda d: math.copysign(1.0, d),
            "k2": lambda d: d,
            "k3": lambda d: 1.0 - math.exp(-d),
        }[estimator]
        log_probs, reference, mask = batch(2)
        leaf = log_probs.clone().requires_grad_()
        factor = torch.arange(1.0, 21.0, dtype=torch.float64).view(4, 5)
        terms = kl_loss_terms(leaf, reference, mask, estimator=estimator, weights=weights)
        values = token_kl(log_probs, reference, mask, estimator=estimator)
        assert torch.equal(terms, values), "the score-function term has no value"
        (factor * terms).sum().backward()

        weighted = (factor * values).tolist()
        expected = torch.zeros(4, 5, dtype=torch.float64)
        for i in range(4):
            length = int(mask[i].sum())
            for t in range(length):
                log_ratio = float(log_probs[i, t] - reference[i, t])
                expected[i, t] = factor[i, t] * slope(log_ratio)
                answers_for = {"none": [], "token": [t], "prefix": range(t, length)}[weights]
                expected[i, t] += sum(weighted[i][s] for s in answers_for)
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=1e-12)

    def test_the_reference_gets_no_gradient(self):
        log_probs, reference, mask = batch(3)
        reference.requires_grad_()
        kl_loss_terms(log_probs.clone().requires_grad_(), reference, mask).sum().backward()
        assert reference.grad is None


class TestKLCoefficient:
    @settings(deadline=None, max_examples=50)
    @given(
        st.floats(1e-4, 10),
        st.floats(-10, 1e3),
        st.floats(1e-3, 1e3),
        st.integers(0, 10**6),
        st.floats(1.0, 1e6),
    )
    def test_is_the_formula_of_ziegler_and_stays_positive(
        self, value, measured, target, responses, horizon
    ):
        """beta (1 + clip((KL - target) / target, -0.2, 0.2) min(n, horizon) / horizon)."""
        beta = KLCoefficient(value, target, horizon)
        beta.update(measured, responses)
        error = min(0.2, max(-0.2, (measured - target) / target))
        expected = value * (1 + error * min(responses, horizon) / horizon)
        assert beta.value == pytest.approx(expected, rel=1e-9)
        assert 0.8 * value * (1 - 1e-12) <= beta.value <= 1.2 * value * (1 + 1e-12)

    @pytest.mark.parametrize(
        ("measured", "expected"),
        [(6.0, 1.0), (6.6, 1.01), (5.4, 0.99), (60.0, 1.02), (0.0, 0.98), (-3.0, 0.98)],
    )
    def test_by_hand(self, measured, expected):
        """With a target of 6 nats and a tenth of the horizon."""
        beta = KLCoefficient(1.0, 6.0, 1000.0)
        beta.update(measured, 100)
        assert beta.value == pytest.approx(expected)

    def test_a_step_of_many_horizons_does_not_turn_it_negative(self):
        beta = KLCoefficient(0.1, 1.0, horizon=100.0)
        beta.update(0.0, 512)
        assert beta.value == pytest.approx(0.08)

    @pytest.mark.parametrize("measured", [math.nan, math.inf, -math.inf])
    def test_a_kl_that_is_not_finite_changes_nothing(self, measured):
        beta = KLCoefficient(0.1, 1.0)
        beta.update(measured, 100)
        assert beta.value == 0.1

    @pytest.mark.parametrize("measured", [0.0, 100.0, math.nan])
    def test_without_a_target_it_stays(self, measured):
        beta = KLCoefficient(0.1)
        beta.update(measured, 10**6)
        assert beta.value == 0.1
