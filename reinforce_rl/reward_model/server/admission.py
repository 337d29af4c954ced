"""What the front door lets in: its settings, and bounds on requests in flight, queued and in
memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from reinforce_rl.config.base import Section
from reinforce_rl.config.rewards import InferenceConfig
from reinforce_rl.rewards.wire import MAX_RETRY_SECONDS, TOKENS_FORM

FIRST_GUESS_SECONDS = 1.0  # assumed duration before the first request
WEIGHT_OF_LAST = 0.1
DRAIN_RETRY_SECONDS = 10  # a server that ends may be started again
BUFFERED_REQUESTS = 8  # bodies of the largest size that may be in memory at the same time


class FrontSettings(Section):
    """The server's settings, and what follows from its model."""

    inference: InferenceConfig
    max_request_bytes: int  # of a body
    max_sequence_length: int  # tokens per row, padding included
    token: str | None = None  # required of every client
    backend: str = ""  # Triton's Unix socket
    canary: str = ""  # JSON inputs that the model can always score
    description: str = ""  # a ServerInfo in JSON
    input_forms: tuple[str, ...] = (TOKENS_FORM,)
    # until a complete header, or between two pieces of a body; then the connection closes
    idle_seconds: float = 60.0


@dataclass(eq=False)
class Refusal(Exception):
    """A request that is answered with an HTTP error."""

    code: int
    text: str  # may quote the request, so it must not be logged
    retry_after: int | None = None  # seconds


def check_length(length: int | None, settings: FrontSettings) -> None:
    """Raise Refusal (413) if a body is, or claims to be, too long."""
    if length is not None and length > settings.max_request_bytes:
        limit = f"{settings.max_request_bytes} (inference.max_request_bytes)"
        raise Refusal(
            413,
            f"the request has {length} bytes, this server takes at most {limit}; send fewer "
            "samples at a time",
        )


class Admission:
    """Counts requests from the end of their bodies to their answers. For one event loop."""

    def __init__(self, settings: FrontSettings):
        self.in_flight = 0  # requests that Triton has
        self.empty = asyncio.Event()  # set once draining and Triton has none
        self._inside = 0
        self._max_in_flight = settings.inference.max_in_flight
        self._max_queue = settings.inference.max_queue
        self._slots = asyncio.Semaphore(self._max_in_flight)  # grants them in order
        self._bytes = 0
        self._max_bytes = BUFFERED_REQUESTS * settings.max_request_bytes
        self._mean_seconds: float | None = None
        self._draining = False

    @property
    def queued(self) -> int:
        """Requests that wait for a slot."""
        return self._inside - self.in_flight

    def retry_after(self) -> int:
        """Return the estimated whole seconds until the queue has room."""
        if self._draining:
            return DRAIN_RETRY_SECONDS
        mean = FIRST_GUESS_SECONDS if self._mean_seconds is None else self._mean_seconds
        rounds = max(1.0, self.queued / self._max_in_flight)
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(rounds * mean)))

    def check_room(self) -> None:
        """Raise Refusal (503) if the server is full or stopping."""
        self._refuse_while_draining()
        most = self._max_in_flight + self._max_queue
        if self._inside >= most:
            raise self._busy(f"{most} requests are in flight already")

    def hold(self, count: int) -> None:
        """Reserve memory for `count` bytes of a body; raise Refusal (503) if the bodies in memory
        fill their share.
        """
        if self._bytes + count > self._max_bytes:
            raise self._busy("queued requests fill the memory reserved for them")
        self._bytes += count

    def release(self, count: int) -> None:
        self._bytes -= count

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait in order for a slot at Triton; raise Refusal (503) if the server is full or stops
        meanwhile.
        """
        self.check_room()
        self._inside += 1
        try:
            async with self._slots:
                self._refuse_while_draining()
                self.in_flight += 1
                started = time.monotonic()
                try:
                    yield
                finally:
                    self.note_seconds(time.monotonic() - started)
                    self.in_flight -= 1
                    self._note_if_empty()
        finally:
            self._inside -= 1

    def note_seconds(self, seconds: float) -> None:
        """Update the running mean of a request's duration."""
        old = seconds if self._mean_seconds is None else self._mean_seconds
        self._mean_seconds = (1 - WEIGHT_OF_LAST) * old + WEIGHT_OF_LAST * seconds

    def drain(self) -> None:
        """Admit no more requests, and refuse the queued ones."""
        self._draining = True
        self._note_if_empty()
        for _ in range(self.queued):
            self._slots.release()  # they wake up and are refused

    def _note_if_empty(self) -> None:
        if self._draining and self.in_flight == 0:
            self.empty.set()

    def _refuse_while_draining(self) -> None:
        if self._draining:
            raise Refusal(503, "the reward server is stopping", retry_after=DRAIN_RETRY_SECONDS)

    def _busy(self, text: str) -> Refusal:
        return Refusal(
            503,
            f"the reward server is busy: {text}; try again later",
            retry_after=self.retry_after(),
        )
