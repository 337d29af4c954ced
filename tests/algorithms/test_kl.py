"""KL estimates of sequences."""

from __future__ import annotations

import math

import pytest
import torch

from reinforce_rl.algorithms.kl import KLCoefficient, absolute_k1, k1, k2, k3, kl_loss_terms, sequence_kl


def test_the_estimators_a_token():
    log_probs, reference = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.5, -1.0, 0.0]])
    assert k1(log_probs, reference).tolist() == [[0.5, -1.0, 0.0]]
    assert absolute_k1(log_probs, reference).tolist() == [[0.5, 1.0, 0.0]]


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
    assert sequence_kl(log_probs, reference, mask, estimator="absolute_k1" if absolute else "k1").tolist() == [2.0]


def test_an_empty_response_has_no_kl():
    nothing = torch.full((2, 3), math.nan)
    assert sequence_kl(nothing, nothing, torch.zeros(2, 3, dtype=torch.bool)).tolist() == [0.0, 0.0]
    assert sequence_kl(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0.0] * 2


def test_it_carries_no_gradient():
    log_probs = torch.zeros(1, 2, requires_grad=True)
    assert not sequence_kl(log_probs, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)).requires_grad


def test_k1_is_unbiased_and_its_absolute_value_is_not():
    """Exact expectations over all tokens of a small distribution."""
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    true_kl = (policy * (policy / reference).log()).sum()
    mask = torch.ones(3, 1, dtype=torch.bool)
    columns = policy.log()[:, None], reference.log()[:, None], mask
    torch.testing.assert_close((policy * sequence_kl(*columns)).sum(), true_kl)
    assert (policy * sequence_kl(*columns, estimator="absolute_k1")).sum() > true_kl + 0.1


@pytest.mark.parametrize(("name", "function"), [("k1", k1), ("absolute_k1", absolute_k1), ("k2", k2), ("k3", k3)])
@pytest.mark.parametrize("weights", ["none", "token", "prefix"])
def test_in_the_loss_the_value_is_the_estimate_and_the_gradient_has_its_score_terms(name, function, weights):
    log_probs = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, math.nan, math.nan]], dtype=torch.float64)
    reference = torch.tensor([[-1.5, -1.0, -0.7], [-0.9, math.nan, math.inf]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    leaf = log_probs.clone().requires_grad_()
    terms = kl_loss_terms(leaf, reference, mask, estimator=name, weights=weights)
    terms.sum().backward()
    assert leaf.grad is not None and not leaf.grad[~mask].any() and not terms[~mask].any()
    own = log_probs.clone().requires_grad_()
    values = torch.where(mask, function(torch.where(mask, own, 0.0), torch.where(mask, reference, 0.0)), 0.0)
    torch.testing.assert_close(terms.detach(), values.detach())
    values.sum().backward()
    for row in range(2):
        for t in range(int(mask[row].sum())):
            score = {"none": 0.0, "token": values[row, t], "prefix": values[row, t:].sum()}[weights]
            assert own.grad is not None
            assert float(leaf.grad[row, t]) == pytest.approx(float(own.grad[row, t] + score), abs=1e-12)


class TestSteeredBeta:
    def test_it_follows_zieglers_rule(self):
        beta = KLCoefficient(0.1, target=6.0, horizon=1000.0)
        beta.update(6.6, 50)
        assert beta.value == pytest.approx(0.1 * (1 + 0.1 * 50 / 1000))
        before = beta.value
        beta.update(0.1, 50)  # an error of almost -1 counts as -0.2
        assert beta.value == pytest.approx(before * (1 - 0.2 * 50 / 1000))
        before = beta.value
        beta.update(100.0, 50)
        assert beta.value == pytest.approx(before * (1 + 0.2 * 50 / 1000))

    @pytest.mark.parametrize(("target", "measured"), [(None, 50.0), (6.0, math.nan), (6.0, math.inf), (6.0, 6.0)])
    def test_what_leaves_it_alone(self, target, measured):
        beta = KLCoefficient(0.1, target=target)
        beta.update(measured, 1000)
        assert beta.value == 0.1
