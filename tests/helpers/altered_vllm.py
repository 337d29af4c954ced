"""vLLM's engine process with commands and faults of tests: `python -m helpers.altered_vllm`.

It counts its forward passes and can slow them. The variable SABOTAGE names a fault in its weights.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from reinforce_rl.config.engines import VLLMConfig
from reinforce_rl.generation.engine.host import main
from reinforce_rl.generation.vllm import host
from reinforce_rl.generation.vllm.adapter import VLLM
from reinforce_rl.generation.vllm.worker import EMBEDDING, OUTPUT_LAYER, WeightsOfTrainer

if TYPE_CHECKING:
    from reinforce_rl.generation.engine.generator import EngineGenerator

KEY, VALUE = (f"model.layers.0.self_attn.{projection}_proj.weight" for projection in "kv")
UP = "model.layers.1.mlp.up_proj.weight"
# Names that vLLM receives instead of the sent names; no tensor is lost.
RENAMED = {
    "output layer lost": {OUTPUT_LAYER: None},  # like a trainer that sends tied weights once
    "projection lost": {UP: None},
    "exchanged": {KEY: VALUE, VALUE: KEY},
}
NAMED = {
    "output layer lost": OUTPUT_LAYER,
    "projection lost": UP,
    "exchanged": KEY,
    "changed": EMBEDDING,
}


class AlteredVLLM(VLLM):
    """The trainer's side; `sabotage` is empty or a key of NAMED, whose tensor an error names."""

    host = "helpers.altered_vllm"

    def __init__(self, config: VLLMConfig, sabotage: str):
        super().__init__(config)
        self._sabotage = sabotage

    def environment(self, folder: Path) -> dict[str, str]:
        environment = super().environment(folder)
        tests = Path(__file__).parents[1]
        environment["PYTHONPATH"] = f"{folder / 'package'}{os.pathsep}{tests}"
        environment["SABOTAGE"] = self._sabotage
        return environment


def alter(generator: EngineGenerator, sabotage: str = "") -> None:
    """Let a generator start this process; it must not have started vLLM yet."""
    adapter: Any = generator._adapter
    generator._adapter = AlteredVLLM(adapter._config, sabotage)
    if generator._engine is not None:  # on model-parallel rank 0
        generator._engine._adapter = generator._adapter


class AlteredWorker(WeightsOfTrainer):
    _passes = 0
    _seconds = 0.0
    _is_watched = False

    def load_bucket(self, bucket: Mapping[str, Any] | None) -> None:
        if not self._is_watched:
            self._is_watched = True
            self._model.register_forward_pre_hook(self._count)
        super().load_bucket(bucket)

    def _count(self, *_: Any) -> None:
        self._passes += 1
        time.sleep(self._seconds)

    def passes(self) -> int:
        return self._passes

    def set_pace(self, seconds: float) -> None:
        self._seconds = seconds

    def _noted(self, bucket: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        renamed = RENAMED.get(os.environ["SABOTAGE"], {})
        for name, tensor in super()._noted(bucket):
            if (sent_name := renamed.get(name, name)) is not None:
                yield sent_name, tensor

    def _check_layers(self) -> None:
        if os.environ["SABOTAGE"] == "changed":  # one bit
            weight = self._model.model.embed_tokens.weight.data
            columns = self._columns(weight.shape[1])
            weight[5, columns[2]] *= 1 + 2**-23
        super()._check_layers()


class AlteredHost(host.VLLMHost):
    async def passes(self) -> int:
        """Return the number of forward passes so far."""
        return (await self._engine.collective_rpc("passes"))[0]

    async def set_pace(self, seconds: float) -> None:
        """Delay each forward pass by `seconds`."""
        await self._engine.collective_rpc("set_pace", args=(seconds,))

    async def with_tokens(self) -> int:
        """Return how many running requests have a token."""
        return len(self._have_tokens)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # as host.py does
    host.WORKER = "helpers.altered_vllm.AlteredWorker"
    main(AlteredHost())
