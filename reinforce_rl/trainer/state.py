"""Trainer state carried across steps: baselines, beta, best checkpoints, skipped steps."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from reinforce_rl.algorithm.advantages import ADVANTAGE_ESTIMATORS, past_mean
from reinforce_rl.algorithm.kl import KLCoefficient
from reinforce_rl.algorithm.rewards import RunningMoments
from reinforce_rl.data.batches import ReinforceBatch
from reinforce_rl.errors import ConfigError, DivergedError, Fault

if TYPE_CHECKING:
    from reinforce_rl.config.actor import ReinforceConfig
    from reinforce_rl.megatron.mesh import Mesh
    from reinforce_rl.megatron.optimizer import OptimizerUpdate


def depends_on_past(cfg: ReinforceConfig) -> bool:
    """Return True if the advantages of a step depend on `RunningBaselines`."""
    is_past_mean = ADVANTAGE_ESTIMATORS[cfg.advantage_estimator].function is past_mean
    is_standardized = cfg.reward_shaping.standardization == "running"
    return is_past_mean or is_standardized or cfg.kl_target is not None


class RunningBaselines:
    """Running statistics over the valid samples of all earlier steps, and the current beta."""

    def __init__(self, cfg: ReinforceConfig):
        self.scores = RunningMoments()  # raw rewards
        self.rewards = RunningMoments()  # less their KL
        self.last_rewards = deque[RunningMoments](maxlen=cfg.baseline_window)  # one per step
        self.decayed_rewards = RunningMoments()
        self.beta = KLCoefficient(cfg.initial_policy_kl_penalty, cfg.kl_target, cfg.kl_horizon)
        self._decay = cfg.baseline_decay
        self._kl_in_loss = cfg.kl_placement == "loss"

    @property
    def loss_kl_coefficient(self) -> float | None:
        """Beta if the KL is a term of the loss, None if it is elsewhere."""
        return self.beta.value if self._kl_in_loss else None

    def reward_mean(self, estimator: str) -> float:
        """Return the baseline of a history-based estimator; 0 before the first step."""
        if estimator == "moving_average":
            last = RunningMoments()
            for step in self.last_rewards:
                last.merge(step)
            return last.mean
        if estimator == "exponential_moving_average":
            return self.decayed_rewards.mean
        return self.rewards.mean

    def add(self, batch: ReinforceBatch, gather_over_ranks: Callable[[Any], list[Any]]) -> None:
        """Add a finished step; a collective call."""
        valid = batch.rollouts.valid
        local_columns = (
            batch.rollouts.rewards[valid],
            batch.rewards_with_kl[valid],
            batch.kl[valid],
        )
        columns_of_ranks = gather_over_ranks(local_columns)
        scores, rewards, kl = (torch.cat(parts) for parts in zip(*columns_of_ranks, strict=True))
        self.scores.update(scores)
        self.rewards.update(rewards)
        self.last_rewards.append(RunningMoments.of(rewards))
        self.decayed_rewards.decay(self._decay)
        self.decayed_rewards.update(rewards)
        self.beta.update(float(kl.double().mean()), len(kl))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "past_scores": dataclasses.asdict(self.scores),
            "past_rewards": dataclasses.asdict(self.rewards),
            "last_rewards": [dataclasses.asdict(step) for step in self.last_rewards],
            "decayed_rewards": dataclasses.asdict(self.decayed_rewards),
            "kl_coefficient": self.beta.value,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`.

        A fixed beta comes from the config, so that it can be changed.
        """
        self.scores = RunningMoments(**state["past_scores"])
        self.rewards = RunningMoments(**state["past_rewards"])
        last_rewards = [RunningMoments(**step) for step in state["last_rewards"]]
        self.last_rewards = deque(last_rewards, self.last_rewards.maxlen)
        self.decayed_rewards = RunningMoments(**state["decayed_rewards"])
        if self.beta.target is not None:
            self.beta.value = state["kl_coefficient"]


@dataclasses.dataclass
class BestCheckpoints:
    """The steps of the best validations so far."""

    keep: int = 0  # at most
    metric: str = "val/rewards"
    mode: str = "max"  # max or min
    # (step, value), best first.
    _kept: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """The kept steps, best first."""
        return [step for step, _ in self._kept]

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a validation after `step`; metric names are without `val/`.

        NaN and ties with the worst kept are dropped. Raises ConfigError: the metric is missing.
        """
        if self.keep == 0:
            return
        value = metrics.get(self.metric.removeprefix("val/"))
        if value is None:
            expected = f"expected one of {', '.join(f'val/{name}' for name in metrics)}"
            key = "exp_manager.checkpoint_callback_params.best_metric"
            sentence = f"{key} is {self.metric!r}, which validation does not give; {expected}"
            raise ConfigError([Fault(sentence, key="checkpoint.best_metric.unknown")])
        if math.isfinite(value):
            self._kept.append((step, float(value)))
            self._drop_worst()

    def _drop_worst(self) -> None:
        sign = -1 if self.mode == "max" else 1
        # The sort is stable: of ties the earlier step stays.
        self._kept.sort(key=lambda step_and_value: sign * step_and_value[1])
        del self._kept[self.keep :]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "metric": self.metric,
            "mode": self.mode,
            "found": [[step, value] for step, value in self._kept],
        }

    def load_state_dict(self, state: Mapping[str, Any], is_there: Callable[[int], bool]) -> None:
        """Inverse of `state_dict`.

        Drops values of another metric or mode, and steps whose checkpoint is gone.
        """
        same = (state["metric"], state["mode"]) == (self.metric, self.mode)
        self._kept = [(step, value) for step, value in state["found"] if same and is_there(step)]
        self._drop_worst()


@dataclasses.dataclass
class NonFiniteGuard:
    """Ends a run whose numbers are not finite.

    After `most` consecutive optimizer steps without a finite gradient, or at once if the weights
    are lost.
    """

    most: int
    # False while the loss is not finite, which can happen with finite weights
    is_sound: bool = True
    _skipped: int = 0

    def check(
        self,
        step: int,
        updates: Sequence[OptimizerUpdate],
        loss: float,
        mesh: Mesh,
        note: Callable[[str], None],
    ) -> None:
        """Check the optimizer steps on one rollout batch; a collective call.

        Raises DivergedError: on all ranks.
        """
        self.is_sound = math.isfinite(loss)
        for update in updates:
            self._skipped = self._skipped + 1 if update.skipped else 0
        if mesh.any_rank(any(update.weights_lost for update in updates)):
            raise DivergedError(
                f"the policy's weights were not finite before the update of step {step}",
                key="trainer.weights.not_finite",
            )
        if self._skipped >= self.most:
            raise DivergedError(
                f"up to step {step}, {self._skipped} optimizer steps in a row had no finite "
                "gradient",
                key="trainer.gradient.not_finite",
            )
        if self._skipped:
            note(
                f"step {step}: a gradient is not finite, skipped ({self._skipped} of at most "
                f"{self.most} in a row)"
            )

    def check_end(self, step: int) -> None:
        """Raise DivergedError if the weights after the last step are not known to be sound."""
        if not self.is_sound:
            raise DivergedError(
                f"the loss of step {step}, the last one, is not finite",
                key="trainer.loss.not_finite",
            )
