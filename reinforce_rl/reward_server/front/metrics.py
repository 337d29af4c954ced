"""The reward server's numbers in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from reinforce_rl.reward_server.front.admission import Gate
from reinforce_rl.reward_server.progress import SECONDS_BOUNDS, Progress
from reinforce_rl.rewards import base

CONTENT_TYPE = CONTENT_TYPE_LATEST
STATUS_LABELS = {  # "ok", "empty", ...
    code: name.removeprefix("STATUS_").lower()
    for name, code in vars(base).items()
    if name.startswith("STATUS_") and isinstance(code, int)
}


class FrontMetrics:
    """Metrics of a registry of its own.

    Args:
        gate: for the queue.
        progress: the scorer's counts.
    """

    def __init__(self, gate: Gate, progress: Progress):
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
        in_flight.set_function(lambda: gate.in_flight)
        queued = Gauge("reward_server_queue_length", "Requests that wait for it", registry=self._registry)
        queued.set_function(lambda: gate.queued)
        self._ready = Gauge("reward_server_ready", "1 while the server takes requests", registry=self._registry)
        self._registry.register(_ModelMetrics(progress))

    def count(self, code: int, samples: int, size: int, seconds: float) -> None:
        """One answered request for scores."""
        self._requests.labels(str(code)).inc()
        self._bytes.inc(size)
        if code == 200:
            self._samples.inc(samples)
            self._seconds.observe(seconds)

    def text(self, *, ready: bool) -> bytes:
        """What a scraper gets."""
        self._ready.set(ready)
        return generate_latest(self._registry)


class _ModelMetrics(Collector):
    """The scorer's own counts; its samples of one token for health are among them."""

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
