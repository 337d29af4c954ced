"""The rollouts of one step: drawn, scored, with log-probs, and drawn again where dynamic filtering asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reinforce_rl.algorithm.filtering import in_group_with_spread
from reinforce_rl.data.batches import Prompt, RolloutBatch, join_rollouts
from reinforce_rl.monitoring.metrics import rollout_means, take_means
from reinforce_rl.runtime.phases import StepClock
from reinforce_rl.runtime.stop import StopRequest
from reinforce_rl.trainer.rollouts import PendingRollouts, RolloutMaker

if TYPE_CHECKING:
    from reinforce_rl.actor.policy import MegatronGPTReinforceActorModel
    from reinforce_rl.config.actor import ReinforceConfig
    from reinforce_rl.data.loader import PromptLoader


@dataclass(frozen=True)
class StepRollouts:
    """What a step trains on.

    Attributes:
        prompts: of this rank, all that were drawn.
        batch: this rank's samples; of dynamic filtering those of the groups that are trained on.
        metrics: means over all ranks and all that were drawn.
    """

    prompts: list[Prompt]
    batch: RolloutBatch
    metrics: dict[str, float]


class StepRolloutMaker:
    """Makes the rollouts of a step.

    Args:
        cfg: `trainer.reinforce` of the configuration.
        model: gives log-probs.
        rollouts: samples and scores.
        loader: gives the prompts.
        clock: times the phases.
        with_old_log_probs: more than one optimizer step is taken on a batch, and so its ratios need them.
        while_generating: entered while responses are drawn.
        stop: whether to leave off.
    """

    def __init__(
        self,
        cfg: ReinforceConfig,
        model: MegatronGPTReinforceActorModel,
        rollouts: RolloutMaker,
        loader: PromptLoader,
        clock: StepClock,
        *,
        with_old_log_probs: bool,
        while_generating: Callable[[], AbstractContextManager[None]],
        stop: StopRequest,
    ):
        self._cfg = cfg
        self._model = model
        self._rollouts = rollouts
        self._loader = loader
        self._clock = clock
        self._with_old_log_probs = with_old_log_probs
        self._while_generating = while_generating
        self._stop = stop

    def make(self, step: int) -> StepRollouts:
        """Of the prompts that come next.

        Args:
            step: 1 for the first; it keys the sampling noise.

        Raises:
            StoppedEarly: some rank was asked to stop. The same step can be made again.
            RewardServerError: no answer, or too many failed samples.
        """
        if self._cfg.dynamic_filtering:
            drawn = self._draw_until_rewards_differ(step)
            return replace(drawn, batch=self._with_log_probs(drawn.batch))
        prompts = next(self._loader)
        pending = self._sample(prompts, step)
        # Scores are computed elsewhere while log-probs are taken here.
        pending = replace(pending, batch=self._with_log_probs(pending.batch))
        batch = self._score(pending, step)
        return StepRollouts(prompts, batch, take_means(rollout_means(batch), self._model.mesh.gather_over_dp))

    def _sample(self, prompts: Sequence[Prompt], step: int) -> PendingRollouts:
        seed = self._model.settings.seed * 1_000_003 + step  # validation has the one of step 0
        with self._clock.phase("generate"), self._while_generating():
            return self._rollouts.sample(prompts, self._cfg.num_rollouts_per_prompt, seed)

    def _score(self, pending: PendingRollouts, step: int) -> RolloutBatch:
        with self._clock.phase("reward_wait", has_deadline=True):
            return self._rollouts.score(pending, f"step {step}")

    def _with_log_probs(self, batch: RolloutBatch) -> RolloutBatch:
        """The policy's and the reference's, where somebody reads them: without a KL only a second update does."""
        where = (batch.sequences, batch.prompt_lengths, batch.response_lengths, batch.group_ids)
        with_kl = self._cfg.initial_policy_kl_penalty > 0
        if with_kl or self._with_old_log_probs:
            with self._clock.phase("logprobs"):
                batch = replace(batch, log_probs=self._policy_log_probs(batch, where))
        if with_kl:
            with self._clock.phase("init_logprobs"):
                batch = replace(batch, init_log_probs=self._model.get_init_policy_logprobs(*where))
        self._stop.check(self._model.mesh)
        return batch

    def _policy_log_probs(self, batch: RolloutBatch, where: tuple[Tensor, ...]) -> Tensor | None:
        # A second update's ratios would not start from the trainer's own numbers.
        is_known = self._cfg.generator_log_probs and self._model.generator.is_exact and not self._with_old_log_probs
        return batch.generator_log_probs if is_known else self._model.get_inference_log_probs(*where)

    def _draw_until_rewards_differ(self, step: int) -> StepRollouts:
        """Draw batches of prompts until as many groups as a step takes have unequal rewards, or the bound is reached.

        An epoch's end is a bound too: a prompt must not come twice in a step.
        """
        mesh, wanted = self._model.mesh, self._loader.prompts_per_step
        epoch = self._loader.state_dict()["epoch"]
        all_prompts, drawn, with_spread = [], [], []
        for _ in range(1 + self._cfg.max_resampling_rounds):
            prompts = next(self._loader)
            batch = self._score(self._sample(prompts, step), step)
            all_prompts += prompts
            drawn.append(batch)
            differs = in_group_with_spread(batch.rewards, batch.group_ids, batch.valid)
            for ids in mesh.gather_over_dp(batch.group_ids[differs].tolist()):
                with_spread += dict.fromkeys(ids)  # each once, in order
            if len(with_spread) >= wanted or self._loader.state_dict()["epoch"] != epoch:
                break
        batch = join_rollouts(drawn, self._model.pad_id)
        kept = torch.isin(batch.group_ids, torch.tensor(with_spread[:wanted], dtype=torch.long))
        metrics = take_means(rollout_means(batch), mesh.gather_over_dp)
        groups = sum(mesh.gather_over_dp(len(all_prompts)))
        counts = {
            "groups_drawn": groups,
            "groups_without_spread": groups - len(with_spread),
            "groups_trained": min(len(with_spread), wanted),
            "resampling_rounds": len(drawn) - 1,
        }
        return StepRollouts(all_prompts, batch.select(kept.nonzero()[:, 0]), {**metrics, **counts})
