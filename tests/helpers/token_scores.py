"""Scores of one fixed batch and the gradient of both of them, to compare tensor-parallel sizes."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers.log_probs import response_log_probs
from helpers.policies import megatron_model, padded_sequences
from torch import Tensor

from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.weights.hf_weights import hf_tensors, parameters_of

PROMPT_LENGTHS = [5, 1, 9, 3]
RESPONSE_LENGTHS = [4, 7, 1, 0]


def scores_and_gradients(folder: str | Path, mesh: Mesh) -> dict[str, Tensor]:
    """`log_probs` and `entropy` [4, 7], and the gradient of a weighted sum of them for each Hugging Face tensor.

    In float64; a collective call.
    """
    lm = megatron_model(folder, mesh, torch.float64)
    batch = padded_sequences(PROMPT_LENGTHS, RESPONSE_LENGTHS, lm.architecture.vocab_size)
    scores = response_log_probs(lm, lm, *batch, temperature=0.7, width=7, chunk_tokens=5, with_entropy=True)
    assert scores.entropy is not None
    for_log_probs, for_entropy = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))
    (for_log_probs * scores.log_probs + for_entropy * scores.entropy).sum().backward()
    # The mapping to Hugging Face's layout is linear, so it maps gradients too; the first rank alone gets it.
    gradients = dict(hf_tensors(lm, {name: parameter.grad for name, parameter in parameters_of(lm).items()}))
    gradients = mesh.from_block_leader(gradients)
    return {"log_probs": scores.log_probs.detach(), "entropy": scores.entropy.detach(), **gradients}
