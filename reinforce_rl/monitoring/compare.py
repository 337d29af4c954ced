"""Runs side by side: settings that differ, metrics, and validation rewards paired by prompt."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.progress import formatted
from reinforce_rl.monitoring.report import compare_validation, overview
from reinforce_rl.monitoring.run_folder import RunFolder, mean, open_run
from reinforce_rl.monitoring.view import frozen_page
from reinforce_rl.runtime.settings import SILENT, flatten
from reinforce_rl.utils.files import write_atomically

_LAST = 10  # training steps whose mean is a run's final value
# Name, metric, whether the best value is shown too, form.
_METRICS = (
    ("validation reward", "val/rewards", True, ".3f"),
    ("training reward", "train/rewards", False, ".3f"),
    ("held-out loss", "val/loss", False, ".4f"),
    ("KL, nats a response", "train/init_policy_kl", False, ".3f"),
    ("response length, tokens", "train/response_lengths", False, ".1f"),
    ("ended by themselves", "train/fraction_of_samples_properly_ended", False, ".3f"),
    ("seconds a step", "timers/step_time", False, ".2f"),
)
_OTHER = re.compile(r"val/(\w+/rewards(_.+)?|rewards_.+)")  # of named sets, and of the sources of a reward


def tables(runs: Mapping[str, RunFolder]) -> list[dict[str, Any]]:
    """Return the tables of a comparison: {title, note, columns, rows}, all texts; the first run is the base."""
    return [_metrics(runs), _paired(runs), _settings(runs)]


def compare(folders: Sequence[str | Path], html: str | Path | None = None) -> str:
    """Return a comparison of runs as text; with `html`, also write the page that overlays them.

    Raises:
        DataError: fewer than two runs, a folder holds none, or a file of it cannot be read.
    """
    paths = {Path(folder).resolve(): open_run(folder) for folder in folders}
    if len(paths) < 2:
        raise DataError(f"found {len(paths)} run to compare; expected the folders of at least two different runs")
    above = os.path.commonpath(paths)
    runs = {os.path.relpath(path, above): run for path, run in paths.items()}
    found = tables(runs)
    if html is not None:
        shown = {name: (run, overview(run)) for name, run in runs.items()}
        write_atomically(Path(html), frozen_page(shown, found))
    console = Console(width=max(80, shutil.get_terminal_size((160, 0)).columns), no_color=True)
    with console.capture() as capture:
        for one in found:
            table = Table(title=one["title"], caption=one["note"], title_justify="left", caption_justify="left")
            for name in one["columns"]:
                table.add_column(Text(name), overflow="fold")
            for row in one["rows"]:
                table.add_row(*map(Text, row))
            console.print(table if one["rows"] else f"{one['title']}: none", markup=False)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def _metrics(runs: Mapping[str, RunFolder]) -> dict[str, Any]:
    rows = [["state", *(_state(run) for run in runs.values())]]
    more = dict.fromkeys(key for run in runs.values() for line in run.lines for key in line if _OTHER.fullmatch(key))
    others = [(f"validation {key[4:].replace('rewards_', '')}", key, True, ".3f") for key in more]
    for name, key, has_best, form in (_METRICS[0], *others, *_METRICS[1:]):
        series = [[point for point in run.series(key) if math.isfinite(point[1])] for run in runs.values()]
        if any(series):
            is_training = not key.startswith("val/")
            finals = [mean([y for _, y in points[-(_LAST if is_training else 1) :]]) for points in series]
            last = f"last {_LAST} steps" if is_training else "last"
            rows.append([f"{name}, {last}", *(formatted(form, value) for value in finals)])
            if has_best:
                tops = [max(points, key=lambda point: point[1], default=(0, math.nan)) for points in series]
                rows.append([f"{name}, best", *(formatted(form, y) + (f" (step {x})" if x else "") for x, y in tops)])
    return {"title": "Metrics", "note": "", "columns": ["", *runs], "rows": rows}


def _state(run: RunFolder) -> str:
    state = run.state()
    return f"{state.state}, step {state.step}" + (f" of {state.max_steps}" if state.max_steps else "")


def _paired(runs: Mapping[str, RunFolder]) -> dict[str, Any]:
    (base, first), *more = runs.items()
    rows = []
    for name, run in more:
        steps, other_steps = first.sample_steps("validation"), run.sample_steps("validation")
        if not steps or not other_steps:
            continue
        shared = set(steps) & set(other_steps)
        # Initial validations are equal: not what a person wants to compare.
        step, other = (max(shared), max(shared)) if max(shared, default=0) else (steps[-1], other_steps[-1])
        rows_of_first, rows_of_run = first.samples(step, "validation"), run.samples(other, "validation")
        texts = {row.prompt_id: row.prompt for row in rows_of_first}
        others = {row.prompt_id for row in rows_of_run if texts.get(row.prompt_id, row.prompt) != row.prompt}
        found = compare_validation(rows_of_first, [row for row in rows_of_run if row.prompt_id not in others])
        difference = f"{found.mean_difference:+.3f} ± {formatted('.3f', found.standard_error)}" if found.n else "-"
        at = f"step {step}" if step == other else f"step {other} against {step}"
        if others:
            at += f"; left out: {len(others)} of {len(texts)} prompts, whose texts differ"
        rows.append([f"{name} - {base}", difference, formatted(".1f", found.z), str(found.n), at])
    columns = ["validation reward", "difference ± standard error", "standard errors", "prompts", "at"]
    note = "Paired by prompt; prompts that one of the two lacks are left out."
    return {"title": "Paired difference", "note": note if rows else "", "columns": columns, "rows": rows}


def _settings(runs: Mapping[str, RunFolder]) -> dict[str, Any]:
    texts = [run.configuration().text for run in runs.values()]
    flat = [dict(flatten(OmegaConf.to_container(OmegaConf.create(text), resolve=False))) for text in texts]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key and not SILENT.match(key)]
    rows = [[key, *(json.dumps(one[key]) if key in one else "-" for one in flat)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return {"title": "Settings that differ", "note": "", "columns": ["key", *runs], "rows": differing}
