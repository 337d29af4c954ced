"""The process between a `FunctionPool` and its workers: `python -m reinforce_rl.reward.function_host`.

The trainer and the reward server have threads, torch and CUDA, and their main file may do anything when a worker
imports it. So the workers are not theirs: they belong to this small process, which has none of that. It reads lines of
JSON from its owner and has pebble's process pool do the work: time limits, and a new worker for one that was killed.
The end of its input means that the owner is gone, however it went; then it ends with its workers.

To it:    first {"functions": {NAME: {key, name, kwargs}}, "num_workers", "sample_timeout_seconds"},
          then {"id", "function", "prompt", "response", "record"} for each sample; without "function" it is a ping
From it:  first {"faults": [...], "sources": {NAME: sha256}}, then {"id", "status", "value", "fault", "message"}
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from typing import Any, TextIO

from pebble import ProcessExpired, ProcessPool

from reinforce_rl.reward import base, function_worker
from reinforce_rl.reward.function_loading import FunctionSpec
from reinforce_rl.reward.function_worker import Outcome

STOP_SECONDS = 5.0
ATTEMPTS = 5  # of a sample whose pool breaks; others break with it, so one is not enough to blame it


class _Answers:
    """Lines to the owner, from several threads."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message) + "\n"
        with self._lock:
            try:
                self._stream.write(line)
                self._stream.flush()
            except OSError:
                os._exit(0)  # the owner is gone; the kernel ends the workers


class _Workers:
    """A process pool that is replaced when it breaks.

    Pebble gives up a whole pool when a worker dies without a sample that it is known to have: an idle one that was
    killed, or one that died the moment it got a sample. The samples are then tried again in another pool.
    """

    def __init__(self, settings: dict[str, Any], answers: _Answers):
        self._specs = {name: FunctionSpec(**spec) for name, spec in settings["functions"].items()}
        self._num_workers = int(settings["num_workers"])
        self._timeout = float(settings["sample_timeout_seconds"])
        self._answers = answers
        self._lock = threading.Lock()
        self._pool = self._new_pool()

    def look(self) -> dict[str, Any]:
        """What loading the functions gave."""
        try:
            faults, sources = self._pool.schedule(function_worker.look).result()
        except (ProcessExpired, BrokenProcessPool) as error:
            names = ", ".join(spec.name for spec in self._specs.values())
            faults, sources = [f"a process ended while it imported {names} ({error})"], {}
        return {"faults": faults, "sources": sources}

    def schedule(self, message: dict[str, Any], attempt: int = 1) -> None:
        """Have a sample scored and answered."""
        pool = self._pool
        try:
            if "function" in message:
                sample = (message["function"], message["prompt"], message["response"], message["record"])
                future = pool.schedule(function_worker.score, args=sample, timeout=self._timeout)
            else:
                future = pool.schedule(function_worker.ping, timeout=self._timeout)
        except RuntimeError:  # it is broken
            self._try_again(pool, message, attempt)
        else:
            future.add_done_callback(lambda done: self._answer(pool, message, attempt, done))

    def stop(self) -> None:
        """End the workers."""
        self._retire(self._pool)

    def _answer(self, pool: ProcessPool, message: dict[str, Any], attempt: int, future: Future[Any]) -> None:
        if isinstance(future.exception(), BrokenProcessPool):
            self._try_again(pool, message, attempt)
            return
        outcome = _outcome(future)
        value = None if math.isnan(outcome.value) else outcome.value
        self._answers.send({"id": message["id"], **asdict(outcome), "value": value})

    def _try_again(self, broken: ProcessPool, message: dict[str, Any], attempt: int) -> None:
        if attempt >= ATTEMPTS:
            outcome = Outcome(base.STATUS_INTERNAL, math.nan, "its process ended again and again")
            self._answers.send({"id": message["id"], **asdict(outcome), "value": None})
            return
        with self._lock:
            if self._pool is broken:
                self._pool = self._new_pool()
                # In a thread: this may be one of the pool's own, which cannot wait for itself.
                threading.Thread(target=self._retire, args=(broken,), daemon=True).start()
        self.schedule(message, attempt + 1)

    def _new_pool(self) -> ProcessPool:
        # Spawned by this process and no fork server: a worker lives as long as the parent that the kernel knows.
        return ProcessPool(
            max_workers=self._num_workers,
            initializer=function_worker.start,
            initargs=(os.getpid(), self._specs),
            context=multiprocessing.get_context("spawn"),
        )

    @staticmethod
    def _retire(pool: ProcessPool) -> None:
        pool.stop()
        pool.join(STOP_SECONDS)


def main() -> None:
    """Serve until the input ends."""
    # What a function prints must not get between the answers.
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answers = _Answers(stream)
    workers = _Workers(json.loads(sys.stdin.readline()), answers)
    found = workers.look()
    answers.send(found)
    if not found["faults"]:
        for line in sys.stdin:
            workers.schedule(json.loads(line))
    workers.stop()
    os._exit(0)


def _outcome(future: Future[Any]) -> Outcome:
    try:
        return future.result()
    except FutureTimeoutError:
        return Outcome(base.STATUS_TIMED_OUT, math.nan, "exceeded the time limit; its process was replaced")
    except Exception as error:  # pebble's ProcessExpired, or a record that cannot be sent on
        return Outcome(base.STATUS_INTERNAL, math.nan, f"its process ended ({type(error).__name__})", str(error))


if __name__ == "__main__":
    main()
