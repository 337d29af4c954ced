"""From options and configurations to the plan of a job, with every fault on the way."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from reinforce_rl.config.overrides import override_of
from reinforce_rl.config.schema import TrainConfig
from reinforce_rl.errors import ConfigError
from reinforce_rl.launch.cli import compose
from reinforce_rl.launch.slurm import settings as names
from reinforce_rl.launch.slurm.settings import SEPARATOR, Settings, read_settings
from reinforce_rl.launch.slurm.submission.options import ACTOR, SERVER, ComponentOptions, Options
from reinforce_rl.launch.slurm.submission.plan import Component, JobPlan, default_lead, lead_faults, tasks_of
from reinforce_rl.launch.slurm.submission.values import Gpus, parse_memory, parse_time
from reinforce_rl.preflight.run import Examination, examine, host_memory_of_node
from reinforce_rl.reward_server.checks import model_faults, serves_function
from reinforce_rl.rewards.wire import DEFAULT_NAME
from reinforce_rl.runtime.status import read_status

T = TypeVar("T")
ACTOR_CONFIG, SERVER_CONFIG = "train_reinforce_actor", "serve_reward_model"
RUN_DIR_KEY = "exp_manager.explicit_log_dir"
BATCH_FILE = Path("slurm") / "train_hetjob.sbatch"


@dataclass(frozen=True)
class Request:
    """A job that was asked for.

    Attributes:
        plan: None where faults leave nothing to plan.
        run_dir: of the run, absolute.
        actor_megabytes: of host memory that the ranks of one actor node need; None where it is not known.
        faults: what is wrong; one sentence each.
        warnings: what may be.
    """

    plan: JobPlan | None
    run_dir: Path
    actor_megabytes: int | None
    faults: tuple[str, ...]
    warnings: tuple[str, ...]


def make_request(options: Options, environment: Mapping[str, str], repository: Path, console: Console) -> Request:
    """Read and check all that needs no cluster.

    Args:
        options: what was asked for.
        environment: of this process; its variables of the job are defaults.
        repository: where the programs are.
        console: for the trainer's own plan, which is printed where its configuration has no faults.
    """
    faults = _Faults()
    actor_cfg = faults.attempt(lambda: compose(ACTOR_CONFIG, options.actor_args))
    run_dir = _run_dir(options, actor_cfg, environment)
    # The job itself says this one, so that it is absolute and the same for all.
    actor_args = tuple(arg for arg in options.actor_args if arg.partition("=")[0].lstrip("+") != RUN_DIR_KEY)
    if actor_cfg is not None:
        OmegaConf.update(actor_cfg, RUN_DIR_KEY, str(run_dir))
    server_cfg = faults.attempt(lambda: compose(SERVER_CONFIG, options.server_args))
    actor = None if actor_cfg is None else examine(actor_cfg, console, here=False)
    if actor is not None:
        faults.found += actor.faults
    cfg = None if actor is None else actor.config
    if cfg is not None:
        faults.found += _actor_faults(cfg, options)
    if server_cfg is not None:
        faults.found += _server_faults(server_cfg)
    settings = _settings(options, actor_args, run_dir, repository, environment, faults)
    asked = _asked(options, run_dir, faults)
    if cfg is not None:
        faults.found += _gpu_faults(ACTOR, asked.actor, cfg.trainer.devices)
    if server_cfg is not None:
        faults.found += _gpu_faults(SERVER, asked.server, server_cfg.devices)
    plan = None
    if cfg is not None and server_cfg is not None:
        plan = _plan(options, asked, cfg, server_cfg, settings)
    megabytes = _megabytes(actor)
    warnings = [] if cfg is None else list(_warnings(cfg, plan, megabytes))
    return Request(plan, run_dir, megabytes, tuple(faults.found), tuple(warnings))


@dataclass
class _Faults:
    found: list[str] = field(default_factory=list)

    def attempt(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except ConfigError as error:
            self.found += error.faults
            return None

    def value(self, option: str, action: Callable[[], T], default: T) -> T:
        """Of an option whose text may be none of its kind."""
        try:
            return action()
        except ValueError as error:
            self.found.append(f"{option} is {error}")
            return default

    def count(self, option: str, text: str | None) -> int | None:
        """A whole number from 1; None where nothing is given."""
        if text is None or (text.isdecimal() and int(text) > 0):
            return None if text is None else int(text)
        self.found.append(f"{option} is '{text}'; expected a whole number from 1")
        return None


def _run_dir(options: Options, cfg: DictConfig | None, environment: Mapping[str, str]) -> Path:
    given = environment.get(names.RUN_DIR, "").strip()
    own = override_of(options.actor_args, RUN_DIR_KEY)
    if own is not None or not given:
        given = own or "."
        # What cannot be resolved is among the faults of the configuration.
        with contextlib.suppress(OmegaConfBaseException):
            given = given if cfg is None else str(cfg.exp_manager.explicit_log_dir)
    return Path(given).absolute()


def _actor_faults(cfg: TrainConfig, options: Options) -> Iterator[str]:
    if cfg.preflight:
        yield f"preflight is {str(cfg.preflight).lower()}, with which a job would end at once; use --dry-run"
    if cfg.reward != "server":
        yield (
            f"reward is '{cfg.reward}', with which the trainer needs no reward server, and this job starts one; give "
            "the function to the server (-- reward_function.name=NAME), or start the trainer alone"
        )
    if not cfg.exp_manager.resume_if_exists:
        yield (
            "exp_manager.resume_if_exists is false: a job that is requeued or follows another one would begin again; "
            "expected true"
        )
    name = override_of(options.actor_args, "remote_rm.reward_model.name")
    served = override_of(options.server_args, "inference.name") or DEFAULT_NAME
    if name is not None and name != served:
        yield (
            f"remote_rm.reward_model.name is {name}, but the server's inference.name is {served}; expected the same, "
            "or only the latter"
        )


def _server_faults(cfg: DictConfig) -> list[str]:
    if not serves_function(cfg):
        return model_faults(cfg)
    if (cfg.num_nodes, cfg.devices) != (1, 1):
        return [f"num_nodes x devices is {cfg.num_nodes} x {cfg.devices}, but one process serves a reward function"]
    return []


def _settings(
    options: Options,
    actor_args: tuple[str, ...],
    run_dir: Path,
    repository: Path,
    environment: Mapping[str, str],
    faults: _Faults,
) -> Settings:
    """What the job will read, but for what follows from the configurations; defaults where it is wrong."""
    variables = {**dict(options.variables), names.RUN_DIR: str(run_dir)}
    if not any(name in variables for name in (names.PYTHON, names.CONTAINER_IMAGE, names.SERVER_CONTAINER_IMAGE)):
        variables[names.PYTHON] = sys.executable
    argv = [*actor_args, SEPARATOR, *options.server_args]
    found = faults.attempt(lambda: read_settings(argv, variables, repository))
    return found or Settings(run_dir, repository, actor_args=actor_args, server_args=options.server_args)


@dataclass(frozen=True)
class _Values:
    """Of a component's options."""

    cpus_per_task: int | None
    gpus: Gpus | None
    megabytes: int | None


@dataclass(frozen=True)
class _Asked:
    """The values of options; defaults where they are wrong."""

    seconds: int | None
    lead: int
    chain: int
    actor: _Values
    server: _Values


def _asked(options: Options, run_dir: Path, faults: _Faults) -> _Asked:
    status = read_status(run_dir)
    save_seconds = None if status is None else status.save_seconds
    before = len(faults.found)
    seconds = faults.value("--time", lambda: parse_time(options.time), None)
    lead = faults.count("--signal-lead", options.signal_lead) or default_lead(save_seconds)
    if len(faults.found) == before:
        faults.found += lead_faults(lead, seconds, save_seconds)
    return _Asked(
        seconds=seconds,
        lead=lead,
        chain=faults.count("--chain", options.chain) or 1,
        actor=_values(ACTOR, options.actor, faults),
        server=_values(SERVER, options.server, faults),
    )


def _values(component: str, options: ComponentOptions, faults: _Faults) -> _Values:
    gpus, mem = options.gpus, options.mem
    return _Values(
        cpus_per_task=faults.count(f"--{component}-cpus-per-task", options.cpus_per_task),
        gpus=None if gpus is None else faults.value(f"--{component}-gpus", lambda: Gpus.parse(gpus), None),
        megabytes=None if mem is None else faults.value(f"--{component}-mem", lambda: parse_memory(mem), None),
    )


def _gpu_faults(component: str, values: _Values, ranks: object) -> list[str]:
    if values.gpus is None or not isinstance(ranks, int) or values.gpus.count >= ranks:
        return []
    return [f"--{component}-gpus is {values.gpus}, for {ranks} ranks of a node; expected a GPU for each"]


def _plan(options: Options, asked: _Asked, cfg: TrainConfig, server: DictConfig, settings: Settings) -> JobPlan | None:
    of_actor, of_server = (cfg.trainer.num_nodes, cfg.trainer.devices), (server.num_nodes, server.devices)
    if not all(isinstance(number, int) and number > 0 for number in (*of_actor, *of_server)):
        return None  # which the programs' own faults say
    base = options.job_name or cfg.exp_manager.name
    gpu = cfg.trainer.precision == "bf16"  # which nobody uses on a CPU
    serves_model = not serves_function(server)
    components = []
    for name, job_name, (nodes, ranks), own, values, on_gpu in (
        (
            f"reward {SERVER}{'s' if settings.servers > 1 else ''}",
            f"{base}-rm",
            (settings.servers * of_server[0], of_server[1]),
            options.server,
            asked.server,
            gpu and serves_model,
        ),
        (ACTOR, f"{base}-actor", of_actor, options.actor, asked.actor, gpu),
    ):
        tasks, cpus = tasks_of(ranks, settings.launcher, values.cpus_per_task)
        gpus = values.gpus if own.gpus is not None or not on_gpu else Gpus(ranks)
        components.append(Component(name, job_name, nodes, ranks, tasks, cpus, gpus, values.megabytes, own))
    variables = {
        names.RUN_DIR: str(settings.run_dir),
        names.REPOSITORY: str(settings.repository),
        **({names.PYTHON: settings.python} if settings.python else {}),
        **dict(options.variables),
        names.ACTOR_DEVICES: str(of_actor[1]),
        names.SERVER_DEVICES: str(of_server[1]),
    }
    return JobPlan(
        server=components[0],
        actor=components[1],
        time=options.time,
        seconds=asked.seconds,
        lead=asked.lead,
        chain=asked.chain,
        run_dir=settings.run_dir,
        batch_file=settings.repository / BATCH_FILE,
        actor_args=settings.actor_args,
        server_args=settings.server_args,
        variables=tuple(variables.items()),
    )


def _megabytes(actor: Examination | None) -> int | None:
    if actor is None or not actor.memory:
        return None
    return math.ceil(host_memory_of_node(actor.config, actor.memory) / 2**20)


def _warnings(cfg: TrainConfig, plan: JobPlan | None, megabytes: int | None) -> Iterator[str]:
    if cfg.trainer.reinforce.save_interval == 0:
        yield "trainer.reinforce.save_interval is 0: the death of a node loses all that the job has trained"
    limit = None if plan is None else plan.actor.megabytes
    if megabytes and limit and megabytes > limit:
        yield f"the actor's ranks need up to {megabytes} MB of host memory a node, and --mem gives them {limit} MB"
