"""Batches: some rows of them, and several as one."""

from __future__ import annotations

from dataclasses import replace

import torch
from helpers.batches import whole_batch

from reinforce_rl.rollout import RolloutBatch, join_rollouts

PAD = 33


def rollouts() -> RolloutBatch:
    batch = whole_batch().rollouts
    tokens = torch.where(batch.response_mask, torch.rand(batch.response_mask.shape), 0.0)
    names = tuple("stop" if row % 2 else "length" for row in range(len(batch.rewards)))
    return replace(
        batch,
        finish_reasons=names,
        generator_log_probs=-tokens,
        log_probs=-2 * tokens,
        source_rewards={"a": torch.arange(len(names)).float()},
    )


def assert_same(left: RolloutBatch, right: RolloutBatch) -> None:
    for name, value in vars(left).items():
        other = getattr(right, name)
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(other, value, rtol=0, atol=0, equal_nan=True, msg=name)
        elif isinstance(value, dict):
            assert {k: v.tolist() for k, v in value.items()} == {k: v.tolist() for k, v in other.items()}
        else:
            assert value == other, name


def test_selected_rows_keep_everything_of_theirs_and_no_padding():
    batch = rollouts()
    rows = torch.tensor([5, 0])
    found = batch.select(rows)
    assert found.width == int(batch.response_lengths[rows].max()) == found.log_probs.shape[1]
    assert found.sequences.shape[1] == int((batch.prompt_lengths + batch.response_lengths)[rows].max())
    assert found.finish_reasons == ("stop", "length") and found.source_rewards["a"].tolist() == [5.0, 0.0]
    for new, old in enumerate(rows.tolist()):
        length = int(batch.prompt_lengths[old] + batch.response_lengths[old])
        assert found.sequences[new, :length].tolist() == batch.sequences[old, :length].tolist()


def test_parts_joined_are_the_batch_again():
    batch = rollouts()
    everything = torch.arange(len(batch.rewards))
    parts = [batch.select(rows) for rows in everything.split([1, 6, 5])]
    whole = batch.select(everything)
    joined = join_rollouts(parts, PAD)
    start = 0
    for part in parts:
        rows = slice(start, start := start + len(part.rewards))
        used = part.sequences.shape[1]
        assert torch.equal(joined.sequences[rows, :used], part.sequences)
        assert (joined.sequences[rows, used:] == PAD).all()
    assert_same(replace(whole, sequences=joined.sequences), joined)


def test_an_empty_part_joins_too():
    batch = rollouts()
    everything = torch.arange(len(batch.rewards))
    joined = join_rollouts([batch.select(everything), batch.select(everything[:0])], PAD)
    assert_same(batch.select(everything), joined)
