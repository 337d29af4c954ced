"""Extend TensorRT-LLM's workers: load the trainer's weights, and report the resulting values.

The engine skips a module without a matching name. So after an update each parameter's bits are
summed, and `host.check_held` compares the sum with those of the parameter's tensors. The sum
ignores the order of elements, because a worker holds fused and sharded weights. A wrong order would
be a fault of the engine, not of the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reinforce_rl.generation.engine import buckets

# Modules that the engine fuses, by the Hugging Face names of their parts.
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
COMPILED = "_orig_mod."  # torch.compile puts this into names


class WeightLoading:
    """Methods that `WeightsOfTrainer` adds to TensorRT-LLM's `WorkerExtension`."""

    if TYPE_CHECKING:
        device_id: int
        engine: Any

        def update_weights(self, ipc_handles: Mapping[str, Any] | None = None) -> None: ...

    def load_bucket(self, bucket: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Load a bucket; None ends an update.

        Returns at the end, for `host.check_held`, plain values:
            parameters: for each parameter `held`, the sum of its bits here, and `sent`, the sums of
                its tensors by name
            lost: names of tensors that belong to no parameter
        """
        if bucket is None:
            self.update_weights(None)
            report = self._sums_held()
            del self._sent
            # Free the copies of buckets, before the KV cache is allocated again.
            torch.cuda.empty_cache()
            return report
        device = torch.device("cuda", self.device_id)
        name = worker_device_id(self.device_id)
        tensors = dict(buckets.received(bucket, name, device))
        self._note_sent(tensors)
        # The engine calls a function per tensor, and replaces its seventh argument by the device.
        handles = [(key, (_first, (tensor, *[None] * 6))) for key, tensor in tensors.items()]
        self.update_weights({name: handles})
        return None

    def _engine_parameters(self) -> dict[str, Tensor]:
        model = self.engine.model_engine.model
        # Layers share their norms with the layer before, so a parameter may have several names.
        named = model.named_parameters(remove_duplicate=False)
        return {name.replace(COMPILED, ""): parameter for name, parameter in named}

    def _note_sent(self, tensors: Mapping[str, Tensor]) -> None:
        """Sum the tensors of a bucket, each in the dtype of its parameter."""
        if not hasattr(self, "_sent"):
            self._sent: dict[str, tuple[str | None, int]] = {}
        parameters = self._engine_parameters()
        for name, tensor in tensors.items():
            target = name if name in parameters else fused_name(name)
            if target not in parameters:
                self._sent[name] = None, 0
                continue
            self._sent[name] = target, buckets.bit_sum(tensor.to(parameters[target].dtype))

    def _sums_held(self) -> dict[str, Any]:
        parameters = self._engine_parameters()
        given = {id(parameters[target]) for target, _ in self._sent.values() if target is not None}
        by_parameter: dict[str, dict[str, Any]] = {}
        for name, (target, total) in self._sent.items():
            if target is not None:
                entry = by_parameter.setdefault(
                    target, {"held": buckets.bit_sum(parameters[target]), "sent": {}}
                )
                entry["sent"][name] = total
        for name, parameter in parameters.items():
            if id(parameter) not in given and name.rpartition(".")[2] in ("weight", "bias"):
                by_parameter[name] = {"held": 0, "sent": {}}
        return {
            "parameters": by_parameter,
            "lost": [name for name, (target, _) in self._sent.items() if target is None],
        }


def fused_name(name: str) -> str:
    """Return the engine's parameter of which a Hugging Face tensor is a part."""
    path, _, kind = name.rpartition(".")
    above, _, leaf = path.rpartition(".")
    return f"{above}.{FUSED.get(leaf, leaf)}.{kind}"


def worker_device_id(number: int) -> str:
    """Return the id by which TensorRT-LLM's worker finds its tensors."""
    return buckets.device_id(torch.device("cuda", number))


def _first(tensor: Tensor, *_: Any) -> Tensor:
    return tensor


def __getattr__(name: str) -> Any:
    # Made on demand: only the engine's workers can import its base class.
    if name != "WeightsOfTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension  # type: ignore[import-not-found]

    return type(name, (WeightLoading, WorkerExtension), {"__module__": __name__})
