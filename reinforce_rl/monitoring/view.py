"""What the page shows of a run, as plain values that become JSON, and the page itself (`page/`).

The size does not grow with the run: long curves are averaged in bins, and samples come step by step.
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
import math
import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from reinforce_rl.monitoring.glossary import metric_of
from reinforce_rl.monitoring.progress import PHASES
from reinforce_rl.monitoring.records import Kind
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.monitoring.sentinel import number
from reinforce_rl.utils.files import plain_number

PAGE = Path(__file__).parent / "page"
MAX_POINTS = 600  # of a line; more are averaged in bins
MAX_ROWS = 2000  # samples of a step that are sent
# In a page without a server: of each kind of samples, and of the last step of each.
_FROZEN_STEPS, _FROZEN_ROWS, _FROZEN_TOKENS = 5, 96, 4000
_IDS = ("prompt_tokens", "response_tokens")
Point = tuple[int, float | None, float]  # step, unix seconds, value


@dataclass(frozen=True)
class Chart:
    title: str
    lines: Mapping[str, str]  # name -> metric; in a pattern, * is the name
    unit: str = ""
    form: str = ""  # "percent" or "stacked"
    peaks: bool = False  # bins keep their largest value, so that no spike is averaged away


_ENDED = "fraction_of_samples_properly_ended"
_NAMES = ("generation", "log-probs", "reference log-probs", "waiting for rewards", "update", "rest")
_PHASES = dict(zip(_NAMES, (*PHASES, "rest of the step"), strict=True))
CHARTS = (
    Chart("Reward", {"training": "train/rewards", "validation": "val/rewards", "*": "val/*/rewards"}),
    Chart("Reward by source", {"*": "train/rewards_*", "*, validation": "val/rewards_*"}),
    Chart("KL to the start", {"training": "train/init_policy_kl"}, "nats a response"),
    Chart("Response length", {"training": "train/response_lengths", "validation": "val/response_lengths"}, "tokens"),
    Chart("Ended by themselves", {"training": f"train/{_ENDED}", "validation": f"val/{_ENDED}"}, "share", "percent"),
    Chart("Loss", {"training": "train/actor_loss", "training, pairs": "train/loss", "held out": "val/loss"}),
    Chart("Pairs ordered rightly", {"training": "train/accuracy", "held out": "val/accuracy"}, "share", "percent"),
    Chart("Calibration error", {"held out": "val/calibration_error"}),
    Chart("Correlation with held-out ratings", {"*": "val/pearson_*"}),
    Chart("Gradient norm", {"training": "train/grad_norm"}, peaks=True),
    Chart("Step time by phase", {name: f"timers/{phase}" for name, phase in _PHASES.items()}, "seconds", "stacked"),
    Chart("Peak memory by phase", {name: f"memory/{phase}" for name, phase in _PHASES.items()}, "GB"),
    Chart("Entropy", {"training": "train/entropy"}, "nats a token"),
    Chart("Reward minus β KL", {"training": "train/rewards_with_kl"}),
    Chart("Learning rate", {"training": "train/lr"}),
)


def curves(run: RunFolder, validated: int = 0) -> dict[str, Any]:
    """Return all metrics, thinned, and the charts that have data.

    Args:
        validated: prompts of a validation, for the error of its reward; 0 for no error.

    Returns:
        `axes`: [{step, time}, ...]; `series`: {metric: {axis: index, y: values}}, where METRIC_error is a standard
        error; `about`: {metric: what it means}; `charts`: [{title, unit, form, lines: [[name, metric], ...]}, ...].
    """
    columns: dict[str, list[Point]] = {}
    shape = _samples_per_step(run)
    for line in run.lines:
        step, time = line["step"], line.get("time")
        for key, value in (line | _rest(line) | _errors(line, shape, validated)).items():
            if key not in ("step", "time") and isinstance(value, int | float | None):
                columns.setdefault(key, []).append((step, time, number(value)))
    charts = [(chart, _lines(chart, columns)) for chart in CHARTS]
    peaks = {key for chart, lines in charts if chart.peaks for _, key in lines}
    axes: dict[tuple[Any, ...], int] = {}
    series = {}
    for key, points in columns.items():
        steps, y = _thinned(points, max if key in peaks else statistics.fmean)
        series[key] = {"axis": axes.setdefault(steps, len(axes)), "y": [_short(value) for value in y]}
    return {
        "axes": [{"step": [step for step, _ in axis], "time": [time for _, time in axis]} for axis in axes],
        "series": series,
        "about": {key: f"{found.meaning}. Look: {found.look}." for key in series if (found := metric_of(key))},
        "charts": [{"title": c.title, "unit": c.unit, "form": c.form, "lines": lines} for c, lines in charts if lines],
    }


def _samples_per_step(run: RunFolder) -> tuple[int, int]:
    """Return the prompts of a step and the responses to each; zeros if the run does not say."""
    steps = run.sample_steps()
    rows = run.samples(steps[-1]) if steps else []
    prompts = len({row.prompt_id for row in rows})
    return prompts, len(rows) // prompts if prompts else 0


def _rest(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step outside of its phases; nothing without a time of the step."""
    known = sum(filter(math.isfinite, (number(line.get(f"timers/{name}")) for name in PHASES)))
    left = number(line.get("timers/step_time")) - known
    return {"timers/rest of the step": max(0.0, left)} if math.isfinite(left) else {}


def _errors(line: Mapping[str, Any], samples_per_step: tuple[int, int], validated: int) -> dict[str, float]:
    found = {}
    prompts, responses = samples_per_step
    deviation, within = number(line.get("train/reward_deviation")), number(line.get("train/reward_group_deviation"))
    if prompts and math.isfinite(deviation):
        # The mean of prompts drawn at random: the variance between prompts counts once for each prompt.
        inside = within**2 if math.isfinite(within) else deviation**2
        between = max(0.0, deviation**2 - inside)
        found["train/rewards_error"] = math.sqrt(between / prompts + inside / (prompts * responses))
    if validated and math.isfinite(spread := number(line.get("val/reward_deviation"))):
        found["val/rewards_error"] = spread / math.sqrt(validated)
    return found


def _lines(chart: Chart, columns: Mapping[str, Sequence[Point]]) -> list[tuple[str, str]]:
    """Return (name, metric) of the lines that have a finite point."""
    found = []
    for name, pattern in chart.lines.items():
        begin, _, end = pattern.partition("*")
        for key in sorted(key for key in columns if fnmatch(key, pattern)):
            is_other = "*" in pattern and key.endswith(("_with_kl", "_error"))
            if not is_other and any(math.isfinite(y) for _, _, y in columns[key]):
                found.append((name.replace("*", key[len(begin) : len(key) - len(end)]), key))
    return found


def _thinned(
    points: Sequence[Point], reduce: Callable[[Sequence[float]], float]
) -> tuple[tuple[Any, ...], list[float]]:
    size = math.ceil(len(points) / MAX_POINTS)
    bins = [points[start : start + size] for start in range(0, len(points), size)]
    finite = [[y for _, _, y in one if math.isfinite(y)] for one in bins]
    return tuple((one[-1][0], one[-1][1]) for one in bins), [reduce(ys) if ys else math.nan for ys in finite]


def _short(value: float) -> float | None:
    return plain_number(float(f"{value:.6g}"))


def token_values(run: RunFolder, step: int, kind: Kind, prompts: Sequence[int]) -> dict[str, dict[str, list[Any]]]:
    """Return {"PROMPT SAMPLE": {column: values}} of the samples of these prompts, where tokens were recorded."""
    return {
        f"{prompt_id} {sample_id}": {
            name: [_short(value) if isinstance(value, float) else value for value in values]
            for name, values in vars(tokens).items()
            if name not in _IDS and values is not None
        }
        for (prompt_id, sample_id), tokens in run.tokens(step, prompts, kind).items()
    }


def frozen_page(runs: Mapping[str, tuple[RunFolder, Mapping[str, Any]]], tables: Sequence[Any] = ()) -> str:
    """Return the page in one file: by name, runs with their overviews; `tables` compare them."""
    found: dict[str, Any] = {"runs": {}, "samples": {}, "tokens": {}, "tables": tables}
    for name, (run, shown) in runs.items():
        found["runs"][name] = shown
        found["samples"][name], found["tokens"][name] = _frozen_samples(run)
    return render(found)


def _frozen_samples(run: RunFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the samples of the first, the last and a few steps between, and the tokens of some of the last.

    Both are {kind: {step: ...}}.
    """
    rows: dict[str, Any] = {}
    tokens: dict[str, Any] = {}
    for kind, steps in run.kinds().items():
        last = len(steps) - 1
        chosen = sorted({steps[round(i * last / (_FROZEN_STEPS - 1))] for i in range(_FROZEN_STEPS)})
        rows[kind] = {step: [row.as_json() for row in run.samples(step, kind)[:_FROZEN_ROWS]] for step in chosen}
        ends = itertools.accumulate(row["response_length"] for row in rows[kind][steps[-1]])
        pairs = zip(rows[kind][steps[-1]], ends, strict=True)
        prompts = {row["prompt_id"] for row, end in pairs if end <= _FROZEN_TOKENS}
        tokens[kind] = {steps[-1]: token_values(run, steps[-1], kind, sorted(prompts))}
    return rows, tokens


def render(data: Mapping[str, Any] | None = None) -> str:
    """Return the page with `data` inside (see `board.js`), or the one that asks the server for it."""
    environment = Environment(loader=FileSystemLoader(PAGE), autoescape=True)
    # No "<" inside a script element: a response could close it.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c") if data else ""
    return environment.get_template("index.html").render(data=text, plotly=_packed_plotly() if data else "")


def plotly() -> str:
    """Return plotly.js, which comes with the Python package."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


@functools.cache
def _packed_plotly() -> str:
    return base64.b64encode(zlib.compress(plotly().encode(), 6)).decode()
