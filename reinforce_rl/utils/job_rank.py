"""This process's place among the ranks of its job, from the environment of torchrun or srun.

No other module reads these variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from socket import gethostname

from reinforce_rl.utils.net import LOOPBACK

RANKS_VARIABLE = "WORLD_SIZE"
# What Slurm sets for each task of a step: its number, that on its node, and the step's tasks and
# nodes.
_STEP_VARIABLES = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
)


@dataclass(frozen=True)
class JobRank:
    """A rank of a job. A plain `python` is the only rank of its job."""

    rank: int = 0
    size: int = 1  # ranks of the job
    local_rank: int = 0  # among the ranks on its machine
    local_size: int | None = 1  # ranks on its machine; None if unknown
    host: str | None = None  # of the ranks' rendezvous
    # A string: a cluster may set the variable to something else for a service of its own.
    port: str | None = None

    @classmethod
    def of_process(cls) -> JobRank:
        """Read the place of this process."""
        variables = os.environ
        started = ranks_started()
        local_size = variables.get("LOCAL_WORLD_SIZE", "1" if started is None else None)
        return cls(
            rank=int(variables.get("RANK", "0")),
            size=int(started or "1"),
            local_rank=int(variables.get("LOCAL_RANK", "0")),
            local_size=None if local_size is None else int(local_size),
            host=variables.get("MASTER_ADDR"),
            port=variables.get("MASTER_PORT"),
        )

    @classmethod
    def of_step(cls, environment: Mapping[str, str]) -> JobRank | None:
        """Return the place of a task in its step of Slurm, without where the ranks meet.

        None outside of a step, or if a launcher within the step has made this process a rank.
        """
        if RANKS_VARIABLE in environment or "RANK" in environment:
            return None
        if any(name not in environment for name in _STEP_VARIABLES):
            return None
        rank, local_rank, size, nodes = (int(environment[name]) for name in _STEP_VARIABLES)
        return cls(rank=rank, size=size, local_rank=local_rank, local_size=size // nodes)

    def variables(self) -> dict[str, str]:
        """Return the environment variables that `of_process` reads, as torchrun sets them."""
        values = {
            "RANK": self.rank,
            RANKS_VARIABLE: self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size,
            "MASTER_ADDR": self.host,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    @property
    def meeting(self) -> str:
        """HOST:PORT of the ranks' rendezvous."""
        return f"{self.host}:{self.port}"

    @property
    def host_of_first(self) -> str:
        """Host of rank 0; the loopback if all ranks share a machine."""
        return LOOPBACK if self.local_size == self.size else self.host or gethostname()


def is_first_rank() -> bool:
    """Return True on rank 0, which alone prints and writes what all ranks know."""
    return os.environ.get("RANK", "0") == "0"


def host_of_meeting() -> str | None:
    """Return the host at which the launcher's ranks meet, rank 0's; None in a plain `python`."""
    # Without ranks, MASTER_ADDR may be a service's of the cluster.
    return JobRank.of_process().host if ranks_started() is not None else None


def ranks_started() -> str | None:
    """Return the number of ranks that the launcher started; None in a plain `python`."""
    return os.environ.get(RANKS_VARIABLE)
