"""Takes the fake engine away again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from reinforce_rl.generation import weight_transfer


@pytest.fixture
def fake_engine(tmp_path, monkeypatch):
    """`install_fake` with its files below tmp_path, undone after the test."""
    from helpers.engine_fake import install_fake

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(weight_transfer, "device_uuid", weight_transfer.device_uuid)
    monkeypatch.setattr(weight_transfer, "handle_of", weight_transfer.handle_of)
    monkeypatch.setenv("FAKE_ENGINE", "{}")

    def install(folder: Path = tmp_path / "engine", **options: object) -> Path:
        install_fake(folder, **options)  # type: ignore[arg-type]
        return folder

    yield install
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]
