"""Layout of sequences in a forward pass, and the positions that predict their response tokens.

Indices are computed on the CPU and copied with `to_device`, so no pass syncs the GPU.
`PaddedSequences` has one sequence per row. `PackedGroups` packs groups of samples into one row
without padding; a prompt is computed once, and every response of its group attends to it:

    tokens     p p p p  q q q  a a a  b b b b b  c c  ...    a and b answer p, c answers q
    positions  0 1 2 3  0 1 2  4 5 6  4 5 6 7 8  3 4  ...

An episode that the policy has read in several contexts (see `data.batches`) becomes several
sequences of a pass by `split_contexts`.

Notation: N sequences, S prompt plus response, B groups, P longest prompt, T longest response (of a
group without its last token, which predicts nothing), s tokens of the row, n response tokens of the
pass on this rank, h hidden or query heads, g key-value groups, d head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd.function import once_differentiable

from reinforce_rl.data.batches import length_mask
from reinforce_rl.megatron.model.attention import (
    causal_attention,
    flash_attention_of_sequences,
    flash_takes,
    masked_attention,
    visible,
)
from reinforce_rl.megatron.model.model import CausalLM

Span = tuple[int, int]  # columns of the row, the end excluded


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy CPU tensors to a device without a GPU sync."""
    if device.type == "cpu":
        return list(tensors)
    # `to` waits for the stream unless the memory is pinned and `non_blocking` is set.
    return [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]


@dataclass(frozen=True)
class Predictions:
    """Response tokens of a pass, and the hidden states that predict them."""

    rows: Tensor  # int64 [n], sequence
    columns: Tensor  # int64 [n], index in the response
    hidden: Tensor  # [n, h], the hidden state before each token
    targets: Tensor  # int64 [n], the tokens


class PaddedSequences:
    """One right-padded sequence per row.

    The tensors are on the CPU: sequences int64 [N, S], right-padded; prompt_lengths int64 [N], at
    least 1; response_lengths int64 [N], which may be 0; response_mask bool [N, T], the tokens to
    predict, None for all of each response. Rows are padded to at least `pad_to` tokens.
    `stage_shape` is the shape sent between pipeline stages.
    """

    def __init__(
        self,
        lm: CausalLM,
        sequences: Tensor,
        prompt_lengths: Tensor,
        response_lengths: Tensor,
        *,
        response_mask: Tensor | None = None,
        pad_to: int = 0,
        pad_id: int = 0,
    ):
        self.response_lengths = response_lengths
        # A sequence's last token predicts nothing, and columns after the longest row hold padding
        # only.
        used = max(int((prompt_lengths + response_lengths).max()) - 1, pad_to - 1, 1)
        missing = max(used - sequences.shape[1], 0)
        tokens = F.pad(sequences[:, :used], (0, missing), value=pad_id)
        local_positions = lm.own_positions(used, sequences.device)
        column_of = torch.full((used,), -1).index_put(
            (local_positions,), torch.arange(len(local_positions))
        )
        rows, columns = _predicted(response_lengths, response_mask)
        places = prompt_lengths[rows] + columns
        held = column_of[places - 1] >= 0
        rows = rows[held]
        columns = columns[held]
        places = places[held]
        before = column_of[places - 1] * len(sequences) + rows
        indices = (tokens, rows, columns, before, sequences[rows, places])
        self._tokens, *self._predictions = to_device(indices, lm.mesh.device)
        self.stage_shape = lm.stage_shape(len(sequences), used)

    def hidden(self, model: torch.nn.Module) -> Tensor:
        """Run the language model or its wrapper.

        Returns [N, s', h] at the model's `own_positions`, or a stage's output.
        """
        return model(self._tokens)

    def predictions(self, hidden: Tensor) -> Predictions:
        """Return the predictions at this context-parallel rank's positions, on the last stage."""
        rows, columns, before, targets = self._predictions
        # megatron's layout has positions first, where this is a view.
        before_hidden = hidden.transpose(0, 1).flatten(0, 1).index_select(0, before)
        return Predictions(rows, columns, before_hidden, targets)


class PackedGroups(PackedSeqParams):
    """`PaddedSequences` without padding, in one row.

    megatron passes it through to the core attention. `group_ids`, int64 [N], are equal for equal
    prompts; ValueError if samples of a group have different prompts. Not with context parallelism.
    """

    def __init__(
        self,
        lm: CausalLM,
        sequences: Tensor,
        prompt_lengths: Tensor,
        response_lengths: Tensor,
        group_ids: Tensor,
        *,
        response_mask: Tensor | None = None,
    ):
        super().__init__()  # without `qkv_format`, megatron treats it as a batch of one row
        ids, group_of = torch.unique(group_ids, return_inverse=True)
        rows = torch.arange(len(group_ids))
        first = torch.full_like(ids, len(rows)).scatter_reduce(0, group_of, rows, "amin")
        lengths = prompt_lengths[first]
        kept = (response_lengths - 1).clamp(min=0)
        in_prompts = length_mask(lengths, int(lengths.max()))  # [B, P]
        in_responses = length_mask(kept, int(kept.max()))  # [N, T]
        _check_prompts(sequences, prompt_lengths, first[group_of], in_prompts.shape[1])

        response_positions = prompt_lengths[:, None] + torch.arange(in_responses.shape[1])
        responses = sequences.gather(1, response_positions.clamp(max=sequences.shape[1] - 1))
        prompt_positions = torch.arange(in_prompts.shape[1]).expand(in_prompts.shape)
        tokens = torch.cat(
            (sequences[first, : in_prompts.shape[1]][in_prompts], responses[in_responses])
        )
        positions = torch.cat((prompt_positions[in_prompts], response_positions[in_responses]))
        padding = (0, -len(tokens) % lm.mesh.layout.sequence_multiple)
        self.stage_shape = lm.stage_shape(1, len(tokens))

        # A prompt's last position predicts the first token of each of its responses.
        rows, columns = _predicted(response_lengths, response_mask)
        response_starts = lengths.sum() + kept.cumsum(0) - kept
        before = (
            torch.where(
                columns == 0, lengths.cumsum(0)[group_of][rows], response_starts[rows] + columns
            )
            - 1
        )
        targets = sequences[rows, prompt_lengths[rows] + columns]
        self.response_lengths = response_lengths
        indices = (
            F.pad(tokens, padding)[None],
            F.pad(positions, padding)[None],
            rows,
            columns,
            before,
            targets,
        )
        self._tokens, self._positions, *self._predictions = to_device(indices, lm.mesh.device)

        architecture = lm.architecture
        dtype = lm.config.params_dtype
        if flash_takes(lm.mesh.device, dtype, architecture.head_size):
            spans = _spans(lengths.tolist(), kept.tolist(), group_of.tolist(), padding[1])
            self.attend = _UnpaddedAttention(spans, architecture.window, lm.mesh.device)
        else:
            layout = (in_prompts, in_responses, response_positions, group_of)
            self.attend = _PaddedAttention(layout, architecture.window, lm.mesh.device)

    def hidden(self, model: torch.nn.Module) -> Tensor:
        return model(self._tokens, self._positions, packed=self)

    def predictions(self, hidden: Tensor) -> Predictions:
        rows, columns, before, targets = self._predictions
        return Predictions(rows, columns, hidden[0].index_select(0, before), targets)


class ContextSequences:
    """A layout of M contexts as one of the N episodes that they belong to.

    Args:
        layout: of the contexts.
        response_lengths: int64 [N], of the episodes.
    """

    def __init__(
        self,
        layout: PaddedSequences | PackedGroups,
        contexts: Contexts,
        response_lengths: Tensor,
        device: torch.device,
    ):
        self.response_lengths = response_lengths
        self.stage_shape = layout.stage_shape
        self._layout = layout
        self._rows, self._columns = to_device((contexts.rows, contexts.columns), device)

    def hidden(self, model: torch.nn.Module) -> Tensor:
        return self._layout.hidden(model)

    def predictions(self, hidden: Tensor) -> Predictions:
        of_contexts = self._layout.predictions(hidden)
        return replace(
            of_contexts,
            rows=self._rows[of_contexts.rows],
            columns=self._columns[of_contexts.rows] + of_contexts.columns,
        )


SequenceLayout = PaddedSequences | PackedGroups | ContextSequences


@dataclass(frozen=True)
class Contexts:
    """The M contexts of N episodes, in order: what the policy has read before its answers."""

    sequences: Tensor  # int64 [M, S], prompt then response, right-padded
    prompt_lengths: Tensor  # int64 [M]; the prompt is the episode's or a rewritten history
    response_lengths: Tensor  # int64 [M]
    group_ids: Tensor  # int64 [M]; a rewritten history is a group to itself
    response_mask: Tensor  # bool [M, T], the tokens to predict
    rows: Tensor  # int64 [M], the episode
    columns: Tensor  # int64 [M], where the response begins in the episode's

    @property
    def lengths(self) -> Tensor:
        """int64 [M]: prompt and response."""
        return self.prompt_lengths + self.response_lengths


def split_contexts(
    sequences: Tensor,
    prompt_lengths: Tensor,
    response_lengths: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    history_mask: Tensor,
    *,
    pad_id: int = 0,
) -> Contexts:
    """Split episodes at their rewritten histories; the arguments are of `RolloutBatch`."""
    width = response_mask.shape[1]
    is_history = history_mask[:, :width] & length_mask(response_lengths, width)
    # One more column, as a history may be the last of an episode.
    is_history = F.pad(is_history, (0, 1))
    follows_history = F.pad(is_history[:, :-1], (1, 0))
    later_rows, first_columns = (is_history & ~follows_history).nonzero(as_tuple=True)
    _, end_columns = (follows_history & ~is_history).nonzero(as_tuple=True)

    # Of each context, the place in the episode's sequence of its first token, of the first one of
    # its response, and behind its last.
    rows = torch.cat((torch.arange(len(sequences)), later_rows))
    firsts = torch.cat(
        (torch.zeros_like(prompt_lengths), prompt_lengths[later_rows] + first_columns)
    )
    responses = torch.cat((prompt_lengths, prompt_lengths[later_rows] + end_columns))
    order = torch.argsort(rows * (sequences.shape[1] + 1) + firsts)
    rows = rows[order]
    firsts = firsts[order]
    responses = responses[order]
    ends = (prompt_lengths + response_lengths)[rows]
    ends[:-1] = torch.where(rows[1:] == rows[:-1], firsts[1:], ends[:-1])

    lengths = ends - firsts
    places = firsts[:, None] + torch.arange(int(lengths.max()))
    tokens = sequences[rows[:, None], places.clamp(max=sequences.shape[1] - 1)]
    answer_lengths = ends - responses
    columns = responses - prompt_lengths[rows]
    answer_columns = columns[:, None] + torch.arange(int(answer_lengths.max()))
    mask = response_mask[rows[:, None], answer_columns.clamp(max=width - 1)]
    new_groups = group_ids.max() + 1 + torch.arange(len(rows))
    return Contexts(
        sequences=tokens.masked_fill(~length_mask(lengths, tokens.shape[1]), pad_id),
        prompt_lengths=responses - firsts,
        response_lengths=answer_lengths,
        group_ids=torch.where(firsts == 0, group_ids[rows], new_groups),
        response_mask=mask & length_mask(answer_lengths, mask.shape[1]),
        rows=rows,
        columns=columns,
    )


def _predicted(response_lengths: Tensor, response_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of the response tokens to predict: int64 [n] each."""
    mask = length_mask(response_lengths, int(response_lengths.max()))
    if response_mask is not None:
        mask = mask & response_mask[:, : mask.shape[1]]
    rows, columns = mask.nonzero(as_tuple=True)
    return rows, columns


def _spans(
    prompts: list[int], responses: list[int], group_of: list[int], padding: int
) -> list[tuple[Span, ...]]:
    """Return the columns that each sequence attends to, its own span last.

    prompts [B] and responses [N] are lengths; empty spans are omitted. `padding` is one sequence at
    the row's end.
    """
    lengths = [*prompts, *responses, padding]
    ends = itertools.accumulate(lengths)
    spans = [(end - length, end) for length, end in zip(lengths, ends, strict=True)]
    attended: list[tuple[Span, ...]] = [(span,) for span in spans[: len(prompts)]]
    attended += [
        (spans[group], own_span)
        for group, own_span in zip(group_of, spans[len(prompts) :], strict=False)
    ]
    return [columns for columns in [*attended, (spans[-1],)] if columns[-1][0] < columns[-1][1]]


class _UnpaddedAttention:
    """Variable-length attention of a packed row, without mask or padding.

    A response's queries are aligned with its last keys.
    """

    def __init__(self, spans: list[tuple[Span, ...]], window: int | None, device: torch.device):
        keys = [sum(end - start for start, end in columns) for columns in spans]
        lengths = [[last_span[1] - last_span[0] for *_, last_span in spans], keys]
        self._longest = [max(each) for each in lengths]
        self._window = window
        columns = torch.cat([torch.arange(*span) for columns in spans for span in columns])
        starts = [
            torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in lengths
        ]
        self._columns, *self._starts = to_device((columns, *starts), device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        keys: Any = _Repeated.apply(key[:, 0], self._columns)
        values: Any = _Repeated.apply(value[:, 0], self._columns)
        out = flash_attention_of_sequences(
            query[:, 0], keys, values, self._starts, self._longest, scale, self._window
        )
        return out[:, None]


class _PaddedAttention:
    """Attention of a packed row as padded prompts and padded responses, the latter with a mask.

    `layout`: bool [B, P] and [N, T], True on tokens of prompts and of responses; int64 [N, T],
    positions of responses; int64 [N], their groups, which are rows of the first.
    """

    def __init__(
        self,
        layout: tuple[Tensor, Tensor, Tensor, Tensor],
        window: int | None,
        device: torch.device,
    ):
        in_prompts, in_responses, response_positions, group_of = layout
        # Indices from the row to prompts [B, P] and responses [N, T] in one flat tensor, and back.
        exists = torch.cat((in_prompts.flatten(), in_responses.flatten()))
        slots = exists.nonzero()[:, 0]
        columns = torch.zeros_like(exists, dtype=torch.long)
        columns[slots] = torch.arange(len(slots))
        self._size = len(slots)
        self._shapes = (in_prompts.shape, in_responses.shape)
        self._window = window
        indices = (exists, slots, columns, in_prompts, response_positions, group_of)
        self._exists, self._slots, self._columns, *self._where = to_device(indices, device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        prompt_query, response_query = self._take_apart(query)
        prompt_key, response_key = self._take_apart(key)
        prompt_value, response_value = self._take_apart(value)
        parts = [causal_attention(prompt_query, prompt_key, prompt_value, scale, self._window)]
        if response_query.numel():
            group_of = self._where[2]
            keys = torch.cat((prompt_key.index_select(0, group_of), response_key), dim=2)
            values = torch.cat((prompt_value.index_select(0, group_of), response_value), dim=2)
            parts.append(masked_attention(response_query, keys, values, self._mask, scale))
        flat = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])
        row: Any = _Rearranged.apply(flat, self._slots, self._columns, self._exists)
        return F.pad(row, (0, 0, 0, 0, 0, len(query) - self._size))[:, None]

    def _take_apart(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Split [s, 1, heads, d] into prompts [B, heads, P, d] and responses [N, heads, T, d]."""
        flat: Any = _Rearranged.apply(row[: self._size, 0], self._columns, self._slots, None)
        prompts, responses = flat.split([shape.numel() for shape in self._shapes])
        return (
            prompts.unflatten(0, self._shapes[0]).transpose(1, 2),
            responses.unflatten(0, self._shapes[1]).transpose(1, 2),
        )

    @cached_property
    def _mask(self) -> Tensor:
        """Return bool [N, 1, T, P + T]: the keys that each response position attends to.

        The prompt's keys come first, then the response's.
        """
        # Padding lies after the response, so causality hides it.
        in_prompts, response_positions, group_of = self._where
        prompts = torch.arange(in_prompts.shape[1], device=response_positions.device).expand(
            len(response_positions), -1
        )
        mask = visible(
            response_positions[:, :, None],
            torch.cat((prompts, response_positions), dim=1)[:, None, :],
            self._window,
        )
        mask[:, :, : prompts.shape[1]] &= in_prompts[group_of][:, None]
        return mask[:, None]


class _Repeated(torch.autograd.Function):
    """Selects rows, possibly repeated; gradients are summed in at least float32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.index = index
        ctx.shape = rows.shape
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.new_zeros(
            ctx.shape, dtype=torch.promote_types(gradient.dtype, torch.float32)
        )
        return total.index_add_(0, ctx.index, gradient.to(total.dtype)).to(gradient.dtype), None


class _Rearranged(torch.autograd.Function):
    """Permutes rows and inserts padding.

    The gradient is a gather; autograd's index_add would be slow or unordered.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, source: Tensor, back: Tensor, exists: Tensor | None
    ) -> Tensor:
        """`exists` is False where `back` is padding; None if there is no padding."""
        ctx.back = back
        ctx.exists = exists
        return rows.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of padding is 0."""
        grad_rows = gradient.index_select(0, ctx.back)
        if ctx.exists is not None:
            grad_rows *= ctx.exists[:, None, None]
        return grad_rows, None, None, None


def _check_prompts(sequences: Tensor, prompt_lengths: Tensor, first: Tensor, width: int) -> None:
    prompts = sequences[:, :width].masked_fill(~length_mask(prompt_lengths, width), -1)
    if not torch.equal(prompts, prompts[first]):
        row = int((prompts != prompts[first]).any(dim=1).nonzero()[0])
        raise ValueError(
            f"sequence {row} has another prompt than sequence {int(first[row])} of the same group"
        )
