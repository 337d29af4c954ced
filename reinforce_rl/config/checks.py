"""What cannot work, found before a model is loaded or a server is asked. One sentence a fault."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reinforce_rl.algorithm.advantages import ADVANTAGE_ESTIMATORS
from reinforce_rl.algorithm.choices import (
    ADVANTAGE_WHITENINGS,
    BEST_MODES,
    CREDIT_ASSIGNMENTS,
    GENERATOR_CORRECTIONS,
    IMPORTANCE_RATIOS,
    KL_ESTIMATORS,
    KL_LOSS_WEIGHTS,
    KL_PLACEMENTS,
    KL_REDUCTIONS,
    LOSS_AGGREGATIONS,
    REWARD_STANDARDISATIONS,
    TRUNCATED_SAMPLES,
)
from reinforce_rl.config.algorithm_checks import algorithm_faults, batch_size_faults
from reinforce_rl.config.generation_checks import generation_faults
from reinforce_rl.config.parallelism import layout_faults, recomputation_faults
from reinforce_rl.config.reward_checks import reward_faults
from reinforce_rl.config.schema import (
    DEEP,
    NOT_SET,
    LoraTuningConfig,
    RolloutConfig,
    SamplingConfig,
    TrainConfig,
)
from reinforce_rl.data.jsonl import resolve_data_prefix
from reinforce_rl.errors import ConfigError
from reinforce_rl.utils.duration import Allocation, parse_duration
from reinforce_rl.utils.files import folder_faults

PRECISIONS = ("auto", "32", "bf16")
TOO_LONG = ("refuse", "skip")
OPTIMIZERS = ("adam",)
SCHEDULES = ("constant", "linear", "CosineAnnealing")
REFERENCE_PLACEMENTS = ("host", "device")
PEFT_SCHEMES = ("lora",)
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "all")


def find_faults(cfg: TrainConfig) -> list[str]:
    """All faults of a configuration whose keys and types are right."""
    return [fault for check in _CHECKS for fault in check(cfg)]


def _ranges(cfg: TrainConfig) -> Iterator[str]:
    rl, rollout, optim = cfg.trainer.reinforce, cfg.model.reinforce, cfg.model.optim
    at_least: list[tuple[str, float | None, float]] = [
        ("trainer.num_nodes", cfg.trainer.num_nodes, 1),
        ("trainer.devices", cfg.trainer.devices, 1),
        ("trainer.reinforce.max_epochs", rl.max_epochs, 1),
        ("trainer.reinforce.val_check_interval", rl.val_check_interval, 0),
        ("trainer.reinforce.save_interval", rl.save_interval, 0),
        ("trainer.reinforce.gradient_clip_val", rl.gradient_clip_val, 0),
        ("trainer.reinforce.initial_policy_kl_penalty", rl.initial_policy_kl_penalty, 0),
        ("trainer.reinforce.num_rollouts_per_prompt", rl.num_rollouts_per_prompt, 1),
        ("trainer.reinforce.baseline_window", rl.baseline_window, 1),
        ("trainer.reinforce.reinforce_epochs", rl.reinforce_epochs, 1),
        ("trainer.reinforce.entropy_bonus", rl.entropy_bonus, 0),
        ("trainer.reinforce.ratio_clip_low", rl.ratio_clip_low, 0),
        ("trainer.reinforce.ratio_clip_high", rl.ratio_clip_high, 0),
        ("trainer.reinforce.truncation_penalty", rl.truncation_penalty, 0),
        ("trainer.reinforce.overlong_buffer", rl.overlong_buffer, 0),
        ("trainer.reinforce.max_resampling_rounds", rl.max_resampling_rounds, 0),
        ("trainer.reinforce.reward_shaping.length_penalty", rl.reward_shaping.length_penalty, 0),
        ("remote_rm.pad_to_length", cfg.remote_rm.pad_to_length, 1),
        ("trainer.reinforce.max_failed_fraction", rl.max_failed_fraction, 0),
        ("trainer.reinforce.max_skipped_steps", rl.max_skipped_steps, 1),
        ("trainer.reinforce.rollout_batch_seq_length", rl.rollout_batch_seq_length, 1),
        ("exp_manager.checkpoint_callback_params.keep_last", cfg.exp_manager.checkpoint_callback_params.keep_last, 1),
        ("exp_manager.checkpoint_callback_params.keep_best", cfg.exp_manager.checkpoint_callback_params.keep_best, 0),
        ("trainer.straggler_factor", cfg.trainer.straggler_factor, 1),
        ("reward_function.num_workers", cfg.reward_function.num_workers, 1),
        ("reward_function.sample_memory_mb", cfg.reward_function.sample_memory_mb, 1),
        ("preflight_response_tokens", cfg.preflight_response_tokens, 1),
        ("model.seed", cfg.model.seed, 0),
        ("model.tensor_model_parallel_size", cfg.model.tensor_model_parallel_size, 1),
        ("model.pipeline_model_parallel_size", cfg.model.pipeline_model_parallel_size, 1),
        ("model.context_parallel_size", cfg.model.context_parallel_size, 1),
        ("model.activations_checkpoint_num_layers", cfg.model.activations_checkpoint_num_layers, 1),
        ("model.micro_batch_size", cfg.model.micro_batch_size, 1),
        ("model.logits_chunk_tokens", cfg.model.logits_chunk_tokens, 1),
        ("model.peft.lora_tuning.adapter_dim", cfg.model.peft.lora_tuning.adapter_dim, 1),
        ("model.reinforce.num_rollout_samples", rollout.num_rollout_samples, 1),
        ("model.reinforce.rollout_micro_batch_size", rollout.rollout_micro_batch_size, 1),
        ("model.reinforce.forward_micro_batch_size", rollout.forward_micro_batch_size, 1),
        ("model.reinforce.val_rollout_micro_batch_size", rollout.val_rollout_micro_batch_size, 1),
        ("model.reinforce.num_val_samples", rollout.num_val_samples, 1),
        ("model.reinforce.length_params.max_length", rollout.length_params.max_length, 1),
        ("model.reinforce.length_params.min_length", rollout.length_params.min_length, 0),
        ("model.optim.weight_decay", optim.weight_decay, 0),
        ("model.optim.sched.warmup_steps", optim.sched.warmup_steps, 0),
        ("model.optim.sched.constant_steps", optim.sched.constant_steps, 0),
        ("model.optim.sched.min_lr", optim.sched.min_lr, 0),
    ]
    for key, value, least in at_least:
        if value is not None and not value >= least:
            yield f"{key} is {value}; expected at least {least}"
    above_zero: list[tuple[str, float | None]] = [
        ("trainer.collective_timeout_seconds", cfg.trainer.collective_timeout_seconds),
        ("trainer.heartbeat_timeout_seconds", cfg.trainer.heartbeat_timeout_seconds),
        ("remote_rm.ready_timeout_seconds", cfg.remote_rm.ready_timeout_seconds),
        ("remote_rm.deadline_seconds", cfg.remote_rm.deadline_seconds),
        ("remote_rm.attempt_timeout_seconds", cfg.remote_rm.attempt_timeout_seconds),
        ("reward_function.sample_timeout_seconds", cfg.reward_function.sample_timeout_seconds),
        ("trainer.reinforce.kl_target", rl.kl_target),
        ("trainer.reinforce.kl_horizon", rl.kl_horizon),
        ("trainer.reinforce.baseline_decay", rl.baseline_decay),
        ("trainer.reinforce.discount_factor", rl.discount_factor),
        ("trainer.reinforce.generator_ratio_cap", rl.generator_ratio_cap),
        ("trainer.reinforce.reward_shaping.deviation", rl.reward_shaping.deviation),
        ("trainer.reinforce.reward_shaping.scale", rl.reward_shaping.scale),
        ("trainer.reinforce.reward_shaping.clip", rl.reward_shaping.clip),
        ("model.peft.lora_tuning.alpha", cfg.model.peft.lora_tuning.alpha),
        ("model.optim.lr", optim.lr),
        ("model.optim.eps", optim.eps),
    ]
    for key, value in above_zero:
        if value is not None and not 0 < value < math.inf:
            yield f"{key} is {value}; expected above 0 and finite"
    choices: list[tuple[str, str, tuple[str, ...]]] = [
        ("trainer.precision", cfg.trainer.precision, PRECISIONS),
        ("trainer.reinforce.advantage_estimator", rl.advantage_estimator, tuple(ADVANTAGE_ESTIMATORS)),
        ("trainer.reinforce.kl_estimator", rl.kl_estimator, KL_ESTIMATORS),
        ("trainer.reinforce.kl_reduction", rl.kl_reduction, KL_REDUCTIONS),
        ("trainer.reinforce.kl_placement", rl.kl_placement, KL_PLACEMENTS),
        ("trainer.reinforce.kl_loss_weights", rl.kl_loss_weights, KL_LOSS_WEIGHTS),
        ("trainer.reinforce.advantage_whitening", rl.advantage_whitening, ADVANTAGE_WHITENINGS),
        ("trainer.reinforce.credit_assignment", rl.credit_assignment, CREDIT_ASSIGNMENTS),
        ("trainer.reinforce.loss_aggregation", rl.loss_aggregation, LOSS_AGGREGATIONS),
        ("trainer.reinforce.importance_ratio", rl.importance_ratio, IMPORTANCE_RATIOS),
        ("trainer.reinforce.generator_correction", rl.generator_correction, GENERATOR_CORRECTIONS),
        (
            "trainer.reinforce.reward_shaping.standardisation",
            rl.reward_shaping.standardisation,
            REWARD_STANDARDISATIONS,
        ),
        ("trainer.reinforce.truncated_samples", rl.truncated_samples, TRUNCATED_SAMPLES),
        ("model.data.too_long", cfg.model.data.too_long, TOO_LONG),
        ("model.reference_placement", cfg.model.reference_placement, REFERENCE_PLACEMENTS),
        ("model.optim.name", optim.name, OPTIMIZERS),
        ("model.optim.sched.name", optim.sched.name, SCHEDULES),
        (
            "exp_manager.checkpoint_callback_params.best_mode",
            cfg.exp_manager.checkpoint_callback_params.best_mode,
            BEST_MODES,
        ),
        ("exp_manager.wandb_logger_kwargs.mode", cfg.exp_manager.wandb_logger_kwargs.mode, ("online", "offline")),
    ]
    for key, choice, known in choices:
        if choice not in known:
            yield f"{key} is {choice!r}; expected one of {', '.join(known)}"
    if cfg.preflight not in (True, False, DEEP):
        yield f"preflight is {cfg.preflight!r}; expected true, false or deep"
    if rl.max_steps < 1 and rl.max_steps != -1:
        yield f"trainer.reinforce.max_steps is {rl.max_steps}; expected at least 1, or -1 for all of max_epochs"
    if rl.baseline_decay >= 1:
        yield f"trainer.reinforce.baseline_decay is {rl.baseline_decay}; expected below 1; running_mean never forgets"
    if rl.discount_factor > 1:
        yield f"trainer.reinforce.discount_factor is {rl.discount_factor}; expected at most 1"
    if rl.ratio_clip_low > 1:
        yield f"trainer.reinforce.ratio_clip_low is {rl.ratio_clip_low}; expected at most 1, since no ratio is below 0"
    if rl.max_failed_fraction > 1:
        yield f"trainer.reinforce.max_failed_fraction is {rl.max_failed_fraction}; expected a share, 0 to 1"
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield f"model.optim.betas is {optim.betas}; expected two numbers, each at least 0 and below 1"
    if optim.sched.min_lr > optim.lr > 0:
        yield f"model.optim.sched.min_lr is {optim.sched.min_lr}, above model.optim.lr, which is {optim.lr}"


def _layout(cfg: TrainConfig) -> Iterator[str]:
    model, world = cfg.model, cfg.trainer.world_size
    ranks = f"trainer.num_nodes x trainer.devices = {cfg.trainer.num_nodes} x {cfg.trainer.devices}"
    sizes = (model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size)
    if min(sizes) >= 1:
        faults = layout_faults(*sizes, model.sequence_parallel, world, ranks)
        yield from faults
        blocks = world // model.block_size
        if not faults and model.reinforce.num_rollout_samples < blocks:
            yield (
                f"model.reinforce.num_rollout_samples is {model.reinforce.num_rollout_samples}, fewer prompts a step "
                f"than the {blocks} data-parallel ranks; some would always be idle"
            )
    started = os.environ.get("WORLD_SIZE")
    if started is not None and started != str(world):
        yield f"{started} ranks were started (WORLD_SIZE), but {ranks} = {world}"
    yield from recomputation_faults(
        model.activations_checkpoint_granularity,
        model.activations_checkpoint_method,
        model.activations_checkpoint_num_layers,
    )


def _peft(cfg: TrainConfig) -> Iterator[str]:
    scheme, tuning = cfg.model.peft.peft_scheme, cfg.model.peft.lora_tuning
    if scheme is None:
        if tuning != LoraTuningConfig():
            yield (
                "model.peft.lora_tuning is given, but model.peft.peft_scheme is null, so all weights are trained; set "
                "model.peft.peft_scheme=lora"
            )
        return
    if scheme not in PEFT_SCHEMES:
        yield f"model.peft.peft_scheme is {scheme!r}; expected one of {', '.join(PEFT_SCHEMES)}, or null for none"
    unknown = [name for name in tuning.target_modules if name not in LORA_TARGETS]
    if unknown or not tuning.target_modules:
        yield (
            f"model.peft.lora_tuning.target_modules is {tuning.target_modules}; expected some of "
            f"{', '.join(LORA_TARGETS)}"
        )
    if cfg.model.reference_placement == "device":
        yield (
            "model.reference_placement is 'device', but with model.peft.peft_scheme=lora the reference is the frozen "
            "model without its updates, and there is no copy to place; leave it at host"
        )


def _lengths(cfg: TrainConfig) -> Iterator[str]:
    model, lengths = cfg.model, cfg.model.reinforce.length_params
    if model.max_prompt_tokens < 1:
        yield (
            f"model.reinforce.length_params.max_length is {lengths.max_length}, which leaves no room for a prompt in "
            f"model.encoder_seq_length, which is {model.encoder_seq_length}"
        )
    padded = cfg.trainer.reinforce.rollout_batch_seq_length
    if padded is not None and padded > model.encoder_seq_length:
        yield (
            f"trainer.reinforce.rollout_batch_seq_length is {padded}, above model.encoder_seq_length, which is "
            f"{model.encoder_seq_length}; no sequence is that long"
        )
    if model.shared_prefix and padded is not None:
        yield (
            f"model.shared_prefix is true and trainer.reinforce.rollout_batch_seq_length is {padded}; a row of "
            "several sequences has the length that it has: set one of them to null"
        )
    if model.shared_prefix and model.context_parallel_size > 1:
        yield (
            f"model.shared_prefix is true and model.context_parallel_size is {model.context_parallel_size}; ranks "
            "cannot share a row of several sequences: set shared_prefix to null or context_parallel_size to 1"
        )
    tokens = model.tokens_per_micro_batch
    if tokens is not None and tokens < model.encoder_seq_length:
        yield (
            f"model.tokens_per_micro_batch is {tokens}, below model.encoder_seq_length, which is "
            f"{model.encoder_seq_length}; the longest sequence must fit"
        )
    if lengths.min_length > lengths.max_length:
        yield (
            f"model.reinforce.length_params.min_length is {lengths.min_length}, above max_length, "
            f"which is {lengths.max_length}"
        )


def _sampling(cfg: TrainConfig) -> Iterator[str]:
    rollout: RolloutConfig = cfg.model.reinforce
    yield from _sampling_ranges("model.reinforce.sampling_params", rollout.sampling_params)
    yield from _sampling_ranges("model.reinforce.val_sampling_params", rollout.val_sampling_params)
    own = rollout.sampling_params
    if own.use_greedy:
        yield (
            "model.reinforce.sampling_params.use_greedy is true; greedy samples of one prompt are all alike, so there "
            "is nothing to learn from: set it to false (validation has its own val_sampling_params)"
        )
    narrowed = [
        f"sampling_params.{name}={getattr(own, name)}"
        for name, full in (("top_k", 0), ("top_p", 1.0), ("repetition_penalty", 1.0))
        if getattr(own, name) != full
    ]
    if rollout.length_params.min_length:
        narrowed.append(f"length_params.min_length={rollout.length_params.min_length}")
    if narrowed and not rollout.allow_biased_sampling:
        yield (
            f"model.reinforce has {', '.join(narrowed)}: samples would not come from the policy whose "
            "log-probs are trained, which biases the gradient; use the full distribution (top_k=0, top_p=1.0, "
            "repetition_penalty=1.0, min_length=0) or set model.reinforce.allow_biased_sampling=true"
        )


def _sampling_ranges(key: str, sampling: SamplingConfig) -> Iterator[str]:
    finite = "expected a finite number above 0"
    if not 0 < sampling.temperature < math.inf:
        yield f"{key}.temperature is {sampling.temperature}; {finite} (use_greedy=true takes the likeliest)"
    if sampling.top_k < 0:
        yield f"{key}.top_k is {sampling.top_k}; expected at least 0 (0 for all tokens)"
    if not 0 < sampling.top_p <= 1:
        yield f"{key}.top_p is {sampling.top_p}; expected above 0 and at most 1"
    if not 0 < sampling.repetition_penalty < math.inf:
        yield f"{key}.repetition_penalty is {sampling.repetition_penalty}; {finite} (1 for none)"


def _best_checkpoints(cfg: TrainConfig) -> Iterator[str]:
    key, saving = "exp_manager.checkpoint_callback_params", cfg.exp_manager.checkpoint_callback_params
    if not saving.best_metric.startswith("val/"):
        yield f"{key}.best_metric is {saving.best_metric!r}; expected a metric of validation, such as val/rewards"
    if saving.keep_best < 1:
        return
    if cfg.model.data.data_prefix.validation is None:
        yield f"{key}.keep_best is {saving.keep_best}, but model.data.data_prefix.validation is not set: no validation"
    elif cfg.trainer.reinforce.val_check_interval == 0:
        yield f"{key}.keep_best is {saving.keep_best}, but trainer.reinforce.val_check_interval is 0: no validation"


def _files(cfg: TrainConfig) -> Iterator[str]:
    folder = Path(cfg.pretrained_checkpoint.restore_from_path)
    key = "pretrained_checkpoint.restore_from_path"
    if cfg.pretrained_checkpoint.restore_from_path == NOT_SET:
        pass  # said where the key is read
    elif not os.path.isdir(folder):
        yield f"{key} is {folder}, which does not exist; expected a Hugging Face model folder"
    else:
        for name in ("config.json", "tokenizer_config.json"):
            if not os.access(folder / name, os.R_OK):
                yield f"{key} is {folder}, which has no {name} that can be read; expected a Hugging Face model folder"
        yield from shape_faults(cfg)
    prefix = cfg.model.data.data_prefix
    try:
        resolve_data_prefix({"train": prefix.train, "validation": prefix.validation, "test": prefix.test})
    except ConfigError as error:
        yield from (fault for fault in error.faults if NOT_SET not in fault)
    if cfg.exp_manager.max_time_per_run is not None:
        try:
            parse_duration(cfg.exp_manager.max_time_per_run)
        except ValueError as error:
            yield f"exp_manager.max_time_per_run is {cfg.exp_manager.max_time_per_run!r}: {error}"
    try:
        Allocation.of(os.environ)
    except ConfigError as error:
        yield from error.faults
    yield from folder_faults("exp_manager.explicit_log_dir", cfg.exp_manager.explicit_log_dir)


def shape_faults(cfg: TrainConfig) -> Iterator[str]:
    """What of the model's `config.json` does not go with the configuration."""
    config_file, values = model_values(cfg.pretrained_checkpoint.restore_from_path)
    limit, layers = values.get("max_position_embeddings"), values.get("num_hidden_layers")
    if isinstance(limit, int) and cfg.model.encoder_seq_length > limit:
        yield (
            f"model.encoder_seq_length is {cfg.model.encoder_seq_length}, above the {limit} positions "
            f"(max_position_embeddings) of {config_file}"
        )
    stages = cfg.model.pipeline_model_parallel_size
    uneven = any("pipeline" in name for name in cfg.model.megatron_overrides)
    if isinstance(layers, int) and stages > 1 and layers % stages and not uneven:
        yield (
            f"model.pipeline_model_parallel_size is {stages}, which does not divide the {layers} layers "
            f"(num_hidden_layers) of {config_file}; choose another, or say how many the first stage has: "
            "+model.megatron_overrides.num_layers_in_first_pipeline_stage=N"
        )
    yield from tensor_faults(values, config_file, cfg.model.tensor_model_parallel_size)


def model_values(folder: str) -> tuple[Path, dict[str, Any]]:
    """A model's `config.json` and what it holds; nothing where it cannot be read, which is said with the weights."""
    config_file = Path(folder) / "config.json"
    try:
        values = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return config_file, {}
    return config_file, values if isinstance(values, dict) else {}


def tensor_faults(values: dict[str, Any], config_file: Path, ranks: int, section: str = "model") -> Iterator[str]:
    """What cannot be shared by tensor-parallel ranks; heads, groups and vocabulary are padded."""
    size = values.get("intermediate_size")
    if isinstance(size, int) and ranks > 1 and size % ranks:
        yield (
            f"{section}.tensor_model_parallel_size is {ranks}, which does not divide the feed-forward size {size} "
            f"(intermediate_size) of {config_file}"
        )


_CHECKS: tuple[Callable[[TrainConfig], Iterator[str]], ...] = (
    _ranges,
    reward_faults,
    algorithm_faults,
    batch_size_faults,
    _peft,
    _layout,
    _lengths,
    _sampling,
    generation_faults,
    _best_checkpoints,
    _files,
)
