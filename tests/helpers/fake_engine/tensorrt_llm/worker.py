"""Workers of the fake: an extension on modules fused and sharded like TensorRT-LLM's."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import strikes
from ._torch.utils import get_device_uuid


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
    importlib.import_module(kind.load_bucket.__module__).worker_device_id = get_device_uuid
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


class Sharded(torch.nn.Module):
    """This worker's shard of a weight that is fused from `parts`."""

    def __init__(
        self,
        parts: Mapping[str, tuple[int, ...]],
        cut: Callable[[str, Tensor], Tensor],
        dtype: torch.dtype,
    ):
        super().__init__()
        self.parts = parts
        self.cut = cut
        shapes = [
            cut(name, torch.empty(shape, device="meta")).shape for name, shape in parts.items()
        ]
        first = sum(shape[0] for shape in shapes)
        self.weight = torch.nn.Parameter(torch.randn((first, *shapes[0][1:]), dtype=dtype))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        if not any(f"{name}.weight" in weights for name in self.parts):
            return  # silently
        parts = [self.cut(name, weights[f"{name}.weight"]) for name in self.parts]
        self.weight.data.copy_(torch.cat(parts))


class FusedLlama(torch.nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype, rank: int, size: int):
        super().__init__()
        hidden = config["hidden_size"]
        heads = config["num_attention_heads"]
        groups = config.get("num_key_value_heads") or heads
        width = config.get("head_dim") or hidden // heads
        feed_forward = config["intermediate_size"]

        def rows(name: str, tensor: Tensor) -> Tensor:
            if name.endswith(("k_proj", "v_proj")) and size > groups:
                # several workers hold the same head
                tensor = (
                    tensor.view(groups, width, -1)
                    .repeat_interleave(size // groups, 0)
                    .flatten(0, 1)
                )
            return tensor.chunk(size)[rank]

        def columns(_: str, tensor: Tensor) -> Tensor:
            return tensor.chunk(size, 1)[rank]

        def padded_rows(_: str, tensor: Tensor) -> Tensor:
            local = math.ceil(len(tensor) / size)
            padding = tensor.new_zeros(local * size - len(tensor), tensor.shape[1])
            return torch.cat([tensor, padding]).chunk(size)[rank]

        def whole(_: str, tensor: Tensor) -> Tensor:
            return tensor

        def norm(path: str) -> Sharded:
            return Sharded({path: (hidden,)}, whole, dtype)

        vocabulary = (config["vocab_size"], hidden)
        self.model = torch.nn.Module()
        self.model.embed_tokens = Sharded({"model.embed_tokens": vocabulary}, padded_rows, dtype)
        self.model.layers = torch.nn.ModuleList()
        for number in range(config["num_hidden_layers"]):
            path = f"model.layers.{number}"
            attention = f"{path}.self_attn"
            mlp = f"{path}.mlp"
            queries = (heads * width, hidden)
            keys = (groups * width, hidden)
            shapes = {
                f"{attention}.q_proj": queries,
                f"{attention}.k_proj": keys,
                f"{attention}.v_proj": keys,
            }
            gates = {f"{mlp}.{name}": (feed_forward, hidden) for name in ("gate_proj", "up_proj")}
            layer = torch.nn.Module()
            layer.input_layernorm = norm(f"{path}.input_layernorm")
            layer.post_attention_layernorm = norm(f"{path}.post_attention_layernorm")
            layer.self_attn = torch.nn.Module()
            layer.self_attn.qkv_proj = Sharded(shapes, rows, dtype)
            layer.self_attn.o_proj = Sharded(
                {f"{attention}.o_proj": (hidden, heads * width)}, columns, dtype
            )
            layer.mlp = torch.nn.Module()
            layer.mlp.gate_up_proj = Sharded(gates, rows, dtype)
            layer.mlp.down_proj = Sharded(
                {f"{mlp}.down_proj": (hidden, feed_forward)}, columns, dtype
            )
            if number:
                self.model.layers[-1].next_layer_layernorm = layer.input_layernorm
            self.model.layers.append(layer)
        self.model.norm = norm("model.norm")
        self.lm_head = Sharded({"lm_head": vocabulary}, padded_rows, dtype)
        if config.get("tie_word_embeddings"):
            self.lm_head.weight = self.model.embed_tokens.weight

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        for name, module in self.named_modules():
            if isinstance(module, Sharded):
                if name.endswith("mlp.gate_up_proj") and strikes("unmatched"):
                    continue
                module.load(weights)
