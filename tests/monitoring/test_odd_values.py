"""Each value of a run's files, replaced by another type, gives an error without a traceback."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.errors import raises_error

from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.compare import tables
from reinforce_rl.monitoring.report import overview
from reinforce_rl.monitoring.run_folder import RunFolder

ODD = [None, True, "text", [], [["a"]], {}, {"a": {"b": 1}}, 10**39, -1, 1e308, math.nan, math.inf]
METRICS = {
    "train/rewards": 1.0,
    "train/loss": 0.1,
    "train/reward_std": 0.5,
    "train/fraction_of_samples_scored": 1.0,
    "val/rewards": 0.5,
    "val/rewards_a": 0.5,
    "val/loss": 0.3,
    "timers/step_time": 1.0,
    "timing/generate/rank": 0,
    "timing/generate/max": 1.0,
    "timing/generate/median": 0.4,
}
STATUS = {
    "state": "failed",
    "reason": "a reason",
    "step": 3,
    "max_steps": 4,
    "exit_code": 1,
    "save_seconds": 1.0,
    "alerts": {"kl": "a text"},
    "time": 1.7e9,
    "pid": 5,
    "host": "here",
}
BIN = {"low": 0.5, "high": 0.6, "count": 3, "predicted": 0.5, "observed": 0.4}
SHARES = {"accuracy": 0.5, "accuracy_standard_error": 0.1, "length_baseline_accuracy": 0.4}
EVALUATION = {"step": 1, "evaluation": {"loss": 0.5, "metrics": SHARES, "reliability": [BIN]}}
OPERATION = {"name": "matmul", "calls": 1, "self_seconds": 0.1, "share": 0.5}
PROFILED = {
    "step": 1,
    "rank": 0,
    "device": "cpu",
    "seconds": 1.0,
    "trace": "t",
    "operations": [OPERATION],
}
CONFIG = {
    "model": {"seed": 1, "optim": {"lr": 1e-3}},
    "trainer": {"straggler_factor": 2.0},
    "alerts": {"rules": {"kl": "off"}},
    "remote_rm": {"more_reward_models": {"a": {"weight": 0.5}}},
}
HISTORY = {"step": 1, "config": yaml.safe_dump(CONFIG), "files": {"f": "digest"}}


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value within a value, itself first."""
    yield above
    children = {}
    if isinstance(value, dict):
        children = value
    elif isinstance(value, list):
        children = dict(enumerate(value))
    for key, child in children.items():
        yield from places(child, (*above, key))


def replaced(value: Any, place: tuple[Any, ...], odd: Any) -> Any:
    if not place:
        return odd
    changed = value.copy()
    changed[place[0]] = replaced(value[place[0]], place[1:], odd)
    return changed


def line(value: Any) -> str:
    return json.dumps(value) + "\n"


def metrics(value: Any) -> str:
    others = [{"step": step, "time": 1.7e9 + step, **METRICS} for step in (1, 3)]
    return line(others[0]) + line(value) + line(others[1])


def history(value: Any) -> str:
    return line({"step": 0, "config": "a: 1", "files": {"f": "other"}}) + line(value)


# By file: its contents, and how they are written.
FILES = {
    "status.json": (STATUS, json.dumps),
    "metrics.jsonl": ({"step": 2, "time": 1.7e9, **METRICS}, metrics),
    "evaluation.json": (EVALUATION, json.dumps),
    "profile/top_operations.json": ({"steps": [PROFILED]}, json.dumps),
    "config.yaml": (CONFIG, yaml.safe_dump),
    "config_history.jsonl": (HISTORY, history),
}


def write(folder: Path, name: str, value: Any = None) -> None:
    usual, form = FILES[name]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(form(usual if value is None else value))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for folder in (tmp_path / "run", tmp_path / "other"):
        for name in FILES:
            if name != "config_history.jsonl":  # without it, config.yaml counts
                write(folder, name)
    return tmp_path / "run"


def look(folder: Path) -> None:
    """Do what `report`, `compare` and the dashboard do with a run."""
    shown = overview(RunFolder(folder))
    json.dumps(shown, allow_nan=False)
    both = {"other": RunFolder(folder.parent / "other"), "run": RunFolder(folder)}
    for table in (*shown["tables"], *tables(both)):
        for row in table["rows"]:
            for cell in row:
                assert isinstance(cell, str)


@pytest.mark.more
@pytest.mark.parametrize("name", FILES)
def test_a_value_of_another_type(run: Path, name: str) -> None:
    write(run, name)
    look(run)  # as it is
    usual, form = FILES[name]
    counts = {"shown": 0, "refused": 0}
    for place in places(usual):
        for odd in ODD:
            (run / name).write_text(form(replaced(usual, place, odd)))
            try:
                look(run)
                counts["shown"] += 1
            except DataError as error:
                assert str(run) in str(error)
                assert "\n" not in str(error)
                assert len(str(error)) < 1000
                assert error.key
                counts["refused"] += 1
    # An odd status is shown as an unknown one, with the reason.
    assert counts["shown"] > 0
    assert (counts["refused"] > 0) == (name != "status.json")


@pytest.mark.parametrize(
    ("setting", "odd", "shown", "key"),
    [
        ("trainer.straggler_factor", "high", "'high'", "run.config.straggler_factor_no_number"),
        ("model.seed", [], "a JSON list", "run.config.seed_no_number"),
    ],
)
def test_settings_that_are_used_say_what_is_wrong(
    run: Path, setting: str, odd: Any, shown: str, key: str
) -> None:
    section, _, name = setting.partition(".")
    write(run, "config.yaml", {section: {name: odd}})
    with raises_error(key, run / "config.yaml", setting, shown):
        look(run)
