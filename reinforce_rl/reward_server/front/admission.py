"""Admission control: bounds requests in flight, queued and in memory; rejects the rest with 503."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from reinforce_rl.reward_server.options import FrontLimits
from reinforce_rl.rewards.wire import MAX_RETRY_SECONDS

FIRST_GUESS_SECONDS = 1.0  # assumed duration before the first request
WEIGHT_OF_LAST = 0.1
DRAIN_RETRY_SECONDS = 10  # a server that ends may be started again
BUFFERED_REQUESTS = 8  # bodies of the largest size that may be in memory at the same time


class Refusal(Exception):
    """A request that is answered with an HTTP error."""

    def __init__(self, code: int, text: str, *, retry_after: int | None = None):
        super().__init__(text)
        self.code = code
        self.text = text  # may quote the request, so it must not be logged
        self.retry_after = retry_after  # seconds


def check_length(length: int | None, limits: FrontLimits) -> None:
    """Raise Refusal (413) if a body is, or claims to be, too long."""
    if length is not None and length > limits.max_request_bytes:
        raise Refusal(
            413,
            f"the request has {length} bytes, this server takes at most {limits.max_request_bytes} "
            "(inference.max_request_bytes); send fewer samples at a time",
        )


class Admission:
    """Counts requests from the end of their bodies to their answers. For one event loop."""

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
        """Requests that wait for a slot."""
        return self._inside - self._in_flight

    def retry_after(self) -> int:
        """Return the estimated whole seconds until the queue has room."""
        if self._draining:
            return DRAIN_RETRY_SECONDS
        mean = FIRST_GUESS_SECONDS if self._mean_seconds is None else self._mean_seconds
        rounds = max(1.0, self.queued / self._limits.max_in_flight)
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(rounds * mean)))

    def check_room(self) -> None:
        """Raise Refusal (503) if the server is full or stopping."""
        self._refuse_while_draining()
        most = self._limits.max_in_flight + self._limits.max_queue
        if self._inside >= most:
            raise self._busy(f"{most} requests are here already")

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Hold one of the server's places; raise Refusal (503) if it is full or stopping."""
        self.check_room()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @contextlib.contextmanager
    def memory(self) -> Iterator[Callable[[int], None]]:
        """Reserve memory for a body until exit. Yields a function that sets the reservation to `count` bytes, or
        raises Refusal (503) if the bodies in memory would exceed the limit.
        """
        held = 0

        def grow_to(count: int) -> None:
            nonlocal held
            if self._bytes + count - held > BUFFERED_REQUESTS * self._limits.max_request_bytes:
                raise self._busy("the requests that wait fill the memory set apart for them")
            self._bytes += count - held
            held = count

        try:
            yield grow_to
        finally:
            self._bytes -= held

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait in order for a slot at Triton; raise Refusal (503) if the server begins to stop meanwhile."""
        self._refuse_while_draining()
        if self._in_flight < self._limits.max_in_flight and not self._waiting:
            self._in_flight += 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn  # `_release` has counted it as in flight
            except asyncio.CancelledError:
                # The slot may have been granted just before the cancellation: hand it on.
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._release()
                with contextlib.suppress(ValueError):
                    self._waiting.remove(turn)
                raise
        started = time.monotonic()
        try:
            yield
        finally:
            self.note_seconds(time.monotonic() - started)
            self._release()

    def note_seconds(self, seconds: float) -> None:
        """Update the running mean of a request's duration."""
        old = seconds if self._mean_seconds is None else self._mean_seconds
        self._mean_seconds = (1 - WEIGHT_OF_LAST) * old + WEIGHT_OF_LAST * seconds

    def drain(self) -> None:
        """Admit no more requests, and refuse those that wait."""
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

    def _refuse_while_draining(self) -> None:
        if self._draining:
            raise self._stopping()

    def _busy(self, text: str) -> Refusal:
        return Refusal(503, f"the reward server is busy: {text}; try again later", retry_after=self.retry_after())

    def _stopping(self) -> Refusal:
        return Refusal(503, "the reward server is stopping", retry_after=DRAIN_RETRY_SECONDS)
