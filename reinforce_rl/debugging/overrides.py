"""Check overrides, KEY=VALUE, of a recorded run's settings, by what each key can change."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reinforce_rl.config.actor import ReinforceConfig, TrainConfig
from reinforce_rl.config.compose import compose_stored
from reinforce_rl.config.load import read_config
from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.rewards.function_pool import function_faults
from reinforce_rl.runtime.settings import flatten
from reinforce_rl.runtime.trust import require_trust

# Keys of `trainer.reinforce` that change a step's advantages, but not its rollouts.
_OF_ADVANTAGES = re.compile(
    r"trainer\.reinforce\.(initial_policy_kl_penalty|use_absolute_kl"
    r"|kl_(estimator|reduction|placement|target|horizon)|advantage_(estimator|whitening)"
    r"|baseline_(window|decay)|credit_assignment|discount_factor|truncated_samples"
    r"|truncation_penalty|overlong_buffer|reward_shaping\.\w+)$"
)
_OF_LOSS = re.compile(
    r"trainer\.reinforce\.(kl_loss_weights|loss_aggregation|entropy_bonus|importance_ratio"
    r"|ratio_clip_(low|high)|generator_(correction|ratio_cap))$"
)
_OF_REWARDS = re.compile(
    r"reward$|reward_function\.(name|kwargs|weight|more_functions)(\.|$)"
    r"|remote_rm\.(more_reward_models|reward_model\.(name|weight|input))(\.|$)"
)
# Places of files and servers, and settings of requests to reward sources.
_OF_PLACES = re.compile(
    r"pretrained_checkpoint\.restore_from_path$|model\.data\.data_prefix\."
    r"|reward_function\.|remote_rm\."
)
_OF_RESULTS = (_OF_ADVANTAGES, _OF_LOSS, _OF_REWARDS)
_ADVICE = (
    "leave it out, or leave out the others. Stored rollouts can be given other settings of KL, "
    "baseline, credit, shaping and truncated samples, of rewards, and of the loss"
)


def with_overrides(
    recorded: TrainConfig,
    overrides: Sequence[str],
) -> tuple[TrainConfig, list[str]]:
    """Return a configuration with KEY=VALUE on top, and its faults."""
    return read_config(compose_stored(recorded.model_dump(), overrides))


def changed_settings(recorded: TrainConfig, asked: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the recorded and the new value of each key that differs between two configurations."""
    before = dict(flatten(recorded.model_dump()))
    after = dict(flatten(asked.model_dump()))
    pairs = {key: (before.get(key), after.get(key)) for key in {**before, **after}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def changes_results(recorded: TrainConfig, overrides: Sequence[str]) -> bool:
    """Return whether overrides change what is computed of rollouts, not only how or where."""
    asked, _ = with_overrides(recorded, overrides)
    keys = changed_settings(recorded, asked)
    return any(pattern.match(key) for key in keys for pattern in _OF_RESULTS)


class OverriddenSettings:
    """A run's settings with overrides that change what is computed of its rollouts.

    Args:
        run: its folder.
        recorded: the run's settings in a step.
        own_faults: faults of `recorded` on this machine, such as a model in another folder. They
            are not caused by the overrides and are ignored.
        with_loss: whether settings of the loss have an effect.
        trust, say: for rewards that only the folder names; see `runtime.trust.require_trust`.

    Raises:
        ConfigError: overrides are unknown, wrong, or without effect on stored rollouts. Has all
            faults in one message.
    """

    def __init__(
        self,
        run: Path,
        recorded: TrainConfig,
        own_faults: list[str],
        overrides: list[str],
        *,
        with_loss: bool = True,
        trust: bool = False,
        say: Callable[[str], object] = lambda text: None,
    ):
        self.recorded = recorded
        self.cfg, faults = with_overrides(recorded, overrides)
        self.changes = changed_settings(recorded, self.cfg)
        self.changes_rewards = any(map(_OF_REWARDS.match, self.changes))
        self.changes_loss = any(map(_OF_LOSS.match, self.changes))
        faults = [fault for fault in faults if fault not in own_faults]
        faulty_keys = {fault.partition(" ")[0] for fault in faults}
        for key in self.changes:
            if key in faulty_keys:
                continue
            if _OF_LOSS.match(key) and not with_loss:
                sentence = (
                    f"{key} changes the gradient alone, no advantage; leave out --phase "
                    "advantages, or the setting"
                )
                faults.append(Fault(sentence, key="replay.setting.gradient_only"))
            elif not _has_effect(key):
                sentence = f"{key} has no effect on stored rollouts; {_ADVICE}"
                faults.append(Fault(sentence, key="replay.setting.without_effect"))
        if self.changes_rewards and not faults:
            # The prompts' messages are read from the data.
            require_trust(
                self.cfg,
                overrides,
                run,
                trust=trust,
                generation=False,
                data=True,
                say=say,
            )
            faults = function_faults(self.cfg)
        if faults:
            raise ConfigError(faults)

    @property
    def reinforce(self) -> ReinforceConfig:
        return self.cfg.trainer.reinforce

    @property
    def max_length(self) -> int:
        """A response's maximum tokens."""
        return self.cfg.max_response_tokens


def _has_effect(key: str) -> bool:
    return any(pattern.match(key) for pattern in (*_OF_RESULTS, _OF_PLACES))
