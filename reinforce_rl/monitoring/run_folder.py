"""Read a run's folder, also while the run writes to it; `refresh` reads new lines."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.reward_model import TrainRewardModelConfig
from reinforce_rl.errors import DataError, Fault
from reinforce_rl.monitoring.alerts import STRAGGLER_FACTOR, Alert, AlertRules
from reinforce_rl.monitoring.columns import MetricColumns, shown_value
from reinforce_rl.monitoring.loggers import METRICS_FILE
from reinforce_rl.monitoring.metrics_file import MetricsFile
from reinforce_rl.monitoring.records import (
    Kind,
    RolloutRow,
    SampleTokens,
    read_rows,
    read_tokens,
    rollout_files,
)
from reinforce_rl.runtime.settings import (
    CONFIG_FILE,
    HISTORY_FILE,
    Setting,
    read_tree,
    set_keys,
    settings_of,
)
from reinforce_rl.runtime.status import STATUS_FILE, Status, run_status
from reinforce_rl.utils.files import json_line
from reinforce_rl.utils.untrusted_files import check_regular, leads_out

_NAMED_RUNS = 3  # runs that a message names
_KEPT_SAMPLES = 8  # sample files held in memory
_JUDGED_LINES = 64  # lines that the rules read between two checks of the time
_SETTLED_SECONDS = 2.0  # after these, every change of a folder also changes its mtime


@dataclass(frozen=True)
class Configuration:
    text: str  # YAML; "" if the run has no config.yaml
    settings: list[Setting]  # settings that differ from the schema's defaults
    changes: list[str]  # changes at resumes, a sentence each


class RunFolder:
    """A run of the actor or of full reward-model training; each file may be missing.

    Args:
        path: the run's folder.
        within: the folder that links may not leave; None for the run's folder.
        max_values: most values of metrics.jsonl in memory; None for no bound. A value takes 12
            bytes.
        is_own: whether this process writes the run; samples of other runs are read in a child
            process.

    Raises:
        DataError: there is no such folder. Methods raise it if a file cannot be read.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        within: Path | None = None,
        max_values: int | None = None,
        is_own: bool = False,
    ):
        self.path = Path(path)
        if not self.path.is_dir():
            raise DataError(
                f"{path}: no such folder; expected the folder of a run",
                key="run.folder.missing",
            )
        self.name = self.path.resolve().name
        self.within = self.path if within is None else within
        self._file = MetricsFile(self.path / METRICS_FILE, self.within, max_values)
        self.is_own = is_own
        self._read_samples = functools.lru_cache(_KEPT_SAMPLES)(
            lambda path, _changed: read_rows(path, is_own=is_own)
        )
        self._files: dict[Kind, tuple[int, dict[int, Path]]] = {}
        self._configuration: tuple[tuple[Any, ...], Configuration | Fault] | None = None
        self._begin_judging(())

    def _begin_judging(self, rules: tuple[Any, ...], alert_rules: AlertRules | None = None) -> None:
        self._rules = rules
        self._alert_rules = alert_rules or AlertRules()
        self._judged = 0  # lines

    @property
    def metrics(self) -> MetricColumns:
        """The metrics at the last `refresh`."""
        return self._file.columns

    def refresh(self, seconds: float = math.inf) -> bool:
        """Read new lines of metrics.jsonl; see `MetricsFile.refresh`."""
        before = self.metrics
        try:
            return self._file.refresh(seconds)
        finally:
            if self.metrics is not before:
                self._begin_judging(())

    @property
    def stamp(self) -> tuple[int, ...]:
        """A value that changes when metrics.jsonl, or the rules of the alerts, are read further."""
        return *self._file.stamp, self._judged

    @property
    def progress(self) -> str:
        """A sentence about lines that are not read yet; "" for none."""
        if self._file.share_read < 1.0:
            return f"{self._file.share_read:.0%} of {METRICS_FILE} has been read so far"
        if self._judged < len(self.metrics):
            return f"alerts are known of {self._judged} of {len(self.metrics)} lines so far"
        return ""

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl at the last `refresh`, by ascending step.

        NaN and infinity are None. The lines take ten times the memory of `metrics`.
        """
        self._read_once()
        return sorted(self.metrics.lines(0, len(self.metrics)), key=lambda line: line["step"])

    def _read_once(self) -> None:
        if not self._file.is_read:
            self.refresh()

    def metric_names(self) -> list[str]:
        self._read_once()
        return self.metrics.names()

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) of the lines with `key`, by ascending step; null is NaN."""
        self._read_once()
        steps, values = self.metrics.series(key)
        return list(zip(steps.tolist(), values.tolist(), strict=True))

    def values(self, key: str) -> np.ndarray:
        """Return the values of `series`: float64 [n]."""
        self._read_once()
        return self.metrics.series(key)[1]

    @property
    def last_step(self) -> int:
        """The largest step of metrics.jsonl; 0 without lines."""
        self._read_once()
        return int(self.metrics.steps().max(initial=0))

    def sample_steps(self, kind: Kind = "rollouts") -> list[int]:
        """Return the steps whose samples are on disk, ascending."""
        return list(self.files(kind))

    def files(self, kind: Kind = "rollouts") -> dict[int, Path]:
        """Return the sample files by step, ascending; the folder is listed only after a change."""
        folder = self.path / kind
        if leads_out(folder, self.within):
            raise DataError(
                f"{folder} is a link that leads out of {self.within}; expected a folder inside of "
                "it",
                key="samples.folder.leads_out",
            )
        try:
            changed = folder.stat().st_mtime_ns
        except OSError:
            return {}
        known = self._files.get(kind)
        if known is not None and known[0] == changed:
            return known[1]
        files = rollout_files(self.path, kind)
        if time.time() - changed / 1e9 > _SETTLED_SECONDS:
            self._files[kind] = (changed, files)
        return files

    def kinds(self) -> dict[Kind, list[int]]:
        """Return the steps of each existing kind of samples."""
        all_kinds: dict[Kind, list[int]] = {
            kind: self.sample_steps(kind) for kind in get_args(Kind)
        }
        return {kind: steps for kind, steps in all_kinds.items() if steps}

    def samples(self, step: int, kind: Kind = "rollouts") -> list[RolloutRow]:
        """Return the samples of a step.

        Raises DataError, with the recorded steps, if the step has none.
        """
        files = self.files(kind)
        if step not in files:
            known = (
                f"the steps are {min(files)} to {max(files)}, {len(files)} in all"
                if files
                else "there are none"
            )
            raise DataError(
                f"{self.path / kind} has no samples of step {step}; {known}",
                key="samples.step.missing",
            )
        file = files[step]
        check_regular(file, within=self.within)
        return self._read_samples(file, file.stat().st_mtime_ns)

    def tokens(
        self, step: int, prompts: Collection[int], kind: Kind = "rollouts"
    ) -> dict[tuple[int, int], SampleTokens]:
        """Return the tokens of some prompts' samples, by prompt and sample.

        Empty if they were not recorded.
        """
        rows = [row for row in self.samples(step, kind) if row.prompt_id in prompts]
        chosen = [("prompt_id", "in", list(prompts))]
        recorded = read_tokens(self.files(kind)[step], chosen, is_own=self.is_own)
        return {
            (row.prompt_id, row.sample_id): tokens
            for row, tokens in zip(rows, recorded, strict=False)
        }

    def sample_lines(
        self, step: int | None = None, kind: Kind = "rollouts", *, tokens: bool = False
    ) -> Iterator[str]:
        """Yield a step's samples as lines of JSON; None for the last recorded step."""
        files = self.files(kind)
        step = max(files, default=0) if step is None else step
        rows = self.samples(step, kind)
        recorded = (tokens and read_tokens(files[step], is_own=self.is_own)) or [None] * len(rows)
        if len(recorded) != len(rows):
            raise DataError(
                f"{files[step]} was changed while it was read; try again",
                key="samples.file.changed_meanwhile",
            )
        for row, of_row in zip(rows, recorded, strict=True):
            yield json_line(row.as_json() | (of_row.as_json() if of_row else {}))

    @property
    def validations(self) -> tuple[list[RolloutRow], list[RolloutRow]] | None:
        """Samples of the first and the last validation; None with fewer than two."""
        steps = self.sample_steps("validation")
        if len(steps) < 2:
            return None
        return self.samples(steps[0], "validation"), self.samples(steps[-1], "validation")

    def state(self) -> Status:
        """Return the run's status; without status.json, the step is from metrics.jsonl."""
        status = run_status(self.path, within=self.within)
        return (
            replace(status, step=self.last_step or status.step)
            if status.state == "unknown"
            else status
        )

    def configuration(self) -> Configuration:
        """Return the configuration of the last step."""
        # A page calls this many times a second, and reading a long history takes a minute.
        stamp = (
            self.last_step,
            *(_stamp(self.path / name) for name in (HISTORY_FILE, CONFIG_FILE)),
        )
        if self._configuration is None or self._configuration[0] != stamp:
            try:
                configuration = self._read_configuration()
            except DataError as error:
                configuration = Fault(str(error), key=error.key)
            self._configuration = (stamp, configuration)
        configuration = self._configuration[1]
        if isinstance(configuration, Fault):
            raise DataError(configuration, key=configuration.key)
        return configuration

    def _read_configuration(self) -> Configuration:
        text, changes = settings_of(self.path, self.last_step, within=self.within)
        tree = read_tree(text) if text else {}
        schemas = (TrainConfig, TrainRewardModelConfig)
        schema = max(schemas, key=lambda schema: len(schema.model_fields.keys() & tree.keys()))
        return Configuration(text, set_keys(tree, schema), changes)

    def judge(self, seconds: float = math.inf) -> bool:
        """Have the rules read new lines. Returns False if there are more after `seconds`."""
        self._read_once()
        deadline = time.monotonic() + seconds
        settings = {setting.key: setting.value for setting in self.configuration().settings}
        rules = {
            key.rpartition(".")[2]: action
            for key, action in settings.items()
            if key.startswith("alerts.rules.")
        }
        factor = settings.get("trainer.straggler_factor", STRAGGLER_FACTOR)
        if type(factor) not in (int, float):
            shown_factor = shown_value(factor)
            raise DataError(
                f"{self.path / CONFIG_FILE}: trainer.straggler_factor is {shown_factor}; expected "
                "a number. Restore the file",
                key="run.config.straggler_factor_no_number",
            )
        if self._rules != (rules, factor):
            self._begin_judging((rules, factor), AlertRules(rules, factor))
        while self._judged < len(self.metrics):
            if time.monotonic() > deadline:
                return False
            for line in self.metrics.lines(self._judged, self._judged + _JUDGED_LINES):
                self._alert_rules.look(line)
                self._judged += 1
        return True

    def alerts(self, seconds: float = math.inf) -> list[Alert]:
        """Return the alerts of the run's lines, the latest first, and the reason of a failure.

        It may take `seconds` to read new lines.
        """
        self.judge(seconds)
        alerts = self._alert_rules.alerts
        state = self.state()
        if state.state in ("failed", "lost"):
            text = state.reason or "the run's process is gone and has left no reason; see its log"
            alerts.append(Alert(state.state, state.step, state.step, 1, text))
        return sorted(alerts, key=lambda alert: (-alert.last, alert.kind))


def _stamp(path: Path) -> tuple[int, ...]:
    """Return a value that changes when a file is written; () for a missing file."""
    try:
        about = path.stat()
    except OSError:
        return ()
    return about.st_ino, about.st_mtime_ns, about.st_size


def open_run(path: str | Path, *, is_own: bool = False) -> RunFolder:
    """Return the run in a folder; for `is_own` see `RunFolder`.

    Raises DataError, with the runs below, if the folder itself holds none.
    """
    run = RunFolder(path, is_own=is_own)
    if not runs_below(path, 0):
        below = ", ".join(map(str, runs_below(path)[:_NAMED_RUNS]))
        expected = f"expected the folder of a run{below and f', such as {below}'}"
        raise DataError(
            f"{path} holds no run: neither {METRICS_FILE} nor {STATUS_FILE}; {expected}",
            key="run.folder.no_run",
        )
    return run


def runs_below(folder: str | Path, depth: int = 3) -> list[Path]:
    """Return the folders of runs at most `depth` levels below `folder`, itself included, by path.

    A link that leads out of `folder` is returned and not followed.
    """
    return _runs_below(Path(folder), depth, Path(folder))


def _runs_below(folder: Path, depth: int, root: Path) -> list[Path]:
    if folder.is_symlink() and leads_out(folder, root):
        return [folder]
    # Not is_file: the reader reports files of another kind.
    if os.path.lexists(folder / METRICS_FILE) or os.path.lexists(folder / STATUS_FILE):
        return [folder]
    try:
        below = sorted(
            path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
        )
    except OSError:
        return []
    return [run for path in below for run in _runs_below(path, depth - 1, root)] if depth else []
