"""Addresses of servers, and checks of this machine's TCP ports."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from reinforce_rl.errors import ConfigError

PORT_WAIT_SECONDS = 3.0  # a server that was just killed frees its port within a moment
BACKLOG = 1024  # a whole cluster may connect at once


@dataclass(frozen=True)
class Address:
    host: str  # name or address; IPv6 without brackets
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse HOST:PORT, the inverse of `str`; raise ValueError if it is none, with a port of 1 to 65535."""
        try:
            parts = urlsplit(f"//{text}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or not port or parts.netloc != text or "@" in text or text.split() != [text]:
            raise ValueError(f"{text!r} is no HOST:PORT with a port of 1 to 65535")
        return cls(host, port)


def open_port(host: str, port: int) -> socket.socket:
    """Return a listening socket, whose connections the kernel accepts from now on; ConfigError if it cannot be had."""
    deadline = time.monotonic() + PORT_WAIT_SECONDS
    while True:
        try:
            family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with contextlib.ExitStack() as stack:
                listener = stack.enter_context(socket.socket(family, kind, number))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(BACKLOG)
                stack.pop_all()  # the caller closes it
                return listener
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise ConfigError([_port_fault(host, port, error)]) from error
            time.sleep(0.2)


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if the port cannot be listened on. Cheap, so run it before anything slow."""
    open_port(host, port).close()


def free_port(host: str) -> int:
    """Return a TCP port that nothing listens on now.

    It is below the kernel's ephemeral range: the server binds it only after loading its libraries, and until then any
    outgoing connection could take an ephemeral port.
    """
    try:
        first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first_outgoing = 32768
    candidates = range(10240, max(first_outgoing, 10241))
    for port in [*random.SystemRandom().sample(candidates, min(100, len(candidates))), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return probe.getsockname()[1]
    raise ConfigError([f"no TCP port of {host} is free"])


def is_loopback(host: str) -> bool:
    """Return True if `host` resolves to loopback addresses only."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses)


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
