"""Install the fake TensorRT-LLM of `fake_engine/`; see its `__init__.py`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from reinforce_rl.generation.base import Generator
from reinforce_rl.generation.engine.generator import EngineGenerator
from reinforce_rl.generation.trtllm import adapter

PACKAGE = Path(__file__).with_name("fake_engine")


def install_fake(folder: Path, *, rank: int = 0, model: str = "native", **options: object) -> None:
    """Replace this process's engines with fakes, which need no GPU.

    Args:
        folder: for recorded calls and weights.
        rank: of this process in its block; selects the device.
        model: "native" or "scripted".
        options: other keys of FAKE_ENGINE.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"folder": str(folder), "model": model, **options}
    os.environ["FAKE_ENGINE"] = json.dumps(settings)
    if str(PACKAGE) not in sys.path:
        sys.path.insert(0, str(PACKAGE))
    adapter.device_uuid = lambda _: f"cpu:{rank}"  # type: ignore[assignment]


@contextlib.contextmanager
def uninstalled_after() -> Iterator[None]:
    """Undo what `install_fake` changes in the block."""
    path = mock.patch.object(sys, "path", list(sys.path))
    device = mock.patch.object(adapter, "device_uuid", adapter.device_uuid)
    with path, device, mock.patch.dict(os.environ, FAKE_ENGINE="{}"):
        try:
            yield
        finally:
            forget_fake()


def forget_fake() -> None:
    """Let the next import of the fake read FAKE_ENGINE again."""
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def in_small_buckets(generator: Generator) -> None:
    """Split a tiny model's weights into several buckets; the key's minimum is a megabyte."""
    assert isinstance(generator, EngineGenerator)
    generator._bucket_bytes = 4096
