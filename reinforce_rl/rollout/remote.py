"""Rollouts of other processes: prompts are queued ahead of their step, and lost ones re-queued."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from reinforce_rl.data.batches import Prompt, RolloutBatch, join_completions
from reinforce_rl.data.sampler import step_seed
from reinforce_rl.rewards.base import CompletedRewards
from reinforce_rl.rollout.filtering import draw_until_rewards_differ
from reinforce_rl.rollout.generators import Generators
from reinforce_rl.rollout.messages import GenerationResult
from reinforce_rl.rollout.scoring import PendingRollouts, RolloutScorer, unscored_batch
from reinforce_rl.rollout.source import (
    PromptBatch,
    RolloutContext,
    RolloutHandle,
    StepRollouts,
    draw_prompts,
    prompts_under_way,
)
from reinforce_rl.runtime.phases import PhaseTracker


class RemoteRollouts:
    """A `RolloutSource` whose responses remote generators draw and have scored.

    The prompts of the next `staleness` steps are submitted ahead of the step that trains on them,
    each with its version of the weights; see `GeneratorPool`.
    """

    def __init__(self, context: RolloutContext, generators: Generators):
        self._context = context
        self._model = context.model
        self._generators = generators
        self._scorer = RolloutScorer(context)
        self._ahead = deque[PromptBatch]()  # of `_next_step` and the steps after it
        self._next_step = 1
        # with `takes_finished`, by number of the request
        self._under_way: dict[int, Prompt] = {}

    @property
    def is_over(self) -> bool:
        return self._context.loader.finished and not self._ahead

    def next_batch(self, step: int) -> StepRollouts:
        self._next_step = step
        if self._context.cfg.dynamic_filtering:
            return draw_until_rewards_differ(
                self._context,
                self._scorer,
                step,
                self._ahead,
                lambda prompts: self._answer_anew(prompts, step),
            )
        self._draw_ahead()
        if self._generators.takes_finished:
            drawn, pending, dropped = self._take_finished(len(self._ahead[0].prompts))
            counts = {"dropped_groups": dropped}
        else:
            drawn = self._ahead[0]
            pending = self._collect(drawn)
            counts = {}
        batch = self._scorer.finish_step(pending, step)
        # Not before: a run that is stopped saves what was generated for this step.
        self._ahead.popleft()
        self._next_step += 1
        self._forget(drawn)
        metrics = self._scorer.means(batch, step)
        return StepRollouts(drawn.prompts, drawn.position, batch, {**metrics, **counts})

    def _draw_ahead(self) -> None:
        """Draw and submit the prompts of the next step and of `staleness` steps after it."""
        loader = self._context.loader
        while (
            len(self._ahead) <= self._context.staleness
            and self._next_step + len(self._ahead) <= self._context.max_steps
            and not loader.finished
        ):
            self._append(draw_prompts(loader))

    def _append(self, drawn: PromptBatch) -> None:
        """Submit the prompts of the step after those drawn; filtering submits its own."""
        if not self._context.cfg.dynamic_filtering:
            step = self._next_step + len(self._ahead)
            version = max(0, step - 1 - self._context.staleness)
            handle = self._submit(drawn.prompts, step, version)
            drawn = replace(drawn, handle=handle)
            if self._generators.takes_finished:
                numbers = handle.numbers[self._model.mesh.dp_rank]
                self._under_way.update(zip(numbers, drawn.prompts, strict=True))
        self._ahead.append(drawn)

    def _submit(self, prompts: Sequence[Prompt], step: int, version: int) -> RolloutHandle:
        samples = self._context.cfg.num_rollouts_per_prompt
        seed = step_seed(self._model.settings.seed, step)
        return self._generators.submit(prompts, samples, seed, step, version)

    def _collect(self, drawn: PromptBatch) -> PendingRollouts:
        assert drawn.handle is not None
        with self._context.generating():
            results = self._generators.collect(drawn.handle, drawn.prompts)
            return self._pending(drawn.prompts, results)

    def _take_finished(self, count: int) -> tuple[PromptBatch, PendingRollouts, int]:
        """Wait for rollouts of this many of this rank's prompts, whichever are finished first."""
        mesh = self._model.mesh
        oldest = self._next_step - 1 - self._context.staleness
        with self._context.generating():
            results, dropped = self._generators.collect_first(list(self._under_way), count, oldest)
            prompts = [self._under_way[result.number] for result in results]
            pending = self._pending(prompts, results)
        taken = mesh.gather_over_dp([result.number for result in results])
        taken_here = set(taken[mesh.dp_rank])
        left = [prompt.id for number, prompt in self._under_way.items() if number not in taken_here]
        position = {
            **self._context.loader.state_dict(),
            "under_way": [*chain.from_iterable(mesh.gather_over_dp(left))],
        }
        return PromptBatch(prompts, position, RolloutHandle(taken, 0)), pending, dropped

    def _forget(self, drawn: PromptBatch) -> None:
        assert drawn.handle is not None
        self._generators.forget(drawn.handle)
        if self._generators.takes_finished:
            for number in drawn.handle.numbers[self._model.mesh.dp_rank]:
                self._under_way.pop(number, None)

    def _answer_anew(self, prompts: Sequence[Prompt], step: int) -> PendingRollouts:
        """Submit prompts and wait for their rollouts, of the newest weights."""
        with self._context.generating():
            handle = self._submit(prompts, step, self._generators.version)
            return self._collect_once(handle, prompts)

    def _collect_once(self, handle: RolloutHandle, prompts: Sequence[Prompt]) -> PendingRollouts:
        pending = self._pending(prompts, self._generators.collect(handle, prompts))
        self._generators.forget(handle)
        return pending

    def _pending(
        self, prompts: Sequence[Prompt], results: Sequence[GenerationResult]
    ) -> PendingRollouts:
        """Return what generators made, as if it had been made here."""
        pad_id = self._model.pad_id
        parts = [result.completions for result in results]
        futures = ()
        if self._model.mesh.is_model_parallel_rank_0:
            futures = tuple(
                (CompletedRewards(result.rewards, result.failure), len(part.lengths))
                for result, part in zip(results, parts, strict=True)
            )
        completions = join_completions(parts, pad_id)
        return PendingRollouts(unscored_batch(prompts, completions, pad_id), futures)

    def evaluate(
        self,
        name: str,
        step: int,
        prompts: Sequence[Prompt],
        phases: PhaseTracker,
        num_samples: int = 1,
    ) -> RolloutBatch:
        """See `RolloutSource.evaluate`; it is queued behind the rollouts that are under way."""
        generators = self._generators

        def sample() -> PendingRollouts:
            seed = step_seed(self._model.settings.seed, 0)
            handle = generators.submit(prompts, num_samples, seed, 0, generators.version)
            return self._collect_once(handle, prompts)

        return self._scorer.evaluate(name, step, phases, sample)

    def publish_weights(self, version: int) -> None:
        with self._context.clock.phase("send_weights"):
            self._generators.publish(version)

    def state_dict(self) -> dict[str, Any]:
        handles = {}
        if not self._generators.takes_finished:
            for step, drawn in enumerate(self._ahead, self._next_step):
                if drawn.handle is not None:
                    handles[step] = drawn.handle
        return {"rollouts": self._generators.state(handles)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._context.clock.phase("send_weights"):
            self._generators.publish(state["step"], as_oldest=True)
        self._next_step = state["step"] + 1
        handles = self._generators.restore(state["rollouts"])
        loader = self._context.loader
        for drawn in prompts_under_way(loader, state["under_way"]):
            self._append(drawn)
        # The prompts under way were asked for anew. A step that failed after it had taken its
        # rollouts has none, and the stored ones belong to the prompts of later steps.
        step = self._next_step + len(self._ahead)
        while step in handles and not loader.finished:
            self._ahead.append(replace(draw_prompts(loader), handle=handles[step]))
            step += 1

    def close(self) -> None:
        """Close the trainer's own generator; who opened the connections closes them."""
        self._model.generator.close()
