"""What is taken from a run's folder: values, never authority.

Whoever opens a folder trusts their own command line, and not what the folder says is to be run, asked, read or sent.
So its configuration is parsed within bounds and without interpolations, which could read the reader's environment; its
own files are never on the import path; and no function, address, token, interpreter or class that the folder alone
names is used, unless --trust allows it, after all of them have been listed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.errors import ConfigError, DataError

MAX_CONFIG_BYTES = 1 << 20
MAX_CONFIG_DEPTH = 32
SHIPPED_GENERATION = ("native", "vllm", "tensorrt_llm")
INTERPOLATION = "${"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SHOWN = 200  # characters of a value in a message


@dataclass(frozen=True)
class Authority:
    """A setting that says what is run, asked, read or sent."""

    key: str
    value: Any
    effect: str

    def __str__(self) -> str:
        return f"{self.key} is {str(self.value)[:_SHOWN]!r}, {self.effect}"


def parse_stored(text: str, where: str) -> dict[str, Any]:
    """Parse a configuration that lies in a folder; interpolations are kept as texts.

    Raises DataError, which begins with `where`, for what is no mapping, is too large or too deep, or has aliases,
    whose expansion has no bound.
    """
    if len(text) > MAX_CONFIG_BYTES:
        raise DataError(f"{where}: {len(text)} characters; expected a configuration of at most {MAX_CONFIG_BYTES}")
    try:
        _check_form(text, where)
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError, ValueError) as error:
        raise DataError(f"{where}: not valid YAML ({str(error)[:_SHOWN]}); restore it or take it away") from error
    if not isinstance(tree, dict):
        kind = type(tree).__name__
        raise DataError(f"{where}: found a {kind}, expected keys with values; restore it or take it away")
    return {str(key): value for key, value in tree.items()}


def _check_form(text: str, where: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise DataError(f"{where}, line {event.start_mark.line + 1}: an alias (*{event.anchor}); expected values")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_CONFIG_DEPTH:
            line = event.start_mark.line + 1
            raise DataError(f"{where}, line {line}: more than {MAX_CONFIG_DEPTH} levels of keys and lists")


def values_of(text: str, where: str) -> dict[str, Any]:
    """Parse as `parse_stored`, for settings that are to be used; raise DataError for an interpolation too."""
    tree = parse_stored(text, where)
    for key, value in _texts(tree):
        if INTERPOLATION in value:
            raise DataError(
                f"{where}: {key} is {value[:_SHOWN]!r}; expected a value. An interpolation could read the environment "
                "of whoever opens the folder, and a run writes none; write the value in its place"
            )
    return tree


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield all keys and texts below a value, with their dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield f"{key}.{name}".lstrip("."), str(name)
            yield from _texts(one, f"{key}.{name}".lstrip("."))
    elif isinstance(value, Sequence):
        for index, one in enumerate(value):
            yield from _texts(one, f"{key}[{index}]")


def without_classes(tree: dict[str, Any]) -> dict[str, Any]:
    """Return settings that generate by the native engine where they name a class of somebody's own.

    Checking such a name imports the packages that it lies in.
    """
    return tree if tree.get("generation", "native") in SHIPPED_GENERATION else {**tree, "generation": "native"}


def keep_off_path(folder: str | Path) -> None:
    """Take a folder, and what lies in it, from Python's import path, where it is if the reader has started there.

    Also keeps Hydra from finding plugins there, and children from getting it as PYTHONPATH.
    """
    root = Path(os.path.realpath(folder))

    def is_inside(entry: str) -> bool:
        real = Path(os.path.realpath(entry or os.curdir))
        return real == root or root in real.parents

    sys.path[:] = [entry for entry in sys.path if not is_inside(entry)]


def authorities(cfg: TrainConfig, *, rewards: bool = True, generation: bool = True) -> list[Authority]:
    """Return the settings of a configuration that are authority, where its rewards and its generation are used."""
    found: list[Authority] = []
    if rewards:
        found += _of_rewards(cfg)
    if generation and cfg.generation not in SHIPPED_GENERATION:
        found.append(Authority("generation", cfg.generation, "a class that is imported and generates"))
    if generation and cfg.generation in SHIPPED_GENERATION[1:] and cfg.engine.python is not None:
        found.append(Authority("engine.python", cfg.engine.python, "a program that is started"))
    return found


def _of_rewards(cfg: TrainConfig) -> Iterator[Authority]:
    functions = cfg.reward_function
    named: dict[str, Any] = {f"reward_function.more_functions.{n}": f for n, f in functions.more_functions.items()}
    if cfg.reward == "function":
        named = {"reward_function": functions, **named}
    for key, function in named.items():
        yield Authority(f"{key}.name", function.name, "a function that is called")
        if function.kwargs:
            yield Authority(f"{key}.kwargs", function.kwargs, "what that function gets")
    if named and functions.environment:
        yield Authority("reward_function.environment", functions.environment, "variables that functions see")
    servers: dict[str, Any] = {
        f"remote_rm.more_reward_models.{n}": s for n, s in cfg.remote_rm.more_reward_models.items()
    }
    if cfg.reward == "server":
        servers = {"remote_rm.reward_model": cfg.remote_rm.reward_model, **servers}
    for key, server in servers.items():
        yield Authority(f"{key}.ip", server.ip, f"an address (port {server.port}) that is sent prompts and a token")
        if server.replicas:
            yield Authority(f"{key}.replicas", server.replicas, "addresses that are sent prompts and a token")
        if server.token_file is not None:
            yield Authority(f"{key}.token_file", server.token_file, "a file whose content is sent")


def withheld(
    cfg: TrainConfig, overrides: Sequence[str], *, rewards: bool = True, generation: bool = True
) -> list[Authority]:
    """Return the authorities that no override has named, of a configuration that a folder's became with overrides."""
    given = [override.partition("=")[0].lstrip("+~") for override in overrides]
    return [
        one
        for one in authorities(cfg, rewards=rewards, generation=generation)
        if not any(one.key == key or one.key.startswith(f"{key}.") for key in given)
    ]


def use(
    cfg: TrainConfig,
    overrides: Sequence[str],
    folder: str | Path,
    *,
    trust: bool,
    rewards: bool = True,
    generation: bool = True,
    say: Callable[[str], object] = lambda text: None,
) -> None:
    """Allow the use of a configuration that was made of a folder's and of overrides.

    Raises ConfigError without `trust` if the folder alone names what is run, asked, read or sent. With it, the folder
    goes on the import path, where functions that `reinforce_rl.train` has copied lie, after all has been listed.
    """
    found = withheld(cfg, overrides, rewards=rewards, generation=generation)
    if not trust and found:
        raise ConfigError([f"{one}; only {folder} says so. {_advice(one)}" for one in found])
    if trust:
        for one in found:
            say(f"Trusted, as {folder} has it: {one}")
        sys.path.append(os.path.abspath(folder))


def _advice(one: Authority) -> str:
    return f"Give {one.key}=VALUE yourself, or --trust if you would run whatever this folder says"
