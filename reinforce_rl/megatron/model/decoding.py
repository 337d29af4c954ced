"""KV caches, and decode steps of one token without megatron's bookkeeping.

Megatron would compute sines per layer, and run autograd and hooks.

A prompt's keys and values are stored once for all its samples. `KVCache` runs on any device; it
converts the keys and values of a step to float32, and its shapes grow with each token. `FlashCache`
is for a GPU, in the model's dtype, with static shapes that a CUDA graph can replay: one
variable-length FlashAttention call has each query twice, with its prompt's keys and with its own
response's, merged by log-sum-exp (Juravsky et al., "Hydragen", arXiv:2402.05099, section 3).

Notation: P prompt slots, L tokens of the longest prompt, R rows in use (sequences in flight), T
maximum response tokens, W maximum rows of one prompt, h query heads (hidden size in
`decode_layers`), g key-value groups of this rank, n query heads per group, d head size.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from reinforce_rl.megatron.cpu.fast import packed_product
from reinforce_rl.megatron.model.attention import causal_attention
from reinforce_rl.megatron.model.layers import linear_parts


class CacheSizes(NamedTuple):
    layers: range  # global numbers of this rank's layers, from 0
    prompts: int
    prompt_tokens: int
    rows: int  # maximum sequences in flight
    response_tokens: int
    groups: int  # g on this tensor-parallel rank
    head_size: int
    dtype: torch.dtype
    device: Any
    window: int | None = None  # tokens that a position attends to, itself included; None for all

    def zeros(self, sequences: int, tokens: int) -> Tensor:
        """Return keys and values of this many sequences: [layers, 2, sequences, g, tokens, d]."""
        shape = (len(self.layers), 2, sequences, self.groups, tokens, self.head_size)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


class _Cache:
    """Cache given to megatron's layers as `attention_mask`."""

    def __init__(self, sizes: CacheSizes):
        self._sizes = sizes
        self._device = sizes.device
        self._window = sizes.window
        self._reading: Tensor | None = None  # slots during a pass over prompts, else None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        """Store this pass's keys and values and attend over all stored keys.

        query [b, h, s, d], key and value [b, g, s, d] to [b, h, s, d]. `layer` is the global
        number, from 0; `scale` None is 1 / sqrt(d).
        """
        if self._reading is not None:
            self._store(layer - self._sizes.layers.start, self._reading, key, value)
            return causal_attention(query, key, value, scale, self._window)
        rows, heads, _, head_size = query.shape
        # Each row has one query. Use a group's heads as the sequence axis, so that keys are read
        # once per group.
        queries = query.reshape(rows, key.shape[1], -1, head_size) * (scale or head_size**-0.5)
        return self.step(layer, queries, torch.cat((key, value), dim=2)).view(
            rows, heads, 1, head_size
        )

    def step(self, layer: int, queries: Tensor, new: Tensor) -> Tensor:
        """Attend with one token per row.

        Scaled queries [R, g, n, d] and new keys and values [R, g, 2, d] to [R, g, n, d].
        """
        raise NotImplementedError

    def _store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        raise NotImplementedError


class LaneTokens(NamedTuple):
    """Tokens to be added to a row."""

    lane: int
    slot: int  # of its prompt
    prompt_length: int
    stored: int  # tokens of the row whose keys and values are there
    count: int  # tokens to be added


class _Extension(NamedTuple):
    """A pass over s tokens at most of each of b rows; M tokens in all."""

    beside: int  # tokens of other rows that precede them, one a row
    lanes: Tensor  # [b]
    slots: Tensor  # [b]
    of_row: Tensor  # [M]: which of the b rows a token is of
    offsets: Tensor  # [M]: its number among the row's new tokens
    used: int  # tokens of the fullest lane after the pass
    hidden: Tensor  # bool [b, 1, 1, s, L + used]


class KVCache(_Cache):
    """Cache whose rows in use come first, so that steps copy no rows."""

    def __init__(self, sizes: CacheSizes):
        super().__init__(sizes)
        # Zeros, as unwritten values get weight 0 and must be finite.
        self._prompts = sizes.zeros(sizes.prompts, sizes.prompt_tokens)
        self._responses = sizes.zeros(sizes.rows, sizes.response_tokens)
        # Views of each layer, created here and in `at` rather than in every layer's turn: keys
        # [P * g, d, L], values [P * g, L, d], and the memory for new keys and values,
        # [2 * rows * g * T, d].
        keys, values = self._prompts.flatten(2, 3).unbind(1)
        self._prompt_keys = keys.transpose(-1, -2).unbind()
        self._prompt_values = values.unbind()
        self._all_responses = self._responses.flatten(1, 4).unbind()
        self._most_used = 0  # tokens of the fullest lane so far
        self._extension: _Extension | None = None  # during a pass over several tokens a row

    def read(self, slots: Sequence[int]) -> None:
        """Prepare a pass over right-padded prompts that fills these slots."""
        self._reading = torch.tensor(slots, device=self._device)

    def place(self, slots: Sequence[int]) -> None:
        """Assign row i to the prompt in slots[i], and set the number of rows."""
        self._rows = len(slots)
        self._slot_of_row = torch.tensor(slots, device=self._device)
        # Rows of a prompt are side by side, [P, W], and unused cells hold row 0: one product reads
        # a prompt's keys for all its rows.
        width = max(Counter(slots).values())
        filled: Counter[int] = Counter()
        cells = []
        row_of_cell = [0] * (self._prompts.shape[2] * width)
        for row, slot in enumerate(slots):
            cells.append(slot * width + filled[slot])
            row_of_cell[cells[-1]] = row
            filled[slot] += 1
        self._width = width
        # Usually true until a response ends; rows then stay where they are.
        self._in_place = cells == list(range(len(row_of_cell)))
        self._cell_of_row = torch.tensor(cells, device=self._device)
        self._row_of_cell = torch.tensor(row_of_cell, device=self._device)

    def at(self, prompt_lengths: Tensor, written: Tensor, used: int) -> None:
        """Prepare a pass over one token per row.

        `written`, int64 [R], are the stored tokens of each row; `used` is their maximum plus one.
        """
        self._reading = None
        self._extension = None
        self._most_used = max(self._most_used, used)
        lanes = torch.arange(self._rows, device=self._device)
        self._write_at = self._places(lanes, written)
        keys, values = self._responses[:, :, : self._rows, :, :used].flatten(2, 3).unbind(1)
        self._own_keys = keys.transpose(-1, -2).unbind()
        self._own_values = values.unbind()
        self._hidden = ~self._seen(prompt_lengths, written, used)[:, None, None, :]

    def extend(self, rows: Sequence[LaneTokens], *, beside: int) -> None:
        """Prepare a pass over several tokens of each of these rows, one row after another.

        They follow the tokens of `beside` rows, for which `at` was called before. For the layers,
        each token is a row of its own.
        """
        self._reading = None
        numbers = torch.tensor(rows, device=self._device)
        lanes, slots, prompt_lengths, stored, counts = numbers.unbind(dim=1)
        of_row = torch.arange(len(rows), device=self._device).repeat_interleave(counts)
        offsets = torch.cat([torch.arange(row.count, device=self._device) for row in rows])
        written = stored[of_row] + offsets
        used = max(row.stored + row.count for row in rows)
        self._most_used = max(self._most_used, used)
        places = self._places(lanes[of_row], written)
        self._write_at = torch.cat((self._write_at, places)) if beside else places
        seen = self._seen(prompt_lengths[of_row], written, used)
        longest = max(row.count for row in rows)
        # Padding sees all, so that no softmax is empty.
        hidden = torch.zeros(
            (len(rows), longest, seen.shape[1]), dtype=torch.bool, device=self._device
        )
        hidden[of_row, offsets] = ~seen
        self._extension = _Extension(
            beside, lanes, slots, of_row, offsets, used, hidden[:, None, None]
        )

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move lanes, (new, old) each, all at once."""
        if moves:
            new, old = torch.tensor(moves, device=self._device).t()
            used = self._responses[..., : self._most_used, :]
            used[:, :, new] = used[:, :, old]

    def _places(self, lanes: Tensor, written: Tensor) -> Tensor:
        """Return where keys and values of tokens go in a layer's memory: [R * g * 2]."""
        all_rows, groups, response_tokens = self._responses.shape[2:5]
        of_group = (
            lanes[:, None, None] * groups + torch.arange(groups, device=self._device)[:, None]
        )
        of_kind = torch.arange(2, device=self._device) * (all_rows * groups)
        return ((of_group + of_kind) * response_tokens + written[:, None, None]).flatten()

    def _seen(self, prompt_lengths: Tensor, written: Tensor, used: int) -> Tensor:
        """Return which of the prompt's and the row's tokens a token sees: bool [R, L + used]."""
        prompt_tokens = self._prompts.shape[4]
        positions = torch.arange(max(prompt_tokens, used), device=self._device)[None, :]
        seen = [
            positions[:, :prompt_tokens] < prompt_lengths[:, None],
            positions[:, :used] <= written[:, None],
        ]
        if self._window is not None:
            first = written[:, None] - self._window + 1
            seen[0] = seen[0] & (positions[:, :prompt_tokens] >= first + prompt_lengths[:, None])
            seen[1] = seen[1] & (positions[:, :used] >= first)
        return torch.cat(seen, dim=1)

    def _store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        for stored, new in zip(self._prompts[layer], (key, value), strict=True):
            stored[slots, :, : new.shape[2]] = new

    def step(self, layer: int, queries: Tensor, new: Tensor) -> Tensor:
        at = layer - self._sizes.layers.start
        self._all_responses[at].index_copy_(0, self._write_at, new.reshape(-1, new.shape[-1]))
        extension = self._extension
        if extension is None:
            return self._attend_of_rows(at, queries)
        of_extension = self._attend_of_extension(at, extension, queries[extension.beside :])
        if not extension.beside:
            return of_extension
        of_rows = self._attend_of_rows(at, queries[: extension.beside])
        return torch.cat((of_rows, of_extension))

    def _attend_of_rows(self, at: int, queries: Tensor) -> Tensor:
        of_prompts = self._to_rows(_product(self._to_cells(queries), self._prompt_keys[at]))
        of_responses = _product(queries.flatten(0, 1), self._own_keys[at]).view(
            *queries.shape[:3], -1
        )
        scores = torch.cat((of_prompts, of_responses), dim=-1).masked_fill_(
            self._hidden, float("-inf")
        )
        weights = scores.softmax(dim=-1).to(queries.dtype)
        of_prompts, of_responses = weights.split(
            (of_prompts.shape[-1], of_responses.shape[-1]), dim=-1
        )
        out = torch.bmm(of_responses.flatten(0, 1), self._own_values[at]).view(queries.shape)
        return out.add_(
            self._to_rows(torch.bmm(self._to_cells(of_prompts), self._prompt_values[at]))
        )

    def _attend_of_extension(self, at: int, extension: _Extension, queries: Tensor) -> Tensor:
        _, lanes, slots, of_row, offsets, used, hidden = extension
        # [2, b, g, L + used, d]
        stored = torch.cat(
            (self._prompts[at][:, slots], self._responses[at][:, lanes, :, :used]), dim=3
        )
        keys, values = stored.flatten(1, 2)
        padded = queries.new_zeros((len(lanes), hidden.shape[3], *queries.shape[1:]))
        padded[of_row, offsets] = queries
        padded = padded.permute(0, 2, 3, 1, 4)  # [b, g, n, s, d]
        scores = _product(padded.flatten(0, 1).flatten(1, 2), keys.transpose(-1, -2))
        scores = scores.view(*padded.shape[:4], -1).masked_fill_(hidden, float("-inf"))
        weights = scores.softmax(dim=-1).to(values.dtype).flatten(0, 1).flatten(1, 2)
        out = torch.bmm(weights, values).view(padded.shape).permute(0, 3, 1, 2, 4)
        return out[of_row, offsets]

    def _to_cells(self, values: Tensor) -> Tensor:
        """Map [R, g, h / g, x] to [P * g, W * h / g, x], with the rows of a prompt side by side."""
        # index_select copies whole rows; advanced indexing copies element by element.
        cells = values if self._in_place else values.index_select(0, self._row_of_cell)
        return cells.unflatten(0, (-1, self._width)).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _to_rows(self, values: Tensor) -> Tensor:
        groups = self._responses.shape[3]
        cells = (
            values.unflatten(0, (-1, groups))
            .unflatten(2, (self._width, -1))
            .transpose(1, 2)
            .flatten(0, 1)
        )
        return cells if self._in_place else cells.index_select(0, self._cell_of_row)


def _product(queries: Tensor, keys: Tensor) -> Tensor:
    """Multiply in at least float32: bf16 scores would change softmax weights by several percent."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    return torch.bmm(queries.to(dtype), keys.to(dtype))


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    starts: Tensor,
    used: Tensor,
    most: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Attend to all keys of each packed sequence, without scaling.

    Returns [q, g, d] and log-sum-exps, float32 [g, q].

    query [q, g, d], key and value [k, g, d], contiguous in d only. Calls the operator under
    `torch.nn.attention.varlen.varlen_attn`, which torch 2.9 lacks; with `seqused_k`, keys may lie
    anywhere.

    `query_starts`, ascending, and `starts` of keys, of which the last is not read, are int32
    [sequences + 1]; `used`, the number of keys, is int32 [sequences]; `most` are the maximum
    queries and keys of a sequence.
    """
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, query_starts, starts, *most, 0.0, False, False, scale=1.0, seqused_k=used
    )
    return out, log_sum


class FlashCache(_Cache):
    """Cache with static shapes.

    A row keeps its lane until it ends. The pool's last token is scratch memory for empty rows.
    """

    def __init__(self, sizes: CacheSizes):
        super().__init__(sizes)
        all_prompt_tokens = sizes.prompts * sizes.prompt_tokens
        self.spare = all_prompt_tokens + sizes.rows * sizes.response_tokens
        self._pool = torch.zeros(
            (len(sizes.layers), self.spare + 1, sizes.groups, 2, sizes.head_size),
            dtype=sizes.dtype,
            device=sizes.device,
        )
        # Views of each layer: all of it [tokens, g, 2, d], its keys, and its values.
        self._layers = [(layer, *layer.unbind(2)) for layer in self._pool.unbind()]
        firsts = [*range(0, all_prompt_tokens, sizes.prompt_tokens), self.spare]
        self._prompt_starts = torch.tensor(firsts, dtype=torch.int32, device=self._device)
        self._prompt_lengths = torch.ones(sizes.prompts + 1, dtype=torch.int32, device=self._device)
        self._first_queries: Tensor | None = None

    def lane_start(self, lane: int) -> int:
        """Return the index of a lane's first token."""
        return self._sizes.prompts * self._sizes.prompt_tokens + lane * self._sizes.response_tokens

    def read(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Prepare a pass over right-padded prompts of these lengths that fills these slots."""
        self._reading = torch.tensor(slots, device=self._device)
        self._prompt_lengths[self._reading] = torch.tensor(
            lengths, dtype=torch.int32, device=self._device
        )

    def at(self, starts: Tensor, written: Tensor, rows_of_slots: Tensor, most_rows: int) -> None:
        """Prepare a pass over one token per row; rows of a slot are adjacent.

        `starts` of the rows' lanes and `written` response tokens are int64 [R]; `rows_of_slots`
        int32 [P + 2]: each slot's first row, then the first unused row, then R.
        """
        self._reading = None
        self._most_rows = most_rows
        self._write_at = starts + written
        # Sequences are the slots, followed by the rows. Starts after the last sequence are not
        # read.
        rows = torch.arange(
            len(starts), 2 * len(starts) + 1, dtype=torch.int32, device=self._device
        )
        self._first_rows = torch.cat((rows_of_slots[:-1], rows))
        self._first_queries = None
        starts = torch.nn.functional.pad(starts, (0, 1))
        self._starts = torch.cat((self._prompt_starts, starts.int()))
        self._used = torch.cat((self._prompt_lengths, (written + 1).int()))

    def _store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        prompts = self._sizes.prompts
        stored = self._pool[layer, : prompts * self._sizes.prompt_tokens].unflatten(
            0, (prompts, -1)
        )
        new = torch.stack((key, value), dim=-2).transpose(1, 2)  # [b, s, g, 2, d]
        stored[slots, : new.shape[1]] = new

    def step(self, layer: int, queries: Tensor, new: Tensor) -> Tensor:
        pool, keys, values = self._layers[layer - self._sizes.layers.start]
        pool.index_copy_(0, self._write_at, new)
        rows, groups, heads, head_size = queries.shape
        # Use a group's heads as the sequence axis, so that keys are read once per group.
        query = queries.transpose(1, 2).expand(2, -1, -1, -1, -1).reshape(-1, groups, head_size)
        if self._first_queries is None:  # only in the first layer
            self._first_queries = self._first_rows * heads
        most = self._most_rows * heads, max(self._sizes.prompt_tokens, self._sizes.response_tokens)
        out, log_sum = varlen_attention(
            query, keys, values, self._first_queries, self._starts, self._used, most
        )
        of_prompt, of_response = out.view(2, rows, heads, groups, head_size)
        prompt_sum, response_sum = log_sum.view(groups, 2, rows * heads).unbind(1)
        share = torch.empty(rows * heads, groups, dtype=query.dtype, device=query.device)
        torch.sigmoid(prompt_sum - response_sum, out=share.t())
        merged = torch.empty_like(queries, memory_format=torch.contiguous_format)
        torch.lerp(
            of_response, of_prompt, share.view(rows, heads, groups, 1), out=merged.transpose(1, 2)
        )
        return merged


def decode_layers(
    block: Any, embedded: Tensor | None, rotary: Tensor, cache: KVCache | FlashCache
) -> Tensor:
    """Run a `TransformerBlock`, built without overrides, on one token per row, without gradient.

    Norms, MLP and residual sums are the layers' own modules; only the path from the projection of
    queries, keys and values to the attention's output is written for one token.

    `embedded` [1, R, h] and angles float32 [1, R, 1, d] to [1, R, h], after the final norm on the
    last stage. `embedded` is None on later stages, which use their input tensor.
    """
    hidden: Tensor = block.input_tensor if embedded is None else embedded
    rotations: tuple[Tensor, Tensor] | None = None
    half = rotary.shape[-1] // 2
    for layer in block.layers:
        attention = layer.self_attention
        mixed, _ = attention.linear_qkv(layer.input_layernorm(hidden))
        rows = mixed.shape[1]
        groups = attention.num_query_groups_per_partition
        mixed = mixed.view(rows, groups, -1, rotary.shape[-1])  # [R, g, n + 2, d]
        if attention.q_layernorm is not None:
            query, key, value = mixed.split((mixed.shape[2] - 2, 1, 1), dim=2)
            mixed = torch.cat(
                (attention.q_layernorm(query), attention.k_layernorm(key), value), dim=2
            )
        core = attention.core_attention
        if rotations is None:
            rotations = _rotations(
                rotary, mixed.shape[2] - 2, core.scale or rotary.shape[-1] ** -0.5, mixed.dtype
            )
        cosine, sine = rotations
        mixed = torch.addcmul(mixed * cosine, mixed.roll(half, dims=-1), sine)
        context = cache.step(core.layer, mixed[:, :, :-2], mixed[:, :, -2:])
        output_and_bias = attention.linear_proj(context.view(1, rows, -1))
        hidden = layer.self_attn_bda(False, False)(output_and_bias, hidden, 0.0)
        output_and_bias = layer.mlp(layer.pre_mlp_layernorm(hidden))
        hidden = layer.mlp_bda(False, False)(output_and_bias, hidden, 0.0)
    return hidden if block.final_layernorm is None else block.final_layernorm(hidden)


def _rotations(
    rotary: Tensor, heads: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return factors [R, 1, n + 2, d] for a group's (queries, key, value) and their roll by d / 2.

    The factors rotate queries and keys, scale queries, and leave values unchanged. rotary: angles
    [1, R, 1, d].
    """
    angles = rotary[0, :, None]  # [R, 1, 1, d]
    cosine = angles.cos()
    sine = angles.sin()
    sine[..., : sine.shape[-1] // 2].neg_()
    queries = [part.mul(scale).expand(-1, -1, heads, -1) for part in (cosine, sine)]
    factors = (
        (queries[0], cosine, torch.ones_like(cosine)),
        (queries[1], sine, torch.zeros_like(sine)),
    )
    return torch.cat(factors[0], dim=2).to(dtype), torch.cat(factors[1], dim=2).to(dtype)


@contextlib.contextmanager
def lean_products(layers: Sequence[Any]) -> Iterator[None]:
    """Make linear layers use plain products inside the block, without gradient.

    Layers must not gather their output or use sequence parallelism.
    """
    try:
        for layer in layers:
            layer.forward = _Product(layer)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def packed_head(weight: Tensor) -> Callable[[Tensor, Tensor | None], Tensor] | None:
    """Return the function (x, bias) -> x weight^T + bias of the output layer, without gradient.

    It has a packed copy of the weight. None where a copy is no faster.
    """
    return packed_product(weight.detach())


class _Product:
    """Replaces a layer's `forward`. The layer's hooks, such as LoRA's, still run."""

    def __init__(self, layer: Any):
        weight = layer.weight.detach()
        self._product = packed_product(weight) or (lambda x, bias: F.linear(x, weight, bias))
        adds_up, bias, returns_bias = linear_parts(layer)
        self._group = layer.tp_group if adds_up and layer.tp_group.size() > 1 else None
        bias = None if bias is None else bias.detach()
        self._added = None if returns_bias else bias
        self._returned = bias if returns_bias else None

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if self._group is None:
            return self._product(x, self._added), self._returned
        out = self._product(x, None)
        dist.all_reduce(out, group=self._group)
        return out if self._added is None else out + self._added, self._returned
