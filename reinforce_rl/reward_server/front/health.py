"""Health and metrics of the reward server, from the scorer's progress and a sample of its own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from reinforce_rl.reward_server.front.admission import Admission
from reinforce_rl.reward_server.options import FrontLimits
from reinforce_rl.reward_server.progress import SECONDS_BOUNDS, Progress, Snapshot
from reinforce_rl.rewards import base, wire

CACHE_SECONDS = 1.0
STATUS_LABELS = {  # "ok", "empty", ...
    code: name.removeprefix("STATUS_").lower()
    for name, code in vars(base).items()
    if name.startswith("STATUS_") and isinstance(code, int)
}


@dataclass(frozen=True)
class Verdict:
    healthy: bool  # requests are being scored, or would be
    text: str  # the reason
    canary_seconds: float | None  # duration of the last good sample; None before the first


class Health:
    """Checks an idle model with one small sample, and a busy one by its progress.

    Args:
        ask: sends a JSON body to the model, past the queue; returns HTTP status and body.
        canary: the body to send.
        answers: returns the number of requests for scores answered so far.
    """

    def __init__(
        self,
        ask: Callable[[bytes], Awaitable[tuple[int, bytes]]],
        canary: bytes,
        answers: Callable[[], int],
        progress: Progress,
        limits: FrontLimits,
    ):
        self._ask = ask
        self._canary = canary
        self._answers = answers
        self._progress = progress
        self._limits = limits
        self._canary_seconds: float | None = None
        self._verdict: Verdict | None = None
        self._at = 0.0
        self._checking: asyncio.Task[Verdict] | None = None

    async def check(self) -> Verdict:
        """Return a verdict at most one second old. Concurrent callers share one check."""
        if self._verdict is not None and time.monotonic() - self._at < CACHE_SECONDS:
            return self._verdict
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check())
        return await asyncio.shield(self._checking)  # one caller's disconnect must not cancel it for the others

    async def _check(self) -> Verdict:
        fault, text = await self._look()
        self._verdict = Verdict(not fault, text, self._canary_seconds)
        self._at = time.monotonic()
        return self._verdict

    async def _look(self) -> tuple[bool, str]:
        before = self._progress.read()
        if before.busy:
            return self._judge_busy(before)
        started, answers = time.monotonic(), self._answers()
        try:
            code, body = await asyncio.wait_for(self._ask(self._canary), self._limits.canary_seconds)
        except (asyncio.TimeoutError, TimeoutError):
            now = self._progress.read()
            if now.busy:
                return self._judge_busy(now)
            if self._answers() > answers:  # not `now.batches`, which also counts the canary itself
                return False, "busy: it answered other requests meanwhile"
            return True, f"a small sample had no answer within {self._limits.canary_seconds:g} s"
        except OSError as error:
            return True, f"the model's side does not answer ({type(error).__name__})"
        fault = fault_of(code, body)
        if fault is not None:
            return True, fault
        self._canary_seconds = time.monotonic() - started
        return False, "a small sample was scored"

    def _judge_busy(self, found: Snapshot) -> tuple[bool, str]:
        why = found.why_stuck(self._limits.stuck_seconds)
        if why is not None:
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
    if status != base.STATUS_OK:
        return f"{sample} failed: {base.STATUS_TEXT.get(status, status)}"
    return None


class FrontMetrics:
    def __init__(self, admission: Admission, progress: Progress):
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "reward_server_requests", "Answered requests for scores", ["code"], registry=self._registry
        )
        self._seconds = Histogram(
            "reward_server_request_seconds",
            "From a request's headers to its answer, for those with scores",
            buckets=SECONDS_BOUNDS,
            registry=self._registry,
        )
        self._samples = Counter("reward_server_samples", "Samples of answered requests", registry=self._registry)
        self._bytes = Counter("reward_server_request_bytes", "Bytes of request bodies", registry=self._registry)
        in_flight = Gauge("reward_server_in_flight", "Requests that the model's side has", registry=self._registry)
        in_flight.set_function(lambda: admission.in_flight)
        queued = Gauge("reward_server_queue_length", "Requests that wait for it", registry=self._registry)
        queued.set_function(lambda: admission.queued)
        self._ready = Gauge("reward_server_ready", "1 while the server takes requests", registry=self._registry)
        self._registry.register(_ModelMetrics(progress))

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


class _ModelMetrics(Collector):
    """The scorer's own counts, including health's one-token samples."""

    def __init__(self, progress: Progress):
        self._progress = progress

    def collect(self) -> Iterator[Metric]:
        now = self._progress.read()
        yield CounterMetricFamily("reward_server_model_batches", "Batches that the model scored", value=now.batches)
        yield CounterMetricFamily("reward_server_model_tokens", "Tokens that the model scored", value=now.tokens)
        by_status = CounterMetricFamily(
            "reward_server_model_samples", "Samples by what became of them", labels=["status"]
        )
        for status, label in STATUS_LABELS.items():
            by_status.add_metric([label], now.by_status[status])
        yield by_status
        bounds = [*map(str, SECONDS_BOUNDS), "+Inf"]
        histogram = HistogramMetricFamily("reward_server_model_seconds", "Time of a batch in the model")
        histogram.add_metric([], list(zip(bounds, accumulate(now.seconds_buckets), strict=True)), now.seconds)
        yield histogram
