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
from reinforce_rl.monitoring.charts import Series, legend, line_chart
from reinforce_rl.monitoring.loggers import JsonlLogger, Loggers, read_metrics
from reinforce_rl.monitoring.progress import Shown, TrainingProgress
from reinforce_rl.monitoring.report import TEMPLATES, main
from reinforce_rl.monitoring.rollouts import RolloutWriter
from reinforce_rl.monitoring.run import RunMonitor
from reinforce_rl.reward_model.objectives import Best, Evaluation, Objective, Regression
from reinforce_rl.utils.files import write_atomically

if TYPE_CHECKING:
    from reinforce_rl.megatron.optimizer import OptimizerUpdate

EVALUATION_FILE = "evaluation.json"

SHOWN: tuple[Shown, ...] = (
    ("loss", "loss", "loss", "{:.4f}"),
    ("accuracy", "accuracy", "accuracy", "{:.3f}"),
    ("calibration_error", "calibration error", "ECE", "{:.3f}"),
    ("grad_norm", "gradient norm", "grad", "{:.3g}"),
    ("lr", "learning rate", "lr", "{:.2e}"),
)

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ name }}: reward model</title>
<style>
{% include "report.css" %}
</style>
</head>
<body>
<main>
<h1>{{ name }}</h1>
<p class="verdict">{{ verdict }}</p>
{%- if best %}
<h2>The best model on held-out data</h2>
<div class="card scroll"><table>
<tr><th>of step {{ best.step }}</th><th>value</th></tr>
<tr><td>loss</td><td>{{ "%.4f" | format(best.evaluation.loss) }}</td></tr>
{%- for key, value in best.evaluation.metrics.items() %}
<tr><td>{{ key.replace("_", " ") }}</td><td>{{ "%.4f" | format(value) }}</td></tr>
{%- endfor %}
</table></div>
{%- if best.evaluation.reliability %}
<h2>Calibration</h2>
<p class="soft">Pairs by the predicted probability that the answer with the higher score is the preferred one, sigmoid
of the difference of their scores; and how often it is. A calibrated model has both alike.</p>
<div class="charts">
<div class="card"><h3>Predicted and observed</h3>{{ reliability_legend }}{{ reliability_chart }}</div>
<div class="card scroll"><table>
<tr><th>predicted</th><th>pairs</th><th>mean predicted</th><th>observed</th></tr>
{%- for bin in best.evaluation.reliability %}
<tr><td>{{ "%.2f to %.2f" | format(bin.low, bin.high) }}</td><td>{{ bin.count }}</td>
  <td>{{ "%.3f" | format(bin.predicted) }}</td><td>{{ "%.3f" | format(bin.observed) }}</td></tr>
{%- endfor %}
</table></div>
</div>
{%- endif %}
{%- endif %}
<h2>Curves</h2>
<div class="charts">
{%- for title, key, svg in charts %}
<div class="card"><h3>{{ title }}</h3>{{ key }}{{ svg }}</div>
{%- endfor %}
</div>
{%- if config %}
<h2>Configuration</h2>
<div class="card"><details><summary>the whole configuration</summary><pre>{{ config }}</pre></details></div>
{%- endif %}
</main>
</body>
</html>
"""


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
    folder = Path(folder)
    metrics = read_metrics(folder / "metrics.jsonl")
    best = read_best(folder / EVALUATION_FILE)
    config = folder / "config.yaml"
    reliability = reliability_series(best) if best else []
    page = TEMPLATES.from_string(PAGE).render(
        name=folder.resolve().name,
        verdict=verdict(metrics, best),
        best=best,
        reliability_legend=legend(reliability),
        reliability_chart=line_chart(reliability, x_label="predicted, %", percent=True),
        charts=[(title, legend(series), line_chart(series)) for title, series in charts(metrics)],
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
    )
    path = folder / "report.html"
    write_atomically(path, page)
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


def reliability_series(best: Best) -> list[Series]:
    """Return observed against predicted (in percent), and the diagonal."""
    observed = [(100 * one.predicted, one.observed) for one in best.evaluation.reliability]
    diagonal = Series("calibrated", [(50.0, 0.5), (100.0, 1.0)], 6)
    return [Series("observed", observed, 1, markers=True), diagonal] if observed else []


def charts(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Series]]]:
    """Return title and lines of every chart that has data."""

    def series(name: str, key: str, colour: int) -> Series:
        points = [(line["step"], math.nan if line[key] is None else line[key]) for line in metrics if key in line]
        held_out = key.startswith("val/")
        return Series(name, points, colour, markers=held_out, smooth=not held_out)

    rated = dict.fromkeys(key for line in metrics for key in line if key.startswith("val/pearson_"))
    correlations = [series(key.removeprefix("val/pearson_"), key, i % 6 + 1) for i, key in enumerate(rated)]
    found = [
        ("Loss", [series("training", "train/loss", 1), series("held out", "val/loss", 3)]),
        ("Pairs ordered rightly", [series("training", "train/accuracy", 1), series("held out", "val/accuracy", 3)]),
        ("Calibration error", [series("held out", "val/calibration_error", 3)]),
        ("Correlation with held-out ratings", correlations),
        ("Gradient norm", [series("gradient norm", "train/grad_norm", 1)]),
        ("Learning rate", [series("learning rate", "train/lr", 1)]),
    ]
    return [(title, lines) for title, lines in found if any(line.points for line in lines)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "reinforce_rl.reward_model.report", write_report))
