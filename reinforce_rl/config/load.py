"""Read a composed Hydra config into a schema and report all errors in one message."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_args

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.base import DEEP, NOT_SET, Section
from reinforce_rl.config.describe import expected_of
from reinforce_rl.config.reward_model import TrainRewardModelConfig
from reinforce_rl.config.rules import find_faults
from reinforce_rl.errors import ConfigError

T = TypeVar("T", bound=Section)
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's, under WSL, AMD's
# Errors of pydantic on values of the right type; their values are kept, so that the rules see what was given.
_OF_VALUE = {"literal_error", "value_error", "finite_number", "too_short", "too_long"}
_OF_VALUE |= {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_SAVING = "exp_manager.checkpoint_callback_params"
RENAMED = {  # NeMo-Aligner's names to ours, for the same values
    "trainer.reinforce.batch_iterator.use_flask": "trainer.reinforce.generation_work_queue",
    "trainer.max_time": "exp_manager.max_time_per_run",
    "exp_manager.exp_dir": "exp_manager.explicit_log_dir",
    f"{_SAVING}.save_top_k": f"{_SAVING}.keep_best",
    f"{_SAVING}.monitor": f"{_SAVING}.best_metric",
    f"{_SAVING}.mode": f"{_SAVING}.best_mode",
    f"{_SAVING}.save_nemo_on_train_end": f"{_SAVING}.save_hf_on_train_end",
    "model.reinforce.sampling_params.add_BOS": "model.data.add_bos",
}
_ADVICE = {  # of keys, each with all below it
    "trainer.reinforce.trt_llm model.reinforce.trt_llm trt_llm": "set generation=tensorrt_llm; see tensorrt_llm",
    "trainer.reinforce.batch_iterator": "set trainer.reinforce.generation_work_queue; it needs no server and no port",
    "combine_rm_and_critic_server remote_critic_rm": "there is no critic; the reward server is remote_rm.reward_model",
    "trainer.ppo model.ppo": "REINFORCE has trainer.reinforce and model.reinforce",
    "trainer.reinforce.model_gbs trainer.reinforce.model_mbs": "see model.global_batch_size, model.micro_batch_size",
    "exp_manager.resume_from_checkpoint": "write the checkpoint's name into checkpoints/latest",
    f"{_SAVING}.save_top_k": f"set {_SAVING}.keep_best, and keep_last for the newest",
    f"{_SAVING}.always_save_nemo": f"set {_SAVING}.save_hf_on_train_end",
    "model.peft.restore_from_path model.peft.restore_from_ckpt": "merge the adapter into the model first",
    "model.max_position_embeddings model.data.seq_length": "set model.encoder_seq_length",
    "model.precision model.megatron_amp_O2": "set trainer.precision; bf16 keeps fp32 main weights",
    "rm_model_file": "set reward_model.restore_from_path, a Hugging Face folder",
    "model.reward_standardization": "set reward_model.mean and reward_model.deviation",
    "model.regression": "set reward_model.attribute_weights, by name",
}
_GONE = (  # at any place
    "accelerator logger enable_checkpointing use_distributed_sampler create_checkpoint_callback model_parallel_size "
    "resume_ignore_no_checkpoint filename all_probs compute_logprob adapter_dropout column_init_method "
    "layer_selection weight_tying position_embedding_strategy mcore_gpt overwrite_base_config bucket_cap_mb data_impl "
    "contiguous_grad_buffer splits_string index_mapping_dir skip_warmup reset_position_ids reset_attention_mask "
    "eod_mask_loss row_init_method"
)
_BY_KEY = {key: f"set {ours}" for key, ours in RENAMED.items()}
_BY_KEY |= {key: advice for keys, advice in _ADVICE.items() for key in keys.split()}


def load_config(cfg: DictConfig, schema: type[T] = TrainConfig) -> T:  # type: ignore[assignment]
    """Convert the composed config and check all that can be checked before a model is loaded.

    Raises ConfigError: unknown or missing keys, wrong types and invalid values, in one message.
    """
    config, faults = read_config(cfg, schema)
    if faults:
        raise ConfigError(faults)
    return config


def read_config(cfg: DictConfig, schema: type[T] = TrainConfig) -> tuple[T, list[str]]:  # type: ignore[assignment]
    """Like `load_config`, but return the errors with the configuration; see `read`."""
    config, found = read(schema, cfg)
    told = {fault.split(" ")[0] for fault in found}  # of a key that is wrong by itself, rules say nothing new
    every = [*config.all_faults(found), *(find_faults(config) if isinstance(config, TrainConfig) else ())]
    faults = [fault for fault in every if fault in found or fault.split(" ")[0] not in told]
    if isinstance(config, TrainConfig | TrainRewardModelConfig):
        # The deep preflight is of a run on GPUs, wherever it is made.
        resolve_defaults(config, (lambda: True) if getattr(config, "preflight", None) == DEEP else has_gpu)
    return config, faults


def renamed(key: str) -> str | None:
    """Describe the replacement of a NeMo-Aligner key that this project lacks; None for any other key."""
    found = next((advice for known, advice in _BY_KEY.items() if f"{key}.".startswith(f"{known}.")), None)
    if set(_GONE.split()) & set(key.split(".")):
        found = "leave it out: there is nothing to choose"
    return found and f"{key} is a key of NeMo-Aligner; {found} (docs/migration-from-nemo-aligner.md)"


def has_gpu() -> bool:
    """Return True if torch finds a GPU; imports torch, which takes seconds, only if there is a driver."""
    if "torch" not in sys.modules and not any(map(os.path.exists, _GPU_DRIVERS)):
        return False
    import torch

    return torch.cuda.is_available()


def precision_here(precision: str, gpu: Callable[[], bool] = has_gpu) -> str:
    """Resolve `auto` to bf16 on a machine with a GPU, otherwise to 32."""
    return precision if precision != "auto" else "bf16" if gpu() else "32"


def resolve_defaults(config: TrainConfig | TrainRewardModelConfig, gpu: Callable[[], bool] = has_gpu) -> None:
    """Replace `auto` and null where they depend on other keys or a GPU, which is looked for only then."""
    trainer, model, optim = config.trainer, config.model, config.model.optim
    trainer.precision = precision_here(trainer.precision, gpu)  # type: ignore[assignment]
    # Data- times context-parallel ranks, which could share the optimizer's state.
    ranks = config.training_ranks if isinstance(config, TrainConfig) else trainer.world_size
    shards = ranks // max(model.tensor_model_parallel_size * model.pipeline_model_parallel_size, 1)
    shared = (optim.distributed is None or optim.overlap_grad_sync is None) and shards > 1 and gpu()
    optim.distributed = shared if optim.distributed is None else optim.distributed
    optim.overlap_grad_sync = shared if optim.overlap_grad_sync is None else optim.overlap_grad_sync
    if isinstance(config, TrainConfig) and config.trainer.reinforce.generator_correction is None:
        config.trainer.reinforce.generator_correction = "sequence" if config.staleness else "none"


def read(schema: type[T], node: DictConfig, path: str = "") -> tuple[T, list[str]]:
    """Fill a schema from a config node; `path` precedes its keys in messages.

    Returns:
        the configuration and one message per invalid key. Values of a wrong type fall back to the default and values
        out of bounds are kept, so that later rules find more errors.
    """
    config = schema()
    faults = list(_fill(config, node, path))
    told = {path + fault.removeprefix(path).split(" ")[0] for fault in faults}
    return config, [*faults, *_missing(config, path, told)]


def _fill(section: Section, node: DictConfig, path: str) -> Iterator[str]:
    fields = type(section).model_fields
    for name in map(str, node):
        key = path + name
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            advice = f"did you mean {path}{close[0]}?" if close else f"known here: {', '.join(fields)}"
            yield renamed(key) or f"{key} is not a key of the configuration; {advice}"
            continue
        if OmegaConf.is_missing(node, name):
            continue
        try:
            value = node[name]
        except OmegaConfBaseException as error:  # an interpolation that leads nowhere
            variable = re.search(r"Environment variable '(.+)' not found", str(error))
            told = f"cannot be resolved: {str(error).splitlines()[0]}"
            if variable:
                told = f"takes the environment variable {variable[1]}, which is not set; set it, or give {key}=VALUE"
            yield f"{key} {told}"
            continue
        default, entries = getattr(section, name), get_args(fields[name].annotation)
        if isinstance(default, Section):
            yield from _fill_group(default, value, key)
        elif isinstance(value, DictConfig) and isinstance(entries[-1] if entries else None, type(Section)):
            setattr(section, name, {})
            for entry in value:
                getattr(section, name)[str(entry)] = group = entries[-1]()
                yield from _fill_group(group, value[entry], f"{key}.{entry}")
        else:
            yield from _set(section, name, value, key)


def _fill_group(group: Section, node: Any, key: str) -> Iterator[str]:
    if isinstance(node, DictConfig):
        yield from _fill(group, node, f"{key}.")
    else:
        yield f"{key} is {node!r}; expected a group of keys"


def _set(section: Section, name: str, value: Any, key: str) -> Iterator[str]:
    if isinstance(value, DictConfig | ListConfig):
        value = OmegaConf.to_container(value)
    if value == "" and type(section).model_fields[name].default == NOT_SET:
        yield f"{key} is empty; give it as {key}=VALUE"
        return
    try:
        section.__pydantic_validator__.validate_assignment(section, name, value)
    except ValidationError as error:
        found = next((one for one in error.errors() if one["type"] in _OF_VALUE), None)
        if found is not None:
            value = found["input"] if len(found["loc"]) == 1 else value
            bounds = list(found.get("ctx", {}).values())
            value = float(value) if type(value) is int and bounds and type(bounds[0]) is float else value
            if isinstance(value, str) or found["type"] != "literal_error":
                setattr(section, name, value)
        expected = expected_of(type(section), name, is_of_value=found is not None)
        if found is not None and found["type"] == "finite_number" and "finite" not in expected:
            expected += ", and finite"
        yield f"{key} is {value!r}; expected {expected}"


def _missing(section: Section, path: str, told: set[str]) -> Iterator[str]:
    for name, value in section:
        if path + name in told:
            continue
        if value == NOT_SET:
            yield f"{path}{name} is not set; give it as {path}{name}=VALUE"
        groups = {name: value} | (
            {f"{name}.{entry}": v for entry, v in value.items()} if isinstance(value, dict) else {}
        )
        for group_name, group in groups.items():
            if isinstance(group, Section):
                yield from _missing(group, f"{path}{group_name}.", told)
