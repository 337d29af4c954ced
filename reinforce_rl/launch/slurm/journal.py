"""What a job tells people: its own lines, and the end of a step's log."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from pathlib import Path

LAST_LOG_LINES = 20
TAIL_BYTES = 1 << 18


class Journal:
    """Says lines to people: to the job's output, and to job.log of the attempt."""

    def __init__(self, path: Path):
        self._path = path

    def say(self, text: str) -> None:
        """Print it with the time of day."""
        lines = "".join(f"{time.strftime('%H:%M:%S')} {line}\n" for line in text.splitlines())
        with contextlib.suppress(OSError):  # a full disk must not end what can still be ended in good order
            sys.stdout.write(lines)
            sys.stdout.flush()
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(lines)


def last_lines(log: Path, count: int = LAST_LOG_LINES) -> str:
    """The end of a log that `srun --label` has written, without Python's warnings, which say nothing of a failure."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"{log} cannot be read: {error.strerror}"
    shown: list[str] = []
    warned: set[str] = set()  # tasks whose next line is the code that the warning is about
    for line in lines:
        task, _, text = line.partition(": ")
        if task in warned and text.startswith("  "):
            warned.discard(task)
        elif re.search(r"\.py:\d+: \w*Warning: ", text):
            warned.add(task)
        else:
            shown.append(line)
    return "\n".join([f"the last lines of {log}:", *(f"  | {line}" for line in shown[-count:] or ["(empty)"])])
