"""Command line of `slurm/submit.py`, with defaults from environment variables."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from reinforce_rl.launch.slurm import settings as names
from reinforce_rl.launch.slurm.settings import VARIABLES, Variable, split_arguments

T = TypeVar("T")
DEFAULT_TIME = "04:00:00"
ACTOR, SERVER = "actor", "server"
UNLIMITED = ("UNLIMITED", "INFINITE", "INFINITY", "-1")
_SECONDS = (
    # Slurm's formats: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S.
    (re.compile(r"(\d+)"), (60,)),
    (re.compile(r"(\d+):(\d+)"), (60, 1)),
    (re.compile(r"(\d+):(\d+):(\d+)"), (3600, 60, 1)),
    (re.compile(r"(\d+)-(\d+)"), (86400, 3600)),
    (re.compile(r"(\d+)-(\d+):(\d+)"), (86400, 3600, 60)),
    (re.compile(r"(\d+)-(\d+):(\d+):(\d+)"), (86400, 3600, 60, 1)),
)
_MEGABYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


def parse_time(text: str) -> int | None:
    """Convert a time limit to seconds; None for no limit.

    Raises:
        ValueError: not a time.
    """
    if text.upper() in UNLIMITED:
        return None
    for form, units in _SECONDS:
        if found := form.fullmatch(text):
            seconds = sum(int(part) * unit for part, unit in zip(found.groups(), units, strict=True))
            if seconds > 0:
                return seconds
    raise ValueError(f"'{text}'; expected MINUTES, HH:MM:SS, D-HH:MM:SS or UNLIMITED")


def parse_memory(text: str) -> int:
    """Convert Slurm's SIZE[K|M|G|T] to megabytes; 0 stands for all of a node's memory.

    Raises:
        ValueError: not a size.
    """
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if found is None:
        raise ValueError(f"'{text}'; expected SIZE[K|M|G|T], such as 64G, or 0 for all of a node's memory")
    number, unit = found.groups()
    return math.ceil(int(number) * _MEGABYTES[unit or "M"])


def parse_gpus(text: str) -> int:
    """Return COUNT of [TYPE:]COUNT.

    Raises:
        ValueError: another format.
    """
    found = re.fullmatch(r"(?:[\w.-]*[A-Za-z][\w.-]*:)?(\d+)", text)
    if found is None:
        raise ValueError(f"'{text}'; expected GPUs of a node as [TYPE:]COUNT, such as 8 or h100:8, or 0 for none")
    return int(found.group(1))


def parse_count(text: str) -> int:
    """Parse a whole number from 1, else raise ValueError."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ValueError(f"'{text}'; expected a whole number from 1")


@dataclass(frozen=True)
class ComponentOption:
    """An option of both components: `--NAME` for both, `--actor-NAME` and `--server-NAME` for one."""

    name: str  # without dashes
    metavar: str
    meaning: str  # help text
    sbatch_variable: str = ""  # read by sbatch itself; empty for none
    common: str | None = ""  # name of the option for both if not NAME; None for no such option

    def option(self, component: str | None) -> str | None:
        """Return the option of a component; None for that of both."""
        if component is not None:
            return f"--{component}-{self.name}"
        return None if self.common is None else f"--{self.common or self.name}"

    def variables(self, component: str) -> list[str]:
        """Return environment variables, highest precedence first."""
        options = (self.option(component), self.option(None))
        own = [f"REINFORCE_{option[2:].replace('-', '_').upper()}" for option in options if option]
        return [*own, *filter(None, [self.sbatch_variable])]


COMPONENT_OPTIONS = (
    ComponentOption("partition", "NAME", "partition, or several with commas", "SBATCH_PARTITION"),
    ComponentOption("account", "NAME", "who pays", "SBATCH_ACCOUNT"),
    ComponentOption("qos", "NAME", "quality of service", "SBATCH_QOS"),
    ComponentOption("constraint", "FEATURES", "features that the nodes must have", "SBATCH_CONSTRAINT"),
    ComponentOption("nodelist", "NODES", "nodes that must be among them", common=None),
    ComponentOption("exclude", "NODES", "nodes that must not"),
    ComponentOption("gpus", "[TYPE:]COUNT", "GPUs of each node; 0: none", common="gpus-per-node"),
    ComponentOption("cpus-per-task", "N", "CPUs of each task; with torchrun a task is a node"),
    ComponentOption("mem", "SIZE[K|M|G|T]", "memory of each node; 0: all of it"),
)
JOB_VARIABLES = (
    Variable("REINFORCE_TIME", DEFAULT_TIME, "time limit of a job, as sbatch reads it"),
    Variable("REINFORCE_SIGNAL_LEAD", "", "seconds before the limit at which the run gets the signal to save"),
    Variable("REINFORCE_JOB_NAME", "", "components are NAME-rm and NAME-actor; else exp_manager.name"),
)
# Set by the plan; every other job variable has an option of the same name.
PLANNED = (names.RUN_DIR, names.ACTOR_DEVICES, names.SERVER_DEVICES, names.REPOSITORY)


@dataclass(frozen=True)
class ComponentOptions:
    """Options of one component, see `COMPONENT_OPTIONS`; None if not given."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    gpus: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    sbatch_args: tuple[str, ...] = ()  # passed to sbatch as they are


@dataclass(frozen=True)
class Options:
    actor_args: tuple[str, ...]  # Hydra overrides
    server_args: tuple[str, ...]  # Hydra overrides
    actor: ComponentOptions
    server: ComponentOptions
    time: str  # limit, as written
    seconds: int | None  # limit; None for none
    lead: int | None  # seconds before the limit; None if not given
    job_name: str | None  # None for the configuration's
    chain: int  # number of consecutive jobs
    dry_run: bool  # print the plan only
    variables: tuple[tuple[str, str], ...]  # of the job, those that are set
    faults: tuple[str, ...] = ()  # of values; those fields have their defaults


def parse_options(argv: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Parse `[options] ACTOR_OVERRIDE... [-- SERVER_OVERRIDE...]`; options not given come from the environment."""
    own, server_args = split_arguments(argv)
    args = _parser().parse_intermixed_args(list(own))
    reader = _Reader(vars(args), environment)
    time = reader.text("time") or DEFAULT_TIME
    variables = {v.name: reader.text(_destination(v.name)) for v in VARIABLES if v.name not in PLANNED}
    return Options(
        actor_args=tuple(args.overrides),
        server_args=server_args,
        time=time,
        seconds=reader.parsed("--time", time, parse_time),
        lead=reader.parsed("--signal-lead", reader.text("signal_lead"), parse_count),
        chain=reader.parsed("--chain", args.chain, parse_count) or 1,
        actor=reader.component(ACTOR),
        server=reader.component(SERVER),
        job_name=reader.text("job_name"),
        dry_run=args.dry_run,
        variables=tuple((name, value) for name, value in variables.items() if value),
        faults=tuple(reader.faults),
    )


class _Reader:
    """Reads options, the command line before the environment, and collects faults of their values."""

    def __init__(self, given: Mapping[str, str | None], environment: Mapping[str, str]):
        self.faults: list[str] = []
        self._given = given
        self._environment = environment

    def text(self, name: str) -> str | None:
        return self._given[name] or self._environment.get(f"REINFORCE_{name.upper()}", "").strip() or None

    def parsed(self, option: str, text: str | None, parse: Callable[[str], T]) -> T | None:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            self.faults.append(f"{option} is {error}")
            return None

    def component(self, component: str) -> ComponentOptions:
        """Read a component's options; its own take precedence over those for both."""
        values: dict[str, str | None] = {}
        for option in COMPONENT_OPTIONS:
            options = (option.option(component), option.option(None))
            written = [self._given[name[2:].replace("-", "_")] for name in options if name]
            found = [self._environment.get(variable, "").strip() for variable in option.variables(component)]
            values[option.name.replace("-", "_")] = next(filter(None, [*written, *found]), None)
        cpus = self.parsed(f"--{component}-cpus-per-task", values.pop("cpus_per_task"), parse_count)
        for name, parse in (("gpus", parse_gpus), ("mem", parse_memory)):
            if self.parsed(f"--{component}-{name}", values[name], parse) is None:
                values[name] = None
        extra = [*(self._given["sbatch_arg"] or ()), *(self._given[f"{component}_sbatch_arg"] or ())]
        return ComponentOptions(**values, cpus_per_task=cpus, sbatch_args=tuple(extra))


def _destination(variable: str) -> str:
    return variable.removeprefix("REINFORCE_").lower()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slurm/submit.py",
        description="Plan, check and submit a Slurm job of reward servers (component 0) and actor (component 1).",
        usage="%(prog)s [options] ACTOR_OVERRIDE... [-- SERVER_OVERRIDE...]",
        epilog="Overrides are Hydra's, as examples/train_reinforce_actor.py and examples/serve_reward_model.py take "
        "them. An option that is not given is read from the variable REINFORCE_OPTION, such as REINFORCE_PARTITION "
        "or REINFORCE_ACTOR_PARTITION.",
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="ACTOR_OVERRIDE", help="KEY=VALUE")
    parser.add_argument("--dry-run", action="store_true", help="check and print the plan; make and submit nothing")
    parser.add_argument("--chain", default="1", metavar="N", help="number of jobs, each after the end of the last")
    _add_variables(parser, JOB_VARIABLES)
    sbatch = parser.add_argument_group("nodes; --actor-X and --server-X are for one component")
    for option in COMPONENT_OPTIONS:
        if both := option.option(None):
            sbatch.add_argument(both, metavar=option.metavar, help=option.meaning)
        for component in (ACTOR, SERVER):
            help = argparse.SUPPRESS if both and option.common == "" else option.meaning
            sbatch.add_argument(str(option.option(component)), metavar=option.metavar, help=help)
    sbatch.add_argument("--sbatch-arg", action="append", metavar="ARG", help="as in --sbatch-arg=--reservation=X")
    for component in (ACTOR, SERVER):
        sbatch.add_argument(f"--{component}-sbatch-arg", action="append", metavar="ARG", help=argparse.SUPPRESS)
    _add_variables(parser.add_argument_group("the job"), [v for v in VARIABLES if v.name not in PLANNED])
    return parser


def _add_variables(group: argparse._ActionsContainer, variables: Sequence[Variable]) -> None:
    for variable in variables:
        seconds = "SECONDS" in variable.name or variable.name.endswith("LEAD")
        group.add_argument(
            f"--{_destination(variable.name).replace('_', '-')}",
            metavar="SECONDS" if seconds else "VALUE",
            help=f"{variable.meaning}{f' ({variable.default})' if variable.default else ''}",
        )
