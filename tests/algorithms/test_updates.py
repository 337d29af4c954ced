"""Mini-batches: every sequence once an epoch, whole groups, the same on every layout of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reinforce_rl.algorithms.updates import mini_batches, total_steps, total_updates
from reinforce_rl.config import ReinforceConfig


def cut(ranks: list[Tensor], prompts: int | None, epochs: int, seed: int = 5) -> list[list[list[int]]]:
    """For each optimizer step, each rank's group ids."""
    of_ranks = [list(mini_batches(ranks, rank, prompts, epochs, seed)) for rank in range(len(ranks))]
    return [
        [ids[rows].tolist() for ids, rows in zip(ranks, step, strict=True)] for step in zip(*of_ranks, strict=True)
    ]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 3), st.lists(st.integers(0, 9), max_size=3))
def test_every_sequence_once_an_epoch_in_whole_groups(groups, prompts, epochs, borders):
    ids = torch.arange(groups).repeat_interleave(3) * 7
    borders = sorted(min(b, groups) * 3 for b in borders)
    ranks = [ids[a:b] for a, b in zip([0, *borders], [*borders, len(ids)], strict=True)]
    steps = cut(ranks, prompts, epochs)
    per_epoch = -(-groups // prompts)
    assert len(steps) == per_epoch * epochs
    for epoch in range(epochs):
        trained = [i for step in steps[epoch * per_epoch :][:per_epoch] for rank in step for i in rank]
        assert sorted(trained) == sorted(ids.tolist())
    for step in steps:
        members = [i for rank in step for i in rank]
        assert len(set(members)) <= prompts and all(members.count(i) == 3 for i in members)
    alone = cut([ids], prompts, epochs)
    assert [sorted(step[0]) for step in alone] == [sorted(i for rank in step for i in rank) for step in steps]


def test_the_order_changes_with_epoch_and_seed():
    ids = torch.arange(20)
    steps = cut([ids], 4, 2)
    assert steps[:5] != steps[5:]
    assert cut([ids], 4, 1, seed=6) != steps[:5] == cut([ids], 4, 1)


def test_the_whole_batch_is_one_step_an_epoch():
    ids = [torch.tensor([4, 4, 9]), torch.tensor([], dtype=torch.long)]
    assert cut(ids, None, 2) == [[[4, 4, 9], []]] * 2


@pytest.mark.parametrize(
    ("epochs", "max_steps", "passes", "prompts", "expected"),
    [(1, -1, 1, None, 3), (2, -1, 1, None, 6), (1, -1, 2, 4, 2 * 5), (3, 4, 1, 4, 5 + 2), (3, 5, 3, 3, 3 * (7 + 6))],
)
def test_optimizer_steps_of_a_run(epochs, max_steps, passes, prompts, expected):
    """Rollout batches of 8, 8 and 3 prompts an epoch."""
    cfg = ReinforceConfig(max_epochs=epochs, max_steps=max_steps, reinforce_epochs=passes)
    assert total_updates(cfg, prompts, [8, 8, 3]) == expected
    assert total_steps(cfg, 3) == (3 * epochs if max_steps == -1 else max_steps)
