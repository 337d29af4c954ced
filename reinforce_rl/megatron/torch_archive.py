"""Checks what `torch.save` wrote before `torch.load` reads it, for files that somebody else may have made.

With `weights_only` torch executes no code of a file. But it unpacks a compressed entry of any size, and hashes any
key.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import BinaryIO

from reinforce_rl.errors import CheckpointError
from reinforce_rl.megatron.pickle_size import check_pickle_size
from reinforce_rl.utils.untrusted_files import open_regular

_MAX_PICKLE_BYTES = 64 << 20


def check_torch_file(path: Path, *, within: Path | None = None) -> None:
    """Raise CheckpointError unless `torch.load` takes no more memory for a file than its size.

    `open_regular` has further errors, and the meaning of `within`.
    """
    with open_regular(path, within=within) as file:
        length = file.seek(0, io.SEEK_END)
        try:
            check_torch_archive(file, 0, length)
        except CheckpointError as error:
            raise CheckpointError(f"{path.name} is not read: {error}") from error


def check_torch_archive(file: BinaryIO, start: int, length: int) -> None:
    """Check `length` bytes of a file from `start` on, as `check_torch_file` does."""
    try:
        with zipfile.ZipFile(io.BufferedReader(_Part(file, start, length))) as archive:
            _check(archive, length)
    except (OSError, ValueError, NotImplementedError, RuntimeError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"it is no archive of torch.save ({error})") from error


def _check(archive: zipfile.ZipFile, length: int) -> None:
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError("an entry is compressed, which torch.save never does")
    # Entries may share bytes of the file.
    size = sum(entry.file_size for entry in entries)
    if size > length:
        raise CheckpointError(f"its entries have {size} bytes, and it has {length}")
    for entry in entries:
        if entry.filename.endswith(".pkl"):
            if entry.file_size > _MAX_PICKLE_BYTES:
                raise CheckpointError(f"{entry.filename[:100]!r} has more than {_MAX_PICKLE_BYTES} bytes")
            check_pickle_size(archive.read(entry))


class _Part(io.RawIOBase):
    """Bytes of a file, as a file of their own."""

    def __init__(self, file: BinaryIO, start: int, length: int):
        self._file = file
        self._start = start
        self._length = length
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("a place before the beginning")
        self._place = base + offset
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._length - self._place))
        self._file.seek(self._start + self._place)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)
