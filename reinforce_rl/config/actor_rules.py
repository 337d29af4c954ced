"""Cross-field rules of the actor's configuration, without torch. Each yields one message per error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from reinforce_rl.algorithm.advantages import ADVANTAGE_ESTIMATORS, EstimatorEntry
from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.base import NOT_SET
from reinforce_rl.config.model import LoraTuningConfig
from reinforce_rl.config.rollout_rules import generation_faults, reward_faults, sampling_faults
from reinforce_rl.config.rules import model_values, optimizer_faults, ranks_faults, tensor_faults
from reinforce_rl.data.jsonl import resolve_data_prefix
from reinforce_rl.errors import ConfigError
from reinforce_rl.utils.duration import Allocation, parse_duration
from reinforce_rl.utils.files import folder_faults


def find_faults(cfg: TrainConfig) -> list[str]:
    """Return all errors of a configuration with valid keys and types."""
    return [fault for check in _CHECKS for fault in check(cfg)]


def algorithm_faults(cfg: TrainConfig) -> Iterator[str]:
    rl = cfg.trainer.reinforce
    estimator = ADVANTAGE_ESTIMATORS.get(rl.advantage_estimator)
    if estimator is not None and estimator.compares_samples and rl.num_rollouts_per_prompt < 2:
        yield (
            f"trainer.reinforce.num_rollouts_per_prompt is {rl.num_rollouts_per_prompt}; "
            f"advantage_estimator={rl.advantage_estimator} compares the samples of one prompt with "
            "each other, so it needs at least 2 (with 1 every advantage would be 0)"
        )
    if rl.use_absolute_kl and rl.kl_estimator != "k1":
        yield (
            f"trainer.reinforce.use_absolute_kl is true and kl_estimator is {rl.kl_estimator!r}; "
            "set one of them (use_absolute_kl means kl_estimator=absolute_k1)"
        )
    if rl.kl_target is not None and not rl.initial_policy_kl_penalty > 0:
        yield (
            f"trainer.reinforce.kl_target is {rl.kl_target} and initial_policy_kl_penalty is "
            f"{rl.initial_policy_kl_penalty}; it is the value that beta starts from, so it must be above 0"
        )
    yield from _credit(cfg, estimator)
    yield from _shaping(cfg)


def _credit(cfg: TrainConfig, estimator: EstimatorEntry | None) -> Iterator[str]:
    rl = cfg.trainer.reinforce
    if rl.credit_assignment != "token":
        if rl.discount_factor != 1.0:
            yield (
                f"trainer.reinforce.discount_factor is {rl.discount_factor}, but the response is one action; "
                "set credit_assignment=token, or leave it at 1.0"
            )
        return
    if rl.kl_reduction != "sum":
        yield (
            f"trainer.reinforce.kl_reduction is {rl.kl_reduction!r} with credit_assignment=token, which charges each "
            "token its own KL; expected sum"
        )
    if rl.importance_ratio.startswith("sequence"):
        yield (
            f"trainer.reinforce.importance_ratio is {rl.importance_ratio!r} with credit_assignment=token; a ratio of "
            "the whole response needs one advantage for all of it: set importance_ratio=token"
        )
    if estimator is not None and not estimator.only_subtracts and rl.kl_placement == "reward":
        yield (
            f"trainer.reinforce.advantage_estimator is {rl.advantage_estimator!r} with credit_assignment=token and "
            "kl_placement=reward; it does more than subtract a baseline, so the KL of single tokens cannot go "
            "through it: set kl_placement=advantage or loss"
        )


def _shaping(cfg: TrainConfig) -> Iterator[str]:
    rl, shaping = cfg.trainer.reinforce, cfg.trainer.reinforce.reward_shaping
    if shaping.standardisation != "given" and (shaping.mean, shaping.deviation) != (0.0, 1.0):
        yield (
            f"trainer.reinforce.reward_shaping has mean={shaping.mean} and deviation={shaping.deviation}, which only "
            f"standardisation=given reads; it is {shaping.standardisation!r}"
        )
    if (rl.truncated_samples == "penalise") != (rl.truncation_penalty > 0):
        yield (
            f"trainer.reinforce.truncated_samples is {rl.truncated_samples!r} and truncation_penalty is "
            f"{rl.truncation_penalty}; expected a penalty above 0 with truncated_samples=penalise, and 0 otherwise"
        )
    if rl.overlong_buffer and rl.truncated_samples != "penalise":
        yield (
            f"trainer.reinforce.overlong_buffer is {rl.overlong_buffer}, which only truncated_samples=penalise reads; "
            f"it is {rl.truncated_samples!r}"
        )
    if rl.overlong_buffer > cfg.model.reinforce.length_params.max_length:
        yield (
            f"trainer.reinforce.overlong_buffer is {rl.overlong_buffer}, above "
            f"model.reinforce.length_params.max_length, which is {cfg.model.reinforce.length_params.max_length}"
        )
    if rl.dynamic_filtering and rl.num_rollouts_per_prompt < 2:
        yield (
            f"trainer.reinforce.dynamic_filtering is true and num_rollouts_per_prompt is "
            f"{rl.num_rollouts_per_prompt}; it compares the samples of one prompt, so it needs at least 2"
        )


def batch_size_faults(cfg: TrainConfig) -> Iterator[str]:
    rl, model = cfg.trainer.reinforce, cfg.model
    samples = rl.num_rollouts_per_prompt
    sequences = model.reinforce.num_rollout_samples * samples
    size = model.global_batch_size
    if size is not None and (size < 1 or size > sequences or sequences % size or size % samples):
        yield (
            f"model.global_batch_size is {size}, but a step makes num_rollout_samples x num_rollouts_per_prompt = "
            f"{model.reinforce.num_rollout_samples} x {samples} = {sequences} sequences; expected a number of whole "
            f"prompts (a multiple of {samples}) that divides {sequences}, or null for all of them"
        )
    elif rl.importance_ratio == "none" and (rl.reinforce_epochs > 1 or cfg.prompts_per_update is not None):
        yield (
            f"trainer.reinforce.reinforce_epochs is {rl.reinforce_epochs} and model.global_batch_size is "
            f"{'null' if size is None else size}: "
            "several optimizer steps on one rollout batch are off-policy; set "
            "trainer.reinforce.importance_ratio=token, sequence or sequence_geometric"
        )


def _layout(cfg: TrainConfig) -> Iterator[str]:
    model, world = cfg.model, cfg.trainer.world_size
    yield from ranks_faults(model, cfg.trainer.num_nodes, cfg.trainer.devices)
    blocks = world // max(model.block_size, 1)
    if world % max(model.block_size, 1) == 0 and model.reinforce.num_rollout_samples < blocks:
        yield (
            f"model.reinforce.num_rollout_samples is {model.reinforce.num_rollout_samples}, fewer prompts a step "
            f"than the {blocks} data-parallel ranks; some would always be idle"
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
        pass  # reported where the key is read
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
    """Check the configuration against the model's `config.json`."""
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


_CHECKS: tuple[Callable[[TrainConfig], Iterator[str]], ...] = (
    reward_faults,
    algorithm_faults,
    batch_size_faults,
    _peft,
    _layout,
    lambda cfg: optimizer_faults(cfg.model.optim),
    _lengths,
    sampling_faults,
    generation_faults,
    _best_checkpoints,
    _files,
)
