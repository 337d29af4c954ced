"""The trainer: `fit` shows one iteration on one screen.

What this is not: there is no critic, no ratio and no clipping of one; each rollout batch takes one optimizer step.

Notation: P prompts on this data-parallel rank, G samples a prompt, N = P * G sequences.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from reinforce_rl.algorithms.advantages import RewardGroups, RunningMean, estimator_of
from reinforce_rl.algorithms.kl import sequence_kl
from reinforce_rl.algorithms.loss import Denominators
from reinforce_rl.errors import RewardServerError, TooManyFailedRewardsError
from reinforce_rl.monitoring.metrics import reinforce_means, rollout_means, take_means
from reinforce_rl.monitoring.samples import decode_responses, sample_rows
from reinforce_rl.reward.base import STATUS_OK, STATUS_TEXT, RewardFuture, RewardRequest, RewardSource
from reinforce_rl.rollout import (
    Completions,
    Prompt,
    ReinforceBatch,
    RolloutBatch,
    join_completions,
    join_prompts_and_responses,
)

if TYPE_CHECKING:
    from reinforce_rl.actor.model import MegatronGPTReinforceActorModel
    from reinforce_rl.config import ReinforceConfig
    from reinforce_rl.data.loader import FixedPrompts, PromptLoader
    from reinforce_rl.megatron.checkpoint import Checkpointer
    from reinforce_rl.monitoring.run import RunMonitor
    from reinforce_rl.run_timer import RunTimer

Metrics = dict[str, float]
Timings = dict[str, float]


class ReinforceTrainer:
    """Coordinates generation, scoring and updates. Every rank runs the same code.

    Args:
        cfg: `trainer.reinforce` of the configuration.
        model: policy and reference.
        optimizer: `.step()` applies the gradient that `model.get_loss_and_metrics` left; see `ActorOptimizer`.
        scheduler: of the learning rate; kept for its users, stepped by the optimizer.
        train_dataloader_builder: called with `collate_fn`, gives a `PromptLoader`.
        val_dataloader_builder: called with `collate_fn`, gives a `FixedPrompts`; None for no validation.
        collate_fn: makes a batch of a list of prompts.
        rm: where rewards come from.
        batch_iterator_cls: called with (prompts, validation), iterates over the batches that are generated together.
        logger: what people see and what is written down; it does nothing on every rank but the first.
        ckpt_callback: saves and restores.
        run_timer: says when the time is used up.
    """

    def __init__(
        self,
        cfg: ReinforceConfig,
        model: MegatronGPTReinforceActorModel,
        optimizer: Any,
        scheduler: Any,
        train_dataloader_builder: Callable[..., PromptLoader],
        val_dataloader_builder: Callable[..., FixedPrompts] | None,
        collate_fn: Callable[[list[Prompt]], Any],
        rm: RewardSource,
        batch_iterator_cls: Callable[[Sequence[Prompt], bool], Iterable[Sequence[Prompt]]],
        logger: RunMonitor,
        ckpt_callback: Checkpointer,
        run_timer: RunTimer,
    ):
        self.cfg = cfg
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.train_dataloader = train_dataloader_builder(collate_fn=collate_fn)
        self.val_dataloader = val_dataloader_builder(collate_fn=collate_fn) if val_dataloader_builder else None
        self.rm = rm
        self.batch_iterator_cls = batch_iterator_cls
        self.logger = logger
        self.ckpt_callback = ckpt_callback
        self.run_timer = run_timer
        self.step = 0  # optimizer steps done; also the rollout batches used up, since each takes one
        self.wandb_run_id: str | None = None
        self.max_steps = total_steps(cfg, len(self.train_dataloader))
        self._data_position = self.train_dataloader.state_dict()
        self._saved_step: int | None = None
        self._prompts: list[Prompt] = []
        self._past_rewards = RunningMean()  # of all steps before this one, for the estimator that wants it
        self._failures: Counter[str] = Counter()  # of this rank's last scoring, by reason

    def fit(self) -> None:
        """Train until the steps, the epochs or the time are used up, validating and saving on the way.

        Raises:
            RewardServerError: the reward server did not answer within its deadline, or failed too many samples. The
                state after the last complete step is saved first.
        """
        try:
            if self.step == 0:
                self.validate()
            while self.step < self.max_steps and not self._out_of_time():
                started = time.perf_counter()
                rollouts, metrics, timings = self.generate_rollouts()
                batch, reinforce_metrics = self.generate_reinforce_data(rollouts)
                with self._timed("train_time", timings):
                    update_metrics = self.run_training(batch)
                self.step += 1
                self._data_position = self.train_dataloader.state_dict()

                timings["step_time"] = time.perf_counter() - started
                self._log_step({**metrics, **reinforce_metrics, **update_metrics}, timings, batch)
                if self._is_due(self.cfg.val_check_interval):
                    self.validate()
                self.logger.commit(self.step)
                if self._is_due(self.cfg.save_interval):
                    self.save()
            self.save()
        except RewardServerError as error:
            self.logger.note(f"Stopping: {error}")
            self.save()
            raise

    def generate_rollouts(self) -> tuple[RolloutBatch, Metrics, Timings]:
        """Sample, score and take log-probs of the next batch of prompts.

        Returns:
            this rank's samples; means over all ranks; seconds of each phase on this rank.
        """
        timings: Timings = {}
        self._prompts = next(self.train_dataloader)
        with self._timed("generate", timings):
            completions, futures = self._generate_and_submit(self._prompts, self.cfg.num_rollouts_per_prompt)
        batch = self._unscored(self._prompts, completions)
        where = (batch.sequences, batch.prompt_lengths, batch.response_lengths)
        if self.cfg.initial_policy_kl_penalty > 0:  # without a KL nobody reads log-probs before the update
            with self._timed("logprobs", timings):
                batch = replace(batch, log_probs=self.model.get_inference_log_probs(*where))
            with self._timed("init_logprobs", timings):
                batch = replace(batch, init_log_probs=self.model.get_init_policy_logprobs(*where))
        with self._timed("reward_wait", timings):
            batch = self._scored(batch, futures)
        metrics = take_means(rollout_means(batch), self.model.mesh.sum_over_dp)
        self._refuse_too_many_failures(metrics)
        return batch, metrics, timings

    def generate_reinforce_data(self, rollout_batch: RolloutBatch) -> tuple[ReinforceBatch, Metrics]:
        """Fold the KL into the rewards and take advantages.

        They are taken of the global batch, so that no estimator depends on how it lies on the ranks.

        Returns:
            what the loss needs; means over all ranks.
        """
        batch = rollout_batch
        if batch.init_log_probs is None:
            kl = torch.zeros_like(batch.rewards)
        else:
            kl = sequence_kl(
                batch.log_probs,
                batch.init_log_probs,
                batch.response_mask,
                estimator="absolute_k1" if self.cfg.use_absolute_kl else self.cfg.kl_estimator,
                reduction=self.cfg.kl_reduction,
            )
        rewards_with_kl = batch.rewards - self.cfg.initial_policy_kl_penalty * kl
        parts = self.model.mesh.gather_over_dp((rewards_with_kl, batch.group_ids, batch.valid))
        rewards, group_ids, valid = (torch.cat(column) for column in zip(*parts, strict=True))
        groups = RewardGroups.of(rewards, group_ids, valid, self._past_rewards.value)
        found = estimator_of(self.cfg.advantage_estimator)(groups)
        start = sum(len(part[0]) for part in parts[: self.model.mesh.dp_rank])
        own = slice(start, start + len(rewards_with_kl))
        data = ReinforceBatch(batch, kl, rewards_with_kl, found.baseline[own], found.values[own], found.trains[own])
        return data, take_means(reinforce_means(data), self.model.mesh.sum_over_dp)

    def run_training(self, batch: ReinforceBatch) -> Metrics:
        """One optimizer step on the whole rollout batch."""
        mesh = self.model.mesh
        tokens = torch.where(batch.trains, batch.rollouts.response_lengths, 0)
        sequences, tokens = mesh.sum_over_dp(torch.stack((batch.trains.sum(), tokens.sum())).double()).tolist()
        length = float(self.model.settings.sampling.max_length)
        share = self.model.get_loss_and_metrics(batch, Denominators(sequences, tokens, length))
        loss = float(mesh.sum_over_dp(torch.tensor(share, dtype=torch.float64)))
        update = self.optimizer.step()
        self.model.generator.refit()
        scored = batch.rewards_with_kl[batch.rollouts.valid].double()
        sums = torch.stack((scored.sum(), torch.tensor(float(len(scored)), dtype=torch.float64)))
        self._past_rewards.update(*mesh.sum_over_dp(sums).tolist())
        return {"actor_loss": loss, "grad_norm": update.grad_norm, "lr": update.lr, "skipped_step": update.skipped}

    def validate(self) -> None:
        """Score one response to each prompt of the fixed validation set, with validation's own sampling."""
        if self.val_dataloader is None or self.cfg.val_check_interval == 0:
            return
        self.logger.phase("validation")
        prompts = [prompt for part in self.val_dataloader for prompt in part]
        completions, futures = self._generate_and_submit(prompts, 1, validation=True)
        batch = self._scored(self._unscored(prompts, completions), futures)
        metrics = take_means(rollout_means(batch), self.model.mesh.sum_over_dp)
        rows = self._gather_rows(sample_rows(self.step, prompts, batch, self.model.tokenizer))
        self.logger.log_validation(self.step, metrics, rows)
        if self.step == 0:
            self.logger.commit(0)

    def save(self) -> None:
        """Write a checkpoint of the state after the last complete step, unless it is on disk already.

        Before the first step there is nothing to go on from, and the optimizer has no state yet that could be read.
        """
        if self.step in (0, self._saved_step):
            return
        self.logger.phase("checkpoint")
        self.ckpt_callback.save(self.step, self.state_dict())
        self._saved_step = self.step
        self.logger.report()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides weights, optimizer and random state."""
        return {
            "version": 1,
            "step": self.step,
            "epoch": self._data_position["epoch"],
            "data": self._data_position,
            "wandb_run_id": self.wandb_run_id,
            "past_rewards": dataclasses.asdict(self._past_rewards),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.step = self._saved_step = state["step"]
        self.train_dataloader.load_state_dict(state["data"])
        self._data_position = self.train_dataloader.state_dict()
        self.wandb_run_id = state["wandb_run_id"]
        self._past_rewards = RunningMean(**state["past_rewards"])

    def _generate_and_submit(
        self, prompts: Sequence[Prompt], num_samples: int, *, validation: bool = False
    ) -> tuple[Completions, list[RewardFuture]]:
        """Generate batch by batch; each is scored while the next one is generated."""
        # One seed for all of validation, so that only the weights make a difference; another one every step.
        seed = self.model.settings.seed * 1_000_003 + (0 if validation else self.step + 1)
        parts: list[Completions] = []
        futures: list[RewardFuture] = []
        for batch in self.batch_iterator_cls(prompts, validation):
            part = self.model.infer(batch, num_samples, seed, validation=validation)
            parts.append(part)
            if self.model.mesh.tp_rank == 0:
                futures.append(self.rm.infer_rm(self._reward_request(batch, part)))
        return join_completions(parts, self.model.pad_id), futures

    def _reward_request(self, prompts: Sequence[Prompt], completions: Completions) -> RewardRequest:
        repeated = completions.repeat_to_samples(prompts)
        sequences, prompt_lengths = join_prompts_and_responses(repeated, completions, self.model.pad_id)
        return RewardRequest(
            tokens=sequences,
            lengths=prompt_lengths + completions.lengths,
            prompts=tuple(prompt.text for prompt in repeated),
            responses=tuple(decode_responses(self.model.tokenizer, completions.tokens, completions.lengths)),
        )

    def _unscored(self, prompts: Sequence[Prompt], completions: Completions) -> RolloutBatch:
        repeated = completions.repeat_to_samples(prompts)
        sequences, prompt_lengths = join_prompts_and_responses(repeated, completions, self.model.pad_id)
        count = len(repeated)
        return RolloutBatch(
            sequences=sequences,
            prompt_lengths=prompt_lengths,
            response_lengths=completions.lengths,
            group_ids=torch.tensor([prompt.id for prompt in repeated], dtype=torch.long),
            sample_ids=torch.arange(count) % max(count // max(len(prompts), 1), 1),
            finish_reasons=completions.finish_reasons,
            rewards=torch.full((count,), float("nan")),
            log_probs=torch.zeros((count, completions.tokens.shape[1])),
            init_log_probs=None,
            valid=torch.zeros(count, dtype=torch.bool),
        )

    def _scored(self, batch: RolloutBatch, futures: list[RewardFuture]) -> RolloutBatch:
        """Wait for this rank's scores, and say which samples count. All ranks fail together."""
        failure: Exception | None = None
        rewards, status = batch.rewards, torch.zeros(len(batch.rewards), dtype=torch.int32)
        try:
            if futures:
                answers = [future.result() for future in futures]
                rewards = torch.cat([answer.values for answer in answers])
                status = torch.cat([answer.status for answer in answers])
        except RewardServerError as error:
            failure = error
        self.model.mesh.check_together(failure)
        rewards, status = self.model.mesh.from_tp_rank_0((rewards, status))
        failed = [code for code in status.tolist() if code != STATUS_OK]
        self._failures = Counter(STATUS_TEXT.get(code, f"status {code}") for code in failed)
        valid = torch.isfinite(rewards) & (batch.response_lengths > 0)
        if self.cfg.truncated_samples == "drop":
            valid &= batch.is_end
        return replace(batch, rewards=rewards, valid=valid)

    def _refuse_too_many_failures(self, metrics: Metrics) -> None:
        failed = 1.0 - metrics["fraction_of_samples_scored"]
        if failed > self.cfg.max_failed_fraction:
            reasons = sum(self.model.mesh.gather_over_dp(self._failures), Counter())
            told = ", ".join(f"{text} ({count})" for text, count in reasons.most_common())
            raise TooManyFailedRewardsError(
                f"the reward server failed on {failed:.1%} of the samples of step {self.step + 1}, above "
                f"trainer.reinforce.max_failed_fraction = {self.cfg.max_failed_fraction}; reasons: {told}. "
                "Nothing was trained on them; see the server's log"
            )

    def _log_step(self, metrics: Metrics, timings: Timings, batch: ReinforceBatch) -> None:
        rows = sample_rows(self.step, self._prompts, batch.rollouts, self.model.tokenizer, batch)
        position = {"epoch": self._data_position["epoch"], "consumed_prompts": self._data_position["consumed_prompts"]}
        self.logger.log_step(self.step, {**metrics, **position}, timings, self._gather_rows(rows))

    def _gather_rows(self, rows: list[Any]) -> list[Any]:
        return [row for part in self.model.mesh.gather_over_dp(rows) for row in part]

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and (self.step % interval == 0 or self.step == self.max_steps)

    def _out_of_time(self) -> bool:
        """Asked of all ranks, since their clocks differ and all must stop at the same step."""
        out = self.model.mesh.any_rank(self.run_timer.is_finished())
        if out:
            self.logger.note(f"The time of this run is used up after step {self.step}; saving and ending.")
        return out

    @contextlib.contextmanager
    def _timed(self, name: str, timings: Timings) -> Iterator[None]:
        self.logger.phase(name)
        started = time.perf_counter()
        yield
        timings[name] = time.perf_counter() - started


def total_steps(cfg: ReinforceConfig, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run, resumes included."""
    by_epochs = cfg.max_epochs * steps_per_epoch
    return by_epochs if cfg.max_steps == -1 else min(cfg.max_steps, by_epochs)
