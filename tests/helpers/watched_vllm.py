"""vLLM that counts its forward passes and can slow them: `python -m helpers.watched_vllm`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reinforce_rl.generation.engine.host import main
from reinforce_rl.generation.vllm import host
from reinforce_rl.generation.vllm.adapter import VLLM
from reinforce_rl.generation.vllm.worker import WeightsOfTrainer


class WatchedVLLM(VLLM):
    """The trainer's side."""

    host = "helpers.watched_vllm"

    def environment(self, folder: Path) -> dict[str, str]:
        paths = [str(folder / "package"), str(Path(__file__).parents[1])]
        return {**super().environment(folder), "PYTHONPATH": os.pathsep.join(paths)}


def watched(adapter: Any, engine: Any) -> WatchedVLLM:
    """Replace a generator's adapter; `engine`, which has not started, also gets the new one."""
    watched_adapter = WatchedVLLM(adapter._config)
    if engine is not None:  # on model-parallel rank 0
        engine._adapter = watched_adapter
    return watched_adapter


class WatchedWorker(WeightsOfTrainer):
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


class WatchedHost(host.VLLMHost):
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
    host.WORKER = "helpers.watched_vllm.WatchedWorker"
    main(WatchedHost())
