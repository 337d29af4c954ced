"""Model and prompts of the native engine's tests; uninstalls the fake engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.models import tiny_llama_folder
from helpers.policies import megatron_model, random_tokens

from reinforce_rl.data.batches import Prompt


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
def fake_engine(tmp_path):
    """Install a fake engine with its files below tmp_path; undo it after the test."""
    from helpers.engine_fake import install_fake, uninstalled_after

    def install(folder: Path = tmp_path / "engine", **options: object) -> Path:
        install_fake(folder, **options)  # type: ignore[arg-type]
        return folder

    with uninstalled_after():
        yield install
