"""What TensorRT-LLM's workers do for the trainer: load its weights, and say what they hold then.

The engine leaves a module alone for which no name matches. So after an update each parameter's bits are summed, and
`host.check_held` compares them with the sums of the tensors that it was made of. The sum does not depend on the order
of elements, as a worker holds fused and sharded weights; a wrong order is the engine's own fault, not the update's.
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
    """The methods that `WeightsOfTrainer` adds to TensorRT-LLM's own `WorkerExtension`."""

    if TYPE_CHECKING:
        device_id: int
        engine: Any

        def update_weights(self, ipc_handles: Mapping[str, Any] | None = None) -> None: ...

    def load_bucket(self, bucket: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Load a bucket; None ends an update.

        Returns at the end, for `host.check_held`, by plain values:
            parameters: for each, `held`, the sum of its bits here, and `sent`, those of the tensors for it by name
            lost: names of tensors that belong to no parameter
        """
        if bucket is None:
            self.update_weights(None)
            report = self._sums_held()
            del self._sent
            torch.cuda.empty_cache()  # the copies of buckets; the cache comes back after this
            return report
        device = torch.device("cuda", self.device_id)
        name = worker_device_id(self.device_id)
        tensors = dict(buckets.received(bucket, name, device))
        self._note_sent(tensors)
        # Its own way in takes a function and arguments for each tensor, whose seventh it replaces
        # by its device.
        handles = [(key, (_first, (tensor, *[None] * 6))) for key, tensor in tensors.items()]
        self.update_weights({name: handles})
        return None

    def _engine_parameters(self) -> dict[str, Tensor]:
        model = self.engine.model_engine.model
        # Layers share their norms with the layer before, so a parameter may have several names.
        named = model.named_parameters(remove_duplicate=False)
        return {name.replace(COMPILED, ""): parameter for name, parameter in named}

    def _note_sent(self, tensors: Mapping[str, Tensor]) -> None:
        """Sum the tensors of a bucket in the dtype of the parameter that they are for."""
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
        found: dict[str, dict[str, Any]] = {}
        for name, (target, total) in self._sent.items():
            if target is not None:
                entry = found.setdefault(
                    target, {"held": buckets.bit_sum(parameters[target]), "sent": {}}
                )
                entry["sent"][name] = total
        for name, parameter in parameters.items():
            if id(parameter) not in given and name.rpartition(".")[2] in ("weight", "bias"):
                found[name] = {"held": 0, "sent": {}}
        return {
            "parameters": found,
            "lost": [name for name, (target, _) in self._sent.items() if target is None],
        }


def fused_name(name: str) -> str:
    """Return the engine's parameter for a Hugging Face tensor that is a part of it."""
    path, _, kind = name.rpartition(".")
    above, _, leaf = path.rpartition(".")
    return f"{above}.{FUSED.get(leaf, leaf)}.{kind}"


def worker_device_id(number: int) -> str:
    """Return the id by which TensorRT-LLM's worker looks for its tensors."""
    return buckets.device_id(torch.device("cuda", number))


def _first(tensor: Tensor, *_: Any) -> Tensor:
    return tensor


def __getattr__(name: str) -> Any:
    # Made where it is asked for, as only the engine's workers have its base class.
    if name != "WeightsOfTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension  # type: ignore[import-not-found]

    return type(name, (WeightLoading, WorkerExtension), {"__module__": __name__})
