"""Build every part of a run from a checked configuration, and train.

Parts that fail cheaply are built first.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.data.prompts import (
    DefaultBatchIterator,
    PromptDataset,
    PromptLoader,
    RLHFDatasets,
    fixed_prompts,
)
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.checkpointer import (
    Checkpoint,
    Checkpointer,
    latest_checkpoint,
    state_bytes,
)
from reinforce_rl.megatron.lora import check_lora_identity
from reinforce_rl.megatron.mesh import Mesh, rendezvous_errors
from reinforce_rl.monitoring.alerts import AlertRules
from reinforce_rl.monitoring.backends import start_loggers
from reinforce_rl.monitoring.loggers import BackgroundLogger, JsonlLogger, Loggers
from reinforce_rl.monitoring.progress import TrainingProgress
from reinforce_rl.monitoring.records import drop_later_samples
from reinforce_rl.monitoring.responses import repeated_texts
from reinforce_rl.monitoring.run import RunMonitor, SilentMonitor
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.monitoring.step_record import drop_records
from reinforce_rl.policy.build import build_actor, build_actor_optimizer, configured_mesh
from reinforce_rl.rewards.base import RewardSource
from reinforce_rl.rewards.environment_pool import EnvironmentPool
from reinforce_rl.rewards.sources import connect_to_reward_servers, names_of_scores
from reinforce_rl.rollout.episodes import play_episodes, started_environment
from reinforce_rl.rollout.generator_pool import GeneratorPool
from reinforce_rl.rollout.generators import Generators
from reinforce_rl.rollout.local import LocalRollouts
from reinforce_rl.rollout.messages import ResultBounds
from reinforce_rl.rollout.prompts import build_sampler
from reinforce_rl.rollout.remote import RemoteRollouts
from reinforce_rl.rollout.rendezvous import RENDEZVOUS_FILE
from reinforce_rl.rollout.source import RolloutContext, RolloutSource
from reinforce_rl.rollout.worker import generate_in_job
from reinforce_rl.runtime.control import RunControl
from reinforce_rl.runtime.phases import PhaseTracker
from reinforce_rl.runtime.profiling import StepProfiler
from reinforce_rl.runtime.roles import RankRole
from reinforce_rl.runtime.settings import MEANING, check_changes, freeze_template_date, record
from reinforce_rl.runtime.status import StatusFile
from reinforce_rl.runtime.stop import RunTimer, StopRequest, first_save_seconds
from reinforce_rl.trainer.inputs import read_inputs
from reinforce_rl.trainer.reinforce import ROLLOUTS_FILE, ReinforceTrainer
from reinforce_rl.trainer.services import TrainerServices
from reinforce_rl.trainer.state import BestCheckpoints
from reinforce_rl.trainer.step_recorder import StepRecorder
from reinforce_rl.trainer.updates import total_steps, total_updates
from reinforce_rl.utils.job_rank import JobRank
from reinforce_rl.utils.job_time import JobTimes, parse_duration
from reinforce_rl.utils.slurm_commands import SlurmCallError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def train(cfg: TrainConfig, stop: StopRequest | None = None) -> ReinforceTrainer | None:
    """Run a whole training job on this rank; return its trainer.

    None on a rank that only generates.

    Args:
        stop: polled for an early end; None for a run that is never stopped.

    Raises:
        ReinforceError: see its subclasses; nothing is left half-written.
    """
    folder = Path(cfg.exp_manager.explicit_log_dir)
    freeze_template_date(cfg)
    control = RunControl(folder, stop or StopRequest())
    limits = {
        "silence_seconds": cfg.trainer.heartbeat_timeout_seconds,
        "hang_seconds": cfg.trainer.collective_timeout_seconds,
    }
    with control.running(), contextlib.ExitStack() as job:
        role = None
        if cfg.placement == "disaggregated" and not cfg.uses_external_generators:
            place = JobRank.of_process()
            with rendezvous_errors(place.rank, place.size):
                role = RankRole.of_job(
                    cfg.training_ranks,
                    cfg.generation_tensor_parallel_size,
                    cfg.torch_timeout_seconds,
                )
        mesh = job.enter_context(configured_mesh(cfg, role))
        job.enter_context(control.watching(mesh, role, **limits))
        # Fail on model, layout, tokenizer, prompts and disk before waiting for the server.
        tokenizer, datasets = read_inputs(cfg).checked()
        if role is not None and role.generates:
            with control.ending():
                generate_in_job(cfg, mesh, tokenizer, role, control)
            return None
        checkpoint = (
            latest_checkpoint(folder / "checkpoints") if cfg.exp_manager.resume_if_exists else None
        )
        monitor, wandb_run_id = build_monitor(cfg, mesh, datasets, checkpoint, control.status)
        with monitor.running(), control.ending(), contextlib.ExitStack() as stack:
            if mesh.world_size > 1:
                monitor.note(mesh.layout.grid())
            rm = None
            pool = None
            environment = None
            if cfg.placement == "colocated":
                control.phases.begin("waiting for the reward server", has_deadline=True)
                rm = stack.enter_context(
                    contextlib.closing(connect_to_reward_servers(cfg, mesh, tokenizer, monitor))
                )
                environment = stack.enter_context(started_environment(cfg, mesh))
            else:
                control.phases.begin("waiting for the generators")
                with mesh.raise_on_all_ranks():
                    if mesh.is_main:
                        pool = stack.enter_context(
                            contextlib.closing(open_pool(cfg, mesh, role, monitor, control))
                        )
            trainer = build_trainer(
                cfg, mesh, tokenizer, datasets, rm, monitor, checkpoint, control, pool, environment
            )
            trainer.wandb_run_id = wandb_run_id
            if mesh.is_main:
                begin_files(cfg, monitor, trainer.step)
            control.has_begun = True
            with contextlib.closing(trainer.rollouts):
                trainer.fit()
            control.stop.check(mesh)
            if cfg.exp_manager.checkpoint_callback_params.save_hf_on_train_end:
                control.phases.begin("export")
                source = cfg.pretrained_checkpoint.restore_from_path
                exported = trainer.model.export(source, folder / "hf", trainer.step)
                monitor.note(f"Hugging Face folder: {exported}")
                if trainer.model.lora is not None:
                    monitor.note(
                        f"PEFT adapter: {trainer.model.export_adapter(source, folder / 'adapter')}"
                    )
            monitor.note(f"Report: {monitor.report()}")
        return trainer


def times_of_job(mesh: Mesh, monitor: RunMonitor) -> JobTimes:
    """Return when this job began and ends; the first rank asks Slurm if it has to."""
    if not mesh.is_main:
        return JobTimes.of(os.environ)
    try:
        return JobTimes.asked(os.environ)
    except SlurmCallError as error:
        monitor.note(
            f"The end of this job's time limit is not known ({error}), so the run does not stop in "
            "time by itself: set exp_manager.max_time_per_run, or have Slurm send a signal before "
            "the limit."
        )
        return JobTimes.of(os.environ)


def begin_files(cfg: TrainConfig, monitor: RunMonitor, step: int) -> None:
    """Record this start's configuration; drop all records after the step it resumes from.

    Called last, so that a start that is refused leaves an earlier run's files unchanged.
    """
    folder = Path(cfg.exp_manager.explicit_log_dir)
    record(cfg)
    monitor.metrics.begin()
    if cfg.exp_manager.resume_if_exists:
        drop_later_samples(folder, step)
        drop_records(folder, after=step)


def result_bounds(cfg: TrainConfig) -> ResultBounds:
    """Return the bounds on the results of this run's generators."""
    return ResultBounds(
        vocab_size=Architecture.from_folder(cfg.pretrained_checkpoint.restore_from_path).vocab_size,
        max_length=cfg.max_response_tokens,
        sources=names_of_scores(cfg),
        # TensorRT-LLM reports none with an empty response, and another generator may report none at
        # all.
        needs_log_probs=cfg.generation in ("native", "vllm"),
    )


def open_pool(
    cfg: TrainConfig, mesh: Mesh, role: RankRole | None, monitor: RunMonitor, control: RunControl
) -> GeneratorPool:
    """Let generators register: those of the job, which are waited for, or others at any time."""
    bounds = result_bounds(cfg)
    if role is not None:
        monitor.note(f"Ranks {role.generators.start} to {role.size - 1} generate")
    pool = GeneratorPool(cfg, mesh.device, bounds, control, monitor.note, role)
    if role is None:
        file = Path(cfg.exp_manager.explicit_log_dir) / RENDEZVOUS_FILE
        monitor.note(f"All ranks train; `reinforce-rl generate` finds them by {file}")
    return pool


def build_monitor(
    cfg: TrainConfig,
    mesh: Mesh,
    datasets: RLHFDatasets,
    checkpoint: Checkpoint | None,
    status: StatusFile | None = None,
) -> tuple[RunMonitor, str | None]:
    """Return the run's monitor and its id in the loggers, if any.

    Ranks other than 0 get a silent monitor and None.

    Raises:
        ConfigError: the settings differ from the resumed run's where they must not.
    """
    changes = check_changes(cfg)
    folder = Path(cfg.exp_manager.explicit_log_dir)
    sampler = build_sampler(cfg, datasets.train)
    start_step = checkpoint.trainer_state["step"] if checkpoint else 0
    # Without a checkpoint the logs of an earlier run in this folder are overwritten from step 0.
    resume_step = start_step if cfg.exp_manager.resume_if_exists else None
    record_samples = cfg.exp_manager.record != "off"
    tokens = cfg.exp_manager.record_tokens_every if record_samples else 0
    if not mesh.is_main:
        return SilentMonitor(folder, tokens), None
    jsonl = JsonlLogger(folder / "metrics.jsonl", resume_step=resume_step)
    steps = total_steps(cfg.trainer.reinforce, sampler.steps_per_epoch)
    progress = TrainingProgress(steps, start_step)
    factor = cfg.trainer.straggler_factor
    run_id = checkpoint.trainer_state["wandb_run_id"] if checkpoint else None
    others: list[BackgroundLogger] = []
    if cfg.exp_manager.used_loggers:
        run_id = run_id or secrets.token_hex(4)
        others = start_loggers(cfg, run_id, resume_step, progress.note)
    tables = cfg.exp_manager.sample_table_interval
    held_out = [
        text
        for part in (datasets.validation, datasets.test)
        if part is not None
        for text in part.texts
    ]
    alert_rules = AlertRules(cfg.alerts.rules.model_dump(), factor)
    for line in RunFolder(folder).lines if folder.is_dir() else ():  # of the run that resumes
        if line["step"] <= start_step:
            alert_rules.look(line)
    loggers = Loggers([jsonl, *others])
    repeated = repeated_texts(datasets.train.texts, held_out)
    monitor = RunMonitor(
        folder,
        loggers,
        progress,
        status,
        factor,
        tables,
        tokens,
        alert_rules,
        repeated,
        record_samples,
    )
    if checkpoint:
        monitor.note(f"Resuming from {checkpoint.folder}, after step {start_step} of {steps}.")
        for key, values in changes.items():
            monitor.note(f"  changed setting from here on: {key}: {values}")
    if status is not None:
        status.progress(start_step, steps)
    if datasets.train.blend is not None:
        monitor.note(str(datasets.train.blend))
    monitor.note(f"This run is written to {folder.absolute()}")
    return monitor, run_id


def build_trainer(
    cfg: TrainConfig,
    mesh: Mesh,
    tokenizer: PreTrainedTokenizerBase,
    datasets: RLHFDatasets,
    rm: RewardSource | None,
    monitor: RunMonitor,
    checkpoint: Checkpoint | None = None,
    control: RunControl | None = None,
    pool: GeneratorPool | None = None,
    environment: EnvironmentPool | None = None,
) -> ReinforceTrainer:
    """Build actor, optimizer and trainer, and restore `checkpoint` if given.

    Args:
        pool: the generators' on rank 0, else None.
        environment: None if there is none, or if others generate.
    """
    phases = control.phases if control else PhaseTracker()
    phases.listen(monitor.phase)
    sampler = build_sampler(cfg, datasets.train)
    updates = total_updates(cfg.trainer.reinforce, cfg.prompts_per_update, sampler.batch_sizes)
    phases.begin("loading the model")
    # copies the reference, so it comes before the checkpoint
    model = build_actor(cfg, mesh, tokenizer)
    play_episodes(model, environment, cfg)
    optimizer = build_actor_optimizer(cfg, model, updates)
    saving = cfg.exp_manager.checkpoint_callback_params
    duration = cfg.exp_manager.max_time_per_run
    first_save = first_save_seconds(state_bytes(model.ddp, mesh))
    if control is not None and control.status.save_seconds is not None:
        # an earlier run has measured it
        first_save = control.status.save_seconds
    limit = None if duration is None else parse_duration(duration)
    timer = RunTimer(limit, times_of_job(mesh, monitor), first_save)

    def saved(seconds: float) -> None:
        timer.saved(seconds)
        if control is not None:
            control.status.saved(seconds)

    checkpointer = Checkpointer(
        Path(cfg.exp_manager.explicit_log_dir) / "checkpoints",
        mesh,
        model.ddp,
        optimizer.megatron,
        optimizer.scheduler,
        keep_last=saving.keep_last,
        asynchronous=saving.async_save,
        on_saved=saved,
    )
    rollout = cfg.model.reinforce
    profile = cfg.trainer.profile
    profiler = None
    if profile.steps:
        folder = Path(cfg.exp_manager.explicit_log_dir) / "profile"
        profiler = StepProfiler(profile, folder, mesh.rank, mesh.device, monitor.note)

    make_micro_batches = partial(
        DefaultBatchIterator,
        rollout.rollout_micro_batch_size,
        rollout.val_rollout_micro_batch_size,
    )
    stop = control.stop if control else StopRequest()
    make_rollout_source: Callable[[RolloutContext], RolloutSource] = LocalRollouts
    if cfg.placement == "disaggregated":
        takes_finished = cfg.rollout_order == "finished"
        generators = Generators(model, pool, make_micro_batches, stop, takes_finished)
        make_rollout_source = partial(RemoteRollouts, generators=generators)

    def fixed(prompts: PromptDataset | None, count: int | None) -> Callable[..., list[Any]] | None:
        return (
            None
            if prompts is None
            else partial(fixed_prompts, prompts, count, mesh.dp_rank, mesh.dp_size)
        )

    recorder = None
    if cfg.exp_manager.record == "full":
        run = cfg.exp_manager.explicit_log_dir
        keep = cfg.exp_manager.record_keep
        recorder = StepRecorder(run, cfg, model, optimizer.megatron, rm, keep)
    trainer = ReinforceTrainer(
        cfg=cfg.trainer.reinforce,
        model=model,
        optimizer=optimizer,
        scheduler=optimizer.scheduler,
        train_dataloader_builder=partial(
            PromptLoader, datasets.train, sampler, mesh.dp_rank, mesh.dp_size
        ),
        val_dataloader_builder=fixed(datasets.validation, rollout.num_val_samples),
        collate_fn=list,
        rm=rm,
        batch_iterator_cls=make_micro_batches,
        logger=monitor,
        ckpt_callback=checkpointer,
        run_timer=timer,
        services=TrainerServices(
            prompts_per_update=cfg.prompts_per_update,
            best=BestCheckpoints(saving.keep_best, saving.best_metric, saving.best_mode),
            test_dataloader_builder=fixed(datasets.test, None),
            phases=phases,
            stop=stop,
            profiler=profiler,
            make_rollout_source=make_rollout_source,
            max_staleness=cfg.staleness,
            recorder=recorder,
        ),
    )
    if checkpoint is not None:
        check_lora_identity(model.lora, checkpoint.folder, checkpoint.trainer_state)
        checkpointer.restore(checkpoint)
        # Rollouts of other settings are not trained on; the prompts are answered anew.
        is_same = not any(MEANING.match(key) for key in check_changes(cfg))
        rollouts = checkpoint.more(ROLLOUTS_FILE) if is_same else b""
        trainer.load_state_dict(checkpoint.trainer_state, {ROLLOUTS_FILE: rollouts})
    return trainer
