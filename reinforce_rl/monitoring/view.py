"""The page of a run (`page/`), and its content as JSON values.

The size does not grow with the run: long curves are averaged in bins, and samples are loaded by
step.
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader

from reinforce_rl.monitoring.glossary import CHARTS, Chart, metric_of
from reinforce_rl.monitoring.progress import PHASES
from reinforce_rl.monitoring.records import Kind
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.utils.files import plain_number

PAGE = Path(__file__).parent / "page"
MAX_POINTS = 600  # of a line; more points are averaged in bins, except for the last
MAX_ROWS = 2000  # samples of a step on the page
# Limits of a page without a server, for each kind of samples.
_FROZEN_STEPS = 5
_FROZEN_ROWS = 96
_FROZEN_TOKENS = 4000  # of the last step
_IDS = ("prompt_tokens", "response_tokens")


def curves(run: RunFolder, validated: int = 0) -> dict[str, Any]:
    """Return all metrics, thinned, and the charts that have data.

    Args:
        validated: prompts of a validation, for the error of its reward; 0 for no error.

    Returns:
        `axes`: [{step, time}, ...]; `series`: {metric: {axis: index, y: values}}, where
        METRIC_error is a standard error; `about`: {metric: its meaning}; `charts`: [{title, unit,
        form, lines: [[name, metric], ...]}, ...].
    """
    run.metric_names()  # reads the file if it was never read
    with np.errstate(all="ignore"):
        derived = {**_rest(run), **_errors(run, _samples_per_step(run), validated)}
    metrics = run.metrics
    steps = metrics.steps()
    times = metrics.dense("time")
    order = metrics.order()
    finite = {
        key for key in metrics.names() if np.isfinite(metrics.series(key)[1]).any()
    } | derived.keys()
    names = [key for key in dict.fromkeys([*metrics.names(), *derived]) if key != "time"]
    charts = [(chart, _lines(chart, names, finite)) for chart in CHARTS]
    peaks = {key for chart, lines in charts if chart.peaks for _, key in lines}
    axes: dict[tuple[Any, ...], int] = {}
    series = {}
    for key in names:
        if key in derived:
            rows = np.flatnonzero(np.isfinite(derived[key]))
            if order is not None:
                rows = order[np.isin(order, rows)]
            values = derived[key][rows]
        else:
            rows = metrics.rows_of(key)
            values = metrics.series(key)[1]
        bins, y = _thinned(values, np.maximum if key in peaks else np.add)
        ends = rows[bins]
        axis = (tuple(steps[ends].tolist()), tuple(map(plain_number, times[ends].tolist())))
        series[key] = {
            "axis": axes.setdefault(axis, len(axes)),
            "y": [_short(value) for value in y.tolist()],
        }
    return {
        "axes": [{"step": axis[0], "time": axis[1]} for axis in axes],
        "series": series,
        "about": {
            key: f"{metric.meaning}. What to look for: {metric.look}."
            for key in series
            if (metric := metric_of(key))
        },
        "charts": [
            {"title": c.title, "unit": c.unit, "form": c.form, "lines": lines}
            for c, lines in charts
            if lines
        ],
    }


def _samples_per_step(run: RunFolder) -> tuple[int, int]:
    """Return the prompts of a step and the responses to each; zeros if they are unknown."""
    steps = run.sample_steps()
    rows = run.samples(steps[-1]) if steps else []
    prompts = len({row.prompt_id for row in rows})
    return prompts, len(rows) // prompts if prompts else 0


def _rest(run: RunFolder) -> dict[str, np.ndarray]:
    """Return the seconds of each line's step outside of its phases; NaN if unknown."""
    known = sum(np.nan_to_num(run.metrics.dense(f"timers/{name}")) for name in PHASES)
    left = run.metrics.dense("timers/step_time") - known
    return {"timers/rest of the step": np.maximum(left, 0.0)} if np.isfinite(left).any() else {}


def _errors(
    run: RunFolder, samples_per_step: tuple[int, int], validated: int
) -> dict[str, np.ndarray]:
    """Return the standard error of each line's mean reward; NaN if unknown."""
    errors = {}
    prompts, responses = samples_per_step
    if prompts:
        # Prompts are drawn at random: the variance between prompts counts once for each prompt.
        variance = run.metrics.dense("train/reward_std") ** 2
        within = run.metrics.dense("train/reward_group_std") ** 2
        inside = np.where(np.isfinite(within), within, variance)
        between = np.maximum(variance - inside, 0.0)
        errors["train/rewards_error"] = np.sqrt(between / prompts + inside / (prompts * responses))
    if validated:
        errors["val/rewards_error"] = run.metrics.dense("val/reward_std") / math.sqrt(validated)
    return {key: values for key, values in errors.items() if np.isfinite(values).any()}


def _lines(chart: Chart, names: Sequence[str], finite: Collection[str]) -> list[tuple[str, str]]:
    """Return (name, metric) of the lines with a finite point."""
    lines = []
    for name, pattern in chart.lines.items():
        begin, _, end = pattern.partition("*")
        for key in sorted(key for key in names if key in finite and fnmatch(key, pattern)):
            is_other = "*" in pattern and key.endswith(("_with_kl", "_error"))
            if not is_other:
                lines.append((name.replace("*", key[len(begin) : len(key) - len(end)]), key))
    return lines


def _thinned(values: np.ndarray, reduce: np.ufunc) -> tuple[np.ndarray, np.ndarray]:
    """Return the last index of each bin, and the bin's value.

    It is the mean, or another reduction, of the finite values; NaN without any. The last value has
    a separate bin, so that the curve ends with the run's current value.
    """
    num_values = len(values)
    if num_values <= MAX_POINTS:
        return np.arange(num_values), values
    size = math.ceil((num_values - 1) / (MAX_POINTS - 1))
    starts = np.append(np.arange(0, num_values - 1, size), num_values - 1)
    is_finite = np.isfinite(values)
    counts = np.add.reduceat(is_finite.astype(np.int64), starts)
    with np.errstate(all="ignore"):
        reduced = reduce.reduceat(
            np.where(is_finite, values, 0.0 if reduce is np.add else -np.inf), starts
        )
    if reduce is np.add:
        reduced = reduced / np.maximum(counts, 1)
    return np.append(starts[1:], num_values) - 1, np.where(counts > 0, reduced, math.nan)


def _short(value: float) -> float | None:
    return plain_number(float(f"{value:.6g}"))


def token_values(
    run: RunFolder, step: int, kind: Kind, prompts: Sequence[int]
) -> dict[str, dict[str, list[Any]]]:
    """Return {"PROMPT SAMPLE": {column: values}} of these prompts' samples.

    Empty if tokens were not recorded.
    """
    return {
        f"{prompt_id} {sample_id}": {
            name: [_short(value) if isinstance(value, float) else value for value in values]
            for name, values in vars(tokens).items()
            if name not in _IDS and values is not None
        }
        for (prompt_id, sample_id), tokens in run.tokens(step, prompts, kind).items()
    }


def frozen_page(
    runs: Mapping[str, tuple[RunFolder, Mapping[str, Any]]], tables: Sequence[Any] = ()
) -> str:
    """Return the page in one file; `runs` has runs and their overviews by name."""
    data: dict[str, Any] = {"runs": {}, "samples": {}, "tokens": {}, "tables": tables}
    for name, (run, shown) in runs.items():
        data["runs"][name] = shown
        data["samples"][name], data["tokens"][name] = _frozen_samples(run)
    return render(data)


def _frozen_samples(run: RunFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return samples of the first, the last and a few other steps, and some tokens of the last.

    Both are {kind: {step: ...}}.
    """
    rows: dict[str, Any] = {}
    tokens: dict[str, Any] = {}
    for kind, steps in run.kinds().items():
        last = len(steps) - 1
        chosen = sorted(
            {steps[round(i * last / (_FROZEN_STEPS - 1))] for i in range(_FROZEN_STEPS)}
        )
        rows[kind] = {
            step: [row.as_json() for row in run.samples(step, kind)[:_FROZEN_ROWS]]
            for step in chosen
        }
        ends = itertools.accumulate(row["response_length"] for row in rows[kind][steps[-1]])
        pairs = zip(rows[kind][steps[-1]], ends, strict=True)
        prompts = {row["prompt_id"] for row, end in pairs if end <= _FROZEN_TOKENS}
        tokens[kind] = {steps[-1]: token_values(run, steps[-1], kind, sorted(prompts))}
    return rows, tokens


def render(data: Mapping[str, Any] | None = None) -> str:
    """Return the page with `data` inside (see `dashboard.js`), or a page that loads it."""
    environment = Environment(loader=FileSystemLoader(PAGE), autoescape=True)
    # No "<" inside a script element: a response could close it.
    text = (
        json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
        if data
        else ""
    )
    return environment.get_template("index.html").render(
        data=text, plotly=_packed_plotly() if data else ""
    )


def plotly() -> str:
    """Return the plotly.js of the Python package."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


@functools.cache
def _packed_plotly() -> str:
    return base64.b64encode(zlib.compress(plotly().encode(), 6)).decode()
