"""Turns options and configurations into the plan of a job and its sbatch command, and collects all
faults.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.compose import compose
from reinforce_rl.config.load import read_config
from reinforce_rl.config.rewards import ServeRewardModelConfig
from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.launch.slurm import settings as names
from reinforce_rl.launch.slurm.options import ComponentOptions, Options, parse_gpus, parse_memory
from reinforce_rl.launch.slurm.script import BATCH_FILE, filled_script
from reinforce_rl.launch.slurm.settings import (
    ACTOR,
    GENERATOR,
    SEPARATOR,
    SERVER,
    Settings,
    override_of,
    read_settings,
    with_missing,
)
from reinforce_rl.preflight.run import examine, host_memory_of_node
from reinforce_rl.rewards.wire import DEFAULT_NAME
from reinforce_rl.runtime.status import read_status
from reinforce_rl.utils.console import Console

RUN_DIR_KEY = "exp_manager.explicit_log_dir"
DEFAULT_LEAD = 300
LEAST_LEAD = 120
# Slurm sends the signal up to a minute before the lead begins, and the job needs time to end.
LEAD_MARGIN = 60
MOST_LEAD = 65535  # Slurm keeps it in 16 bits


@dataclass(frozen=True)
class Component:
    name: str  # for people
    job_name: str  # differs by component, since a dependency by name would wait for itself
    nodes: int  # number of them
    ranks_per_node: int
    cpus_per_task: int | None = None  # None for Slurm's default
    gpus: str | None = None  # per node, as [TYPE:]COUNT; None for none
    options: ComponentOptions = field(default_factory=ComponentOptions)

    def requirements(self) -> list[str]:
        names = ("partition", "account", "qos", "constraint", "nodelist", "exclude")
        given = {name: getattr(self.options, name) for name in names}
        given |= {
            "nodes": self.nodes,
            "ntasks-per-node": self.ranks_per_node,
            "cpus-per-task": self.cpus_per_task,
        }
        given |= {"gpus-per-node": self.gpus, "mem": self.options.mem}
        words = [f"--{name}={value}" for name, value in given.items() if value is not None]
        return [*words, *self.options.sbatch_args]


@dataclass(frozen=True)
class JobPlan:
    server: Component
    actor: Component
    options: Options
    settings: Settings
    lead: int  # seconds from the save signal to the limit
    variables: Mapping[str, str]  # environment of the job
    generator: Component | None = None  # if generators are external

    @property
    def components(self) -> tuple[Component, ...]:
        return (self.server, self.actor, *filter(None, [self.generator]))

    def option_name(self, component: Component) -> str:
        """Return what the options of a component begin with."""
        return {self.server: SERVER, self.actor: ACTOR}.get(component, GENERATOR)

    @property
    def template(self) -> Path:
        folder = self.settings.repository / ("reinforce_rl" if self.settings.is_wheel else "")
        return folder / "slurm" / BATCH_FILE

    @property
    def script_settings(self) -> dict[str, str | int | Path | list[str]]:
        """What is filled into the job's script."""
        settings = self.settings
        is_in_container = bool(settings.container_image)
        python = settings.python or ("python3" if is_in_container else sys.executable)
        generator_ranks = override_of(settings.actor_args, "generation_tensor_parallel_size")
        return {
            "repository": settings.repository,
            "python": python,
            "batch_python": sys.executable if is_in_container else python,
            "servers": settings.servers,
            "generator_ranks": generator_ranks or "1",
            "generator_restarts": settings.generator_restarts,
            "srun_options": settings.srun_options,
            "setup": settings.setup or ":",
        }

    @property
    def script(self) -> str:
        return filled_script(self.template.read_text(encoding="utf-8"), self.script_settings)

    @property
    def batch_file(self) -> str:
        """Where the filled script stands once the job is submitted."""
        return str(self.settings.slurm_folder / BATCH_FILE)

    def command(self, *, after: str | None = None, test_only: bool = False) -> list[str]:
        """Return the sbatch command; it starts after the end of job `after`, successful or not."""
        first = ["--test-only"] if test_only else ["--parsable"]
        if self.options.seconds is not None:
            # on component 0, where the batch script runs
            first.append(f"--signal=B:USR1@{self.lead}")
        if after is not None:
            first.append(f"--dependency=afterany:{after}")
        server_args = self.settings.server_args
        overrides = [*self.settings.actor_args, *([SEPARATOR, *server_args] if server_args else [])]
        components = self._arguments(self.server)
        for component in self.components[1:]:
            # Otherwise it would inherit component 0's --exclude.
            reset = (
                ["--exclude="]
                if self.server.options.exclude and not component.options.exclude
                else []
            )
            components += [":", *reset, *self._arguments(component)]
        script = str(self.template) if test_only else self.batch_file
        return ["sbatch", *first, *components, script, *overrides]

    def test_command(self, component: Component, exclude: str = "") -> list[str]:
        """Return `sbatch --test-only` for one component as a job of its own, avoiding nodes
        `exclude` too.
        """
        excluded = component.options.exclude
        if excluded and "/" in excluded:  # a file of names
            excluded = ",".join(Path(excluded).read_text(encoding="utf-8").split())
        arguments = [f"--exclude={','.join(filter(None, [excluded, exclude]))}"] if exclude else []
        return ["sbatch", "--test-only", *self._arguments(component), *arguments, "--wrap=true"]

    def _arguments(self, component: Component) -> list[str]:
        # its folder must exist
        output = str(self.settings.slurm_folder).replace("%", "%%") + "/%j.out"
        both = [
            f"--time={self.options.time}",
            f"--output={output}",
            "--open-mode=append",
            "--requeue",
            "--export=ALL",
        ]
        return [*both, f"--job-name={component.job_name}", *component.requirements()]


@dataclass(frozen=True)
class Request:
    plan: JobPlan | None  # None if there are faults that prevent one
    run_dir: Path  # absolute
    actor_megabytes: int  # host memory needed by the ranks of one actor node; 0 if unknown
    faults: list[str]  # one sentence each, as the warnings
    warnings: list[str]


def make_request(
    options: Options, environment: Mapping[str, str], repository: Path, console: Console
) -> Request:
    """Check options and configurations, and plan the job; prints the trainer's own plan if it has
    no faults.
    """
    faults: list[str] = []

    def composed(name: str, args: Sequence[str]) -> DictConfig | None:
        try:
            return compose(name, args)
        except ConfigError as error:
            faults.extend(error.faults)
            return None

    actor_cfg = composed("train_reinforce_actor", options.actor_args)
    server_cfg = composed("serve_reward_model", options.server_args)
    run_dir = _run_dir(options, actor_cfg, environment)
    # The job sets this key itself, to the absolute path.
    actor_args = tuple(
        arg for arg in options.actor_args if arg.partition("=")[0].lstrip("+") != RUN_DIR_KEY
    )
    given = {names.RUN_DIR: str(run_dir), **options.variables}
    try:
        settings = read_settings([*actor_args, SEPARATOR, *options.server_args], given, repository)
    except ConfigError as error:
        faults += error.faults
        settings = Settings(
            run_dir, repository, actor_args=actor_args, server_args=options.server_args
        )
    status = read_status(run_dir)
    save_seconds = None if status is None else status.save_seconds
    lead = options.lead or default_lead(save_seconds)
    faults += [*options.faults, *lead_faults(lead, options.seconds, save_seconds)]
    server = None
    if server_cfg is not None:
        server, server_faults = read_config(server_cfg, ServeRewardModelConfig)
        faults += [*server_faults, *_gpu_faults(SERVER, options.server, server.devices)]
    if actor_cfg is None:
        return Request(None, run_dir, 0, faults, [])
    OmegaConf.update(actor_cfg, RUN_DIR_KEY, str(run_dir))
    precision = str(OmegaConf.select(actor_cfg, "trainer.precision"))
    actor = examine(actor_cfg, console, here=False)
    cfg = actor.config
    faults += [
        *actor.faults,
        *_actor_faults(cfg, options),
        *_gpu_faults(ACTOR, options.actor, cfg.trainer.devices),
    ]
    if cfg.uses_external_generators:
        size = cfg.generation_tensor_parallel_size
        ranks = settings.generator_devices or size
        faults += _gpu_faults(GENERATOR, options.generator, ranks)
        if ranks % size:
            faults.append(
                Fault(
                    f"--generator-devices is {ranks}, and generation_tensor_parallel_size is "
                    f"{size}; expected a multiple of {size}, as all ranks of a generator are on "
                    "one node",
                    key="slurm.generators.not_a_multiple",
                )
            )
    megabytes = math.ceil(host_memory_of_node(cfg, actor.memory) / 2**20) if actor.memory else 0
    variables = {name: given[name] for name in names.OF_JOB if name in given}
    plan = None if server is None else _plan(options, lead, cfg, server, settings, variables)
    warnings = list(_warnings(cfg, options, megabytes, precision))
    return Request(plan, run_dir, megabytes, faults, warnings)


def _run_dir(options: Options, cfg: DictConfig | None, environment: Mapping[str, str]) -> Path:
    given = environment.get(names.RUN_DIR, "").strip()
    override = override_of(options.actor_args, RUN_DIR_KEY)
    if override is not None or not given:
        given = override or "."
        # Unresolvable values are among the configuration's faults.
        with contextlib.suppress(OmegaConfBaseException):
            given = given if cfg is None else str(cfg.exp_manager.explicit_log_dir)
    return Path(given).absolute()


def default_lead(save_seconds: float | None) -> int:
    return (
        DEFAULT_LEAD
        if save_seconds is None
        else max(LEAST_LEAD, math.ceil(2 * save_seconds) + LEAD_MARGIN)
    )


def lead_faults(lead: int, seconds: int | None, save_seconds: float | None) -> Iterator[Fault]:
    """Check a lead against Slurm's range, the time limit and the run's last save, all in
    seconds.
    """
    if lead > MOST_LEAD:
        yield Fault(
            f"--signal-lead is {lead} s; expected at most {MOST_LEAD} s, Slurm's limit",
            key="slurm.signal_lead.too_long",
        )
    if seconds is not None and lead + LEAD_MARGIN >= seconds:
        yield Fault(
            f"--signal-lead is {lead} s and --time is {seconds} s, so the run would have to save "
            f"as soon as it starts; expected --time above {lead + LEAD_MARGIN} s, or a shorter "
            "lead",
            key="slurm.signal_lead.no_time_to_train",
        )
    if save_seconds is not None and lead < save_seconds + LEAD_MARGIN:
        least = math.ceil(save_seconds) + LEAD_MARGIN
        yield Fault(
            f"--signal-lead is {lead} s, but the last save took {save_seconds:.0f} s; expected at "
            f"least {least} s",
            key="slurm.signal_lead.shorter_than_save",
        )


def _actor_faults(cfg: TrainConfig, options: Options) -> Iterator[str]:
    if cfg.preflight:
        yield Fault(
            f"preflight is {str(cfg.preflight).lower()}, with which a job would end at once; "
            "expected false; use --dry-run to look at the plan",
            key="slurm.preflight.in_a_job",
        )
    if not cfg.uses_reward_model:
        to_server = ""
        if cfg.reward_functions:
            to_server = "give the function to the server (-- reward_function.name=NAME), or "
        yield Fault(
            f"reward is '{cfg.reward}', which needs no reward server, and this job starts one; "
            f"{to_server}start the trainer alone",
            key="slurm.servers.not_needed",
        )
    if not cfg.exp_manager.resume_if_exists:
        yield Fault(
            "exp_manager.resume_if_exists is false, so a requeued or later job would begin again; "
            "expected true",
            key="slurm.resume.off",
        )
    name = override_of(options.actor_args, "remote_rm.reward_model.name")
    served = override_of(options.server_args, "inference.name") or DEFAULT_NAME
    if name is not None and name != served:
        yield Fault(
            f"remote_rm.reward_model.name is {name}, but the server's inference.name is {served}; "
            "expected the same name",
            key="slurm.servers.other_name",
        )


def _gpu_faults(component: str, options: ComponentOptions, ranks: int) -> Iterator[str]:
    if 0 < parse_gpus(options.gpus or "0") < ranks:
        yield Fault(
            f"--{component}-gpus is {options.gpus}, but a node has {ranks} ranks; expected a GPU "
            "for each",
            key="slurm.gpus.too_few",
        )


def _plan(
    options: Options,
    lead: int,
    cfg: TrainConfig,
    server: ServeRewardModelConfig,
    settings: Settings,
    variables: dict[str, str],
) -> JobPlan | None:
    actor_layout = (cfg.trainer.num_nodes, cfg.trainer.devices)
    server_layout = (server.num_nodes, server.devices)
    if min(*actor_layout, *server_layout) < 1:
        return None  # already among the programs' own faults
    base = options.job_name or cfg.exp_manager.name
    on_gpus = cfg.trainer.implies_gpus

    def component(
        name: str, job: str, nodes: int, ranks: int, requested: ComponentOptions, needs_gpus: bool
    ) -> Component:
        cpus = int(requested.cpus_per_task) if requested.cpus_per_task else None
        gpus = requested.gpus or (str(ranks) if needs_gpus else "0")
        gpus = gpus if parse_gpus(gpus) else None
        return Component(name, f"{base}-{job}", nodes, ranks, cpus, gpus, requested)

    nodes = server_layout[0] * settings.servers
    ranks = server_layout[1]
    servers = f"reward {SERVER}{'s' if settings.servers > 1 else ''}"
    of_server = component(
        servers, "rm", nodes, ranks, options.server, on_gpus and not server.serves_function
    )
    of_actor = component(ACTOR, ACTOR, *actor_layout, options.actor, on_gpus)
    of_generator = None
    if cfg.uses_external_generators:
        size = cfg.generation_tensor_parallel_size
        ranks = settings.generator_devices or size
        of_generator = component(
            f"{GENERATOR}s", "gen", options.generator_nodes, ranks, options.generator, on_gpus
        )
        # The script cannot read the configuration.
        overrides = {"generation_tensor_parallel_size": size} if size > 1 else {}
        settings = replace(settings, actor_args=tuple(with_missing(settings.actor_args, overrides)))
    return JobPlan(of_server, of_actor, options, settings, lead, variables, of_generator)


def _warnings(cfg: TrainConfig, options: Options, megabytes: int, precision: str) -> Iterator[str]:
    """Yield sentences; `precision` is the configuration's, before `auto` is resolved."""
    if precision == "auto" and not cfg.trainer.implies_gpus and not options.actor.gpus:
        yield (
            "trainer.precision is auto and this machine has no GPU, so the job requests none; "
            "expected trainer.precision=bf16 for a run on GPUs, or 32 for one on CPUs"
        )
    if cfg.trainer.reinforce.save_interval == 0:
        yield (
            "trainer.reinforce.save_interval is 0: the death of a node loses all that the job has "
            "trained"
        )
    limit = parse_memory(options.actor.mem or "0")
    if megabytes and limit and megabytes > limit:
        yield (
            f"the actor's ranks need up to {megabytes} MB of host memory a node, and --mem gives "
            f"them {limit} MB"
        )
    others = {
        ACTOR: options.actor,
        **({GENERATOR: options.generator} if cfg.uses_external_generators else {}),
    }
    for name, component in others.items():
        if options.server.mem and not component.mem:
            yield (
                f"sbatch gives the {name} the server's --mem={options.server.mem}, since it has "
                f"no --{name}-mem"
            )
