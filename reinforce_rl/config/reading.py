"""Reads what Hydra composed into the dataclasses of `config/schema.py`; one message names every fault."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf

from reinforce_rl.config.checks import find_faults
from reinforce_rl.config.renamed_keys import renamed
from reinforce_rl.config.schema import DEEP, NOT_SET, OptimConfig, TrainConfig
from reinforce_rl.errors import ConfigError

T = TypeVar("T")
_MISSING = dataclasses.MISSING
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's, under WSL, AMD's


def load_config(cfg: DictConfig) -> TrainConfig:
    """Convert what Hydra composed, and check everything that can be checked before a model is loaded.

    Raises:
        ConfigError: unknown or missing keys, wrong types, and values that cannot work, all in one message.
    """
    config, faults = read_config(cfg)
    if faults:
        raise ConfigError(faults)
    return config


def read_config(cfg: DictConfig) -> tuple[TrainConfig, list[str]]:
    """As `load_config`, with the faults beside the configuration; see `build` for what it then has."""
    faults: list[str] = []
    config = build(TrainConfig, cfg, "", faults)
    faults += find_faults(config)
    block = config.model.tensor_model_parallel_size * config.model.pipeline_model_parallel_size
    shards = config.trainer.world_size // max(block, 1)
    # The deep preflight is of a run on GPUs, wherever it is made.
    resolve_defaults(
        config.trainer, config.model.optim, shards, (lambda: True) if config.preflight == DEEP else has_gpu
    )
    return config, faults


def has_gpu() -> bool:
    """Whether torch finds a GPU here. torch, which takes seconds to import, is only asked where there is a driver."""
    if "torch" not in sys.modules and not any(map(os.path.exists, _GPU_DRIVERS)):
        return False
    import torch

    return torch.cuda.is_available()


def precision_here(precision: str, gpu: Callable[[], bool] = has_gpu) -> str:
    """A `precision` key's value, where `auto` is replaced by bf16 on a machine with a GPU, and by 32 elsewhere."""
    return precision if precision != "auto" else "bf16" if gpu() else "32"


def resolve_defaults(trainer: Any, optim: OptimConfig, shards: int, gpu: Callable[[], bool] = has_gpu) -> None:
    """Replace `auto` and null, where they depend on whether there is a GPU, by what they stand for on this machine.

    Args:
        trainer: whose `precision` it is.
        optim: of the same configuration.
        shards: ranks that have the same weights and could share the optimizer's state: data times context parallel.
        gpu: whether there is one; asked only where something depends on it.
    """
    trainer.precision = precision_here(trainer.precision, gpu)
    shared = (optim.distributed is None or optim.overlap_grad_sync is None) and shards > 1 and gpu()
    optim.distributed = shared if optim.distributed is None else optim.distributed
    optim.overlap_grad_sync = shared if optim.overlap_grad_sync is None else optim.overlap_grad_sync


def build(schema: type[T], node: DictConfig, path: str, faults: list[str]) -> T:
    """Make a dataclass of a config node, adding a sentence to `faults` for each key that does not fit.

    Returns:
        the dataclass. A wrong value is replaced by the key's default, or by `NOT_SET` where there is none, so that
        the checks that follow still find the other faults.
    """
    hints = typing.get_type_hints(schema)
    fields = {f.name: f for f in dataclasses.fields(schema)}  # type: ignore[arg-type]
    for key in node:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            advice = f"did you mean {path}{close[0]}?" if close else f"known here: {', '.join(fields)}"
            faults.append(renamed(path + str(key)) or f"{path}{key} is not a key of the configuration; {advice}")
    values = required_keys(schema)
    for name in fields:
        key, required = path + name, name in values
        if name not in node or OmegaConf.is_missing(node, name):
            if required:
                faults.append(f"{key} is not set; give it as {key}=VALUE")
            continue
        try:
            value = node[name]
        except Exception as error:  # an interpolation that leads nowhere
            faults.append(f"{key} cannot be resolved: {str(error).splitlines()[0]}")
            continue
        expected = hints[name]
        if required and value == "":
            faults.append(f"{key} is empty; give it as {key}=VALUE")
        elif typing.get_origin(expected) is dict:
            values[name] = _build_groups(expected, value, key, faults)
        elif not dataclasses.is_dataclass(expected):
            converted = _convert(expected, OmegaConf.to_container(value) if isinstance(value, ListConfig) else value)
            if converted is _MISSING:
                faults.append(f"{key} is {value!r}; expected {_describe(expected)}")
            else:
                values[name] = converted
        elif isinstance(value, DictConfig):
            values[name] = build(expected, value, key + ".", faults)  # type: ignore[arg-type]
        else:
            faults.append(f"{key} is {value!r}; expected a group of keys")
    return schema(**values)


def required_keys(schema: Any) -> dict[str, Any]:
    """The keys that have no default, none of them set."""
    hints = typing.get_type_hints(schema)
    names = [f.name for f in dataclasses.fields(schema) if f.default is _MISSING and f.default_factory is _MISSING]
    return {n: hints[n](**required_keys(hints[n])) if dataclasses.is_dataclass(hints[n]) else NOT_SET for n in names}


def _build_groups(expected: Any, value: Any, key: str, faults: list[str]) -> dict[str, Any]:
    """A dict of dataclasses, or of plain values, whose names the user chooses."""
    schema = typing.get_args(expected)[1]
    if schema is Any and isinstance(value, DictConfig):
        plain: Any = OmegaConf.to_container(value)
        return {str(name): item for name, item in plain.items()}
    if not isinstance(value, DictConfig):
        faults.append(f"{key} is {value!r}; expected groups of keys, each under a name of your choice")
        return {}
    groups = {}
    for name in value:
        if not isinstance(value[name], DictConfig):
            faults.append(f"{key}.{name} is {value[name]!r}; expected a group of keys")
            continue
        groups[str(name)] = build(schema, value[name], f"{key}.{name}.", faults)
    return groups


def _convert(expected: Any, value: Any) -> Any:
    """The value as the expected type, or `_MISSING` where it is none. An int may stand for a float."""
    if typing.get_origin(expected) in (typing.Union, types.UnionType):
        for option in typing.get_args(expected):
            converted = _convert(option, value)
            if converted is not _MISSING:
                return converted
        return _MISSING
    if expected is type(None):
        return None if value is None else _MISSING
    if typing.get_origin(expected) is list:
        (item,) = typing.get_args(expected)
        items = [_convert(item, v) for v in value] if isinstance(value, list) else [_MISSING]
        return _MISSING if any(v is _MISSING for v in items) else items
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if expected is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # precision=32 is a string that looks like a number
    return value if type(value) is expected else _MISSING


def _describe(expected: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    if typing.get_origin(expected) is list:
        return f"a list, each {_describe(typing.get_args(expected)[0])}"
    if typing.get_origin(expected) in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(expected))
    return names.get(expected, str(expected))
