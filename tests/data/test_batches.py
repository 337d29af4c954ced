"""Batches are split and joined: each field keeps its row, and only padding changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_rl.data.batches import (
    Completions,
    Prompt,
    ReinforceBatch,
    RolloutBatch,
    join_completions,
    join_prompts_and_responses,
    join_rollouts,
    length_mask,
)
from reinforce_rl.data.finish_reasons import FINISH_LENGTH, FINISH_STOP

PAD = 99
sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=6)


def rollouts(
    lengths: list[tuple[int, int]], *, start: int = 0, extra: int = 0, with_log_probs: bool = True
):
    """Return a batch in which each number encodes its row and column.

    `extra` adds columns of unnecessary padding.
    """
    count = len(lengths)
    prompts = [pair[0] for pair in lengths]
    responses = [pair[1] for pair in lengths]
    width = max(responses, default=0)
    used = max((p + r for p, r in lengths), default=0) + extra
    ids = torch.arange(start, start + count)
    columns = torch.arange(1, width + extra + 1)
    table = 100.0 * ids[:, None] + columns
    mask = length_mask(torch.tensor(responses).long(), width + extra)
    table = torch.where(mask, table, 0.0)
    sequences = 1000 + 100 * ids[:, None] + torch.arange(used)
    prompt_lengths = torch.tensor(prompts).long()
    response_lengths = torch.tensor(responses).long()
    total = prompt_lengths + response_lengths
    finish_reasons = [FINISH_STOP if i % 3 else FINISH_LENGTH for i in ids.tolist()]
    score_faults = [None if i % 4 else f"late by {i} s" for i in ids.tolist()]
    batch = RolloutBatch(
        sequences=torch.where(length_mask(total, used), sequences, PAD),
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        group_ids=ids // 2,
        sample_ids=ids % 2,
        finish_reasons=tuple(finish_reasons),
        rewards=ids.float() / 7,
        valid=ids % 4 != 1,
        source_rewards={"one": ids.float(), "two": -ids.float()},
        score_faults=tuple(score_faults),
    )
    if not with_log_probs:
        return batch
    return dataclasses.replace(
        batch,
        generator_log_probs=table,
        log_probs=table + 0.25,
        init_log_probs=table + 0.5,
        weight_versions=table.long() // 100,
        policy_mask=table.long() % 3 != 1,
        history_mask=mask & (table.long() % 5 == 2),
        turn_rewards=table - 0.25,
    )


def rows_of(batch: RolloutBatch) -> list[dict[str, object]]:
    """Return each sample separately, without padding."""
    samples = []
    for i in range(len(batch.rewards)):
        length = int(batch.response_lengths[i])
        used = int(batch.prompt_lengths[i]) + length
        assert (batch.sequences[i, used:] == PAD).all()
        row: dict[str, object] = {"sequences": batch.sequences[i, :used].tolist()}
        for field in dataclasses.fields(batch):
            value = getattr(batch, field.name)
            if field.name.endswith(("log_probs", "weight_versions", "_mask", "turn_rewards")):
                row[field.name] = None if value is None else value[i, :length].tolist()
            elif field.name == "source_rewards":
                row[field.name] = {name: float(values[i]) for name, values in value.items()}
            elif field.name != "sequences":
                row[field.name] = value[i] if isinstance(value, tuple) else value[i].item()
        samples.append(row)
    return samples


def assert_tight(batch: RolloutBatch) -> None:
    """Assert that the batch is as wide as its longest sample."""
    total = (batch.prompt_lengths + batch.response_lengths).tolist()
    expected = (len(total), max(total, default=0))
    assert batch.sequences.shape == expected
    for values in (
        batch.generator_log_probs,
        batch.weight_versions,
        batch.policy_mask,
        batch.history_mask,
        batch.log_probs,
        batch.init_log_probs,
    ):
        assert values is None or values.shape == batch.response_mask.shape


def test_the_mask_and_the_ends():
    lengths = [(1, 0), (2, 3), (1, 1)]
    batch = rollouts(lengths, with_log_probs=False)
    assert batch.width == 3
    expected = [[False] * 3, [True] * 3, [True, False, False]]
    assert batch.response_mask.tolist() == expected
    assert batch.is_end.tolist() == [False, True, True]
    assert batch.is_end.dtype == torch.bool
    assert batch.policy_lengths.tolist() == [0, 3, 1]
    nothing = rollouts([])
    assert nothing.width == 0
    assert nothing.is_end.shape == (0,)
    assert nothing.is_end.dtype == torch.bool


def test_tokens_of_an_environment_are_outside_the_mask():
    batch = rollouts([(1, 0), (2, 4), (1, 2)], with_log_probs=False)
    policy_mask = torch.tensor([[True] * 5, [True, False, False, True, True], [True] * 5])
    batch = dataclasses.replace(batch, policy_mask=policy_mask)
    expected = [[False] * 4, [True, False, False, True], [True, True, False, False]]
    assert batch.response_mask.tolist() == expected
    assert batch.policy_lengths.tolist() == [0, 2, 2]
    assert batch.sequence_inputs[4].tolist() == expected
    assert rollouts([(1, 2)], with_log_probs=False).sequence_inputs[4] is None


def test_a_part_without_a_policy_mask_was_written_by_the_policy():
    with_mask = dataclasses.replace(
        rollouts([(2, 3)]), policy_mask=torch.tensor([[True, False, True]])
    )
    without = dataclasses.replace(rollouts([(1, 2)]), policy_mask=None)
    joined = join_rollouts([without, with_mask], PAD)
    assert joined.response_mask.tolist() == [[True, True, False], [True, False, True]]
    assert join_rollouts([without, without], PAD).policy_mask is None


def test_a_part_without_a_history_mask_has_no_rewritten_history():
    with_mask = dataclasses.replace(
        rollouts([(2, 3)]), history_mask=torch.tensor([[False, True, False]])
    )
    without = dataclasses.replace(rollouts([(1, 2)]), history_mask=None)
    joined = join_rollouts([without, with_mask], PAD)
    assert joined.history_mask is not None
    assert joined.history_mask.tolist() == [[False] * 3, [False, True, False]]
    assert join_rollouts([without, without], PAD).history_mask is None


def test_completions_of_parts_with_and_without_masks():
    part = Completions(torch.tensor([[5, 6]]), torch.tensor([2]), (FINISH_STOP,))
    mask = torch.tensor([[True, False, False]])
    masked = Completions(
        torch.tensor([[7, 8, 9]]),
        torch.tensor([3]),
        (FINISH_STOP,),
        policy_mask=mask,
        history_mask=~mask,
    )
    joined = join_completions([part, masked], PAD)
    assert joined.policy_mask is not None
    assert joined.history_mask is not None
    assert joined.policy_mask.tolist() == [[True] * 3, [True, False, False]]
    assert joined.history_mask.tolist() == [[False] * 3, [False, True, True]]


def test_the_text_of_an_episode_has_every_message_once():
    completions = Completions(
        tokens=torch.tensor([[1, 2, 3, 4, 5], [6, 7, PAD, PAD, PAD]]),
        lengths=torch.tensor([5, 2]),
        finish_reasons=(FINISH_STOP, FINISH_LENGTH),
        history_mask=torch.tensor([[False, True, True, False, False], [False] * 5]),
    )
    text = completions.without_history(PAD)
    assert text.tokens.tolist() == [[1, 4, 5], [6, 7, PAD]]
    assert text.lengths.tolist() == [3, 2]
    assert text.finish_reasons == completions.finish_reasons
    assert text.without_history(PAD) is text


@settings(deadline=None, max_examples=40)
@given(sizes, st.integers(0, 3), st.booleans(), st.data())
def test_select_takes_rows_in_order_and_cuts_padding(lengths, extra, with_log_probs, data):
    batch = rollouts(lengths, extra=extra, with_log_probs=with_log_probs)
    indices = st.lists(st.integers(0, len(lengths) - 1), max_size=6) if lengths else st.just([])
    rows = data.draw(indices)
    selected = batch.select(torch.tensor(rows, dtype=torch.long))
    every = rows_of(batch)
    expected = [every[row] for row in rows]
    assert rows_of(selected) == expected
    assert_tight(selected)


@settings(deadline=None, max_examples=40)
@given(st.lists(sizes, min_size=1, max_size=4))
def test_joined_rollouts_are_their_parts_one_after_the_other(parts):
    starts = [sum(map(len, parts[:i])) for i in range(len(parts))]
    batches = [rollouts(part, start=start) for part, start in zip(parts, starts, strict=True)]
    joined = join_rollouts(batches, PAD)
    assert rows_of(joined) == [row for batch in batches for row in rows_of(batch)]
    assert_tight(joined)
    # Split again, each part equals the original.
    for batch, start in zip(batches, starts, strict=True):
        again = joined.select(torch.arange(start, start + len(batch.rewards)))
        assert rows_of(again) == rows_of(batch)


def test_one_part_is_itself():
    batch = rollouts([(1, 2)])
    assert join_rollouts([batch], PAD) is batch


def test_log_probs_missing_in_one_part_are_missing():
    parts = [rollouts([(1, 2)]), rollouts([(1, 3)], with_log_probs=False)]
    joined = join_rollouts(parts, PAD)
    assert joined.generator_log_probs is joined.log_probs is joined.init_log_probs is None


def test_scores_of_a_source_that_one_part_lacks_are_nan():
    other = {"kind": torch.tensor([2.0])}
    first = dataclasses.replace(rollouts([(1, 2)]), source_rewards={})
    second = dataclasses.replace(rollouts([(1, 3)]), source_rewards=other)
    for parts in ([first, second], [second, first]):
        scores = join_rollouts(parts, PAD).source_rewards["kind"]
        expected = [2.0 if part is second else -1.0 for part in parts]
        assert scores.nan_to_num(-1.0).tolist() == expected


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [1, 1, 0]])
def test_a_round_without_a_prompt_on_this_rank_takes_nothing_away(order):
    """Without a prompt, a rank has neither the names of reward sources nor log-probs."""
    some = rollouts([(1, 2), (2, 1)])
    none = dataclasses.replace(rollouts([], with_log_probs=False), source_rewards={})
    parts = [[some, none][i] for i in order]
    joined = join_rollouts(parts, PAD)
    assert rows_of(joined) == rows_of(some)
    assert len(join_rollouts([none, none], PAD).rewards) == 0


def test_the_advantage_of_a_response_is_the_mean_of_its_tokens():
    lengths = [(1, 2), (1, 0), (1, 3)]
    batch = rollouts(lengths, with_log_probs=False)
    nothing = torch.zeros(3)
    advantages = torch.tensor([[1.0, 3.0, 0.0], [0.0, 0.0, 0.0], [2.0, 2.0, 5.0]])
    sequence_advantages = ReinforceBatch(
        batch, nothing, nothing, nothing, advantages, batch.valid
    ).sequence_advantages
    assert sequence_advantages.tolist() == [2.0, 0.0, 3.0]


def completions(tokens: list[list[int]], *, with_log_probs: bool = True) -> Completions:
    lengths = torch.tensor([len(row) for row in tokens])
    width = max(map(len, tokens))
    table = torch.tensor([row + [PAD] * (width - len(row)) for row in tokens])
    log_probs = (
        torch.where(length_mask(lengths, width), -table.float(), 0.0) if with_log_probs else None
    )
    return Completions(table, lengths, (FINISH_STOP,) * len(tokens), log_probs)


class TestCompletions:
    def test_joined(self):
        parts = [completions([[1, 2, 3], [4]]), completions([[5, 6]])]
        joined = join_completions(parts, PAD)
        expected = [[1, 2, 3], [4, PAD, PAD], [5, 6, PAD]]
        assert joined.tokens.tolist() == expected
        assert joined.lengths.tolist() == [3, 1, 2]
        assert len(joined.finish_reasons) == 3
        assert joined.log_probs is not None
        expected = [[-1, -2, -3], [-4, 0, 0], [-5, -6, 0]]
        assert joined.log_probs.tolist() == expected

    def test_log_probs_missing_in_one_part_are_missing(self):
        parts = [completions([[1]]), completions([[2]], with_log_probs=False)]
        assert join_completions(parts, PAD).log_probs is None

    def test_of_nothing(self):
        joined = join_completions([], PAD)
        assert joined.tokens.shape == (0, 0)
        assert joined.lengths.shape == (0,)
        assert joined.log_probs is None
        assert joined.tokens.dtype == joined.lengths.dtype == torch.int64

    def test_behind_their_prompts(self):
        prompts = [Prompt(0, "", (7, 8)), Prompt(1, "", (9,))]
        tokens = [[1, 2, 3], [], [4], [5, 6]]
        drawn = completions(tokens)
        repeated = drawn.repeat_to_samples(prompts)
        assert [prompt.id for prompt in repeated] == [0, 0, 1, 1]
        sequences, lengths = join_prompts_and_responses(repeated, drawn, PAD)
        assert lengths.tolist() == [2, 2, 1, 1]
        expected = [[7, 8, 1, 2, 3], [7, 8], [9, 4], [9, 5, 6]]
        assert sequences.tolist() == [row + [PAD] * (5 - len(row)) for row in expected]

    def test_no_prompts_have_no_samples(self):
        assert join_completions([], PAD).repeat_to_samples([]) == []
        sequences, lengths = join_prompts_and_responses([], join_completions([], PAD), PAD)
        assert sequences.shape == (0, 0)
        assert lengths.shape == (0,)


def test_a_mask():
    expected = [
        [True, True, False],
        [False] * 3,
        [True] * 3,
    ]
    assert length_mask(torch.tensor([2, 0, 3]), 3).tolist() == expected
    assert length_mask(torch.tensor([0, 0]), 0).shape == (2, 0)
