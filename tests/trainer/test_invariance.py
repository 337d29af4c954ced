"""Invariance to order, a constant in a group, padding, micro-batches and layouts of ranks.

The whole chain from rewards to the gradient of each token's log-prob, in float64, for every
estimator, credit, whitening, aggregation and ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from helpers.choices import (
    ADVANTAGE_WHITENINGS,
    CREDIT_ASSIGNMENTS,
    GENERATOR_CORRECTIONS,
    IMPORTANCE_RATIOS,
    LOSS_AGGREGATIONS,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforce_rl.algorithm.advantages import (
    ADVANTAGE_ESTIMATORS,
    MAX_REWARD,
    RewardGroups,
    assign_credit,
    leave_one_out,
    whiten,
)
from reinforce_rl.algorithm.loss import Denominators, LossInputs, LossSettings, policy_loss

BETA = 0.1
FIXED_LENGTH = 7.0


@dataclass(frozen=True)
class Batch:
    """N samples with all fields that a loss may read."""

    rewards: Tensor
    group_ids: Tensor
    valid: Tensor
    lengths: Tensor
    log_probs: Tensor
    old: Tensor
    generator: Tensor
    reference: Tensor

    @property
    def mask(self) -> Tensor:
        positions = torch.arange(self.log_probs.shape[1])[None, :]
        return positions < self.lengths[:, None]

    def select(self, rows: Tensor) -> Batch:
        return Batch(*(values[rows] for values in vars(self).values()))

    def wider(self, columns: int, garbage: float) -> Batch:
        names = ("log_probs", "old", "generator", "reference")
        pad = torch.nn.functional.pad
        return replace(
            self, **{name: pad(getattr(self, name), (0, columns), value=garbage) for name in names}
        )


@dataclass(frozen=True)
class Choice:
    estimator: str = "rloo"
    credit: str = "sequence"
    whitening: str = "none"
    loss: LossSettings = field(default_factory=LossSettings)

    def __str__(self) -> str:
        loss = self.loss
        named = (
            self.estimator,
            self.credit,
            self.whitening,
            loss.loss_aggregation,
            loss.importance_ratio,
            loss.generator_correction,
        )
        return "-".join(named)

    @property
    def placement(self) -> str:
        # The configuration refuses the KL of single tokens in the reward of an estimator that
        # divides or chooses.
        return "reward" if ADVANTAGE_ESTIMATORS[self.estimator].only_subtracts else "advantage"


@st.composite
def batches(draw: st.DrawFn, largest: float = 0.99 * MAX_REWARD) -> Batch:
    count = draw(st.integers(2, 10))
    width = 4
    numbers = st.floats(-largest, largest, allow_nan=False)
    rewards = torch.tensor(
        draw(st.lists(numbers, min_size=count, max_size=count)), dtype=torch.float64
    )
    group_lists = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    groups = torch.tensor(draw(group_lists))
    valid = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    length_lists = st.lists(st.integers(1, width), min_size=count, max_size=count)
    lengths = torch.tensor(draw(length_lists))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    tables = -3 * torch.rand(4, count, width, generator=generator, dtype=torch.float64)
    log_probs = tables[0]
    noise = 0.3 * (tables[1:] + 1.5)
    return Batch(rewards, groups, valid, lengths, log_probs, *(log_probs + n for n in noise))


def chain(
    batch: Batch, choice: Choice, parts: list[Tensor] | None = None, micro: int = 100
) -> Tensor:
    """The gradient [N, T] by each log-prob.

    Args:
        parts: rows of each data-parallel rank; None for one rank.
        micro: sequences in a micro-batch.
    """
    everything = torch.arange(len(batch.rewards))
    parts = [everything] if parts is None else parts
    rewards = torch.where(batch.valid, batch.rewards, math.nan)
    kl_tokens = torch.where(batch.mask, batch.log_probs - batch.reference, 0.0)
    kl = kl_tokens.sum(1)
    in_reward = BETA if choice.placement == "reward" else 0.0
    # Advantages use the global batch, gathered in the order of ranks.
    order = torch.cat(parts)
    with_kl = rewards - in_reward * kl
    groups = RewardGroups.of(with_kl[order], batch.group_ids[order], batch.valid[order], 0.3)
    advantages_of_groups = ADVANTAGE_ESTIMATORS[choice.estimator].function(groups)
    counted = batch.mask[order] & advantages_of_groups.trains[:, None]
    advantages = assign_credit(
        advantages_of_groups,
        rewards[order],
        kl[order],
        kl_tokens[order],
        counted,
        beta=BETA,
        kl_placement=choice.placement,
        assignment=choice.credit,
    )
    sizes = [len(part) for part in parts]
    cuts = list(torch.arange(len(order)).split(sizes))
    if choice.whitening != "none":
        advantages = whiten_over_ranks(advantages, counted, choice.whitening, cuts)
    lengths = torch.where(advantages_of_groups.trains, batch.lengths[order], 0)
    denominators = Denominators(
        float(advantages_of_groups.trains.sum()), float(lengths.sum()), FIXED_LENGTH
    )
    leaf = batch.log_probs[order].clone().requires_grad_()
    for cut in cuts:
        for rows in cut.split(micro):
            inputs = LossInputs(
                batch.mask[order][rows],
                advantages[rows],
                advantages_of_groups.trains[rows],
                batch.old[order][rows],
                batch.generator[order][rows],
                batch.reference[order][rows],
            )
            policy_loss(leaf[rows], None, inputs, denominators, choice.loss, 0.2)[0].backward()
    assert leaf.grad is not None
    gradient = torch.zeros_like(leaf.grad)
    gradient[order] = leaf.grad
    return gradient


def whiten_over_ranks(advantages: Tensor, mask: Tensor, unit: str, cuts: list[Tensor]) -> Tensor:
    """Whiten as each rank would; a first round computes the totals, as an all-reduce would."""
    totals: list[list[Tensor]] = [[], []]

    def record(call: list[int]):
        def total(sums: Tensor) -> Tensor:
            totals[call[0]].append(sums)
            call[0] += 1
            return known[call[0] - 1] if len(known) >= call[0] else sums

        return total

    known: list[Tensor] = []
    for round_number in range(2):  # the second sum needs the first one's total
        for values in totals[round_number:]:
            values.clear()
        for rows in cuts:
            whiten(advantages[rows], mask[rows], unit=unit, total=record([0]))
        known.append(torch.stack(totals[round_number]).sum(0))
        for values in totals:
            values.clear()
    return torch.cat(
        [whiten(advantages[rows], mask[rows], unit=unit, total=record([0])) for rows in cuts]
    )


def assert_equal(gradient: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(gradient).all()
    scale = max(1.0, float(expected.abs().max()))
    assert (gradient - expected).abs().max() <= 1e-9 * scale


CHOICES = (
    [Choice(estimator=name) for name in ADVANTAGE_ESTIMATORS]
    + [
        Choice(credit=credit, whitening=w)
        for credit in CREDIT_ASSIGNMENTS
        for w in ADVANTAGE_WHITENINGS
    ]
    + [Choice(loss=LossSettings(loss_aggregation=name)) for name in LOSS_AGGREGATIONS]
    + [Choice(loss=LossSettings(importance_ratio=name)) for name in IMPORTANCE_RATIOS]
    + [Choice(loss=LossSettings(generator_correction=name)) for name in GENERATOR_CORRECTIONS]
)
every_choice = pytest.mark.parametrize("choice", list(dict.fromkeys(CHOICES)), ids=str)
a_few = settings(deadline=None, max_examples=12)


@every_choice
@a_few
@given(batch=batches(), seed=st.integers(0, 99))
def test_order_does_not_matter(choice, batch, seed):
    if choice.estimator == "raft":  # of equally good samples it takes the first
        offsets = torch.arange(len(batch.rewards)) * 1e-3
        batch = replace(batch, rewards=batch.rewards + offsets)
        batch = replace(batch, rewards=batch.rewards.clamp(-MAX_REWARD / 2, MAX_REWARD / 2))
        if len(set(batch.rewards.tolist())) < len(batch.rewards):
            return
    order = torch.randperm(len(batch.rewards), generator=torch.Generator().manual_seed(seed))
    assert_equal(chain(batch.select(order), choice), chain(batch, choice)[order])


@every_choice
@a_few
@given(
    batch=batches(),
    columns=st.integers(1, 3),
    garbage=st.sampled_from([0.0, math.nan, math.inf, -math.inf]),
)
def test_padding_does_not_matter(choice, batch, columns, garbage):
    gradient = chain(batch.wider(columns, garbage), choice)
    assert not gradient[:, -columns:].any()
    assert_equal(gradient[:, :-columns], chain(batch, choice))


@every_choice
@a_few
@given(batch=batches(), ranks=st.integers(1, 4), micro=st.integers(1, 4))
def test_micro_batches_and_ranks_do_not_matter(choice, batch, ranks, micro):
    """Groups lie whole on one rank; a rank may have none."""
    owner = batch.group_ids % ranks
    parts = [(owner == rank).nonzero()[:, 0] for rank in range(ranks)]
    by_group = torch.argsort(batch.group_ids % ranks, stable=True)
    if choice.estimator == "raft":  # its choice among equals follows the order, which ranks change
        batch = batch.select(by_group)
        parts = list(torch.arange(len(by_group)).split([len(p) for p in parts]))
    assert_equal(chain(batch, choice, parts, micro), chain(batch, choice))


@pytest.mark.parametrize("estimator", ["rloo", "prompt_mean", "grpo", "raft"])
@a_few
@given(batch=batches(1e3), constants=st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4))
def test_a_constant_added_to_a_groups_rewards_does_not_matter(estimator, batch, constants):
    rounded = replace(batch, rewards=batch.rewards.round(decimals=3))
    shifts = torch.tensor(constants, dtype=torch.float64).round(decimals=3)
    shifted = replace(rounded, rewards=rounded.rewards + shifts[batch.group_ids])
    choice = Choice(estimator=estimator)
    gradient = chain(shifted, choice)
    expected = chain(rounded, choice)
    # GRPO divides by a deviation that a shift changes in its last digits.
    scale = max(1.0, float(expected.abs().max()))
    assert (gradient - expected).abs().max() <= 1e-7 * scale


@a_few
@given(batch=batches(1e3), constant=st.floats(-1e3, 1e3))
def test_a_constant_added_to_all_rewards_does_not_matter_to_the_batch_mean(batch, constant):
    choice = Choice(estimator="batch_mean")
    gradient = chain(replace(batch, rewards=batch.rewards + constant), choice)
    expected = chain(batch, choice)
    scale = max(1.0, float(expected.abs().max()))
    assert (gradient - expected).abs().max() <= 1e-7 * scale


@a_few
@given(batch=batches())
def test_leave_one_out_is_the_mean_of_the_group_stretched(batch):
    groups = RewardGroups.of(batch.rewards, batch.group_ids, batch.valid)
    count = groups.count_by_group()
    stretch = torch.where(count > 1, count / (count - 1).clamp(min=1), 0.0)
    expected = torch.where(batch.valid, stretch * (groups.rewards - groups.mean_by_group()), 0.0)
    assert (leave_one_out(groups).values - expected).abs().max() <= 1e-9 * MAX_REWARD


@every_choice
@a_few
@given(batch=batches())
def test_invalid_samples_have_no_gradient_and_change_nobody_elses(choice, batch):
    gradient = chain(batch, choice)
    assert not gradient[~batch.valid].any()
    kept = batch.valid.nonzero()[:, 0]
    if len(kept):
        assert_equal(chain(batch.select(kept), choice), gradient[kept])


def test_equal_rewards_with_one_invalid_teach_nothing():
    """With the invalid sample in the divisor, the advantage would be -0.5."""
    valid = torch.tensor([True, True, True, False])
    groups = RewardGroups.of(torch.ones(4), torch.zeros(4).long(), valid)
    assert leave_one_out(groups).values.tolist() == [0.0] * 4


def test_nearly_equal_others_do_not_blow_up():
    """Divided by the others' deviation, [0, 0.95 x 7] gave users of a peer advantages of -2075."""
    rewards = torch.tensor([0.0] + [0.95] * 7)
    for estimator in ADVANTAGE_ESTIMATORS:
        groups = RewardGroups.of(rewards, torch.zeros(8).long())
        advantages = ADVANTAGE_ESTIMATORS[estimator].function(groups)
        assert advantages.values.abs().max() < 3


def hard_batches() -> dict[str, Batch]:
    """float32 batches, as in a run, that made peers divide by zero or overflow."""
    groups = torch.arange(7).repeat_interleave(2)
    generator = torch.Generator().manual_seed(0)
    log_probs = -3 * torch.rand(len(groups), 4, generator=generator)
    largest = 0.99 * MAX_REWARD
    rows = torch.arange(len(groups))[:, None]
    far = torch.where(rows % 2 == 0, 150.0, -150.0)
    near = (groups < 4)[:, None]
    old = torch.where(near, log_probs + 0.1, log_probs - far)
    generator_log_probs = torch.where(near, log_probs - 0.1, log_probs - far.roll(1, 0))
    easy = Batch(
        rewards=torch.randn(len(groups), generator=generator),
        group_ids=groups,
        valid=torch.ones(len(groups), dtype=torch.bool),
        lengths=torch.tensor([4, 1, 2, 3, 4, 1, 2] * 2),
        log_probs=log_probs,
        old=old,
        generator=generator_log_probs,
        reference=log_probs - 0.2,
    )
    samples = torch.arange(len(groups))
    rewards = [1 / 3, 1 / 3, largest, -largest, largest - 1 / 3, largest - 1 / 3]
    rewards = torch.tensor(rewards + [0.5, -0.5] * 4)
    lengths = torch.where(samples % 4 == 1, 0, easy.lengths)
    equal = torch.full((len(groups),), 1 / 3)
    one_token = torch.ones_like(groups)
    nothing = torch.zeros_like(easy.valid)
    return {
        "everything": replace(easy, rewards=rewards, lengths=lengths, valid=samples != 7),
        "equal rewards": replace(easy, rewards=equal, reference=log_probs),
        "one valid token": replace(easy, valid=samples == 4, lengths=one_token),
        "nothing valid": replace(easy, valid=nothing),
    }


HARD = hard_batches()


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS)
@pytest.mark.parametrize("whitening", ADVANTAGE_WHITENINGS)
@pytest.mark.parametrize("name", HARD)
def test_no_choice_gives_a_nan_or_an_infinity(estimator, whitening, name):
    """For each credit, aggregation and ratio that the configuration accepts."""
    for credit in CREDIT_ASSIGNMENTS:
        for aggregation in LOSS_AGGREGATIONS:
            for ratio in IMPORTANCE_RATIOS:
                if credit == "sequence" or not ratio.startswith("sequence"):
                    loss = LossSettings(aggregation, ratio, generator_correction="sequence")
                    choice = Choice(estimator, credit, whitening, loss)
                    gradient = chain(HARD[name], choice)
                    assert gradient.dtype == torch.float32, str(choice)
                    assert torch.isfinite(gradient).all(), str(choice)
