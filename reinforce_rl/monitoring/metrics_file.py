"""Read a growing metrics.jsonl into columns."""

from __future__ import annotations

import math
import os
import time
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.columns import MetricColumns, checked_line
from reinforce_rl.utils.untrusted_files import open_regular, parse_json

# Bytes before the end of the read part that must be unchanged. Each line has its time.
_TAIL = 4096
_CHUNK = 1 << 18  # bytes of one read
_MAX_LINE = 1 << 20  # bytes
_MAX_LINE_DEPTH = 20
_KEY_VALUES = 100  # memory of a metric's name, in values
_MAX_NAMES = 4096  # metrics; a run with many rewards and validation sets has some hundreds


class MetricsFile:
    """The read part of a metrics.jsonl; no lines if the file is missing.

    Args:
        within: the folder that a link may not leave.
        max_values: most values in memory; None for no bound. A value takes 12 bytes.
    """

    def __init__(self, path: Path, within: Path, max_values: int | None = None):
        self._path = path
        self._within = within
        self._max_values = max_values
        self._begin()

    def _begin(self) -> None:
        """Drop everything that was read."""
        self.columns = MetricColumns()  # a new object each time that reading starts again
        self.is_read = False
        self._inode = -1
        self._size = 0  # bytes of the file at the last read
        self._end = 0  # bytes read so far
        self._checksum = 0

    def refresh(self, seconds: float = math.inf) -> bool:
        """Read the lines since the last call, or all lines if the file was rewritten.

        Returns False if there is more to read after `seconds`. Raises DataError, with the line, if
        the file cannot be read.
        """
        deadline = time.monotonic() + seconds
        try:
            file = open_regular(self._path, within=self._within)
        except FileNotFoundError:
            self._begin()
            return True
        with file:
            about = os.fstat(file.fileno())
            # A resumed run drops later lines, and may write new ones of the same size.
            if about.st_ino != self._inode or _checksum(file, self._end) != self._checksum:
                self._begin()
                self._inode = about.st_ino
            self._size = about.st_size
            while self._read_chunk(file):
                self.is_read = True
                if time.monotonic() > deadline:
                    return False
            self.is_read = True
        return True

    def _read_chunk(self, file: BinaryIO) -> bool:
        """Read some whole lines; return False if there is none yet."""
        # A file that was too large at an earlier call is not read further.
        self._check_values()
        file.seek(self._end)
        data = file.read(_CHUNK)
        if len(data) == _CHUNK and b"\n" not in data:
            data += file.read(_MAX_LINE - _CHUNK)
        size = data.rfind(b"\n") + 1
        number = len(self.columns)
        if not size and len(data) >= _MAX_LINE:
            raise DataError(
                f"{self._path}, line {number + 1} has more than {_MAX_LINE} bytes; delete the line",
                key="metrics.line.too_long",
            )
        lines = []
        # A half-written line is read next time.
        for line in data[:size].split(b"\n")[:-1]:
            number += 1
            try:
                lines.append(checked_line(parse_line(line)))
            except ValueError as error:
                advice = "restore the file, or delete that line to continue without it"
                raise DataError(
                    f"{self._path}, line {number}: {error}; {advice}",
                    key="metrics.line.invalid",
                ) from error
        for step, values in lines:
            self.columns.add(step, values)
        self._end += size
        self._checksum = _checksum(file, self._end)
        self._check_values()
        return size > 0

    def _check_values(self) -> None:
        names = self.columns.num_names
        if names > _MAX_NAMES:
            # Pages, tables and comparisons take time and space for each metric.
            raise DataError(
                f"{self._path} has {names} different metrics; expected at most {_MAX_NAMES}",
                key="metrics.names.too_many",
            )
        taken = self.columns.num_values + len(self.columns) + _KEY_VALUES * names
        if self._max_values is not None and taken > self._max_values:
            raise DataError(
                f"{self._path} has more than the {self._max_values} values that the dashboard "
                "reads of a run; `reinforce-rl report` has no such limit",
                key="metrics.values.too_many",
            )

    @property
    def stamp(self) -> tuple[int, int]:
        """A value that changes with each read."""
        return self._inode, self._end

    @property
    def share_read(self) -> float:
        """The read share of the file, from 0 to 1; 1 also if less than a line may be missing."""
        return self._end / self._size if self._size > self._end + _MAX_LINE else 1.0


def parse_line(line: bytes) -> Any:
    """Parse a line of metrics.jsonl. Raises ValueError if it is not JSON, or nested."""
    try:
        return parse_json(line, max_depth=_MAX_LINE_DEPTH)
    except ValueError as error:
        raise ValueError(f"not valid JSON ({str(error)[:200]})") from error


def _checksum(file: BinaryIO, end: int) -> int:
    """Return a checksum of the bytes before `end`.

    A resumed run rewrites its file, perhaps to the same size.
    """
    file.seek(max(0, end - _TAIL))
    return zlib.crc32(file.read(min(end, _TAIL)))
