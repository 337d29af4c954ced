"""Log-probabilities of given tokens, and entropies, at the positions of the responses only.

Notation: N sequences, S prompt plus response, T response, n response tokens of the whole micro-batch, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reinforce_rl.megatron.chunked_head import chunked_log_probs
from reinforce_rl.megatron.model import CausalLM
from reinforce_rl.rollout import length_mask


@dataclass(frozen=True)
class TokenScores:
    """What a policy says of each response token, given everything before it.

    Attributes:
        log_probs: [N, T], of the token itself, in nats; 0 on padding.
        entropy: [N, T], of the distribution that the token was drawn from, in nats; 0 on padding. None where it was
            not asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None


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
    """log pi(response token | everything before it) and the entropy of pi there, pi = softmax(logits / temperature).

    Args:
        model: what is called for the forward pass: `lm` itself, or the data-parallel wrapper around it.
        lm: gives the output layer.
        sequences: int64 [N, S], right-padded.
        prompt_lengths: int64 [N], at least 1.
        response_lengths: int64 [N]; 0 is allowed.
        temperature: of the sampling that produced the responses; above 0.
        width: T, columns of the result.
        chunk_tokens: response tokens whose logits exist at a time.
        with_entropy: whether the entropy is wanted.

    Returns:
        float32, or float64 where the model is; with gradient where gradients are on.
    """
    device = lm.mesh.device
    sequences, prompt_lengths, response_lengths = (t.to(device) for t in (sequences, prompt_lengths, response_lengths))
    used = max(int((prompt_lengths + response_lengths).max()), 1)
    # The last token of a sequence predicts nothing here, and columns past the longest row hold padding only.
    hidden = model(sequences[:, : max(used - 1, 1)])
    mask = length_mask(response_lengths, width)  # [N, T]
    rows, columns = mask.nonzero(as_tuple=True)
    empty = torch.zeros(mask.shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=device)
    if rows.numel() == 0:
        # Keep the graph connected, so that a rank with nothing to train on still takes part in the collectives.
        nothing = empty + 0.0 * hidden.to(empty.dtype).sum()
        return TokenScores(nothing, nothing if with_entropy else None)
    log_probs, entropy = chunked_log_probs(
        hidden[rows, prompt_lengths[rows] + columns - 1],
        lm.output_weight,
        sequences[rows, prompt_lengths[rows] + columns],
        lm.vocab_shard,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
    )
    log_probs = empty.index_put((rows, columns), log_probs)
    return TokenScores(log_probs, None if entropy is None else empty.index_put((rows, columns), entropy))
