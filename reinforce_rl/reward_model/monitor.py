"""The monitor of full reward-model training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reinforce_rl.monitoring.loggers import METRICS_FILE, JsonlLogger, Loggers
from reinforce_rl.monitoring.progress import Shown, TrainingProgress
from reinforce_rl.monitoring.records import RolloutWriter
from reinforce_rl.monitoring.run import RunMonitor
from reinforce_rl.reward_model.objectives import Evaluation, Objective, Regression

if TYPE_CHECKING:
    from reinforce_rl.megatron.optimizer import OptimizerUpdate

SHOWN: tuple[Shown, ...] = (
    ("loss", "loss", "loss", ".4f"),
    ("accuracy", "accuracy", "accuracy", ".3f"),
    ("calibration_error", "calibration error", "ECE", ".3f"),
    ("grad_norm", "gradient norm", "grad", ".3g"),
    ("lr", "learning rate", "lr", ".2e"),
)


class RewardModelMonitor(RunMonitor):
    """Writes the terminal display and `metrics.jsonl` on the first rank; `enabled` is False on the others.

    Args:
        start_step: of the checkpoint to resume from; 0 for none.
    """

    def __init__(self, folder: str | Path, total_steps: int, start_step: int, objective: Objective, *, enabled: bool):
        hidden = ("accuracy", "calibration_error") if isinstance(objective, Regression) else ()
        shown, phases = [one for one in SHOWN if one[0] not in hidden], ("train_time",)
        progress = TrainingProgress(total_steps, start_step, enabled, title="reward model", shown=shown, phases=phases)
        metrics = [JsonlLogger(Path(folder) / METRICS_FILE, resume_step=start_step)] if enabled else []
        super().__init__(folder, Loggers(metrics), RolloutWriter(folder), progress)

    def log_update(self, step: int, metrics: dict[str, float], update: OptimizerUpdate, seconds: float) -> None:
        """Log a training step; stored by `commit`."""
        values = {**metrics, "grad_norm": update.grad_norm, "lr": update.lr, "skipped_step": float(update.skipped)}
        self._metrics.log_metrics(values, step, "train/")
        self._metrics.log_metrics({"train_time": seconds}, step, "timers/")
        self._progress.update(step, values, {"train_time": seconds, "step_time": seconds})

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Log an evaluation after `step`; stored by `commit`."""
        values = {"loss": evaluation.loss, **evaluation.metrics}
        self._metrics.log_metrics(values, step, "val/")
        self._progress.validation(step, values)
