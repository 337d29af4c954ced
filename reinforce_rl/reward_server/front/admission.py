"""How many requests the server holds: some are with Triton, some wait for it, and the rest are told to come back."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator

from reinforce_rl.reward_server.front.limits import FrontLimits, Refusal
from reinforce_rl.rewards.wire import MAX_RETRY_SECONDS

FIRST_GUESS_SECONDS = 1.0  # of a request's time, before there was one
WEIGHT_OF_LAST = 0.1
DRAIN_RETRY_SECONDS = 10  # a server that ends may be started again
BUFFERED_REQUESTS = 8  # bodies of the largest size that may be in memory at the same time


class Gate:
    """Counts requests from the end of their bodies to their answers; for one event loop."""

    def __init__(self, limits: FrontLimits):
        self._limits = limits
        self._inside = 0
        self._in_flight = 0
        self._bytes = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._mean_seconds: float | None = None
        self._draining = False

    @property
    def in_flight(self) -> int:
        """Requests that Triton has."""
        return self._in_flight

    @property
    def queued(self) -> int:
        """Requests that wait for their turn."""
        return self._inside - self._in_flight

    def retry_after(self) -> int:
        """Whole seconds after which the queue will probably have room."""
        if self._draining:
            return DRAIN_RETRY_SECONDS
        mean = FIRST_GUESS_SECONDS if self._mean_seconds is None else self._mean_seconds
        rounds = max(1.0, self.queued / self._limits.max_in_flight)
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(rounds * mean)))

    def check_room(self) -> None:
        """Raises Refusal (503) where there are too many already, or the server is stopping."""
        self._refuse_while_draining()
        most = self._limits.max_in_flight + self._limits.max_queue
        if self._inside >= most:
            raise self._busy(f"{most} requests are here already")

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Be one of those that the server holds.

        Raises:
            Refusal: 503, there are too many, or the server is stopping.
        """
        self.check_room()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @contextlib.contextmanager
    def memory(self) -> Iterator[ByteBudget]:
        """Room for a body, given back at the end."""
        budget = ByteBudget(self)
        try:
            yield budget
        finally:
            self._bytes -= budget.held

    def take_bytes(self, count: int) -> None:
        """Raises Refusal (503) where the bodies in memory would be too many with these."""
        if self._bytes + count > BUFFERED_REQUESTS * self._limits.max_request_bytes:
            raise self._busy("the requests that wait fill the memory set apart for them")
        self._bytes += count

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a turn with Triton, in the order of coming.

        Raises:
            Refusal: 503, the server began to stop before it was this one's turn.
        """
        self._refuse_while_draining()
        if self._in_flight < self._limits.max_in_flight and not self._waiting:
            self._in_flight += 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn  # whoever lets it go has counted it as in flight
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._release()
                with contextlib.suppress(ValueError):
                    self._waiting.remove(turn)
                raise
        started = time.monotonic()
        try:
            yield
        finally:
            self._note(time.monotonic() - started)
            self._release()

    def drain(self) -> None:
        """Take no more requests, and send away those that wait."""
        self._draining = True
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(self._stopping())

    def _release(self) -> None:
        self._in_flight -= 1
        while self._waiting and self._in_flight < self._limits.max_in_flight:
            turn = self._waiting.popleft()
            if not turn.done():
                self._in_flight += 1
                turn.set_result(None)

    def _note(self, seconds: float) -> None:
        old = seconds if self._mean_seconds is None else self._mean_seconds
        self._mean_seconds = (1 - WEIGHT_OF_LAST) * old + WEIGHT_OF_LAST * seconds

    def _refuse_while_draining(self) -> None:
        if self._draining:
            raise self._stopping()

    def _busy(self, text: str) -> Refusal:
        return Refusal(503, f"the reward server is busy: {text}; try again later", retry_after=self.retry_after())

    def _stopping(self) -> Refusal:
        return Refusal(503, "the reward server is stopping", retry_after=DRAIN_RETRY_SECONDS)


class ByteBudget:
    """What one body has taken of the memory for all."""

    def __init__(self, gate: Gate):
        self._gate = gate
        self.held = 0

    def grow_to(self, count: int) -> None:
        """Hold `count` bytes; Refusal (503) where they are not there."""
        if count > self.held:
            self._gate.take_bytes(count - self.held)
            self.held = count
