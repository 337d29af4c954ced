"""File rendezvous: the first task of a step publishes host and ports. A reward server's health."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from reinforce_rl.errors import ReinforceError
from reinforce_rl.utils.files import write_atomically
from reinforce_rl.utils.net import Address
from reinforce_rl.utils.untrusted_files import parse_json, read_published

POLL_SECONDS = 0.2
HEALTH_SECONDS = 5.0  # to connect, and then for the whole answer


@dataclass(frozen=True)
class Endpoint:
    """Where the first task of a step is."""

    host: str  # name of its node
    address: str  # as seen by other nodes
    rank_port: int  # for the ranks' rendezvous
    http_port: int = 0  # of the reward server; 0 for the actor

    @property
    def http(self) -> Address:
        return Address(self.address, self.http_port)


def publish(folder: Path, component: str, endpoint: Endpoint) -> None:
    write_atomically(_path(folder, component), json.dumps(asdict(endpoint)) + "\n")


def read_endpoint(folder: Path, component: str) -> Endpoint | None:
    """Return the endpoint of `component`; None until it is published."""
    values = read_published(_path(folder, component))
    return None if values is None else Endpoint(**values)


def wait_for_endpoint(
    folder: Path, component: str, seconds: float, stopped: Callable[[], bool]
) -> Endpoint | None:
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


def health_fault(server: Address) -> str | None:
    """Query /health of a reward server; return why it cannot score, or None."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=HEALTH_SECONDS)
    # HTTPConnection's timeout is for one read
    deadline = threading.Timer(HEALTH_SECONDS, _hang_up, (connection,))
    try:
        connection.connect()
        deadline.start()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        body = answer.read(1 << 16)
    except (OSError, http.client.HTTPException) as error:
        return f"{server} does not answer ({getattr(error, 'strerror', None) or repr(error)})"
    finally:
        deadline.cancel()
        connection.close()
    try:
        text = parse_json(body)["text"]
    except (ValueError, KeyError, TypeError):
        return f"{server} answers HTTP {answer.status}, and not as a reward server does"
    return None if answer.status == 200 else f"{server}: {text}"


def _hang_up(connection: http.client.HTTPConnection) -> None:
    with contextlib.suppress(OSError, AttributeError):  # it is closed already
        connection.sock.shutdown(socket.SHUT_RDWR)
