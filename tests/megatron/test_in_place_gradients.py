"""Gradients added to the buffers where they arise, against those that autograd returns."""

from __future__ import annotations

import pytest
import torch
from helpers.accumulate import accumulate_gradients
from helpers.models import tiny_llama_folder
from helpers.policies import megatron_model, padded_sequences

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.megatron.model.log_probs import response_scores
from reinforce_rl.megatron.model.sequences import PaddedSequences
from reinforce_rl.megatron.model.transformer_config import ModelOptions
from reinforce_rl.megatron.optimizer import wrap_data_parallel

RECOMPUTED = ModelOptions(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
MICRO_BATCHES = [([3, 5], [4, 2]), ([6], [1]), ([2, 2], [3, 7])]


def accumulated(folder, mesh, options=None, dtype=torch.float32, **settings):
    """(wrapped model, its gradients by name) after two calls, each over all micro-batches."""
    lm = megatron_model(folder, mesh, dtype, options or ModelOptions())
    ddp = wrap_data_parallel(lm, OptimConfig(**settings))

    def loss_of(model, lengths):
        layout = PaddedSequences(lm, *padded_sequences(*lengths, lm.architecture.vocab_size))
        scores = response_scores(layout, layout.hidden(model), lm, 1.3, 8, chunk_tokens=3, with_entropy=True)
        return scores.log_probs.sum() + 0.3 * scores.entropy.sum()

    for _ in range(2):  # the second one must forget the first
        accumulate_gradients(ddp, MICRO_BATCHES, loss_of)
    return ddp, {name: p.main_grad.clone() for name, p in ddp.named_parameters()}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [None, RECOMPUTED])
def test_gradients_are_those_of_autograd(tied, overlap, options, tmp_path, mesh):
    folder = tiny_llama_folder(tmp_path / "model", tied=tied)
    _, plain = accumulated(folder, mesh, options, in_place_gradients=False)
    ddp, found = accumulated(folder, mesh, options, overlap_grad_sync=overlap)
    assert found.keys() == plain.keys()
    for name, gradient in plain.items():
        assert gradient.abs().max() > 1e-3
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()))
    # The rest of a layer is two vectors.
    assert all(p.grad_added_to_main_grad == (p.dim() == 2) for p in ddp.parameters())


@pytest.mark.parametrize("settings", [{"in_place_gradients": False}, {"dtype": torch.bfloat16}])
def test_it_can_be_switched_off_and_is_for_float32_alone(settings, tmp_path, mesh):
    ddp, _ = accumulated(tiny_llama_folder(tmp_path / "model"), mesh, **settings)
    assert not any(p.grad_added_to_main_grad for p in ddp.parameters())


def test_what_is_never_touched_is_never_added(tmp_path, mesh, monkeypatch):
    """The tensor that stands for a gradient holds whatever was in its memory."""
    monkeypatch.setattr(torch, "empty_like", lambda x, **kwargs: torch.full_like(x, float("nan"), **kwargs))
    real = torch.empty

    def nan(*args, **kwargs):
        found = real(*args, **kwargs)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    monkeypatch.setattr(torch, "empty", nan)
    _, found = accumulated(tiny_llama_folder(tmp_path / "model"), mesh)
    assert all(gradient.isfinite().all() for gradient in found.values())
