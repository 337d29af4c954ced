"""Facade over progress, metric loggers, sample files and report: the trainer's `logger`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from reinforce_rl.errors import StoppedEarly
from reinforce_rl.monitoring.loggers import FAILED, SUCCESS, Loggers
from reinforce_rl.monitoring.metrics import RankSeconds, StragglerLines, slowest_of_phases, timing_metrics
from reinforce_rl.monitoring.progress import TrainingProgress
from reinforce_rl.monitoring.report import write_report
from reinforce_rl.monitoring.rollouts import Kind, RolloutRow, RolloutWriter
from reinforce_rl.runtime.status import StatusFile

TABLE_ROWS = 16  # validation samples sent to back ends that show tables


class RunMonitor:
    """Progress on the terminal, metrics to the loggers, samples to files, and the report.

    `straggler_factor`: ranks slower than this multiple of a phase's median are reported.
    """

    def __init__(
        self,
        folder: str | Path,
        metrics: Loggers,
        rollouts: RolloutWriter,
        progress: TrainingProgress,
        status: StatusFile | None = None,
        straggler_factor: float = 1.5,
    ):
        self._folder = Path(folder)
        self._metrics = metrics
        self._rollouts = rollouts
        self._progress = progress
        self._status = status
        self._stragglers = StragglerLines(straggler_factor)

    def phase(self, name: str) -> None:
        self._progress.phase(name)

    def note(self, text: str, *, transient: bool = False) -> None:
        self._progress.note(text, transient=transient)

    def log_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        timings: Mapping[str, float],
        rows: Sequence[RolloutRow],
        memory: Mapping[str, float],
    ) -> None:
        """Log metrics, samples, seconds and peak gigabytes per phase; `commit` stores the metrics."""
        self._metrics.log_metrics(metrics, step, "train/")
        self._metrics.log_metrics(timings, step, "timers/")
        self._metrics.log_metrics(memory, step, "memory/")
        self._write(step, rows, "rollouts")
        self._progress.update(step, metrics, timings)

    def log_ranks(self, step: int, ranks: Sequence[RankSeconds], step_seconds: float) -> None:
        """Log the slowest ranks of a training step; `ranks` may be empty."""
        found = slowest_of_phases(ranks)
        self._metrics.log_metrics(timing_metrics(found), step, "timing/")
        line = self._stragglers.line(step, found, step_seconds)
        if line is not None:
            self.note(line)

    def log_validation(self, step: int, metrics: Mapping[str, float], rows: Sequence[RolloutRow]) -> None:
        self._metrics.log_metrics(metrics, step, "val/")
        self._write(step, rows, "validation")
        self._metrics.log_table("validation", [dict(vars(row)) for row in rows[:TABLE_ROWS]], step)
        self._progress.validation(step, metrics)

    def log_test(self, step: int, metrics: Mapping[str, float], rows: Sequence[RolloutRow]) -> None:
        self._metrics.log_metrics(metrics, step, "test/")
        self._write(step, rows, "test")
        self._progress.validation(step, metrics, "test")

    def commit(self, step: int) -> None:
        """Force everything of this step, which is complete, to disk."""
        self._metrics.commit(step)
        if self._status is not None:
            self._status.progress(step, self._progress.total_steps)

    def report(self) -> Path:
        return write_report(self._folder.absolute())

    def _write(self, step: int, rows: Sequence[RolloutRow], kind: Kind) -> None:
        self._rollouts.write(step, rows, kind)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Wrap the whole run: restore the terminal and close the loggers on exit."""
        status = FAILED
        try:
            with self._progress:
                yield
            status = SUCCESS
        except StoppedEarly:
            status = SUCCESS
            raise
        finally:
            self._metrics.finalize(status)


class SilentMonitor(RunMonitor):
    """Monitor of every rank but the first: shows and writes nothing."""

    def __init__(self, folder: str | Path):
        super().__init__(folder, Loggers(), RolloutWriter(folder), TrainingProgress(0, enabled=False))

    def report(self) -> Path:
        return self._folder.absolute() / "report.html"

    def _write(self, step: int, rows: Sequence[RolloutRow], kind: Kind) -> None:
        pass
