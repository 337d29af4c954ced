"""Tasks of a step of Slurm meet as ranks by a file.

`srun` numbers the tasks of a step, and does not say where they meet. Where `RENDEZVOUS_VARIABLE`
names a file that all nodes share, the first task writes its address there, and the tasks are ranks
without another launcher.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from reinforce_rl.errors import ReinforceError
from reinforce_rl.utils.files import write_atomically
from reinforce_rl.utils.job_rank import JobRank
from reinforce_rl.utils.net import claim_ports, own_address
from reinforce_rl.utils.untrusted_files import read_published

POLL_SECONDS = 0.2
RENDEZVOUS_VARIABLE = "REINFORCE_RENDEZVOUS_FILE"
STEP_SECONDS = 600.0  # for the step's first task, whose node may still fetch a container's image

_claims = contextlib.ExitStack()  # of ports, held until this process ends


@dataclass(frozen=True)
class Endpoint:
    """Where the first task of a step is."""

    address: str  # as seen by other nodes
    port: int  # for the ranks' rendezvous
    step: str  # which wrote it, as the file may be an earlier step's


def meet_ranks_of_step(environment: Mapping[str, str]) -> dict[str, str]:
    """Meet the other tasks of this step of Slurm; return the variables that torchrun would set.

    Empty where nothing asks for it: `RENDEZVOUS_VARIABLE` is not set, this is no task of a step, or
    a launcher has made it a rank. Raises ReinforceError if the first task does not come, or has no
    port or address.
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
        first = Endpoint(own_address([launcher] if launcher else []), port, step=step)
        try:
            _write(path, first)
        except OSError as error:
            raise ReinforceError(
                f"{RENDEZVOUS_VARIABLE} is {text}, which rank 0 cannot write ({error}); expected a "
                "file in a folder that all nodes of the step share",
                key="slurm.rendezvous.not_written",
            ) from error
    else:
        first = _wait_for(path, step)
    variables = replace(place, host=first.address, port=str(first.port)).variables()
    if "OMP_NUM_THREADS" not in environment:
        # ranks that each use all cores slow each other down
        variables["OMP_NUM_THREADS"] = environment.get("SLURM_CPUS_PER_TASK", "1")
    return variables


def _write(path: Path, endpoint: Endpoint) -> None:
    write_atomically(path, json.dumps(asdict(endpoint)) + "\n")


def _read(path: Path) -> Endpoint | None:
    values = read_published(path)
    return None if values is None else Endpoint(**values)


def _wait_for(path: Path, step: str) -> Endpoint:
    deadline = time.monotonic() + STEP_SECONDS
    while True:
        endpoint = _read(path)
        if endpoint is not None and endpoint.step == step:
            return endpoint
        if time.monotonic() > deadline:
            raise ReinforceError(
                f"the first task of step {step} did not write its address to {path} within "
                f"{STEP_SECONDS:.0f} s; look at its lines in the log, and check that all nodes "
                "share the folder",
                key="slurm.rendezvous.no_address",
            )
        time.sleep(POLL_SECONDS)
