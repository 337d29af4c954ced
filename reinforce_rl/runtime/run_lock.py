"""Lock a run's folder, so that no second run writes into it, on this machine or another.

The lock is a POSIX record lock (fcntl(2)). NFS, Lustre and GPFS keep it for all hosts, and it ends
with its process in every case, so a killed run leaves no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.runtime.status import is_alive, read_status
from reinforce_rl.utils.untrusted_files import leads_out

LOCK_FILE = "run.lock"
# A reader of the file could take a shared lock, and so prevent the start of the run.
_OWNER_ONLY = 0o600
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
LEASE_SECONDS = 100.0  # NFS servers release a lock 90 s after its host's last sign of life
POLL_SECONDS = 1.0
_SHOWN = 100  # characters of a value of the status file in a message
_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder during the block.

    Raises ConfigError, with the process and its host, if another process holds it.
    """
    _refuse_by_status(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_links(folder)
    handle = _open(folder, os.O_CREAT)
    try:
        _acquire(handle, folder)
        yield
    finally:
        os.close(handle)  # ends the lock


def refuse_second_run(folder: Path) -> None:
    """Raise ConfigError if a folder has an active run; creates no file."""
    _refuse_by_status(folder)
    with contextlib.suppress(FileNotFoundError):
        handle = _open(folder)
        try:
            _acquire(handle, folder)
        finally:
            os.close(handle)


def _refuse_links(folder: Path) -> None:
    """Raise ConfigError for links out of the run's folder: a run deletes newer files there."""
    paths = list(folder.iterdir())
    checkpoints = folder / "checkpoints"
    if not leads_out(checkpoints, folder):
        paths += checkpoints.glob("*")
    faults = [
        Fault(
            f"{path} is a link to {path.resolve()}, outside of the run's folder; remove the link",
            key="run.link.leads_out",
        )
        for path in sorted(paths)
        if path.is_dir() and leads_out(path, folder)
    ]
    if faults:
        raise ConfigError(faults)


def _open(folder: Path, creation: int = 0) -> int:
    """Open the lock's file; refuse links, which may lead to any file, and pipes, which block."""
    path = folder / LOCK_FILE
    try:
        handle = os.open(path, _FLAGS | creation, _OWNER_ONLY)
    except PermissionError as error:
        raise ConfigError([_not_permitted(path, str(error.strerror))]) from error
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise ConfigError([_no_regular_file(path)]) from error
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise ConfigError([_no_regular_file(path)])
    if stat.S_IMODE(mode) != _OWNER_ONLY:
        # Some mounts fix the permissions themselves.
        with contextlib.suppress(OSError):
            os.fchmod(handle, _OWNER_ONLY)
    return handle


def _no_regular_file(path: Path) -> Fault:
    return Fault(f"{path} is not a regular file; remove it", key="run.lock.no_regular_file")


def _not_permitted(path: Path, reason: str) -> Fault:
    advice = "choose another folder (exp_manager.explicit_log_dir)"
    if not os.path.lexists(path):
        return Fault(
            f"{path} cannot be made ({reason}): you may not write in its folder; {advice}, or have "
            "its owner let you write there",
            key="run.folder.not_writable",
        )
    return Fault(
        f"{path} cannot be opened ({reason}), as another user's run made it; {advice}. Or remove "
        "the file once that run has ended; anyone who may write to its folder can",
        key="run.lock.of_another_user",
    )


def _acquire(handle: int, folder: Path) -> None:
    """Take the lock.

    Waits for a lock of another host: a file server notices late that a host is down.
    """
    deadline = time.monotonic() + LEASE_SECONDS
    has_printed = False
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in _HELD_BY_ANOTHER:
                # Some file systems have no locks. The status still reveals a run on this machine.
                logger.warning("event=no_run_lock folder=%s error=%s", folder, error)
                return
        host, process = _owner(folder)
        if host == socket.gethostname() or time.monotonic() > deadline:
            where = "this machine" if host == socket.gethostname() else host
            raise ConfigError([_in_use(folder, f"process {process} of {where}")])
        if not has_printed:
            has_printed = True
            who = f"process {process} of {host}"
            message = (
                f"waiting up to {LEASE_SECONDS:.0f} s for {who}, which works in {folder} or has "
                "died with its host"
            )
            print(message, file=sys.stderr, flush=True)
        time.sleep(POLL_SECONDS)


def _owner(folder: Path) -> tuple[str, str]:
    """Return host and process from the run's status; the lock's file is empty."""
    status = read_status(folder)
    if status is None or status.state != "running":
        return "another machine", "of an unknown number"
    return str(status.host)[:_SHOWN], str(status.pid)[:_SHOWN]


def _refuse_by_status(folder: Path) -> None:
    status = read_status(folder)
    if status is not None and status.pid != os.getpid() and is_alive(status):
        raise ConfigError([_in_use(folder, f"process {status.pid} of this machine")])


def _in_use(folder: Path, owner: str) -> Fault:
    return Fault(
        f"{folder} is used by a run that is still active ({owner}). Wait until it ends, stop it, "
        "or choose another folder (exp_manager.explicit_log_dir)",
        key="run.folder.in_use",
    )
