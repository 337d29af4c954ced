"""The REINFORCE trainer; `fit` is the training loop.

There is no critic, and by default one optimizer step per rollout batch, hence no ratio and no clipping.

Notation: P prompts on this data-parallel rank, G samples a prompt, N = P * G sequences, T response tokens.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reinforce_rl.data.batches import Prompt, ReinforceBatch, RolloutBatch
from reinforce_rl.errors import CheckpointError, GenerationError, RewardServerError, StoppedEarly
from reinforce_rl.monitoring.metrics import (
    gap_by_age,
    gap_quantiles,
    reinforce_means,
    sampled_entropy,
    take_means,
    update_metrics,
)
from reinforce_rl.monitoring.records import Samples, join_samples, sample_rows, token_columns
from reinforce_rl.monitoring.stragglers import of_this_rank
from reinforce_rl.rewards.base import RewardSource
from reinforce_rl.runtime.phases import StepClock
from reinforce_rl.runtime.stop import Outlook, RunTimer
from reinforce_rl.trainer.advantages import reinforce_batch
from reinforce_rl.trainer.rollouts import RolloutMaker
from reinforce_rl.trainer.services import TrainerServices
from reinforce_rl.trainer.state import Divergence, PastSteps
from reinforce_rl.trainer.step_recorder import LOSS, SUM
from reinforce_rl.trainer.updates import denominators_of, mini_batches, total_steps

if TYPE_CHECKING:
    from reinforce_rl.actor.policy import MegatronGPTReinforceActorModel
    from reinforce_rl.config.actor import ReinforceConfig
    from reinforce_rl.data.prompts import PromptLoader
    from reinforce_rl.megatron.checkpointer import Checkpointer
    from reinforce_rl.monitoring.run import RunMonitor

STATE_VERSION = 1
ROLLOUTS_FILE = "rollouts.pt"  # of a checkpoint: those of the next steps

Metrics = dict[str, float]
Timings = dict[str, float]


class ReinforceTrainer:
    """Runs generation, scoring and updates, on every rank alike.

    Args:
        cfg: `trainer.reinforce`.
        optimizer: `.step()` applies the gradient of `model.get_loss_and_metrics`; see `ActorOptimizer`.
        scheduler: learning rate; exposed only, the optimizer steps it.
        train_dataloader_builder, val_...: called with `collate_fn`; None for no validation.
        batch_iterator_cls: called with (prompts, validation); yields the batches to generate together.
        logger: does nothing on every rank but the first.
        services: the arguments that NeMo-Aligner's trainer does not have; None for their defaults.
    """

    def __init__(
        self,
        cfg: ReinforceConfig,
        model: MegatronGPTReinforceActorModel,
        optimizer: Any,
        scheduler: Any,
        train_dataloader_builder: Callable[..., PromptLoader],
        val_dataloader_builder: Callable[..., Iterable[Sequence[Prompt]]] | None,
        collate_fn: Callable[[list[Prompt]], Any],
        rm: RewardSource | None,
        batch_iterator_cls: Callable[[Sequence[Prompt], bool], Iterable[Sequence[Prompt]]],
        logger: RunMonitor,
        ckpt_callback: Checkpointer,
        run_timer: RunTimer,
        *,
        services: TrainerServices | None = None,
    ):
        services = services or TrainerServices()
        self.cfg = cfg
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.train_dataloader = train_dataloader_builder(collate_fn=collate_fn)
        self.val_dataloader = None
        if val_dataloader_builder is not None:
            self.val_dataloader = val_dataloader_builder(collate_fn=collate_fn)
        self.test_dataloader = None
        if services.test_dataloader_builder is not None:
            self.test_dataloader = services.test_dataloader_builder(collate_fn=collate_fn)
        self.rm = rm
        self.logger = logger
        self.ckpt_callback = ckpt_callback
        self.run_timer = run_timer
        self.step = 0  # rollout batches trained on
        self.wandb_run_id: str | None = None
        self.max_steps = total_steps(cfg, len(self.train_dataloader))
        self._stop = services.stop
        self._prompts_per_update = services.prompts_per_update
        self._data_position = self._position = self.train_dataloader.state_dict()
        self._saved_step: int | None = None
        self._validation_is_due = True
        self._outlook = Outlook()
        self._best = services.best
        self._prompts: list[Prompt] = []
        self._log_probs: Tensor | None = None  # by the policy before the last update
        self._divergence = Divergence(cfg.max_skipped_steps)
        self._past = PastSteps(cfg)
        self._activity = services.activity
        self.recorder = services.recorder
        self._clock = StepClock(
            services.activity,
            model.mesh.device,
            among_ranks=model.mesh.world_size > 1,
            profiler=services.profiler,
        )
        self._rollouts = RolloutMaker(
            cfg,
            model,
            rm,
            batch_iterator_cls,
            self.train_dataloader,
            self._clock,
            self._stop,
            has_ratios=cfg.reinforce_epochs > 1 or services.prompts_per_update is not None,
            # Frees GPU memory for the generator.
            while_generating=optimizer.offloaded if model.settings.offload_optimizer else contextlib.nullcontext,
            generators=services.generators,
            staleness=services.max_staleness,
            max_steps=self.max_steps,
        )

    def fit(self) -> None:
        """Train until steps, epochs or time run out, validating and saving at intervals.

        Raises, after the last complete step is saved: StoppedEarly out of time, at a signal or by an alert,
        RewardServerError if the reward server missed its deadline or failed too many samples, GenerationError if the
        engine cannot go on.
        Raises DivergedError if training has diverged; nothing is saved.
        """
        self._stop.wait_for_checks()
        try:
            self._look_at_the_clock()
            if self._validation_is_due and self._outlook.validates:
                self.validate()
                self.logger.commit(self.step)
                self._look_at_the_clock()
            while self._goes_on():
                self._clock.start(self.step + 1)
                rollouts, metrics, _ = self.generate_rollouts()
                batch, reinforce_metrics = self.generate_reinforce_data(rollouts)
                with self._clock.phase("train_time"):
                    training_metrics = self.run_training(batch)
                self._rollouts.refit(self.step + 1)
                self.step += 1
                self._data_position = self._position

                self._clock.stop()
                self._log_step({**metrics, **reinforce_metrics, **training_metrics}, batch)
                self._validation_is_due = self._is_due(self.cfg.val_check_interval)
                self._look_at_the_clock()
                if self._validates():
                    self.validate()
                self.logger.commit(self.step)
                self.ckpt_callback.poll()
                if self._is_due(self.cfg.save_interval) or self.step in self._best.steps:
                    self.save()
            self.save(wait=True)
            self.test()
        except (RewardServerError, GenerationError):
            self.logger.note(f"Stopping after step {self.step} of {self.max_steps}; saving")
            self._save_last_step()
            raise
        except StoppedEarly as error:
            text = f"{error} after step {self.step} of {self.max_steps}"
            self.logger.note(f"{text}; saving")
            self._save_last_step()
            sentence = f"{text}; the same command goes on from there"
            raise type(error)(sentence, key=error.key) from None

    def generate_rollouts(self) -> tuple[RolloutBatch, Metrics, Timings]:
        """Sample and score the next prompts and take log-probs.

        Returns this rank's samples, means over all ranks, and this rank's seconds per phase.
        """
        made = self._rollouts.make(self.step + 1)
        self._prompts, self._position = made.prompts, made.position
        return made.batch, made.metrics, self._clock.seconds

    def generate_reinforce_data(self, rollout_batch: RolloutBatch) -> tuple[ReinforceBatch, Metrics]:
        """Return the `reinforce_batch` of this rank, and means over all ranks."""
        mesh = self.model.mesh
        data = reinforce_batch(
            rollout_batch,
            self.cfg,
            self._past,
            step=self.step + 1,
            max_length=self.model.settings.sampling.max_length,
            gather_over_ranks=mesh.gather_over_dp,
            rank=mesh.dp_rank,
            sum_over_ranks=mesh.sum_over_dp,
        )
        return data, take_means(reinforce_means(data), mesh.gather_over_dp)

    def run_training(self, batch: ReinforceBatch) -> Metrics:
        """Update the policy with one or more optimizer steps on the rollout batch."""
        mesh, updates, sums, rollouts = self.model.mesh, [], Counter[str](), batch.rollouts
        mask, log_probs, generator = rollouts.response_mask, rollouts.log_probs, rollouts.generator_log_probs
        log_probs = torch.full(mask.shape, math.nan) if log_probs is None else log_probs[:, : rollouts.width]
        in_loss = self._past.beta.value if self.cfg.kl_placement == "loss" else None
        past, terms = self._past.state_dict(), []
        if self.recorder is not None:
            self.recorder.before_update()
        seed, ids = self.model.settings.seed * 1_000_003 + self.step, mesh.gather_over_dp(batch.rollouts.group_ids)
        for rows in mini_batches(ids, mesh.dp_rank, self._prompts_per_update, self.cfg.reinforce_epochs, seed):
            denominators = denominators_of(batch, rows, self.model.settings.sampling.max_length, mesh.sum_over_dp)
            # The ratio is exactly 1 until the first optimizer step on this batch.
            share = self.model.get_loss_and_metrics(
                batch, denominators, rows=rows, kl_coefficient=in_loss, on_policy=not updates
            )
            updates.append(self.optimizer.step())
            terms.append({LOSS: share.loss, **vars(updates[-1]), **{SUM + k: v for k, v in share.sums.items()}})
            sums.update({"loss": share.loss, **share.sums})
            if share.log_probs is not None:
                log_probs = torch.where(share.log_probs.isnan(), log_probs, share.log_probs)
        metrics = {**update_metrics(sums, updates, mesh.gather_over_dp), "kl_coefficient": self._past.beta.value}
        self._log_probs, kept = log_probs, mask & batch.trains[:, None]
        gaps = torch.zeros(0) if generator is None else (log_probs - generator[:, : rollouts.width])[kept]
        metrics |= gap_quantiles(gaps, mesh.sum_over_dp)
        metrics |= take_means(sampled_entropy(log_probs[kept]), mesh.gather_over_dp)
        if self._rollouts.staleness and rollouts.weight_versions is not None and generator is not None:
            ages = self.step - rollouts.weight_versions[:, : rollouts.width][kept]
            metrics |= take_means(gap_by_age(gaps, ages), mesh.gather_over_dp)
        self._divergence.check(self.step + 1, updates, metrics["actor_loss"], mesh, self.logger.note)
        self._past.add(batch, mesh.gather_over_dp)
        if self.recorder is not None:
            self.recorder.after_update(self.step + 1, terms, past, self._position)
        return metrics

    def validate(self) -> None:
        """Score one response to each prompt of the validation set, with validation's own sampling."""
        if self.val_dataloader is None or self.cfg.val_check_interval == 0:
            return
        with self.run_timer.validating():
            metrics, samples = self._evaluate("validation", self.val_dataloader)
        self.logger.log_validation(self.step, metrics, samples)
        self._validation_is_due = False
        if self.step > 0:
            self._best.add(self.step, metrics)

    def test(self) -> None:
        if self.test_dataloader is not None:
            self.logger.log_test(self.step, *self._evaluate("test", self.test_dataloader))
            self.logger.commit(self.step)

    def _evaluate(self, name: str, prompts: Iterable[Sequence[Prompt]]) -> tuple[Metrics, Samples]:
        records_tokens = self.logger.records_tokens(self.step)
        return self._rollouts.evaluate(name, self.step, prompts, self._activity, records_tokens=records_tokens)

    def save(self, *, wait: bool = False) -> None:
        """Save the last complete step, unless saved already, at step 0, or while the loss is not finite.

        `wait` waits for background writes too.
        """
        if self.recorder is not None:
            self.recorder.finish()
        if self.step not in (0, self._saved_step) and self._divergence.is_sound:
            self._activity.begin("checkpoint")
            began = time.monotonic()
            more = {ROLLOUTS_FILE: self._rollouts.state(self.step)}
            waited = time.monotonic() - began
            self.ckpt_callback.save(self.step, self.state_dict(), keep=self._best.steps, more=more, waited=waited)
            self._saved_step = self.step
            self.logger.report()
        if wait:
            self.ckpt_callback.finish()

    def _save_last_step(self) -> None:
        # The step is complete even if its validation was aborted; the resumed run makes up for it.
        self.logger.commit(self.step)
        self.save(wait=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides weights, optimizer and random state."""
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "epoch": self._data_position["epoch"],
            "data": self._data_position,
            "wandb_run_id": self.wandb_run_id,
            **self._past.state_dict(),
            "lora": self.model.lora,
            "best": self._best.state_dict(),
            "validation_is_due": self._validation_is_due,
        }

    def load_state_dict(self, state: dict[str, Any], more: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Inverse of `state_dict`; `more` are the checkpoint's other files.

        Raises CheckpointError: the state has another version or other data, or is another program's.
        """
        if "validation_is_due" not in state and state.get("version") == STATE_VERSION:
            raise CheckpointError(
                "the checkpoint is not of an actor's training, but of another program, such as train-rm. "
                "Choose another exp_manager.explicit_log_dir",
                key="checkpoint.state.other_program",
            )
        if state.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"the trainer's state in the checkpoint has version {state.get('version')!r}; expected "
                f"{STATE_VERSION}. Go on with the reinforce_rl that wrote it, or start a new run in "
                "another folder",
                key="checkpoint.state.other_version",
            )
        self.step = self._saved_step = state["step"]
        self.train_dataloader.load_state_dict(state["data"])
        self._data_position = self.train_dataloader.state_dict()
        self.wandb_run_id = state["wandb_run_id"]
        self._past.load_state_dict(state)
        self._best.load_state_dict(state["best"], self.ckpt_callback.holds)
        self._validation_is_due = state["validation_is_due"]
        self._rollouts.refit(self.step, as_oldest=True)
        self._rollouts.load_state(self.step, more.get(ROLLOUTS_FILE, b""), state["data"].get("under_way", ()))

    def _log_step(self, metrics: Metrics, batch: ReinforceBatch) -> None:
        drawn, left = self._data_position, self._data_position.get("under_way", ())
        position = {"epoch": drawn["epoch"], "consumed_prompts": drawn["consumed_prompts"] - len(left)}
        numbers, clock, mesh = {**metrics, **position}, self._clock, self.model.mesh
        seconds = {**clock.seconds, **({"record": self.recorder.seconds} if self.recorder else {})}
        self.logger.log_step(self.step, numbers, seconds, self._samples(batch), clock.gigabytes)
        if mesh.world_size > 1:
            own = of_this_rank(clock.own_seconds, asks_for_rewards=mesh.is_block_leader)
            self.logger.log_ranks(self.step, mesh.gather_on_main(own), clock.seconds["step_time"])

    def _samples(self, batch: ReinforceBatch) -> Samples:
        """Return the samples of all ranks on the first, none on the others."""
        mesh, cfg, tokenizer = self.model.mesh, self.cfg, self.model.tokenizer
        rollouts = batch.rollouts
        # The trainer's own from before the update, which the KL and the ratios were taken from; else the update's.
        if rollouts.log_probs is None or rollouts.log_probs is rollouts.generator_log_probs:
            rollouts = replace(rollouts, log_probs=self._log_probs)
        parts: list[Samples] = []
        if mesh.is_block_leader:
            skips = self.model.settings.skip_special_tokens
            rows = sample_rows(self.step, self._prompts, rollouts, tokenizer, batch, skip_special_tokens=skips)
            tokens = None
            if self.logger.records_tokens(self.step):
                advantages = batch.advantages if cfg.credit_assignment == "token" else None
                tokens = token_columns(rollouts, kl_estimator=cfg.kl_estimator_used, advantages=advantages)
            parts = mesh.gather_over_dp_on_first(Samples(rows, tokens))
        return join_samples(parts, tokenizer)

    def _is_due(self, interval: int) -> bool:
        # Dynamic filtering may use up the prompts before `max_steps`.
        return interval > 0 and (self.step % interval == 0 or self._is_over())

    def _is_over(self) -> bool:
        return self.step >= self.max_steps or self._rollouts.is_over

    def _look_at_the_clock(self) -> None:
        # Rank 0's clock decides: all ranks must stop at the same step.
        interval, step = self.cfg.val_check_interval, self.step
        validates = self.val_dataloader is not None and interval > 0
        outlook = self.run_timer.outlook(
            validation=validates and self._validation_is_due,
            validation_after=validates and ((step + 1) % interval == 0 or step + 1 == self.max_steps),
            save=self._is_due(self.cfg.save_interval) or (self._validation_is_due and self._best.keep > 0),
            running_save=self.ckpt_callback.is_writing,
        )
        self._outlook = self.model.mesh.from_main(outlook)

    def _validates(self) -> bool:
        if self._is_over():
            return self._validation_is_due
        # Short of time, this run ends here: validate its last step although the interval is not over.
        return self._outlook.validates and (self._validation_is_due or self._outlook.shortage is not None)

    def _goes_on(self) -> bool:
        """Return True if there is another step.

        Raises StoppedEarly if it is left to another run, DivergedError if the last one leaves nothing to keep.
        """
        if self._is_over():
            self._divergence.check_end(self.step)
            return False
        self._stop.check(self.model.mesh, self.logger.verdict)
        if self._outlook.shortage is not None:
            raise StoppedEarly(self._outlook.shortage, key="run.time.used_up")
        self.run_timer.begin_step()
        return True
