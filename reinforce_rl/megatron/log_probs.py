"""Log-probabilities of given tokens, and entropies, at the positions of the responses only.

Notation: N sequences, S prompt plus response, T response, n response tokens of the whole micro-batch, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reinforce_rl.megatron.chunked_head import chunked_log_probs
from reinforce_rl.megatron.context_parallel import sum_of_shares
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


def scored_length(prompt_lengths: Tensor, response_lengths: Tensor, pad_to: int = 0) -> int:
    """How many columns of the sequences a model reads for `response_scores`: the longest row, less one token.

    The last token of a sequence predicts nothing here, and columns past the longest row hold padding only. They are
    read too where a row shall have `pad_to` tokens.
    """
    return max(int((prompt_lengths + response_lengths).max()) - 1, pad_to - 1, 1)


def response_scores(
    hidden: Tensor,
    lm: CausalLM,
    sequences: Tensor,
    prompt_lengths: Tensor,
    response_lengths: Tensor,
    temperature: float,
    width: int,
    *,
    chunk_tokens: int,
    with_entropy: bool = False,
    pad_to: int = 0,
) -> TokenScores:
    """log pi(response token | everything before it) and the entropy of pi there, pi = softmax(logits / temperature).

    A collective call over tensor- and context-parallel ranks, and so is its backward pass.

    Args:
        hidden: [N, s', h], what `lm` gives for the first `scored_length` columns: at its `own_positions`.
        lm: gives the output layer.
        sequences: int64 [N, S], right-padded.
        prompt_lengths: int64 [N], at least 1.
        response_lengths: int64 [N]; 0 is allowed.
        temperature: of the sampling that produced the responses; above 0.
        width: T, columns of the result.
        chunk_tokens: response tokens whose logits exist at a time.
        with_entropy: whether the entropy is wanted.
        pad_to: of `scored_length`.

    Returns:
        float32, or float64 where the model is; with gradient where gradients are on; the same on every rank.
    """
    device = lm.mesh.device
    sequences, prompt_lengths, response_lengths = (t.to(device) for t in (sequences, prompt_lengths, response_lengths))
    length = scored_length(prompt_lengths, response_lengths, pad_to)
    own = lm.own_positions(length)
    column_of = torch.full((length,), -1, device=device).index_put((own,), torch.arange(len(own), device=device))
    mask = length_mask(response_lengths, width)  # [N, T]
    rows, columns = mask.nonzero(as_tuple=True)
    held = column_of[prompt_lengths[rows] + columns - 1] >= 0
    rows, columns = rows[held], columns[held]
    empty = torch.zeros(mask.shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=device)
    if rows.numel() == 0:
        # Keep the graph connected, so that a rank with nothing to train on still takes part in the collectives: those
        # of the layers, and the one that starts when the output layer has its gradient.
        log_probs = entropy = empty + 0.0 * (hidden.to(empty.dtype).sum() + lm.output_weight[0, 0])
    else:
        targets = prompt_lengths[rows] + columns
        found, entropies = chunked_log_probs(
            hidden[rows, column_of[targets - 1]],
            lm.output_weight,
            sequences[rows, targets],
            lm.vocab_shard,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            with_entropy=with_entropy,
        )
        log_probs = empty.index_put((rows, columns), found)
        entropy = log_probs if entropies is None else empty.index_put((rows, columns), entropies)
    scores = torch.stack((log_probs, entropy)) if with_entropy else log_probs[None]
    if lm.mesh.cp_size > 1:
        scores = sum_of_shares(scores, lm.mesh.cp_group)
    return TokenScores(scores[0], scores[1] if with_entropy else None)
