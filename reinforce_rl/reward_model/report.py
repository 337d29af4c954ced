"""Monitor and `report.html` of full reward-model training.

`python -m reinforce_rl.reward_model.report FOLDER` writes the page, also during the run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.loggers import JsonlLogger, Loggers
from reinforce_rl.monitoring.progress import Shown, TrainingProgress
from reinforce_rl.monitoring.records import RolloutWriter
from reinforce_rl.monitoring.report import main, overview
from reinforce_rl.monitoring.run import RunMonitor
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.monitoring.view import frozen_page
from reinforce_rl.reward_model.objectives import Best, Evaluation, Objective, Regression
from reinforce_rl.utils.files import write_atomically

if TYPE_CHECKING:
    from reinforce_rl.megatron.optimizer import OptimizerUpdate

EVALUATION_FILE = "evaluation.json"
CALIBRATION = (
    "Pairs by the predicted probability that the answer with the higher score is the preferred one, sigmoid of the "
    "difference of their scores; and how often it is. A calibrated model has both alike."
)

SHOWN: tuple[Shown, ...] = (
    ("loss", "loss", "loss", "{:.4f}"),
    ("accuracy", "accuracy", "accuracy", "{:.3f}"),
    ("calibration_error", "calibration error", "ECE", "{:.3f}"),
    ("grad_norm", "gradient norm", "grad", "{:.3g}"),
    ("lr", "learning rate", "lr", "{:.2e}"),
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
        metrics = [JsonlLogger(Path(folder) / "metrics.jsonl", resume_step=start_step)] if enabled else []
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


def write_report(folder: str | Path) -> Path:
    """Write the page from `metrics.jsonl`, `evaluation.json` and `config.yaml`; the last two are optional.

    Raises:
        DataError: there is no such folder, or a file cannot be read.
    """
    run = RunFolder(folder)
    best = read_best(run.path / EVALUATION_FILE)
    found = {"verdict": verdict(run.lines, best), "tables": tables(best), "figures": figures(best)}
    path = run.path / "report.html"
    write_atomically(path, frozen_page({run.name: (run, overview(run) | found)}))
    return path


def read_best(path: Path) -> Best | None:
    """Read the evaluation of the best model so far; None if there is none.

    Raises:
        DataError: the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        return TypeAdapter(Best).validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(f"{path} is no evaluation ({error}); remove it, or start the run again") from error


def verdict(metrics: Sequence[Mapping[str, Any]], best: Best | None) -> str:
    """Summarise the run in one sentence."""
    before = next((line["val/loss"] for line in metrics if line.get("val/loss") is not None), math.nan)
    if best is None:
        return "No evaluation has been made since the first step."
    found = best.evaluation.metrics
    moved = f"The held-out loss went from {before:.4f} to {best.evaluation.loss:.4f} (step {best.step})"
    if "accuracy" not in found:
        return f"{moved}."
    return (
        f"{moved}; of the held-out pairs {found['accuracy']:.1%} ± {found['accuracy_standard_error']:.1%} are ordered "
        f"rightly, where 'the longer answer wins' has {found['accuracy_of_longer_wins']:.1%}."
    )


def tables(best: Best | None) -> list[dict[str, Any]]:
    """Return the page's tables: the best model's metrics, and its calibration."""
    if best is None:
        return []
    values = {"loss": best.evaluation.loss, **best.evaluation.metrics}
    rows = [[key.replace("_", " "), f"{value:.4f}"] for key, value in values.items()]
    title = "The best model on held-out data"
    found: list[dict[str, Any]] = [
        {"title": title, "note": "", "columns": [f"of step {best.step}", "value"], "rows": rows}
    ]
    if bins := best.evaluation.reliability:
        columns = ["predicted", "pairs", "mean predicted", "observed"]
        rows = [
            [f"{b.low:.2f} to {b.high:.2f}", str(b.count), f"{b.predicted:.3f}", f"{b.observed:.3f}"] for b in bins
        ]
        found.append({"title": "Calibration", "note": CALIBRATION, "columns": columns, "rows": rows})
    return found


def figures(best: Best | None) -> list[dict[str, Any]]:
    """Return observed against predicted (in percent), and the diagonal."""
    bins = best.evaluation.reliability if best else ()
    observed = {"name": "observed", "x": [100 * b.predicted for b in bins], "y": [b.observed for b in bins]}
    lines = [observed, {"name": "calibrated", "x": [50.0, 100.0], "y": [0.5, 1.0]}]
    unit = "share of pairs, by prediction"
    found = {"title": "Predicted and observed", "unit": unit, "x": "predicted, %", "form": "percent", "lines": lines}
    return [found] if bins else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "reinforce_rl.reward_model.report", write_report))
