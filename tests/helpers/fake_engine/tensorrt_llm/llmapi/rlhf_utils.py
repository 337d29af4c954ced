from __future__ import annotations

from typing import Any

from .. import bind


class WorkerExtension:
    """Base class of extensions; the worker has the attributes `device_id` and `engine`."""

    device_id: int
    engine: Any

    def update_weights(self, ipc_handles: dict[str, Any] | None = None) -> None:
        bind("WorkerExtension.update_weights", ipc_handles)
        if ipc_handles is None:
            self.engine.reset_prefix_cache()
            return
        from .._torch.utils import get_device_uuid

        name = get_device_uuid(self.device_id)
        if name not in ipc_handles:
            raise ValueError(f"Device UUID {name} not found in ipc_handles")
        weights = {}
        for key, (function, arguments) in ipc_handles[name]:
            arguments = list(arguments)
            arguments[6] = self.device_id
            weights[key] = function(*arguments)
        model_engine = self.engine.model_engine
        model_engine.model_loader.reload(model_engine.model, weights, allow_partial_loading=True)
