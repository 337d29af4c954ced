"""Reward functions, each sample in a process of its own and within limits: the owner's side.

`host.py` is the process that this one talks to, and says why there is one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np

from reinforce_rl.errors import ConfigError, ReinforceError, RewardServerError
from reinforce_rl.rewards import base
from reinforce_rl.rewards.base import TextSample
from reinforce_rl.rewards.function_process.loading import FunctionSpec
from reinforce_rl.rewards.function_process.sandbox import bubblewrap

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # a function's module may import much, on a busy machine
SLACK_SECONDS = 30.0  # of a busy machine, beyond the time limits of all samples
FORK_SECONDS = 1.0  # the same for each sample
STOP_SECONDS = 10.0
PING = ""  # stands for no function
# One thread a sample: each of them would take every core, and the trainer has its own.
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
# What a function may read of this process's environment, which has tokens and keys too.
VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "SSL_CERT_FILE")
VARIABLE_PREFIXES = ("LC_", "PYTHON")
# Keys of `reward_function` that are arguments of `FunctionPool`.
OPTIONS = ("num_workers", "sample_timeout_seconds", "sample_memory_mb", "environment", "sandbox")


@dataclass(frozen=True)
class Scores:
    """Of N samples.

    Attributes:
        values: float32 [N], NaN where a sample failed.
        status: int32 [N].
        faults: what went wrong and where, of failed samples by their row, without any text of theirs.
    """

    values: np.ndarray
    status: np.ndarray
    faults: dict[int, str] = field(default_factory=dict)


@dataclass
class _Batch:
    """Samples that were submitted together; once they are with a host, only the thread that reads from it is here."""

    function: str
    scores: Scores
    left: int
    on_sample: Callable[[], object]
    future: Future[Scores] = field(default_factory=Future)

    def take(self, row: int, status: int, value: float, fault: str) -> None:
        """The outcome of one sample."""
        scores = self.scores
        if status == base.STATUS_OK:
            with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused
                scores.values[row] = value
            if not np.isfinite(scores.values[row]):
                scores.values[row], status, fault = np.nan, base.STATUS_NOT_FINITE, "does not fit float32"
        scores.status[row] = status
        if fault:
            scores.faults[row] = f"{self.function}: {fault}"
        self.left -= 1
        self.on_sample()
        if self.left == 0:
            if scores.faults:
                faults = Counter(scores.faults.values())
                logger.warning("event=function_failed function=%s faults=%s", self.function, dict(faults))
            self.future.set_result(scores)


@dataclass(frozen=True)
class PendingScores:
    """Scores that are being computed."""

    future: Future[Scores]
    deadline: float  # of time.monotonic
    give_up: Callable[[], object] = lambda: None  # ends a host that hangs, so that the next request has another

    def result(self) -> Scores:
        """Wait for them.

        Raises:
            RewardServerError: the processes ended, or they took longer than all samples may together.
        """
        try:
            return self.future.result(max(0.0, self.deadline - time.monotonic()))
        except FutureTimeoutError:
            self.give_up()
            raise RewardServerError(
                "the processes of the reward function have not answered within the time that all of its samples may "
                "take together; is this machine overloaded, or was a process stopped?"
            ) from None


class _Host:
    """A running host process and the samples that it has."""

    def __init__(self, process: subprocess.Popen[bytes], requests: Connection, answers: Connection):
        self.process = process
        self.requests = requests
        self.answers = answers
        self.lock = threading.Lock()
        self.samples: dict[int, tuple[_Batch, int]] = {}
        self.next_id = 0
        self.ended = False
        self.waiting: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()

    def add(self, batch: _Batch, requests: Sequence[tuple[int, bytes]]) -> int:
        """Send the samples of these rows; how many are under way then.

        Raises:
            RewardServerError: the host has ended.
        """
        with self.lock:
            if self.ended:
                raise RewardServerError("the processes of the reward function have ended")
            for row, request in requests:
                self.samples[self.next_id] = (batch, row)
                self.waiting.put((self.next_id, request))
                self.next_id += 1
            return len(self.samples)

    def write(self) -> None:
        """Thread: to the host, which takes a sample when it has room for it."""
        with contextlib.suppress(OSError):
            while (sample := self.waiting.get()) is not None:
                self.requests.send(sample)

    def read(self) -> None:
        """Thread: the host's answers, until it ends."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                answer = json.loads(self.answers.recv_bytes())
                try:
                    self._take(answer)
                except Exception:  # nobody else reads: a host whose answers cannot be taken is of no use
                    logger.exception("event=function_host_fault")
                    self.kill()
                    break
        code = self.process.wait()
        with self.lock:
            self.ended = True
            waiting = {id(batch): batch for batch, _ in self.samples.values()}
            self.samples.clear()
        self.waiting.put(None)
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
        if answer["fault"]:
            logger.debug("event=function_failed fault=%s message=%s", answer["fault"], answer["message"])
        batch.take(row, answer["status"], answer["value"], answer["fault"])

    def show_output(self) -> None:
        """Thread: what the functions print. On a pipe their limit of a file's size does not count the log's."""
        assert self.process.stdout is not None
        while chunk := os.read(self.process.stdout.fileno(), 1 << 16):
            with contextlib.suppress(OSError):  # a full log must not hold up who prints
                os.write(2, chunk)

    def kill(self) -> None:
        """End the host and, in a sandbox, bubblewrap's processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class FunctionPool:
    """Scores samples by one or several functions, each sample in a process of its own.

    Args:
        functions: by names of the caller's choice.
        num_workers: processes at a time.
        sample_timeout_seconds: a sample that takes longer fails with STATUS_TIMED_OUT, and its process is killed.
        sample_memory_mb: MiB of address space for each process, besides what the functions' modules take.
        environment: names of variables that the functions may read besides `VARIABLES`.
        sandbox: in bubblewrap, without a network, other processes or files besides Python's.
    """

    def __init__(
        self,
        functions: Mapping[str, FunctionSpec],
        *,
        num_workers: int = 2,
        sample_timeout_seconds: float = 5.0,
        sample_memory_mb: int = 2048,
        environment: Sequence[str] = (),
        sandbox: bool = False,
    ):
        self._settings: dict[str, Any] = {
            "functions": dict(functions),
            "num_workers": num_workers,
            "sample_timeout_seconds": sample_timeout_seconds,
            "sample_memory_mb": sample_memory_mb,
        }
        self._names = {PING: "ping"} | {name: spec.name for name, spec in functions.items()}
        self._variables = {*VARIABLES, *environment}
        self._has_sandbox = sandbox
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
        batch = _Batch(self._names[function], scores, count, on_sample)
        if not samples:
            batch.future.set_result(scores)
        requests: list[tuple[int, bytes]] = []
        for row, sample in enumerate(samples):
            try:
                requests.append((row, _request(function, sample)))
            except (ValueError, TypeError, RecursionError) as error:
                batch.take(row, base.STATUS_BAD_PROMPT, math.nan, f"no JSON of its record ({type(error).__name__})")
        if not requests:
            return PendingScores(batch.future, time.monotonic())
        with self._lock:
            try:
                host = self._running_host()
                under_way = host.add(batch, requests)
            except ReinforceError as error:  # one rank that raised here would leave the others waiting for it
                batch.future.set_exception(RewardServerError(str(error)))
                return PendingScores(batch.future, time.monotonic())
        rounds = math.ceil(under_way / self._settings["num_workers"])
        seconds = rounds * (self._settings["sample_timeout_seconds"] + FORK_SECONDS) + SLACK_SECONDS
        return PendingScores(batch.future, time.monotonic() + seconds, host.kill)

    def close(self) -> None:
        """End the processes; samples under way fail. Safe to call twice."""
        with self._lock:
            host, self._host, self._closed = self._host, None, True
        if host is not None:
            _end(host)

    def _running_host(self) -> _Host:
        if self._closed or self._host is None:
            state = "is closed" if self._closed else "was not started"
            raise RewardServerError(f"the pool of reward functions {state}")
        if self._host.ended:
            logger.error("event=function_host_restarted exit_code=%s", self._host.process.returncode)
            self._host = self._launch()
        return self._host

    def _launch(self) -> _Host:
        places = [str(Path(__file__).resolve().parents[3]), *filter(None, sys.path)]
        kept = {k: v for k, v in os.environ.items() if k in self._variables or k.startswith(VARIABLE_PREFIXES)}
        (host_requests, requests), (answers, host_answers) = Pipe(duplex=False), Pipe(duplex=False)
        with host_requests, host_answers:
            ends = (host_requests.fileno(), host_answers.fileno())
            command = [sys.executable, "-m", "reinforce_rl.rewards.function_process.host", *map(str, ends)]
            # A session of its own: Ctrl-C is the owner's affair, whose end then ends the host.
            process = subprocess.Popen(
                [*bubblewrap(places), *command] if self._has_sandbox else command,
                stdin=subprocess.PIPE,  # its end is the host's
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**kept, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(places)},
                pass_fds=ends,
                start_new_session=True,
            )
        host = _Host(process, requests, answers)
        output, *others = (
            threading.Thread(target=work, daemon=True) for work in (host.show_output, host.write, host.read)
        )
        output.start()
        try:
            requests.send(self._settings)
            if not answers.poll(START_SECONDS):
                host.kill()
            found = json.loads(answers.recv_bytes())
        except (OSError, EOFError):
            code = process.wait()
            output.join(STOP_SECONDS)
            raise RewardServerError(
                f"the process of the reward function ended before it was ready (exit code {code}; it is killed after "
                f"{START_SECONDS:.0f} s); what it said is above. Does the import of "
                f"{', '.join(self._names[name] for name in self._settings['functions'])} end?"
            ) from None
        for thread in others:
            thread.start()
        if found["faults"]:
            _end(host)
            raise ConfigError(found["faults"])
        self.sources = found["sources"]
        return host


def _request(function: str, sample: TextSample) -> bytes:
    if function == PING:
        return b"{}"
    fields = {"prompt": sample.prompt, "response": sample.response, "record": dict(sample.record)}
    return json.dumps({"function": function, **fields}).encode()


def _end(host: _Host) -> None:
    """It ends by itself at the end of its input."""
    assert host.process.stdin is not None
    host.process.stdin.close()
    try:
        host.process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        host.kill()
        host.process.wait()
