"""Models with non-zero LoRA updates."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers.policies import megatron_model
from torch import Tensor

from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_weights import parameters_of
from reinforce_rl.megatron.lora import (
    PROJECTIONS,
    LoraSettings,
    adapter_rows,
    add_lora,
    lora_map,
)
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import CausalLM

EVERY = LoraSettings(rank=3, alpha=7.0, targets=PROJECTIONS, seed=5)
SOME = LoraSettings(rank=2, alpha=3.0, targets=("q_proj", "v_proj", "o_proj", "up_proj"), seed=5)


def random_updates(
    folder: Path, settings: LoraSettings, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return A and B under PEFT's names, large enough to change every logit."""
    generator = torch.Generator().manual_seed(3)
    updates = {}
    for adapter in lora_map(Architecture.from_folder(folder), 1, settings):
        for row in (adapter.a, adapter.b):
            update = 0.15 * torch.randn(row.shape, generator=generator)
            updates[row.hf] = update.to(dtype)
    return updates


@torch.no_grad()
def load_updates(lm: CausalLM, values: dict[str, Tensor]) -> None:
    parameters = parameters_of(lm)
    for row in (row for row in adapter_rows(lm) if row.megatron in parameters):
        # the other rows belong to another stage
        part = row.part_in(values[row.hf], lm.mesh.tp_rank)
        row.place(parameters[row.megatron], lm.mesh.tp_rank).copy_(part)


def lora_model(
    folder: Path, mesh: Mesh, settings: LoraSettings, dtype: torch.dtype = torch.float32
) -> CausalLM:
    lm = megatron_model(folder, mesh, dtype)
    add_lora(lm, settings)
    load_updates(lm, random_updates(folder, settings, dtype))
    return lm
