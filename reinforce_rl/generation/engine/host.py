"""The process that owns an engine: it executes the trainer's commands and returns results.

An engine has its own process because it alters the process that imports it, may need its own
environment, and must be killable in any state.
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
    """An engine's half of the protocol. Its public methods are commands.

    A host is a `RequestsUnderway`, too. On ranks that only generate it also has `pause()`, which
    draws no token until `resume()` and aborts requests without a token. Two commands depend on
    flags of the adapter:
        shows_layers: `layer_outputs(request)` returns the residual stream of a prompt after each
            decoder layer
        loads_adapters: `load_adapter(folder, sums)` loads PEFT's folder of LoRA updates; `sums` are
            checksums of A and of scale x B, by name
    """

    @property
    def is_alive(self) -> bool:
        """False once the engine's processes have ended, even if the engine reports no error."""
        ...

    async def start(self, arguments: EngineArguments) -> list[str]:
        """Start the engine and return the device of each worker.

        Weights are random until the first update.
        """
        ...

    async def generate(self, requests: Sequence[Request], seconds: float) -> list[Answer]:
        """Run all requests at once; abort late requests and report them as lost."""
        ...

    async def update_weights(self, bucket: Any) -> None:
        """Load a bucket of weights, a result of `EngineAdapter.bucket_of`; None ends the update."""
        ...

    async def release(self) -> None:
        """Sleep: release the memory of weights and cache, if the engine can."""
        ...

    async def resume_weights(self) -> None:
        """Allocate memory for the weights, before their update."""
        ...

    async def resume_cache(self) -> None:
        """Allocate memory for the cache, after the update of the weights."""
        ...

    async def stop(self) -> None: ...


@dataclass(frozen=True)
class _Underway:
    name: str  # the engine's name of the request
    begun: float  # monotonic time
    answer: asyncio.Future[Answer]


class RequestsUnderway:
    """Commands of an `EngineHost` for requests that outlive a command; the trainer numbers them."""

    def __init__(self) -> None:
        self._names = map(str, itertools.count())
        self._underway: dict[int, _Underway] = {}
        self._updates = 0  # number of weight updates so far

    async def _complete(self, request: Request, name: str) -> Answer:
        raise NotImplementedError

    async def advance(
        self, requests: Mapping[int, Request], wait: float, limit: float
    ) -> tuple[int, dict[int, Answer]]:
        """Begin `requests`; return when all requests have ended, or after `wait` seconds.

        Returns the number of the last weight update, and the answers so far. A request that takes
        longer than `limit` seconds is lost.
        """
        for number, request in requests.items():
            name = next(self._names)
            answer = asyncio.ensure_future(self._complete(request, name))
            self._underway[number] = _Underway(name, time.monotonic(), answer)
        if self._underway:
            await asyncio.wait(
                [underway.answer for underway in self._underway.values()], timeout=wait
            )
        latest = time.monotonic() - limit
        due = [
            number
            for number, underway in self._underway.items()
            if underway.answer.done() or underway.begun < latest
        ]
        answers = await _settled([self._underway.pop(number).answer for number in due], limit)
        return self._updates, dict(zip(due, answers, strict=True))

    async def take_back(self) -> None:
        """End all requests; the next `advance` returns their answers, with the fault ABORTED."""
        for underway in self._underway.values():
            underway.answer.cancel()


async def answers_of(results: Sequence[Awaitable[Answer]], seconds: float) -> list[Answer]:
    """Await all results within `seconds`.

    Late results are cancelled. Late and failed results become answers with a `fault`.
    """
    waits = [asyncio.ensure_future(result) for result in results]
    await asyncio.wait(waits, timeout=seconds)
    return await _settled(waits, seconds)


async def _settled(waits: Sequence[asyncio.Future[Answer]], seconds: float) -> list[Answer]:
    late = [wait for wait in waits if not wait.done()]
    for wait in late:
        wait.cancel()
    outcomes = await asyncio.gather(*waits, return_exceptions=True)
    return [
        Answer(fault=f"no answer within {seconds:g} s")
        if wait in late
        else answer
        if isinstance(answer, Answer)
        else Answer(fault=ABORTED if wait.cancelled() else text_of(answer))
        for wait, answer in zip(waits, outcomes, strict=True)
    ]


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def check_version(package: str, installed: str, expected: Sequence[str]) -> None:
    if not any(f"{installed}.".startswith(f"{version}.") for version in expected):
        raise RuntimeError(
            f"{package} is {installed}; expected {' or '.join(expected)}, whose interface this "
            "was written for"
        )


async def serve(host: EngineHost, connection: Connection) -> None:
    """Answer commands with (fault, result) until "stop" or the trainer's end."""
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
        # Slurm signals every process; only the trainer reacts.
        signal.signal(number, signal.SIG_IGN)
    # A call into the engine may never return: the parent's death must also send a signal.
    asyncio.run(serve(host, connect_to_parent(death_signal=signal.SIGTERM)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # engine threads may never end
