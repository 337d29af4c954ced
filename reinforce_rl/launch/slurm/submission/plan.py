"""What is handed to Slurm: two components, their nodes and tasks, and the command line. Pure: asks nobody."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from reinforce_rl.launch.slurm.settings import SEPARATOR, TORCHRUN
from reinforce_rl.launch.slurm.submission.options import ComponentOptions
from reinforce_rl.launch.slurm.submission.values import Gpus

DEFAULT_LEAD, LEAST_LEAD = 300, 120
# Slurm sends the signal at some moment of the minute before the lead begins, and the job needs some to end.
LEAD_MARGIN = 60
MOST_LEAD = 65535  # Slurm keeps it in 16 bits


@dataclass(frozen=True)
class Component:
    """One component of the job.

    Attributes:
        name: for people.
        job_name: in Slurm; of each component another, since a dependency by name would wait for itself.
        nodes: how many.
        ranks_per_node: of the program.
        tasks_per_node: that Slurm starts: the ranks, or one that starts them.
        cpus_per_task: None: as Slurm does.
        gpus: of each node.
        megabytes: of each node; None where it is not said, 0 for all.
        options: which nodes.
    """

    name: str
    job_name: str
    nodes: int
    ranks_per_node: int
    tasks_per_node: int
    cpus_per_task: int | None = None
    gpus: Gpus | None = None
    megabytes: int | None = None
    options: ComponentOptions = field(default_factory=ComponentOptions)

    @property
    def cpus_per_node(self) -> int:
        """That it needs."""
        return self.tasks_per_node * (self.cpus_per_task or 1)

    def arguments(self) -> list[str]:
        """Of sbatch, besides those of the whole job."""
        own = self.options
        given = {
            "partition": own.partition,
            "account": own.account,
            "qos": own.qos,
            "constraint": own.constraint,
            "nodelist": own.nodelist,
            "exclude": own.exclude,
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks_per_node,
            "cpus-per-task": self.cpus_per_task,
            "gpus-per-node": self.gpus,
            "mem": own.mem,
        }
        options = [f"--{name}={value}" for name, value in given.items() if value is not None]
        return [f"--job-name={self.job_name}", *options, *own.sbatch_args]


@dataclass(frozen=True)
class JobPlan:
    """The whole job.

    Attributes:
        server, actor: the components.
        time: its limit, as written.
        seconds: the same; None where there is no limit.
        lead: seconds before the limit at which the run is told to save.
        chain: jobs that follow each other.
        run_dir: absolute.
        batch_file: absolute.
        actor_args, server_args: Hydra overrides.
        variables: that set the job up.
    """

    server: Component
    actor: Component
    time: str
    seconds: int | None
    lead: int
    chain: int
    run_dir: Path
    batch_file: Path
    actor_args: tuple[str, ...]
    server_args: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]

    @property
    def folder(self) -> Path:
        """Of the batch script's output, which must be there before the job starts."""
        return self.run_dir / "slurm"

    def command(self, *, after: str | None = None, test_only: bool = False) -> list[str]:
        """sbatch with its arguments.

        Args:
            after: the id of a job, after whose end, however it came, this one may start.
            test_only: submit nothing.
        """
        both = self._both_components()
        first = ["--test-only"] if test_only else ["--parsable"]
        if self.seconds is not None:
            first.append(f"--signal=B:USR1@{self.lead}")  # in component 0: the batch script runs there
        if after is not None:
            first.append(f"--dependency=afterany:{after}")
        overrides = [*self.actor_args, *([SEPARATOR, *self.server_args] if self.server_args else [])]
        return [
            "sbatch",
            *first,
            *both,
            *self.server.arguments(),
            ":",
            *both,
            *self.actor.arguments(),
            str(self.batch_file),
            *overrides,
        ]

    def test_command(self, component: Component) -> list[str]:
        """sbatch --test-only of one component."""
        return ["sbatch", "--test-only", *self._both_components(), *component.arguments(), "--wrap=true"]

    def _both_components(self) -> list[str]:
        output = str(self.folder).replace("%", "%%") + "/%j.out"
        return [f"--time={self.time}", f"--output={output}", "--open-mode=append", "--requeue", "--export=ALL"]


def tasks_of(ranks_per_node: int, launcher: str, cpus_per_task: int | None) -> tuple[int, int | None]:
    """Tasks of a node, and CPUs of each; with torchrun one task that has a CPU for each rank if nothing is said."""
    if launcher == TORCHRUN:
        return 1, cpus_per_task or ranks_per_node
    return ranks_per_node, cpus_per_task


def default_lead(save_seconds: float | None) -> int:
    """Seconds before the limit.

    Args:
        save_seconds: that the run's last save took; None where it has made none.
    """
    if save_seconds is None:
        return DEFAULT_LEAD
    return max(LEAST_LEAD, math.ceil(2 * save_seconds) + LEAD_MARGIN)


def lead_faults(lead: int, seconds: int | None, save_seconds: float | None) -> list[str]:
    """What is wrong with a lead, one sentence a fault.

    Args:
        lead: seconds before the limit.
        seconds: the limit; None for none.
        save_seconds: that the run's last save took; None where it has made none.
    """
    faults = []
    if lead > MOST_LEAD:
        faults.append(f"--signal-lead is {lead}; expected at most {MOST_LEAD}, which is what Slurm keeps")
    if seconds is not None and lead + LEAD_MARGIN >= seconds:
        faults.append(
            f"--signal-lead is {lead} s and --time {seconds} s: the run would be told to save as soon as it starts; "
            f"expected --time above {lead + LEAD_MARGIN} s, or a smaller lead"
        )
    if save_seconds is not None and lead < save_seconds + LEAD_MARGIN:
        least = math.ceil(save_seconds) + LEAD_MARGIN
        faults.append(
            f"--signal-lead is {lead} s, but the run's last save took {save_seconds:.0f} s; expected at least "
            f"{least} s, so that a save fits before the limit"
        )
    return faults
