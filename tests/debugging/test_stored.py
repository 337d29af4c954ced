"""Steps of a run, rebuilt from its recorded rows alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from helpers.rows import write_rows
from helpers.tiny_run import tiny_config

from reinforce_rl.debugging.stored import StoredRun
from reinforce_rl.monitoring.records import RolloutRow, read_rows


def row(number: int, source_rewards: dict[str, float]) -> RolloutRow:
    """Return a sample with scores of these sources."""
    sample = RolloutRow(1, number, 0, "a prompt", "a response", 1.0, "stop", 3)
    return replace(sample, source_rewards=source_rewards)


def test_a_score_that_some_samples_lack_is_nan(tmp_path: Path) -> None:
    """A generator may have sent scores of a source that others lack."""
    rows = [row(0, {"a": 1.0}), row(1, {"a": 2.0, "b": 3.0})]
    path = write_rows(tmp_path, 1, rows)
    stored: Any = object.__new__(StoredRun)
    stored.path = tmp_path
    stored.run = SimpleNamespace(samples=lambda step: read_rows(path))
    stored.settings = lambda step: (tiny_config(tmp_path), [])
    scores = stored.step(1).batch.source_rewards
    assert scores["a"].tolist() == [1.0, 2.0]
    assert scores["b"].nan_to_num(-1.0).tolist() == [-1.0, 3.0]
