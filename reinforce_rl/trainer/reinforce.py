"""The REINFORCE trainer; `fit` is the training loop.

There is no critic, and by default one optimizer step per rollout batch, hence no ratio and no
clipping.

Notation: P prompts on this data-parallel rank, G samples a prompt, N = P * G sequences, T response
tokens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from reinforce_rl.data.batches import Prompt, ReinforceBatch, RolloutBatch
from reinforce_rl.data.sampler import step_seed
from reinforce_rl.errors import CheckpointError, GenerationError, RewardServerError, StoppedEarly
from reinforce_rl.monitoring.metrics import (
    reduce_metrics,
    reinforce_means,
    trained_token_metrics,
    update_metrics,
    validation_means,
)
from reinforce_rl.monitoring.records import Samples
from reinforce_rl.monitoring.stragglers import of_this_rank
from reinforce_rl.rewards.base import RewardSource
from reinforce_rl.rollout.source import BatchIterator, RolloutContext, RolloutSource
from reinforce_rl.runtime.phases import StepClock
from reinforce_rl.runtime.stop import RunTimer, TimeBudget
from reinforce_rl.trainer.advantages import reinforce_batch
from reinforce_rl.trainer.samples import gather_samples
from reinforce_rl.trainer.services import TrainerServices
from reinforce_rl.trainer.state import NonFiniteGuard, RunningBaselines
from reinforce_rl.trainer.updates import (
    PolicyUpdate,
    denominators_of,
    mini_batches,
    total_steps,
)

if TYPE_CHECKING:
    from reinforce_rl.config.actor import ReinforceConfig
    from reinforce_rl.data.prompts import PromptLoader
    from reinforce_rl.megatron.checkpointer import Checkpointer
    from reinforce_rl.monitoring.run import RunMonitor
    from reinforce_rl.policy.model import MegatronGPTReinforceActorModel

STATE_VERSION = 1
ROLLOUTS_FILE = "rollouts.pt"  # of a checkpoint: those of the next steps

Metrics = dict[str, float]
Timings = dict[str, float]


class ReinforceTrainer:
    """Runs generation, scoring and updates, on every rank alike.

    Args:
        cfg: `trainer.reinforce`.
        optimizer: `.step()` applies the gradient of `model.get_loss_and_metrics`; see
            `ActorOptimizer`.
        scheduler: learning rate; exposed only, the optimizer steps it.
        train_dataloader_builder, val_...: called with `collate_fn`; None for no validation.
        batch_iterator_cls: called with (prompts, validation); yields the batches to generate
            together.
        logger: does nothing on every rank but the first.
        services: the arguments that NeMo-Aligner's trainer does not have; None for their defaults.

    Attributes:
        step: rollout batches trained on.
        max_steps: rollout batches of the whole run; dynamic filtering may end it sooner.
        rollouts: samples and scores the prompts of a step, on this rank or elsewhere.
        rollout_context: the settings of the rollouts, which metrics read too.
        policy_log_probs: float32 [N, T] of the last batch that was trained on, by the policy before
            its update; NaN where no pass has computed them.
        non_finite_guard: ends a run whose gradients or weights are not finite.
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
        batch_iterator_cls: BatchIterator,
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
        self.recorder = services.recorder
        self.step = 0
        self.max_steps = total_steps(cfg, len(self.train_dataloader))
        self.wandb_run_id: str | None = None
        self.policy_log_probs: Tensor | None = None
        self.non_finite_guard = NonFiniteGuard(cfg.max_skipped_steps)
        self._baselines = RunningBaselines(cfg)
        self._best = services.best
        self._prompts_per_update = services.prompts_per_update
        self._stop = services.stop
        self._phases = services.phases
        self._time_budget = TimeBudget()
        self._validation_is_due = True
        self._saved_step: int | None = None
        self._prompts: list[Prompt] = []  # of the step under way, this rank's share
        # The loader's position after the last complete step, and after the prompts drawn last.
        self._data_position = self.train_dataloader.state_dict()
        self._drawn_position = self._data_position
        self._clock = StepClock(
            services.phases,
            model.mesh.device,
            among_ranks=model.mesh.world_size > 1,
            profiler=services.profiler,
        )
        # Frees GPU memory for the generator.
        offloads = model.settings.reinforce.offload_adam_states
        self.rollout_context = RolloutContext(
            cfg,
            model,
            rm,
            batch_iterator_cls,
            self.train_dataloader,
            self._clock,
            self._stop,
            has_ratios=cfg.takes_several_updates(services.prompts_per_update),
            while_generating=optimizer.offloaded if offloads else contextlib.nullcontext,
            staleness=services.max_staleness,
            max_steps=self.max_steps,
        )
        self.rollouts: RolloutSource = services.make_rollout_source(self.rollout_context)

    def fit(self) -> None:
        """Train until steps, epochs or time run out, validating and saving at intervals.

        Raises, after the last complete step is saved: StoppedEarly out of time, at a signal or by
        an alert, RewardServerError if the reward server missed its deadline or failed too many
        samples, GenerationError if the engine cannot continue.
        Raises DivergedError if training has diverged; nothing is saved.
        """
        self._stop.wait_for_checks()
        with self._saving_last_step():
            self.validate_at_start()
            while self.should_continue():
                self._clock.start(self.step + 1)
                rollouts, rollout_metrics, _ = self.generate_rollouts()
                batch, reinforce_metrics = self.generate_reinforce_data(rollouts)
                with self._clock.phase("train_time"):
                    training_metrics = self.run_training(batch)
                self._complete_step()
                metrics = {**rollout_metrics, **reinforce_metrics, **training_metrics}
                with self._logging_step(metrics, batch):
                    self.publish_weights()

                self.maybe_validate()
                self.logger.commit(self.step)
                self.ckpt_callback.poll()
                self.maybe_save()
            self.save(wait=True)
            self.test()

    def generate_rollouts(self) -> tuple[RolloutBatch, Metrics, Timings]:
        """Sample and score the next prompts and take log-probs.

        Returns this rank's samples, means over all ranks, and this rank's seconds per phase.
        """
        rollouts = self.rollouts.next_batch(self.step + 1)
        self._prompts = rollouts.prompts
        self._drawn_position = rollouts.position
        return rollouts.batch, rollouts.metrics, self._clock.seconds

    def generate_reinforce_data(
        self,
        rollout_batch: RolloutBatch,
    ) -> tuple[ReinforceBatch, Metrics]:
        """Return the `reinforce_batch` of this rank, and means over all ranks."""
        mesh = self.model.mesh
        batch = reinforce_batch(
            rollout_batch,
            self.cfg,
            self._baselines,
            step=self.step + 1,
            max_length=self.model.max_response_tokens,
            gather_over_ranks=mesh.gather_over_dp,
            rank=mesh.dp_rank,
            sum_over_ranks=mesh.sum_over_dp,
        )
        return batch, reduce_metrics(reinforce_means(batch), mesh.gather_over_dp)

    def run_training(self, batch: ReinforceBatch) -> Metrics:
        """Update the policy with one or more optimizer steps on the rollout batch.

        Returns means over all ranks. Raises DivergedError as `NonFiniteGuard.check`.
        """
        step = self.step + 1
        mesh = self.model.mesh
        baselines_before = self._baselines.state_dict()
        if self.recorder is not None:
            self.recorder.before_update()
        update = self._update_policy(batch)
        self.policy_log_probs = update.log_probs
        metrics = {
            **update_metrics(update.loss_sums, update.optimizer_steps, mesh.gather_over_dp),
            "kl_coefficient": self._baselines.beta.value,
            **trained_token_metrics(
                batch,
                update.log_probs,
                version=self.step if self.rollout_context.is_off_policy else None,
                sum_over_ranks=mesh.sum_over_dp,
                gather_over_ranks=mesh.gather_over_dp,
            ),
        }
        self.non_finite_guard.check(
            step,
            update.optimizer_steps,
            metrics["actor_loss"],
            mesh,
            self.logger.note,
        )
        self._baselines.add(batch, mesh.gather_over_dp)
        if self.recorder is not None:
            self.recorder.after_update(step, update.records, baselines_before, self._drawn_position)
        return metrics

    def _update_policy(self, batch: ReinforceBatch) -> PolicyUpdate:
        """Make the optimizer steps on a rollout batch; a collective call."""
        mesh = self.model.mesh
        max_length = self.model.max_response_tokens
        update = PolicyUpdate.on(batch.rollouts)
        mini_batch_rows = mini_batches(
            mesh.gather_over_dp(batch.rollouts.group_ids),
            mesh.dp_rank,
            self._prompts_per_update,
            self.cfg.reinforce_epochs,
            step_seed(self.model.settings.seed, self.step),
        )
        for rows in mini_batch_rows:
            denominators = denominators_of(batch, rows, max_length, mesh.sum_over_dp)
            loss_share = self.model.get_loss_and_metrics(
                batch,
                denominators,
                rows=rows,
                kl_coefficient=self._baselines.loss_kl_coefficient,
                # The ratio is exactly 1 until the first optimizer step on this batch.
                on_policy=not update.optimizer_steps,
            )
            update.add(loss_share, self.optimizer.step())
        return update

    def publish_weights(self) -> None:
        """Give the generator the updated weights, whose version is the step that trained them."""
        self.rollouts.publish_weights(self.step)

    def _complete_step(self) -> None:
        # From here on a run that is stopped resumes after this step, whose weights it has.
        self.step += 1
        self._data_position = self._drawn_position

    @contextlib.contextmanager
    def _logging_step(self, metrics: Metrics, batch: ReinforceBatch) -> Iterator[None]:
        """Log the completed step after the block, also if a generator fails in it on all ranks."""
        failure = None
        try:
            yield
        except (RewardServerError, GenerationError) as error:
            failure = error
        self._clock.stop()
        self.log_step(metrics, batch)
        if failure is not None:
            raise failure

    def log_step(self, metrics: Metrics, batch: ReinforceBatch) -> None:
        """Log the completed step: metrics, samples, and the time and memory of its phases."""
        clock = self._clock
        seconds = dict(clock.seconds)
        if self.recorder is not None:
            seconds["record"] = self.recorder.seconds
        self.logger.log_step(
            self.step,
            {**metrics, **self._data_progress()},
            seconds,
            self.step_samples(batch),
            clock.gigabytes,
        )
        self._log_rank_seconds()

    def _data_progress(self) -> Metrics:
        """Return the epoch and the prompts consumed; not those whose rollouts no step has taken."""
        position = self._data_position
        prompts_under_way = position.get("under_way", ())
        return {
            "epoch": position["epoch"],
            "consumed_prompts": position["consumed_prompts"] - len(prompts_under_way),
        }

    def _log_rank_seconds(self) -> None:
        mesh = self.model.mesh
        if mesh.world_size == 1:
            return
        asks_for_rewards = mesh.is_model_parallel_rank_0
        seconds = of_this_rank(self._clock.own_seconds, asks_for_rewards=asks_for_rewards)
        all_seconds = mesh.gather_on_main(seconds)
        self.logger.log_ranks(self.step, all_seconds, self._clock.seconds["step_time"])

    def step_samples(self, batch: ReinforceBatch) -> Samples:
        """Return the samples of all ranks on the first, none on the others; a collective call."""
        rollouts = batch.rollouts
        # Log-probs that the trainer computed before the update, for the KL or the ratios, are
        # recorded as they are; in any other case those of the update's own pass.
        if rollouts.log_probs is None or rollouts.log_probs is rollouts.generator_log_probs:
            rollouts = replace(rollouts, log_probs=self.policy_log_probs)
        return gather_samples(
            self.model,
            self.step,
            self._prompts,
            rollouts,
            batch,
            with_tokens=self.logger.records_tokens(self.step),
            kl_estimator=self.cfg.kl_estimator_used,
            advantages=batch.advantages if self.cfg.has_token_advantages else None,
        )

    def update_time_budget(self) -> None:
        """Find out whether another step fits into the time of this run; a collective call."""
        next_step = self.step + 1
        interval = self.cfg.val_check_interval
        validates = False
        validates_next = False
        if self.val_dataloader is not None and interval > 0:
            validates = self._validation_is_due
            validates_next = next_step % interval == 0 or next_step == self.max_steps
        may_be_best = self._validation_is_due and self._best.keep > 0
        time_budget = self.run_timer.time_budget(
            validation=validates,
            validation_after=validates_next,
            save=may_be_best or self._is_due(self.cfg.save_interval),
            running_save=self.ckpt_callback.is_writing,
        )
        # The first rank's clock decides, since all ranks must stop at the same step.
        self._time_budget = self.model.mesh.from_main(time_budget)

    def should_continue(self) -> bool:
        """Return True if another step follows, False at the end of the run; a collective call.

        Raises StoppedEarly if a signal or an alert stops the run or its time is used up,
        DivergedError at the end of the run if the last loss is not finite.
        """
        if self._is_over():
            self.non_finite_guard.check_end(self.step)
            return False
        self._stop.check(self.model.mesh, self.logger.verdict)
        if self._time_budget.shortage is not None:
            raise StoppedEarly(self._time_budget.shortage, key="run.time.used_up")
        self.run_timer.begin_step()
        return True

    def _is_over(self) -> bool:
        return self.step >= self.max_steps or self.rollouts.is_over

    def _is_due(self, interval: int) -> bool:
        # Dynamic filtering may use up the prompts before `max_steps`.
        return interval > 0 and (self.step % interval == 0 or self._is_over())

    def validate_at_start(self) -> None:
        """Validate at step 0, and after a resume if that step's validation was aborted."""
        self.update_time_budget()
        if self._validation_is_due and self._time_budget.validates:
            self.validate()
            self.logger.commit(self.step)
            self.update_time_budget()

    def maybe_validate(self) -> None:
        """Validate if the completed step ends an interval or the run, and the time suffices."""
        self._validation_is_due = self._is_due(self.cfg.val_check_interval)
        self.update_time_budget()
        if self._should_validate():
            self.validate()

    def _should_validate(self) -> bool:
        if self._is_over():
            return self._validation_is_due
        # Without time for another step this run ends here: validate even within an interval.
        is_last_step = self._time_budget.shortage is not None
        return self._time_budget.validates and (self._validation_is_due or is_last_step)

    def validate(self) -> None:
        """Score one response to each validation prompt, with the sampling of validations."""
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

    def _evaluate(
        self,
        name: str,
        prompt_batches: Iterable[Sequence[Prompt]],
    ) -> tuple[Metrics, Samples]:
        """Return means over all ranks and, on the first rank, the samples of all."""
        prompts = [prompt for batch in prompt_batches for prompt in batch]
        rollouts = self.rollouts.evaluate(name, self.step, prompts, self._phases)
        means = validation_means(rollouts, prompts)
        metrics = reduce_metrics(means, self.model.mesh.gather_over_dp)
        samples = gather_samples(
            self.model,
            self.step,
            prompts,
            rollouts,
            set_name=name,
            with_tokens=self.logger.records_tokens(self.step),
        )
        return metrics, samples

    def maybe_save(self) -> None:
        """Save if the completed step ends an interval or the run, or is one of the best."""
        if self._is_due(self.cfg.save_interval) or self.step in self._best.steps:
            self.save()

    def save(self, *, wait: bool = False) -> None:
        """Save the last complete step.

        Not if it is saved already, at step 0, or while the loss is not finite. `wait` waits for
        background writes too.
        """
        if self.recorder is not None:
            self.recorder.finish()
        if self.step not in (0, self._saved_step) and self.non_finite_guard.is_sound:
            self._write_checkpoint()
        if wait:
            self.ckpt_callback.finish()

    def _write_checkpoint(self) -> None:
        self._phases.begin("checkpoint")
        began = time.monotonic()
        later_rollouts = self.rollouts.state_dict()["rollouts"]
        waited = time.monotonic() - began
        self.ckpt_callback.save(
            self.step,
            self.state_dict(),
            keep=self._best.steps,
            other_files={ROLLOUTS_FILE: later_rollouts},
            waited=waited,
        )
        self._saved_step = self.step
        self.logger.report()

    @contextlib.contextmanager
    def _saving_last_step(self) -> Iterator[None]:
        """Save the last complete step if the block stops early, or an engine or a server fails."""
        try:
            yield
        except (RewardServerError, GenerationError):
            self.logger.note(f"Stopping after step {self.step} of {self.max_steps}; saving")
            self._save_last_step()
            raise
        except StoppedEarly as error:
            text = f"{error} after step {self.step} of {self.max_steps}"
            self.logger.note(f"{text}; saving")
            self._save_last_step()
            sentence = f"{text}; the same command resumes from there"
            raise type(error)(sentence, key=error.key) from None

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
            **self._baselines.state_dict(),
            "lora": self.model.lora,
            "best": self._best.state_dict(),
            "validation_is_due": self._validation_is_due,
        }

    def load_state_dict(
        self,
        state: dict[str, Any],
        other_files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Inverse of `state_dict`; `other_files` are the checkpoint's, by name.

        Raises CheckpointError: the state is another program's, or of another version or other data.
        """
        _check_state(state)
        self.step = state["step"]
        self._saved_step = state["step"]
        self.train_dataloader.load_state_dict(state["data"])
        self._data_position = self.train_dataloader.state_dict()
        self.wandb_run_id = state["wandb_run_id"]
        self._baselines.load_state_dict(state)
        self._best.load_state_dict(state["best"], self.ckpt_callback.holds)
        self._validation_is_due = state["validation_is_due"]
        rollouts = {
            "step": self.step,
            "under_way": state["data"].get("under_way", ()),
            "rollouts": other_files.get(ROLLOUTS_FILE, b""),
        }
        self.rollouts.load_state_dict(rollouts)


def _check_state(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the state is another program's or of another version."""
    if "validation_is_due" not in state and state.get("version") == STATE_VERSION:
        raise CheckpointError(
            "the checkpoint was not written by actor training but by another program, such as "
            "train-rm. Choose another exp_manager.explicit_log_dir",
            key="checkpoint.state.other_program",
        )
    if state.get("version") != STATE_VERSION:
        raise CheckpointError(
            f"the trainer's state in the checkpoint has version {state.get('version')!r}; expected "
            f"{STATE_VERSION}. Use the version of reinforce_rl that wrote it, or start a new run "
            "in another folder",
            key="checkpoint.state.other_version",
        )
