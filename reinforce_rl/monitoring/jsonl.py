"""`metrics.jsonl`: one line a step, no step twice, also through kills and resumes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.base import SUCCESS
from reinforce_rl.utils.files import encode, json_line, plain_number, read_json_lines, write_json_lines


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, one dict a step, in the file's order; NaN and infinity read as None.

    A last line that a killed process left unfinished is left out, so a running run's file can be read.

    Raises:
        DataError: the file is absent, or a complete line is not a JSON object with an integer `step`.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected the metrics.jsonl of a run")
    records = read_json_lines(path)
    for number, record in enumerate(records, 1):
        if not isinstance(record.get("step"), int):
            raise DataError(f"{path}, line {number}: found step={record.get('step')!r}, expected an integer")
    return records


class JsonlLogger:
    """Merges all metrics of a step into one line, `step` first, and appends it at `commit`.

    `time` (unix seconds at the commit) is added to each line. Tables are not kept here: `RolloutWriter` keeps samples.

    Args:
        path: the file; its folder is made.
        resume_step: the step of the checkpoint that the run goes on from, 0 for a run started again from nothing.
            Lines after it are dropped, and so is a torn last line. None is for a new run.

    Raises:
        DataError: `resume_step` is None and the file already holds metrics, or a line of it cannot be read.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._pending: dict[int, dict[str, Any]] = {}
        self._last_step: int | None = None
        if self.path.exists():
            self._take_over(resume_step)

    def _take_over(self, resume_step: int | None) -> None:
        records = read_metrics(self.path)
        if resume_step is None:
            if records:
                raise DataError(
                    f"{self.path} already holds metrics up to step {records[-1]['step']}, and this is a new run; "
                    "choose another run folder, or resume that run"
                )
            resume_step = 0
        kept = [record for record in records if record["step"] <= resume_step]
        write_json_lines(self.path, kept)
        self._last_step = max((record["step"] for record in kept), default=None)

    def log_metrics(self, metrics: Mapping[str, float], step: int, prefix: str = "") -> None:
        """Keep the numbers until `commit(step)`; a name given twice keeps its last value."""
        line = self._pending.setdefault(step, {})
        line.update({prefix + name: plain_number(value) for name, value in metrics.items()})

    def log_table(self, key: str, rows: list[dict[str, Any]], step: int) -> None:
        """Nothing: samples are files of their own."""

    def commit(self, step: int) -> None:
        """Append the line of `step`, flushed to the disk; where the file has that step, merge into its line."""
        if step not in self._pending:
            return
        record = {"step": step, "time": time.time(), **self._pending.pop(step)}
        if self._last_step is not None and step <= self._last_step:
            self._merge(record)
            return
        with self.path.open("ab") as file:
            file.write(encode(json_line(record)))
            file.flush()
            os.fsync(file.fileno())
        self._last_step = step

    def _merge(self, record: dict[str, Any]) -> None:
        by_step = {old["step"]: old for old in read_metrics(self.path)}
        by_step[record["step"]] = {**by_step.get(record["step"], {}), **record}
        write_json_lines(self.path, [by_step[step] for step in sorted(by_step)])

    def finalize(self, status: str = SUCCESS) -> None:
        """Write the steps that were logged and not committed: after an error they show how far the run came."""
        for step in sorted(self._pending):
            self.commit(step)
