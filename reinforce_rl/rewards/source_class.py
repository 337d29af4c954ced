"""A reward source of one's own: `reward=my_rewards.MySource`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.errors import ConfigError, Fault, ReinforceError, RewardServerError
from reinforce_rl.rewards.base import CompletedRewards, RewardFuture, RewardRequest, Rewards
from reinforce_rl.utils.user_class import OR_A_CLASS, import_user_class

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from reinforce_rl.rewards.base import RewardSource

    SourceClass = Callable[[TrainConfig, PreTrainedTokenizerBase], RewardSource]

logger = logging.getLogger(__name__)

_METHODS = ("infer_rm", "close")


class OwnSource:
    """An object of a class of one's own, as a `RewardSource`.

    What it raises, at once or later, is raised by `result` as a RewardServerError, so that all
    ranks learn of it together. Its traceback is logged.
    """

    def __init__(self, name: str, source: RewardSource):
        self.source = source
        self._name = name

    def infer_rm(self, request: RewardRequest) -> RewardFuture:
        try:
            return _OwnFuture(self._name, self.source.infer_rm(request))
        except Exception as error:
            return CompletedRewards(None, _as_reward_error(self._name, error))

    @property
    def identity(self) -> Any:
        """What the source says of itself in the records of steps; None if it says nothing."""
        return getattr(self.source, "identity", None)

    def close(self) -> None:
        self.source.close()


class _OwnFuture:
    def __init__(self, name: str, future: RewardFuture):
        self._name = name
        self._future = future

    def result(self) -> Rewards:
        try:
            return self._future.result()
        except Exception as error:
            raise _as_reward_error(self._name, error) from error


def _as_reward_error(name: str, error: Exception) -> ReinforceError:
    if isinstance(error, ReinforceError):
        return error
    logger.error("event=reward_source_raised source=%s", name, exc_info=error)
    return RewardServerError(
        f"the reward source {name} raised {type(error).__name__}: {error}; its traceback is in the "
        "log. The same command resumes from the last checkpoint",
        key="reward.class.raised",
    )


def make_source(name: str, cfg: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> OwnSource:
    """Make the source that `reward` names; called on every rank.

    Raises ConfigError: the class cannot be imported, or its `identity` is no JSON.
    """
    source = load_source_class(name)(cfg, tokenizer)
    own_source = OwnSource(name, source)
    try:
        json.dumps(own_source.identity)
    except (TypeError, ValueError) as error:
        sentence = f"reward is {name!r}, whose identity is not JSON: {error}"
        raise ConfigError([Fault(sentence, key="reward.class.identity")]) from error
    return own_source


def load_source_class(name: str) -> SourceClass:
    """Import the class of a `RewardSource` by its dotted name.

    It is called with the run's configuration and the actor's tokenizer, on every rank; the first
    rank of each data-parallel replica asks it for rewards.

    Raises ConfigError: it cannot be imported, or lacks a method.
    """
    try:
        source_class = import_user_class(name)
    except ImportError as error:
        sentence = f"reward is {name!r}, which {error}. Expected server, function, {OR_A_CLASS}"
        raise ConfigError([Fault(sentence, key="reward.class.not_importable")]) from error
    for method in _METHODS:
        if not callable(getattr(source_class, method, None)):
            sentence = (
                f"reward is {name!r}, which has no method {method}; expected the class of a "
                "RewardSource (reinforce_rl/rewards/base.py), server or function"
            )
            raise ConfigError([Fault(sentence, key="reward.class.no_source")])
    return source_class


def is_source_class(name: str) -> bool:
    """Import a dotted name and return True if it is a class for `reward`."""
    try:
        source_class = import_user_class(name)
    except ImportError:
        return False
    return isinstance(source_class, type) and callable(getattr(source_class, "infer_rm", None))


def source_class_faults(cfg: TrainConfig) -> list[str]:
    """Say why the class that `reward` names cannot be used; imports it."""
    if cfg.reward_class is None:
        return []
    try:
        load_source_class(cfg.reward_class)
    except ConfigError as error:
        return error.faults
    return []
