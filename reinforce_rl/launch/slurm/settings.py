"""Job settings of `slurm/train_hetjob.sbatch`: environment variables, and the nodes and tasks granted by Slurm."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reinforce_rl.config.keys import override_of
from reinforce_rl.errors import ConfigError

RUN_DIR = "REINFORCE_RUN_DIR"
PYTHON = "REINFORCE_PYTHON"
LAUNCHER = "REINFORCE_LAUNCHER"
ACTOR_DEVICES = "REINFORCE_ACTOR_DEVICES"
SERVER_DEVICES = "REINFORCE_SERVER_DEVICES"
SERVERS = "REINFORCE_SERVERS"
READY_SECONDS = "REINFORCE_READY_SECONDS"
GRACE_SECONDS = "REINFORCE_GRACE_SECONDS"
MAX_RESTARTS = "REINFORCE_MAX_RESTARTS"
RESTART_AFTER_CRASH = "REINFORCE_RESTART_AFTER_CRASH"
MPI = "REINFORCE_MPI"
CONTAINER_IMAGE = "REINFORCE_CONTAINER_IMAGE"
SERVER_CONTAINER_IMAGE = "REINFORCE_SERVER_CONTAINER_IMAGE"
CONTAINER_MOUNTS = "REINFORCE_CONTAINER_MOUNTS"
SRUN_ARGS = "REINFORCE_SRUN_ARGS"
SETUP = "REINFORCE_SETUP"
REPOSITORY = "REINFORCE_REPO"

SRUN, TORCHRUN = "srun", "torchrun"
SEPARATOR = "--"


@dataclass(frozen=True)
class Variable:
    """An environment variable, a row of the table in docs/slurm.md; an empty default means none."""

    name: str
    default: str
    meaning: str


VARIABLES = (
    Variable(RUN_DIR, "", "the run's folder, on a file system that all nodes share; needed"),
    Variable(PYTHON, "", "interpreter of the tasks; else the repository's .venv, else python3"),
    Variable(LAUNCHER, SRUN, "srun: one task a rank; torchrun: one task a node, which starts its ranks"),
    Variable(ACTOR_DEVICES, "", "ranks on each node of the actor; else the tasks a node of component 1"),
    Variable(SERVER_DEVICES, "", "ranks on each node of a reward server; else the tasks a node of component 0"),
    Variable(SERVERS, "1", "reward servers of one model that the nodes of component 0 are dealt to"),
    Variable(READY_SECONDS, "600", "how long the reward servers may take to become healthy, model loading included"),
    Variable(GRACE_SECONDS, "600", "between the signal that asks a task to end and SIGKILL"),
    Variable(MAX_RESTARTS, "10", "how often a job may be requeued; 0: never"),
    Variable(RESTART_AFTER_CRASH, "false", "true: a job of which a task died is requeued as after a time limit"),
    Variable(MPI, "", "for srun --mpi, such as pmix"),
    Variable(CONTAINER_IMAGE, "", "for srun --container-image (pyxis), of all tasks"),
    Variable(SERVER_CONTAINER_IMAGE, "", "another image for the reward servers"),
    Variable(CONTAINER_MOUNTS, "", "HOST:CONTAINER,... besides the repository and the run's folder"),
    Variable(SRUN_ARGS, "", "further arguments for every srun"),
    Variable(SETUP, "", "a shell file that every task sources first, or a shell line such as `module load cuda`"),
    Variable(REPOSITORY, "", "the repository; else the folder of sbatch, else that of the batch file"),
)


@dataclass(frozen=True)
class Settings:
    """Checked settings of a job, see `VARIABLES`. Unset texts are empty."""

    run_dir: Path
    repository: Path
    python: str | None = None
    launcher: str = SRUN
    actor_devices: int | None = None  # None: from the allocation
    server_devices: int | None = None  # None: from the allocation
    servers: int = 1
    ready_seconds: float = 600.0
    grace_seconds: float = 600.0
    max_restarts: int = 10
    restart_after_crash: bool = False
    mpi: str = ""
    container_image: str = ""
    server_container_image: str = ""
    container_mounts: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    setup: str = ""
    actor_args: tuple[str, ...] = ()  # Hydra overrides
    server_args: tuple[str, ...] = ()  # Hydra overrides

    @property
    def slurm_folder(self) -> Path:
        """Holds the token, the history, and a folder per attempt."""
        return self.run_dir / "slurm"

    @property
    def token_file(self) -> Path:
        return self.slurm_folder / "token"

    def interpreter(self, image: str) -> str:
        """Return the tasks' Python in `image`; empty for no container."""
        own = self.repository / ".venv" / "bin" / "python"
        return self.python or (str(own) if not image and own.exists() else "python3")


def split_arguments(argv: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split at `--` into overrides of the actor and of the server."""
    if SEPARATOR not in argv:
        return tuple(argv), ()
    place = list(argv).index(SEPARATOR)
    return tuple(argv[:place]), tuple(argv[place + 1 :])


# Keys set by the job itself.
SERVER_KEYS = ("inference.host", "inference.port", "inference.token_file", "inference.ready_file")
ACTOR_KEYS = tuple(f"remote_rm.reward_model.{name}" for name in ("ip", "port", "replicas", "token_file"))


def read_settings(argv: Sequence[str], environment: Mapping[str, str], repository: Path) -> Settings:
    """Read and check the settings of a job.

    Raises:
        ConfigError: with all faults.
    """
    reader = _Reader(environment)
    actor_args, server_args = split_arguments(argv)
    settings = Settings(
        run_dir=reader.run_dir(actor_args),
        repository=repository,
        python=reader.text(PYTHON) or None,
        launcher=reader.choice(LAUNCHER, (SRUN, TORCHRUN)),
        actor_devices=reader.optional_count(ACTOR_DEVICES),
        server_devices=reader.optional_count(SERVER_DEVICES),
        servers=reader.count(SERVERS, 1),
        ready_seconds=reader.seconds(READY_SECONDS),
        grace_seconds=reader.seconds(GRACE_SECONDS),
        max_restarts=reader.count(MAX_RESTARTS, 0),
        restart_after_crash=reader.choice(RESTART_AFTER_CRASH, ("false", "true")) == "true",
        mpi=reader.text(MPI),
        container_image=reader.text(CONTAINER_IMAGE),
        server_container_image=reader.text(SERVER_CONTAINER_IMAGE),
        container_mounts=reader.mounts(),
        srun_args=reader.words(SRUN_ARGS),
        setup=reader.text(SETUP),
        actor_args=actor_args,
        server_args=server_args,
    )
    faults = [*reader.faults, *_argument_faults(actor_args, server_args)]
    if faults:
        raise ConfigError(faults)
    return settings


def _argument_faults(actor_args: Sequence[str], server_args: Sequence[str]) -> list[str]:
    faults = []
    for whose, args, keys in (("actor", actor_args, ACTOR_KEYS), ("server", server_args, SERVER_KEYS)):
        faults += [f"'{arg}' among the {whose}'s arguments; expected KEY=VALUE" for arg in args if "=" not in arg]
        faults += [
            f"{key} is given among the {whose}'s arguments; the job sets it, leave it out"
            for key in keys
            if override_of(args, key) is not None
        ]
    return faults


class _Reader:
    """Reads variables and collects their faults. An empty variable counts as unset."""

    def __init__(self, environment: Mapping[str, str]):
        self.faults: list[str] = []
        self._environment = environment
        self._defaults = {variable.name: variable.default for variable in VARIABLES}

    def text(self, name: str) -> str:
        return self._environment.get(name, "").strip() or self._defaults[name]

    def choice(self, name: str, choices: Sequence[str]) -> str:
        found = self.text(name)
        if found not in choices:
            self.faults.append(f"{name} is '{found}'; expected {' or '.join(choices)}")
        return found

    def count(self, name: str, least: int) -> int:
        found = self.text(name)
        if found.isdecimal() and int(found) >= least:
            return int(found)
        self.faults.append(f"{name} is '{found}'; expected a whole number from {least}")
        return least

    def optional_count(self, name: str) -> int | None:
        return self.count(name, 1) if self.text(name) else None

    def seconds(self, name: str) -> float:
        found = self.text(name)
        try:
            value = float(found)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            self.faults.append(f"{name} is '{found}'; expected seconds")
        return value

    def words(self, name: str) -> tuple[str, ...]:
        try:
            return tuple(shlex.split(self.text(name)))
        except ValueError as error:
            self.faults.append(f"{name} is '{self.text(name)}'; expected arguments as in a shell ({error})")
            return ()

    def mounts(self) -> tuple[str, ...]:
        entries = tuple(entry.strip() for entry in self.text(CONTAINER_MOUNTS).split(",") if entry.strip())
        for entry in entries:
            if not entry.startswith("/"):
                self.faults.append(f"{CONTAINER_MOUNTS} has '{entry}'; expected absolute paths, HOST:CONTAINER,...")
        if entries and not (self.text(CONTAINER_IMAGE) or self.text(SERVER_CONTAINER_IMAGE)):
            self.faults.append(f"{CONTAINER_MOUNTS} is set, but neither {CONTAINER_IMAGE} nor another image")
        return entries

    def run_dir(self, actor_args: Sequence[str]) -> Path:
        found = self.text(RUN_DIR)
        if not found:
            self.faults.append(f"{RUN_DIR} is not set; expected the run's folder, which all nodes share")
        elif not found.startswith("/"):
            self.faults.append(f"{RUN_DIR} is '{found}'; expected an absolute path")
        own = override_of(actor_args, "exp_manager.explicit_log_dir")
        if own is not None and found and Path(own) != Path(found):
            self.faults.append(
                f"exp_manager.explicit_log_dir is {own}, but {RUN_DIR} is {found}; expected the same folder, or "
                "only the latter"
            )
        return Path(found)


@dataclass(frozen=True)
class Component:
    group: int  # its number for srun
    job_id: str  # under which Slurm lists its steps
    nodes: int  # number of them
    devices: int  # ranks per node
    tasks_per_node: int  # as requested
    cpus_per_task: int | None  # as requested; None if not

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices


@dataclass(frozen=True)
class Allocation:
    job_id: str  # of the leading component
    restart: int  # number of requeues
    server: Component
    actor: Component

    @property
    def label(self) -> str:
        return f"{self.job_id}-{self.restart}"


def read_allocation(settings: Settings, environment: Mapping[str, str]) -> Allocation:
    """Read the variables that Slurm sets for the batch step.

    Raises:
        ConfigError: not two components, or the numbers contradict the settings.
    """
    if environment.get("SLURM_HET_SIZE") != "2":
        found = environment.get("SLURM_HET_SIZE")
        what = f"a heterogeneous job of {found} components" if found else "no heterogeneous job"
        raise ConfigError(
            [
                f"this is {what}; expected two: sbatch [OPTIONS of the reward servers] : [OPTIONS of the actor] "
                "slurm/train_hetjob.sbatch ..."
            ]
        )
    server = _component(0, settings.server_devices, environment)
    actor = _component(1, settings.actor_devices, environment)
    faults = _allocation_faults(settings, server, actor)
    if faults:
        raise ConfigError(faults)
    return Allocation(environment["SLURM_JOB_ID"], int(environment.get("SLURM_RESTART_COUNT", "0")), server, actor)


def _component(group: int, devices: int | None, environment: Mapping[str, str]) -> Component:
    def of(name: str) -> str | None:
        return environment.get(f"{name}_HET_GROUP_{group}")

    # Without `--ntasks-per-node` Slurm sets only SLURM_TASKS_PER_NODE, such as 4(x2).
    first = re.match(r"\d+", of("SLURM_TASKS_PER_NODE") or "1")
    tasks = int(of("SLURM_NTASKS_PER_NODE") or (first.group() if first else 1))
    cpus = of("SLURM_CPUS_PER_TASK")
    return Component(
        group=group,
        job_id=of("SLURM_JOB_ID") or "",
        nodes=int(of("SLURM_JOB_NUM_NODES") or 1),
        devices=devices or tasks,
        tasks_per_node=tasks,
        cpus_per_task=int(cpus) if cpus else None,
    )


def _allocation_faults(settings: Settings, server: Component, actor: Component) -> list[str]:
    faults = []
    if server.nodes % settings.servers:
        faults.append(
            f"{SERVERS} is {settings.servers}, and component 0 has {server.nodes} nodes; expected a divisor, "
            "since each server has nodes of its own"
        )
    wanted = (
        ("trainer.num_nodes", settings.actor_args, actor.nodes, "nodes of component 1"),
        ("trainer.devices", settings.actor_args, actor.devices, f"ranks a node ({ACTOR_DEVICES})"),
        ("num_nodes", settings.server_args, server.nodes // settings.servers, "nodes of each reward server"),
        ("devices", settings.server_args, server.devices, f"ranks a node ({SERVER_DEVICES})"),
    )
    for key, args, number, what in wanted:
        found = override_of(args, key)
        if found is not None and found != str(number):
            faults.append(f"{key} is {found}, but the job has {number} {what}; leave the key out, or ask for as many")
    function = override_of(settings.server_args, "reward_function.name")
    ranks = server.nodes // settings.servers * server.devices
    if function not in (None, "null", "") and ranks > 1:
        faults.append(
            f"reward_function.name is {function}, which one process serves, but each server has {ranks} ranks; "
            f"expected one node a server and {SERVER_DEVICES}=1"
        )
    return faults
