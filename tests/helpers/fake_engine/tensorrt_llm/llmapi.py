"""`tensorrt_llm.llmapi` and its submodules: configurations and a worker's base class."""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

from . import SIGNATURES, Bound, bind

__path__: list[str] = []  # a package


class WorkerExtension:
    """Base class of extensions; the worker has the attributes `device_id` and `engine`."""

    device_id: int
    engine: Any

    def update_weights(self, ipc_handles: dict[str, Any] | None = None) -> None:
        bind("WorkerExtension.update_weights", ipc_handles)
        if ipc_handles is None:
            self.engine.reset_prefix_cache()
            return
        name = f"cpu:{self.device_id}"
        if name not in ipc_handles:
            raise ValueError(f"Device UUID {name} not found in ipc_handles")
        weights = {}
        for key, (function, arguments) in ipc_handles[name]:
            arguments = list(arguments)
            arguments[6] = self.device_id
            weights[key] = function(*arguments)
        model_engine = self.engine.model_engine
        model_engine.model_loader.reload(model_engine.model, weights, allow_partial_loading=True)


class KvCacheConfig(Bound):
    def check(self) -> None:
        assert 0 < self.free_gpu_memory_fraction <= 1
        assert self.max_tokens > 0


class CudaGraphConfig(Bound):
    def check(self) -> None:
        assert self.max_batch_size > 0


class SchedulerConfig(Bound):
    def check(self) -> None:
        assert self.capacity_scheduler_policy in CapacitySchedulerPolicy


class SleepConfig(Bound):
    def check(self) -> None:
        assert set(self.restore_modes) <= set(ExecutorMemoryType)
        assert set(self.restore_modes.values()) <= {"NONE", "MEMSET", "CPU", "PINNED"}


def _enumeration(name: str) -> Any:
    bind(name)
    return enum.Enum(name, SIGNATURES[name]["values"], type=str)


def _module(name: str, **members: Any) -> None:
    module = types.ModuleType(f"tensorrt_llm.{name}")
    module.__path__ = []
    module.__dict__.update(members)
    sys.modules[module.__name__] = module


CapacitySchedulerPolicy = _enumeration("CapacitySchedulerPolicy")
ExecutorMemoryType = _enumeration("ExecutorMemoryType")
_module("_torch")
_module("llmapi.rlhf_utils", WorkerExtension=WorkerExtension)
if "SleepConfig" in SIGNATURES:
    _module("llmapi.llm_args", ExecutorMemoryType=ExecutorMemoryType, SleepConfig=SleepConfig)
else:
    _module("llmapi.llm_args")
    _module("_torch.virtual_memory", ExecutorMemoryType=ExecutorMemoryType)
