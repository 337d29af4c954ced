"""How long an attempt may take, what became of it, and when the next one is due."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from reinforce_rl.errors import RewardServerError


@dataclass(eq=False)
class FailedAttempt(Exception):
    """An attempt failed in a way that another one, perhaps elsewhere, may mend.

    Attributes:
        text: what the server does, for sentences.
        timed_out: nothing came in time.
        bad_answer: what came is no answer of the protocol, or none to this request.
        unknown: a Triton server answers, but none that describes itself as ours. That is normal for a moment while a
            server starts, and a mistake when it lasts.
        retry_after: seconds after which the server wants to be asked again, where it said so.
        fault: what keeps this server from being used at all; None where it may recover by itself.
    """

    text: str
    timed_out: bool = False
    bad_answer: bool = False
    unknown: bool = False
    retry_after: float | None = None
    fault: RewardServerError | None = None

    def __str__(self) -> str:
        return self.text


class Deadline:
    """How long something has been going on, and how long it still may.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def remaining(self) -> float:
        return self.seconds - self.elapsed


class Backoff:
    """Pauses that double, each with jitter.

    Args:
        first_seconds, max_seconds: they grow from one to the other.
        rng: of the jitter.
    """

    def __init__(self, first_seconds: float, max_seconds: float, rng: random.Random):
        self._first = first_seconds
        self._max = max_seconds
        self._random = rng
        self._next = first_seconds

    def pause(self, retry_after: float | None = None) -> float:
        """Seconds until the next attempt.

        Args:
            retry_after: the server's own wish, which goes before.
        """
        pause = min(self._next * self._random.uniform(0.5, 1.5), self._max)
        self._next = min(2 * self._next, self._max)
        if retry_after is not None:
            # The server knows when it will have time. Later, never sooner: all of its clients got such an answer.
            return retry_after * self._random.uniform(1.0, 1.5)
        return pause

    def reset(self) -> None:
        """Begin anew, after a success."""
        self._next = self._first
