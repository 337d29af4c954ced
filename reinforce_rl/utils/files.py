"""Writing and reading of the files of a run: atomic, valid JSON, tolerant of a line that a kill cut in half."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reinforce_rl.errors import DataError


def plain_number(value: Any) -> int | float | None:
    """A Python number of a number, NumPy scalar or one-element tensor; None where it is NaN or infinite."""
    if isinstance(value, int):  # bool too, which becomes 0 or 1
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def json_line(record: Mapping[str, Any]) -> str:
    """One line of JSON with its line end. Floats are written exactly; a NaN or infinity in `record` becomes null."""
    cleaned = {k: plain_number(v) if isinstance(v, float) else v for k, v in record.items()}
    return json.dumps(cleaned, ensure_ascii=False, allow_nan=False) + "\n"


def encode(text: str) -> bytes:
    """UTF-8; a lone surrogate, which JSON input can hold and UTF-8 cannot, becomes a question mark."""
    return text.encode("utf-8", errors="replace")


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader, or a kill at any moment, finds the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # mkstemp gives 0600, which keeps a group from reading a shared run
            file.write(encode(text))
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def folder_faults(key: str, folder: str) -> Iterator[str]:
    """Try whether a folder can be made and written to, without making it: in the nearest one above it that exists."""
    out = existing = Path(folder).absolute()
    try:
        existing = next(p for p in (out, *out.parents) if p.exists())
        with tempfile.TemporaryDirectory(dir=existing):  # root passes os.access() on /proc
            pass
    except OSError as error:
        yield f"{key} is {out}; no folder can be made in {existing}: {error.strerror or error}"


def replace_folder(new: Path, folder: Path) -> None:
    """Move a folder that is complete to its place beside it; what stood there goes only when the new one stands."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(new, folder)
    except OSError:
        if old.exists():
            os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_json_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, atomically."""
    write_atomically(path, "".join(json_line(record) for record in records))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read one JSON object a line; a last line that a killed writer left without its end is left out.

    Raises:
        DataError: a complete line is not a JSON object.
    """
    records = []
    # Not splitlines(): that would also split at U+2028 and its like, which a response may hold.
    *lines, _torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{path}, line {number}: not valid JSON ({error}); every line must be one JSON object. "
                "Restore the file, or delete that line to go on without it."
            ) from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: found a JSON {type(record).__name__}, expected an object")
        records.append(record)
    return records
