"""The scorer's progress in a shared file, and what /health and /metrics make of it.

The file holds float64 numbers, mapped by one writer and any readers. Aligned, so that reads never see half a number.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from reinforce_rl.reward_server.admission import Admission, FrontSettings
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
_COUNTS = ("busy", "beat", "batches", "requests", "tokens", "seconds")
_ARRAYS = (
    ("by_status", np.float64, len(base.STATUS_TEXT)),
    ("buckets", np.float64, len(SECONDS_BOUNDS) + 1),
)
_LAYOUT = np.dtype([*((name, np.float64) for name in _COUNTS), *_ARRAYS])


# Sends a JSON body to the model, past the queue; returns HTTP status and body.
Ask = Callable[[bytes], Awaitable[tuple[int, bytes]]]


@dataclass(frozen=True)
class Snapshot:
    """Counts since the start, including the server's own one-token samples."""

    busy: float  # batches that are being scored
    quiet_seconds: float  # since the last begin, beat or end
    batches: float
    requests: float
    tokens: float
    seconds: float  # spent in the scorer
    by_status: list[float]  # samples, indexed by STATUS_ constant
    buckets: list[float]  # batches per bin of SECONDS_BOUNDS, plus overflow; not cumulative

    @property
    def samples(self) -> float:
        return sum(self.by_status)

    @property
    def failed(self) -> float:
        """Samples without a reward."""
        return self.samples - self.by_status[base.STATUS_OK]

    def why_stuck(self, seconds: float) -> str | None:
        """Return an error text if one call has lasted longer than `seconds`, else None."""
        if not self.busy or self.quiet_seconds <= seconds:
            return None
        setting = f"inference.stuck_seconds is {seconds:g}"
        return f"the model has been in one call for {self.quiet_seconds:.0f} s ({setting})"


class Progress:
    """The scorer's counters in a file, written by the process that sets `create`; without a path, for itself only."""

    def __init__(self, path: Path | None = None, *, create: bool = False):
        self._writing = threading.Lock()
        mode = "w+" if create else "r"
        self._values = (
            np.zeros(1, _LAYOUT) if path is None else np.memmap(path, _LAYOUT, mode, shape=(1,))
        )
        if create or path is None:
            self.beat()

    def begin(self) -> None:
        self.beat()
        with self._writing:
            self._values["busy"] += 1

    def beat(self) -> None:
        """Mark that part of a batch was finished."""
        self._values["beat"] = time.monotonic()  # one clock for all processes of a machine

    def count(
        self, requests: int, by_status: Mapping[int, int], tokens: int, seconds: float
    ) -> None:
        """Count a scored batch; `by_status` are samples by STATUS_ constant, `tokens` those that the model saw."""
        values = self._values
        with self._writing:
            for name, amount in {
                "batches": 1,
                "requests": requests,
                "tokens": tokens,
                "seconds": seconds,
            }.items():
                values[name] += amount
            for status, samples in by_status.items():
                values["by_status"][0, status] += samples
            values["buckets"][0, np.searchsorted(SECONDS_BOUNDS, seconds)] += 1

    def end(self) -> None:
        self.beat()
        with self._writing:
            self._values["busy"] -= 1

    def read(self) -> Snapshot:
        busy, beat, *counts = (self._values[name][0].tolist() for name in _LAYOUT.names or ())
        return Snapshot(busy, max(0.0, time.monotonic() - beat), *counts)


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
        self, ask: Ask, answers: Callable[[], int], progress: Progress, settings: FrontSettings
    ):
        self._ask = ask
        self._answers = answers
        self._progress = progress
        self._canary = settings.canary.encode()
        self._stuck_seconds = settings.inference.stuck_seconds
        self._limit = min(settings.inference.canary_seconds, self._stuck_seconds)
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
        before = self._progress.read()
        if before.busy:
            return self._judge_busy(before)
        started = time.monotonic()
        answers = self._answers()
        try:
            code, body = await asyncio.wait_for(self._ask(self._canary), self._limit)
        except (asyncio.TimeoutError, TimeoutError):
            now = self._progress.read()
            if now.busy:
                return self._judge_busy(now)
            if self._answers() > answers:  # not `now.batches`, which also counts the canary itself
                return False, "busy: it answered other requests meanwhile"
            return True, f"a small sample had no answer within {self._limit:g} s"
        except OSError as error:
            return True, f"the model's side does not answer ({type(error).__name__})"
        if (fault := fault_of(code, body)) is not None:
            return True, fault
        self._canary_seconds = time.monotonic() - started
        return False, "a small sample was scored"

    def _judge_busy(self, found: Snapshot) -> tuple[bool, str]:
        if (why := found.why_stuck(self._stuck_seconds)) is not None:
            return True, f"stuck: {why}"
        return False, f"busy: the model has been in a call for {found.quiet_seconds:.1f} s"


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

    def __init__(self, admission: Admission, progress: Progress):
        self._progress = progress
        own = self._registry = CollectorRegistry()
        self._requests = Counter(
            "reward_server_requests", "Answered requests for scores", ["code"], registry=own
        )
        about = "From a request's headers to its answer, for those with scores"
        self._seconds = Histogram(
            "reward_server_request_seconds", about, buckets=SECONDS_BOUNDS, registry=own
        )
        self._samples = Counter(
            "reward_server_samples", "Samples of answered requests", registry=own
        )
        self._bytes = Counter(
            "reward_server_request_bytes", "Bytes of request bodies", registry=own
        )
        in_flight = Gauge(
            "reward_server_in_flight", "Requests that the model's side has", registry=own
        )
        in_flight.set_function(lambda: admission.in_flight)
        queued = Gauge("reward_server_queue_length", "Requests that wait for it", registry=own)
        queued.set_function(lambda: admission.queued)
        self._ready = Gauge(
            "reward_server_ready", "1 while the server takes requests", registry=own
        )
        own.register(self)

    def count(self, code: int, samples: int, size: int, seconds: float) -> None:
        self._requests.labels(str(code)).inc()
        self._bytes.inc(size)
        if code == 200:
            self._samples.inc(samples)
            self._seconds.observe(seconds)

    def text(self, *, ready: bool) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self._ready.set(ready)
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        now = self._progress.read()
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
