"""Keys and values of sequences being decoded on a GPU: read in their own dtype, by a flash kernel, in static shapes.

`KVCache` copies all that a step reads to float32 and takes a new shape at each token. Here a step is one call of
FlashAttention's kernel for sequences of unequal length, which has every query twice: among the queries of its prompt,
whose keys are thus read once for all samples, and with those of its row over the keys of its own response. What the
two give is one softmax by their log-sum-exps (Juravsky et al., "Hydragen", arXiv:2402.05099, section 3).

Nothing in a step depends on the host: lengths and places are read by the kernels, so that a CUDA graph may replay it.

Notation: P prompt slots, L tokens of the longest prompt, R rows of a step, T response tokens at most, g key-value
groups, n query heads a group, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reinforce_rl.megatron.model.attention import causal_attention


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    starts: Tensor,
    used: Tensor,
    most: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Attention of some sequences' queries, each to all keys of its sequence, unscaled.

    torch's operator under `torch.nn.attention.varlen.varlen_attn`, which torch 2.9 has not: with `seqused_k`, the
    kernel reads of `starts` only where a sequence begins, so that sequences may lie anywhere.

    Args:
        query: [q, g, d].
        key, value: [k, g, d], any strides but the last.
        query_starts: int32 [sequences + 1], ascending.
        starts: int32 [sequences + 1], where each sequence's keys begin; the last is not read.
        used: int32 [sequences], its keys.
        most: queries and keys of a sequence at most.

    Returns:
        [q, g, d], and the log-sum-exp of the scores, float32 [g, q].
    """
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, query_starts, starts, *most, 0.0, False, False, scale=1.0, seqused_k=used
    )
    return out, log_sum


class FlashCache:
    """As `KVCache`, of static shapes.

    Rows lie in lanes; a row keeps its lane for as long as it lives, whatever its place in a step. The last token of
    the pool is nobody's: rows of a step that stand for none read and write it.

    Args: as of `KVCache`.
    """

    def __init__(
        self,
        layers: range,
        prompts: int,
        prompt_tokens: int,
        rows: int,
        response_tokens: int,
        groups: int,
        head_size: int,
        dtype: torch.dtype,
        device: Any,
        window: int | None = None,
    ):
        self._first_layer, self._device, self._window = layers.start, device, window
        self._shape = (prompts, prompt_tokens, response_tokens)
        self.spare = prompts * prompt_tokens + rows * response_tokens
        self._pool = torch.zeros((len(layers), self.spare + 1, groups, 2, head_size), dtype=dtype, device=device)
        # Of each layer the whole [tokens, g, 2, d], its keys and its values.
        self._layers = [(layer, *layer.unbind(2)) for layer in self._pool.unbind()]
        firsts = [*range(0, prompts * prompt_tokens, prompt_tokens), self.spare]
        self._prompt_starts = torch.tensor(firsts, dtype=torch.int32, device=device)
        self._prompt_lengths = torch.ones(prompts + 1, dtype=torch.int32, device=device)
        self._reading: Tensor | None = None
        self._first_queries: Tensor | None = None

    def lane_start(self, lane: int) -> int:
        """Where a lane's tokens begin."""
        prompts, prompt_tokens, response_tokens = self._shape
        return prompts * prompt_tokens + lane * response_tokens

    def read(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """The next pass is over prompts of these lengths, right-padded, and fills these slots."""
        self._reading = torch.tensor(slots, device=self._device)
        self._prompt_lengths[self._reading] = torch.tensor(lengths, dtype=torch.int32, device=self._device)

    def at(self, starts: Tensor, written: Tensor, rows_of_slots: Tensor, most_rows: int) -> None:
        """The next pass is over one token of each row, the rows of a slot side by side.

        Args:
            starts: int64 [R], of each row's lane.
            written: int64 [R], response tokens whose keys are stored already.
            rows_of_slots: int32 [P + 2], the number of the first row of each slot, of that of no row, and R.
            most_rows: of one slot.
        """
        self._reading, self._most_rows, self._write_at = None, most_rows, starts + written
        # Sequences are the slots, and then the rows; what comes after the last one's start is not read.
        rows = torch.arange(len(starts), 2 * len(starts) + 1, dtype=torch.int32, device=self._device)
        self._first_rows, self._first_queries = torch.cat((rows_of_slots[:-1], rows)), None
        starts = torch.nn.functional.pad(starts, (0, 1))
        self._starts = torch.cat((self._prompt_starts, starts.int()))
        self._used = torch.cat((self._prompt_lengths, (written + 1).int()))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """See `KVCache.attend`."""
        if self._reading is not None:
            prompts, prompt_tokens, _ = self._shape
            stored = self._pool[layer - self._first_layer, : prompts * prompt_tokens].unflatten(0, (prompts, -1))
            new = torch.stack((key, value), dim=-2).transpose(1, 2)  # [b, s, g, 2, d]
            stored[self._reading, : new.shape[1]] = new
            return causal_attention(query, key, value, scale, self._window)
        rows, heads, _, head_size = query.shape
        queries = query.reshape(rows, key.shape[1], -1, head_size) * (scale or head_size**-0.5)
        return self.step(layer, queries, torch.cat((key, value), dim=2)).view(rows, heads, 1, head_size)

    def step(self, layer: int, queries: Tensor, new: Tensor) -> Tensor:
        """See `KVCache.step`: [R, g, n, d] and [R, g, 2, d] to [R, g, n, d]."""
        pool, keys, values = self._layers[layer - self._first_layer]
        pool.index_copy_(0, self._write_at, new)
        rows, groups, heads, head_size = queries.shape
        # The heads of a group stand in for the sequence axis, so that their keys are read once.
        query = queries.transpose(1, 2).expand(2, -1, -1, -1, -1).reshape(-1, groups, head_size)
        if self._first_queries is None:  # in the first layer
            self._first_queries = self._first_rows * heads
        most = self._most_rows * heads, max(self._shape[1:])
        out, log_sum = varlen_attention(query, keys, values, self._first_queries, self._starts, self._used, most)
        of_prompt, own = out.view(2, rows, heads, groups, head_size)
        prompt_sum, own_sum = log_sum.view(groups, 2, rows * heads).unbind(1)
        share = torch.empty(rows * heads, groups, dtype=query.dtype, device=query.device)
        torch.sigmoid(prompt_sum - own_sum, out=share.t())
        found = torch.empty_like(queries, memory_format=torch.contiguous_format)
        torch.lerp(own, of_prompt, share.view(rows, heads, groups, 1), out=found.transpose(1, 2))
        return found
