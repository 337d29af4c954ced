"""The trainer's half of TensorRT-LLM 1.2 and 1.3."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforce_rl.config.engines import TensorRTLLMConfig
from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.generation.engine import buckets
from reinforce_rl.megatron.architecture import with_old_rope_keys
from reinforce_rl.utils.untrusted_files import read_json


class TensorRTLLM:
    """See `EngineAdapter`. Weights are offered as one buffer per bucket, see `buckets`."""

    name = "tensorrt_llm"
    title = "TensorRT-LLM"
    package = "tensorrt_llm"
    host = "reinforce_rl.generation.trtllm.host"
    memory_key = "tensorrt_llm.free_gpu_memory_fraction"
    shows_layers = False
    loads_adapters = False

    def __init__(self, config: TensorRTLLMConfig):
        self._config = config

    @property
    def options(self) -> dict[str, Any]:
        return {
            "free_gpu_memory_fraction": self._config.free_gpu_memory_fraction,
            "check_weights": self._config.check_weights,
        }

    def device_id(self, device: torch.device) -> str:
        return device_uuid(device)

    def environment(self, folder: Path) -> dict[str, str]:
        return {
            "TLLM_DISABLE_MPI": "1",
            "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",  # do not join another Ray on this machine
            # Keeps copies on one stream, as in NeMo-RL and verl.
            "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def write_config(self, folder: Path) -> None:
        """Make config.json readable by transformers 4, which TensorRT-LLM 1.2 uses."""
        config = folder / "config.json"
        values = with_old_rope_keys(read_json(config))
        if "dtype" in values:
            values.setdefault("torch_dtype", values["dtype"])
        config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    def make_buffer(
        self, elements: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, buckets.Offer]:
        return buckets.make_buffer(elements, dtype, device, device_uuid(device))

    def bucket_of(self, offers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return buckets.join_offers(offers)


def device_uuid(device: torch.device) -> str:
    if device.type != "cuda":
        sentence = (
            f"generation is tensorrt_llm, but the ranks compute on {device}; TensorRT-LLM needs "
            "CUDA: use native or vllm"
        )
        raise ConfigError([Fault(sentence, key="generation.engine.needs_cuda")])
    return buckets.device_id(device)
