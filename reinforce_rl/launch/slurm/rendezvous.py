"""File rendezvous: the first task of a step publishes host and ports. A reward server's health.

`srun` numbers the tasks of a step, and does not say where they meet. Where `RENDEZVOUS_VARIABLE` names a file that all
nodes share, the first task writes its address there, and the tasks are ranks without another launcher.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from reinforce_rl.errors import ReinforceError
from reinforce_rl.utils.files import write_atomically
from reinforce_rl.utils.job_rank import JobRank
from reinforce_rl.utils.net import Address, claim_ports, own_address
from reinforce_rl.utils.untrusted_files import parse_json, read_published

POLL_SECONDS = 0.2
HEALTH_SECONDS = 5.0  # to connect, and then for the whole answer
RENDEZVOUS_VARIABLE = "REINFORCE_RENDEZVOUS_FILE"
STEP_SECONDS = 600.0  # for the step's first task, whose node may still fetch a container's image

_claims = contextlib.ExitStack()  # of ports, held until this process ends


@dataclass(frozen=True)
class Endpoint:
    """Where the first task of a step is."""

    host: str  # name of its node
    address: str  # as seen by other nodes
    rank_port: int  # for the ranks' rendezvous
    http_port: int = 0  # of the reward server; 0 for the actor
    step: str = ""  # which wrote it, as the file may be an earlier step's

    @property
    def http(self) -> Address:
        return Address(self.address, self.http_port)


def meet_ranks_of_step(environment: Mapping[str, str]) -> dict[str, str]:
    """Meet the other tasks of this step of Slurm; return the variables that torchrun would set.

    Empty where nothing asks for it: `RENDEZVOUS_VARIABLE` is not set, this is no task of a step, or a launcher has
    made it a rank. Raises ReinforceError if the first task does not come, or has no port or address.
    """
    text = environment.get(RENDEZVOUS_VARIABLE, "")
    place = JobRank.of_step(environment)
    if not text or place is None:
        return {}
    path = Path(text).absolute()
    # Slurm counts the steps of a job anew after each restart.
    parts = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    step = ".".join(environment.get(name, "0") for name in parts)
    if place.rank == 0:
        # Where the node's own name is a loopback's, as on Debian, the node of srun is a peer.
        launcher = environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
        (port,) = _claims.enter_context(claim_ports(1, text))
        first = Endpoint(
            socket.gethostname(), own_address([launcher] if launcher else []), port, step=step
        )
        try:
            _write(path, first)
        except OSError as error:
            raise ReinforceError(
                f"{RENDEZVOUS_VARIABLE} is {text}, which rank 0 cannot write ({error}); expected a "
                "file in a folder that all nodes of the step share",
                key="slurm.rendezvous.not_written",
            ) from error
    else:
        first = _wait_for(path, f"step {step}", STEP_SECONDS, lambda: False, step)
        assert first is not None  # nothing stops the wait
    variables = replace(place, host=first.address, port=str(first.rank_port)).variables()
    if "OMP_NUM_THREADS" not in environment:
        # ranks that each use all cores slow each other down
        variables["OMP_NUM_THREADS"] = environment.get("SLURM_CPUS_PER_TASK", "1")
    return variables


def publish(folder: Path, component: str, endpoint: Endpoint) -> None:
    _write(_path(folder, component), endpoint)


def read_endpoint(folder: Path, component: str) -> Endpoint | None:
    """Return the endpoint of `component`; None until it is published."""
    return _read(_path(folder, component))


def wait_for_endpoint(
    folder: Path, component: str, seconds: float, stopped: Callable[[], bool]
) -> Endpoint | None:
    """Wait for the endpoint of `component`; None once `stopped()` is true, ReinforceError after `seconds`."""
    return _wait_for(_path(folder, component), component, seconds, stopped)


def _write(path: Path, endpoint: Endpoint) -> None:
    write_atomically(path, json.dumps(asdict(endpoint)) + "\n")


def _read(path: Path) -> Endpoint | None:
    values = read_published(path)
    return None if values is None else Endpoint(**values)


def _wait_for(
    path: Path, whose: str, seconds: float, stopped: Callable[[], bool], step: str = ""
) -> Endpoint | None:
    deadline = time.monotonic() + seconds
    while not stopped():
        endpoint = _read(path)
        if endpoint is not None and endpoint.step == step:
            return endpoint
        if time.monotonic() > deadline:
            raise ReinforceError(
                f"the first task of {whose} did not write its address to {path} within "
                f"{seconds:.0f} s; look at its lines in the log, and check that all nodes share "
                "the folder",
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
