"""The command line of sbatch: two components with their nodes and tasks, and the lead of the signal to save."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from reinforce_rl.launch.slurm.settings import SEPARATOR, TORCHRUN
from reinforce_rl.launch.slurm.submission.options import ComponentOptions

DEFAULT_LEAD, LEAST_LEAD = 300, 120
# Slurm sends the signal at some moment of the minute before the lead begins, and the job needs some to end.
LEAD_MARGIN = 60
MOST_LEAD = 65535  # Slurm keeps it in 16 bits


@dataclass(frozen=True)
class Component:
    """One component of the job.

    Attributes:
        name: for people.
        job_name: in Slurm. The components differ in it, since a dependency by name would wait for itself.
        nodes: number of nodes.
        ranks_per_node: of the program.
        tasks_per_node: that Slurm starts: the ranks, or one task that starts them.
        cpus_per_task: None for Slurm's default.
        gpus: of each node, as [TYPE:]COUNT; None for none.
        options: of the command line.
    """

    name: str
    job_name: str
    nodes: int
    ranks_per_node: int
    tasks_per_node: int
    cpus_per_task: int | None = None
    gpus: str | None = None
    options: ComponentOptions = field(default_factory=ComponentOptions)

    @property
    def cpus_per_node(self) -> int:
        return self.tasks_per_node * (self.cpus_per_task or 1)

    def requirements(self) -> list[str]:
        """Options of sbatch that choose nodes."""
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
    """The whole job.

    Attributes:
        server, actor: the components.
        time: limit, as written.
        seconds: the same; None for no limit.
        lead: seconds before the limit at which the run gets the signal to save.
        chain: number of jobs that follow each other.
        run_dir, batch_file: absolute.
        actor_args, server_args: Hydra overrides.
        variables: environment variables that set the job up.
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
        """Folder of the batch script's output; it must exist before the job starts."""
        return self.run_dir / "slurm"

    def command(self, *, after: str | None = None, test_only: bool = False) -> list[str]:
        """Return sbatch with its arguments.

        Args:
            after: id of a job after whose end, successful or not, this one may start.
            test_only: submit nothing.
        """
        first = ["--test-only"] if test_only else ["--parsable"]
        if self.seconds is not None:
            first.append(f"--signal=B:USR1@{self.lead}")  # in component 0: the batch script runs there
        if after is not None:
            first.append(f"--dependency=afterany:{after}")
        overrides = [*self.actor_args, *([SEPARATOR, *self.server_args] if self.server_args else [])]
        # Without one of its own, component 1 would inherit the exclusion of component 0.
        reset = ["--exclude="] if self.server.options.exclude and not self.actor.options.exclude else []
        components = [*self._arguments(self.server), ":", *reset, *self._arguments(self.actor)]
        return ["sbatch", *first, *components, str(self.batch_file), *overrides]

    def test_command(self, component: Component, exclude: str = "") -> list[str]:
        """Return sbatch --test-only of one component as a job of its own.

        Args:
            component: of this job.
            exclude: nodes that it must not get, besides those of its own option.
        """
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
    """Return the tasks of a node and the CPUs of each; torchrun has one task, by default with a CPU a rank."""
    if launcher == TORCHRUN:
        return 1, cpus_per_task or ranks_per_node
    return ranks_per_node, cpus_per_task


def default_lead(save_seconds: float | None) -> int:
    """Return seconds before the limit, from the duration of the run's last save, if it has made one."""
    if save_seconds is None:
        return DEFAULT_LEAD
    return max(LEAST_LEAD, math.ceil(2 * save_seconds) + LEAD_MARGIN)


def lead_faults(lead: int, seconds: int | None, save_seconds: float | None) -> list[str]:
    """Check a lead against Slurm's range, the time limit and the duration of the run's last save, all in seconds."""
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
