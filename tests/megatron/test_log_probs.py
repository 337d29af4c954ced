"""Log-probs and entropies of response tokens against transformers' logits, however padded, batched or sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.log_probs import response_log_probs
from helpers.models import tiny_llama_folder
from helpers.policies import (
    brute_force_entropies,
    brute_force_log_probs,
    megatron_model,
    padded_sequences,
    transformers_model,
)
from helpers.ranks import run_ranks
from helpers.token_scores import PROMPT_LENGTHS, RESPONSE_LENGTHS, scores_and_gradients

CHUNK = 5  # of the 12 response tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama_folder(tmp_path_factory.mktemp("model"), vocab_size=63, tied=False)


@pytest.fixture(scope="module")
def lm(folder, mesh):
    return megatron_model(folder, mesh)


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers_model(folder)


@pytest.fixture
def batch():
    return padded_sequences(PROMPT_LENGTHS, RESPONSE_LENGTHS, vocab_size=63)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_equal_to_log_softmax_of_transformers(temperature, lm, theirs, batch):
    with torch.no_grad():
        scores = response_log_probs(
            lm, lm, *batch, temperature=temperature, width=8, chunk_tokens=CHUNK, with_entropy=True
        )
        log_probs = brute_force_log_probs(theirs, *batch, temperature=temperature, width=8)
        entropies = brute_force_entropies(theirs, *batch, temperature=temperature, width=8)
    assert scores.entropy is not None
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    torch.testing.assert_close(scores.log_probs, log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.entropy, entropies, atol=1e-5, rtol=0)
    for row, length in enumerate(RESPONSE_LENGTHS):
        assert (scores.log_probs[row, :length] < 0).all()
        assert (scores.entropy[row, :length] > 0).all()
        assert (scores.log_probs[row, length:] == 0).all()
        assert (scores.entropy[row, length:] == 0).all()


def test_entropy_only_where_it_is_asked_for(lm, batch):
    assert response_log_probs(lm, lm, *batch, temperature=1.0, width=7, chunk_tokens=CHUNK).entropy is None


def test_temperature_changes_them(lm, batch):
    one, two = (log_probs_of(lm, *batch, temperature=t).detach() for t in (1.0, 0.7))
    assert (one - two).abs().max() > 0.1


def test_independent_of_padding_and_of_the_rest_of_the_batch(lm, batch):
    sequences, prompts, responses = batch
    with torch.no_grad():
        together = log_probs_of(lm, *batch)
        wider = torch.nn.functional.pad(sequences, (0, 6), value=17)
        # What stands behind a sequence's end is never read.
        for row in range(len(sequences)):
            wider[row, prompts[row] + responses[row] :] = 17
        torch.testing.assert_close(log_probs_of(lm, wider, prompts, responses), together, atol=2e-6, rtol=0)
        for row in range(len(sequences)):
            one = slice(row, row + 1)
            alone = log_probs_of(lm, sequences[one], prompts[one], responses[one])
            torch.testing.assert_close(alone[0], together[row], atol=2e-6, rtol=0)


def test_gradient_equals_plain_torch(lm, theirs, batch):
    from reinforce_rl.megatron.weights.hf_weights import hf_tensors, parameters_of

    for_log_probs, for_entropy = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))
    lm.zero_grad()
    scores = response_log_probs(lm, lm, *batch, temperature=0.7, width=7, chunk_tokens=CHUNK, with_entropy=True)
    assert scores.entropy is not None
    (for_log_probs * scores.log_probs + for_entropy * scores.entropy).sum().backward()
    theirs.zero_grad()
    log_probs = brute_force_log_probs(theirs, *batch, temperature=0.7, width=7)
    entropies = brute_force_entropies(theirs, *batch, temperature=0.7, width=7)
    (for_log_probs * log_probs + for_entropy * entropies).sum().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    # The mapping of weights is linear, so it maps gradients too.
    found = dict(hf_tensors(lm, {name: parameter.grad for name, parameter in parameters_of(lm).items()}))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-5, msg=name)


def test_nothing_but_empty_responses_keeps_the_graph(lm):
    sequences, prompts = torch.full((2, 3), 5), torch.tensor([3, 2])
    scores = response_log_probs(
        lm, lm, sequences, prompts, torch.zeros(2).long(), temperature=1.0, width=4, chunk_tokens=2, with_entropy=True
    )
    assert scores.entropy is not None
    for out in (scores.log_probs, scores.entropy):
        assert torch.equal(out, torch.zeros(2, 4))
        lm.zero_grad()
        out.sum().backward(retain_graph=True)
        assert all((p.grad == 0).all() for p in lm.parameters() if p.grad is not None)
        assert any(p.grad is not None for p in lm.parameters())


def test_single_token_prompt_without_response(lm):
    one = torch.ones(1).long()
    scores = response_log_probs(lm, lm, one[:, None], one, one - 1, temperature=1.0, width=0, chunk_tokens=1)
    assert scores.log_probs.shape == (1, 0)


def test_bfloat16_model_gives_float32_softmax(folder, mesh, batch):
    """Logits have the model's precision; what follows has not: a bfloat16 log-prob would be off by 1e-2."""
    lm = megatron_model(folder, mesh, torch.bfloat16)
    with torch.no_grad():
        scores = response_log_probs(lm, lm, *batch, temperature=0.7, width=7, chunk_tokens=CHUNK, with_entropy=True)
        sequences, prompts, responses = batch
        table = torch.log_softmax(lm.logits(lm(sequences[:, :-1]).flatten(0, 1)) / 0.7, dim=-1)
    table = table.view(*sequences[:, :-1].shape, -1)
    assert scores.entropy is not None
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    for row in range(len(sequences)):
        for t in range(int(responses[row])):
            at = int(prompts[row]) + t
            expected = table[row, at - 1]
            torch.testing.assert_close(scores.log_probs[row, t], expected[sequences[row, at]], atol=1e-5, rtol=0)
            entropy = torch.special.entr(expected.exp()).sum()
            torch.testing.assert_close(scores.entropy[row, t], entropy, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_two_tensor_parallel_ranks(tmp_path, mesh):
    """In float64, with vocabularies that must be padded: a padded column would take probability from the others."""
    folders = [
        tiny_llama_folder(tmp_path / "untied", vocab_size=63, tied=False),
        tiny_llama_folder(tmp_path / "odd_groups", vocab_size=61, heads=9, groups=3, hidden=36),
    ]
    (tmp_path / "out").mkdir()
    run_ranks(Path(__file__).parents[1] / "helpers/rank_scripts/log_probs_tp2.py", 2, tmp_path / "out", *folders)
    for folder in folders:
        found = torch.load(tmp_path / "out" / f"{folder.name}.pt")
        model = transformers_model(folder)
        batch = padded_sequences(PROMPT_LENGTHS, RESPONSE_LENGTHS, vocab_size=model.config.vocab_size)
        with torch.no_grad():
            expected = brute_force_log_probs(model, *batch, temperature=0.7, width=7)
        torch.testing.assert_close(found["log_probs"].float(), expected, atol=1e-5, rtol=0)
        alone = scores_and_gradients(folder, mesh)
        assert set(found) == set(alone)
        for name, tensor in alone.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-10, rtol=1e-10, msg=name)


def log_probs_of(lm, sequences, prompt_lengths, response_lengths, temperature=0.7):
    return response_log_probs(
        lm, lm, sequences, prompt_lengths, response_lengths, temperature=temperature, width=7, chunk_tokens=CHUNK
    ).log_probs
