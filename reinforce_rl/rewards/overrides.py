"""Rewards by name or address, as `--reward` has them, as overrides of the configuration."""

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
        overrides += [] if functions else ["++reward_function.name=null"]
    for i, name in enumerate(functions):
        dotted = "judge.llm_judge" if name == "llm_judge" else f"functions.{name}"
        dotted = name if "." in name else f"reinforce_rl.rewards.{dotted}"
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
        key = f"more_reward_models.{model or 'reward_model'}" if functions or i else "reward_model"
        overrides += [
            f"++remote_rm.{key}.ip='{address.host}'",
            f"++remote_rm.{key}.port={address.port}",
        ]
        overrides.append(f"++remote_rm.{key}.name='{model or 'reward_model'}'")
    return overrides
