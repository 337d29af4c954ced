"""What the trainer knows of a logger, and the logger that passes everything on to several others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, runtime_checkable

SUCCESS = "success"
FAILED = "failed"


@runtime_checkable
class MetricLogger(Protocol):
    """Takes the numbers of a run. The trainer calls it on rank 0 only, with steps that never go down."""

    def log_metrics(self, metrics: Mapping[str, float], step: int, prefix: str = "") -> None:
        """Take numbers of `step`; each is kept under `prefix + name`, e.g. `train/rewards`."""
        ...

    def log_table(self, key: str, rows: list[dict[str, Any]], step: int) -> None:
        """Take sample rows of `step`, all with the same keys, for back ends that can show tables."""
        ...

    def commit(self, step: int) -> None:
        """Every number of `step` has been given: store it so that it outlives a kill."""
        ...

    def finalize(self, status: str = SUCCESS) -> None:
        """The run is over: store what is left and close. `status` is "success" or "failed"."""
        ...


class Loggers:
    """Several loggers as one; an empty list logs nothing."""

    def __init__(self, loggers: Sequence[MetricLogger] = ()):
        self.loggers = tuple(loggers)

    def log_metrics(self, metrics: Mapping[str, float], step: int, prefix: str = "") -> None:
        for logger in self.loggers:
            logger.log_metrics(metrics, step, prefix)

    def log_table(self, key: str, rows: list[dict[str, Any]], step: int) -> None:
        for logger in self.loggers:
            logger.log_table(key, rows, step)

    def commit(self, step: int) -> None:
        for logger in self.loggers:
            logger.commit(step)

    def finalize(self, status: str = SUCCESS) -> None:
        """Close every logger, also after one of them failed to; a failure is raised at the end."""
        with ExitStack() as stack:
            for logger in reversed(self.loggers):
                stack.callback(logger.finalize, status)
