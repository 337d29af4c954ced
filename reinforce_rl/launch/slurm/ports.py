"""TCP ports for the tasks of a job, so that no two jobs on a node take the same.

Whoever wants a port locks a file of its number in a folder of the node, which all users share, and keeps the lock for
as long as it lives. A port whose file is locked is not looked at, though its program may not listen yet.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from reinforce_rl.errors import ReinforceError

# Of the node. TMPDIR is often a job's own, and /tmp a container's own (enroot); /dev is the node's in both.
LOCK_FOLDER = Path("/dev/shm/reinforce_rl-ports")
FIRST_PORT, PORTS = 20000, 10000  # below net.ipv4.ip_local_port_range, from which the kernel gives ports away


@contextlib.contextmanager
def claim_ports(count: int, key: str, folder: Path = LOCK_FOLDER) -> Iterator[list[int]]:
    """So many ports that nothing listens on and nobody else has claimed, for the time of the block.

    Args:
        count: of ports.
        key: where to begin to look follows from it, so that jobs seldom meet.
        folder: of the locks.

    Raises:
        ReinforceError: there are none left, or the folder cannot be used.
    """
    with contextlib.ExitStack() as locks:
        ports: list[int] = []
        start = zlib.crc32(key.encode()) % PORTS
        _make_shared(folder)
        for offset in range(PORTS):
            port = FIRST_PORT + (start + offset) % PORTS
            path = folder / str(port)
            lock = _lock(path)
            if lock is None:
                continue
            if _is_free(port):
                locks.callback(_unlock, path, lock)
                ports.append(port)
                if len(ports) == count:
                    yield ports
                    return
            else:
                _unlock(path, lock)
        raise ReinforceError(f"no {count} free ports from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} on this node")


def _make_shared(folder: Path) -> None:
    try:
        folder.mkdir()
        folder.chmod(0o1777)  # which mkdir's mode would be cut from by the umask
    except FileExistsError:
        pass
    except OSError as error:
        raise ReinforceError(f"cannot make {folder}, where ports are locked: {error.strerror}") from error


def _lock(path: Path) -> int | None:
    """An open file that is locked; None where another process has it, or it is no file of ours."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            # Without O_CREAT first: Linux refuses that for another user's file in a sticky folder.
            handle = os.open(path, flags)
        except FileNotFoundError:
            handle = os.open(path, flags | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.ELOOP):
            return None
        raise ReinforceError(f"cannot open {path}, by which a port is locked: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Else it was removed meanwhile by whoever had it, and a file that somebody makes now is another one.
        if os.stat(path).st_ino == os.fstat(handle).st_ino:
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


def _unlock(path: Path, handle: int) -> None:
    with contextlib.suppress(OSError):  # another user's, in a sticky folder
        path.unlink()
    os.close(handle)


def _is_free(port: int) -> bool:
    """Whether nothing listens there, on any address of this node."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)  # with SO_REUSEADDR two sockets may be bound, but only one listens
        except OSError:
            return False
    return True


def own_address(peers: Sequence[str]) -> str:
    """An IPv4 address of this node by which the others reach it.

    Args:
        peers: names of nodes of the job.

    Raises:
        ReinforceError: neither this node's name nor another's has one.
    """
    address = _address_of(socket.gethostname())
    if address is not None and not address.startswith("127."):
        return address
    # Debian gives a machine's own name the address 127.0.1.1, which says nothing to other machines: the address that
    # packets to them come from does. Where all nodes are one machine, each has an address of the loopback.
    for other in map(_address_of, peers):
        if other is not None and not other.startswith("127."):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
                probe.connect((other, 9))  # sends nothing
                return probe.getsockname()[0]
    if address is None:
        raise ReinforceError(f"the name of this node, {socket.gethostname()}, has no IPv4 address")
    return address


def _address_of(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None
