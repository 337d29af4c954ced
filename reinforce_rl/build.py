"""From a checked configuration to a run: every part is made here, in the order in which it can fail cheaply."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from reinforce_rl.activity import Activity
from reinforce_rl.actor.model import ActorSettings, MegatronGPTReinforceActorModel
from reinforce_rl.algorithms.best_checkpoints import BestCheckpoints
from reinforce_rl.algorithms.loss import LossSettings
from reinforce_rl.algorithms.reinforce import ReinforceTrainer
from reinforce_rl.algorithms.updates import total_steps, total_updates
from reinforce_rl.config import ModelConfig, OptimConfig, ReinforceConfig, SamplingConfig, TrainConfig
from reinforce_rl.control import RunControl
from reinforce_rl.data.loader import FixedPrompts, PromptLoader
from reinforce_rl.data.prompts import PromptDataset, RLHFDatasets, build_train_valid_test_rlhf_datasets
from reinforce_rl.data.sampler import PromptSampler
from reinforce_rl.files import write_atomically
from reinforce_rl.generation.base import Generator, SamplingParams
from reinforce_rl.generation.native import NativeGenerator
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.checkpoint import Checkpoint, Checkpointer, latest_checkpoint, state_bytes
from reinforce_rl.megatron.hf_weights import HFFolder, load_hf_weights
from reinforce_rl.megatron.lora import add_lora
from reinforce_rl.megatron.lora_export import LoraIdentity, check_lora_identity
from reinforce_rl.megatron.lora_map import LoraSettings
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.megatron.model import CausalLM
from reinforce_rl.megatron.optimizer import ActorOptimizer, DataParallelSettings, OptimizerSettings, build_optimizer
from reinforce_rl.megatron.transformer_config import ModelOptions
from reinforce_rl.monitoring.base import Loggers, MetricLogger
from reinforce_rl.monitoring.jsonl import JsonlLogger, read_metrics
from reinforce_rl.monitoring.progress import TrainingProgress
from reinforce_rl.monitoring.rollouts import RolloutWriter
from reinforce_rl.monitoring.run import RunMonitor, SilentMonitor
from reinforce_rl.reward.base import RewardSource
from reinforce_rl.reward.connection import connect_to_reward_servers
from reinforce_rl.rollout import Prompt
from reinforce_rl.run_timer import Allocation, RunTimer, first_save_seconds, parse_duration
from reinforce_rl.status import StatusFile
from reinforce_rl.stop import StopRequest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

DTYPES = {"32": "float32", "bf16": "bfloat16"}


def train(cfg: TrainConfig, stop: StopRequest | None = None) -> ReinforceTrainer:
    """Run a whole training job on this rank.

    Args:
        cfg: checked.
        stop: whether the run is to end early; None where nobody asks for it.

    Raises:
        ReinforceError: see its subclasses; nothing is left half-written.
    """
    from reinforce_rl.preflight.inputs import read_inputs  # which is made of this file's parts

    folder = Path(cfg.exp_manager.explicit_log_dir)
    control = RunControl(folder, stop or StopRequest())
    with (
        control.running(),
        parallel_mesh(
            cfg.model.tensor_model_parallel_size,
            cfg.model.pipeline_model_parallel_size,
            cfg.model.context_parallel_size,
            sequence_parallel=cfg.model.sequence_parallel,
            seed=cfg.model.seed,
            timeout_seconds=cfg.torch_timeout_seconds,
        ) as mesh,
        control.watching(
            mesh,
            silence_seconds=cfg.trainer.heartbeat_timeout_seconds,
            hang_seconds=cfg.trainer.collective_timeout_seconds,
        ),
    ):
        # Before anybody waits for the server: all that is wrong with model, layout, tokenizer, prompts and disk.
        tokenizer, datasets = read_inputs(cfg).checked()
        checkpoint = latest_checkpoint(folder / "checkpoints") if cfg.exp_manager.resume_if_exists else None
        monitor, wandb_run_id = build_monitor(cfg, mesh, datasets, checkpoint, control.status)
        with monitor.running(), control.ending():
            if mesh.world_size > 1:
                monitor.note(mesh.grid())
            control.activity.begin("waiting for the reward server", has_deadline=True)
            rm = connect_to_reward_servers(cfg, mesh, tokenizer, monitor)
            try:
                trainer = build_trainer(cfg, mesh, tokenizer, datasets, rm, monitor, checkpoint, control)
                trainer.wandb_run_id = wandb_run_id
                with contextlib.closing(trainer.model.generator):
                    trainer.fit()
                control.stop.check(mesh)
                if cfg.exp_manager.checkpoint_callback_params.save_hf_on_train_end:
                    control.activity.begin("export")
                    source = cfg.pretrained_checkpoint.restore_from_path
                    monitor.note(f"Hugging Face folder: {trainer.model.export(source, folder / 'hf')}")
                    if trainer.model.lora is not None:
                        monitor.note(f"PEFT adapter: {trainer.model.export_adapter(source, folder / 'adapter')}")
                monitor.note(f"Report: {monitor.report()}")
            finally:
                rm.close()
        return trainer


def build_datasets(cfg: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> RLHFDatasets:
    """The prompts of `model.data.data_prefix`."""
    data = cfg.model.data
    datasets = build_train_valid_test_rlhf_datasets(
        tokenizer,
        {key: value for key, value in vars(data.data_prefix).items() if value is not None},
        max_prompt_tokens=cfg.model.max_prompt_tokens,
        too_long=data.too_long,  # type: ignore[arg-type]
        apply_chat_template=data.apply_chat_template,
        add_bos=data.add_bos,
    )
    if datasets.validation is not None:
        FixedPrompts(datasets.validation, cfg.model.reinforce.num_val_samples)  # refuses a size that it has not
    return datasets


def build_monitor(
    cfg: TrainConfig,
    mesh: Mesh,
    datasets: RLHFDatasets,
    checkpoint: Checkpoint | None,
    status: StatusFile | None = None,
) -> tuple[RunMonitor, str | None]:
    """What people see and what is written down, and wandb's run id. Ranks but the first get a silent one."""
    folder = Path(cfg.exp_manager.explicit_log_dir)
    sampler = build_sampler(cfg, datasets.train)
    start_step = checkpoint.trainer_state["step"] if checkpoint else 0
    # Without a checkpoint, what an earlier run of this folder left behind is made again from step 0.
    resume_step = start_step if cfg.exp_manager.resume_if_exists else None
    if not mesh.is_main:
        return SilentMonitor(folder), None
    plain_config = OmegaConf.create(dataclasses.asdict(cfg))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.yaml", OmegaConf.to_yaml(plain_config))
    loggers: list[MetricLogger] = [JsonlLogger(folder / "metrics.jsonl", resume_step=resume_step)]
    if cfg.exp_manager.create_tensorboard_logger:
        from reinforce_rl.monitoring.tensorboard_logger import TensorboardLogger

        past = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        loggers.append(TensorboardLogger(folder / "tensorboard", past))
    wandb_run_id = checkpoint.trainer_state["wandb_run_id"] if checkpoint else None
    if cfg.exp_manager.create_wandb_logger:
        from reinforce_rl.monitoring.wandb_logger import WandbLogger

        wandb_cfg = cfg.exp_manager.wandb_logger_kwargs
        wandb_logger = WandbLogger(
            wandb_cfg.project,
            wandb_cfg.name,
            folder,
            dataclasses.asdict(cfg),
            run_id=wandb_run_id,
            mode=wandb_cfg.mode,  # type: ignore[arg-type]
        )
        wandb_run_id = wandb_logger.run_id
        loggers.append(wandb_logger)
    steps = total_steps(cfg.trainer.reinforce, sampler.steps_per_epoch)
    progress, factor = TrainingProgress(steps, start_step), cfg.trainer.straggler_factor
    monitor = RunMonitor(folder, Loggers(loggers), RolloutWriter(folder, resume_step), progress, status, factor)
    if checkpoint:
        monitor.note(f"Going on from {checkpoint.folder}, after step {start_step} of {steps}.")
    if datasets.train.blend is not None:
        monitor.note(str(datasets.train.blend))
    monitor.note(f"Everything of this run goes to {folder.absolute()}")
    return monitor, wandb_run_id


def build_sampler(cfg: TrainConfig, train_set: PromptDataset) -> PromptSampler:
    """The order of the training prompts."""
    return PromptSampler(
        len(train_set),
        cfg.model.reinforce.num_rollout_samples,
        seed=cfg.model.seed,
        shuffle=cfg.model.data.shuffle,
        max_epochs=cfg.trainer.reinforce.max_epochs,
        blend=train_set.blend,
    )


def build_trainer(
    cfg: TrainConfig,
    mesh: Mesh,
    tokenizer: PreTrainedTokenizerBase,
    datasets: RLHFDatasets,
    rm: RewardSource,
    monitor: RunMonitor,
    checkpoint: Checkpoint | None = None,
    control: RunControl | None = None,
) -> ReinforceTrainer:
    """Actor, optimizer and trainer, going on from a checkpoint where one is given."""
    activity = control.activity if control else Activity()
    activity.listen(monitor.phase)
    sampler = build_sampler(cfg, datasets.train)
    updates = total_updates(cfg.trainer.reinforce, cfg.prompts_per_update, sampler.batch_sizes)
    activity.begin("loading the model")
    model = build_actor(cfg, mesh, tokenizer)  # copies the reference, so it comes before the checkpoint
    megatron_optimizer, scheduler = build_optimizer(model.ddp, _optimizer_settings(cfg, updates))
    saving = cfg.exp_manager.checkpoint_callback_params
    timer = build_timer(cfg, first_save_seconds(state_bytes(model.ddp, mesh)), control)
    checkpointer = Checkpointer(
        Path(cfg.exp_manager.explicit_log_dir) / "checkpoints",
        mesh,
        model.ddp,
        megatron_optimizer,
        scheduler,
        keep_last=saving.keep_last,
        asynchronous=saving.async_save,
        on_saved=partial(_saved, timer, control),
    )
    rollout = cfg.model.reinforce
    trainer = ReinforceTrainer(
        cfg=cfg.trainer.reinforce,
        model=model,
        optimizer=ActorOptimizer(megatron_optimizer, scheduler),
        scheduler=scheduler,
        train_dataloader_builder=partial(PromptLoader, datasets.train, sampler, mesh.dp_rank, mesh.dp_size),
        val_dataloader_builder=partial(
            FixedPrompts, datasets.validation, rollout.num_val_samples, mesh.dp_rank, mesh.dp_size
        )
        if datasets.validation is not None
        else None,
        collate_fn=list,
        rm=rm,
        batch_iterator_cls=partial(
            DefaultBatchIterator, rollout.rollout_micro_batch_size, rollout.val_rollout_micro_batch_size
        ),
        logger=monitor,
        ckpt_callback=checkpointer,
        run_timer=timer,
        prompts_per_update=cfg.prompts_per_update,
        best=BestCheckpoints(saving.keep_best, saving.best_metric, saving.best_mode),
        test_dataloader_builder=partial(FixedPrompts, datasets.test, None, mesh.dp_rank, mesh.dp_size)
        if datasets.test is not None
        else None,
        activity=activity,
        stop=control.stop if control else None,
    )
    if checkpoint is not None:
        check_lora_identity(model.lora, checkpoint.folder, checkpoint.trainer_state)
        checkpointer.restore(checkpoint)
        trainer.load_state_dict(checkpoint.trainer_state)
    return trainer


def build_timer(cfg: TrainConfig, first_save: float, control: RunControl | None = None) -> RunTimer:
    """Of the configuration and the batch system's allocation; an earlier run of this folder may know a save's time."""
    duration = cfg.exp_manager.max_time_per_run
    known = control.status.save_seconds if control else None
    return RunTimer(
        None if duration is None else parse_duration(duration),
        Allocation.of(os.environ),
        first_save if known is None else known,
    )


def _saved(timer: RunTimer, control: RunControl | None, seconds: float) -> None:
    timer.saved(seconds)
    if control is not None:
        control.status.saved(seconds)


def build_actor(cfg: TrainConfig, mesh: Mesh, tokenizer: PreTrainedTokenizerBase) -> MegatronGPTReinforceActorModel:
    """The policy of `pretrained_checkpoint.restore_from_path`, and the reference where beta asks for one."""
    import torch

    folder = cfg.pretrained_checkpoint.restore_from_path
    architecture = Architecture.from_folder(folder)
    dtype: torch.dtype = getattr(torch, DTYPES[cfg.trainer.precision])
    lm = CausalLM(architecture, mesh, dtype, model_options(cfg))
    weights = HFFolder(folder)
    load_hf_weights(lm, weights)
    lora = lora_settings(cfg)
    if lora is not None:
        add_lora(lm, lora)
    rollout = cfg.model.reinforce
    stop_ids = stop_token_ids(architecture, tokenizer)
    return MegatronGPTReinforceActorModel(
        lm,
        tokenizer,
        build_generator(cfg, lm, tokenizer),
        ActorSettings(
            sampling=_sampling_params(cfg, rollout.sampling_params, stop_ids),
            val_sampling=_sampling_params(cfg, rollout.val_sampling_params, stop_ids),
            micro_batch_size=cfg.model.micro_batch_size,
            forward_micro_batch_size=rollout.forward_micro_batch_size,
            seed=cfg.model.seed,
            tokens_per_micro_batch=cfg.model.tokens_per_micro_batch,
            pad_to=cfg.trainer.reinforce.rollout_batch_seq_length or 0,
            shared_prefix=_shares_prefix(cfg, lm),
            logits_chunk_tokens=logits_chunk_tokens(cfg.model, gpu=lm.mesh.device.type != "cpu"),
            offload_optimizer=rollout.offload_adam_states,
            loss=loss_settings(cfg.trainer.reinforce),
        ),
        with_reference=cfg.trainer.reinforce.initial_policy_kl_penalty > 0,
        reference_on_device=cfg.model.reference_placement == "device",
        lora=None if lora is None else LoraIdentity(lora.rank, lora.alpha, lora.targets, weights.fingerprint()),
        data_parallel=data_parallel_settings(cfg.model.optim),
    )


def logits_chunk_tokens(model: ModelConfig, *, gpu: bool) -> int:
    """Response tokens whose logits exist at a time."""
    if model.logits_chunk_tokens is not None:
        return model.logits_chunk_tokens
    # glibc gives blocks above 32 MiB back at once, and fresh ones have to be cleared page by page.
    return 1024 if gpu else 128


def data_parallel_settings(optim: OptimConfig) -> DataParallelSettings:
    """Of an actor, and of a reward model in training."""
    return DataParallelSettings(optim.distributed, optim.overlap_grad_sync, optim.in_place_gradients)


def _shares_prefix(cfg: TrainConfig, lm: CausalLM) -> bool:
    if cfg.model.shared_prefix is not None:
        return cfg.model.shared_prefix
    allowed = cfg.model.context_parallel_size == 1 and cfg.trainer.reinforce.rollout_batch_seq_length is None
    return allowed and lm.mesh.device.type == "cpu"


def build_generator(cfg: TrainConfig, lm: CausalLM, tokenizer: PreTrainedTokenizerBase) -> Generator:
    """What draws the responses. Of TensorRT-LLM nothing is imported here, and nothing at all where it is not chosen.

    Raises:
        ConfigError: this machine cannot run it.
    """
    if cfg.generation == "native":
        return NativeGenerator(
            lm,
            tokenizer,
            cfg.model.reinforce.generation_cache_tokens,
            is_lean=cfg.model.reinforce.lean_decoding,
        )
    from reinforce_rl.generation.engine import EngineArguments
    from reinforce_rl.generation.engine_process import Deadlines
    from reinforce_rl.generation.tensorrt_llm import EngineSettings, TensorRTLLMGenerator

    engine = cfg.tensorrt_llm
    arguments = EngineArguments(
        model=cfg.pretrained_checkpoint.restore_from_path,
        dtype=DTYPES[cfg.trainer.precision],
        tensor_parallel_size=engine.tensor_parallel_size or cfg.model.block_size,
        max_batch_size=engine.max_batch_size,
        max_seq_len=cfg.model.encoder_seq_length,
        max_num_tokens=engine.max_num_tokens,
        free_gpu_memory_fraction=engine.free_gpu_memory_fraction,
    )
    settings = EngineSettings(
        arguments,
        Deadlines(engine.start_timeout_seconds, engine.update_timeout_seconds, engine.request_timeout_seconds),
        bucket_bytes=engine.weight_bucket_megabytes * 2**20,
        log_folder=Path(cfg.exp_manager.explicit_log_dir) / "engines",
    )
    return TensorRTLLMGenerator(lm, tokenizer, settings)


def model_options(cfg: TrainConfig) -> ModelOptions:
    """How the model computes, from `model`."""
    return ModelOptions(
        recompute_granularity=cfg.model.activations_checkpoint_granularity,
        recompute_method=cfg.model.activations_checkpoint_method,
        recompute_num_layers=cfg.model.activations_checkpoint_num_layers,
        overrides=cfg.model.megatron_overrides,
    )


class DefaultBatchIterator:
    """This rank's prompts in batches that are generated together, in order.

    Args:
        micro_batch_size: prompts a batch in training.
        val_micro_batch_size: prompts a batch in validation.
        prompts: to be cut.
        validation: which of the two sizes to take.
    """

    def __init__(self, micro_batch_size: int, val_micro_batch_size: int, prompts: Sequence[Prompt], validation: bool):
        self._prompts = prompts
        self._size = val_micro_batch_size if validation else micro_batch_size

    def __iter__(self) -> Iterator[Sequence[Prompt]]:
        for start in range(0, len(self._prompts), self._size):
            yield self._prompts[start : start + self._size]


def stop_token_ids(architecture: Architecture, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a response: the tokenizer's, and all of the model's config, which may have several."""
    configured = architecture.raw.get("eos_token_id")
    several = configured if isinstance(configured, list) else [configured]
    return tuple(sorted({i for i in (*several, tokenizer.eos_token_id) if isinstance(i, int)}))


def _sampling_params(cfg: TrainConfig, sampling: SamplingConfig, stop_ids: tuple[int, ...]) -> SamplingParams:
    lengths = cfg.model.reinforce.length_params
    return SamplingParams(
        max_length=lengths.max_length,
        min_length=lengths.min_length,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        use_greedy=sampling.use_greedy,
        stop_token_ids=stop_ids,
        end_strings=tuple(sampling.end_strings),
    )


def lora_settings(cfg: TrainConfig) -> LoraSettings | None:
    """Of `model.peft`; None where the whole model is trained."""
    if cfg.model.peft.peft_scheme is None:
        return None
    tuning = cfg.model.peft.lora_tuning
    return LoraSettings.of(tuning.adapter_dim, tuning.alpha, tuning.target_modules, cfg.model.seed)


def loss_settings(cfg: ReinforceConfig) -> LossSettings:
    """What the loss is made of, from `trainer.reinforce`."""
    return LossSettings(
        aggregation=cfg.loss_aggregation,
        ratio=cfg.importance_ratio,
        clip_low=cfg.ratio_clip_low,
        clip_high=cfg.ratio_clip_high,
        generator_correction=cfg.generator_correction,
        generator_ratio_cap=cfg.generator_ratio_cap,
        kl_estimator=cfg.kl_estimator_used,
        kl_weights=cfg.kl_loss_weights,
        entropy_bonus=cfg.entropy_bonus,
    )


def _optimizer_settings(cfg: TrainConfig, updates: int) -> OptimizerSettings:
    optim = cfg.model.optim
    return OptimizerSettings(
        lr=optim.lr,
        min_lr=optim.sched.min_lr,
        weight_decay=optim.weight_decay,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        fused=optim.fused,
        schedule=optim.sched.name,
        warmup_steps=optim.sched.warmup_steps,
        constant_steps=optim.sched.constant_steps,
        total_steps=updates,
        clip_grad=cfg.trainer.reinforce.gradient_clip_val,
    )
