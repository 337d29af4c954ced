"""Run many commands in forks of a process that has imported the package, with deadlines.

Reads {marker, requests} as JSON from stdin; a request is {name, arguments, folder, deadline}.
Prints the list of answers, {name, code, output, seconds, peak_mib, marker}.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from helpers import warm


def run(request: dict[str, Any], marker: Path) -> dict[str, Any]:
    marker.write_text("")
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            _become(request, output.fileno())
        status, usage = _wait(child, start + request["deadline"])
        _end_group(child)
        output.seek(0)
        text = output.read().decode(errors="backslashreplace")
    return {
        "name": request["name"],
        "code": None if status is None else os.waitstatus_to_exitcode(status),
        "output": text,
        "seconds": time.monotonic() - start,
        "peak_mib": usage.ru_maxrss / 1024,
        "marker": marker.read_text(),
    }


def _become(request: dict[str, Any], output: int) -> NoReturn:
    """Run the command in this process; does not return."""
    os.setsid()
    for target in (1, 2):
        os.dup2(output, target)
    with open(os.devnull) as empty:
        os.dup2(empty.fileno(), 0)
    os.chdir(request["folder"])
    warm.be_command(request["arguments"])


def _wait(child: int, deadline: float) -> tuple[int | None, Any]:
    """Return exit status and resource usage; the status of a child killed late is None."""
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return status, usage
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return None, os.wait4(child, 0)[2]
        time.sleep(0.02)


def _end_group(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def main() -> None:
    asked = json.load(sys.stdin)
    warm.import_all()
    assert threading.active_count() == 1
    answers = [run(request, Path(asked["marker"])) for request in asked["requests"]]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
