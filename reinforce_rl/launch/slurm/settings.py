"""Settings of a job: what `submit` fills into its script or sets for it, and checks of what Slurm
granted.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from reinforce_rl.errors import ConfigError, Fault

PREFIX = "REINFORCE_"
RUN_DIR = "REINFORCE_RUN_DIR"
# The job reads these itself.
OF_JOB = (
    RUN_DIR,
    "REINFORCE_READY_SECONDS",
    "REINFORCE_GRACE_SECONDS",
    "REINFORCE_MAX_RESTARTS",
    "REINFORCE_RESTART_AFTER_CRASH",
)
# The programs in a job read these; modules that define them are not for the batch host.
OF_PROGRAMS = ("REINFORCE_RENDEZVOUS_FILE", "REINFORCE_REWARD_TOKEN", "REINFORCE_STORE")
ACTOR = "actor"
SERVER = "server"
GENERATOR = "generator"
SEPARATOR = "--"
# Keys set by the job itself.
SERVER_KEYS = ("inference.host", "inference.port", "inference.token_file", "inference.ready_file")
ACTOR_KEYS = tuple(
    f"remote_rm.reward_model.{name}"
    for name in ("ip", "port", "replicas", "ready_files", "token_file")
)

# Overrides with which all ranks of component 1 train, and component 2 generates.
EXTERNAL_GENERATORS = {"placement": "disaggregated", "generation_ranks": "0"}


def override_of(args: Sequence[str], key: str) -> str | None:
    """Return the last value that Hydra overrides give to a key."""
    parts = [arg.lstrip("+").partition("=") for arg in args]
    return next(
        (value for name, separator, value in reversed(parts) if separator and name == key), None
    )


def with_missing(args: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """Return Hydra overrides and, for each key of `values` that they do not set, one more."""
    return [
        *args,
        *(f"{key}={value}" for key, value in values.items() if override_of(args, key) is None),
    ]


@dataclass(frozen=True)
class Variable:
    """An environment variable, a row of the table in docs/operations.md."""

    name: str
    default: str  # empty for none
    meaning: str
    parse: Callable[[str], Any] = str  # raises ValueError with what it expected

    @property
    def option(self) -> str:
        """Name of the option of `reinforce-rl submit`, without leading dashes."""
        return self.name[len(PREFIX) :].lower().replace("_", "-")


def _flag(text: str) -> bool:
    if text not in ("false", "true"):
        raise ValueError("false or true")
    return text == "true"


def count_from(least: int) -> Callable[[str], Any]:
    def parse(text: str) -> int | None:
        if not text:
            return None
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"a whole number from {least}")
        return int(text)

    return parse


def _seconds(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise ValueError("whole seconds")


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


def _shell_line(text: str) -> str:
    path = os.path.expanduser(text)
    if os.path.isfile(path):
        # As a command it would run in a process of its own, and set nothing for the job.
        line = f". {shlex.quote(os.path.abspath(path))}"
        raise ValueError(f"a shell line, such as '{line}' to read this file")
    return text


def _variable(meaning: str, default: str = "", parse: Callable[[str], Any] = str) -> Any:
    return field(default=parse(default), metadata={"of": (default, meaning, parse)})


@dataclass(frozen=True)
class Settings:
    run_dir: Path = field(
        metadata={"of": ("", "the run's folder, which all nodes share; needed", _absolute)}
    )
    repository: Path
    python: str = _variable(
        "interpreter of the tasks, and of the script unless there is an image; by default this "
        "one, or the image's python3"
    )
    generator_devices: int | None = _variable(
        "ranks a node of external generators; else generation_tensor_parallel_size",
        parse=count_from(1),
    )
    servers: int = _variable(
        "reward servers of one model, which share component 0's nodes", "1", count_from(1)
    )
    ready_seconds: int = _variable(
        "seconds until the servers must be healthy, model loading included", "600", _seconds
    )
    grace_seconds: int = _variable(
        "seconds between the signal that asks a task to end and SIGKILL", "600", _seconds
    )
    max_restarts: int = _variable(
        "largest number of requeues of a job; 0: never", "10", count_from(0)
    )
    generator_restarts: int = _variable(
        "largest number of restarts of a generator that died, per attempt", "5", count_from(0)
    )
    restart_after_crash: bool = _variable("true: requeue after a task has died", "false", _flag)
    mpi: str = _variable("for srun --mpi, such as pmix")
    container_image: str = _variable("for srun --container-image (pyxis), of all tasks")
    container_mounts: tuple[str, ...] = _variable(
        "HOST:CONTAINER,... besides repository and run", parse=_mounts
    )
    srun_args: tuple[str, ...] = _variable("further arguments for every srun", parse=_words)
    setup: str = _variable(
        "a shell line for the job's script, such as `module load cuda` or `. FILE`",
        parse=_shell_line,
    )
    actor_args: tuple[str, ...] = ()  # Hydra overrides
    server_args: tuple[str, ...] = ()  # Hydra overrides

    @property
    def is_wheel(self) -> bool:
        """Whether `repository` is a folder of installed packages."""
        return (self.repository / "reinforce_rl" / "conf").is_dir()

    @property
    def slurm_folder(self) -> Path:
        """Holds the token, the history, and a folder per attempt."""
        return self.run_dir / "slurm"

    @property
    def srun_options(self) -> list[str]:
        """Options of every srun."""
        options = [f"--mpi={self.mpi}"] if self.mpi else []
        if self.container_image:
            mounts = [f"{path}:{path}" for path in (self.repository, self.run_dir)]
            mounts += self.container_mounts
            options += [
                f"--container-image={self.container_image}",
                f"--container-mounts={','.join(mounts)}",
            ]
        return [*options, *self.srun_args]


VARIABLES = tuple(
    Variable(PREFIX + f.name.upper(), *f.metadata["of"]) for f in fields(Settings) if f.metadata
)


def split_arguments(argv: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split at `--` into overrides of the actor and of the server."""
    place = argv.index(SEPARATOR) if SEPARATOR in argv else len(argv)
    return tuple(argv[:place]), tuple(argv[place + 1 :])


def read_settings(
    argv: Sequence[str], environment: Mapping[str, str], repository: Path
) -> Settings:
    """Read and check the settings of a job, with all faults in a ConfigError; an empty variable
    counts as unset.
    """
    actor_args, server_args = split_arguments(argv)
    faults: list[str] = []
    values: dict[str, Any] = {"run_dir": Path()}
    for variable in VARIABLES:
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
    log_dir = override_of(actor_args, "exp_manager.explicit_log_dir")
    if log_dir is not None and run_dir and Path(log_dir) != Path(run_dir):
        faults.append(
            Fault(
                f"exp_manager.explicit_log_dir is {log_dir}, but {RUN_DIR} is {run_dir}; expected "
                f"the same folder; set only {RUN_DIR}",
                key="slurm.run_dir.set_twice",
            )
        )
    if settings.container_mounts and not settings.container_image:
        faults.append(
            Fault(
                "REINFORCE_CONTAINER_MOUNTS is set, but no image is; set "
                "REINFORCE_CONTAINER_IMAGE, or leave the mounts out",
                key="slurm.container.no_image",
            )
        )
    faults += _argument_faults(actor_args, server_args)
    if faults:
        raise ConfigError(faults)
    return settings


def unread_variables(environment: Mapping[str, str]) -> Iterator[Fault]:
    """Check a job's environment for variables of ours that have no effect in it."""
    for name, value in sorted(environment.items()):
        is_read = name in OF_JOB or name in OF_PROGRAMS
        if name.startswith(PREFIX) and value.strip() and not is_read:
            yield Fault(
                f"{name} is set, but a job does not read it; expected {', '.join(OF_JOB)} only. "
                "Edit the script's settings, or submit with `reinforce-rl submit`, which fills "
                "them in, and unset the variable",
                key="slurm.variable.not_read",
            )


def _argument_faults(actor_args: Sequence[str], server_args: Sequence[str]) -> Iterator[Fault]:
    """Check that the programs' arguments are overrides, and none that the job sets."""
    for whose, args, keys in (
        ("actor", actor_args, ACTOR_KEYS),
        ("server", server_args, SERVER_KEYS),
    ):
        for arg in args:
            if "=" not in arg:
                yield Fault(
                    f"'{arg}' is among the {whose}'s arguments; expected KEY=VALUE",
                    key="slurm.argument.no_override",
                )
        for key in keys:
            if override_of(args, key) is not None:
                yield Fault(
                    f"{key} is given among the {whose}'s arguments, but the job sets it; leave it "
                    "out",
                    key="slurm.argument.set_by_job",
                )


def component_faults(
    servers: int,
    generator_ranks: int,
    actor_args: Sequence[str],
    server_args: Sequence[str],
    environment: Mapping[str, str],
) -> Iterator[Fault]:
    """Check the variables that Slurm sets for the batch step against the script's settings and
    arguments.
    """
    given = {key: override_of(actor_args, key) for key in EXTERNAL_GENERATORS}
    is_external = given == EXTERNAL_GENERATORS
    size = environment.get("SLURM_HET_SIZE")
    if size not in (("3",) if is_external else ("2", "3")):
        kind = f"a heterogeneous job of {size} components" if size else "no heterogeneous job"
        number = "three" if is_external else "two"
        generators = " : [those of the generators]" if is_external else ""
        yield Fault(
            f"this is {kind}; expected {number}: sbatch [OPTIONS of the reward servers] : [OPTIONS "
            f"of the actor]{generators} slurm/train_hetjob.sbatch ...",
            key="slurm.components.wrong_number",
        )
        return
    server_nodes, server_ranks = _shape(0, environment)
    actor_nodes, actor_ranks = _shape(1, environment)
    if size == "3":
        _, generators_of_node = _shape(2, environment)
        for key, expected in EXTERNAL_GENERATORS.items():
            if given[key] not in (None, expected):
                yield Fault(
                    f"{key} is {given[key]}, but the job has component 2, of external generators; "
                    f"expected {key}={expected}, or a job of two components",
                    key="slurm.generators.not_external",
                )
        tensor_parallel = override_of(actor_args, "generation_tensor_parallel_size") or "1"
        if tensor_parallel != str(generator_ranks):
            yield Fault(
                f"generation_tensor_parallel_size is {tensor_parallel}, and generator_ranks of the "
                f"script is {generator_ranks}; expected the same",
                key="slurm.generators.other_size",
            )
        if generators_of_node % generator_ranks:
            yield Fault(
                f"generation_tensor_parallel_size is {generator_ranks}, and component 2 has "
                f"{generators_of_node} tasks a node; expected a multiple of {generator_ranks}, as "
                "all ranks of a generator are on one node",
                key="slurm.generators.not_a_multiple",
            )
    nodes = server_nodes // servers
    if server_nodes % servers:
        yield Fault(
            f"servers is {servers}, and component 0 has {server_nodes} nodes; expected a divisor "
            f"of {server_nodes}, as each server has nodes of its own",
            key="slurm.servers.no_divisor",
        )
    for key, args, number, meaning in (
        ("trainer.num_nodes", actor_args, actor_nodes, "nodes of component 1"),
        ("trainer.devices", actor_args, actor_ranks, "tasks a node in component 1"),
        ("num_nodes", server_args, nodes, "nodes of each reward server"),
        ("devices", server_args, server_ranks, "tasks a node in component 0"),
    ):
        value = override_of(args, key)
        if value is not None and value != str(number):
            yield Fault(
                f"{key} is {value}, but the job has {number} {meaning}; leave the key out, or ask "
                "for as many",
                key="slurm.argument.not_the_jobs_size",
            )
    function = override_of(server_args, "reward_function.name")
    if function not in (None, "null", "") and nodes * server_ranks > 1:
        yield Fault(
            f"reward_function.name is {function}, which one process serves, but each server has "
            f"{nodes * server_ranks} ranks; expected one node a server and one task a node",
            key="slurm.servers.function_on_ranks",
        )


def _shape(group: int, environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of nodes of a component and its tasks a node, such as 4 of 4(x2)."""
    nodes = environment.get(f"SLURM_JOB_NUM_NODES_HET_GROUP_{group}") or "1"
    tasks = environment.get(f"SLURM_TASKS_PER_NODE_HET_GROUP_{group}") or "1"
    return int(nodes), int(tasks.partition("(")[0].partition(",")[0])
