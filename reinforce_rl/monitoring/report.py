"""`report.html`: a run as one self-contained page, without scripts or network access.

`python -m reinforce_rl.monitoring.report RUN_DIR` writes it, also during the run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from reinforce_rl.errors import DataError, ReinforceError
from reinforce_rl.monitoring.charts import MAX_POINTS, Series, area_chart, legend, line_chart
from reinforce_rl.monitoring.progress import PHASES, clock
from reinforce_rl.monitoring.report_template import PAGE, STYLE
from reinforce_rl.monitoring.rollouts import RolloutRow
from reinforce_rl.monitoring.summary import RunRecord, load_run, slowest_rank, summarize, verdict
from reinforce_rl.runtime.settings import CONFIG_FILE, flatten, settings_of
from reinforce_rl.utils.files import write_atomically

_EVEN_SAMPLES = 6
_EXTREME_SAMPLES = 3
# Keys of the configuration that the page shows at once, where they are set; the whole file is one click away.
_FACTS = (
    "trainer.reinforce",
    "trainer.devices",
    "trainer.num_nodes",
    "pretrained_checkpoint.restore_from_path",
    "model.tensor_model_parallel_size",
    "model.global_batch_size",
    "model.micro_batch_size",
    "model.optim.name",
    "model.optim.lr",
    "model.seed",
)


@dataclass(frozen=True)
class _Chart:
    title: str
    legend: Markup
    svg: Markup


def write_report(run_dir: str | Path, out: str | Path = "report.html") -> Path:
    """Write the page from the files of `run_dir` that exist; return its path. A relative `out` is below `run_dir`.

    Raises:
        DataError: `run_dir` is absent, or a file of it cannot be read.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise DataError(f"{run_dir}: no such folder; expected the folder of a run")
    run = load_run(run_dir)
    config, facts, changes = _config(run_dir, run.metrics[-1]["step"] if run.metrics else 0)
    even, extremes = _validation_samples(run)
    best, worst = _best_and_worst(run)
    environment = Environment(autoescape=True)
    environment.filters["known"] = math.isfinite
    environment.filters["number"] = lambda value: f"{value:.3f}" if math.isfinite(value) else "failed"
    page = environment.from_string(PAGE).render(
        style=Markup(STYLE),
        name=run_dir.resolve().name,
        span=_span(run),
        verdict=verdict(run),
        tone=_tone(run),
        summary=summarize(run),
        facts=facts,
        config=config,
        changes=changes,
        charts=_charts(run),
        slowest_rank=slowest_rank(run),
        max_points=MAX_POINTS,
        even=even,
        extremes=extremes,
        best=best,
        worst=worst,
        rollout_step=run.last_rollouts[0] if run.last_rollouts else None,
    )
    path = run_dir / out
    write_atomically(path, page)
    return path


def _charts(run: RunRecord) -> list[_Chart]:
    def train(key: str, name: str = "training", colour: int = 1) -> Series:
        return Series(name, run.series(f"train/{key}"), colour, smooth=True)

    def validation(key: str) -> Series:
        return Series("validation", run.series(f"val/{key}"), 3, markers=True)

    ended = "fraction_of_samples_properly_ended"
    reward = [train("rewards"), train("rewards_with_kl", "training, with KL", 2), validation("rewards")]
    lines: list[tuple[str, list[Series], dict[str, Any]]] = [
        ("Reward", reward, {}),
        ("KL to the initial policy, nats a response", [train("init_policy_kl")], {}),
        ("Response length, tokens", [train("response_lengths"), validation("response_lengths")], {"zero": True}),
        ("Share of responses that ended by themselves", [train(ended), validation(ended)], {"percent": True}),
        ("Gradient norm", [train("grad_norm")], {"zero": True}),
        ("Loss of the actor", [train("actor_loss")], {}),
        ("Learning rate", [Series("learning rate", run.series("train/lr"), 1)], {"zero": True}),
    ]
    charts = [
        _Chart(title, Markup(legend(series)) if len(series) > 1 else Markup(), Markup(line_chart(series, **look)))
        for title, series, look in lines
    ]
    phases = _phase_series(run.metrics)
    charts.append(_Chart("Seconds a step, by phase", Markup(legend(phases)), Markup(area_chart(phases))))
    return charts


def _phase_series(metrics: Sequence[Mapping[str, Any]]) -> list[Series]:
    keys = [f"timers/{name}" for name in PHASES]
    timed = [line for line in metrics if any(key in line for key in [*keys, "timers/step_time"])]

    def seconds(line: Mapping[str, Any], key: str) -> float:
        value = line.get(key)
        return math.nan if value is None else float(value)

    series = []
    for colour, (name, key) in enumerate(zip(PHASES, keys, strict=True), 1):
        points = [(line["step"], seconds(line, key)) for line in timed]
        if any(math.isfinite(y) for _, y in points):
            series.append(Series(name, points, colour))
    rest = []
    for line in timed:
        parts = [seconds(line, key) for key in keys]
        known = sum(value for value in parts if math.isfinite(value))
        rest.append((line["step"], max(0.0, seconds(line, "timers/step_time") - known)))
    if any(math.isfinite(y) for _, y in rest):
        series.append(Series("rest of the step", rest, 6))
    return series


def _validation_samples(run: RunRecord) -> tuple[list, list]:
    """Return pairs (before, after) of the same prompt: evenly spaced ones, and those with extreme differences."""
    if run.first_validation is None or run.last_validation is None:
        return [], []
    after = {(row.prompt_id, row.sample_id): row for row in run.last_validation[1]}
    ordered = sorted(run.first_validation[1], key=lambda row: (row.prompt_id, row.sample_id))
    pairs = [(row, after[key]) for row in ordered if (key := (row.prompt_id, row.sample_id)) in after]
    count = min(_EVEN_SAMPLES, len(pairs))
    even = [pairs[index * len(pairs) // count] for index in range(count)]
    shown = {pair[0].prompt_id for pair in even}
    moved = sorted(
        (pair for pair in pairs if math.isfinite(pair[1].reward - pair[0].reward) and pair[0].prompt_id not in shown),
        key=lambda pair: pair[1].reward - pair[0].reward,
    )
    extremes = [moved[-1], moved[0]] if len(moved) > 1 else moved
    return even, extremes


def _best_and_worst(run: RunRecord) -> tuple[list[RolloutRow], list[RolloutRow]]:
    if run.last_rollouts is None:
        return [], []
    ordered = sorted((row for row in run.last_rollouts[1] if math.isfinite(row.reward)), key=lambda row: -row.reward)
    half = min(_EXTREME_SAMPLES, (len(ordered) + 1) // 2)  # so that no sample is both
    return ordered[:half], ordered[half:][-half:][::-1]


def _config(run_dir: Path, last_step: int) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Return the last step's config text, the facts to show at once, and earlier changes."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        text, changes = settings_of(run_dir, last_step)
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except YAMLError as error:
        raise DataError(f"{run_dir / CONFIG_FILE}: not valid YAML ({error}); restore it or take it away") from error
    flat = dict(flatten(tree)) if text else {}
    shown = [key for fact in _FACTS for key in flat if key == fact or key.startswith(f"{fact}.")]
    facts = [(key.removeprefix("trainer.reinforce."), str(flat[key])) for key in shown or list(flat)[:24]]
    return text, facts, changes


def _span(run: RunRecord) -> str:
    times = [line["time"] for line in run.metrics if line.get("time") is not None]
    if not times:
        return "No step has been logged yet."
    first_step = run.metrics[0].get("timers/step_time") or 0.0  # the first line was written at the end of its step
    start, end = min(times) - first_step, max(times)
    begin, finish = (datetime.fromtimestamp(t, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S") for t in (start, end))
    steps = sum(any(key.startswith("train/") for key in line) for line in run.metrics)
    counted = "1 training step" if steps == 1 else f"{steps} training steps"
    return f"{begin} to {finish} UTC, {clock(end - start)} from start to end, {counted}"


def _tone(run: RunRecord) -> str:
    comparison = run.comparison
    if comparison is None or not abs(comparison.z) >= 2:
        return ""
    return "good" if comparison.z > 0 else "bad"


def main(
    arguments: Sequence[str],
    program: str = "reinforce_rl.monitoring.report",
    write: Callable[[str], Path] = write_report,
) -> int:
    """Write the report of the run folder given as the only argument; return the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description="Write the report of a run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run's folder")
    try:
        print(write(parser.parse_args(arguments).run_dir))
    except ReinforceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
