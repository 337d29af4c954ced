"""vLLM's engine process with a fault in its weights: `python -m helpers.sabotaged_vllm`.

The variable SABOTAGE names the fault.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from reinforce_rl.generation.engine.host import main
from reinforce_rl.generation.vllm import host
from reinforce_rl.generation.vllm.adapter import VLLM
from reinforce_rl.generation.vllm.worker import EMBEDDING, OUTPUT_LAYER, WeightsOfTrainer

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


class SabotagedVLLM(VLLM):
    """The trainer's side: `kind` is a key of NAMED, whose tensor an error must name."""

    host = "helpers.sabotaged_vllm"
    kind = ""

    def environment(self, folder: Path) -> dict[str, str]:
        paths = [str(folder / "package"), str(Path(__file__).parents[1])]
        return {
            **super().environment(folder),
            "PYTHONPATH": os.pathsep.join(paths),
            "SABOTAGE": self.kind,
        }


class SabotagedWorker(WeightsOfTrainer):
    def _noted(self, bucket: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        renamed = RENAMED.get(os.environ["SABOTAGE"], {})
        for name, tensor in super()._noted(bucket):
            if (sent_name := renamed.get(name, name)) is not None:
                yield sent_name, tensor

    def _check_layers(self) -> None:
        if os.environ["SABOTAGE"] == "changed":  # one bit
            weight = self._model.model.embed_tokens.weight.data
            weight[5, self._columns(weight.shape[1])[2]] *= 1 + 2**-23
        super()._check_layers()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # as host.py does
    host.WORKER = "helpers.sabotaged_vllm.SabotagedWorker"
    main(host.VLLMHost())
