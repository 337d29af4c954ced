"""Log-probs after a forward pass of a model that is no pipeline."""

from __future__ import annotations

import torch
from torch import Tensor

from reinforce_rl.megatron.model.log_probs import TokenScores, response_scores
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.model.sequences import PaddedSequences


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
    """`response_scores` after a forward pass, for a model that is no pipeline.

    Args:
        model: what is called for the forward pass: `lm` itself, or the data-parallel wrapper around it.
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
