"""What files a checkpoint has, written beside them: a file that is cut short or altered is found before it is loaded.

manifest.json               {"files": {"model/__0_0.distcp": {"bytes": 1234, "crc32": "0badcafe"}, ...}}
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from reinforce_rl.errors import CheckpointError
from reinforce_rl.utils.files import write_atomically

MANIFEST_FILE = "manifest.json"
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written.

    Attributes:
        bytes: its size.
        crc32: its checksum, eight hexadecimal digits.
    """

    bytes: int
    crc32: str


Records = dict[str, FileRecord]


def record_files(folder: Path, paths: Iterable[Path]) -> Records:
    """Force files below `folder` to disk, and say what they are by their path in it."""
    records = {}
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
        records[path.relative_to(folder).as_posix()] = FileRecord(path.stat().st_size, _crc32(path))
    return records


def write_manifest(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """Write the manifest of a folder whose files are complete."""
    files = {name: asdict(records[name]) for name in sorted(records)}
    write_atomically(folder / MANIFEST_FILE, json.dumps({"files": files}, indent=1))


def check_files(folder: Path, rank: int = 0, world_size: int = 1) -> None:
    """Compare a folder with its manifest. Each rank looks at all sizes and reads its share of the files.

    Raises:
        CheckpointError: the manifest or a file is missing, of another size, or of other contents.
    """
    path = folder / MANIFEST_FILE
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        records = {name: FileRecord(**record) for name, record in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
    for name, record in records.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found is None:
            raise CheckpointError(f"{folder / name} is missing")
        if found != record.bytes:
            raise CheckpointError(f"{folder / name} has {found} bytes; expected the {record.bytes} that were written")
    for name in sorted(records)[rank::world_size]:
        try:
            found = _crc32(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
        if found != records[name].crc32:
            raise CheckpointError(
                f"{folder / name} is damaged: its checksum is {found}; expected {records[name].crc32}"
            )


def _crc32(path: Path) -> str:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"
