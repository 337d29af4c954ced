"""Count a model's parameters, and the bytes that training holds for each."""

from __future__ import annotations

import math
from dataclasses import dataclass

from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.lora import LoraSettings, lora_map
from reinforce_rl.megatron.weight_map import weight_map

FP32 = 4
ADAM_MOMENTS = 2 * FP32
WEIGHT_BYTES = {"32": 4, "bf16": 2}  # by trainer.precision


@dataclass(frozen=True)
class ModelSize:
    """Parameters of the whole model including LoRA's, without padding and copies."""

    parameters: int
    trained: int

    @classmethod
    def from_architecture(cls, arch: Architecture, lora: LoraSettings | None) -> ModelSize:
        weights = sum(math.prod(row.shape) for row in weight_map(arch, 1))
        if lora is None:
            return cls(weights, weights)
        updates = sum(
            math.prod(matrix.shape) for row in lora_map(arch, 1, lora) for matrix in (row.a, row.b)
        )
        return cls(weights + updates, updates)
