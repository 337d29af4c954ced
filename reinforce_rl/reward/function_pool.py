"""Reward functions in processes of their own, each sample within a time limit: the owner's side.

`function_host.py` is the process that this one talks to, and says why there is one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from reinforce_rl.errors import ConfigError, ReinforceError, RewardServerError
from reinforce_rl.reward import base
from reinforce_rl.reward.base import TextSample
from reinforce_rl.reward.function_loading import FunctionSpec
from reinforce_rl.utils.process import Child

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # a function's module may import much, on a busy machine
REPLACE_SECONDS = 30.0  # to end a worker that is stuck, and to import the functions in a new one
STOP_SECONDS = 10.0
PING = ""  # stands for no function
# One thread a worker: each of them would take every core, and the trainer has its own.
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


@dataclass(frozen=True)
class Scores:
    """Of N samples.

    Attributes:
        values: float32 [N], NaN where a sample failed.
        status: int32 [N].
    """

    values: np.ndarray
    status: np.ndarray


@dataclass
class _Batch:
    """Samples that were submitted together; only the thread that reads the host's answers changes it."""

    function: str
    scores: Scores
    left: int
    on_sample: Callable[[], object]
    future: Future[Scores] = field(default_factory=Future)
    faults: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class PendingScores:
    """Scores that are being computed."""

    future: Future[Scores]
    deadline: float  # of time.monotonic

    def result(self) -> Scores:
        """Wait for them.

        Raises:
            RewardServerError: the processes ended, or they took longer than all samples may together.
        """
        try:
            return self.future.result(max(0.0, self.deadline - time.monotonic()))
        except FutureTimeoutError:
            raise RewardServerError(
                "the processes of the reward function have not answered within the time that all of its samples may "
                "take together; is this machine overloaded, or was a process stopped?"
            ) from None


class _Host:
    """A running host process and the samples that it has."""

    def __init__(self, child: Child):
        self.child = child
        self.process = child.process
        self.lock = threading.Lock()
        self.samples: dict[int, tuple[_Batch, int]] = {}
        self.next_id = 0
        self.ended = False
        self.lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def add(self, batch: _Batch, samples: Sequence[TextSample]) -> int:
        """Send the samples; how many are under way then.

        Raises:
            RewardServerError: the host has ended.
        """
        with self.lock:
            if self.ended:
                raise RewardServerError("the processes of the reward function have ended")
            for row, sample in enumerate(samples):
                message: dict[str, Any] = {"id": self.next_id}
                if batch.function != PING:
                    message |= {"function": batch.function, "prompt": sample.prompt, "response": sample.response}
                    message["record"] = dict(sample.record)
                self.samples[self.next_id] = (batch, row)
                self.next_id += 1
                self.lines.put(json.dumps(message).encode() + b"\n")
            return len(self.samples)

    def write(self) -> None:
        """Thread: to the host's input, which may be full for a while."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            while (line := self.lines.get()) is not None:
                self.process.stdin.write(line)
                if self.lines.empty():
                    self.process.stdin.flush()
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.close()

    def read(self) -> None:
        """Thread: the host's answers, until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._take(json.loads(line))
        code = self.process.wait()
        with self.lock:
            self.ended = True
            waiting = {id(batch): batch for batch, _ in self.samples.values()}
            self.samples.clear()
        self.lines.put(None)
        for batch in waiting.values():
            batch.future.set_exception(
                RewardServerError(
                    f"the processes of the reward function ended with {batch.left} samples under way (exit code "
                    f"{code}); see the log, and whether the machine ran out of memory"
                )
            )

    def _take(self, answer: dict[str, Any]) -> None:
        with self.lock:
            batch, row = self.samples.pop(answer["id"])
        if answer["status"] == base.STATUS_OK:
            with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused
                batch.scores.values[row] = answer["value"]
            if not np.isfinite(batch.scores.values[row]):
                batch.scores.values[row] = np.nan
                answer = {**answer, "status": base.STATUS_NOT_FINITE, "fault": "does not fit float32"}
        batch.scores.status[row] = answer["status"]
        if answer["fault"]:
            batch.faults[answer["fault"]] += 1
            logger.debug("event=function_failed fault=%s message=%s", answer["fault"], answer["message"])
        batch.left -= 1
        batch.on_sample()
        if batch.left == 0:
            if batch.faults:
                logger.warning("event=function_failed function=%s faults=%s", batch.function, dict(batch.faults))
            batch.future.set_result(batch.scores)


class FunctionPool:
    """Worker processes that score samples by one or several functions.

    Args:
        functions: by names of the caller's choice.
        num_workers: processes; each has one sample at a time.
        sample_timeout_seconds: a sample that takes longer fails with STATUS_TIMED_OUT, and its process is replaced.
    """

    def __init__(
        self, functions: Mapping[str, FunctionSpec], *, num_workers: int = 2, sample_timeout_seconds: float = 5.0
    ):
        self._functions = dict(functions)
        self._num_workers = num_workers
        self._sample_timeout_seconds = sample_timeout_seconds
        self._lock = threading.Lock()
        self._host: _Host | None = None
        self._closed = False
        self.sources: dict[str, str | None] = {}

    def start(self) -> None:
        """Start the processes and load the functions in them. `sources` then has the hash of each one's file.

        Raises:
            ConfigError: a function cannot be loaded or its kwargs do not fit.
            RewardServerError: the processes did not start.
        """
        with self._lock:
            if self._host is None:
                self._host = self._launch()

    def submit(
        self, function: str, samples: Sequence[TextSample], on_sample: Callable[[], object] = lambda: None
    ) -> PendingScores:
        """Start scoring and return at once. Where the processes have ended, others are started.

        Args:
            function: one of the names; `PING` asks for nothing but an answer.
            samples: to be scored, each by itself.
            on_sample: called after each of them, on some thread.

        Returns:
            the scores to come; waiting for them raises where the processes could not be started again.
        """
        count = len(samples)
        scores = Scores(np.full(count, np.nan, np.float32), np.zeros(count, np.int32))
        batch = _Batch(function, scores, count, on_sample)
        if not samples:
            batch.future.set_result(scores)
            return PendingScores(batch.future, time.monotonic())
        with self._lock:
            try:
                under_way = self._running_host().add(batch, samples)
            except ReinforceError as error:  # one rank that raised here would leave the others waiting for it
                batch.future.set_exception(RewardServerError(str(error)))
                under_way = 0
        rounds = math.ceil(under_way / self._num_workers)
        seconds = rounds * (self._sample_timeout_seconds + REPLACE_SECONDS) + REPLACE_SECONDS
        return PendingScores(batch.future, time.monotonic() + seconds)

    def close(self) -> None:
        """End the processes; samples under way fail. Safe to call twice."""
        with self._lock:
            host, self._host, self._closed = self._host, None, True
        if host is not None:
            host.lines.put(None)
            host.child.stop(STOP_SECONDS)

    def _running_host(self) -> _Host:
        if self._closed or self._host is None:
            state = "is closed" if self._closed else "was not started"
            raise RewardServerError(f"the pool of reward functions {state}")
        if self._host.ended:
            logger.error("event=function_host_restarted exit_code=%s", self._host.process.returncode)
            self._host = self._launch()
        return self._host

    def _launch(self) -> _Host:
        environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # A session of its own: Ctrl-C is the owner's affair, whose end then ends the host.
        child = Child("reinforce_rl.reward.function_host", environment=environment, own_session=True)
        process = child.process
        assert process.stdout is not None
        settings = {
            "functions": {name: asdict(spec) for name, spec in self._functions.items()},
            "num_workers": self._num_workers,
            "sample_timeout_seconds": self._sample_timeout_seconds,
        }
        names = ", ".join(spec.name for spec in self._functions.values())
        late = threading.Timer(START_SECONDS, process.kill)
        late.daemon = True
        late.start()
        try:
            child.send(settings)
            line = process.stdout.readline()
        finally:
            late.cancel()
        if not line:
            raise RewardServerError(
                f"the processes of the reward function did not start within {START_SECONDS:.0f} s (exit code "
                f"{process.wait()}); what they said is above. Does the import of {names} end?"
            )
        answer = json.loads(line)
        if answer["faults"]:
            child.stop(STOP_SECONDS)
            raise ConfigError(answer["faults"])
        self.sources = answer["sources"]
        host = _Host(child)
        for name, work in (("write", host.write), ("read", host.read)):
            threading.Thread(target=work, daemon=True, name=f"reward-functions-{name}").start()
        return host
