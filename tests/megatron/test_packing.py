"""Groups packed into one row: the log-probs and gradients of padded sequences, in float64, with prompts read once."""

from __future__ import annotations

import pytest
import torch
from helpers.families import family_folder
from helpers.models import tiny_llama_folder
from helpers.policies import megatron_model, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_rl.megatron.log_probs import response_scores
from reinforce_rl.megatron.packing import PackedGroups
from reinforce_rl.megatron.sequence_layout import PaddedSequences

PAD = 2
FAMILIES = ("llama", "mistral_window", "qwen3")


@pytest.fixture(scope="module")
def models(tmp_path_factory, mesh):
    """float64: grouped keys; a window of 7 tokens; norms of queries and keys."""
    root = tmp_path_factory.mktemp("models")
    folders = {"llama": tiny_llama_folder(root / "llama", vocab_size=63, heads=6, groups=2, hidden=48, tied=False)}
    folders |= {name: family_folder(root / name, name) for name in FAMILIES[1:]}
    return {name: megatron_model(folder, mesh, torch.float64) for name, folder in folders.items()}


def batch_of(groups: list[tuple[int, list[int]]], order: list[int] | None = None):
    """(sequences, prompt_lengths, response_lengths, group_ids) of (prompt length, response lengths) a group."""
    prompts = [random_tokens(60, length, seed=number) for number, (length, _) in enumerate(groups)]
    rows = [(number, length) for number, (_, lengths) in enumerate(groups) for length in lengths]
    rows = [rows[i] for i in order] if order else rows
    parts = [
        torch.cat((prompts[number], random_tokens(60, length, seed=100 + row)))
        for row, (number, length) in enumerate(rows)
    ]
    sequences = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=PAD)
    lengths = torch.tensor([length for _, length in rows])
    return (
        sequences,
        torch.tensor([len(prompts[n]) for n, _ in rows]),
        lengths,
        torch.tensor([7 * n + 3 for n, _ in rows]),
    )


def scored(lm, layout, width):
    """Log-probs, entropies, and the gradient of a sum of log-probs with unequal weights."""
    lm.zero_grad()
    scores = response_scores(layout, layout.hidden(lm), lm, 0.7, width, chunk_tokens=5, with_entropy=True)
    weights = torch.randn(scores.log_probs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (scores.log_probs * weights).sum().backward()
    gradient = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in lm.parameters()])
    return scores.log_probs.detach(), scores.entropy.detach(), gradient


BATCHES = {
    "equal lengths": batch_of([(4, [5, 5]), (4, [5, 5])]),
    "ragged": batch_of([(4, [5, 2, 8]), (9, [3, 7, 1]), (1, [6, 4]), (12, [30])]),
    "not in order": batch_of([(4, [5, 2, 8]), (9, [3, 7, 1])], order=[5, 0, 3, 2, 1, 4]),
    "empty responses": batch_of([(4, [0, 2]), (6, [0, 0]), (3, [1, 1])]),
    "one token each": batch_of([(5, [1, 1, 1])]),
    "one prompt of one token": batch_of([(1, [3, 9])]),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", BATCHES)
def test_equal_to_padded_sequences(name, family, models):
    lm, (*where, group_ids) = models[family], BATCHES[name]
    width = int(where[2].max())
    packed = scored(lm, PackedGroups(lm, *where, group_ids), width)
    padded = scored(lm, PaddedSequences(lm, *where, pad_id=PAD), width)
    for one, other in zip(packed, padded, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-9)
    assert packed[2].any() == bool((where[2] > 0).any())


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(1, 11), st.lists(st.integers(0, 9), min_size=1, max_size=4)), min_size=1, max_size=4
    )
)
def test_log_probs_of_any_groups(models, groups):
    lm, (*where, group_ids) = models["mistral_window"], batch_of(groups)
    width = max(int(where[2].max()), 1)
    found = []
    with torch.no_grad():
        for layout in (PackedGroups(lm, *where, group_ids), PaddedSequences(lm, *where, pad_id=PAD)):
            found.append(response_scores(layout, layout.hidden(lm), lm, 1.0, width, chunk_tokens=5).log_probs)
    torch.testing.assert_close(*found, atol=1e-11, rtol=0)


def test_a_prompt_is_read_once_and_nothing_is_padded(models):
    *where, group_ids = BATCHES["ragged"]
    seen = []
    layout = PackedGroups(models["llama"], *where, group_ids)
    layout.hidden(lambda tokens, positions, packed: seen.append((tokens, positions)))
    ((tokens, positions),) = seen
    prompts, kept = (4, 9, 1, 12), [int(length) - 1 for length in where[2]]
    assert tokens.shape == positions.shape == (1, sum(prompts) + sum(kept))
    assert positions[0, :14].tolist() == [*range(4), *range(9), 0]
    assert positions[0, sum(prompts) : sum(prompts) + 5].tolist() == [4, 5, 6, 7, 4]


def test_responses_do_not_see_each_other(models):
    lm, (sequences, *lengths, group_ids) = models["llama"], BATCHES["ragged"]
    other = sequences.clone()
    other[1, 4:] = 9  # the second response to the first prompt
    found = []
    with torch.no_grad():
        for tokens in (sequences, other):
            layout = PackedGroups(lm, tokens, *lengths, group_ids)
            found.append(response_scores(layout, layout.hidden(lm), lm, 1.0, 30, chunk_tokens=64).log_probs)
    rest = [row for row in range(len(sequences)) if row != 1]
    assert torch.equal(found[0][rest], found[1][rest])
    assert not torch.equal(found[0][1], found[1][1])


def test_different_prompts_in_a_group_are_refused(models):
    sequences, *lengths, group_ids = BATCHES["ragged"]
    wrong = sequences.clone()
    wrong[4, 3] = 1
    with pytest.raises(ValueError, match="sequence 4 has another prompt than sequence 3"):
        PackedGroups(models["llama"], wrong, *lengths, group_ids)
