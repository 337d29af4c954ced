"""The loss of a micro-batch and its terms, by hand, by formula and for any split of the batch."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.batches import sequences
from helpers.choices import (
    GENERATOR_CORRECTIONS,
    IMPORTANCE_RATIOS,
    KL_ESTIMATORS,
    KL_LOSS_WEIGHTS,
    LOSS_AGGREGATIONS,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforce_rl.algorithm.kl import kl_loss_terms
from reinforce_rl.algorithm.loss import (
    MAX_LOG_RATIO,
    Denominators,
    LossInputs,
    LossSettings,
    generator_weights,
    policy_loss,
    policy_terms,
    token_weights,
)
from reinforce_rl.data.batches import length_mask

WORKED = Path(__file__).with_name("worked_example.json")


def reinforce_loss(
    log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    trains: Tensor,
    denominators: Denominators,
    aggregation: str = "sequence_sum",
) -> Tensor:
    """Compute REINFORCE with one advantage per response: [N]."""
    inputs = LossInputs(mask, advantages[:, None].expand(mask.shape), trains)
    return policy_loss(log_probs, None, inputs, denominators, LossSettings(aggregation))[0]


def random_batch(rows: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs [rows, width], mask, advantages [rows] and the rows that train.

    Responses may be empty.
    """
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(rows, width, dtype=torch.float64, generator=generator) * 5
    lengths = torch.randint(0, width + 1, (rows,), generator=generator)
    mask = torch.arange(width)[None, :] < lengths[:, None]
    advantages = torch.randn(rows, dtype=torch.float64, generator=generator)
    valid = torch.rand(rows, generator=generator) < 0.7
    return log_probs, mask, advantages, valid


@pytest.mark.parametrize("part", ["rloo", "reinforce_batch_mean"])
def test_the_worked_example(part):
    example = json.loads(WORKED.read_text())[part]
    log_probs = (
        torch.tensor(example["logprobs"], dtype=torch.float64).flatten(0, -2).requires_grad_()
    )
    advantages = torch.tensor(example["advantages"], dtype=torch.float64).flatten()
    count = len(advantages)
    everything = torch.ones(log_probs.shape, dtype=torch.bool)
    loss = reinforce_loss(log_probs, everything, advantages, everything[:, 0], sequences(count))
    loss.backward()
    torch.testing.assert_close(loss.item(), example["loss_mean_over_sequences"], rtol=0, atol=1e-9)
    assert log_probs.grad is not None
    expected = (-advantages / count)[:, None].expand_as(log_probs)
    torch.testing.assert_close(log_probs.grad, expected)


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
    assert whole.grad is not None
    assert parts.grad is not None
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=0)

    terms = []
    for i in range(rows):
        if valid[i]:
            log_prob = math.fsum(log_probs[i][mask[i]].tolist())
            terms.append(-float(advantages[i]) * log_prob)
    by_hand = sum(terms) / max(num_valid, 1)
    assert loss.item() == pytest.approx(by_hand, abs=1e-12)


@pytest.mark.parametrize("anything", [math.inf, -math.inf, math.nan])
def test_what_is_left_out_gives_exactly_no_gradient(anything):
    log_probs = torch.tensor(
        [[-1.0, -2.0], [anything, anything], [-3.0, anything]], requires_grad=True
    )
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    advantages = torch.tensor([2.0, anything, -1.0])
    loss = reinforce_loss(
        log_probs, mask, advantages, torch.tensor([True, False, True]), sequences(2)
    )
    loss.backward()
    assert loss.item() == 1.5
    assert log_probs.grad is not None
    expected = [[-1.0, -1.0], [0.0, 0.0], [0.5, 0.0]]
    assert log_probs.grad.tolist() == expected


def test_without_a_valid_sample_the_loss_is_zero():
    log_probs = torch.full((2, 3), -1.0, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    loss = reinforce_loss(
        log_probs, mask, torch.ones(2), torch.zeros(2, dtype=torch.bool), sequences(0)
    )
    loss.backward()
    assert loss.item() == 0.0
    assert log_probs.grad is not None
    assert not log_probs.grad.any()


def test_no_gradient_flows_through_the_advantages():
    log_probs = torch.full((1, 2), -1.0, requires_grad=True)
    advantages = (log_probs.sum(dim=1) * 3).abs()
    ones = torch.ones(1, 2, dtype=torch.bool)
    reinforce_loss(log_probs, ones, advantages, ones[:, 0], sequences(1)).backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[-6.0, -6.0]]


def test_lengths_are_not_normalised_away():
    """Twice as many tokens of equal log-prob double the loss: the response is one action."""
    short = torch.tensor([[True, False]])
    long = torch.tensor([[True, True]])
    arguments = torch.ones(1), torch.ones(1, dtype=torch.bool), sequences(1)
    log_probs = torch.full((1, 2), -1.5)
    assert (
        reinforce_loss(log_probs, long, *arguments)
        == 2 * reinforce_loss(log_probs, short, *arguments)
        == 3.0
    )


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
    expected = 0.0
    for i in range(9):
        if trains[i]:
            log_prob = float(log_probs[i][mask[i]].sum())
            expected -= float(advantages[i]) * log_prob * weight(int(lengths[i]))
    for size in (9, 4, 1):
        shares = []
        for rows in torch.arange(9).split(size):
            arguments = (log_probs[rows], mask[rows], advantages[rows], trains[rows])
            shares.append(reinforce_loss(*arguments, denominators, aggregation))
        assert float(sum(shares)) == pytest.approx(expected, abs=1e-12)


def by_formula(
    new: list[list[float]],
    old: list[list[float]],
    advantages: list[float],
    ratio: str,
    low: float,
    high: float,
) -> tuple[list[float], list[list[float]], list[list[float]], list[list[bool]]]:
    """Return each response's sum of terms, and each token's gradient, ratio and clip flag.

    The flag is set if clipping removed the token's gradient.
    """
    values = []
    gradients = []
    ratios = []
    stopped = []
    for logs, olds, a in zip(new, old, advantages, strict=True):
        differences = [x - y for x, y in zip(logs, olds, strict=True)]
        length = len(logs)
        log_ratio = math.fsum(differences)
        if ratio == "sequence_geometric":
            log_ratio = log_ratio / length
        rhos = [math.exp(log_ratio)] * length
        if ratio == "token":
            rhos = [math.exp(difference) for difference in differences]
        if ratio == "none":
            rhos = [1.0] * length
            stop = [False] * length
            surrogate = [-a * x for x in logs]
        else:
            # The pessimistic minimum: a good sample stops above the range, a bad one below it.
            stop = []
            surrogate = []
            for rho in rhos:
                stop.append(rho > 1 + high if a > 0 else a < 0 and rho < 1 - low)
                clipped = min(max(rho, 1 - low), 1 + high)
                surrogate.append(-min(rho * a, clipped * a))
        values.append(math.fsum(surrogate) / (length if ratio == "sequence" else 1))
        pairs = zip(stop, rhos, strict=True)
        gradients.append([0.0 if is_stopped else -a * rho for is_stopped, rho in pairs])
        ratios.append(rhos)
        stopped.append(stop)
    return values, gradients, ratios, stopped


class TestPolicyTerms:
    @pytest.mark.parametrize("ratio", IMPORTANCE_RATIOS)
    @settings(deadline=None, max_examples=40)
    @given(
        seed=st.integers(0, 10**6),
        low=st.sampled_from([0.0, 0.1, 0.2, 1.0]),
        high=st.sampled_from([0.0, 0.2, 0.28, 3.0]),
        spread=st.sampled_from([0.05, 0.5, 3.0]),
    )
    def test_is_ppo_written_out(self, ratio, seed, low, high, spread):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 6, (4,), generator=generator)
        mask = length_mask(lengths, 5)
        tables = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
        leaf = (tables[0] - 3).requires_grad_()
        new = torch.where(mask, leaf, 0.0)
        old = torch.where(mask, tables[0] - 3 + spread * tables[1], 0.0)
        # Beyond the bound the ratio differs from the formula.
        log_ratios = (new.detach() - old).sum(1)
        assume(float(log_ratios.abs().max()) < MAX_LOG_RATIO)
        advantages = torch.randn(4, generator=generator, dtype=torch.float64)
        advantages[0] = 0.0
        by_token = torch.where(mask, advantages[:, None], 0.0)
        terms, rho, clipped = policy_terms(
            new, old, by_token, mask, ratio=ratio, clip_low=low, clip_high=high
        )
        torch.where(mask, terms, 0.0).sum().backward()
        rows = [new[i, :n].tolist() for i, n in enumerate(lengths.tolist())]
        olds = [old[i, :n].tolist() for i, n in enumerate(lengths.tolist())]
        values, gradients, ratios, stopped = by_formula(
            rows, olds, advantages.tolist(), ratio, low, high
        )
        assert leaf.grad is not None
        assert not rho.requires_grad
        close = partial(pytest.approx, rel=1e-9, abs=1e-12)
        for i, n in enumerate(lengths.tolist()):
            assert terms[i, :n].sum().item() == close(values[i])
            assert leaf.grad[i, :n].tolist() == close(gradients[i])
            assert rho[i, :n].tolist() == pytest.approx(ratios[i], rel=1e-9)
            expected = stopped[i] + [False] * (5 - n)
            assert clipped[i].tolist() == expected
        assert not leaf.grad[~mask].any()

    @pytest.mark.parametrize(
        ("advantage", "stopped"), [(1.0, [False, False, True]), (-1.0, [True, False, False])]
    )
    def test_which_entries_count_as_clipped(self, advantage, stopped):
        """Only entries that would move further out are clipped; the way back stays open."""
        rho = torch.tensor([[0.5, 1.0, 1.5]])
        log_probs = rho.log().requires_grad_()
        mask = torch.ones(1, 3, dtype=torch.bool)
        advantages = advantage * torch.ones(1, 3)
        terms, _, clipped = policy_terms(
            log_probs, torch.zeros(1, 3), advantages, mask, ratio="token"
        )
        terms.sum().backward()
        assert clipped.tolist() == [stopped]
        assert log_probs.grad is not None
        assert [value == 0 for value in log_probs.grad[0].tolist()] == stopped

    @pytest.mark.parametrize("ratio", IMPORTANCE_RATIOS)
    @pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
    @pytest.mark.parametrize("difference", [-1e4, -200.0, 200.0, 1e4])
    def test_a_ratio_beyond_float32_gives_neither_nan_nor_infinity(
        self, ratio, advantage, difference
    ):
        """exp(200) is infinite in float32, and infinity times 0 is NaN.

        Either could appear in the value, or only in the gradient.
        """
        log_probs = torch.full((1, 3), -1.0).requires_grad_()
        old_log_probs = torch.full((1, 3), -1.0 - difference)
        mask = torch.ones(1, 3, dtype=torch.bool)
        advantages = torch.full((1, 3), advantage)
        trains = torch.tensor([True])
        inputs = LossInputs(mask, advantages, trains, old_log_probs=old_log_probs)
        loss, sums = policy_loss(
            log_probs, None, inputs, Denominators(1, 3, 3), LossSettings(importance_ratio=ratio)
        )
        loss.backward()
        assert log_probs.grad is not None
        assert torch.isfinite(log_probs.grad).all()
        assert torch.isfinite(loss)
        for value in sums.values():
            assert math.isfinite(value)
        if ratio != "none" and advantage:
            assert not log_probs.grad.any()
            expected = 3 * (difference > 0 or advantage < 0)
            assert sums["clipped"] == expected

    def test_below_the_bound_it_changes_nothing(self):
        log_probs = torch.tensor([[MAX_LOG_RATIO - 1e-3]], dtype=torch.float64).requires_grad_()
        mask = torch.ones(1, 1, dtype=torch.bool)
        advantages = -torch.ones(1, 1).double()
        terms, rho, clipped = policy_terms(
            log_probs, torch.zeros(1, 1), advantages, mask, ratio="token"
        )
        terms.sum().backward()
        assert log_probs.grad is not None
        assert float(log_probs.grad) == pytest.approx(math.exp(MAX_LOG_RATIO - 1e-3))
        assert float(rho) == pytest.approx(float(log_probs.grad))
        assert not clipped.any()

    def test_the_ratio_of_a_long_response_is_of_the_sum(self):
        """4,096 tokens of 0.001 each: exp(4.096).

        A product of rounded ratios, or a mean, would be wrong.
        """
        log_probs = torch.full((1, 4096), -2.0)
        old = log_probs - 1e-3
        everything = torch.ones(1, 4096, dtype=torch.bool)
        expected = math.exp(math.fsum((log_probs - old)[0].tolist()))
        for ratio, value in (
            ("sequence", expected),
            ("sequence_geometric", expected ** (1 / 4096)),
        ):
            terms, rho, _ = policy_terms(
                log_probs, old, -torch.ones(1, 4096), everything, ratio=ratio
            )
            torch.testing.assert_close(rho, torch.full((1, 4096), value), rtol=1e-5, atol=0)
            total = value if ratio == "sequence" else 4096 * value
            assert terms.sum().item() == pytest.approx(total, rel=1e-4)


class TestFirstPass:
    """Without old log-probs, the current policy has drawn the samples."""

    @pytest.mark.parametrize("ratio", IMPORTANCE_RATIOS)
    @pytest.mark.parametrize("aggregation", LOSS_AGGREGATIONS)
    @pytest.mark.parametrize("clip", [0.0, 0.2])
    def test_the_gradient_equals_the_one_without_a_ratio(self, ratio, aggregation, clip):
        log_probs, mask, advantages, trains = random_batch(9, 5, seed=4)
        inputs = LossInputs(mask, advantages[:, None].expand(9, 5), trains)
        denominators = Denominators(float(trains.sum()), float(mask[trains].sum()), 7.0)
        gradients = []
        for name in ("none", ratio):
            leaf = log_probs.clone().requires_grad_()
            settings_of = LossSettings(
                aggregation, importance_ratio=name, ratio_clip_low=clip, ratio_clip_high=clip
            )
            loss, sums = policy_loss(leaf, None, inputs, denominators, settings_of)
            loss.backward()
            gradients.append(leaf.grad)
            assert sums["clipped"] == 0
            assert sums["weights"] == sums["squares"] == sums["tokens"] > 0
        assert gradients[0].any()
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=0)

    @pytest.mark.parametrize("ratio", IMPORTANCE_RATIOS)
    def test_the_ratio_is_exactly_1_for_any_noise(self, ratio):
        """In a peer, noise of a second pass in bf16 zeroed 20 to 40 % of on-policy samples.

        The peer uses the ratio of a sequence.
        """
        clean = -3 * torch.rand(8, 512, generator=torch.Generator().manual_seed(0))
        noisy = clean.bfloat16().float()
        everything = torch.ones(8, 512, dtype=torch.bool)
        inputs = LossInputs(everything, torch.ones(8, 512), everything[:, 0])
        second = LossInputs(everything, torch.ones(8, 512), everything[:, 0], old_log_probs=clean)
        settings_of = LossSettings(
            importance_ratio=ratio, ratio_clip_low=1e-6, ratio_clip_high=1e-6
        )
        sums = policy_loss(noisy, None, inputs, sequences(8), settings_of)[1]
        assert sums["clipped"] == 0
        assert sums["weights"] == sums["squares"] == 8 * 512
        if ratio != "none":
            assert policy_loss(noisy, None, second, sequences(8), settings_of)[1]["clipped"] > 0, (
                "or this sees nothing"
            )


class TestGeneratorWeights:
    OLD = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -1.0, -1.0]]).double().requires_grad_()
    GENERATOR = torch.tensor([[-1.5, -1.0, 0.0], [-1.0, -3.0, -1.5]]).double()
    MASK = torch.tensor([[True, True, False], [True, True, True]])

    def test_by_token_and_by_response(self):
        arguments = self.OLD, self.GENERATOR, self.MASK
        e = math.exp
        token = generator_weights(*arguments, correction="token", cap=5.0)
        expected = torch.tensor([[e(0.5), e(-1), 1], [1, 5.0, e(0.5)]]).double()
        torch.testing.assert_close(token, expected)
        whole = generator_weights(*arguments, correction="sequence", cap=5.0)
        expected = torch.tensor([[e(-0.5), e(-0.5), 1], [5.0, 5.0, 5.0]]).double()
        torch.testing.assert_close(whole, expected)
        assert not token.requires_grad
        assert not whole.requires_grad
        expected = [[1.0] * 3] * 2
        assert generator_weights(*arguments, correction="none", cap=5.0).tolist() == expected

    def test_masked_by_token_and_by_response(self):
        arguments = self.OLD, self.GENERATOR, self.MASK
        e = math.exp
        token = generator_weights(*arguments, correction="token_mask", cap=2.0)
        expected = torch.tensor([[e(0.5), 0, 1], [1, 0, e(0.5)]]).double()
        torch.testing.assert_close(token, expected)
        whole = generator_weights(*arguments, correction="sequence_mask", cap=2.0)
        expected = torch.tensor([[e(-0.5), e(-0.5), 1], [0, 0, 0]]).double()
        torch.testing.assert_close(whole, expected)
        assert not token.requires_grad
        assert not whole.requires_grad

    @pytest.mark.parametrize("correction", ["token_mask", "sequence_mask"])
    def test_a_ratio_beyond_float32_is_masked(self, correction):
        mask = torch.ones(2, 2, dtype=torch.bool)
        generator = torch.tensor([[-500.0] * 2, [500.0] * 2])
        weights = generator_weights(
            torch.zeros(2, 2), generator, mask, correction=correction, cap=2.0
        )
        assert weights.tolist() == [[0.0, 0.0], [0.0, 0.0]]

    @pytest.mark.parametrize("correction", ["token", "sequence"])
    def test_a_weight_beyond_float32_is_the_cap(self, correction):
        mask = torch.ones(2, 2, dtype=torch.bool)
        generator_log_probs = torch.tensor([[-500.0] * 2, [500.0] * 2])
        weights = generator_weights(
            torch.zeros(2, 2),
            generator_log_probs,
            mask,
            correction=correction,
            cap=2.0,
        )
        assert weights.tolist() == [[2.0, 2.0], [0.0, 0.0]]

    @pytest.mark.parametrize("correction", GENERATOR_CORRECTIONS)
    def test_they_multiply_the_policys_terms_only(self, correction):
        """KL and entropy keep their weight.

        They do not correct for samples that the generator draws too often.
        """
        log_probs, mask, advantages, trains = random_batch(6, 4, seed=8)
        noise = torch.randn(
            2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        by_token = advantages[:, None].expand(6, 4)
        reference_log_probs = log_probs + 0.1
        inputs = LossInputs(mask, by_token, trains, None, log_probs + noise[0], reference_log_probs)
        settings_of = LossSettings(
            generator_correction=correction,
            generator_ratio_cap=1.5,
            kl_estimator="k2",
            entropy_bonus=0.5,
        )
        entropy = noise[1].abs()
        leaf = log_probs.clone().requires_grad_()
        denominators = sequences(float(trains.sum()))
        loss, _ = policy_loss(leaf, entropy, inputs, denominators, settings_of, 0.3)
        loss.backward()
        kept = mask & trains[:, None]
        generator_log_probs = torch.where(kept, log_probs + noise[0], 0.0)
        weights = generator_weights(
            torch.where(kept, log_probs, 0.0),
            generator_log_probs,
            kept,
            correction=correction,
            cap=1.5,
        )
        other = log_probs.clone().requires_grad_()
        kl = kl_loss_terms(other, log_probs + 0.1, kept, estimator="k2", weights="prefix")
        terms = -advantages[:, None] * weights * other + 0.3 * kl
        expected = torch.where(kept, terms, 0.0).sum() / trains.sum()
        expected.backward()
        torch.testing.assert_close(leaf.grad, other.grad)


class TestAddedTerms:
    @pytest.mark.parametrize("aggregation", LOSS_AGGREGATIONS)
    def test_the_entropy_bonus_has_the_weights_of_the_loss(self, aggregation):
        log_probs, mask, advantages, trains = random_batch(7, 5, seed=3)
        entropy = torch.where(mask, log_probs.abs(), math.nan).requires_grad_()
        inputs = LossInputs(mask, 0 * advantages[:, None].expand(7, 5), trains)
        denominators = Denominators(float(trains.sum()), float(mask[trains].sum()), 7.0)
        loss, sums = policy_loss(
            log_probs, entropy, inputs, denominators, LossSettings(aggregation, entropy_bonus=0.4)
        )
        loss.backward()
        weights = token_weights(mask, trains, denominators, aggregation, torch.float64)
        assert entropy.grad is not None
        torch.testing.assert_close(entropy.grad, -0.4 * weights)
        kept = mask & trains[:, None]
        expected = -0.4 * float((weights * entropy.detach())[kept].sum())
        assert loss.item() == pytest.approx(expected)
        expected = entropy[kept].sum().item()
        assert float(sums["entropy"]) == pytest.approx(expected)

    def test_without_a_bonus_the_entropy_is_only_counted(self):
        log_probs, mask, advantages, trains = random_batch(7, 5, seed=3)
        entropy = log_probs.abs().requires_grad_()
        inputs = LossInputs(mask, advantages[:, None].expand(7, 5), trains)
        loss, sums = policy_loss(log_probs, entropy, inputs, sequences(5), LossSettings())
        assert not loss.requires_grad
        assert "entropy" in sums
        expected = float(policy_loss(log_probs, None, inputs, sequences(5), LossSettings())[0])
        assert loss.item() == expected

    @pytest.mark.parametrize("estimator", KL_ESTIMATORS)
    @pytest.mark.parametrize("weights", KL_LOSS_WEIGHTS)
    @pytest.mark.parametrize("aggregation", LOSS_AGGREGATIONS)
    def test_the_kl_has_the_weights_of_the_loss(self, estimator, weights, aggregation):
        log_probs, mask, _, trains = random_batch(6, 4, seed=5)
        reference = torch.where(mask, log_probs - 0.3, math.inf)
        nothing = torch.zeros(6, 4, dtype=torch.float64)
        denominators = Denominators(float(trains.sum()), float(mask[trains].sum()), 7.0)
        settings_of = LossSettings(aggregation, kl_estimator=estimator, kl_loss_weights=weights)
        leaf = log_probs.clone().requires_grad_()
        other = log_probs.clone().requires_grad_()
        inputs = LossInputs(mask, nothing, trains, reference_log_probs=reference)
        loss, _ = policy_loss(leaf, None, inputs, denominators, settings_of, 0.7)
        loss.backward()
        terms = kl_loss_terms(
            other, reference, mask & trains[:, None], estimator=estimator, weights=weights
        )
        expected = (
            0.7
            * (token_weights(mask, trains, denominators, aggregation, torch.float64) * terms).sum()
        )
        expected.backward()
        assert loss.item() == pytest.approx(expected.item())
        torch.testing.assert_close(leaf.grad, other.grad)
        assert float(policy_loss(log_probs, None, inputs, denominators, settings_of, 0.0)[0]) == 0.0


class TestSums:
    @pytest.mark.parametrize("ratio", IMPORTANCE_RATIOS)
    @pytest.mark.parametrize("correction", GENERATOR_CORRECTIONS)
    def test_by_brute_force(self, ratio, correction):
        """NaN and infinity in tokens that do not train; sums over micro-batches add up."""
        log_probs, mask, advantages, trains = random_batch(8, 5, seed=11)
        noise = 0.4 * torch.randn(
            2, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
        )
        kept = mask & trains[:, None]
        new = torch.where(kept, log_probs, math.nan)
        old = torch.where(kept, log_probs + noise[0], math.inf)
        generator = torch.where(kept, log_probs + noise[1], -math.inf)
        entropy = torch.where(kept, log_probs.abs(), math.nan)
        settings_of = LossSettings(
            importance_ratio=ratio, generator_correction=correction, generator_ratio_cap=1.2
        )
        every = advantages[:, None].expand(8, 5)
        names = ["tokens", "clipped", "weights", "squares", "entropy"]
        names += ["generator_logprob_diff", "generator_kl", "generator_capped"]
        if correction.endswith("_mask"):
            names.append("generator_masked")
        expected = dict.fromkeys(names, 0.0)
        for i in range(8):
            n = int(kept[i].sum())
            if not n:
                continue
            new_row = new[i, :n].tolist()
            old_row = old[i, :n].tolist()
            advantage = float(advantages[i])
            _, _, ratios, stopped = by_formula([new_row], [old_row], [advantage], ratio, 0.2, 0.2)
            gaps = (old[i, :n] - generator[i, :n]).tolist()
            for t, gap in enumerate(gaps):
                mismatch = math.fsum(gaps) if correction.startswith("sequence") else gap
                against = min(math.exp(mismatch), 1.2) if correction != "none" else 1.0
                if correction.endswith("_mask"):
                    outside = not 1 / 1.2 <= math.exp(mismatch) <= 1.2
                    expected["generator_masked"] += outside
                    against *= not outside
                weight = ratios[0][t] * against
                expected["tokens"] += 1
                expected["clipped"] += stopped[0][t]
                expected["weights"] += weight
                expected["squares"] += weight**2
                expected["entropy"] += float(entropy[i, t])
                expected["generator_logprob_diff"] += abs(gap)
                expected["generator_kl"] += math.exp(gap) - 1 - gap
                expected["generator_capped"] += math.exp(gap) > 1.2
        for size in (8, 3, 1):
            totals = dict.fromkeys(expected, 0.0)
            for rows_of_part in torch.arange(8).split(size):
                inputs = LossInputs(
                    *(v[rows_of_part] for v in (mask, every, trains, old, generator))
                )
                sums = policy_loss(
                    new[rows_of_part], entropy[rows_of_part], inputs, sequences(3), settings_of
                )[1]
                for value in sums.values():
                    assert value.dtype == torch.float64
                    assert not value.requires_grad
                totals = {name: totals[name] + float(sums[name]) for name in expected}
            assert totals == pytest.approx(expected, rel=1e-9)
        if correction.endswith("_mask"):
            assert 0 < expected["generator_masked"] < expected["tokens"], "or this sees nothing"

    def test_what_was_not_given_is_not_counted(self):
        log_probs, mask, advantages, trains = random_batch(3, 3, seed=0)
        inputs = LossInputs(mask, advantages[:, None].expand(3, 3), trains)
        sums = policy_loss(log_probs, None, inputs, sequences(3), LossSettings())[1]
        assert sums.keys() == {"tokens", "clipped", "weights", "squares"}
