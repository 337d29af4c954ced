"""This process's place among the ranks of its job, which torchrun or srun gives it in the environment.

Nothing else of the package reads these variables. `launch/slurm/task.py` sets them in torchrun's place.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from socket import gethostname

from reinforce_rl.utils.net import LOOPBACK

RANKS_VARIABLE = "WORLD_SIZE"


@dataclass(frozen=True)
class JobRank:
    """A rank of a job. A plain `python` is the only one of its job."""

    rank: int
    size: int  # ranks of the job
    local_rank: int  # among those on its machine
    meeting: str  # HOST:PORT where the ranks look for each other
    host_of_first: str  # where rank 0 is reached; the loopback if all ranks share a machine

    @classmethod
    def of_process(cls) -> JobRank:
        """Return the place of this process."""
        variables = os.environ
        shares_machine = variables.get("LOCAL_WORLD_SIZE") == variables.get(RANKS_VARIABLE)
        return cls(
            rank=int(variables.get("RANK", "0")),
            size=int(variables.get(RANKS_VARIABLE, "1")),
            local_rank=int(variables.get("LOCAL_RANK", "0")),
            meeting=f"{variables.get('MASTER_ADDR')}:{variables.get('MASTER_PORT')}",
            host_of_first=LOOPBACK if shares_machine else variables.get("MASTER_ADDR", gethostname()),
        )


def is_first_rank() -> bool:
    """Return True on rank 0, which alone speaks and writes what all ranks know."""
    return os.environ.get("RANK", "0") == "0"


def ranks_started() -> str | None:
    """Return the number of ranks that a launcher says it has started; None in a plain `python`."""
    return os.environ.get(RANKS_VARIABLE)
