"""Writing files so that a reader, or a run started after a crash, finds the old content or the new, never half."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: str | Path, text: str) -> None:
    """Write text as UTF-8 to a file next to `path`, force it to disk, and rename it into place.

    Raises:
        OSError: the disk is full or the folder cannot be written; `path` is unchanged.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
