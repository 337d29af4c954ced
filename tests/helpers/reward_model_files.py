"""A small reward model's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from helpers.models import tiny_llama_folder

from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.reward_head import RewardHead
from reinforce_rl.reward_model.scorer import Batching, load_reward_model

VOCAB_SIZE = 64


@dataclass(frozen=True)
class ModelFiles:
    """A trunk, and a head in `folder`."""

    folder: Path
    trunk: Path

    @classmethod
    def make(cls, folder: Path) -> ModelFiles:
        """Create small random files."""
        files = cls(folder, tiny_llama_folder(folder / "trunk", vocab_size=VOCAB_SIZE, seed=1))
        weight = torch.randn(32, generator=torch.Generator().manual_seed(0))
        RewardHead(weight, torch.tensor(0.5), "mean").save(files.head)
        return files

    @property
    def head(self) -> Path:
        return self.folder / "head.safetensors"

    @property
    def overrides(self) -> list[str]:
        return [
            f"reward_model.restore_from_path={self.trunk}",
            f"reward_model.head_path={self.head}",
        ]

    def scores(self, mesh: Mesh, requests: Sequence[Sequence[list[int]]]) -> list[list[float]]:
        """Score each request by direct forward passes, one sequence at a time."""
        model = load_reward_model(
            self.trunk, self.head, mesh, batching=Batching(micro_batch_size=1)
        )
        return [model.score(list(request)) for request in requests]
