"""`status.json` in a run's folder: the run's state, for launchers that do not see its exit code."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from reinforce_rl.errors import EXIT_ALERT, EXIT_FINISHED, EXIT_STOPPED, DataError
from reinforce_rl.utils.files import write_atomically
from reinforce_rl.utils.untrusted_files import UnreadableFileError, parse_json, read_bounded

EXIT_INTERRUPTED = 130  # a shell's exit code after Ctrl-C
STATUS_FILE = "status.json"
_MAX_BYTES = 1 << 20  # of status.json
RESULTS_FILE = "results.json"  # of `eval`, beside the folders of its models
# Of a reader only: lost, its process ended without a word; evaluation (of `eval`) and unknown, no
# status.json.
State = Literal[
    "running", "finished", "stopped", "interrupted", "failed", "lost", "evaluation", "unknown"
]
_MAX_NUMBER = 1 << 53  # JSON's numbers in a browser are exact up to here
_MAX_PID = (1 << 31) - 1
_STATES: dict[int, State] = {
    EXIT_FINISHED: "finished",
    EXIT_STOPPED: "stopped",
    EXIT_ALERT: "stopped",
    EXIT_INTERRUPTED: "interrupted",
}


@dataclass(frozen=True)
class Status:
    # finished: all steps done; stopped: saved, the same command resumes it
    state: State = "running"
    reason: str = ""  # why it was stopped or failed, or what it waits for
    step: int = 0  # last complete one
    max_steps: int = 0  # 0 until known
    # None while the run is active; then the code of the first rank to fail, if it reported one
    exit_code: int | None = None
    save_seconds: float | None = None  # of the last save, also of the run it resumes; None before
    alerts: dict[str, str] = field(default_factory=dict)  # what the last step has, by rule
    time: float = field(default_factory=time.time)  # unix seconds of this entry
    pid: int = field(default_factory=os.getpid)  # of the writer
    host: str = field(default_factory=socket.gethostname)


class StatusFile:
    """Keeps `status.json` up to date; a rank with `enabled` False writes only if rank 0 is lost."""

    def __init__(self, folder: Path, *, enabled: bool):
        self.path = folder / STATUS_FILE
        self.enabled = enabled
        self._status = Status()
        self._before: bytes | None = None  # what the file held before `begin`

    @property
    def save_seconds(self) -> float | None:
        return self._status.save_seconds

    def begin(self) -> None:
        """Write the start of the run, with the progress of an earlier one in this folder."""
        with contextlib.suppress(OSError):
            self._before = read_bounded(self.path, max_bytes=_MAX_BYTES, within=self.path.parent)
        earlier = (read_status(self.path.parent) if self.enabled else None) or Status()
        self._write(
            Status(
                step=earlier.step, max_steps=earlier.max_steps, save_seconds=earlier.save_seconds
            )
        )

    def saved(self, seconds: float) -> None:
        self._write(replace(self._status, save_seconds=seconds))

    def progress(self, step: int, max_steps: int, alerts: dict[str, str] | None = None) -> None:
        self._write(replace(self._status, step=step, max_steps=max_steps, alerts=alerts or {}))

    def waiting(self, reason: str) -> None:
        """Record what an active run waits for; empty for nothing."""
        self._write(replace(self._status, reason=reason))

    def take_over_reporting(self) -> None:
        """Write from now on, since rank 0 is lost."""
        self._status = read_status(self.path.parent) or self._status
        self.enabled = True

    def end(self, exit_code: int, reason: str = "") -> None:
        state = _STATES.get(exit_code, "failed")
        who = {"pid": os.getpid(), "host": socket.gethostname()}
        status = replace(self._status, state=state, reason=reason, exit_code=exit_code, **who)
        try:
            self._write(status)
        except OSError:
            with contextlib.suppress(OSError):  # the error that ended the run says so
                self._overwrite(self._status)

    def _overwrite(self, status: Status) -> None:
        """Write into the blocks that the file has, as a full disk has no others; cut the reason to
        fit.
        """
        with self.path.open("r+b", buffering=0) as file:
            about = os.fstat(file.fileno())
            room = max(about.st_size, about.st_blocks * 512)
            if len(_as_json(status)) > room:
                status = replace(status, alerts={})
            while len(_as_json(status)) > room and status.reason:
                status = replace(status, reason=status.reason[: len(status.reason) // 2])
            file.write(_as_json(status))
            file.truncate()

    def refuse(self, exit_code: int, reason: str) -> None:
        """Leave an earlier run's status as it was, since this start was refused; of a new run say
        so.
        """
        if self._before is None or not self.enabled:
            self.end(exit_code, reason)
        else:
            with contextlib.suppress(OSError):
                write_atomically(self.path, self._before)

    def _write(self, status: Status) -> None:
        self._status = replace(status, time=time.time())
        if self.enabled:
            write_atomically(self.path, _as_json(self._status))


def _as_json(status: Status) -> bytes:
    return json.dumps(asdict(status), indent=1).encode() + b"\n"


class NoStatus(StatusFile):
    """Status of a program that does not write the run's status file."""

    def __init__(self, folder: Path):
        super().__init__(folder, enabled=False)

    def _write(self, status: Status) -> None:
        self._status = status


def read_status(folder: str | Path) -> Status | None:
    """Return the status of the run in a folder; None if there is none, or none that can be read."""
    with contextlib.suppress(OSError, DataError):
        return checked_status(Path(folder) / STATUS_FILE, within=Path(folder))
    return None


def checked_status(path: Path, *, within: Path | None = None) -> Status:
    """Read a status.json; its links may not leave the folder `within`, if it is given.

    Raises:
        OSError: it is absent, no regular file or too large.
        DataError: it is not a status that `StatusFile` writes.
    """
    data = read_bounded(path, max_bytes=_MAX_BYTES, within=within)
    advice = "restore or remove the file"
    try:
        values = parse_json(data)
        if not isinstance(values, dict):
            raise ValueError(f"found a JSON {type(values).__name__}, expected an object")
        for key, value in values.items():
            if (fault := _fault(key, value)) is not None:
                raise ValueError(fault)
    except ValueError as error:
        sentence = f"{path}: {str(error)[:300]}; {advice}"
        raise DataError(sentence, key="status.file.invalid") from error
    return Status(**values)


def _fault(key: str, value: Any) -> str | None:
    """Say what is wrong with a value of a status, if it is."""
    is_integer = type(value) is int
    is_number = type(value) in (int, float) and abs(value) < _MAX_NUMBER  # not NaN either
    rules: dict[str, tuple[bool, str]] = {
        "state": (
            isinstance(value, str) and value in get_args(State),
            f"one of {', '.join(get_args(State))}",
        ),
        "reason": (isinstance(value, str), "a text"),
        "step": (is_integer and 0 <= value < _MAX_NUMBER, "a number of steps"),
        "max_steps": (is_integer and 0 <= value < _MAX_NUMBER, "a number of steps"),
        "exit_code": (value is None or (is_integer and is_number), "an exit code or null"),
        "save_seconds": (value is None or is_number, "seconds or null"),
        "alerts": (
            isinstance(value, dict) and all(isinstance(text, str) for text in value.values()),
            "texts by rule",
        ),
        "time": (is_number, "unix seconds"),
        "pid": (is_integer and 0 < value <= _MAX_PID, f"1 to {_MAX_PID}"),
        "host": (isinstance(value, str), "a text"),
    }
    if key not in rules:
        return f"unknown key {key[:40]!a}; another version may have written it"
    is_right, expected = rules[key]
    shown = (
        f"a JSON {type(value).__name__}" if isinstance(value, dict | list) else ascii(value)[:40]
    )
    return None if is_right else f"found {key}={shown}, expected {expected}"


def run_status(folder: str | Path, *, within: Path | None = None) -> Status:
    """Return the status of the run in a folder: "lost" if its writer has gone from this machine.

    If its status.json cannot be read, the state is unknown, and the reason says why.
    """
    path = Path(folder) / STATUS_FILE
    try:
        status = checked_status(path, within=within)
    except FileNotFoundError:
        is_evaluation = (path.parent.parent / RESULTS_FILE).is_file()
        status = Status("evaluation" if is_evaluation else "unknown", time=math.nan)
    except (OSError, DataError) as error:
        status = Status("unknown", str(error), time=math.nan)
    return replace(status, state="lost") if is_alive(status) is False else status


def saved_step(folder: Path) -> int:
    """Return the step of a run's newest checkpoint; 0 without one."""
    latest = folder / "checkpoints" / "latest"
    name = ""
    with contextlib.suppress(FileNotFoundError, UnreadableFileError):
        name = (
            read_bounded(latest, max_bytes=_MAX_BYTES, within=folder)
            .decode("utf-8", "replace")
            .strip()
        )
    return int(name[5:]) if re.fullmatch(r"step_\d+", name) else 0


def is_alive(status: Status) -> bool | None:
    """Return whether the writer of a "running" status still runs; None for other states and other
    machines.
    """
    import psutil  # not on the batch host of a Slurm job, which reads the status too

    if (status.state, status.host) != ("running", socket.gethostname()):
        return None
    with contextlib.suppress(psutil.Error, TypeError):  # a pid of an odd type
        process = psutil.Process(status.pid)
        return process.create_time() < status.time and process.status() != psutil.STATUS_ZOMBIE
    return False
