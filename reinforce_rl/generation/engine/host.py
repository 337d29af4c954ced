"""The process that owns an engine: commands of the trainer in, results out.

Separate because engines alter the process that imports them, may need an environment of their own, and so that one can
be killed in any state.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from reinforce_rl.generation.engine import ABORTED, Answer, EngineArguments, Request
from reinforce_rl.utils.process import connect_to_parent

WATCH_SECONDS = 1.0


class EngineHost(Protocol):
    """An engine's half of the protocol; its public methods are the commands. It is a `RequestsUnderway` too.

    On ranks of its own it has `pause()`, to draw no token until `resume()`; requests without a token are taken back.
    Its adapter says whether it has these two besides:
        shows_layers: `layer_outputs(request)`, the residual stream of a prompt after each decoder layer
        loads_adapters: `load_adapter(folder, sums)`, to generate with PEFT's folder of LoRA updates from now on; the
            sums are checksums of A and of scale x B, by name
    """

    @property
    def is_alive(self) -> bool:
        """False once its own processes have ended, of which it may tell its callers nothing."""
        ...

    async def start(self, arguments: EngineArguments) -> list[str]:
        """Start the engine, with random weights until the first update; return the device of each worker."""
        ...

    async def generate(self, requests: Sequence[Request], seconds: float) -> list[Answer]:
        """Run all requests at once; abort those over time and report them as lost."""
        ...

    async def update_weights(self, bucket: Any) -> None:
        """Load a bucket of weights as `offer` of the trainer's adapter gave it; None after the last."""
        ...

    async def release(self) -> None:
        """Fall asleep: give back the memory of weights and cache, where the engine can."""
        ...

    async def resume_weights(self) -> None:
        """Take memory for the weights again, before they are updated."""
        ...

    async def resume_cache(self) -> None:
        """Take memory for the cache again, after the weights were updated."""
        ...

    async def stop(self) -> None: ...


@dataclass(frozen=True)
class _Underway:
    name: str  # of the request, as the engine has it
    begun: float  # monotonic time
    answer: asyncio.Future[Answer]


class RequestsUnderway:
    """The commands of an `EngineHost` for requests that go on between them; the trainer gives each a number."""

    def __init__(self) -> None:
        self._names = map(str, itertools.count())
        self._underway: dict[int, _Underway] = {}
        self._updates = 0  # of the weights, so far

    async def _complete(self, request: Request, name: str) -> Answer:
        raise NotImplementedError

    async def advance(
        self, requests: Mapping[int, Request], wait: float, limit: float
    ) -> tuple[int, dict[int, Answer]]:
        """Begin these; return once all are at their end, or after `wait` seconds.

        Returns the number of the last update of the weights, and the answers that have come. Those that take longer
        than `limit` seconds are lost.
        """
        for number, request in requests.items():
            name = next(self._names)
            answer = asyncio.ensure_future(self._complete(request, name))
            self._underway[number] = _Underway(name, time.monotonic(), answer)
        if self._underway:
            await asyncio.wait([one.answer for one in self._underway.values()], timeout=wait)
        latest = time.monotonic() - limit
        due = [
            number
            for number, one in self._underway.items()
            if one.answer.done() or one.begun < latest
        ]
        answers = await _settled([self._underway.pop(number).answer for number in due], limit)
        return self._updates, dict(zip(due, answers, strict=True))

    async def take_back(self) -> None:
        """End all requests; the next `advance` returns what there is of them, with the fault ABORTED."""
        for one in self._underway.values():
            one.answer.cancel()


async def answers_of(results: Sequence[Awaitable[Answer]], seconds: float) -> list[Answer]:
    """Await all within `seconds`. Late ones are cancelled, and like failed ones answered by their fault."""
    waits = [asyncio.ensure_future(result) for result in results]
    await asyncio.wait(waits, timeout=seconds)
    return await _settled(waits, seconds)


async def _settled(waits: Sequence[asyncio.Future[Answer]], seconds: float) -> list[Answer]:
    late = [wait for wait in waits if not wait.done()]
    for wait in late:
        wait.cancel()
    found = await asyncio.gather(*waits, return_exceptions=True)
    return [
        Answer(fault=f"no answer within {seconds:g} s")
        if wait in late
        else answer
        if isinstance(answer, Answer)
        else Answer(fault=ABORTED if wait.cancelled() else text_of(answer))
        for wait, answer in zip(waits, found, strict=True)
    ]


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def check_version(package: str, found: str, expected: Sequence[str]) -> None:
    if not any(f"{found}.".startswith(f"{version}.") for version in expected):
        raise RuntimeError(
            f"{package} is {found}; expected {' or '.join(expected)}, whose interface this was written for"
        )


async def serve(host: EngineHost, connection: Connection) -> None:
    """Answer commands by (fault, result) until "stop" or until the trainer is gone."""
    while True:
        try:
            command, arguments = await asyncio.to_thread(connection.recv)
        except (EOFError, OSError):
            command = "stop"
            arguments = ()
        try:
            answer = asyncio.ensure_future(getattr(host, command)(*arguments))
            while not answer.done() and host.is_alive:
                await asyncio.wait([answer], timeout=WATCH_SECONDS)
            if not host.is_alive and command != "stop":
                raise RuntimeError("the engine's own processes ended")
            reply = None, await answer
        except Exception as error:  # report any engine error to the trainer
            reply = text_of(error), None
        try:
            connection.send(reply)
        except OSError:
            return
        if command == "stop":
            return


def main(host: EngineHost) -> None:
    for number in (signal.SIGUSR1, signal.SIGHUP):
        # Slurm signals every process; the trainer alone decides
        signal.signal(number, signal.SIG_IGN)
    # Also die by signal, as a call into the engine may never return.
    asyncio.run(serve(host, connect_to_parent(death_signal=signal.SIGTERM)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # engine threads may never end
