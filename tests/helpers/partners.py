"""A partner of the policy that writes random tokens after random times."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from reinforce_rl.generation.base import PartialResponse


class Partner:
    """Write up to seven tokens after each answer, keyed by row and turn; keep all answers.

    Args:
        room: of a row, beside its prompt.
        patience: exchanges that a reply takes at most; their number is random.
        rewrites: leave out tokens, at some turns behind the prompt and at others in it.
        answers_cut: go on where an answer was cut by its length, too.
    """

    def __init__(
        self,
        responses: Sequence[PartialResponse],
        *,
        room: int,
        vocab_size: int = 63,
        max_turns: int = 4,
        patience: int = 0,
        answers_cut: bool = False,
        rewrites: bool = False,
        seed: int = 0,
    ):
        self._room = room
        self._vocab_size = vocab_size
        self._max_turns = max_turns
        self._patience = patience
        self._answers_cut = answers_cut
        self._rewrites = rewrites
        self._draw = random.Random(seed)
        self._prompt_lengths = [len(response.prompt.tokens) for response in responses]
        self._waiting: dict[int, int] = {}
        self.answers: list[list[PartialResponse]] = [[] for _ in responses]
        self.most_waiting = 0

    def __call__(
        self, answers: Mapping[int, PartialResponse], *, waits: bool
    ) -> dict[int, PartialResponse | None]:
        for row, answer in answers.items():
            assert row not in self._waiting
            self.answers[row].append(answer)
            self._waiting[row] = self._draw.randint(0, self._patience)
        assert self._waiting or not waits
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        soonest = min(self._waiting.values(), default=0) if waits else 0
        ready = [row for row, left in self._waiting.items() if left <= soonest]
        self._waiting = {
            row: max(0, left - 1) for row, left in self._waiting.items() if row not in ready
        }
        return {row: self._turn(row) for row in ready}

    def _turn(self, row: int) -> PartialResponse | None:
        answers = self.answers[row]
        answer = answers[-1]
        draw = random.Random(1000 * row + len(answers))
        written = [draw.randrange(self._vocab_size) for _ in range(draw.randint(0, 7))]
        history = (*answer.prompt.tokens, *answer.tokens, *written)
        if self._rewrites and len(answers) % 2:
            start = self._prompt_lengths[row] * (len(answers) // 2 == row % 2)
            history = (*history[:start], *history[start + 2 :])
        left = self._room - len(history)
        if not self._rewrites:
            left += self._prompt_lengths[row]
        is_last = answer.finish_reason != "stop" and not self._answers_cut
        if is_last or len(answers) == self._max_turns or left <= 0:
            return None
        prompt = replace(answer.prompt, tokens=history)
        return PartialResponse(prompt, draw.getrandbits(64), limit=left)
