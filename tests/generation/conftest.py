"""Model and prompts of the native engine's tests; uninstalls the fake engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers.models import tiny_llama_folder
from helpers.policies import megatron_model, random_tokens

from reinforce_rl.data.batches import Prompt
from reinforce_rl.generation.trtllm import adapter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama_folder(tmp_path_factory.mktemp("model"), vocab_size=63, logit_scale=2.0)


@pytest.fixture(scope="module")
def lm(folder, mesh):
    """Return a float64 model: batching changes its logits by 1e-16.

    Near ties between tokens do not occur.
    """
    return megatron_model(folder, mesh, torch.float64)


@pytest.fixture(scope="module")
def prompts():
    lengths = (3, 11, 1, 7, 5)
    tokens = random_tokens(63, len(lengths), max(lengths)).tolist()
    rows = [tuple(row[:length]) for row, length in zip(tokens, lengths, strict=True)]
    return [Prompt(100 + i, "", row) for i, row in enumerate(rows)]


@pytest.fixture
def fake_engine(tmp_path, monkeypatch):
    """Install a fake engine with its files below tmp_path; undo it after the test."""
    from helpers.engine_fake import install_fake

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(adapter, "device_uuid", adapter.device_uuid)
    monkeypatch.setenv("FAKE_ENGINE", "{}")

    def install(folder: Path = tmp_path / "engine", **options: object) -> Path:
        install_fake(folder, **options)  # type: ignore[arg-type]
        return folder

    yield install
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]
