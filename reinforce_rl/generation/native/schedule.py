"""Schedule the sequences of a call: some are in flight, others wait for room in the KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass
class Running:
    """A sequence in flight."""

    sample: int  # index among all responses
    prompt: int  # index of the prompt
    slot: int  # location of the prompt's keys and values
    limit: int  # maximum tokens
    written: int = 0  # tokens of this call so far; in a conversation, of this answer
    before: int = 0  # tokens of the row before this answer
    lane: int | None = None  # its row in the cache, see `Schedule.settle`


class Schedule:
    """Queue of sequences; one that ends makes room for the next.

    Args:
        num_samples: sequences per prompt, one number for all or one per prompt.
        max_length: maximum response tokens.
        max_tokens: bound on the tokens of all slots and rows; None for no bound. One sequence
            always fits.
        limits: maximum tokens of each sequence; None for `max_length`.
        parks: sequences that end are `parked` with their keys and values until `resume` or `leave`.
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        num_samples: int | Sequence[int],
        max_length: int,
        max_tokens: int | None,
        limits: Sequence[int] | None = None,
        *,
        parks: bool = False,
    ):
        counts = (
            [num_samples] * len(prompt_lengths)
            if isinstance(num_samples, int)
            else list(num_samples)
        )
        prompt_of = np.repeat(np.arange(len(counts)), counts)
        longest = max(prompt_lengths)
        self._total = len(prompt_of)

        def slots_of(rows: int) -> int:
            """Return the maximum number of prompts that `rows` consecutive samples span."""
            return int((prompt_of[rows - 1 :] - prompt_of[: self._total - rows + 1]).max()) + 1

        def fits(rows: int) -> bool:
            return max_tokens is None or rows * max_length + slots_of(rows) * longest <= max_tokens

        # maximum in flight
        self.rows = next((rows for rows in range(self._total, 1, -1) if fits(rows)), 1)
        self.slots = slots_of(self.rows)  # maximum prompts in memory
        self.running: list[Running] = []
        self.parked: dict[int, Running] = {}  # by sample
        self._parks = parks
        self._begun = 0
        self._prompt_of = prompt_of.tolist()
        self._limits = [max_length] * self._total if limits is None else limits
        self._free = list(range(self.slots))
        self.slot_of: dict[int, int] = {}  # slots of the prompts in memory
        self._left = dict(enumerate(counts))

    @property
    def unfinished(self) -> int:
        """Sequences that run or wait for room."""
        return len(self.running) + self._total - self._begun

    def admit(self) -> list[int]:
        """Start as many waiting sequences as fit; return the prompts to prefill."""
        unread = []
        while self._begun < self._total and len(self.running) + len(self.parked) < self.rows:
            prompt = self._prompt_of[self._begun]
            if prompt not in self.slot_of:
                if not self._free:
                    break
                self.slot_of[prompt] = self._free.pop(0)
                unread.append(prompt)
            self.running.append(
                Running(self._begun, prompt, self.slot_of[prompt], self._limits[self._begun])
            )
            self._begun += 1
        return unread

    def advance(self, stopped: Iterable[int], tokens: int = 1) -> list[int] | None:
        """Advance every row by `tokens`; end the rows in `stopped` and those at full length.

        The last rows fill the gaps. `written` of a stopped row may be too high.

        Returns:
            For each remaining row, its former index; None if no row ended.
        """
        for sequence in self.running:
            sequence.written += tokens
        ended = {
            *stopped,
            *(
                row
                for row, sequence in enumerate(self.running)
                if sequence.written == sequence.limit
            ),
        }
        if not ended:
            return None
        for row in sorted(ended):
            sequence = self.running[row]
            if self._parks:
                self.parked[sequence.sample] = sequence
            else:
                self._release(sequence)
        count = len(self.running) - len(ended)
        fillers = iter([row for row in range(count, len(self.running)) if row not in ended])
        order = [next(fillers) if row in ended else row for row in range(count)]
        self.running = [self.running[row] for row in order]
        return order

    def resume(self, sample: int, before: int, limit: int) -> None:
        """Let a parked sequence run as the last row; `before` are the tokens of its row so far."""
        sequence = self.parked.pop(sample)
        sequence.before = before
        sequence.limit = limit
        sequence.written = 0
        self.running.append(sequence)

    def leave(self, sample: int) -> None:
        """End a parked sequence."""
        self._release(self.parked.pop(sample))

    def settle(self) -> list[tuple[int, int]]:
        """Give row i lane i, and parked sequences lanes behind; return moves (new, old lane).

        The moves are simultaneous. A lane that no sequence had needs none.
        """
        count = len(self.running)
        taken = {sequence.lane for sequence in self.parked.values()}
        spare = iter([lane for lane in range(count, self.rows) if lane not in taken])
        places = [(sequence, row) for row, sequence in enumerate(self.running)]
        for sequence in self.parked.values():
            assert sequence.lane is not None
            if sequence.lane < count:
                places.append((sequence, next(spare)))
        moves = []
        for sequence, lane in places:
            if sequence.lane is not None and sequence.lane != lane:
                moves.append((lane, sequence.lane))
            sequence.lane = lane
        return moves

    @property
    def longest(self) -> int:
        """Tokens of the longest row in flight."""
        return max((sequence.before + sequence.written for sequence in self.running), default=0)

    def _release(self, sequence: Running) -> None:
        self._left[sequence.prompt] -= 1
        if not self._left[sequence.prompt]:
            self._free.append(self.slot_of.pop(sequence.prompt))
