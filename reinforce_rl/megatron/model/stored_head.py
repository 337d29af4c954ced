"""Reads reward heads from weight files: `score` of transformers, or another framework's module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from reinforce_rl.config.model_folder import model_values
from reinforce_rl.errors import CheckpointError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.hf_weights import SCORE
from reinforce_rl.megatron.weight_map import OUTPUT_LAYER, SCORE_LAYER, weight_map

NAME_KEY = "reward_model.head_name"
ACTIVATION_KEY = "reward_model.head_activation"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
# Published classes whose head is nn.Sequential(Linear, activation, Linear), such as the class of
# Qwen2.5-Math-RM-72B.
_ACTIVATION_OF_CLASS = {"Qwen2ForRewardModel": "relu"}
_OPENRLHF_KEY = "value_head_prefix"  # in config.json: the module of OpenRLHF's head
# The head that LLaMA-Factory trains, in a file beside the weights.
_LLAMA_FACTORY_FILE = "value_head.safetensors"
_NUMBERED = re.compile(r"\.\d+$")


@dataclass(frozen=True)
class Layer:
    weight: Tensor  # float32 [out, in]
    bias: Tensor  # float32 [out]; zeros if the file has none


def module_of(folder: HFFolder, name: str | None) -> str:
    """Return the module that holds a folder's head; `name` chooses one.

    Raises CheckpointError: there is no head, or there are several candidates.
    """
    if name is not None:
        return module_name(name)
    prefix = model_values(str(folder.folder)).get(_OPENRLHF_KEY)
    has_prefix = isinstance(prefix, str) and bool(_tensors_below(folder.names, prefix))
    has_score = bool(_tensors_below(folder.names, SCORE))
    if has_prefix and has_score and prefix != SCORE:
        raise CheckpointError(
            f"{folder.folder} has two heads: {SCORE}, which transformers reads, and {prefix}, "
            f"which {_OPENRLHF_KEY} of config.json names for OpenRLHF. "
            f"Choose with {NAME_KEY}={SCORE} or {NAME_KEY}={prefix}",
            key="reward_model.head.two_heads",
        )
    if has_score:
        if SCORE_LAYER in folder and f"{SCORE}.bias" in folder:
            raise CheckpointError(
                f"{folder.folder} has {SCORE}.bias beside {SCORE_LAYER}, which a classifier of "
                f"transformers leaves out. {NAME_KEY}={SCORE} adds it to the score; "
                "for transformers' scores, remove it",
                key="reward_model.head.bias_of_score",
            )
        return SCORE
    if has_prefix:
        return str(prefix)
    raise CheckpointError(
        f"{folder.folder} has no {SCORE_LAYER}, {_advice(folder)}",
        key="reward_model.head.no_score",
    )


def module_name(name: str) -> str:
    """Return a head's module from its own name, the name of its weight, or of one of its layers."""
    return _NUMBERED.sub("", name.removesuffix(".weight"))


def is_in_module(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def layers_of(folder: HFFolder, module: str) -> tuple[Layer, ...]:
    """Read a head's layers from a folder, as `layers_in` does."""
    tensors = {name: folder.read(name) for name in _tensors_below(folder.names, module)}
    if not tensors:
        raise CheckpointError(
            f"{NAME_KEY} is {module}: {folder.folder} has no {module}.weight, {_advice(folder)}",
            key="reward_model.head.unknown_name",
        )
    return layers_in(tensors, module, str(folder.folder))


def layers_in(tensors: Mapping[str, Tensor], module: str, place: str) -> tuple[Layer, ...]:
    """Return the layers, first to last, of a linear head or a Sequential with two linear layers.

    Raises CheckpointError: the module has another structure; the message lists its tensors.
    """
    local_tensors = {
        name.removeprefix(f"{module}."): tensors[name] for name in _tensors_below(tensors, module)
    }
    weights = sorted((name for name in local_tensors if name.endswith("weight")), key=_number)
    # "" of a linear layer, "0." and "2." of a Sequential
    names = [name.removesuffix("weight") for name in weights]
    known = {f"{name}{kind}" for name in names for kind in ("weight", "bias")}
    is_single = len(names) == 1
    is_double = len(names) == 2 and all(re.fullmatch(r"\d+\.", name) for name in names)
    layers = tuple(
        Layer(local_tensors[f"{name}weight"].float(), _bias(local_tensors, name)) for name in names
    )
    fits = all(
        layer.weight.ndim == 2 and layer.bias.shape == layer.weight.shape[:1] for layer in layers
    )
    if is_double and fits:
        fits = layers[0].weight.shape[0] == layers[1].weight.shape[1]
    if not (is_single or is_double) or local_tensors.keys() - known or not fits:
        two_layers = f"{module}.0.weight and {module}.2.weight of two linear layers"
        expected = f"{module}.weight, or {two_layers}, and their biases"
        description = _listed(tensors, _tensors_below(tensors, module)) or "not there"
        raise CheckpointError(
            f"the head {module} in {place} is {description}; expected {expected}",
            key="reward_model.head.other_tensors",
        )
    return layers


def read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception as error:  # safetensors raises an undocumented type for a damaged file
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {error}",
            key="reward_model.head.no_safetensors",
        ) from error


def activation_of(
    layers: tuple[Layer, ...], given: str | None, folder: Path, module: str
) -> str | None:
    """Return the activation between two layers, which no weight file names; None for one layer."""
    if len(layers) == 1:
        if given is not None:
            raise CheckpointError(
                f"{ACTIVATION_KEY} is {given}, but the head {module} has one layer; leave it null",
                key="reward_model.head.one_layer",
            )
        return None
    classes = model_values(str(folder)).get("architectures") or []
    known = {_ACTIVATION_OF_CLASS.get(name) for name in classes} - {None}
    activation = given or next(iter(known), None)
    if activation is None:
        raise CheckpointError(
            f"the head {module} has two linear layers, and no file says which activation is "
            "between them; name the one that it was trained with: "
            f"{ACTIVATION_KEY}={'|'.join(ACTIVATIONS)}",
            key="reward_model.head.activation_not_set",
        )
    return activation


def unused_moments(folder: str | Path) -> str | None:
    """Return a sentence if config.json has moments by which OpenRLHF can standardise rewards."""
    values = model_values(str(folder))
    mean = values.get("mean")
    std = values.get("std")
    if not (isinstance(mean, int | float) and isinstance(std, int | float)):
        return None
    if mean == 0 and std == 1:
        return None
    return (
        f"config.json in {folder} has mean {mean} and std {std}, with which OpenRLHF "
        "standardises rewards where it is asked to. They are not applied; "
        f"reward_model.mean={mean} reward_model.std={std} does, and "
        "reward_model.mean=0 says that they are not wanted"
    )


def _advice(folder: HFFolder) -> str:
    """Describe what the folder has instead of the expected head, and what to do."""
    candidates = head_modules(folder)
    if candidates:
        shown = "; ".join(_listed(folder, names) for names in candidates.values())
        choice = " or ".join(f"{NAME_KEY}={module}" for module in candidates)
        return f"but {shown}, which looks like its head: serve it with {choice}"
    file = folder.folder / _LLAMA_FACTORY_FILE
    if file.is_file():
        return (
            f"but {file.name}, the head of LLaMA-Factory: "
            f"serve it with reward_model.head_path={file} {NAME_KEY}=v_head.summary"
        )
    return (
        "so it is no ...ForSequenceClassification model. Give the file of its head as "
        "reward_model.head_path; `reinforce-rl train-rm` makes one"
    )


def head_modules(folder: HFFolder) -> dict[str, list[str]]:
    """Return modules outside the decoder that take its hidden state, with their tensors."""
    architecture = Architecture.from_folder(folder.folder)
    of_decoder = {row.hf for row in weight_map(architecture, 1)} | {OUTPUT_LAYER}
    modules: dict[str, list[str]] = {}
    for name in sorted(folder.names):
        if name not in of_decoder and not name.startswith("model."):
            module = _NUMBERED.sub("", name.rpartition(".")[0])
            modules.setdefault(module, []).append(name)
    return {
        module: names
        for module, names in modules.items()
        if any(folder.shape_of(name)[-1:] == (architecture.hidden_size,) for name in names)
    }


def _listed(tensors: HFFolder | Mapping[str, Tensor], names: Iterable[str]) -> str:
    def shape(name: str) -> str:
        sizes = tensors.shape_of(name) if isinstance(tensors, HFFolder) else tensors[name].shape
        return " x ".join(map(str, sizes))

    return ", ".join(f"{name} ({shape(name)})" for name in names)


def _tensors_below(names: Iterable[str], module: str) -> list[str]:
    return sorted(name for name in names if is_in_module(name, module))


def _number(name: str) -> tuple[int, str]:
    number = re.match(r"\d+", name)
    return (int(number[0]) if number else -1, name)


def _bias(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    bias = tensors.get(f"{name}bias")
    return torch.zeros(len(tensors[f"{name}weight"])) if bias is None else bias.float()
