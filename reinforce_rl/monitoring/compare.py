"""Comparison of runs: metrics, validation rewards by seed and by prompt, different settings."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.columns import shown_value
from reinforce_rl.monitoring.paired import compare_validation
from reinforce_rl.monitoring.progress import formatted
from reinforce_rl.monitoring.report import overview
from reinforce_rl.monitoring.run_folder import RunFolder, open_run
from reinforce_rl.monitoring.view import frozen_page
from reinforce_rl.runtime.settings import CONFIG_FILE, SILENT, flatten, read_tree
from reinforce_rl.utils.console import table_console
from reinforce_rl.utils.files import write_atomically
from reinforce_rl.utils.statistics import finite_mean, paired, unpaired

_LAST = 10  # training steps; their mean is a run's final value


class _Metric(NamedTuple):
    name: str
    key: str
    has_best: bool  # the best value is shown too
    form: str


_METRICS = (
    _Metric("validation reward", "val/rewards", True, ".3f"),
    _Metric("training reward", "train/rewards", False, ".3f"),
    _Metric("held-out loss", "val/loss", False, ".4f"),
    _Metric("KL, nats a response", "train/init_policy_kl", False, ".3f"),
    _Metric("response length, tokens", "train/response_lengths", False, ".1f"),
    _Metric("not truncated", "train/fraction_of_samples_properly_ended", False, ".3f"),
    _Metric("seconds a step", "timers/step_time", False, ".2f"),
)
# settings that may differ within a side
_OF_A_RUN = re.compile(rf"{SILENT.pattern}|model\.seed$|exp_manager\.")
# validation rewards of named sets, and of the sources of a reward
_OTHER = re.compile(r"val/(\w+/rewards(_.+)?|rewards_.+)")

# Name, run and seed; the seed of a run without a configuration is its name.
_Side = list[tuple[str, RunFolder, Any]]


def tables(runs: Mapping[str, RunFolder], num_base: int = 0) -> list[dict[str, Any]]:
    """Return the tables of a comparison: {title, note, columns, rows}, all texts.

    The first run is the base. One side has the first `num_base` runs and the other side the rest.
    If `num_base` is 0, a side has runs of equal settings except for the seed.
    """
    sides = _sides(runs, num_base)
    return [_metrics(runs), *_over_seeds(sides), _paired(sides), _settings(runs)]


def compare(
    folders: Sequence[str | Path],
    html: str | Path | None = None,
    against: Sequence[str | Path] = (),
) -> str:
    """Return a comparison of runs as text; `html` also gets a page with the curves of all runs.

    Args:
        against: runs of the base, for example with several seeds; () for the first of `folders`.

    Raises:
        DataError: there are fewer than two runs, a folder holds none, or a file of it cannot be
            read.
    """
    paths = {Path(folder).resolve(): open_run(folder) for folder in (*against, *folders)}
    base = {Path(folder).resolve() for folder in against}
    if len(paths) < 2 or len(base) == len(paths):
        raise DataError(
            f"found {len(paths)} runs to compare; expected two or more run folders, at least one "
            "of them outside --against",
            key="compare.runs.too_few",
        )
    above = os.path.commonpath(paths)
    runs = {os.path.relpath(path, above): run for path, run in paths.items()}
    comparison_tables = tables(runs, len(base))
    if html is not None:
        shown = {name: (run, overview(run)) for name, run in runs.items()}
        write_atomically(Path(html), frozen_page(shown, comparison_tables))
    console = table_console(no_color=True)
    with console.capture() as capture:
        for content in comparison_tables:
            table = Table(
                title=content["title"],
                caption=content["note"],
                title_justify="left",
                caption_justify="left",
            )
            for name in content["columns"]:
                table.add_column(Text(name), overflow="fold")
            for row in content["rows"]:
                table.add_row(*map(Text, row))
            console.print(table if content["rows"] else f"{content['title']}: none", markup=False)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def _metrics(runs: Mapping[str, RunFolder]) -> dict[str, Any]:
    other_keys = dict.fromkeys(
        key for run in runs.values() for key in run.metric_names() if _OTHER.fullmatch(key)
    )
    others = [
        _Metric(f"validation {key[4:].replace('rewards_', '')}", key, True, ".3f")
        for key in other_keys
    ]
    rows = [["state", *(_state(run) for run in runs.values())]]
    for metric in (_METRICS[0], *others, *_METRICS[1:]):
        rows += _rows_of_metric(metric, runs.values())
    return {"title": "Metrics", "note": "", "columns": ["", *runs], "rows": rows}


def _rows_of_metric(metric: _Metric, runs: Iterable[RunFolder]) -> list[list[str]]:
    """Return the metric's final and best values by run; [] if no run has it."""
    series = []
    for run in runs:
        points = run.series(metric.key)
        series.append([(step, value) for step, value in points if math.isfinite(value)])
    if not any(series):
        return []
    is_training = not metric.key.startswith("val/")
    num_last = _LAST if is_training else 1
    last = f"last {_LAST} steps" if is_training else "last"
    finals = [finite_mean([value for _, value in points[-num_last:]]) for points in series]
    rows = [[f"{metric.name}, {last}", *(formatted(metric.form, value) for value in finals)]]
    if metric.has_best:
        rows.append([f"{metric.name}, best", *(_best(points, metric.form) for points in series)])
    return rows


def _best(points: Sequence[tuple[int, float]], form: str) -> str:
    step, value = max(points, key=lambda point: point[1], default=(0, math.nan))
    at = f" (step {step})" if step else ""
    return formatted(form, value) + at


def _state(run: RunFolder) -> str:
    state = run.state()
    bound = f" of {state.max_steps}" if state.max_steps else ""
    return f"{state.state}, step {state.step}{bound}"


def _sides(runs: Mapping[str, RunFolder], num_base: int) -> list[_Side]:
    sides: dict[Any, _Side] = {}
    for i, (name, run) in enumerate(runs.items()):
        config = run.configuration()
        settings = {setting.key: setting.value for setting in config.settings}
        seed: Any = name
        if config.text:
            seed = settings.get("model.seed", TrainConfig().model.seed)
        if isinstance(seed, dict | list):
            raise DataError(
                f"{run.path / CONFIG_FILE}: model.seed is {shown_value(seed)}; expected a number. "
                "Restore the file",
                key="run.config.seed_no_number",
            )
        side: Any = name
        if num_base:
            side = i < num_base
        elif config.text:
            shared = {key: value for key, value in settings.items() if not _OF_A_RUN.match(key)}
            side = json.dumps(shared)
        sides.setdefault(side, []).append((name, run, seed))
    return list(sides.values())


def _over_seeds(sides: Sequence[_Side]) -> list[dict[str, Any]]:
    """Compare each side with the first over seeds, at the last step that all runs validated."""
    base, *others = sides
    if not others or all(len(side) == 1 for side in sides):
        return []
    columns = [
        "validation reward",
        "difference ± standard error",
        "95 % interval",
        "at",
        "is it real?",
    ]
    note = (
        "Seeds are the unit: the mean reward of each one's validation, paired where both sides "
        "have the same seeds."
    )
    rows = [_row_over_seeds(base, side) for side in others]
    return [{"title": "Difference over seeds", "note": note, "columns": columns, "rows": rows}]


def _row_over_seeds(base: _Side, side: _Side) -> list[str]:
    validated = [{step for step, _ in run.series("val/rewards")} for _, run, _ in (*base, *side)]
    step = max(set.intersection(*validated), default=0)
    first = _reward_by_seed(base, step)
    last = _reward_by_seed(side, step)
    if first.keys() == last.keys():
        difference = paired(first, last, "seed")
    else:
        difference = unpaired([*first.values()], [*last.values()])
    low, high = (formatted("+.3f", end) for end in difference.interval)
    return [
        f"{_name(side)} - {_name(base)}",
        difference.change(),
        f"{low} to {high}",
        f"step {step}" if step else "no step in common",
        difference.sentence(),
    ]


def _reward_by_seed(side: _Side, step: int) -> dict[Any, float]:
    if not step:  # before the first step all runs are equal
        return {}
    rewards: dict[Any, list[float]] = {}
    for _, run, seed in side:
        rewards.setdefault(seed, []).append(dict(run.series("val/rewards"))[step])
    return {seed: finite_mean(values) for seed, values in rewards.items()}


def _name(side: _Side) -> str:
    name = side[0][0]
    return f"{name} and {len(side) - 1} more" if len(side) > 1 else name


def _paired(sides: Sequence[_Side]) -> dict[str, Any]:
    base, *others = sides
    # Runs are compared with the base's of the same seed; those of the base with its first.
    compared = [run for side in others for run in side] or base[1:]
    of_seed = {seed: (name, run) for name, run, seed in reversed(base)} if others else {}
    rows = []
    for name, run, seed in compared:
        base_name, base_run = of_seed.get(seed, base[0][:2])
        cells = _cells_over_prompts(base_run, run)
        if cells is not None:
            rows.append([f"{name} - {base_name}", *cells])
    columns = ["validation reward", "difference ± standard error", "prompts", "at", "is it real?"]
    note = "Paired by prompt; prompts that only one run has are left out."
    if not others:
        note += (
            " Only the seed differs between the runs, so this is the effect of the seed; --against "
            "compares two sides."
        )
    elif all(len(side) == 1 for side in sides):
        note += " One run a side: this says nothing about other seeds."
    return {
        "title": "Difference over prompts",
        "note": note if rows else "",
        "columns": columns,
        "rows": rows,
    }


def _cells_over_prompts(base: RunFolder, run: RunFolder) -> list[str] | None:
    """Compare the validations of two runs; None if one has no samples."""
    base_steps = base.sample_steps("validation")
    steps = run.sample_steps("validation")
    if not base_steps or not steps:
        return None
    base_step = max(set(base_steps) & set(steps), default=0)
    step = base_step
    if not base_step:  # initial validations are equal, so a comparison of them is useless
        base_step = base_steps[-1]
        step = steps[-1]
    base_rows = base.samples(base_step, "validation")
    rows = run.samples(step, "validation")
    texts = {row.prompt_id: row.prompt for row in base_rows}
    changed = {row.prompt_id for row in rows if texts.get(row.prompt_id, row.prompt) != row.prompt}
    difference = compare_validation(
        [row for row in base_rows if row.prompt_id not in changed],
        [row for row in rows if row.prompt_id not in changed],
    )
    at = f"step {base_step}" if base_step == step else f"step {step} against {base_step}"
    if changed:
        at += f"; left out: {len(changed)} of {len(texts)} prompts, whose texts differ"
    return [difference.change(), str(difference.n), at, difference.sentence()]


def _settings(runs: Mapping[str, RunFolder]) -> dict[str, Any]:
    texts = [run.configuration().text for run in runs.values()]
    flat = [dict(flatten(read_tree(text))) for text in texts]
    keys = [
        key
        for key in dict.fromkeys(key for settings in flat for key in settings)
        if key and not SILENT.match(key)
    ]
    rows = [
        [key, *(json.dumps(settings[key]) if key in settings else "-" for settings in flat)]
        for key in keys
    ]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return {
        "title": "Settings that differ",
        "note": "",
        "columns": ["key", *runs],
        "rows": differing,
    }
