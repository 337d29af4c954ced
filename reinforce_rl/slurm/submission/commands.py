"""Slurm's own commands, each with a deadline and an error that shows what they said."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from reinforce_rl.errors import ReinforceError

ASK_SECONDS = 60.0
SUBMIT_SECONDS = 120.0
# Of an allocation that this process may be part of: a job that inherits them takes them for its own.
KEPT_SLURM_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")


class SlurmError(ReinforceError):
    """A command of Slurm failed or did not answer. The text has the command and what it said."""


def has_slurm() -> bool:
    """Whether jobs can be submitted from this machine."""
    return shutil.which("sbatch") is not None


def run(command: Sequence[str], seconds: float = ASK_SECONDS, environment: Mapping[str, str] | None = None) -> str:
    """The standard output of a command that succeeds.

    Args:
        command: with its arguments.
        seconds: that it may take.
        environment: of the command; None: as this process's.

    Raises:
        SlurmError: it is not there, failed or took too long.
    """
    line = shlex.join(command)
    try:
        done = subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=seconds,
            env=None if environment is None else dict(environment),
        )
    except FileNotFoundError as error:
        raise SlurmError(f"{command[0]} is not on the PATH; expected Slurm's client commands on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(
            f"no answer within {seconds:.0f} s of `{line}`; is the Slurm controller up (scontrol ping)?"
        ) from error
    if done.returncode:
        said = " ".join((done.stderr.strip() or done.stdout.strip() or "nothing").split())
        raise SlurmError(f"`{line}` ended with code {done.returncode} and said: {said}")
    return done.stdout


def job_environment(environment: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """What sbatch hands to the job: this process's environment and the variables that set the job up.

    Args:
        environment: of this process.
        variables: of the job.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(("SLURM_", "PMI_", "PMIX_")) or name in KEPT_SLURM_VARIABLES
    }
    return {**kept, **variables}


def expand_hosts(hosts: str) -> frozenset[str]:
    """The names of a list such as node[1-3,7].

    Raises:
        SlurmError: scontrol cannot read it.
    """
    return frozenset(run(["scontrol", "show", "hostnames", hosts]).split())
