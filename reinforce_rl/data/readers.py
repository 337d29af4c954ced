"""Read records from JSONL, JSON, CSV and Parquet, plain or compressed.

Sources are files, folders and Hugging Face data sets. The first bytes of a file determine its form,
and its name where they leave a choice. Torch-free, to run at config time.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import glob
import gzip
import importlib
import io
import json
import lzma
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

from reinforce_rl.data.jsonl import LineFaults, Record, describe_type
from reinforce_rl.data.splits import card_configurations, choose_files, one_split, suffix_of
from reinforce_rl.errors import DataError, Fault
from reinforce_rl.utils.files import MAX_LINE_BYTES, bounded_lines
from reinforce_rl.utils.untrusted_files import UnreadableFileError, open_regular

T = TypeVar("T")
# Location in the file, ":LINE" or ", row N", and the argument of `_record_of`.
Rows = Iterator[tuple[str, Any]]

HUB = "hf:"  # hf:OWNER/NAME[/CONFIGURATION][:SPLIT], like FOLDER[/CONFIGURATION][:SPLIT]
_START_BYTES = 4096
_AT_ONCE = 1024
_MAX_WHOLE_BYTES = 4 << 30  # of a file that cannot be read in pieces
_TOO_LONG = f"expected at most {MAX_LINE_BYTES} bytes in a line or row, found more"
_BOM = b"\xef\xbb\xbf"
_OPENERS: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": lambda path: _zstd(path),
}
# Forms that cannot be read: how the file begins, what it is, and what to do.
_UNUSABLE = (
    (
        rb"ARROW1|\xff\xff\xff\xff",
        "an Arrow file",
        "convert it: pandas.read_feather(IN).to_parquet(OUT)",
    ),
    (rb"PK\x03\x04", "a zip archive", "unpack it"),
    (rb"\xff\xfe|\xfe\xff", "UTF-16 text", "convert it with iconv -f UTF-16 -t UTF-8"),
    (
        rb"version https://git-lfs",
        "a Git LFS pointer in place of the file",
        "fetch the file with git lfs pull",
    ),
    (rb"\s*<", "an HTML or XML page", "see whether its download failed"),
    (
        rb'\s*\{\s*\n\s*"',
        "JSON over several lines",
        "write an object a line, jq -c . IN > OUT, or a list of objects",
    ),
)
_CSV = rb'("[^"\n]+"|[\w .-]+)([,;\t]("[^"\n]+"|[\w .-]+))+\r?\n'
# Common names of a column of prompts, for a hint.
_LIKELY = ("question", "instruction", "query", "problem", "input", "user", "prompts", "content")


class WrongForm(DataError):
    """A record has an unexpected form, as have probably all records of its file."""


class ColumnMissing(WrongForm):
    """A record lacks a column.

    Args:
        value: the record.
        expected: the columns that the record may have instead.
        option: the setting or argument that names the column.
    """

    def __init__(self, value: Mapping[str, Any], expected: str, option: str = ""):
        hint = ""
        if option:
            likely = [column for column in _LIKELY if column in value and option.endswith("prompt")]
            column = likely[0] if likely else "COLUMN"
            hint = f", or the name of its column in {option}={column}"
        columns = ", ".join(value) or "no key"
        super().__init__(f"found {columns}; expected {expected}{hint}", key="data.column.missing")


@dataclass(frozen=True)
class Columns:
    """Columns of the data by their new names.

    A dotted column leads into objects: `reward_model.ground_truth`.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    key: str = "model.data.fields."  # configuration prefix of a name, for messages

    def of(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return a record with its columns renamed. Raises ColumnMissing if it lacks one."""
        renamed: dict[str, Any] = {}
        for name, column in self.names.items():
            try:
                renamed[name] = reduce(
                    getitem, [column] if column in value else column.split("."), value
                )
            except (KeyError, TypeError) as error:
                raise ColumnMissing(
                    value, f"{column}, as {self.key}{name} says; correct that"
                ) from error
        taken = set(self.names.values())
        return {**{name: item for name, item in value.items() if name not in taken}, **renamed}


AS_NAMED = Columns()


def read_records(
    source: str | Path,
    parse: Callable[[Record], T],
    faults: LineFaults,
    columns: Columns = AS_NAMED,
    split: str | None = None,
) -> Iterator[T]:
    """Parse the records of a source in order.

    Faults of records that cannot be used are added to `faults`. `split` is for `files_of`.

    Raises:
        DataError: a file cannot be read, or has none of the known forms.
    """
    for path in files_of(source, split):
        with _naming(path):
            for count, (place, value) in enumerate(_rows_of(path, split)):
                try:
                    yield parse(Record(f"{path}{place}", columns.of(_record_of(value))))
                except DataError as error:
                    faults.add(f"{path}{place}", error)
                    if isinstance(error, WrongForm) and not count:
                        faults.columns += 1
                        break


def is_hub_name(source: object) -> bool:
    """Tell whether a source names a data set of the hub, `hf:...`; any other source is a path."""
    return str(source).startswith(HUB)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's name before the errors of reading it. They keep their keys."""
    try:
        yield
    except UnreadableFileError:  # its message names the file
        raise
    except DataError as error:
        raise DataError(f"{path} {error}", key=error.key) from error
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist", key="data.file.missing") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
            key="data.file.unreadable",
        ) from error


def files_of(source: str | Path, split: str | None = None) -> list[Path]:
    """Return the files of a source in order. A data set of `datasets` stays one path.

    A folder gives the files of one split of one configuration: FOLDER[/CONFIGURATION][:SPLIT]. If
    the source names no split and there are several, `split` is used. A pattern gives its matches.

    Raises:
        DataError: there is nothing to read, or a configuration or split has to be chosen.
    """
    if is_hub_name(source):
        return [Path(source)]
    path = _not_of_hub(Path(source).expanduser())
    with _naming(path):
        if not path.exists():
            return _matches(path, split) or _chosen(path, split)
        if path.is_dir():
            return [_not_of_hub(file) for file in choose_files(path, default=split)]
        if stat.S_ISREG(path.stat().st_mode):
            return [path]
        # Opening a pipe would wait for its writer.
        raise DataError("is not a file", key="data.file.not_regular")


def _not_of_hub(path: Path) -> Path:
    """Return a path that is not mistaken for a name of the hub.

    `Path` turns `./hf:x` into `hf:x`.
    """
    return path.absolute() if is_hub_name(path) else path


def _matches(pattern: Path, split: str | None) -> list[Path]:
    """Return the files that a pattern matches; [] if it is not a pattern or matches nothing."""
    matches = sorted(map(Path, glob.glob(str(pattern))))
    root = next(folder for folder in pattern.parents if not glob.has_magic(str(folder)))
    files = one_split((path for path in matches if not path.is_dir()), root)
    files = [_not_of_hub(path) for path in files]
    folders = [_not_of_hub(path) for path in matches if path.is_dir()]
    return files + [file for folder in folders for file in files_of(folder, split)]


def _chosen(path: Path, default: str | None) -> list[Path]:
    """Return the files of FOLDER/CONFIGURATION, FOLDER:SPLIT or FOLDER/CONFIGURATION:SPLIT."""
    place, _, split = path.name.rpartition(":")
    folder = path.parent / place if place else path
    files: list[Path] = []
    if place and folder.is_dir():
        files = choose_files(folder, "", split, default)
    elif folder.parent.is_dir() and card_configurations(folder.parent):
        files = choose_files(folder.parent, folder.name, split if place else "", default)
    if files:
        return [_not_of_hub(file) for file in files]
    raise FileNotFoundError(str(path))


def source_fault(source: str | Path, split: str | None = None) -> Fault | None:
    """Describe why a source cannot be read, from the first bytes of its files; None if it can."""
    try:
        for path in files_of(source, split):
            with _naming(path):
                if _is_data_set(path):
                    _datasets()
                else:
                    with _open(path) as file:
                        _form_of(path, file.peek(_START_BYTES))
    except DataError as error:
        return Fault(str(error), key=error.key)
    return None


def _rows_of(path: Path, split: str | None) -> Rows:
    if _is_data_set(path):
        yield from _data_set(path, split)
        return
    with _open(path) as file:
        yield from _form_of(path, file.peek(_START_BYTES))(file)


def _open(path: Path) -> io.BufferedReader:
    """Open a file for its text or Parquet, decompressed and after any byte order mark."""
    with open_regular(path) as file:
        start = file.read(8)
    opener = next((opener for magic, opener in _OPENERS.items() if start.startswith(magic)), None)
    opened = path.open("rb") if opener is None else io.BufferedReader(opener(path))
    if opened.peek(len(_BOM)).startswith(_BOM):
        opened.read(len(_BOM))
    return opened


def _zstd(path: Path) -> Any:
    return importlib.import_module("pyarrow").CompressedInputStream(path.open("rb"), "zstd")


def _form_of(path: Path, start: bytes) -> Callable[[io.BufferedReader], Rows]:
    """Return the reader of a file, by its first decompressed bytes and its name."""
    suffix = suffix_of(path.name)
    if not start:
        raise DataError("is empty", key="data.file.empty")
    if start.startswith(b"PAR1"):
        return _parquet
    for pattern, name, advice in _UNUSABLE:
        if re.match(pattern, start):
            raise DataError(f"is {name}; {advice}", key="data.file.other_form")
    if suffix == ".parquet":
        raise DataError(
            "does not begin as a Parquet file does; see whether its download failed",
            key="data.parquet.other_form",
        )
    if suffix in (".csv", ".tsv"):
        return _separated
    if re.match(rb"\s*\[\s*[{\]]", start):
        return _list
    if not re.match(_CSV, start):
        return _lines
    if suffix:
        raise DataError(
            f"is CSV, but its name ends in {suffix}; rename it",
            key="data.csv.other_suffix",
        )
    return _separated


def _lines(file: io.BufferedReader) -> Rows:
    # Read bytes: a line that is not UTF-8 must not hide the others.
    for number, raw in enumerate(bounded_lines(file), 1):
        if len(raw) > MAX_LINE_BYTES:
            yield f":{number}", DataError(_TOO_LONG, key="data.line.too_long")
            return
        if raw.strip():
            yield f":{number}", raw


def _record_of(value: Any) -> dict[str, Any]:
    """Return a row as a record. Raises DataError if it is not one, or is an error itself."""
    if isinstance(value, bytes):
        try:
            value = json.loads(_decoded(value), object_pairs_hook=_object_of)
        except json.JSONDecodeError as error:
            reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
            raise DataError(f"not valid JSON ({reason})", key="data.line.not_json") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"not usable JSON ({error})", key="data.line.unusable_json") from error
    if isinstance(value, DataError):
        raise value
    if not isinstance(value, dict):
        raise DataError(
            f"found {describe_type(value)}; expected a JSON object",
            key="data.line.not_an_object",
        )
    return value


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object.

    Raises DataError for a duplicate key, like Arrow; Python would keep the last value.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = ", ".join(repr(name) for name, count in counts.items() if count > 1)
        raise DataError(
            f"not usable JSON (an object has {twice} more than once; keep one of them)",
            key="data.json.repeated_key",
        )
    return value


def _decoded(raw: bytes, of: str = "line") -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"not valid UTF-8 (byte {error.start + 1} of the {of}); save it as UTF-8, or, if it is "
            "Latin-1: iconv -f LATIN1 -t UTF-8 IN > OUT",
            key="data.text.not_utf8",
        ) from error


def _read_whole(file: io.BufferedReader, advice: str) -> bytes:
    data = file.read(_MAX_WHOLE_BYTES + 1)
    if len(data) > _MAX_WHOLE_BYTES:
        raise DataError(
            f"holds more than {_MAX_WHOLE_BYTES} bytes; {advice}",
            key="data.file.too_large",
        )
    return data


def _list(file: io.BufferedReader) -> Rows:
    data = _read_whole(file, "write one record a line (.jsonl)")
    try:
        values = json.loads(_decoded(data, "file"), object_pairs_hook=_object_of)
    except DataError as error:
        raise DataError(f"is {error}", key=error.key) from error
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
        raise DataError(f"is not valid JSON: {error}", key="data.file.not_json") from error
    for number, value in enumerate(values, 1):
        yield f", row {number}", value


def _separated(file: io.BufferedReader) -> Rows:
    """Read CSV with column names in its first line. Every value is a text.

    The separator is a comma, a semicolon or a tab.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    first = file.peek(_START_BYTES).partition(b"\n")[0].decode(errors="replace")
    lines = _CsvLines(file)
    rows = csv.reader(map(_decoded, lines), delimiter=max(",;\t", key=first.count), strict=True)
    # `line` is the number of the line in which the row begins.
    header = list[str]()
    line = 1
    try:
        for row in rows:
            if not header:
                header = [name.strip() for name in row]
                if twice := sorted({name for name in header if name and header.count(name) > 1}):
                    fault = DataError(
                        f"several columns are named {', '.join(twice)}; rename all but one",
                        key="data.csv.repeated_column",
                    )
                    yield f":{line}", fault
                    return
            elif row:
                record: Any = dict(zip(header, row, strict=False))
                if len(row) != len(header):
                    record = DataError(
                        f"{len(row)} values; expected {len(header)}, of {', '.join(header)}",
                        key="data.csv.wrong_number_of_values",
                    )
                yield f":{line}", record
            line = rows.line_num + 1
            lines.row_bytes = 0
    except csv.Error as error:
        yield f":{line}", _csv_fault(str(error), rows.line_num)
    except DataError as error:
        yield f":{rows.line_num + 1}", error


def _csv_fault(reason: str, last_line: int) -> DataError:
    """Describe what is wrong in a row that ends in `last_line`, by the csv module's reason."""
    if "unexpected end" in reason:
        return DataError("a quote opens here and is never closed", key="data.csv.open_quote")
    if "expected after" in reason:
        return DataError(
            f"a quote opens here and closes before other text in line {last_line}; write quotes "
            "inside of quotes twice",
            key="data.csv.text_after_quote",
        )
    return DataError(reason, key="data.csv.invalid")


class _CsvLines:
    """Lines of a CSV file. A row with quotes may take several lines."""

    def __init__(self, file: io.BufferedReader):
        self.row_bytes = 0  # of the row so far; the reader resets it
        self._lines = bounded_lines(file)

    def __iter__(self) -> Iterator[bytes]:
        for line in self._lines:
            self.row_bytes += len(line)
            if self.row_bytes > MAX_LINE_BYTES:
                raise DataError(_TOO_LONG, key="data.line.too_long")
            yield line


def _parquet(file: io.BufferedReader) -> Rows:
    from pyarrow import ArrowException, BufferReader, OSFile, parquet

    # A decompressed stream cannot seek from its end. Arrow opens a plain file itself, since its
    # threads may block on a Python file object when the interpreter exits.
    is_plain = isinstance(file.raw, io.FileIO)
    source = (
        OSFile(os.fsencode(file.name)) if is_plain else BufferReader(_read_whole(file, "unpack it"))
    )
    try:
        yield from _of_batches(parquet.ParquetFile(source).iter_batches(batch_size=_AT_ONCE))
    except ArrowException as error:
        raise DataError(f"cannot be read: {error}", key="data.parquet.unreadable") from error


def _of_batches(batches: Iterable[Any]) -> Rows:
    number = 0
    for batch in batches:
        types = {column.name: column.type for column in batch.schema}
        for row in batch.to_pylist():
            number += 1
            yield (
                f", row {number}",
                {name: _plain(value, types.get(name)) for name, value in row.items()},
            )


def _plain(value: Any, arrow_type: Any) -> Any:
    """Return a JSON value: times and decimals as texts, bytes as text.

    Bytes that are not UTF-8 become null.
    """
    if isinstance(value, dict):
        # In Arrow each message of a column has the keys of all messages.
        return {
            key: _plain(item, _type_within(arrow_type, key))
            for key, item in value.items()
            if item is not None or "role" not in value
        }
    if isinstance(value, list | tuple):
        return [_plain(item, _type_within(arrow_type)) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    if isinstance(value, float) and str(arrow_type) in ("float", "halffloat"):
        # Use the shortest float32 form: 0.1, not 0.10000000149011612.
        return float(str(arrow_type.to_pandas_dtype()(value)))
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _type_within(arrow_type: Any, key: str = "") -> Any:
    """Return the type of a struct's field or of a list's items; None for other types."""
    if key and hasattr(arrow_type, "field"):
        return arrow_type.field(key).type
    return getattr(arrow_type, "value_type", None)


def _is_data_set(path: Path) -> bool:
    return is_hub_name(path) or path.is_dir()


def _datasets() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"needs the package datasets, which cannot be imported ({error}); install it: "
            "pip install 'reinforce-rl[datasets]'",
            key="data.datasets.not_importable",
        ) from error


def _data_set(path: Path, split: str | None) -> Rows:
    """Read a data set of `datasets`, from the Hugging Face hub or a `save_to_disk` folder."""
    datasets = _datasets()
    place, _, part = str(path).removeprefix(HUB).partition(":")
    owner, name, configuration = [*place.split("/", 2), "", ""][:3]
    try:
        if not is_hub_name(path):
            data_set = datasets.load_from_disk(str(path))
        else:
            repository = f"{owner}/{name}".rstrip("/")
            data_set = datasets.load_dataset(repository, configuration or None, split=part or None)
    except Exception as error:  # errors of the library, the hub's client and its HTTP client
        advice = ""
        if is_hub_name(path):
            advice = "; without a network, save it elsewhere (save_to_disk) and give that folder"
        if advice and datasets.config.HF_HUB_OFFLINE:
            advice = f"; HF_HUB_OFFLINE is set: unset it to fetch the data set{advice}"
        if "Config name is missing" in str(error):
            advice = f"; choose one: {HUB}{owner}/{name}/CONFIGURATION"
        elif "Unknown split" in str(error):
            advice = f"; choose one: {HUB}{place}:SPLIT"
        raise DataError(
            f"cannot be loaded by datasets: {type(error).__name__}: {error}{advice}",
            key="data.datasets.not_loaded",
        ) from error
    if isinstance(data_set, dict):  # a DatasetDict
        data_set = _split_of_dict(data_set, f"{HUB}{place}", split)
    # In Arrow's format images and sounds are not decoded.
    yield from _of_batches(data_set.with_format("arrow").iter(batch_size=_AT_ONCE))


def _split_of_dict(splits: Mapping[str, Any], place: str, split: str | None) -> Any:
    if len(splits) == 1:
        return next(iter(splits.values()))
    if split is None or split not in splits:
        missing = f"none of them {split}, " if split else ""
        names = ", ".join(splits)
        raise DataError(
            f"has several splits, {missing}{names}; choose one: {place}:{next(iter(splits))}",
            key="data.split.several",
        )
    return splits[split]
