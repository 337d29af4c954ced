"""Which groups have rewards that differ."""

from __future__ import annotations

import math

import torch

from reinforce_rl.algorithms.filtering import in_group_with_spread


def test_groups_with_and_without_spread():
    rewards = torch.tensor([1.0, 1.0, 2.0, 2.0 + 1e-8, 5.0, 7.0, math.nan, 0.0, 1.0])
    groups = torch.tensor([3, 3, 8, 8, 4, 4, 4, 9, 1])
    valid = torch.tensor([True, True, True, True, True, True, False, True, False])
    # Equal; equal but for rounding; different, the unscored member of that group too; alone; none valid.
    expected = [False, False, False, False, True, True, True, False, False]
    assert in_group_with_spread(rewards, groups, valid).tolist() == expected


def test_an_invalid_sample_makes_no_spread():
    groups = torch.zeros(3, dtype=torch.long)
    valid = torch.tensor([True, True, False])
    assert not in_group_with_spread(torch.tensor([1.0, 1.0, 9.0]), groups, valid).any()


def test_spread_is_measured_against_the_rewards_size():
    groups = torch.zeros(2, dtype=torch.long)
    valid = torch.ones(2, dtype=torch.bool)
    assert in_group_with_spread(torch.tensor([0.0, 1e-5]), groups, valid).all()
    assert not in_group_with_spread(torch.tensor([1e6, 1e6 + 0.06]), groups, valid).any()


def test_no_samples():
    nothing = torch.zeros(0)
    assert in_group_with_spread(nothing, nothing.long(), nothing.bool()).tolist() == []
