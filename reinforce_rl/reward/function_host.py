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
BROKEN = 3  # exit code; the owner starts another host


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


def main() -> None:
    """Serve until the input ends."""
    # What a function prints must not get between the answers.
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answers = _Answers(stream)
    settings = json.loads(sys.stdin.readline())
    specs = {name: FunctionSpec(**spec) for name, spec in settings["functions"].items()}
    timeout = float(settings["sample_timeout_seconds"])
    # Spawned by this process and no fork server: a worker lives as long as the parent that the kernel knows.
    pool = ProcessPool(
        max_workers=settings["num_workers"],
        initializer=function_worker.start,
        initargs=(os.getpid(), specs),
        context=multiprocessing.get_context("spawn"),
    )
    try:
        faults, sources = pool.schedule(function_worker.look).result()
    except (ProcessExpired, BrokenProcessPool) as error:
        names = ", ".join(spec.name for spec in specs.values())
        faults, sources = [f"a process ended while it imported {names} ({error})"], {}
    answers.send({"faults": faults, "sources": sources})
    if not faults:
        for line in sys.stdin:
            _schedule(pool, answers, json.loads(line), timeout)
    pool.stop()
    pool.join(STOP_SECONDS)
    os._exit(0)


def _schedule(pool: ProcessPool, answers: _Answers, message: dict[str, Any], timeout: float) -> None:
    def answer(future: Future[Any]) -> None:
        outcome = _outcome(future)
        value = None if math.isnan(outcome.value) else outcome.value
        answers.send({"id": message["id"], **asdict(outcome), "value": value})

    try:
        if "function" in message:
            sample = (message["function"], message["prompt"], message["response"], message["record"])
            future = pool.schedule(function_worker.score, args=sample, timeout=timeout)
        else:
            future = pool.schedule(function_worker.ping, timeout=timeout)
    except RuntimeError:  # the pool is broken
        os._exit(BROKEN)
    future.add_done_callback(answer)


def _outcome(future: Future[Any]) -> Outcome:
    try:
        return future.result()
    except FutureTimeoutError:
        return Outcome(base.STATUS_TIMED_OUT, math.nan, "exceeded the time limit; its process was replaced")
    except BrokenProcessPool:
        os._exit(BROKEN)
    except Exception as error:  # pebble's ProcessExpired, or a record that cannot be sent on
        return Outcome(base.STATUS_INTERNAL, math.nan, f"its process ended ({type(error).__name__})", str(error))


if __name__ == "__main__":
    main()
