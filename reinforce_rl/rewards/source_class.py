"""A reward source of one's own: `reward=my_rewards.MySource`."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.errors import ConfigError, Fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from reinforce_rl.rewards.base import RewardSource

    SourceClass = Callable[[TrainConfig, PreTrainedTokenizerBase], RewardSource]

_METHODS = ("infer_rm", "close")


def load_source_class(name: str) -> SourceClass:
    """Import the class of a `RewardSource` by its dotted name.

    It is called with the run's configuration and the actor's tokenizer, on every rank; the first
    rank of each data-parallel replica asks it for rewards.

    Raises ConfigError: it cannot be imported, or lacks a method.
    """
    try:
        source_class = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        sentence = f"reward is {name!r}, which cannot be imported: {error}"
        raise ConfigError([Fault(sentence, key="reward.class.not_importable")]) from error
    for method in _METHODS:
        if not callable(getattr(source_class, method, None)):
            sentence = (
                f"reward is {name!r}, which has no method {method}; expected the class of a "
                "RewardSource (reinforce_rl/rewards/base.py), server or function"
            )
            raise ConfigError([Fault(sentence, key="reward.class.no_source")])
    return source_class


def source_class_faults(cfg: TrainConfig) -> list[str]:
    """Say why the class that `reward` names cannot be used; imports it."""
    if cfg.reward_class is None:
        return []
    try:
        load_source_class(cfg.reward_class)
    except ConfigError as error:
        return error.faults
    return []
