"""How sequences lie in a forward pass, and where in its output the predictions of their response tokens are.

All indices are computed on the CPU, where the lengths are, and moved with `to_device`: no pass waits for a GPU.

Notation: N sequences, S prompt plus response, T response, n response tokens of the pass on this rank, h hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from reinforce_rl.data.batches import length_mask
from reinforce_rl.megatron.model.model import CausalLM


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of CPU tensors on a device; on a GPU the host does not wait for them."""
    if device.type == "cpu":
        return list(tensors)
    # From pageable memory, and without `non_blocking`, `to` waits until the stream has come to the copy.
    return [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]


@dataclass(frozen=True)
class Predictions:
    """The response tokens of a pass, and the positions that predict them.

    Attributes:
        rows, columns: int64 [n], a token's sequence and its place in the response.
        hidden: [n, h], the hidden state before each token.
        targets: int64 [n], the tokens.
    """

    rows: Tensor
    columns: Tensor
    hidden: Tensor
    targets: Tensor


class SequenceLayout(Protocol):
    """One pass over N sequences."""

    @property
    def response_lengths(self) -> Tensor:
        """int64 [N], on the CPU."""
        ...

    @property
    def stage_shape(self) -> tuple[int, int, int]:
        """The shape that a pipeline stage sends to the next; see `CausalLM.stage_shape`."""
        ...

    def hidden(self, model: torch.nn.Module) -> Tensor:
        """Run `model`, the language model or a wrapper around it; what its next stage or `predictions` takes."""
        ...

    def predictions(self, hidden: Tensor) -> Predictions:
        """Of what `hidden` gave on the last stage: those at this context-parallel rank's positions."""
        ...


class PaddedSequences:
    """A sequence a row, padded on the right to the longest one.

    Args:
        lm: reads them.
        sequences: int64 [N, S], right-padded; all tensors on the CPU.
        prompt_lengths: int64 [N], at least 1.
        response_lengths: int64 [N]; 0 is allowed.
        pad_to: tokens that every row has at least in the pass.
        pad_id: fills them.
    """

    def __init__(
        self,
        lm: CausalLM,
        sequences: Tensor,
        prompt_lengths: Tensor,
        response_lengths: Tensor,
        *,
        pad_to: int = 0,
        pad_id: int = 0,
    ):
        self.response_lengths = response_lengths
        # A sequence's last token predicts nothing here, and columns past the longest row hold padding only.
        self._used = max(int((prompt_lengths + response_lengths).max()) - 1, pad_to - 1, 1)
        missing = max(self._used - sequences.shape[1], 0)
        tokens = torch.nn.functional.pad(sequences[:, : self._used], (0, missing), value=pad_id)
        own = lm.own_positions(self._used, sequences.device)
        column_of = torch.full((self._used,), -1).index_put((own,), torch.arange(len(own)))
        rows, columns = length_mask(response_lengths, int(response_lengths.max())).nonzero(as_tuple=True)
        places = prompt_lengths[rows] + columns
        held = column_of[places - 1] >= 0
        rows, columns, places = rows[held], columns[held], places[held]
        before = column_of[places - 1] * len(sequences) + rows
        indices = (tokens, rows, columns, before, sequences[rows, places])
        self._tokens, self._rows, self._columns, self._before, self._targets = to_device(indices, lm.mesh.device)
        self.stage_shape = lm.stage_shape(len(sequences), self._used)

    def hidden(self, model: torch.nn.Module) -> Tensor:
        """[N, s', h] at the model's `own_positions`."""
        return model(self._tokens)

    def predictions(self, hidden: Tensor) -> Predictions:
        """See `SequenceLayout`."""
        # megatron's layout has positions first, where this is a view.
        found = hidden.transpose(0, 1).flatten(0, 1).index_select(0, self._before)
        return Predictions(self._rows, self._columns, found, self._targets)
