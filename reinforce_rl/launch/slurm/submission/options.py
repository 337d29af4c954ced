"""The command line of `slurm/submit.py`, and the variables that its defaults come from."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reinforce_rl.launch.slurm import settings as names
from reinforce_rl.launch.slurm.settings import VARIABLES, Variable, split_arguments

DEFAULT_TIME = "04:00:00"
ACTOR, SERVER = "actor", "server"


@dataclass(frozen=True)
class ComponentOption:
    """An option that both components have: `--NAME` for both, `--actor-NAME` and `--server-NAME` for one.

    Attributes:
        name: without dashes.
        metavar: of its value.
        meaning: for people.
        sbatch_variable: of sbatch itself, which it would follow where nothing is given here; empty for none.
        common: the option of both, where that is not `--NAME`; None where there is no such option.
    """

    name: str
    metavar: str
    meaning: str
    sbatch_variable: str = ""
    common: str | None = ""

    def option(self, component: str | None) -> str | None:
        """On the command line; for both components where none is given."""
        if component is not None:
            return f"--{component}-{self.name}"
        return None if self.common is None else f"--{self.common or self.name}"

    def variables(self, component: str) -> list[str]:
        """Environment variables, the first one that is set counts."""
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
    Variable("REINFORCE_SIGNAL_LEAD", "", "seconds before the limit at which the run is told to save"),
    Variable("REINFORCE_JOB_NAME", "", "components are NAME-rm and NAME-actor; else exp_manager.name"),
)
# What the plan sets itself; every other variable of the job has an option of the same name.
PLANNED = (names.RUN_DIR, names.ACTOR_DEVICES, names.SERVER_DEVICES, names.REPOSITORY)


@dataclass(frozen=True)
class ComponentOptions:
    """Of one component, as texts; None where nothing is given. `COMPONENT_OPTIONS` says what they mean.

    Attributes:
        sbatch_args: handed to sbatch as they are.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    gpus: str | None = None
    cpus_per_task: str | None = None
    mem: str | None = None
    sbatch_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """What the command line and the environment ask for, not checked yet.

    Attributes:
        actor_args, server_args: Hydra overrides.
        actor, server: of the components.
        time: a time limit as Slurm reads it.
        signal_lead: seconds, as a text; None: of the run's last save, or a default.
        job_name: None: of the configuration.
        chain: links, as a text.
        dry_run: print the plan only.
        variables: that set the job up, with their values, as far as options or the environment give them.
    """

    actor_args: tuple[str, ...]
    server_args: tuple[str, ...]
    actor: ComponentOptions
    server: ComponentOptions
    time: str
    signal_lead: str | None
    job_name: str | None
    chain: str
    dry_run: bool
    variables: tuple[tuple[str, str], ...]


def parse_options(argv: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Read the command line; an option that is not given is looked up in the environment.

    Args:
        argv: [options] ACTOR_OVERRIDE... [-- SERVER_OVERRIDE...]
        environment: variables.
    """
    own, server_args = split_arguments(argv)
    args = _parser().parse_intermixed_args(list(own))
    given = vars(args)

    def of(name: str, variable: str) -> str | None:
        return given[name] or environment.get(variable, "").strip() or None

    variables = {
        v.name: given[_destination(v.name)] or environment.get(v.name, "").strip()
        for v in VARIABLES
        if v.name not in PLANNED
    }
    return Options(
        actor_args=tuple(args.overrides),
        server_args=server_args,
        actor=_component(ACTOR, given, environment),
        server=_component(SERVER, given, environment),
        time=of("time", "REINFORCE_TIME") or DEFAULT_TIME,
        signal_lead=of("signal_lead", "REINFORCE_SIGNAL_LEAD"),
        job_name=of("job_name", "REINFORCE_JOB_NAME"),
        chain=args.chain,
        dry_run=args.dry_run,
        variables=tuple((name, value) for name, value in variables.items() if value),
    )


def _component(component: str, given: Mapping[str, str | None], environment: Mapping[str, str]) -> ComponentOptions:
    """The component's own option counts before that of both, and the command line before the environment."""
    values: dict[str, str | None] = {}
    for option in COMPONENT_OPTIONS:
        options = (option.option(component), option.option(None))
        written = [given[name[2:].replace("-", "_")] for name in options if name]
        found = [environment.get(variable, "").strip() for variable in option.variables(component)]
        values[option.name.replace("-", "_")] = next(filter(None, [*written, *found]), None)
    extra = [*(given["sbatch_arg"] or ()), *(given[f"{component}_sbatch_arg"] or ())]
    return ComponentOptions(**values, sbatch_args=tuple(extra))


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
    parser.add_argument("--chain", default="1", metavar="N", help="so many jobs, each after the end of the last")
    for variable in JOB_VARIABLES:
        help = f"{variable.meaning}{f' ({variable.default})' if variable.default else ''}"
        parser.add_argument(_option(variable), metavar=_metavar(variable), help=help)
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
    job = parser.add_argument_group("the job")
    for variable in VARIABLES:
        if variable.name not in PLANNED:
            help = f"{variable.meaning}{f' ({variable.default})' if variable.default else ''}"
            job.add_argument(_option(variable), metavar=_metavar(variable), help=help)
    return parser


def _option(variable: Variable) -> str:
    return f"--{_destination(variable.name).replace('_', '-')}"


def _metavar(variable: Variable) -> str:
    return "SECONDS" if "seconds" in variable.name.lower() or variable.name.endswith("LEAD") else "VALUE"
