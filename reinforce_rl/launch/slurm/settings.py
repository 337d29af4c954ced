"""Job settings of `slurm/train_hetjob.sbatch`: environment variables, and the nodes and tasks granted by Slurm."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from reinforce_rl.errors import ConfigError, Fault

PREFIX = "REINFORCE_"
RUN_DIR = "REINFORCE_RUN_DIR"
PYTHON = "REINFORCE_PYTHON"
ACTOR_DEVICES = "REINFORCE_ACTOR_DEVICES"
SERVER_DEVICES = "REINFORCE_SERVER_DEVICES"
GENERATOR_DEVICES = "REINFORCE_GENERATOR_DEVICES"
CONTAINER_IMAGE = "REINFORCE_CONTAINER_IMAGE"
SERVER_CONTAINER_IMAGE = "REINFORCE_SERVER_CONTAINER_IMAGE"
REPOSITORY = "REINFORCE_REPO"
ACTOR = "actor"
SERVER = "server"
GENERATOR = "generator"
SRUN = "srun"
TORCHRUN = "torchrun"
SEPARATOR = "--"
# Keys set by the job itself.
SERVER_KEYS = ("inference.host", "inference.port", "inference.token_file", "inference.ready_file")
ACTOR_KEYS = tuple(
    f"remote_rm.reward_model.{name}" for name in ("ip", "port", "replicas", "token_file")
)

# Overrides with which all ranks of component 1 train, and component 2 generates.
EXTERNAL_GENERATORS = {"placement": "disaggregated", "generation_ranks": "0"}


def override_of(args: Sequence[str], key: str) -> str | None:
    """Return the last value that Hydra overrides give to a key."""
    parts = [arg.lstrip("+").partition("=") for arg in args]
    return next((value for name, found, value in reversed(parts) if found and name == key), None)


def with_missing(args: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """Return Hydra overrides and, for each key of `values` that they do not set, one more."""
    return [
        *args,
        *(f"{key}={value}" for key, value in values.items() if override_of(args, key) is None),
    ]


@dataclass(frozen=True)
class Variable:
    """An environment variable, a row of the table in docs/slurm.md."""

    name: str
    default: str  # empty for none
    meaning: str
    parse: Callable[[str], Any] = str  # raises ValueError with what it expected

    @property
    def option(self) -> str:
        """Name of the option in `slurm/submit.py`, without leading dashes."""
        return self.name[len(PREFIX) :].lower().replace("_", "-")


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(" or ".join(choices))
        return text

    return parse


def count_from(least: int) -> Callable[[str], Any]:
    def parse(text: str) -> int | None:
        if not text:
            return None
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"a whole number from {least}")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise ValueError("seconds")


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"arguments as in a shell ({error})") from error


def _absolute(text: str) -> Path:
    if not text.startswith("/"):
        raise ValueError("an absolute path")
    return Path(text)


def _mounts(text: str) -> tuple[str, ...]:
    entries = tuple(entry.strip() for entry in text.split(",") if entry.strip())
    if not all(entry.startswith("/") for entry in entries):
        raise ValueError("absolute paths, HOST:CONTAINER,...")
    return entries


def _variable(meaning: str, default: str = "", parse: Callable[[str], Any] = str) -> Any:
    return field(default=parse(default), metadata={"of": (default, meaning, parse)})


@dataclass(frozen=True)
class Settings:
    run_dir: Path = field(
        metadata={"of": ("", "the run's folder, which all nodes share; needed", _absolute)}
    )
    repository: Path
    python: str = _variable("interpreter of the tasks; else the repository's .venv, else python3")
    launcher: str = _variable(
        "srun: a task per rank; torchrun: a task per node", SRUN, _one_of(SRUN, TORCHRUN)
    )
    actor_devices: int | None = _variable(
        "ranks a node of the actor; else component 1's tasks", parse=count_from(1)
    )
    server_devices: int | None = _variable(
        "ranks a node of a server; else component 0's tasks", parse=count_from(1)
    )
    generator_devices: int | None = _variable(
        "ranks a node of external generators; else component 2's tasks", parse=count_from(1)
    )
    servers: int = _variable(
        "reward servers of one model, which share component 0's nodes", "1", count_from(1)
    )
    ready_seconds: float = _variable(
        "for the servers to become healthy, model loading included", "600", _seconds
    )
    grace_seconds: float = _variable(
        "between the signal that asks a task to end and SIGKILL", "600", _seconds
    )
    max_restarts: int = _variable("how often a job may be requeued; 0: never", "10", count_from(0))
    generator_restarts: int = _variable(
        "how often an attempt starts a generator that died again", "5", count_from(0)
    )
    restart_after_crash: str = _variable(
        "true: requeue after a task has died", "false", _one_of("false", "true")
    )
    mpi: str = _variable("for srun --mpi, such as pmix")
    container_image: str = _variable("for srun --container-image (pyxis), of all tasks")
    server_container_image: str = _variable("another image for the reward servers")
    container_mounts: tuple[str, ...] = _variable(
        "HOST:CONTAINER,... besides repository and run", parse=_mounts
    )
    srun_args: tuple[str, ...] = _variable("further arguments for every srun", parse=_words)
    setup: str = _variable(
        "a shell file that every task sources first, or a shell line such as `module load cuda`"
    )
    actor_args: tuple[str, ...] = ()  # Hydra overrides
    server_args: tuple[str, ...] = ()  # Hydra overrides

    @property
    def is_wheel(self) -> bool:
        """Whether `repository` is a folder of installed packages."""
        return (self.repository / "reinforce_rl" / "conf").is_dir()

    def program(self, script: str, command: str) -> tuple[str, ...]:
        """Return Python's arguments for a script of examples/, which in a wheel is a command."""
        path = self.repository / "examples" / f"{script}.py"
        return ("-m", "reinforce_rl", command) if self.is_wheel else (str(path),)

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


VARIABLES = (
    *(Variable(PREFIX + f.name.upper(), *f.metadata["of"]) for f in fields(Settings) if f.metadata),
    Variable(
        REPOSITORY,
        "",
        "the repository; if empty, the folder where sbatch was called, or else the folder of the batch file",
    ),
)


def split_arguments(argv: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split at `--` into overrides of the actor and of the server."""
    place = argv.index(SEPARATOR) if SEPARATOR in argv else len(argv)
    return tuple(argv[:place]), tuple(argv[place + 1 :])


def read_settings(
    argv: Sequence[str], environment: Mapping[str, str], repository: Path
) -> Settings:
    """Read and check the settings of a job, with all faults in a ConfigError; an empty variable counts as unset."""
    actor_args, server_args = split_arguments(argv)
    faults: list[str] = []
    values: dict[str, Any] = {"run_dir": Path()}
    for variable in VARIABLES[:-1]:
        text = environment.get(variable.name, "").strip()
        try:
            if text:
                values[variable.option.replace("-", "_")] = variable.parse(text)
        except ValueError as error:
            faults.append(
                Fault(
                    f"{variable.name} is '{text}'; expected {error}",
                    key="slurm.variable.invalid",
                )
            )
    settings = Settings(
        **values, repository=repository, actor_args=actor_args, server_args=server_args
    )
    run_dir = environment.get(RUN_DIR, "").strip()
    if not run_dir:
        faults.append(
            Fault(
                f"{RUN_DIR} is not set; expected the run's folder, which all nodes share",
                key="slurm.run_dir.not_set",
            )
        )
    own = override_of(actor_args, "exp_manager.explicit_log_dir")
    if own is not None and run_dir and Path(own) != Path(run_dir):
        faults.append(
            Fault(
                f"exp_manager.explicit_log_dir is {own}, but {RUN_DIR} is {run_dir}; expected the "
                f"same folder; set only {RUN_DIR}",
                key="slurm.run_dir.set_twice",
            )
        )
    if settings.container_mounts and not (
        settings.container_image or settings.server_container_image
    ):
        faults.append(
            Fault(
                f"REINFORCE_CONTAINER_MOUNTS is set, but no image is; set {CONTAINER_IMAGE} or "
                f"{SERVER_CONTAINER_IMAGE}, or leave the mounts out",
                key="slurm.container.no_image",
            )
        )
    for whose, args, keys in (
        ("actor", actor_args, ACTOR_KEYS),
        ("server", server_args, SERVER_KEYS),
    ):
        faults += [
            Fault(
                f"'{arg}' stands among the {whose}'s arguments; expected KEY=VALUE",
                key="slurm.argument.no_override",
            )
            for arg in args
            if "=" not in arg
        ]
        given = [key for key in keys if override_of(args, key) is not None]
        faults += [
            Fault(
                f"{key} is given among the {whose}'s arguments, but the job sets it; leave it out",
                key="slurm.argument.set_by_job",
            )
            for key in given
        ]
    if faults:
        raise ConfigError(faults)
    return settings


@dataclass(frozen=True)
class Component:
    group: int  # its number for srun
    job_id: str  # under which Slurm lists its steps
    nodes: int  # number of them
    devices: int  # ranks per node
    tasks_per_node: int  # as requested
    cpus_per_task: int | None  # as requested; None if not


@dataclass(frozen=True)
class Allocation:
    job_id: str  # of the leading component
    restart: int  # number of requeues
    server: Component
    actor: Component
    generator: Component | None = None  # if generators are external
    generator_ranks: int = 1  # of each generator

    @property
    def components(self) -> tuple[Component, ...]:
        return (self.server, self.actor, *filter(None, [self.generator]))


def read_allocation(settings: Settings, environment: Mapping[str, str]) -> Allocation:
    """Read the variables that Slurm sets for the batch step; ConfigError if the numbers contradict the settings."""
    given = {key: override_of(settings.actor_args, key) for key in EXTERNAL_GENERATORS}
    is_external = given == EXTERNAL_GENERATORS
    if (size := environment.get("SLURM_HET_SIZE")) not in (("3",) if is_external else ("2", "3")):
        what = f"a heterogeneous job of {size} components" if size else "no heterogeneous job"
        number, more = ("three", " : [those of the generators]") if is_external else ("two", "")
        expected = f"sbatch [OPTIONS of the reward servers] : [OPTIONS of the actor]{more} slurm/train_hetjob.sbatch"
        raise ConfigError(
            [
                Fault(
                    f"this is {what}; expected {number}: {expected} ...",
                    key="slurm.components.wrong_number",
                )
            ]
        )
    server = _component(0, settings.server_devices, environment)
    actor = _component(1, settings.actor_devices, environment)
    generator = None
    each = 1
    faults = []
    if size == "3":
        generator = _component(2, settings.generator_devices, environment)
        text = override_of(settings.actor_args, "generation_tensor_parallel_size") or "1"
        # the program says what is wrong with another
        each = int(text) if text.isdecimal() and int(text) else 1
        for key, expected in EXTERNAL_GENERATORS.items():
            if given[key] not in (None, expected):
                faults.append(
                    Fault(
                        f"{key} is {given[key]}, but the job has component 2, of external "
                        f"generators; expected {key}={expected}, or a job of two components",
                        key="slurm.generators.not_external",
                    )
                )
        if generator.devices % each:
            faults.append(
                Fault(
                    f"generation_tensor_parallel_size is {each}, and component 2 has "
                    f"{generator.devices} ranks a node ({GENERATOR_DEVICES}); expected a multiple "
                    f"of {each}, as all ranks of a generator are on one node",
                    key="slurm.generators.not_a_multiple",
                )
            )
    nodes = server.nodes // settings.servers
    if server.nodes % settings.servers:
        faults.append(
            Fault(
                f"REINFORCE_SERVERS is {settings.servers}, and component 0 has {server.nodes} "
                f"nodes; expected a divisor of {server.nodes}, as each server has nodes of its own",
                key="slurm.servers.no_divisor",
            )
        )
    for key, args, number, what in (
        ("trainer.num_nodes", settings.actor_args, actor.nodes, "nodes of component 1"),
        ("trainer.devices", settings.actor_args, actor.devices, f"ranks a node ({ACTOR_DEVICES})"),
        ("num_nodes", settings.server_args, nodes, "nodes of each reward server"),
        ("devices", settings.server_args, server.devices, f"ranks a node ({SERVER_DEVICES})"),
    ):
        found = override_of(args, key)
        if found is not None and found != str(number):
            faults.append(
                Fault(
                    f"{key} is {found}, but the job has {number} {what}; leave the key out, or ask for as many",
                    key="slurm.argument.not_the_jobs_size",
                )
            )
    function = override_of(settings.server_args, "reward_function.name")
    if function not in (None, "null", "") and (ranks := nodes * server.devices) > 1:
        faults.append(
            Fault(
                f"reward_function.name is {function}, which one process serves, but each server "
                f"has {ranks} ranks; expected one node a server and {SERVER_DEVICES}=1",
                key="slurm.servers.function_on_ranks",
            )
        )
    if faults:
        raise ConfigError(faults)
    restart = int(environment.get("SLURM_RESTART_COUNT", "0"))
    return Allocation(environment["SLURM_JOB_ID"], restart, server, actor, generator, each)


def _component(group: int, devices: int | None, environment: Mapping[str, str]) -> Component:
    def of(name: str, default: str) -> str:
        return environment.get(f"SLURM_{name}_HET_GROUP_{group}") or default

    # Without `--ntasks-per-node` Slurm sets only SLURM_TASKS_PER_NODE, such as 4(x2).
    tasks = int(
        of("NTASKS_PER_NODE", of("TASKS_PER_NODE", "1").partition("(")[0].partition(",")[0])
    )
    cpus = int(of("CPUS_PER_TASK", "0")) or None
    return Component(
        group, of("JOB_ID", ""), int(of("JOB_NUM_NODES", "1")), devices or tasks, tasks, cpus
    )
