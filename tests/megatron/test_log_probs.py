"""Log-probs of response tokens against transformers' logits, whatever the padding, batching and sharding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.models import tiny_llama_folder
from helpers.policies import brute_force_log_probs, megatron_model, padded_sequences, transformers_model
from helpers.ranks import run_ranks

from reinforce_rl.megatron.log_probs import response_log_probs

PROMPT_LENGTHS = [5, 1, 9, 3]
RESPONSE_LENGTHS = [4, 7, 1, 0]


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
        found = response_log_probs(lm, lm, *batch, temperature=temperature, width=8)
        expected = brute_force_log_probs(theirs, *batch, temperature=temperature, width=8)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for row, length in enumerate(RESPONSE_LENGTHS):
        assert (found[row, :length] < 0).all()
        assert (found[row, length:] == 0).all()


def test_temperature_changes_them(lm, batch):
    one, two = (response_log_probs(lm, lm, *batch, temperature=t, width=7).detach() for t in (1.0, 0.7))
    assert (one - two).abs().max() > 0.1


def test_independent_of_padding_and_of_the_rest_of_the_batch(lm, batch):
    sequences, prompts, responses = batch
    with torch.no_grad():
        together = response_log_probs(lm, lm, *batch, temperature=0.7, width=7)
        wider = torch.nn.functional.pad(sequences, (0, 6), value=17)
        # What stands behind a sequence's end is never read.
        for row in range(len(sequences)):
            wider[row, prompts[row] + responses[row] :] = 17
        torch.testing.assert_close(
            response_log_probs(lm, lm, wider, prompts, responses, temperature=0.7, width=7),
            together,
            atol=2e-6,
            rtol=0,
        )
        for row in range(len(sequences)):
            one = slice(row, row + 1)
            alone = response_log_probs(lm, lm, sequences[one], prompts[one], responses[one], temperature=0.7, width=7)
            torch.testing.assert_close(alone[0], together[row], atol=2e-6, rtol=0)


def test_gradient_equals_plain_torch(lm, theirs, batch, folder):
    from reinforce_rl.megatron.hf_weights import hf_tensors, parameters_of

    weights = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    lm.zero_grad()
    (weights * response_log_probs(lm, lm, *batch, temperature=0.7, width=7)).sum().backward()
    theirs.zero_grad()
    (weights * brute_force_log_probs(theirs, *batch, temperature=0.7, width=7)).sum().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    # The mapping of weights is linear, so it maps gradients too.
    found = dict(hf_tensors(lm, {name: parameter.grad for name, parameter in parameters_of(lm).items()}))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-5, msg=name)


def test_nothing_but_empty_responses_keeps_the_graph(lm):
    sequences = torch.full((2, 3), 5)
    out = response_log_probs(lm, lm, sequences, torch.tensor([3, 2]), torch.zeros(2).long(), temperature=1.0, width=4)
    assert torch.equal(out, torch.zeros(2, 4))
    lm.zero_grad()
    out.sum().backward()
    assert all((p.grad == 0).all() for p in lm.parameters() if p.grad is not None)
    assert any(p.grad is not None for p in lm.parameters())


def test_single_token_prompt_without_response(lm):
    one = torch.ones(1).long()
    out = response_log_probs(lm, lm, one[:, None], one, one - 1, temperature=1.0, width=0)
    assert out.shape == (1, 0)


def test_two_tensor_parallel_ranks(tmp_path):
    """With vocabularies that must be padded: a padded column would take probability from the others."""
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
        expected = brute_force_log_probs(model, *batch, temperature=0.7, width=7)
        torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=0)
