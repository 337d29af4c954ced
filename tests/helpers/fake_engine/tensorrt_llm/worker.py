"""Workers of the fake: an extension on modules fused and sharded like TensorRT-LLM's."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import strikes

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
SPLIT_BY_COLUMNS = ("o_proj", "down_proj")


class RayGPUWorker:
    def __init__(self, device_id: int, engine: Any):
        self.device_id = device_id
        self.engine = engine


def worker_of(
    extension: str, folder: Path, dtype: str, rank: int, size: int, received: Callable[..., None]
) -> Any:
    """Make a worker with the extension, a dotted name.

    `received` is called with the weights of each bucket.
    """
    module, _, name = extension.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    # There is no GPU with an id.
    importlib.import_module(kind.load_bucket.__module__).worker_device_id = "cpu:{}".format
    for attribute in dir(kind):
        if not attribute.startswith("__") and hasattr(RayGPUWorker, attribute):
            raise ValueError(f"Worker class RayGPUWorker already defines '{attribute}'")
    config = json.loads((folder / "config.json").read_text())
    model = FusedLlama(config, getattr(torch, dtype), rank, size)

    def reload(model: FusedLlama, weights: dict[str, Tensor], allow_partial_loading: bool) -> None:
        assert allow_partial_loading
        received(weights)
        model.load_weights(weights)

    engine = SimpleNamespace(
        model_engine=SimpleNamespace(model=model, model_loader=SimpleNamespace(reload=reload)),
        reset_prefix_cache=lambda: None,
    )
    return type("ExtendedWorker", (RayGPUWorker, kind), {})(rank, engine)


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama's weights by their path in its Hugging Face folder."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    keys = (config.get("num_key_value_heads") or heads) * width
    feed_forward = config["intermediate_size"]
    of_layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (heads * width, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, heads * width),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (feed_forward, hidden),
        "mlp.up_proj": (feed_forward, hidden),
        "mlp.down_proj": (hidden, feed_forward),
    }
    vocabulary = (config["vocab_size"], hidden)
    shapes = {"model.embed_tokens": vocabulary, "model.norm": (hidden,), "lm_head": vocabulary}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{path}": shape for path, shape in of_layer.items()}
    return shapes


class FusedLlama(torch.nn.Module):
    """This worker's shards of a Llama, some of them fused from several weights."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, rank: int, size: int):
        super().__init__()
        self._rank = rank
        self._size = size
        self._groups = config.get("num_key_value_heads") or config["num_attention_heads"]
        fused = {part: whole for whole, parts in FUSED.items() for part in parts}
        self.parts: dict[str, list[str]] = {}
        shapes = shapes_of(config)
        for part in shapes:
            above, dot, leaf = part.rpartition(".")
            path = above + dot + fused.get(leaf, leaf)
            self.parts.setdefault(path, []).append(part)
        for path, parts in self.parts.items():
            random = {part: torch.randn(shapes[part], dtype=dtype) for part in parts}
            weight = self._fused(random)
            self._submodule(path).weight = torch.nn.Parameter(weight)
        layers = list(self._submodule("model.layers").children())
        for layer, following in itertools.pairwise(layers):
            layer.next_layer_layernorm = following.input_layernorm
        if config.get("tie_word_embeddings"):
            self.lm_head.weight = self.model.embed_tokens.weight

    def _submodule(self, path: str) -> Any:
        module: Any = self
        for name in path.split("."):
            if not hasattr(module, name):
                module.add_module(name, torch.nn.Module())
            module = getattr(module, name)
        return module

    def _fused(self, tensors: Mapping[str, Tensor]) -> Tensor:
        shards = [self._shard(part, tensor) for part, tensor in tensors.items()]
        return torch.cat(shards)

    def _shard(self, path: str, tensor: Tensor) -> Tensor:
        leaf = path.rpartition(".")[2]
        if tensor.dim() == 1:
            return tensor
        if leaf in SPLIT_BY_COLUMNS:
            return tensor.chunk(self._size, 1)[self._rank]
        if leaf in ("k_proj", "v_proj") and self._size > self._groups:
            # several workers hold the same head
            copies = self._size // self._groups
            heads = tensor.unflatten(0, (self._groups, -1))
            tensor = heads.repeat_interleave(copies, 0).flatten(0, 1)
        padding = -len(tensor) % self._size
        rows = torch.nn.functional.pad(tensor, (0, 0, 0, padding))
        return rows.chunk(self._size)[self._rank]

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        for path, parts in self.parts.items():
            if not any(f"{part}.weight" in weights for part in parts):
                continue  # silently
            if path.endswith("mlp.gate_up_proj") and strikes("unmatched"):
                continue
            fused = self._fused({part: weights[f"{part}.weight"] for part in parts})
            self.get_submodule(path).weight.data.copy_(fused)
