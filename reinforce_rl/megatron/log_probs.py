"""Log-probabilities of given tokens from vocabulary-parallel logits, at the positions of the responses only.

Notation: N sequences, S prompt plus response, T response, n response tokens of the whole micro-batch, h hidden.
"""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from reinforce_rl.megatron.model import CausalLM
from reinforce_rl.rollout import length_mask


def response_log_probs(
    model: torch.nn.Module,
    lm: CausalLM,
    sequences: Tensor,
    prompt_lengths: Tensor,
    response_lengths: Tensor,
    temperature: float,
    width: int,
) -> Tensor:
    """log pi(response token | everything before it) under softmax(logits / temperature), in float32.

    Args:
        model: what is called for the forward pass: `lm` itself, or the data-parallel wrapper around it.
        lm: gives the logits of hidden states.
        sequences: int64 [N, S], right-padded.
        prompt_lengths: int64 [N], at least 1.
        response_lengths: int64 [N]; 0 is allowed.
        temperature: of the sampling that produced the responses; above 0.
        width: T, columns of the result.

    Returns:
        float32 [N, T], 0 on padding, with gradient where gradients are on.
    """
    device = lm.mesh.device
    sequences, prompt_lengths, response_lengths = (t.to(device) for t in (sequences, prompt_lengths, response_lengths))
    used = max(int((prompt_lengths + response_lengths).max()), 1)
    # The last token of a sequence predicts nothing here, and columns past the longest row hold padding only.
    hidden = model(sequences[:, : max(used - 1, 1)])
    mask = length_mask(response_lengths, width)  # [N, T]
    rows, columns = mask.nonzero(as_tuple=True)
    out = torch.zeros(mask.shape, dtype=torch.float32, device=device)
    if rows.numel() == 0:
        # Keep the graph connected, so that a rank with nothing to train on still takes part in the collectives.
        return out + 0.0 * hidden.float().sum()
    targets = sequences[rows, prompt_lengths[rows] + columns]
    predictors = hidden[rows, prompt_lengths[rows] + columns - 1]
    logits = lm.logits(predictors) / temperature
    # megatron overwrites these logits; nobody else needs them. [n, 1, V / tp] and [n, 1] are its shapes.
    negative = tensor_parallel.vocab_parallel_cross_entropy(logits[:, None, :], targets[:, None])
    return out.index_put((rows, columns), -negative[:, 0])
