"""Micro-batches: each row once, little padding, the bound on tokens kept."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.batches import (
    VOCAB_SIZE,
    actor_of,
    gradient_of,
    relative_difference,
    sequences,
    whole_batch,
)
from helpers.models import tiny_llama_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_rl.policy.micro_batches import (
    micro_batches,
    packed_micro_batches,
    packed_tokens,
    padding,
)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 200))
def test_every_row_once_within_the_bound(lengths, max_tokens):
    lengths = torch.tensor(lengths, dtype=torch.long)
    groups = micro_batches(lengths, 3, max_tokens)
    expected = list(range(len(lengths)))
    assert sorted(row for group in groups for row in group.tolist()) == expected
    for group in groups:
        longest = max(int(lengths[group].max()), 1)
        assert len(group) * longest <= max_tokens or len(group) == 1
    # No two neighbours would have fitted into one pass.
    for left, right in itertools.pairwise(groups):
        assert (len(left) + 1) * max(int(lengths[left].max()), 1) > max_tokens, right


def test_fixed_ones_are_cut_by_number():
    groups = micro_batches(torch.tensor([1, 5, 3]), 2)
    rows = [group.tolist() for group in groups]
    assert rows == [[1, 2], [0]]
    nothing = torch.zeros(0, dtype=torch.long)
    assert micro_batches(nothing, 2) == micro_batches(nothing, 2, 9) == []


GROUPS = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(0, 20), min_size=1, max_size=6)), max_size=8
)


@settings(deadline=None, max_examples=100)
@given(GROUPS, st.integers(1, 9), st.one_of(st.none(), st.integers(1, 100)))
def test_packed_ones_hold_groups_together_where_there_is_room(groups, size, max_tokens):
    rows = [
        (number, prompt, length)
        for number, (prompt, lengths) in enumerate(groups)
        for length in lengths
    ]
    table = torch.tensor(rows, dtype=torch.long).reshape(-1, 3)
    ids, prompts, responses = table.unbind(1)
    passes = [
        rows.tolist() for rows in packed_micro_batches(ids, prompts, responses, size, max_tokens)
    ]
    expected = list(range(len(rows)))
    assert sorted(row for part in passes for row in part) == expected

    def fits(part):
        where = torch.tensor(part)
        if max_tokens is None:
            return len(part) <= size
        return packed_tokens(ids[where], prompts[where], responses[where]) <= max_tokens

    for part in passes:
        assert fits(part) or len(part) == 1
    for number in range(len(groups)):
        members = (ids == number).nonzero()[:, 0].tolist()
        if fits(members):
            num_shared = sum(bool(set(part) & set(members)) for part in passes)
            assert num_shared == 1


def test_packed_groups_that_fill_a_pass_exactly_share_it():
    ids = torch.tensor([5, 9])
    prompts = torch.tensor([2, 2])
    responses = torch.tensor([3, 3])
    assert len(packed_micro_batches(ids, prompts, responses, 1, 10)) == 1
    assert len(packed_micro_batches(ids, prompts, responses, 1, 9)) == 2


def test_tokens_of_packed_groups_count_a_prompt_once():
    ids = torch.tensor([5, 5, 9])
    prompts = torch.tensor([4, 4, 7])
    responses = torch.tensor([1, 2, 3])
    assert packed_tokens(ids, prompts, responses) == 4 + 7 + 6


def test_padding_is_what_a_pass_has_besides_its_sequences():
    lengths = torch.tensor([1, 5, 3])
    groups = [torch.tensor([1, 2]), torch.tensor([0])]
    assert padding(lengths, groups) == (9, 11)
    assert padding(lengths, []) == (0, 0)


def test_packing_by_tokens_pads_less_than_a_number_of_sequences():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 1000, (256,), generator=generator)
    tokens, padded = padding(lengths, micro_batches(lengths, 8, 8000))
    assert 1 - tokens / padded < 0.06
    unsorted = [torch.arange(256)[i : i + 8] for i in range(0, 256, 8)]
    assert 1 - tokens / padding(lengths, unsorted)[1] > 0.3


@pytest.mark.parametrize("shared_prefix", [False, True])
def test_log_probs_come_in_the_order_of_the_rows(tmp_path, mesh, shared_prefix):
    folder = tiny_llama_folder(tmp_path, vocab_size=VOCAB_SIZE)
    actor = actor_of(
        folder, mesh, with_reference=False, tokens_per_micro_batch=20, shared_prefix=shared_prefix
    )
    rollouts = whole_batch().rollouts
    fields = (rollouts.sequences, rollouts.prompt_lengths, rollouts.response_lengths)
    log_probs = actor.get_inference_log_probs(*fields)
    for row, length in enumerate(rollouts.response_lengths.tolist()):
        alone = actor.get_inference_log_probs(*(each[row : row + 1] for each in fields))
        torch.testing.assert_close(log_probs[row, :length], alone[0], atol=1e-5, rtol=1e-5)


def test_the_gradient_is_that_of_fixed_micro_batches(tmp_path, mesh):
    folder = tiny_llama_folder(tmp_path, vocab_size=VOCAB_SIZE, heads=9, groups=3, hidden=36)
    gradients = []
    metrics = []
    for tokens in (None, 20, 60):
        actor = actor_of(
            folder, mesh, with_reference=False, tokens_per_micro_batch=tokens, shared_prefix=False
        )
        share = actor.get_loss_and_metrics(whole_batch(), sequences(10))
        gradients.append(gradient_of(actor))
        metrics.append(share.sums)
    pairs = zip(gradients[1:], metrics[1:], strict=True)
    for other, sums in pairs:
        assert relative_difference(other, gradients[0]) < 1e-6
        assert sums["sequence_tokens"] == metrics[0]["sequence_tokens"] < sums["padded_tokens"] + 1


def test_the_gradient_is_that_of_packed_micro_batches(tmp_path, mesh):
    folder = tiny_llama_folder(tmp_path, vocab_size=VOCAB_SIZE, heads=9, groups=3, hidden=36)
    gradients = []
    counts = []
    for shared, tokens, size in ((False, None, 12), (True, 20, 1), (True, 60, 1), (True, None, 5)):
        sizes = {
            "shared_prefix": shared,
            "tokens_per_micro_batch": tokens,
            "micro_batch_size": size,
        }
        actor = actor_of(folder, mesh, with_reference=False, **sizes)
        sums = actor.get_loss_and_metrics(whole_batch(), sequences(10)).sums
        gradients.append(gradient_of(actor))
        counts.append((sums["sequence_tokens"], sums["padded_tokens"]))
    for other in gradients[1:]:
        assert relative_difference(other, gradients[0]) < 1e-6
    assert counts[0][0] > counts[1][0] >= counts[2][0] == counts[2][1]
