"""Facade over progress, metric loggers, sample files and report: the trainer's `logger`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from reinforce_rl.errors import DivergedError, StoppedEarly
from reinforce_rl.monitoring.loggers import FAILED, SUCCESS, Loggers
from reinforce_rl.monitoring.metrics import RankSeconds, slowest_of_phases, timing_metrics
from reinforce_rl.monitoring.progress import TrainingProgress
from reinforce_rl.monitoring.records import Kind, RolloutWriter, Samples, rollout_files, worst_tokens
from reinforce_rl.monitoring.report import write_report
from reinforce_rl.monitoring.run_folder import GAP, alerts_of
from reinforce_rl.runtime.status import StatusFile

TABLE_ROWS = 16  # samples sent to back ends that show tables
_TOKEN = "prompt {} sample {} token {} {} after {}: {:.2f} by the trainer, {:.2f} by the generator"
REPEAT_STEPS = 10  # what stays wrong is said again after this many steps


class RunMonitor:
    """Progress on the terminal, metrics to the loggers, samples to files, and the report.

    Args:
        straggler_factor: ranks slower than this multiple of a phase's median are reported.
        table_interval: steps between tables of training samples for the loggers; 0 for none.
        tokens_every: `exp_manager.record_tokens_every`.
        first_reward: mean reward of the first step of a run that goes on; NaN if there is none yet.
    """

    def __init__(
        self,
        folder: str | Path,
        metrics: Loggers,
        rollouts: RolloutWriter,
        progress: TrainingProgress,
        status: StatusFile | None = None,
        straggler_factor: float = 1.5,
        table_interval: int = 0,
        tokens_every: int = 0,
        first_reward: float = math.nan,
    ):
        self._folder, self._metrics, self._rollouts = Path(folder), metrics, rollouts
        self._progress, self._status = progress, status
        self._straggler_factor, self._table_interval, self._tokens_every = (
            straggler_factor,
            table_interval,
            tokens_every,
        )
        self._step, self._line = 0, dict[str, float]()  # the current step's metrics, as in metrics.jsonl
        self._first_reward = first_reward
        self._said: dict[str, int] = {}  # last step by what was wrong

    def phase(self, name: str) -> None:
        self._progress.phase(name)

    def note(self, text: str, *, transient: bool = False) -> None:
        self._progress.note(text, transient=transient)

    def log_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        timings: Mapping[str, float],
        samples: Samples,
        memory: Mapping[str, float],
    ) -> None:
        """Log metrics, samples, seconds and peak gigabytes per phase; `commit` stores the metrics."""
        self._log(metrics, step, "train/")
        self._log(timings, step, "timers/")
        self._log(memory, step, "memory/")
        self._write(step, samples, "rollouts")
        if self._table_interval and (step - 1) % self._table_interval == 0:
            self._log_table("rollouts", samples, step)
        self._progress.update(step, metrics, timings)

    def log_ranks(self, step: int, ranks: Sequence[RankSeconds], step_seconds: float) -> None:
        """Log the slowest ranks of a training step, and tell those that stand out; `ranks` may be empty."""
        found = slowest_of_phases(ranks)
        self._log(timing_metrics(found), step, "timing/")
        slow = [one for one in found if one.stands_out(self._straggler_factor, step_seconds)]
        if new := [str(one) for one in slow if self._is_due(f"{one.phase} on rank {one.rank}", step)]:
            self.note("straggler: " + "; ".join(new))

    def records_tokens(self, step: int) -> bool:
        """Return whether the samples of `step` are recorded with their tokens; the same on every rank."""
        return self._tokens_every > 0 and step % self._tokens_every == 0

    def log_validation(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        self._metrics.log_metrics(metrics, step, "val/")
        self._write(step, samples, "validation")
        self._log_table("validation", samples, step)
        self._progress.validation(step, metrics)

    def log_test(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        self._metrics.log_metrics(metrics, step, "test/")
        self._write(step, samples, "test")
        self._progress.validation(step, metrics, "test")

    def commit(self, step: int) -> None:
        """Force everything of this step, which is complete, to disk; send what is wrong in it as alerts."""
        if math.isnan(self._first_reward):
            self._first_reward = self._line.get("train/rewards", math.nan)
        for title, text in alerts_of(self._line, self._straggler_factor, self._first_reward):
            if self._is_due(title, step):
                path = rollout_files(self._folder).get(step) if title == GAP and self._progress.enabled else None
                if path is not None:
                    text = "; ".join([text, *(_TOKEN.format(*one) for one in worst_tokens(path, 3))])
                    self.note(f"warning: step {step}: {text}")
                self._metrics.alert(title, text, step)
        self._line = {}
        self._metrics.commit(step)
        if self._status is not None:
            self._status.progress(step, self._progress.total_steps)

    def _is_due(self, what: str, step: int) -> bool:
        is_due = step >= self._said.get(what, -REPEAT_STEPS) + REPEAT_STEPS
        if is_due:
            self._said[what] = step
        return is_due

    def report(self) -> Path:
        return write_report(self._folder.absolute(), has_ended=True)

    def _log(self, metrics: Mapping[str, float], step: int, prefix: str) -> None:
        self._step = step
        self._line |= {prefix + name: float(value) for name, value in metrics.items()}
        self._metrics.log_metrics(metrics, step, prefix)

    def _log_table(self, key: str, samples: Samples, step: int) -> None:
        rows = []
        for row in samples.rows[:TABLE_ROWS]:
            cells = row.as_json()
            scores = cells.pop("source_rewards")
            rows.append(cells | {f"reward_{name}": score for name, score in scores.items()})
        self._metrics.log_table(key, rows, step)

    def _write(self, step: int, samples: Samples, kind: Kind) -> None:
        self._rollouts.write(step, samples, kind)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Wrap the whole run: restore the terminal and close the loggers on exit."""
        status = FAILED
        try:
            with self._progress:
                yield
            status = SUCCESS
        except StoppedEarly as error:
            status = SUCCESS
            self._metrics.alert("stopped", str(error), self._step, "INFO")
            raise
        except BaseException as error:
            title = "diverged" if isinstance(error, DivergedError) else "failed"
            self._metrics.alert(title, f"{type(error).__name__}: {error}", self._step, "ERROR")
            raise
        finally:
            self._metrics.finalize(status)


class SilentMonitor(RunMonitor):
    """Monitor of every rank but the first: shows and writes nothing."""

    def __init__(self, folder: str | Path, tokens_every: int = 0):
        progress = TrainingProgress(0, enabled=False)
        super().__init__(folder, Loggers(), RolloutWriter(folder), progress, tokens_every=tokens_every)

    def report(self) -> Path:
        return self._folder.absolute() / "report.html"

    def _write(self, step: int, samples: Samples, kind: Kind) -> None:
        pass
