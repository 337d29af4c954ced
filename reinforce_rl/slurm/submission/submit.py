"""The program behind `slurm/submit.py`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from reinforce_rl.errors import EXIT_ERROR, EXIT_FINISHED, ConfigError
from reinforce_rl.preflight.run import wide_console
from reinforce_rl.slurm.submission import run_state
from reinforce_rl.slurm.submission.cluster import SINFO, Fit, check_totals, parse_sinfo
from reinforce_rl.slurm.submission.commands import (
    SUBMIT_SECONDS,
    SlurmError,
    expand_hosts,
    has_slurm,
    job_environment,
    run,
)
from reinforce_rl.slurm.submission.options import parse_options
from reinforce_rl.slurm.submission.plan import JobPlan
from reinforce_rl.slurm.submission.report import print_job, print_notes
from reinforce_rl.slurm.submission.request import Request, make_request
from reinforce_rl.status import read_status

REPOSITORY = Path(__file__).resolve().parents[3]


def main(argv: Sequence[str], environment: Mapping[str, str], console: Console | None = None) -> int:
    """Plan, check, print and submit.

    Args:
        argv: [options] ACTOR_OVERRIDE... [-- SERVER_OVERRIDE...]
        environment: of this process.
        console: where to; None for the terminal.

    Returns:
        the exit code: 0 where the job was submitted, or would be, or the run has finished; else 1.
    """
    console = console or wide_console()
    options = parse_options(argv, environment)
    request = make_request(options, environment, REPOSITORY, console)
    faults, unchecked = list(request.faults), []
    if not has_slurm():
        unchecked.append("sbatch is not on the PATH of this machine")
        fit = None
    ...
    return EXIT_FINISHED
