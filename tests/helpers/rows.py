"""Samples without tokens in a run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reinforce_rl.monitoring.records import Kind, RolloutRow, Samples, rollout_files, write_samples


def write_rows(
    folder: Path, step: int, rows: Sequence[RolloutRow], kind: Kind = "rollouts"
) -> Path:
    """Write a step's samples and return the file."""
    write_samples(folder, step, Samples(list(rows)), kind)
    return rollout_files(folder, kind)[step]
