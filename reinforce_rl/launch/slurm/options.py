"""Command line of `reinforce-rl submit`, with defaults from environment variables."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from reinforce_rl.errors import Fault
from reinforce_rl.launch.slurm import settings as names
from reinforce_rl.launch.slurm.settings import (
    ACTOR,
    GENERATOR,
    PREFIX,
    SERVER,
    VARIABLES,
    Variable,
    count_from,
    split_arguments,
)
from reinforce_rl.launch.terminal import program_name

UNLIMITED = ("UNLIMITED", "INFINITE", "INFINITY", "-1")
_MEGABYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


def parse_time(text: str) -> int | None:
    """Convert M, M:S, H:M:S, D-H, D-H:M or D-H:M:S to seconds; None for no limit.

    The parsers raise ValueError.
    """
    if text.upper() in UNLIMITED:
        return None
    if match := re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text):
        days = match[1]
        parts = match[2].split(":")
        units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
        seconds = 86400 * int(days or 0) + sum(
            int(part) * unit for part, unit in zip(parts, units, strict=False)
        )
        if seconds > 0:
            return seconds
    raise ValueError("MINUTES, HH:MM:SS, D-HH:MM:SS or UNLIMITED")


def parse_memory(text: str) -> int:
    """Convert Slurm's SIZE[K|M|G|T] to megabytes; 0 stands for all of a node's memory."""
    if match := re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper()):
        return math.ceil(int(match[1]) * _MEGABYTES[match[2] or "M"])
    raise ValueError("SIZE[K|M|G|T], such as 64G, or 0 for all of a node's memory")


def parse_gpus(text: str) -> int:
    if match := re.fullmatch(r"(?:[\w.-]*[A-Za-z][\w.-]*:)?(\d+)", text):
        return int(match[1])
    raise ValueError("GPUs of a node as [TYPE:]COUNT, such as 8 or h100:8, or 0 for none")


class ComponentOption(NamedTuple):
    """`--actor-NAME`, `--server-NAME` and `--generator-NAME`, and `--BOTH` for all components."""

    both: str  # empty for no such option
    metavar: str
    meaning: str  # help text
    sbatch_variable: str = ""  # read by sbatch itself; empty for none
    parse: Callable[[str], Any] = str  # raises ValueError


def _option(*of: Any, **values: Any) -> Any:
    return field(default=None, metadata={"of": ComponentOption(*of, **values)})


@dataclass(frozen=True)
class ComponentOptions:
    """Options of one component; None if not given."""

    partition: str | None = _option(
        "partition", "NAME", "partition, or several with commas", "SBATCH_PARTITION"
    )
    account: str | None = _option("account", "NAME", "who pays", "SBATCH_ACCOUNT")
    qos: str | None = _option("qos", "NAME", "quality of service", "SBATCH_QOS")
    constraint: str | None = _option(
        "constraint", "FEATURES", "features that nodes must have", "SBATCH_CONSTRAINT"
    )
    nodelist: str | None = _option("", "NODES", "nodes that must be among them")
    exclude: str | None = _option("exclude", "NODES", "nodes that must not")
    gpus: str | None = _option(
        "gpus-per-node", "[TYPE:]COUNT", "GPUs of each node; 0: none", parse=parse_gpus
    )
    cpus_per_task: str | None = _option(
        "cpus-per-task", "N", "CPUs of each task, which is a rank", parse=count_from(1)
    )
    mem: str | None = _option(
        "mem", "SIZE[K|M|G|T]", "memory of each node; 0: all of it", parse=parse_memory
    )
    sbatch_args: tuple[str, ...] = ()  # passed to sbatch as they are


COMPONENT_OPTIONS: dict[str, ComponentOption] = {
    f.name.replace("_", "-"): f.metadata["of"] for f in fields(ComponentOptions) if f.metadata
}
JOB_VARIABLES = (
    Variable("REINFORCE_TIME", "04:00:00", "time limit of a job, as sbatch reads it"),
    Variable(
        "REINFORCE_SIGNAL_LEAD",
        "",
        "seconds before the limit at which the run gets the signal to save",
    ),
    Variable(
        "REINFORCE_JOB_NAME",
        "",
        "components are NAME-rm, NAME-actor and NAME-gen; else exp_manager.name",
    ),
    Variable(
        "REINFORCE_GENERATOR_NODES", "1", "nodes of external generators, which are component 2"
    ),
)


def variable_of(option: str) -> str:
    """Return the environment variable of an option, which is read where the option is not given."""
    return PREFIX + option.upper().replace("-", "_")


def _option_variables() -> Iterator[str]:
    for variable in (*VARIABLES, *JOB_VARIABLES):
        yield variable.name
    for name, option in COMPONENT_OPTIONS.items():
        for component in (ACTOR, SERVER, GENERATOR):
            yield variable_of(f"{component}-{name}")
        if option.both:
            yield variable_of(option.both)


OPTION_VARIABLES = frozenset(_option_variables())
# Set by the plan; every other job variable has an option of the same name.
PLANNED = (names.RUN_DIR,)


@dataclass(frozen=True)
class Options:
    actor_args: tuple[str, ...]  # Hydra overrides
    server_args: tuple[str, ...]  # Hydra overrides
    actor: ComponentOptions
    server: ComponentOptions
    generator: ComponentOptions
    generator_nodes: int
    time: str  # limit, as written
    seconds: int | None  # limit; None for none
    lead: int | None  # seconds before the limit; None if not given
    job_name: str | None  # None for the configuration's
    chain: int  # number of consecutive jobs
    dry_run: bool  # print the plan only
    variables: Mapping[str, str]  # the job's variables that are set
    faults: tuple[str, ...] = ()  # of values; those fields have their defaults


def parse_options(argv: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Parse `[options] ACTOR_OVERRIDE... [-- SERVER_OVERRIDE...]`; options not given come from the
    environment.
    """
    option_args, server_args = split_arguments(argv)
    args = _parser().parse_intermixed_args(list(option_args))
    faults: list[str] = []

    def text(*names: str, last: str = "") -> str | None:
        """Return the first of these options, then of their variables, then `last`, that is not
        empty.
        """
        given = [getattr(args, name.replace("-", "_")) for name in names]
        variables = [*map(variable_of, names), last]
        return next(
            filter(None, [*given, *(environment.get(name, "").strip() for name in variables)]), None
        )

    def parsed(option: str, text: str | None, parse: Callable[[str], Any]) -> Any:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            faults.append(
                Fault(
                    f"{option} is '{text}'; expected {error}",
                    key="slurm.option.invalid",
                )
            )
            return None

    def component(which: str) -> ComponentOptions:
        values = {}
        for name, option in COMPONENT_OPTIONS.items():
            given = text(
                *filter(None, (f"{which}-{name}", option.both)), last=option.sbatch_variable
            )
            is_valid = parsed(f"--{which}-{name}", given, option.parse) is not None
            values[name.replace("-", "_")] = given if is_valid else None
        extra = [*(args.sbatch_arg or ()), *(getattr(args, f"{which}_sbatch_arg") or ())]
        return ComponentOptions(**values, sbatch_args=tuple(extra))

    time = text("time") or JOB_VARIABLES[0].default
    variables = {
        v.name: given for v in VARIABLES if v.name not in PLANNED and (given := text(v.option))
    }
    return Options(
        actor_args=tuple(args.overrides),
        server_args=server_args,
        time=time,
        seconds=parsed("--time", time, parse_time),
        lead=parsed("--signal-lead", text("signal-lead"), count_from(1)),
        chain=parsed("--chain", args.chain, count_from(1)) or 1,
        actor=component(ACTOR),
        server=component(SERVER),
        generator=component(GENERATOR),
        generator_nodes=parsed("--generator-nodes", text("generator-nodes"), count_from(1)) or 1,
        job_name=text("job-name"),
        dry_run=args.dry_run,
        variables=variables,
        faults=tuple(faults),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program_name(),
        description="Plan, check and submit a Slurm job of reward servers (component 0), actor "
        "(component 1) and, with placement=disaggregated and no generation_ranks, external "
        "generators (component 2).",
        usage="%(prog)s [options] ACTOR_OVERRIDE... [-- SERVER_OVERRIDE...]",
        epilog="Overrides are Hydra's, as `reinforce-rl train` and `reinforce-rl serve` take "
        "them. An option that is not given is read from the variable REINFORCE_OPTION, such as "
        "REINFORCE_PARTITION or REINFORCE_ACTOR_PARTITION.",
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="ACTOR_OVERRIDE", help="KEY=VALUE")
    parser.add_argument(
        "--dry-run", action="store_true", help="check and print the plan; make and submit nothing"
    )
    parser.add_argument(
        "--chain",
        default="1",
        metavar="N",
        help="number of jobs, each starting after the previous one ends",
    )
    _add_variables(parser, JOB_VARIABLES)
    sbatch = parser.add_argument_group(
        "nodes; --actor-X, --server-X and --generator-X are for one component"
    )
    for name, option in COMPONENT_OPTIONS.items():
        if option.both:
            sbatch.add_argument(f"--{option.both}", metavar=option.metavar, help=option.meaning)
        for component in (ACTOR, SERVER, GENERATOR):
            help = argparse.SUPPRESS if option.both == name else option.meaning
            sbatch.add_argument(f"--{component}-{name}", metavar=option.metavar, help=help)
    sbatch.add_argument(
        "--sbatch-arg", action="append", metavar="ARG", help="as in --sbatch-arg=--reservation=X"
    )
    for component in (ACTOR, SERVER, GENERATOR):
        sbatch.add_argument(
            f"--{component}-sbatch-arg", action="append", metavar="ARG", help=argparse.SUPPRESS
        )
    _add_variables(
        parser.add_argument_group("the job"), [v for v in VARIABLES if v.name not in PLANNED]
    )
    return parser


def _add_variables(group: argparse._ActionsContainer, variables: Sequence[Variable]) -> None:
    for variable in variables:
        is_seconds = "SECONDS" in variable.name or variable.name.endswith("LEAD")
        default = f" ({variable.default})" if variable.default else ""
        metavar = "SECONDS" if is_seconds else "VALUE"
        group.add_argument(f"--{variable.option}", metavar=metavar, help=variable.meaning + default)
