"""Take values from a run's folder, but no authority.

Users trust their command line. They need not trust a folder that they open, which may name programs
to run, files to read, and addresses to ask and to send data to. So the folder's files are never on
the import path. A function, address, token, interpreter or class that only the folder names is used
only with --trust, which lists all of them first. The number of processes that a folder can start is
bounded by the machine's cores. `stored_config` reads the configuration.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.engines import ENGINES
from reinforce_rl.config.generation_rules import GENERATIONS
from reinforce_rl.config.rewards import RewardServerConfig
from reinforce_rl.data.data_prefix import sets_of
from reinforce_rl.data.readers import is_hub_name
from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.utils.process import PACKAGE_PARENT

_SHOWN = 200  # characters of a value in a message
_CORES = os.cpu_count() or 1
# Bounds on the processes that a folder may request; a machine of few cores allows several, too.
MOST_RANKS = max(_CORES, 8)
MOST_WORKERS = max(_CORES, 64)


@dataclass(frozen=True)
class Authority:
    """A setting that decides what is run, asked, read or sent, or that starts many processes."""

    key: str
    value: Any
    effect: str

    def __str__(self) -> str:
        return f"{self.key} is {str(self.value)[:_SHOWN]!r}, {self.effect}"


def without_custom_generator(tree: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the native generator in place of a custom class.

    Even the name of a custom class would import its packages.
    """
    return (
        tree
        if tree.get("generation", "native") in GENERATIONS
        else {**tree, "generation": "native"}
    )


def remove_from_import_path(folder: str | Path) -> None:
    """Remove a folder and everything in it from `sys.path`.

    A command that was started there has the folder on its path. Without it, Hydra finds no plugins
    in it, and child processes do not get it as PYTHONPATH.
    """
    root = Path(os.path.realpath(folder))
    # This program and its environment are trusted, even if they lie in the folder.
    kept = [
        Path(os.path.realpath(place)) for place in (sys.prefix, sys.base_prefix, PACKAGE_PARENT)
    ]

    def is_inside(entry: str) -> bool:
        real = Path(os.path.realpath(entry or os.curdir))
        is_kept = any(real.is_relative_to(place) for place in kept if place != root)
        return real.is_relative_to(root) and not is_kept

    sys.path[:] = [entry for entry in sys.path if not is_inside(entry)]


def authorities(
    cfg: TrainConfig,
    *,
    rewards: bool = True,
    generation: bool = True,
    data: bool = False,
    ranks: bool = False,
) -> list[Authority]:
    """Return the authorities in the used parts of a configuration."""
    settings: list[Authority] = []
    if ranks:
        settings += _of_ranks(cfg)
    if data:
        settings += _of_data(cfg)
    if rewards:
        settings += _of_functions(cfg)
        settings += _of_environment(cfg)
        settings += _of_servers(cfg)
    if generation and cfg.generation not in GENERATIONS:
        settings.append(
            Authority("generation", cfg.generation, "a class that is imported and generates")
        )
    if generation and cfg.generation in ENGINES and cfg.engine.python is not None:
        settings.append(Authority("engine.python", cfg.engine.python, "a program that is started"))
    return settings


def _of_ranks(cfg: TrainConfig) -> Iterator[Authority]:
    devices = cfg.trainer.devices
    num_nodes = cfg.trainer.num_nodes
    count = cfg.trainer.world_size
    if count <= MOST_RANKS:
        return
    effect = f"one factor of {count} ranks, {_expected(MOST_RANKS)}"
    if devices > 1:
        yield Authority("trainer.devices", devices, effect)
    if num_nodes > 1:
        yield Authority("trainer.num_nodes", num_nodes, effect)


def _expected(bound: int) -> str:
    return f"and at most {bound} processes are expected on this machine of {_CORES} cores"


def _of_data(cfg: TrainConfig) -> Iterator[Authority]:
    effect = "a data set fetched over the network with your token"
    for split, value in vars(cfg.model.data.data_prefix).items():
        for path in itertools.chain(*sets_of(value).values()):
            if is_hub_name(path):
                yield Authority(f"model.data.data_prefix.{split}", path, effect)


def _of_functions(cfg: TrainConfig) -> Iterator[Authority]:
    section = cfg.reward_function
    functions = cfg.reward_functions
    if cfg.reward_class is not None:
        yield Authority("reward", cfg.reward_class, "a class that is imported and computes rewards")
    for key, function in functions.items():
        yield Authority(f"{key}.name", function.name, "a function that is called")
        if function.kwargs:
            yield Authority(f"{key}.kwargs", function.kwargs, "arguments of that function")
    if functions and section.environment:
        yield Authority(
            "reward_function.environment", section.environment, "variables that functions see"
        )
    if functions and section.num_workers > MOST_WORKERS:
        effect = f"processes of functions, {_expected(MOST_WORKERS)}"
        yield Authority("reward_function.num_workers", section.num_workers, effect)


def _of_environment(cfg: TrainConfig) -> Iterator[Authority]:
    environment = cfg.environment
    if not cfg.has_environment:
        return
    yield Authority("environment.name", environment.name, "code that answers the policy")
    if environment.kwargs:
        yield Authority("environment.kwargs", environment.kwargs, "arguments of that code")
    if environment.variables:
        yield Authority("environment.variables", environment.variables, "variables that it sees")
    if environment.num_workers > MOST_WORKERS:
        effect = f"replies at a time, {_expected(MOST_WORKERS)}"
        yield Authority("environment.num_workers", environment.num_workers, effect)


def _of_servers(cfg: TrainConfig) -> Iterator[Authority]:
    default_port = RewardServerConfig().port
    for key, server in cfg.reward_servers.items():
        yield Authority(f"{key}.ip", server.ip, "an address that receives prompts and a token")
        # Another program may listen there, on a host that the reader trusts.
        if server.port != default_port:
            yield Authority(f"{key}.port", server.port, "the port of that address")
        if server.ready_files:
            yield Authority(
                f"{key}.ready_files", server.ready_files, "files that name such addresses"
            )
        if server.replicas:
            yield Authority(
                f"{key}.replicas", server.replicas, "addresses that receive prompts and a token"
            )
        if server.token_file is not None:
            yield Authority(f"{key}.token_file", server.token_file, "a file whose content is sent")


def untrusted_settings(
    cfg: TrainConfig,
    overrides: Sequence[str],
    *,
    rewards: bool = True,
    generation: bool = True,
    data: bool = False,
    ranks: bool = False,
) -> list[Authority]:
    """Return the authorities of the folder's configuration that no override sets."""
    given = set()
    for override in overrides:
        key, _, value = override.partition("=")
        # Hydra merges a mapping into the folder's mapping, whose other keys stay in force.
        if not value.lstrip().startswith("{"):
            given.add(key.lstrip("+~"))
    named = authorities(cfg, rewards=rewards, generation=generation, data=data, ranks=ranks)
    return [authority for authority in named if authority.key not in given]


def require_trust(
    cfg: TrainConfig,
    overrides: Sequence[str],
    folder: str | Path,
    *,
    trust: bool,
    rewards: bool = True,
    generation: bool = True,
    data: bool = False,
    ranks: bool = False,
    say: Callable[[str], object] = lambda text: None,
) -> None:
    """Check that a folder's configuration, with overrides, may be used.

    With `trust`, `say` lists the untrusted settings, and the folder is appended to `sys.path`,
    because `reinforce_rl.train` copies reward functions into it.

    Raises ConfigError: without `trust`, only the folder decides what is run, asked, read or sent,
    or it starts more processes than are expected on this machine.
    """
    used = {"rewards": rewards, "generation": generation, "data": data, "ranks": ranks}
    untrusted = untrusted_settings(cfg, overrides, **used)
    if not trust and untrusted:
        raise ConfigError([_not_trusted(authority, folder) for authority in untrusted])
    if trust:
        for authority in untrusted:
            say(f"Trusted, as {folder} has it: {authority}")
        sys.path.append(os.path.abspath(folder))


def _not_trusted(authority: Authority, folder: str | Path) -> Fault:
    return Fault(
        f"{authority}; only {folder} has this setting. Give {authority.key}=VALUE yourself, or "
        "--trust to use all settings of this folder",
        key="trust.setting.only_of_folder",
    )
