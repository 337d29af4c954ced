"""Turns options and configurations into the plan of a job, and collects all their faults."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from reinforce_rl.config import reward_server
from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.keys import override_of
from reinforce_rl.errors import ConfigError
from reinforce_rl.launch.cli import compose
from reinforce_rl.launch.slurm import settings as names
from reinforce_rl.launch.slurm.settings import SEPARATOR, Settings, read_settings
from reinforce_rl.launch.slurm.submission.options import (
    ACTOR,
    SERVER,
    ComponentOptions,
    Options,
    parse_gpus,
    parse_memory,
)
from reinforce_rl.launch.slurm.submission.plan import Component, JobPlan, default_lead, lead_faults, tasks_of
from reinforce_rl.preflight.run import Examination, examine, host_memory_of_node
from reinforce_rl.rewards.wire import DEFAULT_NAME
from reinforce_rl.runtime.status import read_status

T = TypeVar("T")
ACTOR_CONFIG, SERVER_CONFIG = "train_reinforce_actor", "serve_reward_model"
RUN_DIR_KEY = "exp_manager.explicit_log_dir"
BATCH_FILE = Path("slurm") / "train_hetjob.sbatch"


@dataclass(frozen=True)
class Request:
    plan: JobPlan | None  # None if there are faults that prevent one
    run_dir: Path  # absolute
    actor_megabytes: int | None  # host memory needed by the ranks of one actor node; None if unknown
    faults: tuple[str, ...]  # one sentence each, as the warnings
    warnings: tuple[str, ...]


def make_request(options: Options, environment: Mapping[str, str], repository: Path, console: Console) -> Request:
    """Check options and configurations, and plan the job; prints the trainer's own plan if it has no faults."""
    faults: list[str] = []
    actor_cfg = _attempt(lambda: compose(ACTOR_CONFIG, options.actor_args), faults)
    run_dir = _run_dir(options, actor_cfg, environment)
    # The job sets this key itself, to the absolute path.
    actor_args = tuple(arg for arg in options.actor_args if arg.partition("=")[0].lstrip("+") != RUN_DIR_KEY)
    if actor_cfg is not None:
        OmegaConf.update(actor_cfg, RUN_DIR_KEY, str(run_dir))
    server_cfg = _attempt(lambda: compose(SERVER_CONFIG, options.server_args), faults)
    actor = None if actor_cfg is None else examine(actor_cfg, console, here=False)
    if actor is not None:
        faults += actor.faults
    cfg = None if actor is None else actor.config
    if cfg is not None:
        faults += _actor_faults(cfg, options)
    if server_cfg is not None:
        faults += _server_faults(server_cfg)
    settings = _settings(options, actor_args, run_dir, repository, environment, faults)
    status = read_status(run_dir)
    save_seconds = None if status is None else status.save_seconds
    lead = options.lead or default_lead(save_seconds)
    faults += [*options.faults, *lead_faults(lead, options.seconds, save_seconds)]
    plan = None
    if cfg is not None:
        faults += _gpu_faults(ACTOR, options.actor, cfg.trainer.devices)
    if server_cfg is not None:
        faults += _gpu_faults(SERVER, options.server, server_cfg.devices)
    if cfg is not None and server_cfg is not None:
        plan = _plan(options, lead, cfg, server_cfg, settings)
    megabytes = _megabytes(actor)
    warnings = [] if cfg is None else list(_warnings(cfg, options, megabytes))
    return Request(plan, run_dir, megabytes, tuple(faults), tuple(warnings))


def _attempt(action: Callable[[], T], faults: list[str]) -> T | None:
    try:
        return action()
    except ConfigError as error:
        faults += error.faults
        return None


def _run_dir(options: Options, cfg: DictConfig | None, environment: Mapping[str, str]) -> Path:
    given = environment.get(names.RUN_DIR, "").strip()
    own = override_of(options.actor_args, RUN_DIR_KEY)
    if own is not None or not given:
        given = own or "."
        # Unresolvable values are among the configuration's faults.
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
    config, faults = reward_server.read_config(cfg)
    if config.serves_function and (cfg.num_nodes, cfg.devices) != (1, 1):
        faults.append(
            f"num_nodes x devices is {cfg.num_nodes} x {cfg.devices}, but one process serves a reward function"
        )
    return faults


def _settings(
    options: Options,
    actor_args: tuple[str, ...],
    run_dir: Path,
    repository: Path,
    environment: Mapping[str, str],
    faults: list[str],
) -> Settings:
    """Return the job's settings, without those derived from the configurations; defaults if there are faults."""
    variables = {**dict(options.variables), names.RUN_DIR: str(run_dir)}
    if not any(name in variables for name in (names.PYTHON, names.CONTAINER_IMAGE, names.SERVER_CONTAINER_IMAGE)):
        variables[names.PYTHON] = sys.executable
    argv = [*actor_args, SEPARATOR, *options.server_args]
    found = _attempt(lambda: read_settings(argv, variables, repository), faults)
    return found or Settings(run_dir, repository, actor_args=actor_args, server_args=options.server_args)


def _gpu_faults(component: str, options: ComponentOptions, ranks: object) -> list[str]:
    count = parse_gpus(options.gpus or "0")
    if not count or not isinstance(ranks, int) or count >= ranks:
        return []
    return [f"--{component}-gpus is {options.gpus}, for {ranks} ranks of a node; expected a GPU for each"]


def _plan(options: Options, lead: int, cfg: TrainConfig, server: DictConfig, settings: Settings) -> JobPlan | None:
    of_actor, of_server = (cfg.trainer.num_nodes, cfg.trainer.devices), (server.num_nodes, server.devices)
    if not all(isinstance(number, int) and number > 0 for number in (*of_actor, *of_server)):
        return None  # already among the programs' own faults
    base = options.job_name or cfg.exp_manager.name
    on_gpus = cfg.trainer.precision == "bf16"  # bf16 means GPUs

    def component(
        name: str, job_name: str, nodes: int, ranks: int, own: ComponentOptions, default_gpus: int
    ) -> Component:
        tasks, cpus = tasks_of(ranks, settings.launcher, own.cpus_per_task)
        gpus = own.gpus or str(default_gpus)
        return Component(name, job_name, nodes, ranks, tasks, cpus, gpus if parse_gpus(gpus) else None, own)

    of_servers = of_server[0] * settings.servers, of_server[1]
    server_gpus = of_server[1] if on_gpus and server.reward_function.name is None else 0
    servers = f"reward {SERVER}{'s' if settings.servers > 1 else ''}"
    variables = {
        names.RUN_DIR: str(settings.run_dir),
        names.REPOSITORY: str(settings.repository),
        **({names.PYTHON: settings.python} if settings.python else {}),
        **dict(options.variables),
        names.ACTOR_DEVICES: str(of_actor[1]),
        names.SERVER_DEVICES: str(of_server[1]),
    }
    return JobPlan(
        server=component(servers, f"{base}-rm", *of_servers, options.server, server_gpus),
        actor=component(ACTOR, f"{base}-actor", *of_actor, options.actor, of_actor[1] if on_gpus else 0),
        time=options.time,
        seconds=options.seconds,
        lead=lead,
        chain=options.chain,
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


def _warnings(cfg: TrainConfig, options: Options, megabytes: int | None) -> Iterator[str]:
    if cfg.trainer.reinforce.save_interval == 0:
        yield "trainer.reinforce.save_interval is 0: the death of a node loses all that the job has trained"
    limit = parse_memory(options.actor.mem or "0")
    if megabytes and limit and megabytes > limit:
        yield f"the actor's ranks need up to {megabytes} MB of host memory a node, and --mem gives them {limit} MB"
    if options.server.mem and not options.actor.mem:
        yield f"sbatch gives the actor the server's --mem={options.server.mem}, since it has no --actor-mem"
