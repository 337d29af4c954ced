"""JSONL files of prompts: find, read, check and write them.

HH form is one string: "\\n\\nHuman: ...\\n\\nAssistant: ...\\n\\nHuman: ...\\n\\nAssistant:". Torch-free, to run at
config time.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from reinforce_rl.errors import ConfigError, DataError

T = TypeVar("T")
Message = dict[str, str]

MAX_LISTED_FAULTS = 10
SPLITS = ("train", "validation", "test")
_START_BYTES = 4096
_BOM = b"\xef\xbb\xbf"
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

_HH_MARKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}
HH_NAMES = {role: name for name, role in _HH_ROLES.items()}


# Files


@dataclass(frozen=True)
class JsonLine:
    path: Path
    number: int  # from 1
    value: dict[str, Any]


class LineFaults(list[str]):
    """Faulty lines, reported together in one `DataError`."""

    def add(self, path: Path, number: int, reason: object) -> None:
        self.append(f"  {path}:{number}: {reason}")

    def raise_if_any(self, advice: str) -> None:
        """Raise a `DataError` that lists the first faults and ends with `advice`, if there are faults."""
        if not self:
            return
        more = [f"  ... and {len(self) - MAX_LISTED_FAULTS} more"] if len(self) > MAX_LISTED_FAULTS else []
        head = f"{len(self)} line{'s' if len(self) != 1 else ''} of the data cannot be used:"
        raise DataError("\n".join([head, *self[:MAX_LISTED_FAULTS], *more, advice]))


def read_jsonl(path: str | Path, parse: Callable[[JsonLine], T], faults: LineFaults) -> list[T]:
    """Parse every line that is not blank; `faults` gets those that are no JSON object or give a `DataError`.

    Raises:
        DataError: the file cannot be read, or has another format.
    """
    path, found = Path(path), []
    try:
        # Bytes: a line that is not UTF-8 must not hide the others, and only "\n" ends a line.
        with path.open("rb") as file:
            if fault := _format_fault(file.peek(_START_BYTES)):
                raise DataError(f"file {path} {fault}")
            for number, raw in enumerate(file, 1):
                raw = raw.removeprefix(_BOM) if number == 1 else raw
                try:
                    if raw.strip():
                        found.append(parse(JsonLine(path, number, _object_of(raw))))
                except DataError as error:
                    faults.add(path, number, error)
    except OSError as error:
        raise DataError(f"file {path} cannot be read: {error.strerror or error}") from error
    return found


def _object_of(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"not valid UTF-8 (byte {error.start + 1} of the line)") from error
    except json.JSONDecodeError as error:
        raise DataError(f"not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"not usable JSON ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f"expected a JSON object, found {describe_type(value)}")
    return value


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
        if re.match(pattern, start.removeprefix(_BOM)):
            return f"is {name}, not JSONL, which has a JSON object a line; {advice}"
    return None


def write_jsonl_files(files: Mapping[Path, Iterable[Mapping[str, Any]]]) -> None:
    """Write JSONL files atomically, renaming none before all rows of all files are on disk.

    Raises:
        DataError: a folder or a file cannot be written.
    """
    ready: list[tuple[str, Path]] = []
    try:
        for path, rows in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
            ready.append((temporary, path))
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner can read
        for temporary, path in ready:
            os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"file {error.filename} cannot be written: {error.strerror or error}") from error
    finally:
        for temporary, _ in ready:
            Path(temporary).unlink(missing_ok=True)


def resolve_data_prefix(data_prefix: Mapping[str, Any]) -> tuple[dict[str, list[Path]], tuple[float, ...] | None]:
    """Return the existing files of each split, and the weight of each train file if there are weights.

    Cheap, so that it runs before a model is loaded.

    Raises:
        ConfigError: unknown key, no train file, a value that is neither path nor weight, missing files; all together.
    """
    key = "model.data.data_prefix"
    faults = [f"{key}.{k} is not known; expected one of {', '.join(SPLITS)}" for k in data_prefix if k not in SPLITS]
    files: dict[str, list[Path]] = {}
    weights: tuple[float, ...] | None = None
    for split in SPLITS:
        value = data_prefix.get(split)
        entries = [] if value is None else [value] if isinstance(value, (str, Path)) else value
        if not isinstance(entries, Sequence):
            faults.append(f"{key}.{split} is {value!r}; expected a path or a list of paths")
            continue
        if split == "train" and any(map(_is_weight, entries)):
            weights, entries = _split_weights(entries, faults)
        files[split] = []
        for entry in entries:
            if not isinstance(entry, (str, Path)) or not str(entry):
                hint = " (only train can be blended by weights)" if _is_weight(entry) else ""
                faults.append(f"{key}.{split} holds {entry!r}; expected a path{hint}")
                continue
            path = Path(entry).expanduser()
            files[split].append(path)
            if fault := file_fault(path):
                faults.append(f"{key}.{split}: file {path} {fault}; expected a JSONL file of prompts")
        if split == "train" and not entries:
            faults.append(f"{key}.train is empty; expected one or more JSONL files of prompts")
    if faults:
        raise ConfigError(faults)
    return files, weights


def _is_weight(entry: object) -> bool:
    return isinstance(entry, (int, float)) and not isinstance(entry, bool)


def _split_weights(entries: Sequence[Any], faults: list[str]) -> tuple[tuple[float, ...], list[Any]]:
    key, weights, paths = "model.data.data_prefix.train", list(entries[::2]), list(entries[1::2])
    if len(weights) != len(paths) or not all(map(_is_weight, weights)) or any(map(_is_weight, paths)):
        faults.append(
            f"{key} is {list(entries)}; expected paths alone, each of whose prompts comes once an epoch, or a weight "
            "before every path: [0.3, a.jsonl, 0.7, b.jsonl]"
        )
        return (), [entry for entry in entries if not _is_weight(entry)]
    bad = [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]
    faults += [f"{key} has the weight {weight}; expected a number above 0" for weight in bad]
    twice = [path for path in dict.fromkeys(paths) if paths.count(path) > 1]
    faults += [f"{key} gives {path} two weights; expected each file once" for path in twice]
    return tuple(map(float, weights)), paths


# Values of a line; their errors name the key alone


def describe_type(value: object) -> str:
    """Return the JSON name of a value's type with its article, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def check_text(value: object, key: str) -> str:
    """Return a string that UTF-8 can encode; else raise a `DataError`."""
    if not isinstance(value, str):
        raise DataError(f"{key} is {describe_type(value)}, expected a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{key} holds half of a surrogate pair ({value[error.start]!r})") from error
    return value


def check_messages(
    value: object, key: str, roles: Sequence[str], expected: str = "a string or a list of messages"
) -> list[dict[str, Any]]:
    """Return a list of `{"role", "content"}`; raise a `DataError` for anything else, or if it is empty."""
    if not isinstance(value, list):
        raise DataError(f"{key} is {describe_type(value)}, expected {expected}")
    if not value:
        raise DataError(f"{key} is empty")
    for index, message in enumerate(value):
        where = f"{key}[{index}]"
        if not isinstance(message, dict):
            raise DataError(f"{where} is {describe_type(message)}, expected an object")
        if message.get("role") not in roles:
            raise DataError(f"{where}.role is {message.get('role')!r}, expected one of {', '.join(roles)}")
        check_text(message.get("content"), f"{where}.content")
    return value


def check_prompt(messages: Sequence[Mapping[str, Any]], key: str) -> None:
    """Raise a `DataError` if nothing is asked at the end of a conversation."""
    if messages and messages[-1]["role"] == "assistant":
        raise DataError(f"{key} ends with an assistant message; a prompt ends where the assistant shall answer")
    if not messages or not messages[-1]["content"].strip():
        raise DataError(f"{key} is empty, or its last message is")


def parse_hh_conversation(text: str) -> list[Message]:
    """Split an HH conversation into messages with roles "user" and "assistant", contents stripped.

    An open "Assistant:" at the end gives no message. Repeated roles and empty turns stay as they are.

    Raises:
        DataError: the text does not begin with "Human:" or "Assistant:".
    """
    markers = list(_HH_MARKER.finditer(text))
    if not markers or markers[0].start() != 0:
        raise DataError(f"expected a conversation that begins with '\\n\\nHuman:', found {text[:40]!r}")
    ends = [marker.start() for marker in markers[1:]] + [len(text)]
    messages = [
        {"role": _HH_ROLES[marker.group(1)], "content": text[marker.end() : end].strip()}
        for marker, end in zip(markers, ends, strict=True)
    ]
    return messages[:-1] if messages[-1] == {"role": "assistant", "content": ""} else messages


def messages_of_text(text: str) -> list[Message]:
    """Parse an HH prompt, or return any other text as one user message."""
    if text.lstrip().startswith("Human:"):
        return parse_hh_conversation(text)
    return [{"role": "user", "content": text.strip()}]


def render_hh_prompt(messages: list[Message]) -> str:
    """Inverse of `parse_hh_conversation` for a prompt; ends with the open "Assistant:"."""
    turns = [f"\n\n{HH_NAMES[message['role']]}: {message['content']}" for message in messages]
    return "".join(turns) + "\n\nAssistant:"


def prompt_key(messages: Sequence[Message]) -> str:
    """Return a key that ignores case and white space."""
    return json.dumps([(m["role"], " ".join(m["content"].casefold().split())) for m in messages])
