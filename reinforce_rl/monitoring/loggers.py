"""Metric loggers: `metrics.jsonl`, several loggers as one, and a logger in a separate thread.

`backends.py` has the loggers of other libraries.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from reinforce_rl.errors import DataError
from reinforce_rl.utils.files import (
    append,
    encode,
    json_line,
    plain_number,
    read_json_lines,
    write_json_lines,
)

METRICS_FILE = "metrics.jsonl"
SUCCESS = "success"
FAILED = "failed"
Level = Literal["INFO", "WARN", "ERROR"]

QUEUED_CALLS = 1000  # maximum of calls that wait for a back end; later calls are dropped
CALL_SECONDS = 120.0  # a longer call counts as hanging
CLOSE_SECONDS = 60.0  # for the waiting calls at the end of the run


class MetricLogger:
    """A back end of metrics, called on rank 0 only, with non-decreasing steps.

    A subclass overrides the methods of everything that it stores.
    """

    def begin(self) -> None:
        """Prepare for the first step, after all checks of a start have passed."""
        self._pass_on("begin")

    def log_metrics(self, metrics: Mapping[str, float], step: int, prefix: str = "") -> None:
        """Log numbers of `step` under `prefix + name`, e.g. `train/rewards`."""
        self._pass_on("log_metrics", dict(metrics), step, prefix)

    def log_table(self, key: str, rows: list[dict[str, Any]], step: int) -> None:
        """Log sample rows of `step`, all with the same keys."""
        self._pass_on("log_table", key, rows, step)

    def alert(self, title: str, text: str, step: int, level: Level = "WARN") -> None:
        """Notify a person, if the back end can."""
        self._pass_on("alert", title, text, step, level)

    def commit(self, step: int) -> None:
        """Store the complete `step`, so that it survives a kill."""
        self._pass_on("commit", step)

    def finalize(self, status: str = SUCCESS) -> None:
        """Store everything that is pending, and close. `status` is "success" or "failed"."""

    def _pass_on(self, method: str, *args: Any) -> None:
        """Handle a call that is not overridden; a back end ignores it."""


class Loggers(MetricLogger):
    def __init__(self, loggers: Sequence[MetricLogger] = ()):
        self.loggers = tuple(loggers)

    def _pass_on(self, method: str, *args: Any) -> None:
        for logger in self.loggers:
            getattr(logger, method)(*args)

    def finalize(self, status: str = SUCCESS) -> None:
        """Close every logger even if one fails; raise the failure at the end."""
        with ExitStack() as stack:
            for logger in reversed(self.loggers):
                stack.callback(logger.finalize, status)


class BackgroundLogger(MetricLogger):
    """Run a back end in a separate thread, so that it can neither stop nor delay a run.

    Calls go through a bounded queue. A back end is called again after a failed call, but not after
    a failed start. Only the first failure is reported.

    Args:
        name: name of the back end in the message.
        start: makes the back end, in the thread.
        tell: shows the message.
    """

    def __init__(self, name: str, start: Callable[[], MetricLogger], tell: Callable[[str], None]):
        self._name = name
        self._start = start
        self._tell = tell
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(QUEUED_CALLS)
        self._busy_since: float | None = time.monotonic()  # None between calls
        self._has_reported = False
        self._thread = threading.Thread(target=self._work, name=f"{name} logger", daemon=True)
        self._thread.start()

    def finalize(self, status: str = SUCCESS) -> None:
        """Close within `CLOSE_SECONDS`, or leave a hanging back end behind."""
        deadline = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(queue.Full):
            if self._thread.is_alive():
                self._calls.put(("finalize", (status,)), timeout=CLOSE_SECONDS)
            self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._fail(f"did not end within {CLOSE_SECONDS:.0f} s and was abandoned")

    def _pass_on(self, method: str, *args: Any) -> None:
        if not self._thread.is_alive():
            return
        since = self._busy_since
        if since is not None and time.monotonic() - since > CALL_SECONDS:
            self._fail(f"has been in one call for {time.monotonic() - since:.0f} s")
        try:
            self._calls.put_nowait((method, args))
        except queue.Full:
            self._fail(
                f"is too slow: {QUEUED_CALLS} calls are queued, and further ones are dropped"
            )

    def _work(self) -> None:
        logger = None
        method = ""
        while method != "finalize":
            try:
                if logger is None:
                    logger = self._start()
                self._busy_since = None
                method, args = self._calls.get()
                self._busy_since = time.monotonic()
                getattr(logger, method)(*args)
            except BaseException as error:  # libraries may raise SystemExit
                self._fail(f"failed ({type(error).__name__}: {str(error).strip()})")
                if logger is None:
                    return

    def _fail(self, failure: str) -> None:
        if not self._has_reported:
            self._has_reported = True
            self._tell(
                f"logger {self._name}: {failure}. The run continues; metrics.jsonl is complete. "
                "This is reported once"
            )


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a `metrics.jsonl`, one dict per step in file order; NaN and infinity become None.

    An incomplete last line (a killed or running process) is skipped.

    Raises:
        DataError: the file is missing, or a complete line is not a JSON object with an integer
            `step`.
    """
    path = Path(path)
    try:
        records = read_json_lines(path, within=path.parent)
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no such file; expected the metrics.jsonl of a run",
            key="metrics.file.missing",
        ) from error
    for number, record in enumerate(records, 1):
        step = record.get("step")
        if not isinstance(step, int):
            raise DataError(
                f"{path}, line {number}: found step={step!r}, expected an integer",
                key="metrics.line.invalid",
            )
    return records


class JsonlLogger(MetricLogger):
    """Merges all metrics of a step into one line, plus `time` (unix seconds), appended at `commit`.

    Args:
        resume_step: step of the checkpoint to resume from, 0 to restart from scratch: later lines
            and a partial last line are dropped. None for a new run.

    Raises:
        DataError: `resume_step` is None and the file already holds metrics, or a line of it cannot
            be read.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None):
        self.path = Path(path)
        self._pending: dict[int, dict[str, Any]] = {}
        self._last_step = -1
        records = read_metrics(self.path) if self.path.exists() else []
        if records and resume_step is None:
            raise DataError(
                f"{self.path} already holds metrics up to step {records[-1]['step']}, and this is "
                "a new run; choose another run folder, or resume that run",
                key="metrics.file.of_another_run",
            )
        # The file is cut when the first step is written: a refused start changes nothing.
        self._kept: list[dict[str, Any]] | None = None
        if self.path.exists():
            self._kept = [record for record in records if record["step"] <= (resume_step or 0)]
            self._last_step = max((record["step"] for record in self._kept), default=-1)

    def begin(self) -> None:
        """Drop lines of later steps; `commit` does the same."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = self._kept
        self._kept = None
        if kept is not None:
            write_json_lines(self.path, kept)

    def log_metrics(self, metrics: Mapping[str, float], step: int, prefix: str = "") -> None:
        """Buffer numbers until `commit(step)`; the last value of a name wins."""
        line = self._pending.setdefault(step, {})
        line.update({prefix + name: plain_number(value) for name, value in metrics.items()})

    def commit(self, step: int) -> None:
        """Append the line of `step` and fsync; merge if the file already has that step."""
        if step not in self._pending:
            return
        self.begin()
        record = {"step": step, "time": time.time(), **self._pending.pop(step)}
        if step <= self._last_step:
            by_step = {old["step"]: old for old in read_metrics(self.path)}
            by_step[step] = by_step.get(step, {}) | record
            write_json_lines(self.path, [by_step[number] for number in sorted(by_step)])
            return
        append(self.path, encode(json_line(record)))
        self._last_step = step

    def finalize(self, status: str = SUCCESS) -> None:
        """Write steps that were not committed: after an error they show the run's last steps."""
        for step in sorted(self._pending):
            self.commit(step)
