"""Metric loggers: `metrics.jsonl`, TensorBoard, Weights & Biases, or several of them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from reinforce_rl.errors import DataError, ReinforceError
from reinforce_rl.utils.files import encode, json_line, plain_number, read_json_lines, write_json_lines

SUCCESS = "success"
FAILED = "failed"


class MetricLogger:
    """A back end of metrics, called on rank 0 only, with non-decreasing steps; overrides what it stores."""

    def log_metrics(self, metrics: Mapping[str, float], step: int, prefix: str = "") -> None:
        """Log numbers of `step` under `prefix + name`, e.g. `train/rewards`."""

    def log_table(self, key: str, rows: list[dict[str, Any]], step: int) -> None:
        """Log sample rows of `step`, all with the same keys."""

    def commit(self, step: int) -> None:
        """Store `step`, which is complete, so that it survives a kill."""

    def finalize(self, status: str = SUCCESS) -> None:
        """Store what is left and close. `status` is "success" or "failed"."""


class Loggers(MetricLogger):
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
        """Close every logger even if one fails; raise the failure at the end."""
        with ExitStack() as stack:
            for logger in reversed(self.loggers):
                stack.callback(logger.finalize, status)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a `metrics.jsonl`, one dict per step in file order; NaN and infinity become None.

    An incomplete last line (a killed or running process) is skipped.

    Raises:
        DataError: the file is absent, or a complete line is not a JSON object with an integer `step`.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected the metrics.jsonl of a run")
    records = read_json_lines(path)
    for number, record in enumerate(records, 1):
        if not isinstance(record.get("step"), int):
            raise DataError(f"{path}, line {number}: found step={record.get('step')!r}, expected an integer")
    return records


class JsonlLogger(MetricLogger):
    """Merges all metrics of a step into one line, plus `time` (unix seconds), appended at `commit`.

    Args:
        resume_step: of the checkpoint to resume from, 0 to restart from scratch: later lines and a torn last line are
            dropped. None for a new run.

    Raises:
        DataError: `resume_step` is None and the file already holds metrics, or a line of it cannot be read.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._pending: dict[int, dict[str, Any]] = {}
        self._last_step = -1
        records = read_metrics(self.path) if self.path.exists() else []
        if records and resume_step is None:
            raise DataError(
                f"{self.path} already holds metrics up to step {records[-1]['step']}, and this is a new run; "
                "choose another run folder, or resume that run"
            )
        if self.path.exists():
            kept = [record for record in records if record["step"] <= (resume_step or 0)]
            write_json_lines(self.path, kept)
            self._last_step = max((record["step"] for record in kept), default=-1)

    def log_metrics(self, metrics: Mapping[str, float], step: int, prefix: str = "") -> None:
        """Buffer numbers until `commit(step)`; the last value of a name wins."""
        line = self._pending.setdefault(step, {})
        line.update({prefix + name: plain_number(value) for name, value in metrics.items()})

    def commit(self, step: int) -> None:
        """Append the line of `step` and fsync; merge if the file already has that step."""
        if step not in self._pending:
            return
        record = {"step": step, "time": time.time(), **self._pending.pop(step)}
        if step <= self._last_step:
            by_step = {old["step"]: old for old in read_metrics(self.path)}
            by_step[step] = {**by_step.get(step, {}), **record}
            write_json_lines(self.path, [by_step[number] for number in sorted(by_step)])
            return
        with self.path.open("ab") as file:
            file.write(encode(json_line(record)))
            file.flush()
            os.fsync(file.fileno())
        self._last_step = step

    def finalize(self, status: str = SUCCESS) -> None:
        """Write steps that were not committed: after an error they show how far the run came."""
        for step in sorted(self._pending):
            self.commit(step)


class TensorboardLogger(MetricLogger):
    """Writes one event file. Imports tensorboard lazily.

    Event files are append-only: a resumed run writes a new one, replaying `metrics.jsonl` up to its checkpoint, and
    removes the old ones, so that no step appears twice.

    Args:
        folder: for event files only.
        history: the lines of `metrics.jsonl` so far, by step.

    Raises:
        ReinforceError: tensorboard is not installed.
    """

    def __init__(self, folder: str | Path, history: Sequence[Mapping[str, Any]] = ()):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ReinforceError(
                f"exp_manager.create_tensorboard_logger is true, and tensorboard cannot be imported ({error}); "
                "install it with `pip install 'reinforce-rl[tensorboard]'`, or set it to false"
            ) from error
        old = sorted(Path(folder).glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(str(folder))
        self._last: tuple[int, frozenset[str]] = (-1, frozenset())
        for record in history:
            numbers = {name: value for name, value in record.items() if name not in ("step", "time")}
            for name, value in numbers.items():
                if value is not None:
                    self._writer.add_scalar(name, value, record["step"], walltime=record["time"])
            self._last = record["step"], frozenset(numbers)
        self._writer.flush()
        for path in old:
            path.unlink()

    def log_metrics(self, metrics: Mapping[str, float], step: int, prefix: str = "") -> None:
        """Write numbers of `step`, except non-finite ones and those `history` already has for this step."""
        step_of_history, known = self._last
        for name, value in metrics.items():
            number = plain_number(value)
            if number is not None and not (step == step_of_history and prefix + name in known):
                self._writer.add_scalar(prefix + name, number, step)

    def commit(self, step: int) -> None:
        """Flush to the operating system, so that TensorBoard shows it and a kill does not lose it."""
        self._writer.flush()

    def finalize(self, status: str = SUCCESS) -> None:
        self._writer.close()


class WandbLogger(MetricLogger):
    """A wandb run. Imports wandb lazily.

    A resumed run passes its checkpoint's `run_id` and continues the same wandb run. wandb rejects steps below its last
    one: those a killed run logged after its last checkpoint keep its values (on one process they are the same).

    Args:
        dir: parent of wandb's own `wandb/`.
        run_id: run to continue; None starts a new one.
        mode: "offline" keeps everything in `dir`, for a later `wandb sync`; "online" needs an API key.

    Raises:
        ReinforceError: wandb is not installed, or the run cannot be started.
    """

    def __init__(
        self,
        project: str,
        name: str,
        dir: str | Path,
        config: Mapping[str, Any],
        run_id: str | None = None,
        mode: Literal["offline", "online"] = "offline",
    ):
        try:
            import wandb
        except ImportError as error:
            raise ReinforceError(
                f"the wandb logger is switched on, and wandb cannot be imported ({error}); "
                "install it with `pip install 'reinforce-rl[wandb]'`, or switch the logger off"
            ) from error
        Path(dir).mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                dir=str(dir),
                config=dict(config),
                id=run_id,
                resume="allow" if run_id is not None else None,
                mode=mode,
                # Deadlines in seconds. wandb's capture of stdout and the live progress display would tear each other.
                settings=wandb.Settings(init_timeout=90, finish_timeout=120, console="off", silent=True),
            )
        except wandb.Error as error:
            raise ReinforceError(
                f"wandb could not start the run {name!r} of project {project!r} in mode {mode!r}: {error}. "
                "Check the API key (`wandb login`) and the network, or use the mode offline"
            ) from error

    @property
    def run_id(self) -> str:
        """wandb's run id, for the checkpoint."""
        return self._run.id

    def log_metrics(self, metrics: Mapping[str, float], step: int, prefix: str = "") -> None:
        """Log numbers of `step`, except non-finite ones, which wandb's charts cannot show."""
        numbers = {prefix + name: plain_number(value) for name, value in metrics.items()}
        self._run.log({name: number for name, number in numbers.items() if number is not None}, step=step)

    def log_table(self, key: str, rows: list[dict[str, Any]], step: int) -> None:
        """Log rows as a wandb table, with the first row's keys as columns; do nothing without rows."""
        if not rows:
            return
        import wandb

        columns: list[Any] = list(rows[0])
        data: list[Any] = [[row[column] for column in columns] for row in rows]
        self._run.log({key: wandb.Table(columns=columns, data=data, allow_mixed_types=True)}, step=step)

    def finalize(self, status: str = SUCCESS) -> None:
        """Flush and end the run, as failed unless `status` is "success"."""
        self._run.finish(exit_code=0 if status == SUCCESS else 1)
