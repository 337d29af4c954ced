"""Overrides of the configuration for `--reward` with names of functions or addresses."""

from __future__ import annotations

from collections.abc import Sequence

from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.utils.net import Address


def reward_overrides(rewards: Sequence[str], *, has_base: bool) -> list[str]:
    """Return the overrides for names of reward functions and addresses of reward servers."""
    if not rewards:
        return []
    servers = [reward for reward in rewards if "://" in reward]
    functions = [reward for reward in rewards if "://" not in reward]
    overrides = [f"++reward={'function' if functions else 'server'}"]
    if has_base:
        # The run's own rewards would be added to these.
        overrides += [
            "~reward_function.kwargs",
            "~reward_function.more_functions",
            "~remote_rm.more_reward_models",
        ]
        if not functions:
            overrides.append("++reward_function.name=null")
    for i, name in enumerate(functions):
        if "." in name:
            dotted = name
        elif name == "llm_judge":
            dotted = "reinforce_rl.rewards.judge.llm_judge"
        else:
            dotted = f"reinforce_rl.rewards.functions.{name}"
        section = f".more_functions.{dotted.rpartition('.')[2]}" if i else ""
        overrides.append(f"++reward_function{section}.name={dotted}")
    for i, url in enumerate(servers):
        place, _, model = url.partition("://")[2].rstrip("/").partition("/")
        try:
            address = Address.parse(place)
        except ValueError as error:
            sentence = (
                f"--reward {url}: {error}; expected http://HOST:PORT or http://HOST:PORT/NAME"
            )
            raise ConfigError([Fault(sentence, key="eval.reward.no_address")]) from error
        model = model or "reward_model"
        key = f"more_reward_models.{model}" if functions or i else "reward_model"
        overrides += [
            f"++remote_rm.{key}.ip='{address.host}'",
            f"++remote_rm.{key}.port={address.port}",
            f"++remote_rm.{key}.name='{model}'",
        ]
    return overrides
