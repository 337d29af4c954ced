"""What a pass takes of a model, from its architecture."""

from __future__ import annotations

from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.size import ModelSize
from rloo_step.floors import ModelParts


def parts_of(arch: Architecture) -> ModelParts:
    """The parameters, counted."""
    size = ModelSize.from_architecture(arch, None).parameters
    table = arch.vocab_size * arch.hidden_size
    return ModelParts(body=size - table * (1 if arch.tied_embeddings else 2), head=table, all=size)
