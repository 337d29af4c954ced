"""Leave-one-out advantages against brute force, a worked example, and the mistakes that other systems made."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforce_rl.algorithm.advantages import RewardGroups, batch_mean, leave_one_out, rloo
from reinforce_rl.algorithm.kl import sequence_kl

WORKED = Path(__file__).with_name("worked_example.json")


def brute_force(rewards: list[float], groups: list[int], valid: list[bool]) -> list[float]:
    """Reward minus the mean of the other valid rewards of the group, one sample at a time."""
    out = []
    for i, reward in enumerate(rewards):
        others = [rewards[j] for j in range(len(rewards)) if j != i and groups[j] == groups[i] and valid[j]]
        out.append(reward - math.fsum(others) / len(others) if valid[i] and others else 0.0)
    return out


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


reward_values = st.floats(-1e6, 1e6, allow_nan=False, width=64)
samples = st.lists(
    st.tuples(reward_values, st.sampled_from([-(2**62), -7, 0, 1, 3, 10**12]), st.booleans()), min_size=1, max_size=24
)


@settings(deadline=None, max_examples=200)
@given(samples)
def test_equals_brute_force_for_any_groups_in_any_order(rows):
    rewards, groups, valid = map(list, zip(*rows, strict=True))
    found = rloo(double(rewards), torch.tensor(groups), torch.tensor(valid))
    assert found.dtype == torch.float64 and found.shape == (len(rows),)
    torch.testing.assert_close(found, double(brute_force(rewards, groups, valid)), rtol=1e-12, atol=1e-8)


@settings(deadline=None, max_examples=100)
@given(samples, st.randoms(use_true_random=False))
def test_a_permutation_of_the_samples_permutes_the_advantages(rows, random):
    rewards, groups, valid = (torch.tensor(column) for column in zip(*rows, strict=True))
    rewards = rewards.double()
    order = list(range(len(rows)))
    random.shuffle(order)
    direct = rloo(rewards, groups, valid)[order]
    torch.testing.assert_close(rloo(rewards[order], groups[order], valid[order]), direct, rtol=1e-12, atol=1e-8)


@settings(deadline=None, max_examples=100)
@given(samples, st.dictionaries(st.sampled_from([-(2**62), -7, 0, 1, 3, 10**12]), reward_values))
def test_a_constant_added_to_a_group_changes_nothing(rows, constants):
    rewards, groups, valid = map(list, zip(*rows, strict=True))
    rewards = [reward / 2 for reward in rewards]  # so that the sum stays below the largest reward that is taken
    moved = [reward + constants.get(group, 0.0) / 2 for reward, group in zip(rewards, groups, strict=True)]
    before = rloo(double(rewards), torch.tensor(groups), torch.tensor(valid))
    after = rloo(double(moved), torch.tensor(groups), torch.tensor(valid))
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-7)


@settings(deadline=None, max_examples=100)
@given(samples)
def test_the_advantages_of_a_group_sum_to_zero(rows):
    rewards, groups, valid = map(list, zip(*rows, strict=True))
    found = rloo(double(rewards), torch.tensor(groups), torch.tensor(valid)).tolist()
    for group in set(groups):
        assert abs(math.fsum(a for a, g in zip(found, groups, strict=True) if g == group)) < 1e-7


@settings(deadline=None, max_examples=100)
@given(samples, st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_stands_at_an_invalid_sample_does_not_matter(rows, anything):
    rewards, groups, valid = map(list, zip(*rows, strict=True))
    spoilt = [reward if ok else anything for reward, ok in zip(rewards, valid, strict=True)]
    arguments = torch.tensor(groups), torch.tensor(valid)
    found = rloo(double(spoilt), *arguments)
    assert (
        torch.isfinite(found).all()
        and torch.isfinite(leave_one_out(RewardGroups.of(double(spoilt), *arguments)).baseline).all()
    )
    assert torch.equal(found, rloo(double(rewards), *arguments))
    assert (found[~arguments[1]] == 0).all()


def test_equals_the_scaled_distance_from_the_groups_mean():
    """verl's form: G / (G - 1) * (R - mean)."""
    rewards = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = 4 / 3 * (rewards - rewards.mean(dim=1, keepdim=True))
    groups = torch.arange(6).repeat_interleave(4)
    torch.testing.assert_close(rloo(rewards.flatten(), groups).view(6, 4), expected)
    # Interleaved: sample s of every prompt, then sample s + 1.
    torch.testing.assert_close(rloo(rewards.t().flatten(), torch.arange(6).repeat(4)).view(4, 6).t(), expected)


def test_two_samples_are_each_others_baseline():
    assert leave_one_out(RewardGroups.of(torch.tensor([1.0, 3.0]), torch.tensor([5, 5]))).baseline.tolist() == [
        3.0,
        1.0,
    ]
    assert rloo(torch.tensor([1.0, 3.0]), torch.tensor([5, 5])).tolist() == [-2.0, 2.0]


def test_advantage_is_reward_less_baseline():
    rewards, groups = torch.tensor([1.0, 2.0, 6.0, 5.0, 9.0]), torch.tensor([0, 0, 0, 1, 1])
    assert leave_one_out(RewardGroups.of(rewards, groups)).baseline.tolist() == [4.0, 3.5, 1.5, 9.0, 5.0]
    torch.testing.assert_close(
        rloo(rewards, groups), rewards - leave_one_out(RewardGroups.of(rewards, groups)).baseline
    )


def test_a_truncated_sample_does_not_count():
    """Rewards all 1, one of four left out: with it in the denominator the others would get an advantage."""
    valid = torch.tensor([True, True, True, False])
    assert rloo(torch.ones(4), torch.zeros(4, dtype=torch.long), valid).tolist() == [0.0] * 4
    assert leave_one_out(
        RewardGroups.of(torch.ones(4), torch.zeros(4, dtype=torch.long), valid)
    ).baseline.tolist() == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("count", [0, 1])
def test_with_nothing_to_compare_to_the_advantage_is_zero(count):
    rewards = torch.tensor([7.0, math.nan, math.nan, 1.0, 2.0])
    groups, valid = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([count == 1, False, False, True, True])
    assert rloo(rewards, groups, valid).tolist() == [0.0, 0.0, 0.0, -1.0, 1.0]


def test_equal_rewards_but_one_stay_small():
    """Divided by the leave-one-out spread, the first of these once became -2075."""
    advantages = rloo(torch.tensor([0.0] + [0.95] * 7), torch.zeros(8, dtype=torch.long))
    assert advantages.abs().max() < 1
    torch.testing.assert_close(advantages[0], torch.tensor(-0.95))
    torch.testing.assert_close(advantages[1:], torch.full((7,), 0.95 - 6 * 0.95 / 7))


def test_large_equal_rewards_cancel_exactly_enough_in_float32():
    advantages = rloo(torch.full((7,), 1e6 - 1 / 3), torch.zeros(7, dtype=torch.long))
    assert advantages.abs().max() <= 0.25, "more than a few units in the last place of a float32 of 1e6"


@pytest.mark.parametrize("mean", [RewardGroups.mean, RewardGroups.mean_by_group])
def test_the_mean_of_many_large_rewards_is_exact_to_float32(mean):
    rewards = 9e5 + 1e5 * torch.rand(5000, generator=torch.Generator().manual_seed(0))
    found = mean(RewardGroups.of(rewards, torch.zeros(5000, dtype=torch.long)))
    assert float((found.double() - rewards.double().mean()).abs().max()) <= 0.032  # half a unit in the last place


def test_equal_prompts_with_different_ids_are_different_groups():
    rewards = torch.tensor([0.0, 1.0, 10.0, 11.0])
    assert rloo(rewards, torch.tensor([3, 3, 8, 8])).tolist() == [-1.0, 1.0, -1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_it_carries_no_gradient_and_keeps_the_dtype(dtype, ids):
    rewards = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
    groups = torch.tensor([0, 0], dtype=ids)
    for result in (rloo(rewards, groups), batch_mean(RewardGroups.of(rewards, groups)).values):
        assert not result.requires_grad and result.dtype == dtype


def test_whole_numbers_are_rewards_too():
    assert rloo(torch.tensor([1, 2, 4]), torch.tensor([0, 0, 0])).tolist() == [-2.0, -0.5, 2.5]


def test_no_samples_give_no_advantages():
    assert rloo(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "groups", "valid", "text"),
    [
        (torch.zeros(4), torch.zeros(3, dtype=torch.long), None, r"rewards.*\(4,\).*group_ids.*\(3,\)"),
        (torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.long), None, "1-D"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.long), torch.ones(3, dtype=torch.bool), r"valid.*\(3,\)"),
        (torch.zeros(2), torch.zeros(2), None, "integers.*float32"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.long), torch.ones(2), "bool.*float32"),
    ],
)
def test_wrong_shapes_and_types_are_refused(rewards, groups, valid, text):
    with pytest.raises(ValueError, match=text):
        rloo(rewards, groups, valid)


def test_batch_mean_leaves_out_what_is_not_valid():
    rewards, ids, valid = torch.tensor([1.0, math.nan, 4.0]), torch.zeros(3, dtype=torch.long), torch.tensor([1, 0, 1])
    assert batch_mean(RewardGroups.of(rewards, ids, valid.bool())).baseline.tolist() == [2.5, 0.0, 2.5]
    assert batch_mean(RewardGroups.of(rewards, ids, torch.zeros(3).bool())).baseline.tolist() == [0.0, 0.0, 0.0]


@pytest.fixture(scope="module")
def worked() -> dict:
    return json.loads(WORKED.read_text())


def sequence_rewards(example: dict) -> tuple[Tensor, Tensor]:
    """[G, P] or [N] rewards less the KL, and the log-probs."""
    log_probs = double(example["logprobs"])
    rows = log_probs.flatten(0, -2)
    reference = double(example["reference_logprobs"]).flatten(0, -2)
    kl = sequence_kl(rows, reference, torch.ones(rows.shape, dtype=torch.bool))
    rewards = double(example["rewards"])
    return rewards - example["kl_coef"] * kl.view(rewards.shape), log_probs


def test_the_worked_example_of_rloo(worked):
    rewards, _ = sequence_rewards(worked["rloo"])
    torch.testing.assert_close(rewards, double(worked["rloo"]["sequence_rewards"]))
    expected = double(worked["rloo"]["advantages"])
    # Each row is a prompt; which axis that is shows in the expected numbers.
    columns = torch.arange(3).repeat(3)
    rows = torch.arange(3).repeat_interleave(3)
    candidates = [rloo(rewards.flatten(), groups).view(3, 3) for groups in (rows, columns)]
    fits = [torch.allclose(candidate, expected, atol=1e-9) for candidate in candidates]
    assert fits == [True, False]


def test_the_worked_example_of_a_batch_mean(worked):
    rewards, _ = sequence_rewards(worked["reinforce_batch_mean"])
    torch.testing.assert_close(rewards, double(worked["reinforce_batch_mean"]["sequence_rewards"]))
    advantages = batch_mean(RewardGroups.of(rewards, torch.arange(len(rewards)))).values
    torch.testing.assert_close(advantages, double(worked["reinforce_batch_mean"]["advantages"]))
