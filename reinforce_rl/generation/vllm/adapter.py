"""The trainer's half of vLLM, on GPUs and on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforce_rl.config.engines import VLLMConfig
from reinforce_rl.generation.engine import buckets


class VLLM:
    """See `EngineAdapter`. Weights are offered as one buffer per bucket, see `buckets`."""

    name = "vllm"
    title = "vLLM"
    package = "vllm"
    host = "reinforce_rl.generation.vllm.host"
    memory_key = "vllm.gpu_memory_utilization, or vllm.cpu_cache_gigabytes on a CPU,"
    shows_layers = True
    device_id = staticmethod(buckets.device_id)

    def __init__(self, config: VLLMConfig):
        self._config = config
        self.loads_adapters = config.load_adapters

    @property
    def options(self) -> dict[str, Any]:
        return {
            name: getattr(self._config, name)
            for name in ("gpu_memory_utilization", "enforce_eager")
        }

    def environment(self, folder: Path) -> dict[str, str]:
        return {
            "VLLM_NO_USAGE_STATS": "1",
            # A fork would hold our connection open after the host's death.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_RPC_BASE_PATH": str(folder),
            "VLLM_CPU_KVCACHE_SPACE": str(self._config.cpu_cache_gigabytes),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other ranks have engines on the same cores
        }

    def write_config(self, folder: Path) -> None: ...

    def make_buffer(
        self, elements: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, buckets.Offer]:
        return buckets.make_buffer(elements, dtype, device, self.device_id(device))

    def bucket_of(self, offers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return buckets.join_offers(offers)
