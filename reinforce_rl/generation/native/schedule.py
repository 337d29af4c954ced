"""Continuous batching within a bound on cached tokens. Deterministic, so that all ranks of a model copy agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass
class Running:
    """A sequence in flight."""

    sample: int  # index among all responses
    prompt: int  # index of the prompt
    slot: int  # location of the prompt's keys and values
    written: int = 0  # response tokens so far


class Schedule:
    """Queue of sequences; one that ends makes room for the next.

    Args:
        num_samples: sequences per prompt.
        max_length: maximum response tokens.
        max_tokens: bound on the tokens of all slots and rows; None for no bound. One sequence always fits.
    """

    def __init__(self, prompt_lengths: Sequence[int], num_samples: int, max_length: int, max_tokens: int | None):
        self._num_samples, self._max_length, longest = num_samples, max_length, max(prompt_lengths)
        total = len(prompt_lengths) * num_samples

        def slots_of(rows: int) -> int:
            """Return the maximum number of prompts that `rows` consecutive samples span."""
            return min(math.ceil((rows - 1) / num_samples) + 1, len(prompt_lengths))

        def fits(rows: int) -> bool:
            return max_tokens is None or rows * max_length + slots_of(rows) * longest <= max_tokens

        self.rows = next((rows for rows in range(total, 1, -1) if fits(rows)), 1)  # maximum in flight
        self.slots = slots_of(self.rows)  # maximum prompts in memory
        self.running: list[Running] = []
        self._waiting = iter(range(total))
        self._next = next(self._waiting, None)
        self._free = list(range(self.slots))
        self._slot_of: dict[int, int] = {}
        self._left = dict.fromkeys(range(len(prompt_lengths)), num_samples)

    def admit(self) -> list[int]:
        """Start as many waiting sequences as fit; return the prompts to prefill."""
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
        return self._slot_of[prompt]

    def advance(self, stopped: Iterable[int], tokens: int = 1) -> list[int] | None:
        """Advance every row by `tokens`; end the rows in `stopped` and those at full length.

        The last rows fill the gaps. `written` of a stopped row may be too high.

        Returns:
            For each remaining row, its former index; None if no row ended.
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
        """Tokens of the longest response in flight."""
        return max((one.written for one in self.running), default=0)
