"""What the training of a reward model shows and writes down."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from reinforce_rl.monitoring.base import FAILED, SUCCESS
from reinforce_rl.monitoring.jsonl import JsonlLogger
from reinforce_rl.monitoring.progress import Shown, TrainingProgress

if TYPE_CHECKING:
    from rich.console import Console

    from reinforce_rl.megatron.optimizer import OptimizerUpdate
    from reinforce_rl.reward_model.objectives import Evaluation

SHOWN: tuple[Shown, ...] = (
    ("loss", "loss", "loss", "{:.4f}"),
    ("accuracy", "accuracy", "accuracy", "{:.3f}"),
    ("calibration_error", "calibration error", "ECE", "{:.3f}"),
    ("grad_norm", "gradient norm", "grad", "{:.3g}"),
    ("lr", "learning rate", "lr", "{:.2e}"),
)


class FullTrainingMonitor:
    """The terminal and `metrics.jsonl`, on the first rank; nothing on the others.

    Args:
        folder: of the run.
        total_steps: of the whole run.
        start_step: of the checkpoint that it goes on from; 0 for none.
        enabled: False on every rank but the first.
        regression: there are no pairs, so no accuracy.
        console: where to; None is standard output.
    """

    def __init__(
        self,
        folder: str | Path,
        total_steps: int,
        start_step: int,
        *,
        enabled: bool,
        regression: bool = False,
        console: Console | None = None,
    ):
        of_pairs = ("accuracy", "calibration_error")
        self._progress = TrainingProgress(
            total_steps,
            start_step,
            enabled,
            console,
            title="reward model",
            shown=[one for one in SHOWN if not (regression and one[0] in of_pairs)],
            phases=("train_time",),
        )
        self._metrics = JsonlLogger(Path(folder) / "metrics.jsonl", resume_step=start_step) if enabled else None

    def phase(self, name: str) -> None:
        """Say what the run does from now on."""
        self._progress.phase(name)

    def note(self, text: str) -> None:
        """Tell people something."""
        self._progress.note(text)

    def log_step(self, step: int, metrics: dict[str, float], update: OptimizerUpdate, seconds: float) -> None:
        """A training step; stored by `commit`."""
        values = {
            **metrics,
            "grad_norm": update.grad_norm,
            "lr": update.lr,
            "skipped_step": float(update.skipped),
        }
        if self._metrics is not None:
            self._metrics.log_metrics(values, step, "train/")
            self._metrics.log_metrics({"train_time": seconds}, step, "timers/")
        self._progress.update(step, values, {"train_time": seconds, "step_time": seconds})

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """An evaluation after `step`; stored by `commit`."""
        values = {"loss": evaluation.loss, **evaluation.metrics}
        if self._metrics is not None:
            self._metrics.log_metrics(values, step, "val/")
        self._progress.validation(step, values)

    def commit(self, step: int) -> None:
        """Everything of this step is known: force it to disk."""
        if self._metrics is not None:
            self._metrics.commit(step)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The display is there inside the block; what was logged is stored at its end."""
        status = FAILED
        try:
            with self._progress:
                yield
            status = SUCCESS
        finally:
            if self._metrics is not None:
                self._metrics.finalize(status)
