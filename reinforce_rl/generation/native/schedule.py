"""Which sequences are decoded at a time: continuous batching within a bound on the tokens in memory.

Pure bookkeeping, so that every rank of a copy of the model decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass
class Running:
    """A sequence in flight.

    Attributes:
        sample: its row among all responses.
        prompt: the number of its prompt.
        slot: where the prompt's keys and values lie.
        written: tokens of the response so far.
    """

    sample: int
    prompt: int
    slot: int
    written: int = 0


class Schedule:
    """Sequences wait in their order; one that ends makes room for the next.

    Args:
        prompt_lengths: tokens of each prompt.
        num_samples: sequences a prompt.
        max_length: response tokens of a sequence at most.
        max_tokens: that the slots of prompts and rows may hold together; None for no bound. One sequence is decoded
            in any case.

    Attributes:
        slots: prompts in memory at most.
        rows: sequences in flight at most.
        running: those in flight, in the order of their rows.
    """

    def __init__(self, prompt_lengths: Sequence[int], num_samples: int, max_length: int, max_tokens: int | None):
        self._num_samples, self._max_length, longest = num_samples, max_length, max(prompt_lengths)
        total = len(prompt_lengths) * num_samples

        def slots_of(rows: int) -> int:
            """So many prompts have `rows` samples that follow each other."""
            return min(math.ceil((rows - 1) / num_samples) + 1, len(prompt_lengths))

        def fits(rows: int) -> bool:
            return max_tokens is None or rows * max_length + slots_of(rows) * longest <= max_tokens

        self.rows = next((rows for rows in range(total, 1, -1) if fits(rows)), 1)
        self.slots = slots_of(self.rows)
        self.running: list[Running] = []
        self._waiting = iter(range(total))
        self._next = next(self._waiting, None)
        self._free = list(range(self.slots))
        self._slot_of: dict[int, int] = {}
        self._left = dict.fromkeys(range(len(prompt_lengths)), num_samples)

    def admit(self) -> list[int]:
        """Put as many sequences in flight as fit; the numbers of the prompts that must be read for them."""
        unread = []
        while self._next is not None and len(self.running) < self.rows:
            prompt = self._next // self._num_samples
            if prompt not in self._slot_of:
                if not self._free:
                    break
                self._slot_of[prompt] = self._free.pop(0)
                unread.append(prompt)
            self.running.append(Running(self._next, prompt, self._slot_of[prompt]))
            self._next = next(self._waiting, None)
        return unread

    def slot_of(self, prompt: int) -> int:
        """Where a prompt in memory lies."""
        return self._slot_of[prompt]

    def advance(self, stopped: Iterable[int], tokens: int = 1) -> list[int] | None:
        """Advance every row by `tokens`, and end the rows in `stopped` and those at full length.

        The last rows fill the gaps. How many tokens a stopped row has is not asked for.

        Returns:
            For each row that is left, which row it was; None where no row has ended.
        """
        for one in self.running:
            one.written += tokens
        ended = {*stopped, *(row for row, one in enumerate(self.running) if one.written == self._max_length)}
        if not ended:
            return None
        for row in sorted(ended):
            prompt = self.running[row].prompt
            self._left[prompt] -= 1
            if not self._left[prompt]:
                self._free.append(self._slot_of.pop(prompt))
        count = len(self.running) - len(ended)
        fillers = iter([row for row in range(count, len(self.running)) if row not in ended])
        order = [next(fillers) if row in ended else row for row in range(count)]
        self.running = [self.running[row] for row in order]
        return order

    @property
    def longest(self) -> int:
        """Tokens of the longest response in flight; 0 where there is none."""
        return max((one.written for one in self.running), default=0)
