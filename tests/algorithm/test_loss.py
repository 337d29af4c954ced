"""The loss and its gradient, in closed form and however the batch is cut."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.batches import sequences
from helpers.losses import random_batch, reinforce_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_rl.algorithm.loss import Denominators
from reinforce_rl.config.actor import LOSS_AGGREGATIONS

WORKED = Path(__file__).with_name("worked_example.json")


@pytest.mark.parametrize("part", ["rloo", "reinforce_batch_mean"])
def test_the_worked_example(part):
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


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 12), st.integers(0, 10**6))
def test_the_shares_of_micro_batches_sum_to_the_loss(rows, width, size, seed):
    log_probs, mask, advantages, valid = random_batch(rows, width, seed)
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
    log_probs, mask, advantages, trains = random_batch(9, 5, seed=3)
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
