"""The one reading of a run's folder, also while the run writes to it: a page that follows a run calls `refresh`."""

from __future__ import annotations

import functools
import math
import statistics
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, get_args

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.reward_model import TrainRewardModelConfig
from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.loggers import METRICS_FILE, read_metrics
from reinforce_rl.monitoring.records import Kind, RolloutRow, SampleTokens, read_rows, read_tokens, rollout_files
from reinforce_rl.monitoring.sentinel import STRAGGLER_FACTOR, Alert, Sentinel, number
from reinforce_rl.runtime.settings import Setting, read_tree, set_keys, settings_of
from reinforce_rl.runtime.status import STATUS_FILE, Status, run_status
from reinforce_rl.utils.files import json_line, parse_json_lines
from reinforce_rl.utils.untrusted_files import UnreadableFileError, open_regular

_TAIL = 4096  # bytes before the end of what was read that must be unchanged; each line holds its time
_NAMED_RUNS = 3  # in a message
_KEPT_SAMPLES = 8  # sample files held in memory


@dataclass(frozen=True)
class Configuration:
    text: str  # YAML; "" if the run has no config.yaml
    settings: list[Setting]  # that differ from the schema's defaults
    changes: list[str]  # made at resumes, a sentence each


class RunFolder:
    """A run of the actor or of full reward-model training; each file may be absent.

    Raises DataError if there is no such folder; its methods, if a file cannot be read.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise DataError(f"{path}: no such folder; expected the folder of a run")
        self.name = self.path.resolve().name
        self._lines: list[dict[str, Any]] = []
        self._end, self._checksum = 0, 0  # bytes of metrics.jsonl that were read
        self._read_samples = functools.lru_cache(_KEPT_SAMPLES)(lambda path, _changed: read_rows(path))

    def refresh(self) -> None:
        """Read what was added to metrics.jsonl since the last call; all of it if it was rewritten since."""
        path = self.path / METRICS_FILE
        if not path.is_file():
            return
        try:
            file = open_regular(path, within=self.path)
        except UnreadableFileError as error:
            raise DataError(str(error)) from error
        with file:
            if _checksum(file, self._end) != self._checksum:  # a resumed run drops later lines
                self._lines, self._end = [], 0
            file.seek(self._end)
            data = file.read()
            end = self._end + data.rfind(b"\n") + 1  # a half-written line is read next time
            checksum = _checksum(file, end)
        try:
            lines = sorted([*self._lines, *parse_json_lines(path, data)], key=lambda line: line["step"])
        except (DataError, KeyError, TypeError):
            read_metrics(path)  # names the line
            raise
        self._lines, self._end, self._checksum = lines, end, checksum

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl as of the last `refresh`, by ascending step; null is NaN or infinity."""
        if not self._end:
            self.refresh()
        return self._lines

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) of the lines that have `key`; null becomes NaN."""
        return [(line["step"], number(line[key])) for line in self.lines if key in line]

    def sample_steps(self, kind: Kind = "rollouts") -> list[int]:
        """Return the steps whose samples are on disk, ascending."""
        return list(rollout_files(self.path, kind))

    def kinds(self) -> dict[Kind, list[int]]:
        """Return the steps of each kind of samples that there are."""
        found: dict[Kind, list[int]] = {kind: self.sample_steps(kind) for kind in get_args(Kind)}
        return {kind: steps for kind, steps in found.items() if steps}

    def samples(self, step: int, kind: Kind = "rollouts") -> list[RolloutRow]:
        """Return the samples of a step.

        Raises DataError, with the steps that there are, if it has none.
        """
        files = rollout_files(self.path, kind)
        if step not in files:
            known = f"the steps are {min(files)} to {max(files)}, {len(files)} in all" if files else "there are none"
            raise DataError(f"{self.path / kind}: no samples of step {step}; {known}")
        return self._read_samples(files[step], files[step].stat().st_mtime_ns)

    def tokens(
        self, step: int, prompts: Collection[int], kind: Kind = "rollouts"
    ) -> dict[tuple[int, int], SampleTokens]:
        """Return the tokens of the samples of some prompts, by prompt and sample; none if they were not recorded."""
        rows = [row for row in self.samples(step, kind) if row.prompt_id in prompts]
        found = read_tokens(rollout_files(self.path, kind)[step], [("prompt_id", "in", list(prompts))])
        return {(row.prompt_id, row.sample_id): tokens for row, tokens in zip(rows, found, strict=False)}

    def sample_lines(self, step: int | None = None, kind: Kind = "rollouts", *, tokens: bool = False) -> Iterator[str]:
        """Yield a step's samples as lines of JSON; None for the last step recorded."""
        files = rollout_files(self.path, kind)
        step = max(files, default=0) if step is None else step
        rows = self.samples(step, kind)
        found = (tokens and read_tokens(files[step])) or [None] * len(rows)
        for row, of_row in zip(rows, found, strict=True):
            yield json_line(row.as_json() | (of_row.as_json() if of_row else {}))

    @property
    def validations(self) -> tuple[list[RolloutRow], list[RolloutRow]] | None:
        """Samples of the first and the last validation; None with fewer than two."""
        steps = self.sample_steps("validation")
        if len(steps) < 2:
            return None
        return self.samples(steps[0], "validation"), self.samples(steps[-1], "validation")

    def state(self) -> Status:
        """Return the run's status, of the last line of metrics.jsonl where there is no status.json."""
        status = run_status(self.path)
        return replace(status, step=self.lines[-1]["step"]) if status.state == "unknown" and self.lines else status

    def configuration(self) -> Configuration:
        """Return the configuration of the last step."""
        text, changes = settings_of(self.path, self.lines[-1]["step"] if self.lines else 0)
        tree = read_tree(text) if text else {}
        schemas = (TrainConfig, TrainRewardModelConfig)
        schema = max(schemas, key=lambda schema: len(schema.model_fields.keys() & tree.keys()))
        return Configuration(text, set_keys(tree, schema), changes)

    def alerts(self) -> list[Alert]:
        """Return what the sentinel says of the run's lines, the latest first, and why the run failed."""
        settings = {setting.key: setting.value for setting in self.configuration().settings}
        rules = {key.rpartition(".")[2]: found for key, found in settings.items() if key.startswith("sentinel.rules.")}
        sentinel = Sentinel(rules, settings.get("trainer.straggler_factor", STRAGGLER_FACTOR))
        for line in self.lines:
            sentinel.look(line)
        found, state = sentinel.alerts, self.state()
        if state.state in ("failed", "lost"):
            text = state.reason or "the run's process is gone and has left no reason; see its log"
            found.append(Alert(state.state, state.step, state.step, 1, text))
        return sorted(found, key=lambda alert: (-alert.last, alert.kind))


def open_run(path: str | Path) -> RunFolder:
    """Return the run in a folder. Raises DataError, with the runs below, if the folder itself holds none."""
    run = RunFolder(path)
    if not runs_below(path, 0):
        below = ", ".join(map(str, runs_below(path)[:_NAMED_RUNS]))
        expected = f"expected the folder of a run{below and f', such as {below}'}"
        raise DataError(f"{path} holds no run: neither {METRICS_FILE} nor {STATUS_FILE}; {expected}")
    return run


def runs_below(folder: str | Path, depth: int = 3) -> list[Path]:
    """Return the folders of runs in `folder`, itself included, at most `depth` levels down, by path."""
    folder = Path(folder)
    if (folder / METRICS_FILE).is_file() or (folder / STATUS_FILE).is_file():
        return [folder]
    try:
        below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except PermissionError:
        return []
    return [run for path in below for run in runs_below(path, depth - 1)] if depth else []


def mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values; NaN without any."""
    finite = [float(value) for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def _checksum(file: BinaryIO, end: int) -> int:
    """Return a checksum of the bytes before `end`: a resumed run rewrites its file, perhaps to the same size."""
    file.seek(max(0, end - _TAIL))
    return zlib.crc32(file.read(min(end, _TAIL)))
