"""Log-probs from a forward pass, and from full logits in plain torch."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers.policies import megatron_model, padded_sequences
from torch import Tensor

from reinforce_rl.megatron.hf_weights import hf_tensors, parameters_of
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.log_probs import TokenScores, response_scores
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.model.sequences import PaddedSequences

PROMPT_LENGTHS = [5, 1, 9, 3]
RESPONSE_LENGTHS = [4, 7, 1, 0]


def response_log_probs(
    model: torch.nn.Module,
    lm: CausalLM,
    sequences: Tensor,
    prompt_lengths: Tensor,
    response_lengths: Tensor,
    temperature: float,
    width: int,
    *,
    chunk_tokens: int,
    with_entropy: bool = False,
) -> TokenScores:
    """Return `response_scores` after a forward pass of a model without pipeline parallelism.

    `model` is `lm` or its data-parallel wrapper.
    """
    layout = PaddedSequences(lm, sequences, prompt_lengths, response_lengths)
    return response_scores(
        layout,
        layout.hidden(model),
        lm,
        temperature,
        width,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
    )


def head_inputs(
    positions: int, tokens: int, rows: int, hidden_size: int = 5, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random hidden [n, h], weight [rows, h] and targets [n] below `tokens`.

    They are float64, with gradients. `scale` is about the standard deviation of the logits. Padded
    rows of the weight are non-zero, so that their use would show.
    """
    generator = torch.Generator().manual_seed(0)
    options = {"dtype": torch.float64, "generator": generator}
    hidden = torch.randn(positions, hidden_size, **options) * scale / hidden_size**0.5
    weight = torch.randn(rows, hidden_size, **options)
    targets = torch.randint(0, tokens, (positions,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def full_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probs of the targets and entropies, both [n]."""
    table = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(dim=-1)


def scores_and_gradients(folder: str | Path, mesh: Mesh) -> dict[str, Tensor]:
    """Return `log_probs` and `entropy` [4, 7] and the gradient; a collective call.

    Gradients are float64 and have Hugging Face names.
    """
    lm = megatron_model(folder, mesh, torch.float64)
    batch = padded_sequences(PROMPT_LENGTHS, RESPONSE_LENGTHS, lm.architecture.vocab_size)
    scores = response_log_probs(
        lm, lm, *batch, temperature=0.7, width=7, chunk_tokens=5, with_entropy=True
    )
    assert scores.entropy is not None
    for_log_probs, for_entropy = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))
    (for_log_probs * scores.log_probs + for_entropy * scores.entropy).sum().backward()
    # The mapping to Hugging Face's layout is linear, so it maps gradients too; only the first rank
    # gets them.
    gradients = dict(
        hf_tensors(lm, {name: parameter.grad for name, parameter in parameters_of(lm).items()})
    )
    gradients = mesh.from_model_parallel_rank_0(gradients)
    return {"log_probs": scores.log_probs.detach(), "entropy": scores.entropy.detach(), **gradients}
