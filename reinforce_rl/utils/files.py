"""File I/O of a run: atomic writes, and JSON lines that tolerate a last line cut off by a kill."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import resource
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from reinforce_rl.errors import DataError, Fault
from reinforce_rl.utils.untrusted_files import open_regular, parse_json

# The disk is full, the quota is used up, or the file has reached its size limit.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNWRITABLE = (*NO_SPACE, errno.EROFS)

_MAX_LINES_BYTES = 4 << 30  # of a file of JSON lines
MAX_LINE_BYTES = 64 << 20  # of a line of JSON


def plain_number(value: Any) -> int | float | None:
    """Convert a number, NumPy scalar or one-element tensor to a Python number.

    None if it is NaN or infinite.
    """
    if isinstance(value, int):  # also bool, which becomes 0 or 1
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def json_line(record: Mapping[str, Any]) -> str:
    """Return `record` as a line of JSON.

    Floats round-trip exactly; top-level NaN and infinity become null.
    """
    cleaned = {k: plain_number(v) if isinstance(v, float) else v for k, v in record.items()}
    return json.dumps(cleaned, ensure_ascii=False, allow_nan=False) + "\n"


def encode(text: str) -> bytes:
    """Encode as UTF-8.

    Lone surrogates, which JSON can hold and UTF-8 cannot, become question marks.
    """
    return text.encode("utf-8", errors="replace")


def write_atomically(path: Path, text: str | bytes, mode: int = 0o666) -> None:
    """Write `text` to `path` atomically.

    Readers see either the old file or the complete new one, even after a kill. The umask clears
    bits of `mode`, as for every new file.
    """
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        name = path.parent / f".{path.name}.{secrets.token_hex(4)}"
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(encode(text) if isinstance(text, str) else text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            name.unlink(missing_ok=True)
            raise


def append(path: Path, data: bytes) -> None:
    """Append to a file and fsync it. After an error the file has its previous contents.

    Raises OSError, also if `path` is a link.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with naming(path), os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]  # a write is partial when the disk becomes full
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the name of a file to the errors of writing it, which `write` and `fsync` leave out.

    A system error that safetensors has wrapped becomes an OSError.
    """
    try:
        yield
    except OSError as error:
        # str(error) shows the name only if there is an errno.
        if error.errno is not None:
            error.filename = str(path)
            if error.filename2 is not None:  # set by a rename; None would be shown
                del error.filename2
        raise
    except Exception as error:
        wrapped = re.search(r"\(os error (\d+)\)", str(error))
        if wrapped is None:
            raise
        number = int(wrapped[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def space_left(path: Path, number: int | None = None) -> str:
    """Describe how much can still be written in the folder of `path`.

    `number` is the errno of the failed write, if there was one.
    """
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    mount = next(place for place in (folder, *folder.parents) if place.is_mount())
    if number == errno.EROFS:
        return f"{mount} is read-only"
    free = shutil.disk_usage(folder).free
    quota = ", whatever of it a quota leaves" if number == errno.EDQUOT else ""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    bound = (
        ""
        if limit == resource.RLIM_INFINITY
        else f"; a file may have {limit} bytes here (ulimit -f)"
    )
    return f"{free / 1e9:.2f} GB are free on {mount}{quota}{bound}"


def space_note(error: BaseException, path: Path) -> str:
    """Return `space_left` in brackets for an error of `UNWRITABLE`, else an empty string."""
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        return f" ({space_left(path, error.errno)})"
    return ""


def not_written(path: Path, error: OSError) -> str:
    """Return a sentence: the file cannot be written, why, and how much space is left."""
    return f"{path} cannot be written: {error.strerror or error}{space_note(error, path)}"


def write_fault(error: OSError) -> str:
    """Return a sentence: which file could not be written, why, and what to do.

    For the errors of `UNWRITABLE`.
    """
    if error.filename is None:
        text = f"a file cannot be written: {error.strerror or error}"
    else:
        text = not_written(Path(error.filename), error)
    remedies = {
        errno.EDQUOT: "Free some space, or have the quota raised",
        errno.EFBIG: "Raise the limit",
        errno.EROFS: "Have the disk made writable, or choose another folder",
    }
    remedy = remedies.get(error.errno or 0, "Free some space")
    return f"{text}. {remedy}, and start the same command again"


def make_readable(file: Path) -> None:
    """Give a file that a library created with mode 0600 the mode of other new files, by the umask.

    Buckets mounted by gcsfuse or Mountpoint, and some network shares, refuse chmod; there the mount
    decides who may read. That is not an error.
    """
    with contextlib.suppress(OSError):
        # The umask can only be read by setting it. A file that another thread creates in between is
        # readable by its owner only.
        umask = os.umask(0o077)
        os.umask(umask)
        os.chmod(file, 0o666 & ~umask)


def write_json(path: Path, values: Any) -> None:
    """Write `values` atomically as JSON; NaN and infinity become null."""
    from pydantic_core import to_json  # not installed where a Slurm job is only supervised

    write_atomically(path, to_json(values, indent=2, inf_nan_mode="null") + b"\n")


def folder_faults(key: str, folder: str) -> Iterator[Fault]:
    """Yield an error if a folder cannot be created or written to.

    No folder is created; the nearest existing parent is tested.
    """
    out = Path(folder).absolute()
    existing = out
    try:
        existing = next(p for p in (out, *out.parents) if p.exists())
        with tempfile.TemporaryDirectory(dir=existing):
            # os.access would succeed for root, even on /proc.
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        yield Fault(
            f"{key} is {out}; no folder can be made in {existing}: {reason}",
            key="folder.not_writable",
        )


def output_faults(key: str, path: Path) -> Iterator[Fault]:
    """Yield an error if a file cannot be written."""
    if path.is_dir():
        yield Fault(f"{key} is {path}, which is a folder; expected a file", key="file.is_folder")
    else:
        yield from folder_faults(f"the folder of {key}", str(path.parent))


def replace_folder(new: Path, folder: Path) -> None:
    """Move a complete folder to its place.

    The previous folder is deleted only after the new one is in place.
    """
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


def bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield a file's lines with their ends; a longer line is cut to `MAX_LINE_BYTES` + 1 bytes.

    A small compressed or sparse file can hold one line that is larger than the memory. Only "\\n"
    ends a line, as a response may contain U+2028 and similar separators.
    """
    return iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")


def read_json_lines(path: Path, *, within: Path | None = None) -> list[dict[str, Any]]:
    """Read one JSON object per line.

    An unterminated last line, as a killed writer leaves, is dropped.

    Raises DataError if a complete line is not a JSON object, or if `open_regular` refuses the file.
    """
    with open_regular(path, within=within) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_LINES_BYTES:
            raise DataError(
                f"{path} holds {size} bytes; expected at most {_MAX_LINES_BYTES}",
                key="file.too_large",
            )
        return parse_json_lines(path, file)


def parse_json_lines(path: Path, file: BinaryIO) -> list[dict[str, Any]]:
    """Parse the lines of `file`, opened from `path`, as `read_json_lines` does."""
    records = []
    for number, line in enumerate(bounded_lines(file), 1):
        if len(line) > MAX_LINE_BYTES:
            raise DataError(
                f"{path}, line {number}: more than {MAX_LINE_BYTES} bytes; restore the file, or "
                "delete that line to continue without it",
                key="json_lines.line.too_long",
            )
        if not line.endswith(b"\n"):
            break
        try:
            record = parse_json(line)
        except ValueError as error:
            raise DataError(
                f"{path}, line {number}: not valid JSON ({error}); every line must be one JSON "
                "object. Restore the file, or delete that line to continue without it",
                key="json_lines.line.not_json",
            ) from error
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise DataError(
                f"{path}, line {number}: found a JSON {kind}; expected an object",
                key="json_lines.line.no_object",
            )
        records.append(record)
    return records
