"""Checks untrusted files of `torch.save` before `torch.load` reads them.

With `weights_only`, torch executes no code of a file. But it decompresses an entry to any size,
calls constructors that allocate memory, and computes the hash of any key of a dictionary.
"""

from __future__ import annotations

import io
import os
import pickletools
import re
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

from reinforce_rl.errors import CheckpointError
from reinforce_rl.megatron.pickle_size import check_pickle_size
from reinforce_rl.utils.untrusted_files import open_regular

_MAX_PICKLE_BYTES = 64 << 20
_END = struct.Struct("<4s4H2IH")  # end record of an archive
_ZIP64_END = struct.Struct("<4sQ2H2I4Q")
_ZIP64_LOCATOR = struct.Struct("<4sIQI")
_LOCAL_HEADER = struct.Struct("<4s22s2H")  # of an entry; it ends with two lengths
_DESCRIPTOR = b"PK\7\x08"
_ZIP64_BOUND = 0xFFFFFFFF  # an offset or size of four bytes from which ZIP64 is used
_ENTRY_NAME = re.compile(r"[^/]+/[\w./-]+", re.ASCII)
# If it is set, torch unpickles any class that a file names unless the caller passes `weights_only`,
# which megatron does not.
_FORCE_VARIABLE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_FORCE_VALUES = ("1", "y", "yes", "true")
# Names in a pickle of tensors, numbers and texts. torch also allows bytearray(N) and the like.
_ALLOWED = frozenset({"torch._utils _rebuild_tensor_v2", "collections OrderedDict", "torch Size"})


def check_torch_file(path: Path, *, within: Path | None = None) -> None:
    """Raise CheckpointError if a file may take more memory than its size, or has an unknown form.

    Raises the errors of `open_regular` too, which explains `within`.
    """
    with open_regular(path, within=within) as file:
        length = file.seek(0, io.SEEK_END)
        try:
            check_torch_archive(file, 0, length)
        except CheckpointError as error:
            raise CheckpointError(f"{path.name} is not read: {error}", key=error.key) from error


def check_torch_archive(file: BinaryIO, start: int, length: int) -> None:
    """Check `length` bytes of a file from `start` on, like `check_torch_file`."""
    check_weights_only()
    part = io.BufferedReader(_Part(file, start, length))
    try:
        _check_directory(part, length)
        with zipfile.ZipFile(part) as archive:
            _check_entries(archive.infolist())
            _check_offsets(part, archive)
            _check_pickles(archive)
    except (
        OSError,
        ValueError,
        NotImplementedError,
        RuntimeError,
        struct.error,
        zipfile.BadZipFile,
    ) as error:
        raise CheckpointError(
            f"it is not an archive of torch.save ({error})",
            key="checkpoint.archive.not_readable",
        ) from error


def check_weights_only() -> None:
    """Raise CheckpointError if the environment tells torch to execute code of a checkpoint."""
    value = os.environ.get(_FORCE_VARIABLE, "")
    if value.lower() in _FORCE_VALUES:
        raise CheckpointError(
            f"the environment variable {_FORCE_VARIABLE} is {value!r}, so torch would execute code "
            "of a checkpoint; expected it to be unset. Unset it for this command",
            key="checkpoint.environment.runs_code",
        )


def _check_directory(part: BinaryIO, length: int) -> None:
    """Check that the archive has one directory, directly before its end records at the file's end.

    Otherwise Python's reader and torch's could read different entries.
    """
    end = length - _END.size
    part.seek(end)
    signature, *_, size, offset, comment = _END.unpack(part.read(_END.size))
    if signature != b"PK\5\6" or comment:
        raise zipfile.BadZipFile("something is behind its directory")
    part.seek(max(0, end - _ZIP64_LOCATOR.size))
    signature, _, zip64_offset, _ = _ZIP64_LOCATOR.unpack(part.read(_ZIP64_LOCATOR.size))
    if signature == b"PK\6\7":
        end -= _ZIP64_LOCATOR.size + _ZIP64_END.size
        part.seek(max(0, end))
        signature, *_, size, offset = _ZIP64_END.unpack(part.read(_ZIP64_END.size))
        if signature != b"PK\6\6" or zip64_offset != end:
            raise zipfile.BadZipFile("its zip64 record is elsewhere")
    if offset + size != end:
        raise zipfile.BadZipFile("its directory is elsewhere")


def _check_entries(entries: list[zipfile.ZipInfo]) -> None:
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError(
            "an entry is compressed; torch.save never compresses one",
            key="checkpoint.archive.compressed",
        )
    for entry in entries:
        # torch keeps tensors by their names, which a pickle could give as tuples with equal hashes.
        if not _ENTRY_NAME.fullmatch(entry.orig_filename):
            name = entry.orig_filename[:100]
            raise CheckpointError(
                f"an entry is named {name!r}; torch.save never writes such a name",
                key="checkpoint.archive.other_name",
            )
    # torch ignores the case of an entry's name.
    names = {entry.filename.lower() for entry in entries}
    if len(names) < len(entries):
        raise CheckpointError(
            "two of its entries have the same name",
            key="checkpoint.archive.same_name",
        )


def _check_offsets(part: BinaryIO, archive: zipfile.ZipFile) -> None:
    """Check that entries lie end to end from the first byte on, followed by the directory.

    Otherwise entries could share bytes, or the file could begin with torch's old format: torch
    chooses the format by the first bytes, and Python finds an archive by its last bytes.
    """
    entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    end = 0
    for entry in entries:
        name = entry.filename[:100]
        # If two extra fields give an offset, Python and torch could use different ones.
        if len(entry.extra) not in (0, 4 + int.from_bytes(entry.extra[2:4], "little")):
            raise CheckpointError(
                f"{name!r} has more than one field of sizes; expected at most one",
                key="checkpoint.archive.two_sizes",
            )
        if entry.header_offset != end:
            start = entry.header_offset
            raise CheckpointError(
                f"{name!r} begins at byte {start}; expected byte {end}",
                key="checkpoint.archive.entry_elsewhere",
            )
        part.seek(end)
        header = _LOCAL_HEADER.unpack(part.read(_LOCAL_HEADER.size))
        signature, _, name_length, extra_length = header
        if signature != b"PK\3\4" or entry.file_size != entry.compress_size:
            raise zipfile.BadZipFile(f"{name!r} has no header of its own")
        end += _LOCAL_HEADER.size + name_length + extra_length + entry.file_size
        end += _descriptor_bytes(part, entry, end)
    if archive.start_dir != end:
        start = archive.start_dir
        raise CheckpointError(
            f"its directory begins at byte {start}; expected byte {end}",
            key="checkpoint.archive.directory_elsewhere",
        )


def _descriptor_bytes(part: BinaryIO, entry: zipfile.ZipInfo, data_end: int) -> int:
    """Return the size of the data descriptor that follows an entry's data; 0 without one."""
    part.seek(data_end)
    if part.read(len(_DESCRIPTOR)) != _DESCRIPTOR:
        return 0
    is_large = max(entry.header_offset, entry.file_size) >= _ZIP64_BOUND
    return 24 if is_large else 16


def _check_pickles(archive: zipfile.ZipFile) -> None:
    for entry in archive.infolist():
        if entry.filename.lower().endswith(".pkl"):
            if entry.file_size > _MAX_PICKLE_BYTES:
                name = entry.filename[:100]
                raise CheckpointError(
                    f"{name!r} has {entry.file_size} bytes; expected at most {_MAX_PICKLE_BYTES}",
                    key="checkpoint.archive.large_pickle",
                )
            data = archive.read(entry)
            check_pickle_size(data)
            _check_names(data)


def _check_names(data: bytes) -> None:
    for opcode, name, _ in pickletools.genops(data):
        if opcode.name in ("STACK_GLOBAL", "INST"):
            raise CheckpointError(
                f"its pickle has the instruction {opcode.name}, which torch.save never writes",
                key="checkpoint.archive.other_instruction",
            )
        if opcode.name == "GLOBAL" and not _is_allowed(str(name)):
            raise CheckpointError(
                f"it names {str(name)[:100]!r}; expected tensors, numbers and strings",
                key="checkpoint.archive.other_class",
            )


def _is_allowed(name: str) -> bool:
    module, _, attribute = name.partition(" ")
    return name in _ALLOWED or (module == "torch" and attribute.endswith("Storage"))


class _Part(io.RawIOBase):
    """A range of bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int):
        self._file = file
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("a position before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._start + self._position)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
