"""Summary of a run's changes as text, and `report.html`, the dashboard's page in one file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from operator import attrgetter
from pathlib import Path
from typing import Any

from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.alerts import GAP_LIMITS
from reinforce_rl.monitoring.paired import REWARD, compare_validation
from reinforce_rl.monitoring.progress import clock, formatted
from reinforce_rl.monitoring.records import worst_tokens
from reinforce_rl.monitoring.run_folder import RunFolder, open_run
from reinforce_rl.monitoring.view import curves, frozen_page
from reinforce_rl.utils.files import plain_number, write_atomically
from reinforce_rl.utils.statistics import LEVEL, Difference, chance, finite_mean
from reinforce_rl.utils.untrusted_files import check_regular, read_json

EVALUATION_FILE = "evaluation.json"  # the best evaluation of reward-model training
_ENDED = "fraction_of_samples_properly_ended"
_QUANTITIES = (  # name, metric, form
    ("Reward", "rewards", ".3f"),
    ("Reward with KL", "rewards_with_kl", ".3f"),
    ("KL, nats a response", "init_policy_kl", ".3f"),
    ("Response length, tokens", "response_lengths", ".1f"),
    ("Not truncated", _ENDED, ".1%"),
)
_MAX_TABLE_BYTES = 16 << 20  # of an evaluation or a profile's table
_MAX_TIME = 253_370_764_800  # unix seconds of the year 9999
_MAX_SOURCES = 50  # compared sources of a reward
_PROFILES = 3  # the last profiled steps, on the page
_OPERATIONS = 12  # of a profiled step, on the page
_CALIBRATION = (
    "Pairs by the predicted probability that the answer with the higher score is the preferred one "
    "(the sigmoid of the difference of their scores), and how often it is. For a calibrated model "
    "both are equal."
)


def comparison(run: RunFolder, key: str = "rewards") -> Difference | None:
    """Compare a metric of the first and the last validation by prompt; None with fewer than two."""
    if run.validations is None:
        return None
    source = key.removeprefix("rewards_")
    known = {
        "rewards": REWARD,
        "response_lengths": attrgetter("response_length"),
        _ENDED: attrgetter("is_end"),
    }
    value = known.get(key, lambda row: row.source_rewards.get(source, math.nan))
    return compare_validation(*run.validations, value)


def summarize(run: RunFolder) -> list[list[str]]:
    """Return quantities before and after, from validations and the first and last training steps.

    Each row has a name with its unit, the value before, the value after, the change with its
    standard error and p, and the data of the measurement.
    """
    sources = [key[4:] for key in run.metric_names() if key.startswith("val/rewards_")]
    left_out = len(sources) - _MAX_SOURCES
    sources = sources[:_MAX_SOURCES]
    rows = []
    for name, key, form in (
        _QUANTITIES[0],
        *((f"  {key[8:]}", key, ".3f") for key in sources),
        *_QUANTITIES[1:],
    ):
        rows.append(_row_of_validation(run, name, key, form))
        if key not in sources:
            rows.append(_row_of_training(run, name, key, form))
    if left_out > 0:
        reason = f"not compared, as there are over {_MAX_SOURCES}"
        rows.append([f"{left_out} more sources", "-", "-", "-", reason])
    return [row for row in rows if row]


def _row_of_validation(run: RunFolder, name: str, key: str, form: str) -> list[str]:
    """Return the quantity's row of `summarize`, paired by prompt where possible; [] for none."""
    difference = comparison(run, key)
    if difference is not None and difference.n:
        basis = f"validation, the same {difference.n} prompts"
        change = difference.change(form)
        if difference.p >= 0:
            change += f", {chance(difference.p)}"
        return _row(name, difference.mean_before, difference.mean_after, form, basis, change)
    values = run.values(f"val/{key}").tolist()
    if len(values) > 1 and key != "rewards":
        return _row(name, values[0], values[-1], form, "validation")
    return []


def _row_of_training(run: RunFolder, name: str, key: str, form: str) -> list[str]:
    values = run.values(f"train/{key}").tolist()
    window = min(10, len(values) // 2)  # the first and the last steps must not overlap
    if not window:
        return _row(name, finite_mean(values), math.nan, form, "training, one step")
    steps = f"{window} steps" if window > 1 else "step"
    basis = f"training, first and last {steps}, not paired"
    return _row(name, finite_mean(values[:window]), finite_mean(values[-window:]), form, basis)


def _row(
    name: str, before: float, after: float, form: str, basis: str, change: str = ""
) -> list[str]:
    if not (math.isfinite(before) or math.isfinite(after)):
        return []
    change = change or formatted(f"+{form}", after - before)
    return [name, formatted(form, before), formatted(form, after), change, basis]


def verdict(run: RunFolder) -> str:
    """Describe the change of the validation reward in one sentence."""
    difference = comparison(run)
    if difference is None:
        return "The reward has not been compared: that needs a validation before and one after."
    return f"Validation reward, first and last: {difference.sentence()}."


def run_summary(run_dir: str | Path, places: Mapping[str, str | Path] | None = None) -> str:
    """Return a script's last lines: the changes, and paths.

    `places` adds paths, e.g. {"checkpoint": path}.
    """
    run = RunFolder(run_dir)
    rows = summarize(run)
    lines = [verdict(run)]
    name_width = max((len(row[0]) for row in rows), default=0)
    change_width = max((len(row[3]) for row in rows), default=0)
    for name, before, after, change, basis in rows:
        lines.append(
            f"  {name:<{name_width}}  {before:>8} -> {after:>8}  {change:<{change_width}}  "
            f"({basis})"
        )
    named = {"run folder": run_dir, **(places or {})}
    place_width = max(len(name) for name in named)
    lines += [f"  {name:<{place_width}}  {place}" for name, place in named.items()]
    return "\n".join(lines)


def overview(run: RunFolder, seconds: float = math.inf) -> dict[str, Any]:
    """Return the page's content for a run, without its samples.

    The rules of the alerts may take `seconds`.
    """
    difference = comparison(run)
    state = run.state()
    config = run.configuration()
    columns = ["", "before", "after", "change", "measured on"]
    summary = {"title": "Before and after", "columns": columns, "rows": summarize(run)}
    shown = {
        "name": run.name,
        "state": {name: getattr(state, name) for name in ("state", "reason", "step", "max_steps")},
        "span": _span(run),
        "verdict": verdict(run) if difference or "train/rewards" in run.metric_names() else "",
        "tone": _tone(difference),
        "tables": [summary, *_gap_tables(run), *_profile_tables(run)],
        "alerts": [asdict(alert) for alert in run.alerts(seconds)],
        "config": {
            "text": config.text,
            "changes": config.changes,
            "settings": [
                [setting.key, json.dumps(setting.value), json.dumps(setting.default)]
                for setting in config.settings
            ],
        },
        "kinds": run.kinds(),
        **curves(run, difference.n if difference else 0),
    }
    return shown | (_of_reward_model(run) if "train/loss" in run.metric_names() else {})


def _tone(difference: Difference | None) -> str:
    """Return the colour of the verdict; "" for a change that could be chance."""
    if difference is None or not difference.p < LEVEL:
        return ""
    return "good" if difference.mean_difference > 0 else "bad"


def _of_reward_model(run: RunFolder) -> dict[str, Any]:
    """Return verdict, tables and figures of the best evaluation in reward-model training."""
    path = run.path / EVALUATION_FILE
    if not path.exists():
        return {"verdict": "There has been no evaluation since the first step."}
    try:
        best = _read_table(run, path)
        evaluation = best["evaluation"]
        values = {"loss": evaluation["loss"], **evaluation["metrics"]}
        of_best = {
            "title": "The best model on held-out data",
            "columns": [f"of step {best['step']}", "value"],
            "rows": [[key.replace("_", " "), f"{value:.4f}"] for key, value in values.items()],
        }
        verdict_of_best = _verdict_of_best(run, best)
        bins = evaluation["reliability"]
        calibration = _calibration_table(bins)
        figure = _calibration_figure(bins)
    except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(
            f"{path} is not an evaluation ({error!r}); remove it, or start the run again",
            key="report.evaluation.damaged",
        ) from error
    if not bins:
        return {"verdict": verdict_of_best, "tables": [of_best], "figures": []}
    return {"verdict": verdict_of_best, "tables": [of_best, calibration], "figures": [figure]}


def _verdict_of_best(run: RunFolder, best: Mapping[str, Any]) -> str:
    metrics = best["evaluation"]["metrics"]
    before = next((loss for _, loss in run.series("val/loss") if math.isfinite(loss)), math.nan)
    after = best["evaluation"]["loss"]
    sentence = f"The held-out loss went from {before:.4f} to {after:.4f} (step {best['step']})"
    if "accuracy" in metrics:
        sentence += (
            f"; the accuracy on held-out pairs is {metrics['accuracy']:.1%} ± "
            f"{metrics['accuracy_standard_error']:.1%}, against "
            f"{metrics['length_baseline_accuracy']:.1%} for 'the longer answer wins'"
        )
    return f"{sentence}."


def _calibration_table(bins: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = []
    for bin_ in bins:
        probabilities = f"{bin_['low']:.2f} to {bin_['high']:.2f}"
        means = (f"{bin_['predicted']:.3f}", f"{bin_['observed']:.3f}")
        rows.append([probabilities, str(bin_["count"]), *means])
    return {
        "title": "Calibration",
        "note": _CALIBRATION,
        "columns": ["predicted", "pairs", "mean predicted", "observed"],
        "rows": rows,
    }


def _calibration_figure(bins: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    observed = {
        "name": "observed",
        "x": [plain_number(100.0 * bin_["predicted"]) for bin_ in bins],
        "y": [plain_number(bin_["observed"]) for bin_ in bins],
    }
    calibrated = {"name": "calibrated", "x": [50.0, 100.0], "y": [0.5, 1.0]}
    return {
        "title": "Predicted and observed",
        "unit": "share of pairs, by prediction",
        "x": "predicted, %",
        "form": "percent",
        "lines": [observed, calibrated],
    }


def _gap_tables(run: RunFolder) -> list[dict[str, Any]]:
    """Return the last step's tokens with the largest gaps between trainer and generator."""
    step, path = max(run.files().items(), default=(0, Path()))
    if step:
        check_regular(path, within=run.within)
    tokens = []
    if path.suffix == ".parquet":
        tokens = worst_tokens(path, above=GAP_LIMITS["generator_logprob_diff"], is_own=run.is_own)
    if not tokens:
        return []
    shown = {
        "title": f"Step {step}: tokens with the largest gap",
        "note": (
            "Their log-probs by trainer and generator: see docs/algorithms.md#engine-and-trainer"
        ),
        "columns": [
            "prompt",
            "sample",
            "position",
            "token",
            "after",
            "by the trainer",
            "by the generator",
        ],
        "rows": [
            [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in token]
            for token in tokens
        ],
    }
    return [shown]


def _read_table(run: RunFolder, path: Path) -> Any:
    return read_json(path, max_bytes=_MAX_TABLE_BYTES, within=run.within)


def _profile_tables(run: RunFolder) -> list[dict[str, Any]]:
    """Return the top operations of the profiled steps that `runtime/profiling.py` wrote."""
    path = run.path / "profile" / "top_operations.json"
    if not path.exists():
        return []
    try:
        return [
            {
                "title": (
                    f"Step {step['step']}: top operations of rank {step['rank']}, {step['device']}"
                ),
                "note": f"{step['seconds']:.2f} s in all; the trace is profile/{step['trace']}",
                "columns": ["operation", "calls", "own seconds", "share"],
                "rows": [
                    [
                        operation["name"],
                        str(operation["calls"]),
                        f"{operation['self_seconds']:.3f}",
                        f"{operation['share']:.1%}",
                    ]
                    for operation in step["operations"][:_OPERATIONS]
                ],
            }
            for step in _read_table(run, path)["steps"][-_PROFILES:]
        ]
    except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(
            f"{path} is not the table of a profile ({error!r}); remove it, and profile again",
            key="report.profile.damaged",
        ) from error


def write_report(run_dir: str | Path, *, has_ended: bool = False) -> Path:
    """Write `report.html` from the existing files of `run_dir`; return its path.

    Args:
        has_ended: whether the run itself calls this at its end, before its status is `finished`.

    Raises:
        DataError: `run_dir` holds no run, a file of it cannot be read, or the folder cannot be
            written to.
    """
    run = open_run(run_dir, is_own=has_ended)
    path = run.path / "report.html"
    shown = overview(run)
    if has_ended:
        shown["state"]["state"] = "finished"
    try:
        write_atomically(path, frozen_page({run.name: (run, shown)}))
    except PermissionError as error:
        advice = "look at it with `reinforce-rl dashboard`, or copy the folder to one of your own"
        raise DataError(
            f"{path} cannot be written: {error.strerror}; {advice}",
            key="report.file.not_writable",
        ) from error
    return path


def _span(run: RunFolder) -> str:
    _, times = run.metrics.series("time")
    # Dates have years of four digits.
    times = times[(times >= 0) & (times < _MAX_TIME)]
    if not len(times):
        return "No step has been logged yet."
    # The first line was written at the end of a step.
    first_step = run.metrics.lines(0, 1)[0].get("timers/step_time") or 0.0
    start = max(0.0, times.min() - first_step)
    end = float(times.max())
    begin, finish = (
        datetime.fromtimestamp(t, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        for t in (start, end)
    )
    steps = run.metrics.num_training
    counted = "1 training step" if steps == 1 else f"{steps} training steps"
    return f"{begin} to {finish} UTC, {clock(end - start)} from start to end, {counted}"
