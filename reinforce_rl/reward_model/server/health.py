"""The scorer's progress in the server's process, and what /health and /metrics of the front door
make of it.

The front door asks for it over the connection of the two processes, one question for each check of
health and each page of metrics, and none for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from reinforce_rl.reward_model.server.admission import Admission, FrontSettings
from reinforce_rl.rewards import base, wire

SECONDS_BOUNDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
CACHE_SECONDS = 1.0
STATUS_LABELS = {  # "ok", "empty", ...
    code: name.removeprefix("STATUS_").lower()
    for name, code in vars(base).items()
    if name.startswith("STATUS_") and isinstance(code, int)
}
ANSWER_SECONDS = 1.0  # for the server's process to say how far its scorer is


# Sends a JSON body to the model, past the queue; returns HTTP status and body.
Ask = Callable[[bytes], Awaitable[tuple[int, bytes]]]


@dataclass(frozen=True)
class Snapshot:
    """Counts since the start, including the server's own one-token samples."""

    busy: int = 0  # batches that are being scored
    # when a batch last began, went on or ended, on the clock that a machine's processes share
    beat: float = field(default_factory=time.monotonic)
    batches: int = 0
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0  # spent in the scorer
    # samples, indexed by STATUS_ constant
    by_status: list[int] = field(default_factory=lambda: [0] * len(base.STATUS_TEXT))
    # batches per bin of SECONDS_BOUNDS, plus overflow; not cumulative
    buckets: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BOUNDS) + 1))

    @property
    def quiet_seconds(self) -> float:
        return max(0.0, time.monotonic() - self.beat)

    @property
    def samples(self) -> int:
        return sum(self.by_status)

    @property
    def failed(self) -> int:
        """Samples without a reward."""
        return self.samples - self.by_status[base.STATUS_OK]

    def why_stuck(self, seconds: float) -> str | None:
        """Return an error text if one call has lasted longer than `seconds`, else None."""
        quiet = self.quiet_seconds
        if not self.busy or quiet <= seconds:
            return None
        setting = f"inference.model_timeout_seconds is {seconds:g}"
        return f"the model has been in one call for {quiet:.0f} s ({setting})"


class Progress:
    """Counts what the scorer does; any thread may count and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Snapshot()

    def begin(self) -> None:
        with self._lock:
            self._now = replace(self._now, busy=self._now.busy + 1, beat=time.monotonic())

    def beat(self) -> None:
        """Mark that part of a batch was finished."""
        with self._lock:
            self._now = replace(self._now, beat=time.monotonic())

    def count(
        self, requests: int, by_status: Mapping[int, int], tokens: int, seconds: float
    ) -> None:
        """Count a scored batch: samples by STATUS_ constant, and the tokens that the model read."""
        with self._lock:
            before = self._now
            statuses = list(before.by_status)
            for status, samples in by_status.items():
                statuses[status] += samples
            buckets = list(before.buckets)
            buckets[bisect_left(SECONDS_BOUNDS, seconds)] += 1
            self._now = replace(
                before,
                batches=before.batches + 1,
                requests=before.requests + requests,
                tokens=before.tokens + tokens,
                seconds=before.seconds + seconds,
                by_status=statuses,
                buckets=buckets,
            )

    def end(self) -> None:
        with self._lock:
            self._now = replace(self._now, busy=self._now.busy - 1, beat=time.monotonic())

    def read(self) -> Snapshot:
        return self._now


class ProgressReader:
    """The scorer's progress as the front door knows it.

    Args:
        ask: sends the question to the server's process; its answer is given to `answer`.
    """

    def __init__(self, ask: Callable[[], None]):
        self._ask = ask
        self._last = Snapshot()
        self._answered: asyncio.Event | None = None
        self._asked_at = 0.0  # time of the last question

    @property
    def silent_seconds(self) -> float:
        """How long the last question has been without an answer; 0 if it has one."""
        if self._answered is None or self._answered.is_set():
            return 0.0
        return time.monotonic() - self._asked_at

    async def read(self) -> Snapshot:
        """Ask, and return the last answer: an older one if none came within ANSWER_SECONDS."""
        # Callers share a question: unread ones of a process that hangs would fill the connection.
        if self._answered is None or self._answered.is_set():
            self._answered = asyncio.Event()
            self._asked_at = time.monotonic()
            self._ask()
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(self._answered.wait(), ANSWER_SECONDS)
        return self._last

    def answer(self, values: Mapping[str, Any]) -> None:
        """Take the fields of a Snapshot, as they were sent."""
        self._last = Snapshot(**values)
        if self._answered is not None:
            self._answered.set()


@dataclass(frozen=True)
class Verdict:
    healthy: bool  # requests are being scored, or would be
    text: str  # the reason
    canary_seconds: float | None  # duration of the last good sample; None before the first


class Health:
    """Checks an idle model with one small sample, and a busy one by its progress.

    `answers` returns the number of requests for scores answered so far.
    """

    def __init__(
        self,
        ask: Ask,
        answers: Callable[[], int],
        progress: ProgressReader,
        settings: FrontSettings,
    ):
        self._ask = ask
        self._answers = answers
        self._progress = progress
        self._canary = settings.canary.encode()
        self._model_timeout_seconds = settings.inference.model_timeout_seconds
        self._limit = min(settings.inference.health_timeout_seconds, self._model_timeout_seconds)
        self._canary_seconds: float | None = None
        self._checked = 0.0  # when the last check ended
        self._checking: asyncio.Task[Verdict] | None = None

    async def check(self) -> Verdict:
        """Return a verdict at most one second old. Concurrent callers share one check."""
        is_old = time.monotonic() - self._checked >= CACHE_SECONDS
        if self._checking is None or (self._checking.done() and is_old):
            self._checking = asyncio.create_task(self._check())
        # one caller's disconnect must not cancel it for the others
        return await asyncio.shield(self._checking)

    async def _check(self) -> Verdict:
        fault, text = await self._look()
        self._checked = time.monotonic()
        return Verdict(not fault, text, self._canary_seconds)

    async def _look(self) -> tuple[bool, str]:
        judged = self._judge_progress(await self._progress.read())
        if judged is not None:
            return judged
        started = time.monotonic()
        answers = self._answers()
        try:
            code, body = await asyncio.wait_for(self._ask(self._canary), self._limit)
        except (asyncio.TimeoutError, TimeoutError):
            judged = self._judge_progress(await self._progress.read())
            if judged is not None:
                return judged
            # Not `Snapshot.batches`, which also counts the canary itself.
            if self._answers() > answers:
                return False, "busy: it answered other requests meanwhile"
            return True, f"a small sample had no answer within {self._limit:g} s"
        except OSError as error:
            return True, f"the model backend does not answer ({type(error).__name__})"
        if (fault := fault_of(code, body)) is not None:
            return True, fault
        self._canary_seconds = time.monotonic() - started
        return False, "a small sample was scored"

    def _judge_progress(self, last: Snapshot) -> tuple[bool, str] | None:
        """Judge a server's process that is silent or busy; return None if its scorer is idle."""
        if self._progress.silent_seconds:
            return self._judge_silent(last)
        return self._judge_busy(last) if last.busy else None

    def _judge_silent(self, last: Snapshot) -> tuple[bool, str]:
        """Judge a server's process that does not say what its scorer does, by its last answer."""
        silent_seconds = self._progress.silent_seconds
        if last.busy:
            limit = self._model_timeout_seconds
            setting = f"inference.model_timeout_seconds is {limit:g}"
        else:
            limit = self._limit
            setting = f"inference.health_timeout_seconds is {limit:g}"
        text = f"the server's process has been silent for {silent_seconds:.1f} s"
        if silent_seconds > limit:
            return True, f"stuck: {text} ({setting})"
        return False, text

    def _judge_busy(self, scored: Snapshot) -> tuple[bool, str]:
        if (why := scored.why_stuck(self._model_timeout_seconds)) is not None:
            return True, f"stuck: {why}"
        return False, f"busy: the model has been in a call for {scored.quiet_seconds:.1f} s"


def fault_of(code: int, body: bytes, sample: str = "a small sample") -> str | None:
    """Return what is wrong with the answer to a request of one sample; None if it has its score."""
    if code != 200:
        return f"{sample} was answered by HTTP {code}"
    try:
        outputs = {output["name"]: output["data"] for output in json.loads(body)["outputs"]}
        status = outputs[wire.STATUS][0]
    except (ValueError, KeyError, IndexError, TypeError):
        return f"{sample} got an answer outside the protocol"
    return (
        None
        if status == base.STATUS_OK
        else f"{sample} failed: {base.STATUS_TEXT.get(status, status)}"
    )


class FrontMetrics(Collector):
    """Counts of requests, and the scorer's own counts, which include health's one-token samples."""

    def __init__(self, admission: Admission):
        self._scored = Snapshot()
        registry = CollectorRegistry()
        self._registry = registry
        self._requests = Counter(
            "reward_server_requests", "Answered requests for scores", ["code"], registry=registry
        )
        about = "From a request's headers to its answer, for those with scores"
        self._seconds = Histogram(
            "reward_server_request_seconds", about, buckets=SECONDS_BOUNDS, registry=registry
        )
        self._samples = Counter(
            "reward_server_samples", "Samples of answered requests", registry=registry
        )
        self._bytes = Counter(
            "reward_server_request_bytes", "Bytes of request bodies", registry=registry
        )
        in_flight = Gauge(
            "reward_server_in_flight", "Requests in the model backend", registry=registry
        )
        in_flight.set_function(lambda: admission.in_flight)
        queued = Gauge("reward_server_queue_length", "Requests queued for it", registry=registry)
        queued.set_function(lambda: admission.queued)
        self._ready = Gauge(
            "reward_server_ready", "1 while the server takes requests", registry=registry
        )
        registry.register(self)

    def count(self, code: int, samples: int, size: int, seconds: float) -> None:
        self._requests.labels(str(code)).inc()
        self._bytes.inc(size)
        if code == 200:
            self._samples.inc(samples)
            self._seconds.observe(seconds)

    def text(self, scored: Snapshot, *, ready: bool) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self._scored = scored
        self._ready.set(ready)
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        now = self._scored
        yield CounterMetricFamily(
            "reward_server_model_batches", "Batches that the model scored", value=now.batches
        )
        yield CounterMetricFamily(
            "reward_server_model_tokens", "Tokens that the model scored", value=now.tokens
        )
        samples = CounterMetricFamily(
            "reward_server_model_samples", "Samples by their outcome", labels=["status"]
        )
        for status, label in STATUS_LABELS.items():
            samples.add_metric([label], now.by_status[status])
        yield samples
        bounds = [*map(str, SECONDS_BOUNDS), "+Inf"]
        histogram = HistogramMetricFamily(
            "reward_server_model_seconds", "Time of a batch in the model"
        )
        histogram.add_metric(
            [], list(zip(bounds, accumulate(now.buckets), strict=True)), now.seconds
        )
        yield histogram
