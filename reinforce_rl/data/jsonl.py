"""JSONL files: read line by line with every fault placed, written atomically."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforce_rl.errors import ConfigError, DataError

MAX_LISTED_FAULTS = 10
_START_BYTES = 4096
_CONVERT = "convert it: pandas.read_{}(IN).to_json(OUT, orient='records', lines=True)"
# Other formats by how a file begins, each with what to do about it.
_FORMATS = (
    (rb"PAR1", "a Parquet file", _CONVERT.format("parquet")),
    (rb"ARROW1|\xff\xff\xff\xff", "an Arrow file", _CONVERT.format("feather")),
    (rb"\x1f\x8b", "a gzip file", "unpack it with gunzip"),
    (rb"PK\x03\x04|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd", "a compressed file", "unpack it"),
    (rb"\xff\xfe|\xfe\xff", "UTF-16 text", "convert it with iconv -f UTF-16 -t UTF-8"),
    (rb"version https://git-lfs", "a Git LFS pointer in place of the file", "fetch the file with git lfs pull"),
    (rb"\s*<", "an HTML or XML page", "see whether its download failed"),
    (rb"\s*\[\s*\{", "a JSON array", "write its elements a line each: jq -c '.[]' IN > OUT"),
    (rb'\s*\{\s*\n\s*"', "JSON over several lines", "write an object a line: jq -c . IN > OUT"),
    (rb'("[^"\n]+"|[\w .-]+)([,;\t]("[^"\n]+"|[\w .-]+))+\r?\n', "CSV", _CONVERT.format("csv")),
)


@dataclass(frozen=True)
class JsonLine:
    """One line of a JSONL file that is not blank.

    Attributes:
        path: its file.
        number: its line number, from 1.
        value: the JSON object, or None where the line holds none.
        fault: why `value` is None, else "".
    """

    path: Path
    number: int
    value: dict[str, Any] | None
    fault: str = ""


class LineFaults:
    """Collects the faults of lines, so that all of them are reported in one `DataError`."""

    def __init__(self) -> None:
        self._faults: list[str] = []

    def __len__(self) -> int:
        return len(self._faults)

    def add(self, path: Path, number: int, reason: str) -> None:
        """Note that line `number` of `path` cannot be used."""
        self._faults.append(f"{path}:{number}: {reason}")

    def raise_if_any(self, advice: str) -> None:
        """Raise a `DataError` that lists the first faults and ends with `advice`; do nothing without faults."""
        if not self._faults:
            return
        count = len(self._faults)
        listed = [f"  {fault}" for fault in self._faults[:MAX_LISTED_FAULTS]]
        if count > MAX_LISTED_FAULTS:
            listed.append(f"  ... and {count - MAX_LISTED_FAULTS} more")
        head = f"{count} line{'s' if count != 1 else ''} of the data cannot be used:"
        raise DataError("\n".join([head, *listed, advice]))


def read_jsonl(path: str | Path) -> Iterator[JsonLine]:
    """Yield every line of a JSONL file that is not blank; faulty lines come with their fault instead of a value.

    Raises:
        ConfigError: the file cannot be read, or is of another format.
    """
    path = Path(path)
    try:
        # Bytes, because one line that is not UTF-8 shall not hide the others, and only "\n" ends a line.
        with path.open("rb") as file:
            if fault := _format_fault(file.peek(_START_BYTES)):
                raise ConfigError([f"file {path} {fault}"])
            for number, raw in enumerate(file, 1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                if raw.strip():
                    yield _parse(path, number, raw)
    except OSError as error:
        raise ConfigError([f"file {path} cannot be read: {error.strerror or error}"]) from error


def file_fault(path: Path) -> str | None:
    """Say why a file holds no JSONL, as far as its first bytes show; None where nothing speaks against it."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            return "is not a file"
        with path.open("rb") as file:
            start = file.peek(_START_BYTES)
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return _format_fault(start) if start else "is empty"


def _format_fault(start: bytes) -> str | None:
    for pattern, name, advice in _FORMATS:
        if re.match(pattern, start.removeprefix(b"\xef\xbb\xbf")):
            return f"is {name}, not JSONL, which has a JSON object a line; {advice}"
    return None


def write_jsonl_files(files: Mapping[Path, Iterable[Mapping[str, Any]]]) -> None:
    """Write several JSONL files, each atomically, and none of them before all rows are on the disk.

    Raises:
        ConfigError: a folder or a file cannot be written.
    """
    ready: list[tuple[str, Path]] = []
    try:
        for path, rows in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
            ready.append((temporary, path))
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner can read
        for temporary, path in ready:
            os.replace(temporary, path)
    except OSError as error:
        raise ConfigError([f"file {error.filename} cannot be written: {error.strerror or error}"]) from error
    finally:
        for temporary, _ in ready:
            Path(temporary).unlink(missing_ok=True)


def _parse(path: Path, number: int, raw: bytes) -> JsonLine:
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return JsonLine(path, number, None, f"not valid UTF-8 (byte {error.start + 1} of the line)")
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        return JsonLine(path, number, None, f"not valid JSON ({reason} at column {error.colno})")
    except (ValueError, RecursionError) as error:
        return JsonLine(path, number, None, f"not usable JSON ({error})")
    if not isinstance(value, dict):
        return JsonLine(path, number, None, f"expected a JSON object, found {describe_type(value)}")
    return JsonLine(path, number, value)


def describe_type(value: object) -> str:
    """The JSON name of a value's type, with its article, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
