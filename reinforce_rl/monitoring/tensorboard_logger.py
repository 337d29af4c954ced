"""Metrics to TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reinforce_rl.errors import ReinforceError
from reinforce_rl.monitoring.base import SUCCESS
from reinforce_rl.utils.files import plain_number


class TensorboardLogger:
    """One event file with every number of the run, each once. tensorboard itself is imported here and nowhere else.

    Event files can only be appended to. So a run that goes on writes a new one, from the lines of `metrics.jsonl` up
    to its checkpoint, and removes the old ones: no reader finds the steps that are made again twice.

    Args:
        folder: of the event files, and of nothing else.
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
        """Write the numbers of `step`; NaN and infinity are left out, and what `history` had of this step already."""
        step_of_history, known = self._last
        for name, value in metrics.items():
            number = plain_number(value)
            if number is not None and not (step == step_of_history and prefix + name in known):
                self._writer.add_scalar(prefix + name, number, step)

    def log_table(self, key: str, rows: list[dict[str, Any]], step: int) -> None:
        """Nothing: TensorBoard has no tables, and samples are files of their own."""

    def commit(self, step: int) -> None:
        """Hand what there is to the operating system, so that TensorBoard shows it and a kill does not lose it."""
        self._writer.flush()

    def finalize(self, status: str = SUCCESS) -> None:
        """Close the file; `status` is not kept."""
        self._writer.close()
