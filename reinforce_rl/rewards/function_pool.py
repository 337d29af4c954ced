"""Scores each sample with a reward function in a process of its own; `function_host.py` is the
other side.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.base import NOT_SET
from reinforce_rl.config.rewards import MoreFunctionConfig, RewardFunctionConfig, name_in_metrics
from reinforce_rl.errors import ConfigError, Fault, ReinforceError, RewardServerError
from reinforce_rl.rewards import base
from reinforce_rl.rewards.base import FunctionSpec, TextSample
from reinforce_rl.rewards.environment_pool import environment_faults
from reinforce_rl.rewards.source_class import source_class_faults
from reinforce_rl.rewards.user_code import START_SECONDS, STOP_SECONDS, UserCode
from reinforce_rl.utils.job_rank import is_first_rank
from reinforce_rl.utils.process import Message

logger = logging.getLogger(__name__)

SLACK_SECONDS = 30.0  # for a busy machine, beyond the time limits of all samples
FORK_SECONDS = 1.0  # slack per sample
PING = ""  # name that calls no function


@dataclass(frozen=True)
class Scores:
    values: np.ndarray  # float32 [N], NaN where a sample failed
    status: np.ndarray  # int32 [N]
    # what failed and where, by row, without the sample's text
    faults: dict[int, str] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)  # of errors, by row; may quote the sample


@dataclass
class PendingScores:
    """Samples submitted together.

    Once they are with a host, only its reader thread changes the scores.
    """

    function: str  # for messages
    scores: Scores
    left: int  # samples without an outcome
    on_sample: Callable[[], object]
    future: Future[Scores] = field(default_factory=Future)
    deadline: float = 0.0  # in time.monotonic
    host: _Host | None = None  # killed at the deadline, so that the next request gets a new one

    def take(self, row: int, status: int, value: float, fault: str, text: str = "") -> None:
        """Record the outcome of one sample; after the last one, complete the future."""
        scores = self.scores
        if status == base.STATUS_OK:
            with np.errstate(over="ignore"):  # overflow becomes inf, which is rejected below
                scores.values[row] = value
            if not np.isfinite(scores.values[row]):
                scores.values[row] = np.nan
                status = base.STATUS_NOT_FINITE
                fault = "does not fit float32"
        scores.status[row] = status
        if fault:
            scores.faults[row] = f"{self.function}: {fault}"
        if text:
            scores.texts[row] = text
        self.left -= 1
        self.on_sample()
        if self.left == 0:
            self.future.set_result(scores)

    def result(self) -> Scores:
        """Wait for the scores; raise RewardServerError if the processes ended or exceeded the time
        limit.
        """
        try:
            return self.future.result(max(0.0, self.deadline - time.monotonic()))
        except FutureTimeoutError:
            if self.host is not None:
                self.host.kill()
            raise RewardServerError(
                "the processes of the reward function did not answer within the time limit of all "
                "their samples; check whether this machine is overloaded or a process was stopped",
                key="reward_function.processes.no_answer",
            ) from None


class _Host(UserCode):
    def __init__(self, config: RewardFunctionConfig):
        super().__init__(
            "reinforce_rl.rewards.function_host",
            allowed=config.environment,
            sandbox="reward_function.sandbox" if config.sandbox else None,
        )
        self.ended = False
        self._lock = threading.Lock()
        self._samples: dict[int, tuple[PendingScores, int]] = {}
        self._next_id = 0
        self._waiting: queue.SimpleQueue[tuple[int, bytes, float] | None] = queue.SimpleQueue()

    def load(self, settings: Mapping[str, Any]) -> Message | None:
        """Load the functions in the process; return faults and sources, or None if it ended."""
        answer = super().load(settings)
        if answer is not None:
            threading.Thread(target=self._write, daemon=True).start()
            self.listen(self._on_message)
        return answer

    def add(
        self, batch: PendingScores, requests: Sequence[tuple[int, bytes]], seconds: float
    ) -> int:
        """Queue these rows' samples, each with a limit of `seconds`, and return the number in
        flight; raise RewardServerError if the host has ended.
        """
        with self._lock:
            if self.ended:
                raise RewardServerError(
                    "the processes of the reward function have ended",
                    key="reward_function.processes.ended",
                )
            for row, request in requests:
                self._samples[self._next_id] = (batch, row)
                self._waiting.put((self._next_id, request, seconds))
                self._next_id += 1
            return len(self._samples)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (sample := self._waiting.get()) is not None:
                self.connection.send(sample)

    def _on_message(self, message: Message | None) -> None:
        if message is None:
            self._fail_batches(self.wait())
            return
        try:
            with self._lock:
                batch, row = self._samples.pop(message["id"])
            fault = message["fault"]
            if fault:
                logger.debug("event=function_failed fault=%s message=%s", fault, message["message"])
            batch.take(row, message["status"], message["value"], fault, message["message"])
        except Exception:  # the only reader: without it the host is useless
            logger.exception("event=function_host_fault")
            self.kill()

    def _fail_batches(self, code: int | None) -> None:
        with self._lock:
            self.ended = True
            batches = {id(batch): batch for batch, _ in self._samples.values()}
            self._samples.clear()
        self._waiting.put(None)
        for batch in batches.values():
            error = RewardServerError(
                f"the processes of the reward function ended with {batch.left} samples under way "
                f"(exit code {code}); see the log, and whether the machine ran out of memory",
                key="reward_function.processes.ended_under_way",
            )
            batch.future.set_exception(error)


class FunctionPool:
    """Scores samples with functions, by names of the caller's choice, each sample in a process of
    its own.

    The host process gets the environment variables in `VARIABLES` and `config.environment`, and no
    others.
    """

    def __init__(self, functions: Mapping[str, FunctionSpec], config: RewardFunctionConfig):
        self._functions = dict(functions)
        self._config = config
        self._names = {PING: "ping"} | {name: spec.name for name, spec in functions.items()}
        self._lock = threading.Lock()
        self._host: _Host | None = None
        self._closed = False
        self._declared_seconds: dict[str, float] = {}  # by function, set with the host
        self.sources: dict[str, str | None] = {}

    def start(self) -> None:
        """Start the processes and load the functions; fills `sources` with the SHA-256 of each
        function's file.

        Raises ConfigError if a function cannot be loaded or its kwargs do not fit,
        RewardServerError if no process could be started.
        """
        with self._lock:
            if self._host is None:
                self._host = self._launch()

    def submit(
        self,
        function: str,
        samples: Sequence[TextSample],
        on_sample: Callable[[], object] = lambda: None,
    ) -> PendingScores:
        """Start scoring and return at once; restarts the processes if they ended (if that fails,
        `result` raises).

        `function` is a name in the pool, or `PING`, which only asks for an answer; `on_sample` is
        called after each sample, on any thread.
        """
        count = len(samples)
        scores = Scores(np.full(count, np.nan, np.float32), np.zeros(count, np.int32))
        pending = PendingScores(self._names[function], scores, count, on_sample)
        if not samples:
            pending.future.set_result(scores)
        requests: list[tuple[int, bytes]] = []
        for row, sample in enumerate(samples):
            try:
                requests.append((row, _request(function, sample)))
            except (ValueError, TypeError, RecursionError) as error:
                pending.take(
                    row,
                    base.STATUS_BAD_PROMPT,
                    math.nan,
                    f"no JSON of its record ({type(error).__name__})",
                )
        if requests:
            with self._lock:
                try:
                    pending.host = self._running_host()
                    in_flight = pending.host.add(pending, requests, self.seconds_of(function))
                    rounds = math.ceil(in_flight / self._config.num_workers)
                    # The samples in flight may be of any function.
                    longest = max(map(self.seconds_of, self._names))
                    seconds = rounds * (longest + FORK_SECONDS) + SLACK_SECONDS
                    pending.deadline = time.monotonic() + seconds
                except ReinforceError as error:
                    # raising on one rank would leave the others waiting
                    failure = RewardServerError(str(error), key=error.key)
                    pending.future.set_exception(failure)
        return pending

    def close(self) -> None:
        """End the processes; samples in flight fail. Safe to call twice."""
        with self._lock:
            host = self._host
            self._host = None
            self._closed = True
        if host is not None:
            host.stop(STOP_SECONDS)

    def seconds_of(self, function: str) -> float:
        """Return the limit of one sample of a function, or of a ping."""
        configured = self._config.sample_timeout_seconds
        if configured is not None:
            return configured
        return self._declared_seconds.get(function, base.SAMPLE_SECONDS)

    def _running_host(self) -> _Host:
        if self._closed:
            raise RewardServerError(
                "the pool of reward functions is closed",
                key="reward_function.processes.closed",
            )
        if self._host is None:
            raise RewardServerError(
                "the pool of reward functions was not started",
                key="reward_function.processes.not_started",
            )
        if self._host.ended:
            logger.error("event=function_host_restarted exit_code=%s", self._host.exit_code)
            self._host = self._launch()
        return self._host

    def _launch(self) -> _Host:
        host = _Host(self._config)
        limits = self._config.model_dump(include={"num_workers", "sample_memory_mb"})
        answer = host.load({"functions": self._functions, **limits})
        if answer is None:
            raise RewardServerError(
                "the process of the reward function ended before it was ready (exit code "
                f"{host.exit_code}; it is killed after {START_SECONDS:.0f} s); its output is "
                "above. Check that the import of "
                f"{', '.join(spec.name for spec in self._functions.values())} ends",
                key="reward_function.processes.not_ready",
            )
        if answer["faults"]:
            host.stop(STOP_SECONDS)
            faults = [Fault(sentence, key=key) for sentence, key in answer["faults"]]
            raise ConfigError(faults)
        self.sources = answer["sources"]
        self._declared_seconds = answer["seconds"]
        return host


def named_functions(
    sections: Mapping[str, RewardFunctionConfig | MoreFunctionConfig],
) -> dict[str, tuple[FunctionSpec, float]]:
    """Return the functions of sections and their weights, by the name used in logs."""
    functions: dict[str, tuple[FunctionSpec, float]] = {}
    for setting, section in sections.items():
        if section.name is not None:
            spec = FunctionSpec(setting, section.name, section.kwargs)
            functions[name_in_metrics(setting, section)] = (spec, section.weight)
    return functions


def with_user_code(cfg: TrainConfig, faults: Sequence[str]) -> TrainConfig:
    """Return the configuration; raise ConfigError if it has faults, or if its reward functions or
    its environment cannot be loaded.
    """
    faults = [*faults, *function_faults(cfg), *environment_faults(cfg.environment)]
    if faults:
        raise ConfigError(faults)
    return cfg


def function_faults(cfg: TrainConfig, *, here: bool = True) -> list[str]:
    """Load the functions on rank 0 in a process of their own, and a class of one's own here; return
    why not.

    The functions are loaded in the sandbox if they run `here`.
    """
    if not is_first_rank():
        return []
    faults = source_class_faults(cfg)
    section = cfg.reward_function
    named = named_functions(cfg.reward_functions).items()
    specs = {name: spec for name, (spec, _) in named if spec.name != NOT_SET}
    if not specs:
        return faults
    # The limits are those of samples, and may be wrong themselves.
    config = RewardFunctionConfig(environment=section.environment, sandbox=section.sandbox and here)
    try:
        with contextlib.closing(FunctionPool(specs, config)) as pool:
            pool.start()
    except ConfigError as error:
        faults += error.faults
    except ReinforceError as error:
        faults.append(Fault(str(error), key=error.key))
    return faults


def _request(function: str, sample: TextSample) -> bytes:
    if function == PING:
        return b"{}"
    record = (
        {"messages": sample.messages, **sample.record} if sample.messages else dict(sample.record)
    )
    fields = {"prompt": sample.prompt, "response": sample.response, "record": record}
    return json.dumps({"function": function, **fields}).encode()
