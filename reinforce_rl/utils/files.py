"""File I/O of a run: atomic writes, and JSON lines that tolerate a last line cut off by a kill."""

from __future__ import annotations

import contextlib
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
    """Convert a number, NumPy scalar or one-element tensor to a Python number; None if NaN or infinite."""
    if isinstance(value, int):  # also bool, which becomes 0 or 1
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def json_line(record: Mapping[str, Any]) -> str:
    """Return `record` as a line of JSON. Floats round-trip exactly; top-level NaN and infinity become null."""
    cleaned = {k: plain_number(v) if isinstance(v, float) else v for k, v in record.items()}
    return json.dumps(cleaned, ensure_ascii=False, allow_nan=False) + "\n"


def encode(text: str) -> bytes:
    """Encode as UTF-8; lone surrogates, which JSON can hold and UTF-8 cannot, become question marks."""
    return text.encode("utf-8", errors="replace")


def write_atomically(path: Path, text: str | bytes, mode: int = 0o644) -> None:
    """Write `text` to `path`; readers see either the old file or the complete new one, even after a kill."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            make_readable(file.fileno(), mode)  # mkstemp's 0600 would keep the group from reading
            file.write(encode(text) if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def make_readable(file: Path | int, mode: int = 0o644) -> None:
    """Set the mode of a file, or of a descriptor, where its file system has modes.

    Buckets mounted by gcsfuse or Mountpoint, and some shares, refuse it: the mount says who may read there.
    """
    with contextlib.suppress(OSError):
        os.chmod(file, mode)


def write_json(path: Path, values: Any) -> None:
    """Write `values` atomically as JSON; NaN and infinity become null."""
    from pydantic_core import to_json  # not at hand where a Slurm job is only supervised

    write_atomically(path, to_json(values, indent=2, inf_nan_mode="null") + b"\n")


def folder_faults(key: str, folder: str) -> Iterator[str]:
    """Yield an error if a folder cannot be made or written to; makes none, but tests the nearest existing parent."""
    out = existing = Path(folder).absolute()
    try:
        existing = next(p for p in (out, *out.parents) if p.exists())
        with tempfile.TemporaryDirectory(dir=existing):  # not os.access, which root passes even on /proc
            pass
    except OSError as error:
        yield f"{key} is {out}; no folder can be made in {existing}: {error.strerror or error}"


def output_faults(key: str, path: Path) -> Iterator[str]:
    """Yield an error if a file cannot be written."""
    if path.is_dir():
        yield f"{key} is {path}, which is a folder; expected a file"
    else:
        yield from folder_faults(f"the folder of {key}", str(path.parent))


def replace_folder(new: Path, folder: Path) -> None:
    """Move a complete folder to its place; the previous one is deleted only after the new one is in place."""
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
    """Write one JSON object per line, atomically."""
    write_atomically(path, "".join(json_line(record) for record in records))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read one JSON object per line; an unterminated last line, as a killed writer leaves, is dropped.

    Raises DataError if a complete line is not a JSON object.
    """
    return parse_json_lines(path, path.read_bytes())


def parse_json_lines(path: Path, data: bytes) -> list[dict[str, Any]]:
    """Parse `data` of the file `path` as `read_json_lines` does."""
    records = []
    # Not splitlines(), which also splits at U+2028 and the like inside a response.
    *lines, _torn = data.split(b"\n")
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
