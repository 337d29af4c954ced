"""The trainer's half of what is particular about an engine; `host.EngineHost` is the engine's half."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from reinforce_rl.generation.engine.weights import Offer


class EngineAdapter(Protocol):
    name: str  # value of `generation`, and its section of the configuration
    title: str  # as its makers write it
    package: str  # that the engine's Python must have
    host: str  # module that runs the engine
    memory_key: str  # to be lowered when the engine finds no memory
    shows_layers: bool  # the host has the command layer_outputs
    loads_adapters: bool  # LoRA updates are sent alone, by its command load_adapter

    @property
    def options(self) -> dict[str, Any]:
        """`EngineArguments.options`."""
        ...

    def device_id(self, device: torch.device) -> str:
        """Return the name of a rank's device, as `EngineHost.start` returns its workers'.

        Raises:
            ConfigError: the engine cannot run there.
        """
        ...

    def environment(self, folder: Path) -> dict[str, str]:
        """Return variables for the engine's process, whose own files are in `folder`."""
        ...

    def write_config(self, folder: Path) -> None:
        """Adapt the copied model folder, which has no weights, to what the engine reads."""
        ...

    def make_buffer(self, elements: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Offer]:
        """See `send_weights`."""
        ...

    def bucket_of(self, offers: Sequence[Any]) -> Any:
        """Join the offers of the ranks with a worker into the bucket for `EngineHost.update_weights`."""
        ...
