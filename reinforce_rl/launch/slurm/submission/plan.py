"""Builds the sbatch command line: two components with their nodes and tasks, and the lead of the save signal."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from reinforce_rl.launch.slurm.settings import SEPARATOR, TORCHRUN
from reinforce_rl.launch.slurm.submission.options import ComponentOptions

DEFAULT_LEAD, LEAST_LEAD = 300, 120
# Slurm sends the signal up to a minute before the lead begins, and the job needs time to end.
LEAD_MARGIN = 60
MOST_LEAD = 65535  # Slurm keeps it in 16 bits


@dataclass(frozen=True)
class Component:
    name: str  # for people
    job_name: str  # differs by component, since a dependency by name would wait for itself
    nodes: int  # number of them
    ranks_per_node: int
    tasks_per_node: int  # started by Slurm: one per rank, or one that starts them
    cpus_per_task: int | None = None  # None for Slurm's default
    gpus: str | None = None  # per node, as [TYPE:]COUNT; None for none
    options: ComponentOptions = field(default_factory=ComponentOptions)

    @property
    def cpus_per_node(self) -> int:
        return self.tasks_per_node * (self.cpus_per_task or 1)

    def requirements(self) -> list[str]:
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
        return [*(f"--{name}={value}" for name, value in given.items() if value is not None), *own.sbatch_args]


@dataclass(frozen=True)
class JobPlan:
    server: Component
    actor: Component
    time: str  # limit, as written
    seconds: int | None  # limit; None for none
    lead: int  # seconds from the save signal to the limit
    chain: int  # number of consecutive jobs
    run_dir: Path  # absolute
    batch_file: Path  # absolute
    actor_args: tuple[str, ...]  # Hydra overrides
    server_args: tuple[str, ...]  # Hydra overrides
    variables: tuple[tuple[str, str], ...]  # environment of the job

    @property
    def folder(self) -> Path:
        """Holds the batch script's output; must exist before the job starts."""
        return self.run_dir / "slurm"

    def command(self, *, after: str | None = None, test_only: bool = False) -> list[str]:
        """Return the sbatch command; it starts after the end of job `after`, successful or not."""
        first = ["--test-only"] if test_only else ["--parsable"]
        if self.seconds is not None:
            first.append(f"--signal=B:USR1@{self.lead}")  # on component 0, where the batch script runs
        if after is not None:
            first.append(f"--dependency=afterany:{after}")
        overrides = [*self.actor_args, *([SEPARATOR, *self.server_args] if self.server_args else [])]
        # Otherwise component 1 would inherit component 0's --exclude.
        reset = ["--exclude="] if self.server.options.exclude and not self.actor.options.exclude else []
        components = [*self._arguments(self.server), ":", *reset, *self._arguments(self.actor)]
        return ["sbatch", *first, *components, str(self.batch_file), *overrides]

    def test_command(self, component: Component, exclude: str = "") -> list[str]:
        """Return `sbatch --test-only` for one component as a job of its own, avoiding nodes `exclude` too."""
        own = component.options.exclude
        if own and "/" in own:  # a file of names
            own = ",".join(Path(own).read_text().split())
        more = [f"--exclude={','.join(filter(None, [own, exclude]))}"] if exclude else []
        return ["sbatch", "--test-only", *self._arguments(component), *more, "--wrap=true"]

    def _arguments(self, component: Component) -> list[str]:
        output = str(self.folder).replace("%", "%%") + "/%j.out"
        both = [f"--time={self.time}", f"--output={output}", "--open-mode=append", "--requeue", "--export=ALL"]
        return [*both, f"--job-name={component.job_name}", *component.requirements()]


def tasks_of(ranks_per_node: int, launcher: str, cpus_per_task: int | None) -> tuple[int, int | None]:
    """Return tasks per node and CPUs per task; torchrun has one task, with one CPU per rank by default."""
    if launcher == TORCHRUN:
        return 1, cpus_per_task or ranks_per_node
    return ranks_per_node, cpus_per_task


def default_lead(save_seconds: float | None) -> int:
    """Return the lead in seconds from the duration of the run's last save, if any."""
    if save_seconds is None:
        return DEFAULT_LEAD
    return max(LEAST_LEAD, math.ceil(2 * save_seconds) + LEAD_MARGIN)


def lead_faults(lead: int, seconds: int | None, save_seconds: float | None) -> list[str]:
    """Check a lead against Slurm's range, the time limit and the run's last save, all in seconds."""
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
