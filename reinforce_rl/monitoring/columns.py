"""Metrics by column: 12 bytes a value. Lines of metrics.jsonl as dictionaries take over 100."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import numpy as np

MAX_INTEGER = 1 << 53  # JSON's numbers in a browser are exact up to here
_SHOWN = 40  # characters of a value in a message


class MetricColumns:
    """The lines of a metrics.jsonl, in the order of the file; `len` is their number."""

    def __init__(self) -> None:
        self.num_values = 0
        self.num_training = 0  # lines of training steps
        self._steps = array("q")
        self._known_steps: np.ndarray | None = None  # of all lines; None after an added line
        self._rows: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}
        self._is_ascending = True

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line of `checked_line`."""
        row = len(self._steps)
        if row and step < self._steps[-1]:
            self._is_ascending = False
        self._steps.append(step)
        self._known_steps = None
        for key, value in values.items():
            rows = self._rows.get(key)
            if rows is None:
                rows = array("I")
                self._rows[key] = rows
                self._values[key] = array("d")
            rows.append(row)
            self._values[key].append(value)
        self.num_values += len(values)
        self.num_training += any(key.startswith("train/") for key in values)

    @property
    def num_names(self) -> int:
        return len(self._rows)

    def names(self) -> list[str]:
        """Return the names of the metrics, `time` included, in the order of their first lines."""
        return list(self._rows)

    def steps(self) -> np.ndarray:
        """Return the step of each line, in the order of the file: int64 [len]."""
        # Called for each metric: a copy per call would take time for lines times metrics.
        if self._known_steps is None:
            self._known_steps = np.array(self._steps, np.int64)
        return self._known_steps

    def dense(self, key: str) -> np.ndarray:
        """Return a metric of each line, in the order of the file: float64 [len].

        NaN for a line without the metric.
        """
        values = np.full(len(self), math.nan)
        if key in self._rows:
            values[np.array(self._rows[key])] = np.array(self._values[key])
        return values

    def order(self) -> np.ndarray | None:
        """Return the indices of the lines by ascending step: int64 [len]; None if in order."""
        return None if self._is_ascending else np.argsort(self.steps(), kind="stable")

    def rows_of(self, key: str) -> np.ndarray:
        """Return the indices of the lines with a metric, by ascending step: int64 [n]."""
        rows = np.array(self._rows.get(key, ()), np.int64)
        return rows if self._is_ascending else rows[np.argsort(self.steps()[rows], kind="stable")]

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return ascending steps and values of the lines with a metric: int64 and float64 [n]."""
        rows = np.array(self._rows.get(key, ()), np.int64)
        steps = self.steps()[rows]
        values = np.array(self._values.get(key, ()), np.float64)
        if not self._is_ascending:
            order = np.argsort(steps, kind="stable")
            return steps[order], values[order]
        return steps, values

    def lines(self, start: int, end: int) -> list[dict[str, Any]]:
        """Return lines as dictionaries, in the order of the file; NaN and infinity are None."""
        lines: list[dict[str, Any]] = [{"step": step} for step in self._steps[start:end]]
        for key, rows in self._rows.items():
            first = bisect_left(rows, start)
            last = bisect_left(rows, end)
            for row, value in zip(rows[first:last], self._values[key][first:last], strict=True):
                lines[row - start][key] = value if math.isfinite(value) else None
        return lines


def checked_line(line: Any) -> tuple[int, dict[str, float]]:
    """Return the step and the metrics of a line of metrics.jsonl; null is NaN.

    Modifies `line`: the step is removed.

    Raises ValueError, with the unexpected value, if it is not an object of numbers with a step.
    """
    if not isinstance(line, dict):
        raise ValueError(f"found a JSON {type(line).__name__}, expected an object")
    step = line.pop("step", None)
    if type(step) is not int:
        raise ValueError(f"found step={shown_value(step)}, expected an integer")
    if not 0 <= step < MAX_INTEGER:
        raise ValueError(f"found step={shown_value(step)}, expected 0 to {MAX_INTEGER - 1}")
    for key, value in line.items():
        if type(value) is not float:
            line[key] = _float_of(key, value)
    return step, line


def _float_of(key: str, value: Any) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, int):
        raise ValueError(f"found {shown_value(key)} = {shown_value(value)}, expected a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(
            f"found {shown_value(key)} of more than 300 digits, expected a number"
        ) from error


def shown_value(value: Any) -> str:
    """Return a value for a message; a list or object by its type, as its text has no bound."""
    if isinstance(value, list | dict):
        return f"a JSON {type(value).__name__}"
    if isinstance(value, str):
        value = value[:_SHOWN]
    return ascii(value)
