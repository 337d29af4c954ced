"""All that a run shows and writes down, behind one door: the trainer's `logger`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from reinforce_rl.errors import StoppedEarly
from reinforce_rl.monitoring.loggers import FAILED, SUCCESS, Loggers
from reinforce_rl.monitoring.progress import TrainingProgress
from reinforce_rl.monitoring.report import write_report
from reinforce_rl.monitoring.rollouts import RolloutRow, RolloutWriter
from reinforce_rl.monitoring.stragglers import RankSeconds, StragglerLines, slowest_of_phases, timing_metrics
from reinforce_rl.runtime.status import StatusFile

TABLE_ROWS = 16  # samples of a validation that go to back ends which show tables


class RunMonitor:
    """Progress on the terminal, metrics to the loggers, samples to files, and the report.

    Args:
        folder: of the run.
        metrics: where numbers go.
        rollouts: where samples go.
        progress: what people see.
        status: what launchers see.
        straggler_factor: a rank that takes so many times the median of a phase is named.
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
        """Say what the run does from now on."""
        self._progress.phase(name)

    def note(self, text: str, *, transient: bool = False) -> None:
        """Tell people something."""
        self._progress.note(text, transient=transient)

    def log_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        timings: Mapping[str, float],
        rows: Sequence[RolloutRow],
        memory: Mapping[str, float],
    ) -> None:
        """A training step: its numbers, seconds and peak gigabytes of each phase, and samples.

        The numbers are stored by `commit`.
        """
        self._metrics.log_metrics(metrics, step, "train/")
        self._metrics.log_metrics(timings, step, "timers/")
        self._metrics.log_metrics(memory, step, "memory/")
        self._rollouts.write(step, rows)
        self._progress.update(step, metrics, timings)

    def log_ranks(self, step: int, ranks: Sequence[RankSeconds], step_seconds: float) -> None:
        """What each rank did in a training step; no ranks, nothing."""
        found = slowest_of_phases(ranks)
        self._metrics.log_metrics(timing_metrics(found), step, "timing/")
        line = self._stragglers.line(step, found, step_seconds)
        if line is not None:
            self.note(line)

    def log_validation(self, step: int, metrics: Mapping[str, float], rows: Sequence[RolloutRow]) -> None:
        """A validation after `step`."""
        self._metrics.log_metrics(metrics, step, "val/")
        self._rollouts.write(step, rows, "validation")
        self._metrics.log_table("validation", [dict(vars(row)) for row in rows[:TABLE_ROWS]], step)
        self._progress.validation(step, metrics)

    def log_test(self, step: int, metrics: Mapping[str, float], rows: Sequence[RolloutRow]) -> None:
        """The test set, after the last step."""
        self._metrics.log_metrics(metrics, step, "test/")
        self._rollouts.write(step, rows, "test")
        self._progress.validation(step, metrics, "test")

    def commit(self, step: int) -> None:
        """Everything of this step is known: force it to disk."""
        self._metrics.commit(step)
        if self._status is not None:
            self._status.progress(step, self._progress.total_steps)

    def report(self) -> Path:
        """Write the report of what there is so far."""
        return write_report(self._folder, self._folder.absolute() / "report.html")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the whole run: the terminal is given back and the loggers are closed however it ends."""
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
    """For every rank but the first: shows nothing and writes nothing."""

    def __init__(self, folder: str | Path):
        super().__init__(folder, Loggers(), RolloutWriter(folder), TrainingProgress(0, enabled=False))

    def log_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        timings: Mapping[str, float],
        rows: Sequence[RolloutRow],
        memory: Mapping[str, float],
    ) -> None:
        pass

    def log_validation(self, step: int, metrics: Mapping[str, float], rows: Sequence[RolloutRow]) -> None:
        pass

    def log_test(self, step: int, metrics: Mapping[str, float], rows: Sequence[RolloutRow]) -> None:
        pass

    def report(self) -> Path:
        return self._folder.absolute() / "report.html"
