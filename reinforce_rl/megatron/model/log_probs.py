"""Log-probabilities of given tokens, and entropies, at the positions of the responses only.

Notation: N sequences, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reinforce_rl.megatron.model.chunked_head import chunked_log_probs
from reinforce_rl.megatron.model.context_parallel import sum_of_shares
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.model.sequence_layout import SequenceLayout


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


def response_scores(
    layout: SequenceLayout,
    hidden: Tensor,
    lm: CausalLM,
    temperature: float,
    width: int,
    *,
    chunk_tokens: int,
    with_entropy: bool = False,
) -> TokenScores:
    """log pi(response token | everything before it) and the entropy of pi there, pi = softmax(logits / temperature).

    A collective call over tensor- and context-parallel ranks, and so is its backward pass.

    Args:
        layout: of the pass.
        hidden: what `layout.hidden` gave on the last stage.
        lm: gives the output layer.
        temperature: of the sampling that produced the responses; above 0.
        width: T, columns of the result.
        chunk_tokens: response tokens whose logits exist at a time.
        with_entropy: whether the entropy is wanted.

    Returns:
        float32, or float64 where the model is; with gradient where gradients are on; the same on every rank.
    """
    found = layout.predictions(hidden)
    shape = (len(layout.response_lengths), width)
    empty = torch.zeros(shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    entropy = None
    if found.rows.numel() == 0:
        # Keep the graph connected, so that a rank with nothing to train on still takes part in the collectives: those
        # of the layers, and the one that starts when the output layer has its gradient.
        log_probs = empty + 0.0 * (hidden.to(empty.dtype).sum() + lm.output_weight[0, 0])
        entropy = log_probs if with_entropy else None
    else:
        where = (found.rows, found.columns)
        values, entropies = chunked_log_probs(
            found.hidden,
            lm.output_weight,
            found.targets,
            lm.vocab_shard,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            with_entropy=with_entropy,
        )
        log_probs = empty.index_put(where, values)
        entropy = None if entropies is None else empty.index_put(where, entropies)
    if lm.mesh.cp_size > 1:
        log_probs = sum_of_shares(log_probs, lm.mesh.cp_group)
        entropy = None if entropy is None else sum_of_shares(entropy, lm.mesh.cp_group)
    return TokenScores(log_probs, entropy)
