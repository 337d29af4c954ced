"""Rules across keys of the actor's configuration, without torch. Each yields one message per error."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from reinforce_rl.algorithm.advantages import ADVANTAGE_ESTIMATORS
from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.base import NOT_SET, key_fault
from reinforce_rl.config.generation_rules import generation_faults, is_importable
from reinforce_rl.config.model import LoraTuningConfig
from reinforce_rl.config.model_folder import MODEL, model_values, no_model
from reinforce_rl.config.monitoring import LOGGERS
from reinforce_rl.config.parallelism import model_faults, ranks_faults, recomputation_faults
from reinforce_rl.config.rewards import RewardServerConfig
from reinforce_rl.data.data_prefix import resolve_data_prefix
from reinforce_rl.errors import ConfigError
from reinforce_rl.utils.files import folder_faults
from reinforce_rl.utils.net import Address

PROVIDED_FUNCTIONS = ("gsm8k", "instructions", "matches", "length", "vader")
START_VARIABLE, END_VARIABLE = "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"
_SAVING = "exp_manager.checkpoint_callback_params"
REWARD_METRICS = ("rewards_with_kl",)  # metrics whose names a reward source's own could be


def find_faults(cfg: TrainConfig) -> Iterator[str]:
    """Yield all errors of a configuration with valid keys and types."""
    checks = (_rewards, _algorithm, _samples, _batches, _model, _lengths, generation_faults, _saving, _profile, _files)
    for check in checks:
        yield from check(cfg)


def _algorithm(cfg: TrainConfig) -> Iterator[str]:
    rl, told = cfg.trainer.reinforce, partial(key_fault, cfg, "trainer.reinforce")
    estimator = ADVANTAGE_ESTIMATORS.get(rl.advantage_estimator)
    if estimator is not None and estimator.compares_samples and rl.num_rollouts_per_prompt < 2:
        compares = f"advantage_estimator={rl.advantage_estimator} compares the samples of one prompt with each other"
        yield told(".num_rollouts_per_prompt", f"{compares}, so it needs at least 2")
    if rl.use_absolute_kl and rl.kl_estimator != "k1":
        advice = "set one of them (use_absolute_kl means kl_estimator=absolute_k1)"
        yield told(".use_absolute_kl .kl_estimator", advice)
    if rl.kl_target is not None and not rl.initial_policy_kl_penalty > 0:
        advice = "the latter is the value that beta starts from, so it must be above 0"
        yield told(".kl_target .initial_policy_kl_penalty", advice)
    if (rl.generator_correction or "").endswith("_mask") and not rl.generator_ratio_cap > 1:
        yield told(".generator_correction .generator_ratio_cap", "1 / cap .. cap must have room: expected above 1")
    if rl.credit_assignment != "token":
        if rl.discount_factor != 1.0:
            advice = "the response is one action: set credit_assignment=token, or leave it at 1.0"
            yield told(".discount_factor", advice)
        return
    if rl.kl_reduction != "sum":
        yield told(".kl_reduction .credit_assignment", "each token is charged its own KL: expected sum")
    if rl.importance_ratio.startswith("sequence"):
        advice = "a ratio of the whole response needs one advantage for all of it: set importance_ratio=token"
        yield told(".importance_ratio .credit_assignment", advice)
    if estimator is not None and not estimator.only_subtracts and rl.kl_placement == "reward":
        advice = "it does more than subtract a baseline, so the KL of single tokens cannot go through it"
        keys = ".advantage_estimator .credit_assignment .kl_placement"
        yield told(keys, f"{advice}: set kl_placement=advantage or loss")


def _samples(cfg: TrainConfig) -> Iterator[str]:
    rl, told = cfg.trainer.reinforce, partial(key_fault, cfg, "trainer.reinforce")
    shaping = rl.reward_shaping
    if shaping.standardisation != "given" and (shaping.mean, shaping.deviation) != (0.0, 1.0):
        yield (
            f"trainer.reinforce.reward_shaping has mean={shaping.mean} and deviation={shaping.deviation}, which only "
            f"standardisation=given reads; it is {shaping.standardisation!r}"
        )
    if (rl.truncated_samples == "penalise") != (rl.truncation_penalty > 0):
        advice = "expected a penalty above 0 with truncated_samples=penalise, and 0 otherwise"
        yield told(".truncated_samples .truncation_penalty", advice)
    if rl.overlong_buffer and rl.truncated_samples != "penalise":
        yield told(".overlong_buffer .truncated_samples", "only truncated_samples=penalise reads the former")
    if rl.overlong_buffer > cfg.model.reinforce.length_params.max_length:
        yield told(".overlong_buffer model.reinforce.length_params.max_length", "the buffer must not be longer")
    if rl.dynamic_filtering and rl.num_rollouts_per_prompt < 2:
        advice = "it compares the samples of one prompt, so it needs at least 2"
        yield told(".dynamic_filtering .num_rollouts_per_prompt", advice)


def _batches(cfg: TrainConfig) -> Iterator[str]:
    rl, model = cfg.trainer.reinforce, cfg.model
    samples, size = rl.num_rollouts_per_prompt, model.global_batch_size
    sequences = model.reinforce.num_rollout_samples * samples
    if size is not None and (size < 1 or size > sequences or sequences % size or size % samples):
        yield (
            f"model.global_batch_size is {size}, but a step makes num_rollout_samples x num_rollouts_per_prompt = "
            f"{model.reinforce.num_rollout_samples} x {samples} = {sequences} sequences; expected a number of whole "
            f"prompts (a multiple of {samples}) that divides {sequences}, or null for all of them"
        )
    elif rl.importance_ratio == "none" and (rl.reinforce_epochs > 1 or cfg.prompts_per_update is not None):
        advice = "several optimizer steps on one rollout batch are off-policy: set trainer.reinforce.importance_ratio="
        keys = ".reinforce_epochs model.global_batch_size"
        yield key_fault(cfg, "trainer.reinforce", keys, f"{advice}token, sequence or sequence_geometric")


def _model(cfg: TrainConfig) -> Iterator[str]:
    model, world = cfg.model, cfg.training_ranks
    yield from ranks_faults(model, cfg.trainer.num_nodes, cfg.trainer.devices, "trainer.", others=cfg.generation_ranks)
    yield from recomputation_faults(model)
    yield from model.optim.faults()
    yield from model.data.fields.faults()
    blocks = world // max(model.block_size, 1)
    if world % max(model.block_size, 1) == 0 and model.reinforce.num_rollout_samples < blocks:
        few = f"fewer prompts a step than the {blocks} data-parallel ranks; some would always be idle"
        yield f"model.reinforce.num_rollout_samples is {model.reinforce.num_rollout_samples}, {few}"
    if model.peft.peft_scheme is None and model.peft.lora_tuning != LoraTuningConfig():
        yield (
            "model.peft.lora_tuning is given, but model.peft.peft_scheme is null, so all weights are trained; set "
            "model.peft.peft_scheme=lora"
        )
    if model.peft.peft_scheme is not None and model.reference_placement == "device":
        advice = "the reference is the frozen model, and there is no copy to place: leave the former at host"
        yield key_fault(cfg, "model", ".reference_placement model.peft.peft_scheme", advice)


def _lengths(cfg: TrainConfig) -> Iterator[str]:
    model, lengths, told = cfg.model, cfg.model.reinforce.length_params, partial(key_fault, cfg, "model")
    padded, tokens = cfg.trainer.reinforce.rollout_batch_seq_length, model.tokens_per_micro_batch
    if model.max_prompt_tokens < 1:
        yield told(".reinforce.length_params.max_length model.encoder_seq_length", "there is no room for a prompt")
    if padded is not None and padded > model.encoder_seq_length:
        keys = "trainer.reinforce.rollout_batch_seq_length model.encoder_seq_length"
        yield told(keys, "no sequence is longer than the latter: choose at most that")
    if model.shared_prefix and padded is not None:
        advice = "a row of several sequences has the length that it has: set one of them to null"
        yield told(".shared_prefix trainer.reinforce.rollout_batch_seq_length", advice)
    if model.shared_prefix and model.context_parallel_size > 1:
        advice = "ranks cannot share a row of several sequences: set the former to null or the latter to 1"
        yield told(".shared_prefix model.context_parallel_size", advice)
    if tokens is not None and tokens < model.encoder_seq_length:
        yield told(".tokens_per_micro_batch model.encoder_seq_length", "the longest sequence must fit")
    if lengths.min_length > lengths.max_length:
        yield told(".reinforce.length_params.min_length .max_length", "the former must not be above the latter")


def _rewards(cfg: TrainConfig) -> Iterator[str]:
    remote, own, by_function = cfg.remote_rm, cfg.reward_function, cfg.reward == "function"
    more = {f"remote_rm.more_reward_models.{name}": server for name, server in remote.more_reward_models.items()}
    for key, server in {"remote_rm.reward_model": remote.reward_model, **more}.items():
        yield from _replicas(key, server)
    if by_function and own.name is None:
        names = ", ".join(f"reinforce_rl.rewards.functions.{name}" for name in PROVIDED_FUNCTIONS)
        yield (
            "reward is 'function', but reward_function.name is not set; expected the dotted name of a function: one "
            f"of your own, or {names}"
        )
    if not by_function and own.name is not None:
        yield (
            f"reward_function.name is {own.name!r}, but reward is 'server', which asks remote_rm.reward_model; set "
            "reward=function, or name it under reward_function.more_functions to add it to the server's rewards"
        )
    first, weight = remote.reward_model.name, remote.reward_model.weight
    if by_function:
        first, weight = (own.name or "").rpartition(".")[2], own.weight
    named = [(f"remote_rm.more_reward_models.{name}", name) for name in remote.more_reward_models]
    named += [(f"reward_function.more_functions.{name}", name) for name in own.more_functions]
    every = [first, *(name for _, name in named)]
    if first and (named or weight != 1.0):  # the scores of a single source are the reward itself
        named.append(("reward_function" if by_function else "remote_rm.reward_model", first))
    for key, name in named:
        if f"rewards_{name}" in REWARD_METRICS:
            yield (
                f"{key} is named {name!r}, and its scores are logged as rewards_{name}, which is a metric already; "
                "give it another name"
            )
    if len(set(every)) < len(every):
        yield (
            f"reward sources are named {', '.join(every)}; each is logged as rewards_NAME, so give each a name of its "
            "own in reward_function.more_functions and remote_rm.more_reward_models"
        )


def _replicas(key: str, server: RewardServerConfig) -> Iterator[str]:
    first = Address(server.ip.lower(), server.port)
    known = {first: f"{key}.ip and port"}
    for number, text in enumerate(server.replicas):
        place = f"{key}.replicas[{number}]"
        try:
            address = Address.parse(text)
        except ValueError:
            yield f"{place} is {text!r}; expected HOST:PORT with a port of 1 to 65535"
            continue
        if address in known:
            yield f"{place} is {text}, the same server as {known[address]}; name each server once"
        known[address] = place


def _saving(cfg: TrainConfig) -> Iterator[str]:
    saving, told = cfg.exp_manager.checkpoint_callback_params, partial(key_fault, cfg, _SAVING)
    if not saving.best_metric.startswith("val/"):
        yield told(".best_metric", "expected a metric of validation, such as val/rewards")
    if saving.keep_best > 0 and cfg.model.data.data_prefix.validation is None:
        yield told(".keep_best model.data.data_prefix.validation", "there is no validation")
    elif saving.keep_best > 0 and cfg.trainer.reinforce.val_check_interval == 0:
        yield told(".keep_best trainer.reinforce.val_check_interval", "there is no validation")


def _profile(cfg: TrainConfig) -> Iterator[str]:
    last = cfg.trainer.reinforce.max_steps
    chosen = {"steps": (cfg.trainer.profile.steps, 1, math.inf if last == -1 else last)}
    chosen["ranks"] = (cfg.trainer.profile.ranks or [], 0, cfg.trainer.world_size - 1)
    for name, (numbers, low, high) in chosen.items():
        wrong = dict.fromkeys(str(n) for n in numbers if not low <= n <= high or numbers.count(n) > 1)
        if wrong:
            bound = f"to {'max_steps, which is ' * (name == 'steps')}{high}" if high < math.inf else "on"
            yield f"trainer.profile.{name} has {', '.join(wrong)}; expected {name} from {low} {bound}, each once"


def _files(cfg: TrainConfig) -> Iterator[str]:
    key, folder = MODEL, Path(cfg.pretrained_checkpoint.restore_from_path)
    if cfg.pretrained_checkpoint.restore_from_path == NOT_SET:
        pass  # reported where the key is read
    elif not os.access(folder / "config.json", os.R_OK):
        yield f"{key} is {folder}, which {no_model(folder)}"
    else:
        if not os.access(folder / (name := "tokenizer_config.json"), os.R_OK):
            yield f"{key} is {folder}, which has no {name} that can be read; expected a Hugging Face model folder"
        yield from shape_faults(cfg)
    prefix, duration = cfg.model.data.data_prefix, cfg.exp_manager.max_time_per_run
    try:
        resolve_data_prefix({"train": prefix.train, "validation": prefix.validation, "test": prefix.test})
    except ConfigError as error:
        yield from (fault for fault in error.faults if NOT_SET not in fault)
    try:
        if duration is not None:
            parse_duration(duration)
    except ValueError as error:
        yield f"exp_manager.max_time_per_run is {duration!r}: {error}"
    try:
        Allocation.of(os.environ)
    except ConfigError as error:
        yield from error.faults
    for name in cfg.exp_manager.used_loggers:
        if name not in LOGGERS:
            yield f"exp_manager.loggers has {name!r}; expected {', '.join(LOGGERS)}"
        elif not is_importable(f"{name}.x"):
            advice = f"`pip install 'reinforce-rl[{name}]'`, or leave the logger out"
            yield f"exp_manager.loggers has {name}, which is not installed; {advice}"
    yield from folder_faults("exp_manager.explicit_log_dir", cfg.exp_manager.explicit_log_dir)


def shape_faults(cfg: TrainConfig) -> Iterator[str]:
    """Check the configuration against the model's `config.json`."""
    model, folder = cfg.model, cfg.pretrained_checkpoint.restore_from_path
    longest = ("model.encoder_seq_length", model.encoder_seq_length)
    yield from model_faults(folder, model.tensor_model_parallel_size, "model", *longest)
    layers, stages = model_values(folder).get("num_hidden_layers"), model.pipeline_model_parallel_size
    uneven = any("pipeline" in name for name in model.megatron_overrides)
    if isinstance(layers, int) and stages > 1 and layers % stages and not uneven:
        yield (
            f"model.pipeline_model_parallel_size is {stages}, which does not divide the {layers} layers "
            f"(num_hidden_layers) of {folder}/config.json; choose another, or say how many the first stage has: "
            "+model.megatron_overrides.num_layers_in_first_pipeline_stage=N"
        )


def parse_duration(text: str) -> float:
    """Convert `DD:HH:MM:SS` (NeMo's format) to seconds; leading parts may be omitted. Raises ValueError."""
    if not re.fullmatch(r"\d+(:\d+){0,3}", text):
        raise ValueError("expected DD:HH:MM:SS, such as 00:03:45:00")
    seconds = sum(int(part) * unit for part, unit in zip(text.split(":")[::-1], (1, 60, 3600, 86400), strict=False))
    if seconds == 0:
        raise ValueError("expected more than no time at all")
    return float(seconds)


@dataclass(frozen=True)
class Allocation:
    """Start and end of a Slurm allocation, in unix seconds; None if unknown."""

    start: float | None = None
    end: float | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Allocation:
        """Read Slurm's variables; ConfigError if one is no time, or the end is not after the start."""
        texts = {name: environment.get(name, "") for name in (START_VARIABLE, END_VARIABLE)}
        start, end = times = [float(text) if re.fullmatch(r"[0-9]{1,12}", text) else None for text in texts.values()]
        faults = [
            f"the environment variable {name} is {text!r}; expected unix seconds, or unset it"
            for (name, text), time in zip(texts.items(), times, strict=True)
            if text and time is None
        ]
        if start is not None and end is not None and end <= start:
            faults.append(
                f"the environment variable {END_VARIABLE} is {end:.0f}, not after {START_VARIABLE}, {start:.0f}; "
                "correct or unset them"
            )
        if faults:
            raise ConfigError(faults)
        return cls(start, end)
