"""Groups packed into one row; prompts are read once.

Log-probs and gradients equal those of padded sequences, in float64.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from helpers.families import family_folder
from helpers.flash import flash_on_cpu
from helpers.models import tiny_llama_folder
from helpers.policies import megatron_model, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_rl.megatron.model.log_probs import response_scores
from reinforce_rl.megatron.model.sequences import (
    PackedGroups,
    PaddedSequences,
    _Repeated,
    _spans,
    _UnpaddedAttention,
)

PAD = 2
FAMILIES = ("llama", "mistral_window", "qwen3")
KERNELS = {"flash": flash_on_cpu, "padded": contextlib.nullcontext}


@pytest.fixture(scope="module")
def models(tmp_path_factory, mesh):
    """Return float64 models: grouped keys, a window of 7 tokens, norms of queries and keys."""
    root = tmp_path_factory.mktemp("models")
    folders = {
        "llama": tiny_llama_folder(
            root / "llama", vocab_size=63, heads=6, groups=2, hidden=48, tied=False
        )
    }
    folders |= {name: family_folder(root / name, name) for name in FAMILIES[1:]}
    return {name: megatron_model(folder, mesh, torch.float64) for name, folder in folders.items()}


def batch_of(groups: list[tuple[int, list[int]]], order: list[int] | None = None):
    """Return (sequences, prompt_lengths, response_lengths, group_ids).

    `groups` holds (prompt length, response lengths) of each group.
    """
    prompts = [random_tokens(60, length, seed=number) for number, (length, _) in enumerate(groups)]
    rows = [(number, length) for number, (_, lengths) in enumerate(groups) for length in lengths]
    rows = [rows[i] for i in order] if order else rows
    parts = []
    for row, (number, length) in enumerate(rows):
        response = random_tokens(60, length, seed=100 + row)
        parts.append(torch.cat((prompts[number], response)))
    sequences = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=PAD)
    lengths = torch.tensor([length for _, length in rows])
    prompt_lengths = torch.tensor([len(prompts[number]) for number, _ in rows])
    group_ids = torch.tensor([7 * number + 3 for number, _ in rows])
    return sequences, prompt_lengths, lengths, group_ids


def scored(lm, layout, width):
    """Return log-probs, entropies and the gradient of a sum of log-probs with unequal weights."""
    lm.zero_grad()
    scores = response_scores(
        layout, layout.hidden(lm), lm, 0.7, width, chunk_tokens=5, with_entropy=True
    )
    weights = torch.randn(
        scores.log_probs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    (scores.log_probs * weights).sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in lm.parameters()]
    gradient = torch.cat([grad.flatten() for grad in grads])
    return scores.log_probs.detach(), scores.entropy.detach(), gradient


BATCHES = {
    "equal lengths": batch_of([(4, [5, 5]), (4, [5, 5])]),
    "ragged": batch_of([(4, [5, 2, 8]), (9, [3, 7, 1]), (1, [6, 4]), (12, [30])]),
    "not in order": batch_of([(4, [5, 2, 8]), (9, [3, 7, 1])], order=[5, 0, 3, 2, 1, 4]),
    "empty responses": batch_of([(4, [0, 2]), (6, [0, 0]), (3, [1, 1])]),
    "one token each": batch_of([(5, [1, 1, 1])]),
    "one prompt of one token": batch_of([(1, [3, 9])]),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", BATCHES)
def test_equal_to_padded_sequences(name, family, kernel, models):
    lm = models[family]
    *where, group_ids = BATCHES[name]
    width = int(where[2].max())
    with KERNELS[kernel]():
        packed = scored(lm, PackedGroups(lm, *where, group_ids), width)
    padded = scored(lm, PaddedSequences(lm, *where, pad_id=PAD), width)
    for values, other in zip(packed, padded, strict=True):
        torch.testing.assert_close(values, other, atol=1e-11, rtol=1e-9)
    expected = bool((where[2] > 0).any())
    assert packed[2].any() == expected


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(1, 11), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    )
)
def test_log_probs_of_any_groups(models, groups):
    lm = models["mistral_window"]
    *where, group_ids = batch_of(groups)
    width = max(int(where[2].max()), 1)
    log_probs = []
    for make in (flash_on_cpu, contextlib.nullcontext, None):
        with torch.no_grad(), make() if make else contextlib.nullcontext():
            layout = (
                PackedGroups(lm, *where, group_ids)
                if make
                else PaddedSequences(lm, *where, pad_id=PAD)
            )
            log_probs.append(
                response_scores(layout, layout.hidden(lm), lm, 1.0, width, chunk_tokens=5).log_probs
            )
    for packed in log_probs[:2]:
        torch.testing.assert_close(packed, log_probs[2], atol=1e-11, rtol=0)


def test_a_prompt_is_read_once_and_nothing_is_padded(models):
    *where, group_ids = BATCHES["ragged"]
    seen = []
    layout = PackedGroups(models["llama"], *where, group_ids)
    layout.hidden(lambda tokens, positions, packed: seen.append((tokens, positions)))
    ((tokens, positions),) = seen
    prompts = (4, 9, 1, 12)
    kept = [int(length) - 1 for length in where[2]]
    assert tokens.shape == positions.shape == (1, sum(prompts) + sum(kept))
    expected = [*range(4), *range(9), 0]
    assert positions[0, :14].tolist() == expected
    start = sum(prompts)
    assert positions[0, start : start + 5].tolist() == [4, 5, 6, 7, 4]


def test_the_flash_kernel_gets_no_padding(models):
    """One call a layer: four prompts, and eight responses of more than one token."""
    lm = models["llama"]
    *where, group_ids = BATCHES["ragged"]
    calls = []
    with flash_on_cpu(calls), torch.no_grad():
        PackedGroups(lm, *where, group_ids).hidden(lm)
    prompts = [4, 9, 1, 12]
    kept = [[4, 1, 7], [2, 6, 0], [5, 3], [29]]
    queries = sum(prompts) + sum(map(sum, kept))
    keys = sum(prompts)
    for prompt, counts in zip(prompts, kept, strict=True):
        keys += sum(count + prompt for count in counts if count)
    expected = [(4 + 8, queries, keys)] * len(lm.decoder.layers)
    assert calls == expected


def test_padding_at_the_end_of_a_row_is_a_sequence_of_its_own():
    """Sequence parallelism requires a multiple.

    No other sequence sees the padding, and the padding sees finite values.
    """
    spans = _spans([2, 3], [1, 0, 4], [1, 0, 0], 2)
    expected = [((0, 2),), ((2, 5),), ((2, 5), (5, 6)), ((0, 2), (6, 10)), ((10, 12),)]
    assert spans == expected
    query, key, value = torch.randn(3, 12, 1, 2, 8, dtype=torch.float64)
    with flash_on_cpu():
        whole = _UnpaddedAttention(spans, None, torch.device("cpu"))(query, key, value, None)
        attend = _UnpaddedAttention(spans[:-1], None, torch.device("cpu"))
        cut = attend(query[:10], key[:10], value[:10], None)
    torch.testing.assert_close(whole[:10], cut)
    assert whole.isfinite().all()


def test_a_prompts_gradient_is_added_up_in_float32():
    """A hundred responses contribute to it; in bf16 each addition would round."""
    rows = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    repeated = _Repeated.apply(rows, torch.zeros(100, dtype=torch.long))
    repeated.backward(torch.full((100, 1, 1), 1.0078125).bfloat16())
    expected = float(torch.tensor(100.78125).bfloat16())
    assert float(rows.grad) == expected


def test_responses_do_not_see_each_other(models):
    lm = models["llama"]
    sequences, *lengths, group_ids = BATCHES["ragged"]
    other = sequences.clone()
    other[1, 4:] = 9  # the second response to the first prompt
    log_probs = []
    with torch.no_grad():
        for tokens in (sequences, other):
            layout = PackedGroups(lm, tokens, *lengths, group_ids)
            log_probs.append(
                response_scores(layout, layout.hidden(lm), lm, 1.0, 30, chunk_tokens=64).log_probs
            )
    rest = [row for row in range(len(sequences)) if row != 1]
    assert torch.equal(log_probs[0][rest], log_probs[1][rest])
    assert not torch.equal(log_probs[0][1], log_probs[1][1])


def test_different_prompts_in_a_group_are_refused(models):
    sequences, *lengths, group_ids = BATCHES["ragged"]
    wrong = sequences.clone()
    wrong[4, 3] = 1
    with pytest.raises(ValueError, match="sequence 4 has another prompt than sequence 3"):
        PackedGroups(models["llama"], wrong, *lengths, group_ids)
