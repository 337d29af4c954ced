"""How sequences lie in a forward pass, and where in its output the predictions of their response tokens are.

Notation: N sequences, S prompt plus response, T response, n response tokens of the pass on this rank, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from reinforce_rl.megatron.model import CausalLM
from reinforce_rl.rollout import length_mask


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
        """int64 [N]."""
        ...

    @property
    def stage_shape(self) -> tuple[int, int, int]:
        """Of what a pipeline stage hands to the next; see `CausalLM.stage_shape`."""
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
        sequences: int64 [N, S], right-padded.
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
        moved = (t.to(lm.mesh.device) for t in (sequences, prompt_lengths, response_lengths))
        self._sequences, self._prompt_lengths, self.response_lengths = moved
        # A sequence's last token predicts nothing here, and columns past the longest row hold padding only.
        self._used = max(int((self._prompt_lengths + self.response_lengths).max()) - 1, pad_to - 1, 1)
        self._lm, self._pad_id = lm, pad_id
        self.stage_shape = lm.stage_shape(len(self._sequences), self._used)

    def hidden(self, model: torch.nn.Module) -> Tensor:
        """[N, s', h] at the model's `own_positions`."""
        missing = max(self._used - self._sequences.shape[1], 0)
        return model(torch.nn.functional.pad(self._sequences[:, : self._used], (0, missing), value=self._pad_id))

    def predictions(self, hidden: Tensor) -> Predictions:
        """See `SequenceLayout`."""
        device = self._sequences.device
        own = self._lm.own_positions(self._used)
        column_of = torch.full((self._used,), -1, device=device)
        column_of = column_of.index_put((own,), torch.arange(len(own), device=device))
        mask = length_mask(self.response_lengths, int(self.response_lengths.max()))
        rows, columns = mask.nonzero(as_tuple=True)
        targets = self._prompt_lengths[rows] + columns
        held = column_of[targets - 1] >= 0
        rows, columns, targets = rows[held], columns[held], targets[held]
        return Predictions(rows, columns, hidden[rows, column_of[targets - 1]], self._sequences[rows, targets])
