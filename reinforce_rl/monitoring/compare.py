"""Comparison of runs: metrics, validation rewards by seed and by prompt, different settings."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
# Name, metric, whether the best value is shown too, form.
_METRICS = (
    ("validation reward", "val/rewards", True, ".3f"),
    ("training reward", "train/rewards", False, ".3f"),
    ("held-out loss", "val/loss", False, ".4f"),
    ("KL, nats a response", "train/init_policy_kl", False, ".3f"),
    ("response length, tokens", "train/response_lengths", False, ".1f"),
    ("not truncated", "train/fraction_of_samples_properly_ended", False, ".3f"),
    ("seconds a step", "timers/step_time", False, ".2f"),
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
    rows = [["state", *(_state(run) for run in runs.values())]]
    other_keys = dict.fromkeys(
        key for run in runs.values() for key in run.metric_names() if _OTHER.fullmatch(key)
    )
    others = [
        (f"validation {key[4:].replace('rewards_', '')}", key, True, ".3f") for key in other_keys
    ]
    for name, key, has_best, form in (_METRICS[0], *others, *_METRICS[1:]):
        series = [
            [point for point in run.series(key) if math.isfinite(point[1])] for run in runs.values()
        ]
        if any(series):
            is_training = not key.startswith("val/")
            finals = [
                finite_mean([value for _, value in points[-(_LAST if is_training else 1) :]])
                for points in series
            ]
            last = f"last {_LAST} steps" if is_training else "last"
            rows.append([f"{name}, {last}", *(formatted(form, value) for value in finals)])
            if has_best:
                tops = [
                    max(points, key=lambda point: point[1], default=(0, math.nan))
                    for points in series
                ]
                rows.append(
                    [
                        f"{name}, best",
                        *(
                            formatted(form, value) + (f" (step {step})" if step else "")
                            for step, value in tops
                        ),
                    ]
                )
    return {"title": "Metrics", "note": "", "columns": ["", *runs], "rows": rows}


def _state(run: RunFolder) -> str:
    state = run.state()
    return f"{state.state}, step {state.step}" + (
        f" of {state.max_steps}" if state.max_steps else ""
    )


def _sides(runs: Mapping[str, RunFolder], num_base: int) -> list[_Side]:
    sides: dict[Any, _Side] = {}
    for i, (name, run) in enumerate(runs.items()):
        config = run.configuration()
        settings = {setting.key: setting.value for setting in config.settings}
        side: Any = json.dumps(
            {key: value for key, value in settings.items() if not _OF_A_RUN.match(key)}
        )
        side = i < num_base if num_base else side if config.text else name
        seed = settings.get("model.seed", TrainConfig().model.seed) if config.text else name
        if isinstance(seed, dict | list):
            raise DataError(
                f"{run.path / CONFIG_FILE}: model.seed is {shown_value(seed)}; expected a number. "
                "Restore the file",
                key="run.config.seed_no_number",
            )
        sides.setdefault(side, []).append((name, run, seed))
    return list(sides.values())


def _over_seeds(sides: Sequence[_Side]) -> list[dict[str, Any]]:
    """Compare each side with the first over seeds, at the last step that all runs validated."""
    rows = []
    base = sides[0]
    names = [side[0][0] + (f" and {len(side) - 1} more" if side[1:] else "") for side in sides]
    for name, side in zip(names[1:], sides[1:], strict=True):
        series = {run_name: dict(run.series("val/rewards")) for run_name, run, _ in (*base, *side)}
        step = max(set.intersection(*map(set, series.values())), default=0)
        groups: list[dict[Any, list[float]]] = [{}, {}]
        for group, runs in zip(groups, (base, side), strict=True):
            # Before the first step all runs are equal.
            for run_name, _, seed in runs if step else ():
                group.setdefault(seed, []).append(series[run_name][step])
        first, last = (
            {seed: finite_mean(values) for seed, values in group.items()} for group in groups
        )
        is_paired = first.keys() == last.keys()
        difference = (
            paired(first, last, "seed")
            if is_paired
            else unpaired([*first.values()], [*last.values()])
        )
        low, high = (formatted("+.3f", end) for end in difference.interval)
        at = f"step {step}" if step else "no step in common"
        rows.append(
            [
                f"{name} - {names[0]}",
                difference.change(),
                f"{low} to {high}",
                at,
                difference.sentence(),
            ]
        )
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
    return (
        [{"title": "Difference over seeds", "note": note, "columns": columns, "rows": rows}]
        if rows and any(len(side) > 1 for side in sides)
        else []
    )


def _paired(sides: Sequence[_Side]) -> dict[str, Any]:
    base, *others = sides
    of_seed = {seed: (name, run) for name, run, seed in reversed(base)}
    pairs = [
        (name, run, *of_seed.get(seed, base[0][:2])) for side in others for name, run, seed in side
    ]
    rows = []
    for name, run, base_name, first in pairs or [
        (name, run, *base[0][:2]) for name, run, _ in base[1:]
    ]:
        steps = first.sample_steps("validation")
        other_steps = run.sample_steps("validation")
        if not steps or not other_steps:
            continue
        shared = set(steps) & set(other_steps)
        # Initial validations are equal, so a comparison of them is useless.
        step, other = (
            (max(shared), max(shared)) if max(shared, default=0) else (steps[-1], other_steps[-1])
        )
        rows_of_first = first.samples(step, "validation")
        rows_of_run = run.samples(other, "validation")
        texts = {row.prompt_id: row.prompt for row in rows_of_first}
        changed = {
            row.prompt_id
            for row in rows_of_run
            if texts.get(row.prompt_id, row.prompt) != row.prompt
        }
        pair = [
            [row for row in side if row.prompt_id not in changed]
            for side in (rows_of_first, rows_of_run)
        ]
        difference = compare_validation(pair[0], pair[1])
        at = f"step {step}" if step == other else f"step {other} against {step}"
        if changed:
            at += f"; left out: {len(changed)} of {len(texts)} prompts, whose texts differ"
        rows.append(
            [
                f"{name} - {base_name}",
                difference.change(),
                str(difference.n),
                at,
                difference.sentence(),
            ]
        )
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
