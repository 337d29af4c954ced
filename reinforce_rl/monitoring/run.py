"""Facade over progress, metric loggers, sample files and report: the trainer's `logger`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reinforce_rl.errors import DivergedError, StoppedEarly
from reinforce_rl.monitoring.alerts import AlertRules, is_training
from reinforce_rl.monitoring.loggers import FAILED, SUCCESS, Loggers
from reinforce_rl.monitoring.progress import TrainingProgress
from reinforce_rl.monitoring.records import (
    Kind,
    Samples,
    rollout_files,
    worst_tokens,
    write_samples,
)
from reinforce_rl.monitoring.report import comparison, write_report
from reinforce_rl.monitoring.responses import sample_metrics
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.monitoring.stragglers import RankSeconds, slowest_of_phases, timing_metrics
from reinforce_rl.runtime.status import StatusFile

TABLE_ROWS = 16  # samples for back ends with tables
_TOKEN = "prompt {} sample {} token {} {} after {}: {:.2f} by the trainer, {:.2f} by the generator"
REPEAT_STEPS = 10  # steps between two notes about the same problem


@dataclass(eq=False)
class RunMonitor:
    """Progress on the terminal, metrics to the loggers, samples to files, and the report."""

    folder: str | Path
    metrics: Loggers
    progress: TrainingProgress
    status: StatusFile | None = None
    # ranks slower than this multiple of a phase's median are reported
    straggler_factor: float = 1.5
    table_interval: int = 0  # steps between tables of training samples for the loggers; 0 for none
    tokens_every: int = 0  # `exp_manager.record_tokens_every`
    alert_rules: AlertRules = field(default_factory=AlertRules)
    repeated: frozenset[str] = frozenset()  # training prompts; see `responses.repeated_texts`
    records_samples: bool = True  # False writes no files of samples
    verdict: str | None = None  # reason of an alert that stops the run; on the first rank
    _step: int = field(default=0, init=False)
    # metrics of the step, as in metrics.jsonl
    _line: dict[str, float] = field(default_factory=dict, init=False)
    _noted: dict[str, int] = field(default_factory=dict, init=False)  # last step by problem

    def phase(self, name: str) -> None:
        self.progress.phase(name)

    def note(self, text: str, *, transient: bool = False) -> None:
        self.progress.note(text, transient=transient)

    def log_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        timings: Mapping[str, float],
        samples: Samples,
        memory: Mapping[str, float],
    ) -> None:
        """Log metrics, samples, seconds and peak gigabytes per phase; `commit` stores metrics."""
        metrics = {**metrics, **sample_metrics(samples.rows, self.repeated)}
        self._log(metrics, step, "train/")
        self._log(timings, step, "timers/")
        self._log(memory, step, "memory/")
        self._write(step, samples, "rollouts")
        if self.table_interval and (step - 1) % self.table_interval == 0:
            self._log_table("rollouts", samples, step)
        self.progress.update(step, metrics, timings)

    def log_ranks(self, step: int, ranks: Sequence[RankSeconds], step_seconds: float) -> None:
        """Log the slowest ranks of a training step, and note stragglers; `ranks` may be empty."""
        of_phases = slowest_of_phases(ranks)
        self._log(timing_metrics(of_phases), step, "timing/")
        stragglers = [
            slowest
            for slowest in of_phases
            if slowest.stands_out(self.straggler_factor, step_seconds)
        ]
        if new := [
            str(straggler)
            for straggler in stragglers
            if self._is_due(f"{straggler.phase} on rank {straggler.rank}", step)
        ]:
            self.note("straggler: " + "; ".join(new))

    def records_tokens(self, step: int) -> bool:
        """Return whether samples of `step` are recorded with tokens; the same on every rank."""
        return self.tokens_every > 0 and step % self.tokens_every == 0

    def log_validation(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        self._log(metrics, step, "val/")
        self._write(step, samples, "validation")
        self._log_table("validation", samples, step)
        self.progress.validation(step, metrics)
        difference = (
            comparison(RunFolder(self.folder, is_own=True)) if self.progress.enabled else None
        )
        if difference is not None and difference.n:
            self.note(f"reward since the first validation: {difference.sentence()}")

    def log_test(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        self.metrics.log_metrics(metrics, step, "test/")
        self._write(step, samples, "test")
        self.progress.validation(step, metrics, "test")

    def commit(self, step: int) -> None:
        """Force everything of this complete step to disk; report the alerts that fire in it."""
        for alert in self.alert_rules.look({"step": step, **self._line}):
            text = alert.text
            if alert.kind == "generator_logprob_diff" and self.progress.enabled:
                text = "; ".join([text, *self._worst_tokens(step)])
            self.note(f"warning: step {step}: {text}")
            self.metrics.alert(alert.kind, text, step)
            if self.alert_rules.stops(alert):
                self.verdict = f"stopped by the alert {alert.kind} ({text})"
        alerts = self.alert_rules.now
        if alerts and is_training(self._line):
            self.metrics.log_metrics({alert.kind: 1.0 for alert in alerts}, step, "alerts/")
        self._line = {}
        self.metrics.commit(step)
        if self.status is not None:
            texts = {alert.kind: alert.text for alert in alerts}
            self.status.progress(step, self.progress.total_steps, texts)

    def _worst_tokens(self, step: int) -> list[str]:
        path = rollout_files(self.folder).get(step)
        if path is None:
            return []
        return [_TOKEN.format(*token) for token in worst_tokens(path, 3, is_own=True)]

    def _is_due(self, problem: str, step: int) -> bool:
        is_due = step >= self._noted.get(problem, -REPEAT_STEPS) + REPEAT_STEPS
        if is_due:
            self._noted[problem] = step
        return is_due

    def report(self) -> Path:
        return write_report(Path(self.folder).absolute(), has_ended=True)

    def _log(self, metrics: Mapping[str, float], step: int, prefix: str) -> None:
        self._step = step
        self._line |= {prefix + name: float(value) for name, value in metrics.items()}
        self.metrics.log_metrics(metrics, step, prefix)

    def _log_table(self, key: str, samples: Samples, step: int) -> None:
        rows = []
        for row in samples.rows[:TABLE_ROWS]:
            cells = row.as_json()
            scores = cells.pop("source_rewards")
            rows.append(cells | {f"reward_{name}": score for name, score in scores.items()})
        self.metrics.log_table(key, rows, step)

    def _write(self, step: int, samples: Samples, kind: Kind) -> None:
        if self.records_samples:
            write_samples(self.folder, step, samples, kind)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Wrap the whole run: restore the terminal and close the loggers on exit."""
        status = FAILED
        try:
            with self.progress:
                yield
            status = SUCCESS
        except StoppedEarly as error:
            status = SUCCESS
            self.metrics.alert("stopped", str(error), self._step, "INFO")
            raise
        except BaseException as error:
            title = "diverged" if isinstance(error, DivergedError) else "failed"
            self.metrics.alert(title, f"{type(error).__name__}: {error}", self._step, "ERROR")
            raise
        finally:
            self.metrics.finalize(status)


class SilentMonitor(RunMonitor):
    """Monitor of all ranks but the first: writes nothing, and shows at most `notes`."""

    def __init__(self, folder: str | Path, tokens_every: int = 0, *, notes: bool = False):
        progress = TrainingProgress(0, enabled=notes)
        super().__init__(folder, Loggers(), progress, tokens_every=tokens_every)

    def report(self) -> Path:
        return Path(self.folder).absolute() / "report.html"

    def _write(self, step: int, samples: Samples, kind: Kind) -> None:
        pass
