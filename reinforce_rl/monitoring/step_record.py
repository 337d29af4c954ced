"""Inputs and results of a training step besides its samples: `record/step_00012.json`.

docs/debugging.md has the fields.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reinforce_rl.errors import DataError
from reinforce_rl.utils.files import plain_number, write_atomically
from reinforce_rl.utils.untrusted_files import UnreadableFileError, read_json

FOLDER = "record"
VERSION = 1
_FILE = re.compile(r"step_(\d+)\.json")


@dataclass(frozen=True)
class RankState:
    """Hexadecimal checksums of a rank's tensors, by name; ranks with copies share one sum."""

    rank: int
    before: dict[str, str]  # of the trained weights, before the step's first update
    after: dict[str, str]
    # Adam's moments and fp32 main weights after the step, by the weight's name
    optimizer: dict[str, str]
    random: str  # of the random state after the step


@dataclass(frozen=True)
class StepRecord:
    step: int
    software: dict[str, str]  # versions by package
    machine: dict[str, Any]  # device and threads of the first rank
    layout: dict[str, int]
    settings: dict[str, Any]  # settings that differ from the schema's defaults
    files: dict[str, str | None]  # SHA-256 of the file of each reward function
    data: dict[str, Any]  # fingerprint of the prompts, and the position after this step
    scorer: Any  # the reward source's description of its version; None if unknown
    reference: str | None  # checksum over the reference's weights; None without one
    past: dict[str, Any]  # beta and statistics of earlier rewards, for this step's advantages
    # of each optimizer step: loss, gradient norm, learning rate, sums of the loss
    updates: list[dict[str, float]]
    ranks: list[RankState] = field(default_factory=list)

    def write(self, run: str | Path) -> None:
        values = dataclasses.asdict(self)
        values["updates"] = [
            {name: plain_number(value) for name, value in update.items()} for update in self.updates
        ]
        text = json.dumps({"version": VERSION, **values}, ensure_ascii=False)
        write_atomically(Path(run) / FOLDER / f"step_{self.step:05d}.json", text + "\n")


def record_files(run: str | Path) -> dict[int, Path]:
    """Return the files of recorded steps, in ascending order."""
    matches = (
        (_FILE.fullmatch(path.name), path) for path in (Path(run) / FOLDER).glob("step_*.json")
    )
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def drop_records(run: str | Path, *, after: int | None = None, up_to: int = 0) -> None:
    """Remove the records of steps later than `after`, and of steps up to `up_to`."""
    for step, path in record_files(run).items():
        if step <= up_to or (after is not None and step > after):
            path.unlink(missing_ok=True)


def read_record(run: str | Path, step: int) -> StepRecord:
    """Raises DataError if the step has no record, or one that is damaged or of another version."""
    files = record_files(run)
    if step not in files:
        steps = (
            f"step {step}; the recorded steps are {min(files)} to {max(files)}"
            if files
            else "any step"
        )
        raise DataError(
            f"{Path(run) / FOLDER} has no record of {steps}. A run with exp_manager.record=full "
            "keeps the records of its last exp_manager.record_keep steps",
            key="record.step.missing",
        )
    path = files[step]
    try:
        values = read_json(path, within=Path(run))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        version = values.pop("version", None)
        if version != VERSION:
            raise DataError(
                f"{path} has version {version}; this reinforce_rl reads version {VERSION}. Use the "
                "version of reinforce_rl that wrote it",
                key="record.file.other_version",
            )
        values["updates"] = [_as_floats(update) for update in values["updates"]]
        values["ranks"] = [RankState(**state) for state in values["ranks"]]
        if values["step"] != step:
            raise ValueError(f"it holds step {values['step']}")
        for name in ("software", "machine", "layout", "settings", "files", "data", "past"):
            if not isinstance(values[name], dict):
                raise ValueError(f"its {name} is {values[name]!r}")
        return StepRecord(**values)
    except UnreadableFileError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} is not a readable record ({error}); restore or remove it",
            key="record.file.not_readable",
        ) from error


def _as_floats(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float("nan") if value is None else value for name, value in values.items()}
