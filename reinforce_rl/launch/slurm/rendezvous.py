"""File rendezvous (the first task of a step publishes host and ports), claims of ports, a server's health check."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from reinforce_rl.errors import ReinforceError
from reinforce_rl.utils.files import write_atomically
from reinforce_rl.utils.net import EVERY_ADDRESS, Address, address_towards, is_loopback, listen
from reinforce_rl.utils.untrusted_files import parse_json, read_json

POLL_SECONDS = 0.2
HEALTH_SECONDS = 5.0  # to connect, and then for the whole answer
FIRST_PORT, PORTS = 20000, 10000  # below the ephemeral range (net.ipv4.ip_local_port_range)


@dataclass(frozen=True)
class Endpoint:
    """Where the first task of a step is."""

    host: str  # name of its node
    address: str  # as seen by other nodes
    rank_port: int  # for the ranks' rendezvous
    http_port: int = 0  # of the reward server; 0 for the actor

    @property
    def http(self) -> str:
        return str(Address(self.address, self.http_port))


def publish(folder: Path, component: str, endpoint: Endpoint) -> None:
    write_atomically(_path(folder, component), json.dumps(asdict(endpoint)) + "\n")


def read_endpoint(folder: Path, component: str) -> Endpoint | None:
    """Return the endpoint of `component`; None until it is published."""
    path = _path(folder, component)
    # List the folder: NFS may cache a missing file for half a minute, but revalidates an opened folder.
    if not folder.is_dir() or path.name not in os.listdir(folder):
        return None
    return Endpoint(**read_json(path, within=folder))


def wait_for_endpoint(folder: Path, component: str, seconds: float, stopped: Callable[[], bool]) -> Endpoint | None:
    """Wait for the endpoint of `component`; None once `stopped()` is true, ReinforceError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not stopped():
        endpoint = read_endpoint(folder, component)
        if endpoint is not None:
            return endpoint
        if time.monotonic() > deadline:
            raise ReinforceError(
                f"the first task of {component} did not write its address to "
                f"{_path(folder, component)} within {seconds:.0f} s; look at its lines in the log, "
                "and check that all nodes share the folder",
                key="slurm.rendezvous.no_address",
            )
        time.sleep(POLL_SECONDS)
    return None


def _path(folder: Path, component: str) -> Path:
    return folder / f"rendezvous-{component}.json"


@contextlib.contextmanager
def claim_ports(count: int, key: str) -> Iterator[list[int]]:
    """Hold `count` ports, neither in use nor claimed by others, during the block; ReinforceError if there are too few.

    Searches from the hash of `key`, so that jobs seldom collide. A claim is an abstract Unix socket: as a port, it is
    of a network and all its users, and ends with its process.
    """
    ports: list[int] = []
    start = zlib.crc32(key.encode()) % PORTS
    with contextlib.ExitStack() as claims:
        for offset in range(PORTS):
            port = FIRST_PORT + (start + offset) % PORTS
            with contextlib.suppress(OSError), contextlib.ExitStack() as claim:
                claim.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0reinforce_rl port {port}")
                listen(EVERY_ADDRESS, port).close()
                claims.push(claim.pop_all())
                ports.append(port)
            if len(ports) == count:
                yield ports
                return
    raise ReinforceError(
        f"this node has fewer than {count} free ports from {FIRST_PORT} to "
        f"{FIRST_PORT + PORTS - 1}; end what listens there, or use another node",
        key="slurm.rendezvous.no_free_port",
    )


def own_address(peers: Sequence[str]) -> str:
    """Return an address by which `peers`, other nodes of the job, reach this node; ReinforceError without any."""
    address = _address_of(socket.gethostname())
    if address is not None and not is_loopback(address):
        return address
    # Debian maps a machine's own name to 127.0.1.1, useless to other machines: take the source address of packets to
    # them. If all nodes are one machine, each has a loopback address.
    for other in map(_address_of, peers):
        if other is not None and not is_loopback(other):
            with contextlib.suppress(OSError):
                return address_towards(other)
    if address is None:
        raise ReinforceError(
            f"the name of this node, {socket.gethostname()}, has no address; expected one in DNS or in /etc/hosts",
            key="slurm.rendezvous.node_without_address",
        )
    return address


def _address_of(name: str) -> str | None:
    """Return the IPv4 address of a name; its IPv6 address if it has no other."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            for *_, address in socket.getaddrinfo(name, None, family, socket.SOCK_STREAM):
                host = str(address[0])
                if not ipaddress.ip_address(host.partition("%")[0]).is_link_local:
                    return host
    return None


def health_fault(server: Endpoint) -> str | None:
    """Query /health of a reward server; return why it cannot score, or None."""
    connection = http.client.HTTPConnection(server.address, server.http_port, timeout=HEALTH_SECONDS)
    deadline = threading.Timer(HEALTH_SECONDS, _hang_up, (connection,))  # HTTPConnection's timeout is for one read
    try:
        connection.connect()
        deadline.start()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        body = answer.read(1 << 16)
    except (OSError, http.client.HTTPException) as error:
        return f"{server.http} does not answer ({getattr(error, 'strerror', None) or repr(error)})"
    finally:
        deadline.cancel()
        connection.close()
    try:
        text = parse_json(body)["text"]
    except (ValueError, KeyError, TypeError):
        return f"{server.http} answers HTTP {answer.status}, and not as a reward server does"
    return None if answer.status == 200 else f"{server.http}: {text}"


def _hang_up(connection: http.client.HTTPConnection) -> None:
    with contextlib.suppress(OSError, AttributeError):  # it is closed already
        connection.sock.shutdown(socket.SHUT_RDWR)
