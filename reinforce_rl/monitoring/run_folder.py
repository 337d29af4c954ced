"""The one reading of a run's folder, also while the run writes to it: a page that follows a run calls `refresh`."""

from __future__ import annotations

import functools
import math
import statistics
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, get_args

from omegaconf import OmegaConf
from yaml import YAMLError

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.reward_model import TrainRewardModelConfig
from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.loggers import METRICS_FILE, read_metrics
from reinforce_rl.monitoring.metrics import Slowest
from reinforce_rl.monitoring.records import Kind, RolloutRow, SampleTokens, read_rows, read_tokens, rollout_files
from reinforce_rl.runtime.settings import CONFIG_FILE, Setting, set_keys, settings_of
from reinforce_rl.runtime.status import STATUS_FILE, Status, run_status
from reinforce_rl.utils.files import json_line, parse_json_lines

STRAGGLER_FACTOR: float = TrainConfig().trainer.straggler_factor  # the default
GAP = "generator gap"  # kind of an alert
GAP_LIMITS = {"generator_gap": 0.05, "generator_gap_p99": 0.5, "generator_gap_max": 5.0}  # nats a token
_TAIL = 4096  # bytes before the end of what was read that must be unchanged; each line holds its time
_NAMED_RUNS = 3  # in a message
_KEPT_SAMPLES = 8  # sample files held in memory


@dataclass(frozen=True)
class Alert:
    """What a person should look at; `count` steps of `first` .. `last` have it."""

    kind: str
    first: int
    last: int
    count: int
    text: str  # of the last step


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
        with path.open("rb") as file:
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

    @property
    def first_reward(self) -> float:
        """The mean reward of the run's first step; NaN before it."""
        return next((reward for _, reward in self.series("train/rewards") if math.isfinite(reward)), math.nan)

    def state(self) -> Status:
        """Return the run's status, of the last line of metrics.jsonl where there is no status.json."""
        status = run_status(self.path)
        return replace(status, step=self.lines[-1]["step"]) if status.state == "unknown" and self.lines else status

    def configuration(self) -> Configuration:
        """Return the configuration of the last step."""
        try:
            text, changes = settings_of(self.path, self.lines[-1]["step"] if self.lines else 0)
            tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False) if text else {}
        except YAMLError as error:
            path = self.path / CONFIG_FILE
            raise DataError(f"{path}: not valid YAML ({error}); restore it or take it away") from error
        if not isinstance(tree, dict):
            raise DataError(f"{self.path / CONFIG_FILE}: found a {type(tree).__name__}, expected keys with values")
        schemas = (TrainConfig, TrainRewardModelConfig)
        schema = max(schemas, key=lambda schema: len(schema.model_fields.keys() & tree.keys()))
        return Configuration(text, set_keys(tree, schema), changes)

    def alerts(self) -> list[Alert]:
        """Return what a person should look at, the latest first; alike ones of successive lines are one."""
        found: dict[str, Alert] = {}
        done = []
        settings = {setting.key: setting.value for setting in self.configuration().settings}
        factor = settings.get("trainer.straggler_factor", STRAGGLER_FACTOR)
        first_reward = self.first_reward
        for line in self.lines:
            now = dict(alerts_of(line, factor, first_reward))
            if is_training(line):
                done += [found.pop(kind) for kind in found.keys() - now.keys()]
            for kind, text in now.items():
                past = found.get(kind, Alert(kind, line["step"], 0, 0, ""))
                found[kind] = replace(past, last=line["step"], count=past.count + 1, text=text)
        state = self.state()
        if state.state in ("failed", "lost"):
            text = state.reason or "the run's process is gone and has left no reason; see its log"
            done.append(Alert(state.state, state.step, state.step, 1, text))
        return sorted([*done, *found.values()], key=lambda alert: (-alert.last, alert.kind))


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


def alerts_of(
    line: Mapping[str, Any], straggler_factor: float = STRAGGLER_FACTOR, first_reward: float = math.nan
) -> Iterator[tuple[str, str]]:
    """Yield (kind, sentence) of what a person should know of one line of metrics.jsonl.

    `first_reward` is the mean reward of the run's first step.
    """
    for kind, key in (("loss", "train/actor_loss"), ("loss", "train/loss"), ("reward", "train/rewards")):
        if key in line and not math.isfinite(number(line[key])):
            yield kind, f"{key} is not finite"
    if number(line.get("train/skipped_step")) > 0:
        yield "skipped", "the gradient was not finite, so the optimizer step was skipped"
    if (scored := number(line.get("train/fraction_of_samples_scored"))) < 1:
        yield "unscored", f"{1 - scored:.1%} of the samples have no score"
    if (equal := number(line.get("train/fraction_of_groups_without_spread"))) >= 0.9:
        reward, deviation = (number(line.get(f"train/{name}")) for name in ("rewards", "reward_deviation"))
        text = f"in {equal:.0%} of the groups all rewards are equal, {reward:.3f} on average"
        if reward - first_reward > 3 * deviation:
            # What the best reward is, nobody has said.
            advice = "if none is higher, take harder prompts, or stop; else the policy has collapsed: read samples"
            yield "solved", f"{text}, up from {first_reward:.3f}: {advice}"
        else:
            yield "no spread", f"{text}: there is little to learn from; the prompts are too easy or too hard"
    if (ended := number(line.get("train/fraction_of_samples_properly_ended"))) < 0.5:
        yield "cut", f"{1 - ended:.0%} of the responses were cut at max_length"
    gaps = {name: number(line.get(f"train/{name}")) for name in GAP_LIMITS}
    is_older = number(line.get("train/staleness")) > 0  # then they differ by the weights, too
    if not is_older and (
        over := [f"{name} is {gaps[name]:.3g}" for name, limit in GAP_LIMITS.items() if gaps[name] > limit]
    ):
        text = f"trainer and generator differ on the same tokens: {', '.join(over)} nats; the gradient is biased"
        advice = "see where they part with reinforce-rl check-generation MODEL, or set generator_correction"
        yield GAP, f"{text}: {advice}; docs/algorithms.md#engine-and-trainer has what to look for"
    for key in [key for key in line if key.startswith("timing/") and key.endswith("/rank")]:
        phase = key.split("/")[1]
        most, median = (number(line.get(f"timing/{phase}/{name}")) for name in ("max", "median"))
        if Slowest(phase, 0, "", most, median).stands_out(straggler_factor, number(line.get("timers/step_time"))):
            text = f"{phase} took {most:.1f} s on rank {line[key]}, {median:.1f} s on the median rank"
            yield f"straggler in {phase}", text


def is_training(line: Mapping[str, Any]) -> bool:
    return any(key.startswith("train/") for key in line)


def number(value: float | None) -> float:
    """Return a metric's value; null and absence are NaN."""
    return math.nan if value is None else float(value)


def mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values; NaN without any."""
    finite = [float(value) for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def _checksum(file: BinaryIO, end: int) -> int:
    """Return a checksum of the bytes before `end`: a resumed run rewrites its file, perhaps to the same size."""
    file.seek(max(0, end - _TAIL))
    return zlib.crc32(file.read(min(end, _TAIL)))
