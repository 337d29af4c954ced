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

from reinforce_rl.config import nemo_keys
from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.base import DEEP, IS_NOT_REGISTERED, IS_ZERO, NOT_SET, Section
from reinforce_rl.config.describe import expected_of
from reinforce_rl.config.reward_model import TrainRewardModelConfig
from reinforce_rl.config.rewards import ServeRewardModelConfig
from reinforce_rl.config.rules import find_faults
from reinforce_rl.errors import ConfigError, Fault

T = TypeVar("T", bound=Section)
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's, under WSL, AMD's
# Errors of pydantic on values of the right type; their values are kept, so that the rules see what
# was given.
_NO_CHOICE = ("literal_error", IS_NOT_REGISTERED)
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", IS_ZERO)
_LENGTHS = ("too_short", "too_long")
_NOT_FINITE = "finite_number"
_NO_HOST = "value_error"  # of `Host`, the only type of ours that raises ValueError
_OF_VALUE = {*_NO_CHOICE, *_BOUNDS, *_LENGTHS, _NOT_FINITE, _NO_HOST}
_NEMO_KEYS: dict[type[Section], dict[str, str]] = {
    TrainConfig: nemo_keys.ACTOR,
    ServeRewardModelConfig: nemo_keys.SERVER,
    TrainRewardModelConfig: nemo_keys.REWARD_MODEL,
}
_OFF = ("false", "none", "null", "")


def load_config(cfg: DictConfig, schema: type[T] = TrainConfig) -> T:  # type: ignore[assignment]
    """Convert the composed config and check all that can be checked before a model is loaded.

    Raises ConfigError: unknown or missing keys, wrong types and invalid values, in one message.
    """
    config, faults = read_config(cfg, schema)
    if faults:
        raise ConfigError(faults)
    return config


def read_config(
    cfg: DictConfig,
    schema: type[T] = TrainConfig,  # type: ignore[assignment]
    *,
    is_plan: bool = False,
) -> tuple[T, list[str]]:
    """Like `load_config`, but return the errors with the configuration; see `read`.

    With `is_plan` the run may start on another machine, so its precision decides if it uses GPUs.
    """
    config, read_faults = read(schema, cfg)
    # Rules do not apply to keys whose own values are wrong.
    named = {fault.split(" ")[0] for fault in read_faults}
    every = [
        *config.all_faults(read_faults),
        *(find_faults(config) if isinstance(config, TrainConfig) else ()),
    ]
    faults = [fault for fault in every if fault in read_faults or fault.split(" ")[0] not in named]
    if isinstance(config, TrainConfig | TrainRewardModelConfig):
        # The deep preflight is of a run on GPUs, wherever it is made.
        is_deep = getattr(config, "preflight", None) == DEEP
        is_for_gpus = is_deep or (is_plan and config.trainer.implies_gpus)
        resolve_defaults(config, (lambda: True) if is_for_gpus else has_gpu)
    return config, faults


def renamed(key: str, schema: type[Section] = TrainConfig, value: object = NOT_SET) -> Fault | None:
    """Describe the replacement of a NeMo-Aligner key that a program lacks; None for any other
    key.
    """
    advice = advice_for(key, schema, value)
    if advice is None:
        return None
    return Fault(
        f"{key} is a key of NeMo-Aligner; {advice} (docs/migration.md)",
        key="config.key.renamed",
    )


def advice_for(
    key: str, schema: type[Section] = TrainConfig, value: object = NOT_SET
) -> str | None:
    """Return the advice for a NeMo-Aligner key; None for any other key."""
    known = _NEMO_KEYS.get(schema, {})
    if str(value).lower() in _OFF and key in known and key in nemo_keys.IF_OFF:
        return nemo_keys.IF_OFF[key]
    if key in known:
        return known[key]
    for name in key.split("."):
        if name in nemo_keys.GONE:
            return nemo_keys.GONE[name]
    above = [name for name in known if key.startswith(f"{name}.")]
    return known[max(above, key=len)] if above else None


def has_gpu() -> bool:
    """Return True if torch finds a GPU; imports torch, which takes seconds, only if there is a
    driver.
    """
    if "torch" not in sys.modules and not any(map(os.path.exists, _GPU_DRIVERS)):
        return False
    import torch

    return torch.cuda.is_available()


def precision_here(precision: str, gpu: Callable[[], bool] = has_gpu) -> str:
    """Resolve `auto` to bf16 on a machine with a GPU, otherwise to 32."""
    return precision if precision != "auto" else "bf16" if gpu() else "32"


def resolve_defaults(
    config: TrainConfig | TrainRewardModelConfig, gpu: Callable[[], bool] = has_gpu
) -> None:
    """Replace `auto` and null where they depend on other keys or a GPU, which is looked for only
    then.
    """
    trainer = config.trainer
    model = config.model
    optim = config.model.optim
    trainer.precision = precision_here(trainer.precision, gpu)  # type: ignore[assignment]
    # Data- times context-parallel ranks, which could share the optimizer's state.
    ranks = config.training_ranks if isinstance(config, TrainConfig) else trainer.world_size
    shards = ranks // max(model.tensor_model_parallel_size * model.pipeline_model_parallel_size, 1)
    shared = (optim.distributed is None or optim.overlap_grad_sync is None) and shards > 1 and gpu()
    optim.distributed = shared if optim.distributed is None else optim.distributed
    optim.overlap_grad_sync = shared if optim.overlap_grad_sync is None else optim.overlap_grad_sync
    if isinstance(config, TrainConfig) and config.trainer.reinforce.generator_correction is None:
        config.trainer.reinforce.generator_correction = (
            "sequence" if config.is_off_policy else "none"
        )


def read(schema: type[T], node: DictConfig, path: str = "") -> tuple[T, list[str]]:
    """Fill a schema from a config node; `path` precedes its keys in messages.

    Returns:
        the configuration and one message per invalid key. Values of a wrong type fall back to the
        default and values out of bounds are kept, so that later rules find more errors.
    """
    config = schema()
    faults = list(_fill(config, node, path, schema))
    named = {path + fault.removeprefix(path).split(" ")[0] for fault in faults}
    return config, [*faults, *_missing(config, path, named)]


def _fill(section: Section, node: DictConfig, path: str, schema: type[Section]) -> Iterator[str]:
    fields = type(section).model_fields
    for name in map(str, node):
        key = path + name
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            advice = (
                f"did you mean {path}{close[0]}?" if close else f"known here: {', '.join(fields)}"
            )
            entry = _plain(node).get(name)
            of_nemo = [renamed(leaf, schema, value) for leaf, value in _leaves(entry, key)]
            yield from filter(None, of_nemo)
            if None in of_nemo:
                yield Fault(
                    f"{key} is not a key of the configuration; {advice}",
                    key="config.key.unknown",
                )
            continue
        if OmegaConf.is_missing(node, name):
            continue
        try:
            value = node[name]
        except OmegaConfBaseException as error:  # an interpolation that leads nowhere
            variable = re.search(r"Environment variable '(.+)' not found", str(error))
            if variable:
                yield Fault(
                    f"{key} reads the environment variable {variable[1]}, which is not set; "
                    f"set it, or give {key}=VALUE",
                    key="config.value.variable_not_set",
                )
            else:
                yield Fault(
                    f"{key} cannot be resolved: {str(error).splitlines()[0]}",
                    key="config.value.not_resolved",
                )
            continue
        default = getattr(section, name)
        entries = get_args(fields[name].annotation)
        if isinstance(default, Section):
            yield from _fill_group(default, value, key, schema)
        elif isinstance(value, DictConfig) and isinstance(
            entries[-1] if entries else None, type(Section)
        ):
            setattr(section, name, {})
            for entry in value:
                group = entries[-1]()
                getattr(section, name)[str(entry)] = group
                yield from _fill_group(group, value[entry], f"{key}.{entry}", schema)
        else:
            yield from _set(section, name, value, key)


def _plain(node: DictConfig) -> dict[str, Any]:
    """Return a node as dictionaries, with interpolations as they are written."""
    values = OmegaConf.to_container(node, resolve=False)
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys below `key`, with their values; the key itself if nothing is below."""
    if isinstance(value, dict) and value:
        for child, below in value.items():
            yield from _leaves(below, f"{key}.{child}")
    else:
        yield key, value


def _fill_group(group: Section, node: Any, key: str, schema: type[Section]) -> Iterator[str]:
    if isinstance(node, DictConfig):
        yield from _fill(group, node, f"{key}.", schema)
    else:
        yield Fault(f"{key} is {node!r}; expected a group of keys", key="config.value.not_a_group")


def _set(section: Section, name: str, value: Any, key: str) -> Iterator[str]:
    if isinstance(value, DictConfig | ListConfig):
        value = OmegaConf.to_container(value)
    if value == "" and type(section).model_fields[name].default == NOT_SET:
        yield Fault(f"{key} is empty; give it as {key}=VALUE", key="config.value.empty")
        return
    is_nullable = type(None) in get_args(type(section).model_fields[name].annotation)
    if value == "None" and is_nullable:
        yield Fault(
            f"{key} is the string 'None'; expected null, in YAML and Hydra {key}=null",
            key="config.value.text_none",
        )
        return
    try:
        section.__pydantic_validator__.validate_assignment(section, name, value)
    except ValidationError as error:
        first = next((detail for detail in error.errors() if detail["type"] in _OF_VALUE), None)
        if first is not None:
            value = first["input"] if len(first["loc"]) == 1 else value
            bounds = list(first.get("ctx", {}).values())
            value = (
                float(value)
                if type(value) is int and bounds and type(bounds[0]) is float
                else value
            )
            if isinstance(value, str) or first["type"] != "literal_error":
                setattr(section, name, value)
        expected = expected_of(type(section), name, is_of_value=first is not None)
        kind = "" if first is None else first["type"]
        if kind == _NOT_FINITE and "finite" not in expected:
            expected += ", and finite"
        yield _fault_of_value(key, value, expected, kind)


def _fault_of_value(key: str, value: Any, expected: str, kind: str) -> Fault:
    """Return the fault of a refused value; `kind` is of `_OF_VALUE`, or empty for a wrong type."""
    sentence = f"{key} is {value!r}; expected {expected}"
    if not kind:
        return Fault(sentence, key="config.value.wrong_type")
    if kind in _NO_CHOICE:
        return Fault(sentence, key="config.value.not_a_choice")
    if kind in _BOUNDS:
        return Fault(sentence, key="config.value.out_of_range")
    if kind in _LENGTHS:
        return Fault(sentence, key="config.value.wrong_length")
    if kind == _NOT_FINITE:
        return Fault(sentence, key="config.value.not_finite")
    return Fault(sentence, key="config.value.no_host")


def _missing(section: Section, path: str, named: set[str]) -> Iterator[str]:
    for name, value in section:
        if path + name in named:
            continue
        if value == NOT_SET:
            yield Fault(
                f"{path}{name} is not set; give it as {path}{name}=VALUE",
                key="config.value.not_set",
            )
        groups = {name: value} | (
            {f"{name}.{entry}": v for entry, v in value.items()} if isinstance(value, dict) else {}
        )
        for group_name, group in groups.items():
            if isinstance(group, Section):
                yield from _missing(group, f"{path}{group_name}.", named)
