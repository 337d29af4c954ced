"""Addresses of servers, and checks of this machine's TCP ports."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import random
import re
import socket
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from reinforce_rl.errors import ConfigError, Fault, ReinforceError

PORT_WAIT_SECONDS = 3.0  # a server that was just killed frees its port within a moment
BACKLOG = 1024  # a whole cluster may connect at once
# Range of ports that are claimed, below the ephemeral range (net.ipv4.ip_local_port_range).
FIRST_CLAIMED_PORT = 20000
CLAIMED_PORTS = 10000

EVERY_ADDRESS = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
LOOPBACK = "127.0.0.1"
ANYWHERE = "192.0.2.1"  # belongs to no machine (RFC 5737): packets take the default route
# Where this machine reaches a server of its own, by the wildcard address that it listens on.
LOOPBACKS = {"0.0.0.0": LOOPBACK, "::": "::1"}


@dataclass(frozen=True)
class Address:
    host: str  # name or address; IPv6 without brackets
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self}"

    @property
    def local(self) -> Address:
        """The address by which this machine reaches a server that listens here."""
        return Address(LOOPBACKS.get(self.host, self.host), self.port)

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse HOST:PORT, the inverse of `str`.

        Raises ValueError if it is none, or if the port is not within 1 to 65535.
        """
        try:
            parts = urlsplit(f"//{text}")
            host = checked_host(parts.hostname or "")
            port = parts.port
        except ValueError:
            host = None
            port = None
        if not host or not port or parts.netloc != text or "@" in text or text.split() != [text]:
            brackets = (
                ", and an IPv6 address in brackets, such as [::1]:5555"
                if text.count(":") > 1
                else ""
            )
            zone = ", without a zone (%)" if "%" in text else ""
            raise ValueError(f"{text!r} is not HOST:PORT with a port of 1 to 65535{brackets}{zone}")
        return cls(host, port)


def checked_host(text: str) -> str:
    """Return a host name, or an address in its usual form: `::1` for `[::1]` and `0:0:0:0:0:0:0:1`.

    Raises ValueError if it is neither, or has a port or a zone: `%eth0` has a meaning on one
    machine only.
    """
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not host or re.search(r"[\s/@%\[\]?#]", host):
        raise ValueError(f"{text!r} is neither a host name nor an address")
    if ":" not in host:
        return host
    return str(ipaddress.IPv6Address(host))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the first address of a host that this machine has.

    `::` accepts IPv4 too. Raises OSError.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, address) in enumerate(addresses, 1):
        with contextlib.ExitStack() as stack:
            try:
                listener = stack.enter_context(socket.socket(family, kind, protocol))
                # With SO_REUSEADDR two sockets can be bound, but only one can listen.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if host == "::":
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                listener.bind(address)
                listener.listen(BACKLOG)
            except OSError as error:
                # /etc/hosts may name ::1 for localhost on a machine without IPv6.
                is_missing = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
                if not is_missing or number == len(addresses):
                    raise
                continue
            stack.pop_all()  # the caller closes it
            return listener
    raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


def open_port(host: str, port: int) -> socket.socket:
    """Return a listening socket; the kernel accepts connections from now on.

    Raises ConfigError if the port is not available within `PORT_WAIT_SECONDS`.
    """
    deadline = time.monotonic() + PORT_WAIT_SECONDS
    while True:
        try:
            return listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise ConfigError([_port_fault(host, port, error)]) from error
            time.sleep(0.2)


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if the port cannot be listened on. Cheap; call it before slow work."""
    open_port(host, port).close()


def free_port(host: str) -> int:
    """Return a TCP port that nothing listens on now.

    It is below the kernel's ephemeral range. The server binds it only after it has loaded its
    libraries, and until then any outgoing connection could take an ephemeral port.
    """
    try:
        first_outgoing = int(
            Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0]
        )
    except (OSError, ValueError):
        first_outgoing = 32768
    candidates = range(10240, max(first_outgoing, 10241))
    reason = ""
    for port in [*random.SystemRandom().sample(candidates, min(100, len(candidates))), 0]:
        try:
            with listen(host, port) as probe:
                return probe.getsockname()[1]
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
    expected = "expected a name or an address of this machine"
    sentence = f"no TCP port of {host} is free ({reason}); {expected}"
    raise ConfigError([Fault(sentence, key="server.port.none_free")])


@contextlib.contextmanager
def claim_ports(count: int, key: str) -> Iterator[list[int]]:
    """Hold `count` ports, neither in use nor claimed by others, during the block.

    The search starts at the hash of `key`, so that jobs seldom collide. A claim is an abstract Unix
    socket: like a port, it belongs to a network namespace, is shared by all its users, and ends
    with its process. Raises ReinforceError: there are fewer free ports.
    """
    ports: list[int] = []
    start = zlib.crc32(key.encode()) % CLAIMED_PORTS
    with contextlib.ExitStack() as claims:
        for offset in range(CLAIMED_PORTS):
            port = FIRST_CLAIMED_PORT + (start + offset) % CLAIMED_PORTS
            with contextlib.suppress(OSError), contextlib.ExitStack() as claim:
                holder = claim.enter_context(socket.socket(socket.AF_UNIX))
                holder.bind(f"\0reinforce_rl port {port}")
                listen(EVERY_ADDRESS, port).close()
                claims.push(claim.pop_all())
                ports.append(port)
            if len(ports) == count:
                yield ports
                return
    raise ReinforceError(
        f"this node has fewer than {count} free ports from {FIRST_CLAIMED_PORT} to "
        f"{FIRST_CLAIMED_PORT + CLAIMED_PORTS - 1}; end what listens there, or use another node",
        key="slurm.rendezvous.no_free_port",
    )


def address_towards(host: str) -> str:
    """Return the address by which this machine reaches `host`. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]


def own_address(peers: Sequence[str] = (ANYWHERE,)) -> str:
    """Return an address by which `peers`, such as other nodes of the job, reach this node.

    By default that is any other machine. Raises ReinforceError: it has none.
    """
    name = socket.gethostname()
    address = _address_of(name)
    if address is not None and not is_loopback(address):
        return address
    # Debian maps a machine's own name to 127.0.1.1, which other machines cannot use. Take the
    # source address of packets to the peers. If all nodes are one machine, a loopback address
    # works.
    for other in map(_address_of, peers):
        if other is not None and not is_loopback(other):
            with contextlib.suppress(OSError):
                return address_towards(other)
    if address is None:
        raise ReinforceError(
            f"the name of this node, {name}, has no address; expected one in DNS or in /etc/hosts",
            key="slurm.rendezvous.node_without_address",
        )
    return address


def published_address(address: Address, meeting_host: str | None = None) -> Address:
    """Return where other machines reach a server that listens at `address`.

    `meeting_host` is where ranks on other machines reach this one, None if unknown. A machine may
    have several networks: this one is known to work, the default route's need not.
    """
    if address.host not in LOOPBACKS:
        return address
    if meeting_host is not None and not is_loopback(meeting_host):
        return Address(meeting_host, address.port)
    try:
        host = own_address()
    except ReinforceError:  # no other machine can reach this one
        host = address.local.host
    return Address(host, address.port)


def interface_of(host: str) -> str:
    """Return the name of this machine's network interface with the address of `host`.

    Raises OSError: none has it, or the name has no address.
    """
    import psutil  # only this function needs it

    addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    if any(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        # All of 127.0.0.0/8 belongs to the loopback interface, which lists one address only.
        addresses.add(LOOPBACK)
    for interface, entries in psutil.net_if_addrs().items():
        if any(entry.address in addresses for entry in entries):
            return interface
    raise OSError(f"no network interface of this machine has the address of {host}")


def _address_of(name: str) -> str | None:
    """Return the IPv4 address of a name, else its IPv6 address; None if it has neither."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            for *_, address in socket.getaddrinfo(name, None, family, socket.SOCK_STREAM):
                host = str(address[0])
                if not ipaddress.ip_address(host.partition("%")[0]).is_link_local:
                    return host
    return None


def is_loopback(host: str) -> bool:
    """Return True if `host` resolves to loopback addresses only."""
    try:
        addresses = {
            str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        }
    except OSError:
        return False
    return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses)


def names_this_machine(host: str) -> bool:
    """Return True for an address of this machine, for `localhost` and for its own name.

    No name server is asked.
    """
    name = host.lower().rstrip(".")
    own_name = socket.gethostname().lower()
    if name in ("localhost", own_name, own_name.partition(".")[0]) or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(LOOPBACKS.get(name, name))
        # A datagram to an address of this machine leaves from that address.
        return address.is_loopback or address_towards(str(address)) == str(address)
    except (OSError, ValueError):
        return False


def _port_fault(host: str, port: int, error: OSError) -> Fault:
    if error.errno == errno.EADDRINUSE:
        return Fault(
            f"port {port} of {host} is in use by another program. Choose another with "
            "inference.port=N, here and for the actor, or end that program "
            f"(ss -ltnp 'sport = :{port}' names it)",
            key="server.port.in_use",
        )
    if error.errno == errno.EACCES:
        advice = "choose one above 1023 with inference.port=N"
        return Fault(
            f"port {port} of {host} may not be used by this user; {advice}",
            key="server.port.not_permitted",
        )
    reason = (error.strerror or str(error)).lower()
    advice = "set inference.host to an address of this machine"
    return Fault(
        f"cannot listen on {Address(host, port)} ({reason}); {advice}",
        key="server.port.not_listening",
    )
