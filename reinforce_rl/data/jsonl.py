"""Find, read and atomically write JSONL files. Torch-free, so that it can run at config time."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class JsonLine:
    path: Path
    number: int  # from 1
    value: dict[str, Any] | None  # None if the line is no JSON object
    fault: str = ""  # why `value` is None, else ""


class LineFaults:
    """Collect faulty lines and report all of them in one `DataError`."""

    def __init__(self) -> None:
        self._faults: list[str] = []

    def __len__(self) -> int:
        return len(self._faults)

    def add(self, path: Path, number: int, reason: str) -> None:
        self._faults.append(f"{path}:{number}: {reason}")

    def raise_if_any(self, advice: str) -> None:
        """Raise a `DataError` that lists the first faults and ends with `advice`, if there are faults."""
        if not self._faults:
            return
        count = len(self._faults)
        listed = [f"  {fault}" for fault in self._faults[:MAX_LISTED_FAULTS]]
        if count > MAX_LISTED_FAULTS:
            listed.append(f"  ... and {count - MAX_LISTED_FAULTS} more")
        head = f"{count} line{'s' if count != 1 else ''} of the data cannot be used:"
        raise DataError("\n".join([head, *listed, advice]))


def read_jsonl(path: str | Path) -> Iterator[JsonLine]:
    """Yield every line that is not blank; a faulty one has `fault` instead of `value`.

    Raises:
        ConfigError: the file cannot be read, or has another format.
    """
    path = Path(path)
    try:
        # Bytes: a line that is not UTF-8 must not hide the others, and only "\n" ends a line.
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
    """Say why the first bytes of a file are not JSONL; None if they may be."""
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
    """Write JSONL files atomically, renaming none before all rows of all files are on disk.

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
    """Return the JSON name of a value's type with its article, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def resolve_data_prefix(data_prefix: Mapping[str, Any]) -> dict[str, list[Path]]:
    """Return the existing files of each split. Cheap, so that it runs before a model is loaded.

    Raises:
        ConfigError: unknown key, no train file, a value that is neither path nor weight, missing files; all together.
    """
    return _resolve(data_prefix)[0]


def blending_weights(data_prefix: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Return the weight of each train file, or None; raises as `resolve_data_prefix`."""
    return _resolve(data_prefix)[1]


def _resolve(data_prefix: Mapping[str, Any]) -> tuple[dict[str, list[Path]], tuple[float, ...] | None]:
    if not isinstance(data_prefix, Mapping):
        raise ConfigError(
            [f"model.data.data_prefix is {describe_type(data_prefix)}; expected keys train, validation and test"]
        )
    faults = [
        f"model.data.data_prefix.{key} is not known; expected one of {', '.join(SPLITS)}"
        for key in data_prefix
        if key not in SPLITS
    ]
    files: dict[str, list[Path]] = {}
    weights: tuple[float, ...] | None = None
    for split in SPLITS:
        value = data_prefix.get(split)
        entries = [] if value is None else [value] if isinstance(value, (str, Path)) else value
        if not isinstance(entries, Sequence):
            faults.append(f"model.data.data_prefix.{split} is {value!r}; expected a path or a list of paths")
            continue
        files[split] = []
        if split == "train" and any(_is_weight(entry) for entry in entries):
            weights, entries = _split_weights(entries, faults)
        for entry in entries:
            if not isinstance(entry, (str, Path)) or not str(entry):
                hint = " (only train can be blended by weights)" if _is_weight(entry) else ""
                faults.append(f"model.data.data_prefix.{split} holds {entry!r}; expected a path{hint}")
                continue
            path = Path(entry).expanduser()
            files[split].append(path)
            if fault := file_fault(path):
                faults.append(f"model.data.data_prefix.{split}: file {path} {fault}; expected a JSONL file of prompts")
        if split == "train" and not entries:
            faults.append("model.data.data_prefix.train is empty; expected one or more JSONL files of prompts")
    if faults:
        raise ConfigError(faults)
    return files, weights


def weight_faults(weights: Sequence[float]) -> list[str]:
    return [
        f"model.data.data_prefix.train has the weight {weight}; expected a number above 0"
        for weight in weights
        if not (math.isfinite(weight) and weight > 0)
    ]


def _is_weight(entry: object) -> bool:
    return isinstance(entry, (int, float)) and not isinstance(entry, bool)


def _split_weights(entries: Sequence[Any], faults: list[str]) -> tuple[tuple[float, ...], list[Any]]:
    weights, paths = list(entries[::2]), list(entries[1::2])
    if len(weights) != len(paths) or not all(map(_is_weight, weights)) or any(map(_is_weight, paths)):
        faults.append(
            f"model.data.data_prefix.train is {list(entries)}; expected paths alone, each of whose prompts comes once "
            "an epoch, or a weight before every path: [0.3, a.jsonl, 0.7, b.jsonl]"
        )
        return (), [entry for entry in entries if not _is_weight(entry)]
    faults += weight_faults(weights)
    faults += [
        f"model.data.data_prefix.train gives {path} two weights; expected each file once"
        for path in dict.fromkeys(paths)
        if paths.count(path) > 1
    ]
    return tuple(map(float, weights)), paths
