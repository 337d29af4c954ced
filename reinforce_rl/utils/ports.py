"""Checks and picks TCP ports of this machine."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import socket
import time
from pathlib import Path

from reinforce_rl.errors import ConfigError

PORT_WAIT_SECONDS = 3.0  # a server that was just killed frees its port within a moment
BACKLOG = 1024  # a whole cluster may connect at once


def open_port(host: str, port: int) -> socket.socket:
    """Return a listening socket; the kernel accepts connections from now on.

    Raises:
        ConfigError: cannot listen on the port; the text gives the reason and a remedy.
    """
    deadline = time.monotonic() + PORT_WAIT_SECONDS
    while True:
        try:
            family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, number)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(BACKLOG)
                return listener
            except BaseException:
                listener.close()
                raise
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            raise ConfigError([_port_fault(host, port, error)]) from error


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if the port cannot be listened on. Cheap, so run it before anything slow."""
    open_port(host, port).close()


def free_port(host: str) -> int:
    """Return a TCP port that nothing listens on now.

    It is below the kernel's ephemeral range: the server binds it only after loading its libraries, and until then any
    outgoing connection could take an ephemeral port.
    """
    candidates = range(10240, max(_first_outgoing_port(), 10241))
    for port in random.SystemRandom().sample(candidates, min(100, len(candidates))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def is_loopback(host: str) -> bool:
    """Return True if `host` resolves to loopback addresses only."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses)


def _first_outgoing_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32768


def _port_fault(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use by another program. Choose another with inference.port=N, here and for "
            f"the actor, or end that program (ss -ltnp 'sport = :{port}' names it)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} of {host} may not be used by this user; choose one above 1023 with inference.port=N"
    reason = (error.strerror or str(error)).lower()
    return f"cannot listen on {host}:{port} ({reason}); set inference.host to an address of this machine"
