"""Rollouts of ranks that generate and train in turn: sample, score, log-probs, batch by batch."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from reinforce_rl.data.batches import Completions, Prompt, RolloutBatch, join_completions
from reinforce_rl.data.sampler import step_seed
from reinforce_rl.errors import EnvironmentProcessError, GenerationError
from reinforce_rl.rewards.base import RewardFuture
from reinforce_rl.rollout.filtering import draw_until_rewards_differ
from reinforce_rl.rollout.scoring import (
    PendingRollouts,
    RolloutScorer,
    reward_request,
    unscored_batch,
)
from reinforce_rl.rollout.source import (
    PromptBatch,
    RolloutContext,
    StepRollouts,
    draw_prompts,
    prompts_under_way,
)
from reinforce_rl.rollout.work_queue import WorkQueue
from reinforce_rl.runtime.phases import PhaseTracker


class LocalRollouts:
    """A `RolloutSource` whose responses the trainer's own generator draws."""

    def __init__(self, context: RolloutContext):
        self._context = context
        self._model = context.model
        self._scorer = RolloutScorer(context)
        # Prompts that were drawn and that no step has taken: this step's, or a checkpoint's.
        self._ahead = deque[PromptBatch]()

    @property
    def is_over(self) -> bool:
        return self._context.loader.finished and not self._ahead

    def next_batch(self, step: int) -> StepRollouts:
        if self._context.cfg.dynamic_filtering:
            return draw_until_rewards_differ(
                self._context,
                self._scorer,
                step,
                self._ahead,
                lambda prompts: self._sample_step(prompts, step),
            )
        if not self._ahead:
            self._ahead.append(draw_prompts(self._context.loader))
        drawn = self._ahead[0]
        batch = self._scorer.finish_step(self._sample_step(drawn.prompts, step), step)
        # Not before: a step that was stopped can be made again.
        self._ahead.popleft()
        metrics = self._scorer.means(batch, step)
        return StepRollouts(drawn.prompts, drawn.position, batch, metrics)

    def _sample_step(self, prompts: Sequence[Prompt], step: int) -> PendingRollouts:
        with self._context.generating():
            return self.sample(prompts, self._context.cfg.num_rollouts_per_prompt, step)

    def evaluate(
        self,
        name: str,
        step: int,
        prompts: Sequence[Prompt],
        phases: PhaseTracker,
        num_samples: int = 1,
    ) -> RolloutBatch:
        def sample() -> PendingRollouts:
            return self.sample(prompts, num_samples, 0)

        return self._scorer.evaluate(name, step, phases, sample)

    def sample(self, prompts: Sequence[Prompt], num_samples: int, step: int) -> PendingRollouts:
        """Generate batch by batch; each is scored while the next one is generated.

        `step` 0 is a validation.
        """
        mesh = self._model.mesh
        rm = self._context.rm
        is_validation = step == 0
        # All validations have the same seed: only the weights differ between them.
        seed = step_seed(self._model.settings.seed, step)
        share = list(self._context.batch_iterator_cls(prompts, is_validation))
        is_shared = self._context.cfg.generation_work_queue and mesh.dp_size > 1
        queue = WorkQueue(mesh, share, shared=is_shared)
        parts: list[Completions] = []
        futures: list[tuple[RewardFuture, int]] = []
        failure: Exception | None = None
        try:
            with contextlib.closing(queue), self._model.generator.awake():
                for batch in queue:
                    if self._context.stop.asked_of_block(mesh):
                        break
                    part = self._model.infer(batch, num_samples, seed, validation=is_validation)
                    parts.append(part)
                    if mesh.is_model_parallel_rank_0 and rm is not None:
                        future = rm.infer_rm(reward_request(self._model, batch, part))
                        futures.append((future, len(part.lengths)))
        except (GenerationError, EnvironmentProcessError) as error:
            failure = error
        mesh.raise_if_any(failure)
        self._context.stop.check(mesh)
        pad_id = self._model.pad_id
        completions = join_completions(queue.to_owners(parts), pad_id)
        batch = unscored_batch(prompts, completions, pad_id)
        return PendingRollouts(batch, tuple(futures), queue.to_owners)

    def publish_weights(self, version: int) -> None:
        self._model.generator.refit()

    def state_dict(self) -> dict[str, Any]:
        return {"rollouts": b""}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Rollouts of generators are not kept: their prompts are answered anew.
        self._model.generator.refit()
        self._ahead.extend(prompts_under_way(self._context.loader, state["under_way"]))

    def close(self) -> None:
        self._model.generator.close()
