"""Validation of the reward sources, for `config/checks.py`; yields one message per error."""

from __future__ import annotations

import math
from collections.abc import Iterator

from reinforce_rl.config.schema import RewardServerConfig, TrainConfig
from reinforce_rl.utils.addresses import Address
from reinforce_rl.utils.choices import INPUT_FORMS, PROVIDED, PROVIDED_NAMES

REWARDS = ("server", "function")
REWARD_METRICS = ("rewards_with_kl",)  # metrics whose names a reward source's own could be


def reward_faults(cfg: TrainConfig) -> Iterator[str]:
    """Which source it is, its servers and functions, and the names that their scores are logged under."""
    if cfg.reward not in REWARDS:
        yield f"reward is {cfg.reward!r}; expected one of {', '.join(REWARDS)}"
    yield from _servers(cfg)
    yield from _reward_functions(cfg)


def _servers(cfg: TrainConfig) -> Iterator[str]:
    servers = {"remote_rm.reward_model": cfg.remote_rm.reward_model}
    servers |= {
        f"remote_rm.more_reward_models.{name}": more for name, more in cfg.remote_rm.more_reward_models.items()
    }
    for key, server in servers.items():
        if not 1 <= server.port <= 65535:
            yield f"{key}.port is {server.port}; expected 1 to 65535"
        yield from _replicas(key, server)
        if server.input not in INPUT_FORMS:
            yield f"{key}.input is {server.input!r}; expected one of {', '.join(INPUT_FORMS)}"
        if not math.isfinite(server.weight) or server.weight == 0:
            yield f"{key}.weight is {server.weight}; expected a number other than 0"
    for key, name in _reward_names(cfg):
        if f"rewards_{name}" in REWARD_METRICS:
            yield (
                f"{key} is named {name!r}, and its scores are logged as rewards_{name}, which is a metric already; "
                "give it another name"
            )
    if cfg.remote_rm.reward_model.name in cfg.remote_rm.more_reward_models:
        yield (
            f"remote_rm.more_reward_models.{cfg.remote_rm.reward_model.name} is named as remote_rm.reward_model is; "
            "both are logged as rewards_NAME, so give it another name"
        )


def _replicas(key: str, server: RewardServerConfig) -> Iterator[str]:
    """What is wrong with the further addresses of one reward model."""
    known = {Address(server.ip.lower(), server.port): f"{key}.ip and port"}
    for number, text in enumerate(server.replicas):
        place = f"{key}.replicas[{number}]"
        try:
            address = Address.parse(text)
        except ValueError:
            yield f"{place} is {text!r}; expected HOST:PORT with a port of 1 to 65535"
            continue
        if address in known:
            yield f"{place} is {text}, the same server as {known[address]}; name each server once"
        known[address] = place


def _reward_names(cfg: TrainConfig) -> Iterator[tuple[str, str]]:
    """Where each source is configured, and the name that its scores are logged under; none of a single one."""
    remote, own = cfg.remote_rm, cfg.reward_function
    several = bool(remote.more_reward_models or own.more_functions)
    if cfg.reward == "server" and (several or remote.reward_model.weight != 1.0):
        yield "remote_rm.reward_model", remote.reward_model.name
    if cfg.reward == "function" and own.name is not None and (several or own.weight != 1.0):
        yield "reward_function", own.name.rpartition(".")[2]
    for name in remote.more_reward_models:
        yield f"remote_rm.more_reward_models.{name}", name
    for name in own.more_functions:
        yield f"reward_function.more_functions.{name}", name


def _reward_functions(cfg: TrainConfig) -> Iterator[str]:
    own = cfg.reward_function
    if cfg.reward == "function" and own.name is None:
        names = ", ".join(f"{PROVIDED}.{name}" for name in PROVIDED_NAMES)
        yield (
            "reward is 'function', but reward_function.name is not set; expected the dotted name of a function: one "
            f"of your own, or {names}"
        )
    if cfg.reward == "server" and own.name is not None:
        yield (
            f"reward_function.name is {own.name!r}, but reward is 'server', which asks remote_rm.reward_model; set "
            "reward=function, or name it under reward_function.more_functions to add it to the server's rewards"
        )
    weights = {"reward_function": own.weight}
    weights |= {f"reward_function.more_functions.{name}": more.weight for name, more in own.more_functions.items()}
    for key, weight in weights.items():
        if not math.isfinite(weight) or weight == 0:
            yield f"{key}.weight is {weight}; expected a number other than 0"
    first = (own.name or "").rpartition(".")[2] if cfg.reward == "function" else cfg.remote_rm.reward_model.name
    others = [*cfg.remote_rm.more_reward_models, *own.more_functions]
    clash = first in (others if cfg.reward == "function" else own.more_functions)
    if clash or len(set(others)) < len(others):
        yield (
            f"reward sources are named {', '.join([first, *others])}; each is logged as rewards_NAME, so give each a "
            "name of its own in reward_function.more_functions and remote_rm.more_reward_models"
        )
