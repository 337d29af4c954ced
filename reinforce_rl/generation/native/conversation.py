"""Conversations on the native engine: rows keep their keys and values while the partner writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from reinforce_rl.generation.base import PartialResponse, Partner
from reinforce_rl.generation.native.decoding import PlainDecoding
from reinforce_rl.generation.native.sampling import position_keys
from reinforce_rl.generation.native.schedule import Running
from reinforce_rl.megatron.model.decoding import LaneTokens

if TYPE_CHECKING:
    from reinforce_rl.megatron.mesh import Mesh

_STEPS = 8  # between two exchanges of several ranks, which broadcast


class Exchange:
    """The partner as seen by this rank's decoder, which has some of the rows.

    Context-parallel ranks decode rows of their own, and exchange at the same time.
    """

    def __init__(self, partner: Partner, mesh: Mesh, unfinished: int, rows: Sequence[int]):
        self._partner = partner
        self._mesh = mesh
        self._rows = rows
        self.unfinished = unfinished  # on all ranks
        block = mesh.tp_size * mesh.pp_size * mesh.cp_size
        self.steps = 1 if block == 1 else _STEPS  # between two exchanges

    def __call__(
        self, answers: Mapping[int, PartialResponse], *, waits: bool
    ) -> dict[int, PartialResponse | None]:
        """Give answers; return turns. Both are by a row's number on this rank."""
        answers = {self._rows[number]: answer for number, answer in answers.items()}
        if self._mesh.cp_size > 1:
            parts = self._mesh.gather_over_cp((answers, waits))
            answers = {row: answer for part, _ in parts for row, answer in part.items()}
            waits = all(rank_waits for _, rank_waits in parts)
        turns = self._partner(answers, waits=waits)
        self.unfinished -= sum(turn is None for turn in turns.values())
        return {number: turns[row] for number, row in enumerate(self._rows) if row in turns}

    def follow(self) -> None:
        """Exchange with the other ranks until they have ended; this one has no rows."""
        while self.unfinished:
            self({}, waits=True)


class ConversingDecoding(PlainDecoding):
    """Decode rows of several turns.

    When the partner has replied, the row's new tokens are read in one pass on top of its cached
    keys and values. A waiting row costs no computation and keeps its lane of the cache.
    """

    parks = True

    def converse(self, exchange: Exchange) -> None:
        """See `ConversingGenerator.converse`."""
        self._answers: dict[int, PartialResponse] = {}
        self._alone: set[int] = set()  # samples that have left the slot of their prompt
        steps = 0
        while exchange.unfinished:
            can_draw = self._admit()
            turns = {}
            if not can_draw or steps % exchange.steps == 0:
                answers = self._answers
                self._answers = {}
                turns = self._release_ended(exchange(answers, waits=not can_draw))
            tokens = self._draw() if can_draw else self._samples[:0]
            if turns:
                self._advance_and_read(tokens, turns)
            else:
                self._advance(tokens)
            steps += can_draw

    def _draw(self) -> Tensor:
        earlier = set(self._schedule.parked)
        tokens = super()._draw()
        for sample in self._schedule.parked:
            if sample not in earlier:
                self._answers[sample] = self._responses.collect_answer(sample)
        return tokens

    def _prompt_length(self, sequence: Running) -> int:
        return 0 if sequence.sample in self._alone else super()._prompt_length(sequence)

    def _release_ended(
        self, turns: Mapping[int, PartialResponse | None]
    ) -> dict[int, PartialResponse]:
        """Release the rows without a turn; return the turns of the others."""
        for sample, turn in turns.items():
            if turn is None:
                self._schedule.leave(sample)
        return {sample: turn for sample, turn in turns.items() if turn is not None}

    def _advance_and_read(self, tokens: Tensor, turns: Mapping[int, PartialResponse]) -> None:
        """Feed the drawn tokens int64 [R], and what rows with a turn have not read, in one pass.

        A row's unread tokens are the last one of its answer, whose keys were not computed, and what
        the partner wrote; in a rewritten row, all from the first that differs.
        """
        rows = []
        unread: list[int] = []
        positions: list[int] = []
        for sample, turn in turns.items():
            sequence = self._schedule.parked[sample]
            stored = self._stored(sequence, turn)
            length = self._prompt_length(sequence)
            new = turn.prompt.tokens[stored:]
            assert sequence.lane is not None
            in_lane = stored - length
            rows.append(LaneTokens(sequence.lane, sequence.slot, length, in_lane, len(new)))
            unread += new
            positions += range(stored, len(turn.prompt.tokens))
        fed = torch.tensor(unread, device=self._device)
        at = torch.tensor(positions, device=self._device)
        count = len(tokens)
        if count:
            stored = self._before + self._written - 1
            self._cache.at(self._lengths, stored, self._schedule.longest)
            fed = torch.cat((tokens, fed))
            at = torch.cat((self._lengths + stored, at))
        self._cache.extend(rows, beside=count)
        hidden = self._through_stages(fed[:, None], at[:, None], self._cache)
        if hidden is not None:
            ends = count - 1 + np.cumsum([row.count for row in rows])
            self._hidden = hidden[[*range(count), *ends.tolist()], 0]
        self._resume(turns)

    def _stored(self, sequence: Running, turn: PartialResponse) -> int:
        """Return how many tokens of a turn's prompt have keys and values.

        A row that no longer begins with its prompt leaves the slot and has all in its lane.
        """
        answer = self._responses.collect_answer(sequence.sample)
        read = (*answer.prompt.tokens, *answer.tokens)[:-1]
        history = turn.prompt.tokens[:-1]  # the last one is read again, for its hidden state
        equal = [mine == other for mine, other in zip(read, history, strict=False)]
        stored = equal.index(False) if False in equal else len(equal)
        if stored < self._prompt_length(sequence):
            self._alone.add(sequence.sample)
            return 0
        return stored

    def _resume(self, turns: Mapping[int, PartialResponse]) -> None:
        for sample, turn in turns.items():
            length = self._prompt_length(self._schedule.parked[sample])
            before = len(turn.prompt.tokens) - length
            self._schedule.resume(sample, before, turn.max_length(self._params))
            self._responses.begin_again(sample, turn)
        keys = np.array([turn.key for turn in turns.values()], dtype=np.uint64)
        new_keys = position_keys(keys, self._params.max_length)
        self._keys[list(turns)] = new_keys.to(self._device)
        self._place()
