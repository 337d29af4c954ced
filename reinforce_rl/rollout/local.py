"""Rollouts: sample responses from the policy and score them, batch by batch."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from reinforce_rl.algorithm.rewards import has_reward_variance
from reinforce_rl.data.batches import (
    Completions,
    Prompt,
    RolloutBatch,
    join_completions,
    join_prompts_and_responses,
    join_rollouts,
)
from reinforce_rl.data.sampler import step_seed
from reinforce_rl.errors import GenerationError, StoppedEarly, TooManyFailedRewardsError
from reinforce_rl.monitoring.metrics import Mean, reduce_metrics, rollout_means
from reinforce_rl.rewards.base import (
    STATUS_TEXT,
    CompletedRewards,
    RewardFuture,
    Rewards,
    RewardSource,
)
from reinforce_rl.rollout.messages import GenerationResult
from reinforce_rl.rollout.remote import Generators, RolloutHandle
from reinforce_rl.rollout.reward_requests import faults_of, reward_request, scores_of, with_valid
from reinforce_rl.rollout.work_queue import WorkQueue
from reinforce_rl.runtime.phases import PhaseTracker, StepClock
from reinforce_rl.runtime.stop import StopRequest

if TYPE_CHECKING:
    from reinforce_rl.actor.policy import MegatronGPTReinforceActorModel
    from reinforce_rl.config.actor import ReinforceConfig
    from reinforce_rl.data.prompts import PromptLoader

logger = logging.getLogger(__name__)

_TOLD = 3  # reasons of failed scores in a message; texts of errors may all differ


@dataclass(frozen=True)
class PendingRollouts:
    batch: RolloutBatch  # without rewards; all samples invalid
    # (future, samples) per micro-batch that this rank asked about
    futures: tuple[tuple[RewardFuture, int], ...]
    queue: WorkQueue  # restores the batch's order


@dataclass(frozen=True)
class StepRollouts:
    prompts: list[Prompt]  # all that this rank drew
    position: dict[str, Any]  # of the loader after them
    batch: RolloutBatch  # this rank's samples; with dynamic filtering, only of groups to train on
    metrics: dict[str, float]  # means over all ranks and all samples drawn


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of a step."""

    prompts: list[Prompt]  # this rank's share
    position: dict[str, Any]  # of the loader after them
    handle: RolloutHandle | None = None  # where others generate


@dataclass(frozen=True)
class RolloutMaker:
    """Samples and scores responses."""

    cfg: ReinforceConfig
    model: MegatronGPTReinforceActorModel
    rm: RewardSource | None  # None scores nothing
    # Called with (prompts, validation); yields the batches to generate together.
    batch_iterator_cls: Callable[[Sequence[Prompt], bool], Iterable[Sequence[Prompt]]]
    loader: PromptLoader  # prompts of `make`
    clock: StepClock
    stop: StopRequest
    # a batch takes more than one optimizer step, so old log-probs are needed
    has_ratios: bool = False
    # Entered around the generation of a step.
    while_generating: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    generators: Generators | None = None  # on ranks of their own; None: this rank generates
    # steps after this one whose prompts are drawn, and generated if there are generators
    staleness: int = 0
    max_steps: int = sys.maxsize
    ahead: deque[PromptBatch] = field(default_factory=deque)  # this step's and the following ones'
    # with `takes_finished`, by number of the request
    under_way: dict[int, Prompt] = field(default_factory=dict)

    @property
    def is_off_policy(self) -> bool:
        """True if a step may train on samples of older weights than its own."""
        return self.staleness > 0

    @property
    def takes_finished(self) -> bool:
        """True if a step takes the prompts whose rollouts are finished first."""
        return self.generators is not None and self.generators.takes_finished

    def make(self, step: int) -> StepRollouts:
        """Make rollouts of the next prompts. `step`, from 1, keys the sampling noise.

        Raises StoppedEarly if some rank was asked to stop (the same step can be made again), RewardServerError without
        an answer or with too many failed samples.
        """
        if self.cfg.dynamic_filtering:
            made = self._draw_until_rewards_differ(step)
            return replace(made, batch=self.with_log_probs(made.batch))
        drawn = self._draw(step)
        counts = dict[str, float]()
        if self.takes_finished:
            drawn, pending, counts["dropped_groups"] = self._take_finished(step, len(drawn.prompts))
        else:
            pending = self._sample_step(drawn.prompts, step, drawn.handle)
        # Scores are computed elsewhere while log-probs are taken here.
        pending = replace(pending, batch=self.with_log_probs(pending.batch))
        batch = self._score_step(pending, step)
        # not before: a run that is stopped saves what was generated for this step
        self.ahead.popleft()
        if self.generators is not None and drawn.handle is not None:
            self.generators.forget(drawn.handle)
            for number in (
                drawn.handle.numbers[self.model.mesh.dp_rank] if self.takes_finished else ()
            ):
                self.under_way.pop(number, None)
        means = rollout_means(batch)
        if self.is_off_policy and batch.weight_versions is not None:
            # A generator may pad its responses beyond the longest.
            versions = batch.weight_versions[:, : batch.width]
            means["staleness"] = Mean.of(step - 1 - versions[batch.response_mask])
        metrics = reduce_metrics(means, self.model.mesh.gather_over_dp)
        return StepRollouts(drawn.prompts, drawn.position, batch, {**metrics, **counts})

    @property
    def is_over(self) -> bool:
        return self.loader.finished and not self.ahead

    def refit(self, version: int, *, as_oldest: bool = False) -> None:
        """Use the policy's current weights, which `version` steps have trained, from the next response on."""
        if self.generators is None:
            self.model.generator.refit()
        else:
            with self.clock.phase("send_weights"):
                self.generators.publish(version, as_oldest=as_oldest)

    def state(self, step: int) -> bytes:
        """Return the rollouts of steps after this one for a checkpoint, after waiting for them; on rank 0."""
        if self.generators is None:
            return b""
        steps = () if self.takes_finished else enumerate(self.ahead, step + 1)
        handles = {number: one.handle for number, one in steps if one.handle is not None}
        return self.generators.state(handles)

    def load_state(self, step: int, content: bytes, under_way: Sequence[int] = ()) -> None:
        """Inverse of `state`; the loader stands after this step, and `under_way` is of its `position`."""
        handles = {} if self.generators is None else self.generators.restore(content)
        size = self.loader.prompts_per_step
        for start in range(0, len(under_way), size):
            position = {**self.loader.state_dict(), "under_way": under_way[start + size :]}
            share = self.loader.share(under_way[start : start + size])
            self._add(PromptBatch(share, position), step + 1 + len(self.ahead))
        for number in sorted(handles)[len(self.ahead) :]:  # those of the chunks are asked for anew
            if self.loader.finished:
                return  # of fewer epochs than before
            self.ahead.append(
                PromptBatch(next(self.loader), self.loader.state_dict(), handles[number])
            )

    def answer(
        self,
        name: str,
        step: int,
        prompts: Sequence[Prompt],
        phases: PhaseTracker,
        num_samples: int = 1,
    ) -> RolloutBatch:
        """Sample this rank's prompts with validation's settings and score the responses; raises as `make`."""
        phases.begin(name)
        with self.while_generating():
            pending = self.sample(prompts, num_samples, 0)
        phases.begin(f"{name}: reward_wait", has_deadline=True)
        return self.score(pending, f"the {name} after step {step}")

    def sample(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        step: int,
        handle: RolloutHandle | None = None,
    ) -> PendingRollouts:
        """Generate batch by batch; each is scored while the next one is generated.

        `step` 0 is a validation. `handle` is of prompts that were given to the generators before.

        Raises StoppedEarly on all ranks if one was asked to stop, GenerationError if an engine of one cannot go on.
        """
        mesh = self.model.mesh
        validation = step == 0
        # All validations have the same seed: only the weights differ between them.
        seed = step_seed(self.model.settings.seed, step)
        if (own := self.generators) is not None:
            found = handle or own.submit(prompts, num_samples, seed, step, own.version)
            pending = self._received(prompts, own.collect(found, prompts))
            if handle is None:
                own.forget(found)
            return pending
        share = list(self.batch_iterator_cls(prompts, validation))
        queue = WorkQueue(mesh, share, shared=self.cfg.generation_work_queue and mesh.dp_size > 1)
        parts: list[Completions] = []
        futures: list[tuple[RewardFuture, int]] = []
        failure: Exception | None = None
        try:
            with contextlib.closing(queue), self.model.generator.awake():
                for batch in queue:
                    if self.stop.asked_of_block(mesh):
                        break
                    part = self.model.infer(batch, num_samples, seed, validation=validation)
                    parts.append(part)
                    if mesh.is_model_parallel_rank_0 and self.rm is not None:
                        future = self.rm.infer_rm(reward_request(self.model, batch, part))
                        futures.append((future, len(part.lengths)))
        except GenerationError as error:
            failure = error
        mesh.raise_if_any(failure)
        self.stop.check(mesh)
        completions = join_completions(queue.to_owners(parts), self.model.pad_id)
        return PendingRollouts(self._unscored(prompts, completions), tuple(futures), queue)

    def score(self, pending: PendingRollouts, name: str) -> RolloutBatch:
        """Wait for this rank's scores and set which samples are valid. All ranks fail together, and raise as `make`.

        `name` denotes the samples in error messages, e.g. "step 3".
        """
        batch = pending.batch
        mesh = self.model.mesh
        rewards = batch.rewards
        faults = list[str | None]([None] * len(batch.rewards))
        sources: dict[str, torch.Tensor] = {}
        answers: list[Rewards] | None = []
        with mesh.raise_on_all_ranks():
            if pending.futures:
                answers = self.stop.run_interruptible(
                    lambda: [scores_of(*asked) for asked in pending.futures]
                )
                if answers is None:
                    sentence = f"stopped by {self.stop.reason}"
                    raise StoppedEarly(sentence, key="run.stop.by_signal")
        if mesh.is_model_parallel_rank_0 and (own := pending.queue.to_owners(answers or [])):
            rewards = torch.cat([answer.values for answer in own])
            faults = [fault for answer in own for fault in faults_of(answer)]
            # Rollouts of a checkpoint may have been scored by other sources.
            unscored = [torch.full_like(answer.values, torch.nan) for answer in own]
            for source in dict.fromkeys(source for answer in own for source in answer.by_source):
                parts = zip(own, unscored, strict=True)
                sources[source] = torch.cat(
                    [part.by_source.get(source, nan) for part, nan in parts]
                )
        rewards, faults, sources = mesh.from_model_parallel_rank_0((rewards, faults, sources))
        self._check_failures(
            Counter(fault for fault in faults if fault is not None), len(rewards), name
        )
        scored = replace(batch, rewards=rewards, source_rewards=sources, score_faults=tuple(faults))
        return with_valid(scored, self.cfg.truncated_samples)

    def with_log_probs(self, batch: RolloutBatch) -> RolloutBatch:
        """Add policy and reference log-probs if needed: without a KL only a second update reads them."""
        where = (batch.sequences, batch.prompt_lengths, batch.response_lengths, batch.group_ids)
        # Ratios of a second update must start from the trainer's own log-probs.
        is_current = self.model.generator.is_exact and not self.is_off_policy
        is_known = self.cfg.generator_log_probs and is_current and not self.has_ratios
        if self.cfg.uses_reference or self.has_ratios:
            with self.clock.phase("logprobs"):
                own = (
                    batch.generator_log_probs
                    if is_known
                    else self.model.get_inference_log_probs(*where)
                )
                batch = replace(batch, log_probs=own)
        if self.cfg.uses_reference:
            with self.clock.phase("init_logprobs"):
                batch = replace(batch, init_log_probs=self.model.get_init_policy_logprobs(*where))
        self.stop.check(self.model.mesh)
        return batch

    def _draw(self, step: int) -> PromptBatch:
        """Return the prompts of a step, after drawing and submitting those of `staleness` steps after it."""
        while (
            len(self.ahead) <= self.staleness
            and (number := step + len(self.ahead)) <= self.max_steps
            and not self.loader.finished
        ):
            prompts = next(self.loader)
            self._add(PromptBatch(prompts, self.loader.state_dict()), number)
        return self.ahead[0]

    def _add(self, drawn: PromptBatch, number: int) -> None:
        """Submit the prompts of a step, which filtering does by itself."""
        if self.generators is not None and not self.cfg.dynamic_filtering:
            samples = self.cfg.num_rollouts_per_prompt
            version = max(0, number - 1 - self.staleness)
            seed = step_seed(self.model.settings.seed, number)
            handle = self.generators.submit(drawn.prompts, samples, seed, number, version)
            drawn = replace(drawn, handle=handle)
            if self.takes_finished:
                own = handle.numbers[self.model.mesh.dp_rank]
                self.under_way.update(zip(own, drawn.prompts, strict=True))
        self.ahead.append(drawn)

    def _take_finished(self, step: int, count: int) -> tuple[PromptBatch, PendingRollouts, int]:
        """Wait for the rollouts of this many of this rank's prompts, whichever are finished first."""
        own = self.generators
        mesh = self.model.mesh
        assert own is not None
        with self.clock.phase("generate"), self.while_generating():
            results, dropped = own.collect_first(
                list(self.under_way), count, step - 1 - self.staleness
            )
            prompts = [self.under_way[result.number] for result in results]
            pending = self._received(prompts, results)
        taken = mesh.gather_over_dp([result.number for result in results])
        left = [
            prompt.id
            for number, prompt in self.under_way.items()
            if number not in set(taken[mesh.dp_rank])
        ]
        position = {
            **self.loader.state_dict(),
            "under_way": [*chain.from_iterable(mesh.gather_over_dp(left))],
        }
        return PromptBatch(prompts, position, RolloutHandle(taken, 0)), pending, dropped

    def _received(
        self, prompts: Sequence[Prompt], results: Sequence[GenerationResult]
    ) -> PendingRollouts:
        """Return what generators made, as if it had been made here."""
        mesh = self.model.mesh
        parts = [result.completions for result in results]
        futures = ()
        if mesh.is_model_parallel_rank_0:
            futures = tuple(
                (CompletedRewards(r.rewards, r.failure), len(p.lengths))
                for r, p in zip(results, parts, strict=True)
            )
        queue = WorkQueue(mesh, [()] * len(parts), shared=False)
        return PendingRollouts(
            self._unscored(prompts, join_completions(parts, self.model.pad_id)), futures, queue
        )

    def _sample_step(
        self, prompts: Sequence[Prompt], step: int, handle: RolloutHandle | None = None
    ) -> PendingRollouts:
        with self.clock.phase("generate"), self.while_generating():
            return self.sample(prompts, self.cfg.num_rollouts_per_prompt, step, handle)

    def _score_step(self, pending: PendingRollouts, step: int) -> RolloutBatch:
        with self.clock.phase("reward_wait", has_deadline=True):
            return self.score(pending, f"step {step}")

    def _draw_until_rewards_differ(self, step: int) -> StepRollouts:
        """Draw prompts until enough groups have unequal rewards, or the bound or the epoch's end is reached.

        It stops at the epoch's end because a prompt must not occur twice in a step.
        """
        mesh = self.model.mesh
        wanted = self.loader.prompts_per_step
        epoch = self.loader.state_dict()["epoch"]
        all_prompts = []
        drawn = []
        with_spread = []
        position = self.loader.state_dict()
        for _ in range(1 + self.cfg.max_resampling_rounds):
            # First those that an earlier start of the run had under way.
            next_ones = (
                self.ahead.popleft()
                if self.ahead
                else PromptBatch(next(self.loader), self.loader.state_dict())
            )
            prompts = next_ones.prompts
            position = next_ones.position
            batch = self._score_step(self._sample_step(prompts, step), step)
            all_prompts += prompts
            drawn.append(batch)
            differs = has_reward_variance(batch.rewards, batch.group_ids, batch.valid)
            for ids in mesh.gather_over_dp(batch.group_ids[differs].tolist()):
                with_spread += dict.fromkeys(ids)  # each once, in order
            if (
                len(with_spread) >= wanted
                or self.loader.state_dict()["epoch"] != epoch
                or self.is_over
            ):
                break
        batch = join_rollouts(drawn, self.model.pad_id)
        kept = torch.isin(batch.group_ids, torch.tensor(with_spread[:wanted], dtype=torch.long))
        metrics = reduce_metrics(rollout_means(batch), mesh.gather_over_dp)
        groups = sum(mesh.gather_over_dp(len(all_prompts)))
        counts = {
            "groups_drawn": groups,
            "groups_without_spread": groups - len(with_spread),
            "groups_trained": min(len(with_spread), wanted),
            "resampling_rounds": len(drawn) - 1,
        }
        return StepRollouts(
            all_prompts, position, batch.select(kept.nonzero()[:, 0]), {**metrics, **counts}
        )

    def _check_failures(self, reasons: Counter[str], count: int, name: str) -> None:
        mesh = self.model.mesh
        bound = self.cfg.max_failed_fraction
        failed, total = mesh.sum_over_dp(torch.tensor([reasons.total(), count])).tolist()
        if not failed:
            return
        every = sum(mesh.gather_over_dp(reasons), Counter[str]())
        told = [f"{text} ({number})" for text, number in every.most_common(_TOLD)]
        told += [f"and {len(every) - _TOLD} more"] if len(every) > _TOLD else []
        found = f"scoring failed for {failed / total:.1%} of the samples of {name}"
        why = ", ".join(told)
        if failed > bound * total:
            more = (
                "; the reward server's log says more"
                if every.keys() & set(STATUS_TEXT.values())
                else ""
            )
            raise TooManyFailedRewardsError(
                f"{found}, above trainer.reinforce.max_failed_fraction = {bound}; reasons: {why}. "
                f"Nothing was trained on them{more}",
                key="rewards.samples.too_many_failed",
            )
        if mesh.is_main:
            logger.warning("%s; reasons: %s", found, why)

    def _unscored(self, prompts: Sequence[Prompt], completions: Completions) -> RolloutBatch:
        repeated = completions.repeat_to_samples(prompts)
        sequences, prompt_lengths = join_prompts_and_responses(
            repeated, completions, self.model.pad_id
        )
        count = len(repeated)
        return RolloutBatch(
            sequences=sequences,
            prompt_lengths=prompt_lengths,
            response_lengths=completions.lengths,
            group_ids=torch.tensor([prompt.id for prompt in repeated], dtype=torch.long),
            sample_ids=torch.arange(count) % max(count // max(len(prompts), 1), 1),
            finish_reasons=completions.finish_reasons,
            rewards=torch.full((count,), float("nan")),
            valid=torch.zeros(count, dtype=torch.bool),
            generator_log_probs=completions.log_probs,
            weight_versions=completions.weight_versions,
        )
