"""The loss and its gradient, in closed form and however the batch is cut."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.batches import sequences
from helpers.losses import reinforce_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_rl.algorithms.choices import LOSS_AGGREGATIONS
from reinforce_rl.algorithms.loss import (
    Denominators,
    LossInputs,
    LossSettings,
    generator_weights,
    policy_loss,
    policy_terms,
)

WORKED = Path(__file__).parents[2].parent / "shared" / "data" / "worked_example.json"


@pytest.mark.parametrize("part", ["rloo", "reinforce_batch_mean"])
def test_the_worked_example(part):
    if not WORKED.exists():
        pytest.skip(f"{WORKED} is not there")
    example = json.loads(WORKED.read_text())[part]
    log_probs = torch.tensor(example["logprobs"], dtype=torch.float64).flatten(0, -2).requires_grad_()
    advantages = torch.tensor(example["advantages"], dtype=torch.float64).flatten()
    count = len(advantages)
    everything = torch.ones(log_probs.shape, dtype=torch.bool)
    loss = reinforce_loss(log_probs, everything, advantages, everything[:, 0], sequences(count))
    loss.backward()
    torch.testing.assert_close(loss.item(), example["loss_mean_over_sequences"], rtol=0, atol=1e-9)
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, (-advantages / count)[:, None].expand_as(log_probs))


def batch(rows: int, width: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(rows, width, dtype=torch.float64, generator=generator) * 5
    lengths = torch.randint(0, width + 1, (rows,), generator=generator)
    mask = torch.arange(width)[None, :] < lengths[:, None]
    advantages = torch.randn(rows, dtype=torch.float64, generator=generator)
    valid = torch.rand(rows, generator=generator) < 0.7
    return log_probs, mask, advantages, valid


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 12), st.integers(0, 10**6))
def test_the_shares_of_micro_batches_sum_to_the_loss(rows, width, size, seed):
    log_probs, mask, advantages, valid = batch(rows, width, seed)
    whole = log_probs.clone().requires_grad_()
    num_valid = float(valid.sum())
    loss = reinforce_loss(whole, mask, advantages, valid, sequences(num_valid))
    loss.backward()

    parts = log_probs.clone().requires_grad_()
    total = 0.0
    for rows_of_part in torch.arange(rows).split(size):
        share = reinforce_loss(
            parts[rows_of_part],
            mask[rows_of_part],
            advantages[rows_of_part],
            valid[rows_of_part],
            sequences(num_valid),
        )
        share.backward()
        total += share.item()
    assert total == pytest.approx(loss.item(), abs=1e-12)
    assert whole.grad is not None and parts.grad is not None
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=0)

    by_hand = sum(
        -float(advantages[i]) * math.fsum(log_probs[i][mask[i]].tolist()) for i in range(rows) if valid[i]
    ) / max(num_valid, 1)
    assert loss.item() == pytest.approx(by_hand, abs=1e-12)


@pytest.mark.parametrize("anything", [math.inf, -math.inf, math.nan])
def test_what_is_left_out_gives_exactly_no_gradient(anything):
    log_probs = torch.tensor([[-1.0, -2.0], [anything, anything], [-3.0, anything]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    advantages = torch.tensor([2.0, anything, -1.0])
    loss = reinforce_loss(log_probs, mask, advantages, torch.tensor([True, False, True]), sequences(2))
    loss.backward()
    assert loss.item() == 1.5
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[-1.0, -1.0], [0.0, 0.0], [0.5, 0.0]]


def test_without_a_valid_sample_the_loss_is_zero():
    log_probs = torch.full((2, 3), -1.0, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    loss = reinforce_loss(log_probs, mask, torch.ones(2), torch.zeros(2, dtype=torch.bool), sequences(0))
    loss.backward()
    assert loss.item() == 0.0 and log_probs.grad is not None and not log_probs.grad.any()


def test_no_gradient_flows_through_the_advantages():
    log_probs = torch.full((1, 2), -1.0, requires_grad=True)
    advantages = (log_probs.sum(dim=1) * 3).abs()
    ones = torch.ones(1, 2, dtype=torch.bool)
    reinforce_loss(log_probs, ones, advantages, ones[:, 0], sequences(1)).backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == [[-6.0, -6.0]]


def test_lengths_are_not_normalised_away():
    """Twice as many tokens of the same log-prob make twice the loss: the response is one action."""
    short = torch.tensor([[True, False]])
    long = torch.tensor([[True, True]])
    arguments = torch.ones(1), torch.ones(1, dtype=torch.bool), sequences(1)
    log_probs = torch.full((1, 2), -1.5)
    assert reinforce_loss(log_probs, long, *arguments) == 2 * reinforce_loss(log_probs, short, *arguments) == 3.0


@pytest.mark.parametrize("aggregation", LOSS_AGGREGATIONS)
def test_every_aggregation_is_its_formula_however_the_batch_is_cut(aggregation):
    log_probs, mask, advantages, trains = batch(9, 5, seed=3)
    lengths = mask.sum(1)
    tokens = float(lengths[trains].sum())
    count = float(trains.sum())
    denominators = Denominators(count, tokens, fixed_length=7.0)
    weight = {
        "sequence_sum": lambda length: 1 / count,
        "sequence_mean": lambda length: 1 / (count * max(length, 1)),
        "token_mean": lambda length: 1 / tokens,
        "fixed_length": lambda length: 1 / (count * 7.0),
    }[aggregation]
    expected = sum(
        -float(advantages[i]) * float(log_probs[i][mask[i]].sum()) * weight(int(lengths[i]))
        for i in range(9)
        if trains[i]
    )
    for size in (9, 4, 1):
        shares = [
            reinforce_loss(log_probs[r], mask[r], advantages[r], trains[r], denominators, aggregation)
            for r in torch.arange(9).split(size)
        ]
        assert float(sum(shares)) == pytest.approx(expected, abs=1e-12)


def tokens(seed: int, noise: float = 0.4):
    """log-probs, old ones, mask, one advantage a response; float64 [5, 4]."""
    log_probs, mask, advantages, _ = batch(5, 4, seed)
    log_probs = torch.where(mask, log_probs / 5, 0.0)
    generator = torch.Generator().manual_seed(seed + 1)
    drift = noise * torch.randn(log_probs.shape, dtype=torch.float64, generator=generator)
    return log_probs, torch.where(mask, log_probs + drift, 0.0), mask, advantages[:, None].expand(mask.shape)


@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_geometric"])
@pytest.mark.parametrize("seed", range(3))
def test_clipped_ratios_are_ppos_written_out(ratio, seed):
    log_probs, old, mask, advantages = tokens(seed)
    leaf = log_probs.clone().requires_grad_()
    terms, rho, clipped = policy_terms(leaf, old, advantages, mask, ratio=ratio, clip_low=0.1, clip_high=0.3)
    terms[mask].sum().backward()
    assert clipped[mask].any() and not clipped[mask].all()
    for row in range(5):
        length = int(mask[row].sum())
        differences = [float(log_probs[row, t] - old[row, t]) for t in range(length)]
        for t in range(length):
            whole = sum(differences)
            exponent = {"token": differences[t], "sequence": whole, "sequence_geometric": whole / length}[ratio]
            r, a = math.exp(exponent), float(advantages[row, t])
            value = min(r * a, min(max(r, 0.9), 1.3) * a)
            stopped = r > 1.3 if a > 0 else r < 0.9
            shared = length if ratio == "sequence" else 1
            assert float(rho[row, t]) == pytest.approx(r)
            assert bool(clipped[row, t]) == stopped
            assert float(terms[row, t].detach()) == pytest.approx(-value / shared)
            # Each of the response's terms moves each of its tokens under the ratios of a whole response.
            assert leaf.grad is not None
            assert float(leaf.grad[row, t]) == pytest.approx(0.0 if stopped else -r * a, abs=1e-12)


def test_a_second_passs_rounding_would_clip_and_the_first_pass_cannot():
    """Per-token rounding as of bf16 over a long response: a sequence ratio of it leaves 1 +- 0.2 now and then."""
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(64, 2000, generator=generator)
    noisy = log_probs + 0.01 * torch.randn(log_probs.shape, generator=generator)
    mask = torch.ones(log_probs.shape, dtype=torch.bool)
    inputs = LossInputs(mask, torch.ones(log_probs.shape), mask[:, 0])
    settings = LossSettings(ratio="sequence")
    _, first = policy_loss(log_probs, None, inputs, sequences(64), settings)
    _, second = policy_loss(noisy, None, replace(inputs, old_log_probs=log_probs), sequences(64), settings)
    assert (first["clipped"], first["weights"], first["squares"]) == (0, 64 * 2000, 64 * 2000)
    assert second["clipped"] > 0.1 * 64 * 2000


@pytest.mark.parametrize("correction", ["token", "sequence"])
def test_generator_weights_are_capped_ratios_without_gradient(correction):
    old, generator, mask, _ = tokens(4)
    found = generator_weights(old.requires_grad_(), generator, mask, correction=correction, cap=1.2)
    assert not found.requires_grad
    for row in range(5):
        length = int(mask[row].sum())
        for t in range(length):
            picked = [t] if correction == "token" else range(length)
            ratio = math.exp(sum(float(old[row, s] - generator[row, s]) for s in picked))
            assert float(found[row, t]) == pytest.approx(min(ratio, 1.2))
    assert (found == 1.2).any() and (found < 1.2).any()


def test_entropy_kl_and_the_sums():
    """Every term of the loss by hand, on a batch of two responses; one token of the second is padding."""
    log_probs = torch.tensor([[-1.0, -2.0], [-0.5, math.nan]], dtype=torch.float64)
    entropy = torch.tensor([[0.3, 0.7], [0.2, math.inf]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1.5, -2.0], [-0.1, math.nan]], dtype=torch.float64)
    generator = torch.tensor([[-1.0, -3.0], [-0.5, math.nan]], dtype=torch.float64)
    advantages = torch.tensor([[2.0, 2.0], [-1.0, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    settings = LossSettings(entropy_bonus=0.1, kl_estimator="k2", kl_weights="none", generator_ratio_cap=2.0)
    inputs = LossInputs(mask, advantages, mask[:, 0], None, generator, reference)
    loss, sums = policy_loss(log_probs, entropy, inputs, sequences(2), settings, kl_coefficient=0.5)
    policy = -(2 * -1.0 + 2 * -2.0 - 1 * -0.5)
    kl = 0.5 * (0.5**2 / 2 + 0.0 + 0.4**2 / 2)
    assert loss.item() == pytest.approx((policy + kl - 0.1 * (0.3 + 0.7 + 0.2)) / 2)
    loss.backward()
    assert entropy.grad is not None and entropy.grad.tolist() == [[-0.05, -0.05], [-0.05, 0.0]]
    expected = {"tokens": 3, "clipped": 0, "weights": 3, "squares": 3, "entropy": 1.2, "generator_gap": 1.0}
    expected |= {"generator_kl": math.e - 1 - 1, "generator_capped": 1}
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(expected)
