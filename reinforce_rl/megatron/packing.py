"""Groups of samples as one row: each prompt once, the responses to them, and no padding.

The samples of a group share their prompt, so all that a causal model computes at its positions is the same for each of
them. Here it is computed once, and every response attends to it:

    tokens     p p p p  q q q  a a a  b b b b b  c c  ...    a and b answer p, c answers q
    positions  0 1 2 3  0 1 2  4 5 6  4 5 6 7 8  3 4  ...

All layers but attention see one long row. Attention takes the row apart into prompts, and into responses that have
their prompt's keys and values in front of their own. The gradient of a prompt's keys is then the sum over its
responses, as it is where each has a copy of the prompt.

Notation: N sequences, B groups, P longest prompt, T longest response less its last token (which predicts nothing),
s tokens of the row, n response tokens, h query heads, g key-value groups, d head size.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd.function import once_differentiable

from reinforce_rl.megatron.attention import causal_attention, masked_attention, visible
from reinforce_rl.megatron.model import CausalLM
from reinforce_rl.megatron.sequence_layout import Predictions
from reinforce_rl.rollout import length_mask


class PackedGroups(PackedSeqParams):
    """A `SequenceLayout` without padding, which megatron hands through to the core attention.

    Args:
        lm: reads them; without context parallelism.
        sequences: int64 [N, S], right-padded.
        prompt_lengths: int64 [N], at least 1.
        response_lengths: int64 [N]; 0 is allowed.
        group_ids: int64 [N]; equal where the prompt is the same.

    Raises:
        ValueError: the samples of a group have different prompts, or a rank would hold a share of the positions.
    """

    def __init__(
        self, lm: CausalLM, sequences: Tensor, prompt_lengths: Tensor, response_lengths: Tensor, group_ids: Tensor
    ):
        super().__init__()  # no `qkv_format`: to megatron it is an ordinary batch of one row
        if lm.mesh.cp_size > 1:
            raise ValueError("context-parallel ranks cannot share a packed row")
        device = lm.mesh.device
        sequences, prompt_lengths, response_lengths, group_ids = (
            t.to(device) for t in (sequences, prompt_lengths, response_lengths, group_ids)
        )
        ids, group_of = torch.unique(group_ids, return_inverse=True)
        rows = torch.arange(len(group_ids), device=device)
        first = torch.full_like(ids, len(rows)).scatter_reduce(0, group_of, rows, "amin")
        lengths, kept = prompt_lengths[first], (response_lengths - 1).clamp(min=0)
        in_prompts = length_mask(lengths, int(lengths.max()))  # [B, P]
        in_responses = length_mask(kept, int(kept.max()))  # [N, T]
        _check_prompts(sequences, prompt_lengths, first[group_of], in_prompts.shape[1])

        steps = torch.arange(in_responses.shape[1], device=device)
        response_positions = prompt_lengths[:, None] + steps
        responses = sequences.gather(1, response_positions.clamp(max=sequences.shape[1] - 1))
        prompt_positions = torch.arange(in_prompts.shape[1], device=device).expand(in_prompts.shape)
        tokens = torch.cat((sequences[first, : in_prompts.shape[1]][in_prompts], responses[in_responses]))
        positions = torch.cat((prompt_positions[in_prompts], response_positions[in_responses]))
        self.size = len(tokens)
        self.stage_shape = lm.stage_shape(1, self.size)
        padding = (0, -self.size % lm.mesh.sequence_multiple)
        self._tokens, self._positions = F.pad(tokens, padding)[None], F.pad(positions, padding)[None]

        # From the row to prompts [B, P] and responses [N, T] in one flat tensor, and back.
        self._exists = torch.cat((in_prompts.flatten(), in_responses.flatten()))
        self._slots = self._exists.nonzero()[:, 0]
        self._columns = torch.zeros_like(self._exists, dtype=torch.long)
        self._columns[self._slots] = torch.arange(self.size, device=device)

        self.response_lengths = response_lengths
        self._sequences, self._prompt_lengths, self._group_of = sequences, prompt_lengths, group_of
        self._prompt_ends = lengths.cumsum(0)[group_of]  # [N], columns of the row
        self._response_starts = lengths.sum() + kept.cumsum(0) - kept
        self._shapes = (in_prompts.shape, in_responses.shape)
        self._window = lm.architecture.window
        self._in_prompts, self._response_positions = in_prompts, response_positions

    def hidden(self, model: torch.nn.Module) -> Tensor:
        """[1, s, h]."""
        return model(self._tokens, self._positions, packed=self)

    def predictions(self, hidden: Tensor) -> Predictions:
        """See `SequenceLayout`. A prompt's last position predicts the first token of each of its responses."""
        mask = length_mask(self.response_lengths, int(self.response_lengths.max()))
        rows, columns = mask.nonzero(as_tuple=True)
        before = torch.where(columns == 0, self._prompt_ends[rows], self._response_starts[rows] + columns) - 1
        targets = self._sequences[rows, self._prompt_lengths[rows] + columns]
        return Predictions(rows, columns, hidden[0].index_select(0, before), targets)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attention within each sequence: query [s, 1, h, d], key and value [s, 1, g, d] to [s, 1, h, d]."""
        prompt_query, own_query = self._take_apart(query)
        prompt_key, own_key = self._take_apart(key)
        prompt_value, own_value = self._take_apart(value)
        parts = [causal_attention(prompt_query, prompt_key, prompt_value, scale, self._window)]
        if own_query.numel():
            keys = torch.cat((prompt_key.index_select(0, self._group_of), own_key), dim=2)
            values = torch.cat((prompt_value.index_select(0, self._group_of), own_value), dim=2)
            parts.append(masked_attention(own_query, keys, values, self._mask, scale))
        flat = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])
        row: Any = _Rearranged.apply(flat, self._slots, self._columns, self._exists)
        return F.pad(row, (0, 0, 0, 0, 0, len(query) - self.size))[:, None]

    def _take_apart(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """[s, 1, heads, d] to prompts [B, heads, P, d] and responses [N, heads, T, d]."""
        flat: Any = _Rearranged.apply(row[: self.size, 0], self._columns, self._slots, None)
        prompts, responses = flat.split([shape.numel() for shape in self._shapes])
        return (
            prompts.unflatten(0, self._shapes[0]).transpose(1, 2),
            responses.unflatten(0, self._shapes[1]).transpose(1, 2),
        )

    @cached_property
    def _mask(self) -> Tensor:
        """bool [N, 1, T, P + T]: which positions of its prompt and of its own a response's position attends to."""
        own = self._response_positions  # padding lies behind, where causality hides it
        prompts = torch.arange(self._in_prompts.shape[1], device=own.device).expand(len(own), -1)
        mask = visible(own[:, :, None], torch.cat((prompts, own), dim=1)[:, None, :], self._window)
        mask[:, :, : prompts.shape[1]] &= self._in_prompts[self._group_of][:, None]
        return mask[:, None]


class _Rearranged(torch.autograd.Function):
    """Rows of a tensor in another order, padding among them, and its gradient the other way.

    Each row is taken once besides padding, so the gradient is a rearrangement too. That of an index adds up instead:
    slow on a CPU, and in an arbitrary order on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, back: Tensor, exists: Tensor | None) -> Tensor:
        """Args: int64 indices there and back; where `back` is padding, `exists` is False. None: it never is."""
        ctx.back, ctx.exists = back, exists
        return rows.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of padding is 0: nothing visible depends on it."""
        found = gradient.index_select(0, ctx.back)
        if ctx.exists is not None:
            found *= ctx.exists[:, None, None]
        return found, None, None, None


def _check_prompts(sequences: Tensor, prompt_lengths: Tensor, first: Tensor, width: int) -> None:
    """Args: first int64 [N], the first row of each row's group."""
    prompts = sequences[:, :width].masked_fill(~length_mask(prompt_lengths, width), -1)
    if not torch.equal(prompts, prompts[first]):
        row = int((prompts != prompts[first]).any(dim=1).nonzero()[0])
        raise ValueError(f"sequence {row} has another prompt than sequence {int(first[row])} of the same group")
