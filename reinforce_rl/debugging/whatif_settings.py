"""Overrides of a stored run's settings: checked by the schema, and told apart by what they can change afterwards."""

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

# Keys of `trainer.reinforce` that a step's rollouts do not depend on, but its advantages do.
_OF_ADVANTAGES = re.compile(
    r"trainer\.reinforce\.(initial_policy_kl_penalty|use_absolute_kl|kl_(estimator|reduction|placement|target|horizon)"
    r"|advantage_(estimator|whitening)|baseline_(window|decay)|credit_assignment|discount_factor|truncated_samples"
    r"|truncation_penalty|overlong_buffer|reward_shaping\.\w+)$"
)
_OF_LOSS = re.compile(
    r"trainer\.reinforce\.(kl_loss_weights|loss_aggregation|entropy_bonus|importance_ratio|ratio_clip_(low|high)"
    r"|generator_(correction|ratio_cap))$"
)
_OF_REWARDS = re.compile(r"(reward|reward_function|remote_rm)(\.|$)")
_TAKEN = "what-if takes the keys of KL, baseline, credit, shaping and truncated samples, of rewards, and of the loss"


def with_overrides(recorded: TrainConfig, overrides: Sequence[str]) -> tuple[TrainConfig, list[str]]:
    """Return a configuration with KEY=VALUE on top, and all that is wrong with it."""
    return read_config(compose_stored(recorded.model_dump(), overrides))


class Settings:
    """A run's settings with overrides.

    Args:
        run: its folder.
        recorded: the run's own, of a step.
        own_faults: what is wrong with them on this machine, such as a model that is elsewhere; nobody's mistake here.
        with_gradient: keys of the loss matter too.
        trust, say: of rewards that only the folder names; see `runtime.trust.require_trust`.

    Raises ConfigError: an override is unknown, wrong, or without effect on stored rollouts; all in one message.
    """

    def __init__(
        self,
        run: Path,
        recorded: TrainConfig,
        own_faults: list[str],
        overrides: list[str],
        *,
        with_gradient: bool = False,
        trust: bool = False,
        say: Callable[[str], object] = lambda text: None,
    ):
        self.recorded = recorded
        self.cfg, faults = with_overrides(recorded, overrides)
        before, now = (dict(flatten(cfg.model_dump())) for cfg in (recorded, self.cfg))
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        self.changes: dict[str, tuple[Any, Any]] = {key: (before.get(key), now.get(key)) for key in keys}
        self.changes_rewards = any(map(_OF_REWARDS.match, keys))
        faults = [fault for fault in faults if fault not in own_faults]
        told = {fault.partition(" ")[0] for fault in faults}
        faults += [self._without_effect(key) for key in keys if key not in told and self._is_idle(key, with_gradient)]
        if self.changes_rewards and not faults:
            require_trust(self.cfg, overrides, run, trust=trust, generation=False, say=say)
            faults = function_faults(self.cfg)
        if faults:
            raise ConfigError(faults)

    @property
    def reinforce(self) -> ReinforceConfig:
        return self.cfg.trainer.reinforce

    @property
    def max_length(self) -> int:
        return self.cfg.model.reinforce.length_params.max_length

    def _is_idle(self, key: str, with_gradient: bool) -> bool:
        acts = _OF_ADVANTAGES.match(key) or _OF_REWARDS.match(key) or (with_gradient and _OF_LOSS.match(key))
        return not acts

    def _without_effect(self, key: str) -> Fault:
        if _OF_LOSS.match(key):
            return Fault(
                f"{key} changes the gradient only, no advantage; add --gradient, or leave it out",
                key="whatif.setting.gradient_only",
            )
        return Fault(
            f"{key} changes nothing on rollouts that are stored; leave it out: {_TAKEN}",
            key="whatif.setting.without_effect",
        )
