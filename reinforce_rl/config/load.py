"""Read a composed Hydra config into a schema and report all errors in one message."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_args

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.actor_rules import find_faults
from reinforce_rl.config.base import DEEP, NOT_SET, Section
from reinforce_rl.config.keys import renamed
from reinforce_rl.config.model import OptimConfig
from reinforce_rl.errors import ConfigError

T = TypeVar("T", bound=Section)
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's, under WSL, AMD's
# Errors of pydantic on values of the right type; their values are kept, so that the rules see what was given.
_OF_VALUE = {"literal_error", "value_error", "finite_number", "too_short"}
_OF_VALUE |= {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "boolean": "true or false",
    "null": "null",
    "object": "groups of keys, each under a name of your choice",
}


def load_config(cfg: DictConfig) -> TrainConfig:
    """Convert the composed config and check all that can be checked before a model is loaded.

    Raises:
        ConfigError: unknown or missing keys, wrong types and invalid values, in one message.
    """
    config, faults = read_config(cfg)
    if faults:
        raise ConfigError(faults)
    return config


def read_config(cfg: DictConfig) -> tuple[TrainConfig, list[str]]:
    """Like `load_config`, but return the errors with the configuration; see `read`."""
    config, faults = read(TrainConfig, cfg)
    faults += find_faults(config)
    block = config.model.tensor_model_parallel_size * config.model.pipeline_model_parallel_size
    shards = config.trainer.world_size // max(block, 1)
    # The deep preflight is of a run on GPUs, wherever it is made.
    resolve_defaults(
        config.trainer, config.model.optim, shards, (lambda: True) if config.preflight == DEEP else has_gpu
    )
    return config, faults


def has_gpu() -> bool:
    """Return True if torch finds a GPU; imports torch, which takes seconds, only if there is a driver."""
    if "torch" not in sys.modules and not any(map(os.path.exists, _GPU_DRIVERS)):
        return False
    import torch

    return torch.cuda.is_available()


def precision_here(precision: str, gpu: Callable[[], bool] = has_gpu) -> str:
    """Resolve `auto` to bf16 on a machine with a GPU, otherwise to 32."""
    return precision if precision != "auto" else "bf16" if gpu() else "32"


def resolve_defaults(trainer: Any, optim: OptimConfig, shards: int, gpu: Callable[[], bool] = has_gpu) -> None:
    """Replace `auto` and null where they depend on the presence of a GPU.

    Args:
        trainer: the section with the key `precision`.
        shards: ranks that could share the optimizer's state: data times context parallel.
        gpu: called only if something depends on it.
    """
    trainer.precision = precision_here(trainer.precision, gpu)
    shared = (optim.distributed is None or optim.overlap_grad_sync is None) and shards > 1 and gpu()
    optim.distributed = shared if optim.distributed is None else optim.distributed
    optim.overlap_grad_sync = shared if optim.overlap_grad_sync is None else optim.overlap_grad_sync


def read(schema: type[T], node: DictConfig, path: str = "") -> tuple[T, list[str]]:
    """Fill a schema from a config node; `path` precedes its keys in messages.

    Returns:
        the configuration and one message per invalid key. Values of a wrong type fall back to the default and values
        out of bounds are kept, so that later rules find more errors.
    """
    config = schema()
    faults = list(_fill(config, node, path))
    return config, [*faults, *_missing(config, path, faults)]


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
            yield f"{key} cannot be resolved: {str(error).splitlines()[0]}"
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
    if isinstance(value, (DictConfig, ListConfig)):
        value = OmegaConf.to_container(value)
    if value == "" and type(section).model_fields[name].default == NOT_SET:
        yield f"{key} is empty; give it as {key}=VALUE"
        return
    try:
        section.__pydantic_validator__.validate_assignment(section, name, value)
    except ValidationError as error:
        of_value = [one for one in error.errors() if one["type"] in _OF_VALUE]
        if of_value:
            found = of_value[0]
            value = found["input"] if len(found["loc"]) == 1 else value
            bounds = list(found.get("ctx", {}).values())
            value = float(value) if type(value) is int and bounds and type(bounds[0]) is float else value
            if isinstance(value, str) or found["type"] != "literal_error":
                setattr(section, name, value)
        expected = _expected(type(section), name, bool(of_value))
        if of_value and of_value[0]["type"] == "finite_number" and "finite" not in expected:
            expected += ", and finite"
        yield f"{key} is {value!r}; expected {expected}"


def _missing(section: Section, path: str, faults: list[str]) -> Iterator[str]:
    for name, value in section:
        key = path + name
        if any(fault.startswith(f"{key} ") for fault in faults):
            continue
        if value == NOT_SET:
            yield f"{key} is not set; give it as {key}=VALUE"
        for group_key, group in {key: value, **{f"{key}.{n}": v for n, v in _entries(value)}}.items():
            if isinstance(group, Section):
                yield from _missing(group, f"{group_key}.", faults)


def _entries(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _expected(schema: type[Section], name: str, is_of_value: bool) -> str:
    properties = schema.model_json_schema()["properties"][name]
    if is_of_value and "expected" in properties:
        return properties["expected"]
    options = properties.get("anyOf", [properties])
    choices = [choice for option in options for choice in _choices(option)]
    if choices and len(options) > 1:
        return " or ".join(["null", *choices])
    if choices:
        return f"one of {', '.join(choices)}"
    bounds = _bounds(options[0]) if is_of_value else ""
    return f"{bounds}{', or null' if len(options) > 1 else ''}" if bounds else describe(properties)


def _choices(option: dict[str, Any]) -> list[str]:
    return option.get("enum") or ([option["const"]] if "const" in option else [])


def _bounds(option: dict[str, Any]) -> str:
    least, above = option.get("minimum"), option.get("exclusiveMinimum")
    most, below = option.get("maximum"), option.get("exclusiveMaximum")
    if least is not None and most is not None:
        return f"{least:g} to {most:g}"
    ends = {"at least": least, "above": above, "at most": most, "below": below}
    text = " and ".join(f"{word} {value:g}" for word, value in ends.items() if value is not None)
    return f"{text} and finite" if text == "above 0" else text


def describe(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(map(describe, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"a list, each {describe(schema['items'])}"
    return _TYPES[schema["type"]]
