"""Rules across keys of the actor's configuration, without torch.

Each yields one message per error.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from reinforce_rl.algorithm.advantages import ADVANTAGE_ESTIMATORS
from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.base import NOT_SET, settings_fault
from reinforce_rl.config.environment import EnvironmentConfig
from reinforce_rl.config.generation_rules import generation_faults, is_importable
from reinforce_rl.config.model import LoraTuningConfig
from reinforce_rl.config.model_folder import MODEL, model_values, no_model
from reinforce_rl.config.monitoring import LOGGERS
from reinforce_rl.config.parallelism import model_faults, ranks_faults, recomputation_faults
from reinforce_rl.config.rewards import RewardServerConfig
from reinforce_rl.data.data_prefix import resolve_data_prefix
from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.utils.files import folder_faults
from reinforce_rl.utils.job_time import JobTimes, parse_duration
from reinforce_rl.utils.net import Address

PROVIDED_FUNCTIONS = ("gsm8k", "instructions", "matches", "length", "vader")
_DOTTED_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
REWARD_METRICS = ("rewards_with_kl",)  # metrics that a source's rewards_NAME would hide


def find_faults(cfg: TrainConfig) -> Iterator[str]:
    """Yield all errors of a configuration with valid keys and types."""
    checks = (
        _rewards,
        _environment,
        _algorithm,
        _samples,
        _batches,
        _model,
        _lengths,
        generation_faults,
        _saving,
        _profile,
        _files,
    )
    for check in checks:
        yield from check(cfg)


def _algorithm(cfg: TrainConfig) -> Iterator[Fault]:
    rl = cfg.trainer.reinforce
    estimator = ADVANTAGE_ESTIMATORS.get(rl.advantage_estimator)
    if estimator is not None and estimator.compares_samples and rl.num_rollouts_per_prompt < 2:
        yield settings_fault(
            cfg,
            ("trainer.reinforce.num_rollouts_per_prompt",),
            f"advantage_estimator={rl.advantage_estimator} compares the samples of one prompt with "
            "each other, so it needs at least 2",
            key="config.num_rollouts_per_prompt.too_small_for_estimator",
        )
    if rl.use_absolute_kl and rl.kl_estimator != "k1":
        yield settings_fault(
            cfg,
            ("trainer.reinforce.use_absolute_kl", "trainer.reinforce.kl_estimator"),
            "set one of them (use_absolute_kl means kl_estimator=absolute_k1)",
            key="config.use_absolute_kl.conflicts_with_kl_estimator",
        )
    if rl.kl_target is not None and not rl.uses_reference:
        yield settings_fault(
            cfg,
            ("trainer.reinforce.kl_target", "trainer.reinforce.initial_policy_kl_penalty"),
            "beta starts from initial_policy_kl_penalty, so it must be above 0",
            key="config.kl_target.without_reference",
        )
    is_masked = (rl.generator_correction or "").endswith("_mask")
    if is_masked and not rl.generator_ratio_cap > 1:
        yield settings_fault(
            cfg,
            (
                "trainer.reinforce.generator_correction",
                "trainer.reinforce.generator_ratio_cap",
            ),
            "the interval 1 / cap .. cap must not be empty: expected above 1",
            key="config.generator_ratio_cap.too_small_for_mask",
        )
    if rl.credit_assignment == "token":
        yield from _token_credit(cfg)
    if rl.credit_assignment == "turn":
        yield from _turn_credit(cfg)
    if rl.credit_assignment != "token" and rl.discount_factor != 1.0:
        yield settings_fault(
            cfg,
            ("trainer.reinforce.discount_factor",),
            "the response is one action: set credit_assignment=token, or leave it at 1.0",
            key="config.discount_factor.without_token_credit",
        )


def _token_credit(cfg: TrainConfig) -> Iterator[Fault]:
    """Check what credit_assignment=token needs."""
    rl = cfg.trainer.reinforce
    estimator = ADVANTAGE_ESTIMATORS.get(rl.advantage_estimator)
    if rl.kl_reduction != "sum":
        yield settings_fault(
            cfg,
            ("trainer.reinforce.kl_reduction", "trainer.reinforce.credit_assignment"),
            "each token is charged its own KL: expected sum",
            key="config.kl_reduction.conflicts_with_token_credit",
        )
    if rl.importance_ratio.startswith("sequence"):
        yield settings_fault(
            cfg,
            ("trainer.reinforce.importance_ratio", "trainer.reinforce.credit_assignment"),
            "a ratio of the whole response needs one advantage for it: set importance_ratio=token",
            key="config.importance_ratio.conflicts_with_token_credit",
        )
    if estimator is not None and not estimator.only_subtracts and rl.kl_placement == "reward":
        yield settings_fault(
            cfg,
            (
                "trainer.reinforce.advantage_estimator",
                "trainer.reinforce.credit_assignment",
                "trainer.reinforce.kl_placement",
            ),
            "it does more than subtract a baseline, so it cannot handle the KL of single tokens: "
            "set kl_placement=advantage or loss",
            key="config.advantage_estimator.conflicts_with_token_credit",
        )


def _turn_credit(cfg: TrainConfig) -> Iterator[Fault]:
    """Check what credit_assignment=turn needs."""
    rl = cfg.trainer.reinforce
    assignment = "trainer.reinforce.credit_assignment"
    if not cfg.takes_environment_rewards:
        yield settings_fault(
            cfg,
            ("reward", assignment),
            "the environment gives the rewards of turns: set reward=environment",
            key="config.credit_assignment.turn_without_environment",
        )
    if rl.advantage_estimator != "rloo":
        yield settings_fault(
            cfg,
            ("trainer.reinforce.advantage_estimator", assignment),
            "a turn's baseline is the other samples' mean return from it: expected rloo",
            key="config.advantage_estimator.conflicts_with_turn_credit",
        )
    if rl.kl_placement == "advantage" or rl.kl_reduction != "sum":
        yield settings_fault(
            cfg,
            (
                "trainer.reinforce.kl_placement",
                "trainer.reinforce.kl_reduction",
                assignment,
            ),
            "each turn is charged the KL of its own tokens: expected sum, and reward or loss",
            key="config.kl_placement.conflicts_with_turn_credit",
        )
    if rl.importance_ratio.startswith("sequence"):
        yield settings_fault(
            cfg,
            ("trainer.reinforce.importance_ratio", assignment),
            "a ratio of the whole response needs one advantage for it: set importance_ratio=token",
            key="config.importance_ratio.conflicts_with_turn_credit",
        )
    if rl.reward_shaping.standardization != "none" or rl.reward_shaping.scale != 1.0:
        yield settings_fault(
            cfg,
            (
                "trainer.reinforce.reward_shaping.standardization",
                "trainer.reinforce.reward_shaping.scale",
                assignment,
            ),
            "the rewards of earlier turns are subtracted as the environment gave them: expected "
            "none and 1",
            key="config.reward_shaping.conflicts_with_turn_credit",
        )


def _samples(cfg: TrainConfig) -> Iterator[Fault]:
    rl = cfg.trainer.reinforce
    shaping = rl.reward_shaping
    if shaping.standardization != "given" and (shaping.mean, shaping.std) != (0.0, 1.0):
        yield Fault(
            f"trainer.reinforce.reward_shaping has mean={shaping.mean} and "
            f"std={shaping.std}, which only standardization=given reads; it is "
            f"{shaping.standardization!r}",
            key="config.reward_shaping.without_standardization_given",
        )
    if (rl.truncated_samples == "penalize") != (rl.truncation_penalty > 0):
        yield settings_fault(
            cfg,
            ("trainer.reinforce.truncated_samples", "trainer.reinforce.truncation_penalty"),
            "expected a penalty above 0 with truncated_samples=penalize, and 0 otherwise",
            key="config.truncation_penalty.conflicts_with_truncated_samples",
        )
    if rl.overlong_buffer and rl.truncated_samples != "penalize":
        yield settings_fault(
            cfg,
            ("trainer.reinforce.overlong_buffer", "trainer.reinforce.truncated_samples"),
            "only truncated_samples=penalize uses overlong_buffer",
            key="config.overlong_buffer.without_truncated_samples_penalize",
        )
    if rl.overlong_buffer > cfg.model.reinforce.length_params.max_length:
        yield settings_fault(
            cfg,
            ("trainer.reinforce.overlong_buffer", "model.reinforce.length_params.max_length"),
            "the buffer must not be longer",
            key="config.overlong_buffer.above_max_length",
        )
    if rl.dynamic_filtering and rl.num_rollouts_per_prompt < 2:
        yield settings_fault(
            cfg,
            ("trainer.reinforce.dynamic_filtering", "trainer.reinforce.num_rollouts_per_prompt"),
            "it compares the samples of one prompt, so it needs at least 2",
            key="config.num_rollouts_per_prompt.too_small_for_dynamic_filtering",
        )


def _batches(cfg: TrainConfig) -> Iterator[Fault]:
    rl = cfg.trainer.reinforce
    model = cfg.model
    samples = rl.num_rollouts_per_prompt
    size = model.global_batch_size
    sequences = model.reinforce.num_rollout_samples * samples
    if size is not None and (size < 1 or size > sequences or sequences % size or size % samples):
        yield Fault(
            f"model.global_batch_size is {size}, but a step makes num_rollout_samples x "
            f"num_rollouts_per_prompt = {model.reinforce.num_rollout_samples} x {samples} = "
            f"{sequences} sequences; expected a number of whole prompts (a multiple of {samples}) "
            f"that divides {sequences}, or null for all of them",
            key="config.global_batch_size.not_a_divisor_of_step",
        )
        return
    if rl.mini_batches > 1 and size is not None:
        yield settings_fault(
            cfg,
            ("trainer.reinforce.mini_batches", "model.global_batch_size"),
            "both divide a rollout batch into optimizer steps: leave one of them at its default",
            key="config.mini_batches.with_global_batch_size",
        )
    if rl.mini_batches > 1 and model.reinforce.num_rollout_samples % rl.mini_batches:
        yield settings_fault(
            cfg,
            ("trainer.reinforce.mini_batches", "model.reinforce.num_rollout_samples"),
            "mini_batches must divide num_rollout_samples, so that optimizer steps are equal",
            key="config.mini_batches.not_a_divisor_of_prompts",
        )
    if rl.importance_ratio == "none" and cfg.takes_several_updates:
        yield settings_fault(
            cfg,
            (
                "trainer.reinforce.reinforce_epochs",
                "trainer.reinforce.mini_batches",
                "model.global_batch_size",
            ),
            "several optimizer steps on one rollout batch are off-policy: set "
            "trainer.reinforce.importance_ratio=token, sequence or sequence_geometric",
            key="config.importance_ratio.missing_off_policy",
        )


def _model(cfg: TrainConfig) -> Iterator[Fault]:
    model = cfg.model
    world = cfg.training_ranks
    yield from ranks_faults(
        model, cfg.trainer.num_nodes, cfg.trainer.devices, "trainer.", others=cfg.generation_ranks
    )
    yield from recomputation_faults(model)
    yield from model.optim.faults()
    yield from model.data.fields.faults()
    blocks = world // max(model.block_size, 1)
    samples = model.reinforce.num_rollout_samples
    if world % max(model.block_size, 1) == 0 and samples < blocks:
        yield Fault(
            f"model.reinforce.num_rollout_samples is {samples}, fewer prompts a step than the "
            f"{blocks} data-parallel ranks; some would always be idle",
            key="config.num_rollout_samples.fewer_than_ranks",
        )
    if model.peft.peft_scheme is None and model.peft.lora_tuning != LoraTuningConfig():
        yield Fault(
            "model.peft.lora_tuning is given, but model.peft.peft_scheme is null, so all weights "
            "are trained; set model.peft.peft_scheme=lora",
            key="config.lora_tuning.without_peft_scheme",
        )
    if model.peft.peft_scheme is not None and model.reference_placement == "device":
        yield settings_fault(
            cfg,
            ("model.reference_placement", "model.peft.peft_scheme"),
            "with LoRA the reference is the frozen model, so there is no copy to place: expected "
            "host",
            key="config.reference_placement.conflicts_with_peft_scheme",
        )


def _lengths(cfg: TrainConfig) -> Iterator[Fault]:
    model = cfg.model
    lengths = model.reinforce.length_params
    padded = cfg.trainer.reinforce.rollout_batch_seq_length
    tokens = model.tokens_per_micro_batch
    if cfg.max_prompt_tokens < 1:
        longest_response = "model.reinforce.length_params.max_length"
        if cfg.has_environment:
            longest_response = "environment.max_episode_tokens"
        yield settings_fault(
            cfg,
            (longest_response, "model.encoder_seq_length"),
            "there is no room for a prompt",
            key="config.max_length.no_room_for_prompt",
        )
    if padded is not None and padded > model.encoder_seq_length:
        yield settings_fault(
            cfg,
            ("trainer.reinforce.rollout_batch_seq_length", "model.encoder_seq_length"),
            "expected at most encoder_seq_length, the longest sequence",
            key="config.rollout_batch_seq_length.above_encoder_seq_length",
        )
    if model.shared_prefix and padded is not None:
        yield settings_fault(
            cfg,
            ("model.shared_prefix", "trainer.reinforce.rollout_batch_seq_length"),
            "a row of several sequences cannot be padded to a fixed length: set one of them to "
            "null",
            key="config.shared_prefix.conflicts_with_rollout_batch_seq_length",
        )
    if model.shared_prefix and model.context_parallel_size > 1:
        yield settings_fault(
            cfg,
            ("model.shared_prefix", "model.context_parallel_size"),
            "context-parallel ranks cannot split a row of several sequences: set "
            "model.shared_prefix to null, or model.context_parallel_size to 1",
            key="config.shared_prefix.conflicts_with_context_parallel_size",
        )
    if tokens is not None and tokens < model.encoder_seq_length:
        yield settings_fault(
            cfg,
            ("model.tokens_per_micro_batch", "model.encoder_seq_length"),
            "the longest sequence must fit",
            key="config.tokens_per_micro_batch.below_encoder_seq_length",
        )
    if lengths.min_length > lengths.max_length:
        yield settings_fault(
            cfg,
            (
                "model.reinforce.length_params.min_length",
                "model.reinforce.length_params.max_length",
            ),
            "min_length must not be above max_length",
            key="config.min_length.above_max_length",
        )


def _rewards(cfg: TrainConfig) -> Iterator[Fault]:
    function = cfg.reward_function
    for setting, server in cfg.remote_rm.servers().items():
        yield from _replicas(setting, server)
    if cfg.reward_class is not None and not _DOTTED_NAME.fullmatch(cfg.reward_class):
        yield settings_fault(
            cfg,
            ("reward",),
            "expected server, function, environment, or the dotted name of a class, such as "
            "my_rewards.MySource",
            key="config.reward.unknown",
        )
    calls_own_function = "reward_function" in cfg.reward_functions
    if calls_own_function and function.name is None:
        names = ", ".join(f"reinforce_rl.rewards.functions.{name}" for name in PROVIDED_FUNCTIONS)
        yield Fault(
            "reward is 'function', but reward_function.name is not set; expected the dotted name "
            f"of a function: one of your own, or {names}",
            key="config.reward_function.name.missing",
        )
    if not calls_own_function and function.name is not None:
        asked = {"server": "remote_rm.reward_model", "environment": "the environment"}
        source = asked.get(cfg.reward, "that class")
        yield Fault(
            f"reward_function.name is {function.name!r}, but reward is {cfg.reward!r}, which asks "
            f"{source}; set reward=function, or list it under reward_function.more_functions to "
            "add its scores",
            key="config.reward_function.name.conflicts_with_reward_server",
        )
    yield from _reward_names(cfg)


def _environment(cfg: TrainConfig) -> Iterator[Fault]:
    environment = cfg.environment
    rl = cfg.trainer.reinforce
    if not cfg.has_environment:
        if cfg.takes_environment_rewards:
            yield Fault(
                "reward is 'environment', but environment.name is not set; expected the dotted "
                "name of a function or class, see docs/environments.md",
                key="config.environment.name.missing",
            )
        if environment != EnvironmentConfig():
            yield Fault(
                "environment has settings, but environment.name is not set; set it, or leave them "
                "out",
                key="config.environment.without_name",
            )
        return
    if not _DOTTED_NAME.fullmatch(environment.name or ""):
        yield settings_fault(
            cfg,
            ("environment.name",),
            "expected the dotted name of a function or class, such as my_tools.calculator",
            key="config.environment.name.no_dotted_name",
        )
    if environment.max_episode_tokens < cfg.model.reinforce.length_params.max_length:
        yield settings_fault(
            cfg,
            ("environment.max_episode_tokens", "model.reinforce.length_params.max_length"),
            "an episode must have room for one answer",
            key="config.max_episode_tokens.below_max_length",
        )
    # A rank that waits longer without progress is taken for one that hangs.
    if environment.turn_timeout_seconds >= cfg.trainer.collective_timeout_seconds / 2:
        yield settings_fault(
            cfg,
            ("environment.turn_timeout_seconds", "trainer.collective_timeout_seconds"),
            "a reply may take less than half of the time after which ranks are taken for hanging",
            key="config.turn_timeout_seconds.above_collective_timeout",
        )
    if cfg.rollout_order == "finished":
        yield settings_fault(
            cfg,
            ("environment.name", "rollout_order"),
            "episodes are played in the order of their prompts: set rollout_order=prompts",
            key="config.environment.conflicts_with_rollout_order",
        )
    if cfg.model.data.sanitize_control_tokens:
        yield settings_fault(
            cfg,
            ("environment.name", "model.data.sanitize_control_tokens"),
            "control tokens in an environment's messages are not made texts: set it to false, and "
            "have the environment remove them from texts that it does not trust",
            key="config.environment.conflicts_with_sanitize_control_tokens",
        )
    if rl.overlong_buffer:
        yield settings_fault(
            cfg,
            ("environment.name", "trainer.reinforce.overlong_buffer"),
            "an episode is cut for its own tokens or for its environment's: set overlong_buffer=0",
            key="config.environment.conflicts_with_overlong_buffer",
        )


def _reward_names(cfg: TrainConfig) -> Iterator[Fault]:
    """Check the names under which the scores of reward sources are logged."""
    terms = cfg.reward_terms
    names = [term.name for term in terms]
    for term in terms if cfg.logs_reward_terms else []:
        name = term.name
        if name and f"rewards_{name}" in REWARD_METRICS:
            yield Fault(
                f"{term.setting} is named {name!r}, and its scores are logged as rewards_{name}, "
                "which is a metric already; give it another name",
                key="config.reward_sources.named_as_metric",
            )
    if len(set(names)) < len(names):
        yield Fault(
            f"reward sources are named {', '.join(names)}; each is logged as rewards_NAME, so give "
            "each a name of its own in reward_function.more_functions and "
            "remote_rm.more_reward_models",
            key="config.reward_sources.same_name",
        )


def _replicas(setting: str, server: RewardServerConfig) -> Iterator[Fault]:
    first = Address(server.ip.lower(), server.port)
    known = {first: f"{setting}.ip and port"}
    default = RewardServerConfig()
    addresses = (server.ip, server.port, server.replicas)
    if server.ready_files and addresses != (default.ip, default.port, default.replicas):
        yield Fault(
            f"{setting}.ready_files names the servers, and so do ip, port and replicas: "
            f"{server.ip}, {server.port} and {server.replicas}; set one or the other",
            key="config.ready_files.with_addresses",
        )
    for number, text in enumerate(server.replicas):
        place = f"{setting}.replicas[{number}]"
        try:
            address = Address.parse(text)
        except ValueError:
            yield Fault(
                f"{place} is {text!r}; expected HOST:PORT with a port of 1 to 65535",
                key="config.replicas.no_address",
            )
            continue
        if address in known:
            yield Fault(
                f"{place} is {text}, the same server as {known[address]}; name each server once",
                key="config.replicas.same_server",
            )
        known[address] = place


def _saving(cfg: TrainConfig) -> Iterator[Fault]:
    saving = cfg.exp_manager.checkpoint_callback_params
    if not saving.best_metric.startswith("val/"):
        yield settings_fault(
            cfg,
            ("exp_manager.checkpoint_callback_params.best_metric",),
            "expected a metric of validation, such as val/rewards",
            key="config.best_metric.not_of_validation",
        )
    if saving.keep_best > 0 and cfg.model.data.data_prefix.validation is None:
        yield settings_fault(
            cfg,
            (
                "exp_manager.checkpoint_callback_params.keep_best",
                "model.data.data_prefix.validation",
            ),
            "there is no validation",
            key="config.keep_best.without_validation",
        )
    elif saving.keep_best > 0 and cfg.trainer.reinforce.val_check_interval == 0:
        yield settings_fault(
            cfg,
            (
                "exp_manager.checkpoint_callback_params.keep_best",
                "trainer.reinforce.val_check_interval",
            ),
            "there is no validation",
            key="config.keep_best.without_validation",
        )


def _profile(cfg: TrainConfig) -> Iterator[Fault]:
    last = cfg.trainer.reinforce.max_steps
    chosen = {"steps": (cfg.trainer.profile.steps, 1, math.inf if last == -1 else last)}
    chosen["ranks"] = (cfg.trainer.profile.ranks or [], 0, cfg.trainer.world_size - 1)
    for name, (numbers, low, high) in chosen.items():
        wrong = dict.fromkeys(
            str(n) for n in numbers if not low <= n <= high or numbers.count(n) > 1
        )
        if wrong:
            bound = "on"
            if high < math.inf:
                bound = f"to max_steps, which is {high}" if name == "steps" else f"to {high}"
            bad = ", ".join(wrong)
            yield Fault(
                f"trainer.profile.{name} has {bad}; expected {name} from {low} {bound}, each once",
                key="config.profile.out_of_range",
            )


def _files(cfg: TrainConfig) -> Iterator[str]:
    key = MODEL
    folder = Path(cfg.pretrained_checkpoint.restore_from_path)
    if cfg.pretrained_checkpoint.restore_from_path == NOT_SET:
        pass  # reported where the key is read
    elif not os.access(folder / "config.json", os.R_OK):
        yield Fault(
            f"{key} is {folder}, which {no_model(folder)}",
            key="config.restore_from_path.no_model",
        )
    else:
        if not os.access(folder / "tokenizer_config.json", os.R_OK):
            yield Fault(
                f"{key} is {folder}, which has no tokenizer_config.json that can be read; "
                "expected a Hugging Face model folder",
                key="config.restore_from_path.no_tokenizer",
            )
        yield from shape_faults(cfg)
    prefix = cfg.model.data.data_prefix
    duration = cfg.exp_manager.max_time_per_run
    try:
        resolve_data_prefix(
            {"train": prefix.train, "validation": prefix.validation, "test": prefix.test}
        )
    except ConfigError as error:
        yield from (fault for fault in error.faults if NOT_SET not in fault)
    try:
        if duration is not None:
            parse_duration(duration)
    except ValueError as error:
        yield Fault(
            f"exp_manager.max_time_per_run is {duration!r}: {error}",
            key="config.max_time_per_run.invalid",
        )
    try:
        JobTimes.of(os.environ)
    except ConfigError as error:
        yield from error.faults
    yield from _loggers(cfg)
    yield from folder_faults("exp_manager.explicit_log_dir", cfg.exp_manager.explicit_log_dir)


def _loggers(cfg: TrainConfig) -> Iterator[Fault]:
    """Check the names of loggers; classes are imported later, by `check_logger_classes`."""
    for name in cfg.exp_manager.used_loggers:
        entry = LOGGERS.get(name)
        if entry is None and not _DOTTED_NAME.fullmatch(name):
            yield Fault(
                f"exp_manager.loggers has {name!r}; expected {', '.join(LOGGERS)}, or the dotted "
                "name of a class, such as my_loggers.MyLogger",
                key="config.loggers.unknown",
            )
        package = None if entry is None else entry.package
        if package is not None and not is_importable(f"{package}.x"):
            advice = f"`pip install 'reinforce-rl[{package}]'`, or leave the logger out"
            yield Fault(
                f"exp_manager.loggers has {name}, which is not installed; {advice}",
                key="config.loggers.not_installed",
            )


def shape_faults(cfg: TrainConfig) -> Iterator[Fault]:
    """Check the configuration against the model's `config.json`."""
    model = cfg.model
    folder = cfg.pretrained_checkpoint.restore_from_path
    longest = ("model.encoder_seq_length", model.encoder_seq_length)
    yield from model_faults(folder, model.tensor_model_parallel_size, "model", *longest)
    layers = model_values(folder).get("num_hidden_layers")
    stages = model.pipeline_model_parallel_size
    uneven = any("pipeline" in name for name in model.megatron_overrides)
    if isinstance(layers, int) and stages > 1 and layers % stages and not uneven:
        yield Fault(
            f"model.pipeline_model_parallel_size is {stages}, which does not divide the {layers} "
            f"layers (num_hidden_layers) of {folder}/config.json; choose another, or set the "
            "layers of the first stage: "
            "+model.megatron_overrides.num_layers_in_first_pipeline_stage=N",
            key="config.pipeline_model_parallel_size.not_a_divisor_of_layers",
        )
