"""What each rank of a layout would hold of a model, from its architecture alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reinforce_rl.config.parallelism import Layout
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.lora.map import LoraSettings, lora_map
from reinforce_rl.megatron.weights.weight_map import EMBEDDING, Row, weight_map
from reinforce_rl.preflight.memory import StageShape


@dataclass(frozen=True)
class ModelSize:
    """Parameters of the whole model, without padding and copies: all of them, and those that are trained."""

    parameters: int
    trained: int

    @classmethod
    def of(cls, arch: Architecture, lora: LoraSettings | None) -> ModelSize:
        """
        Args:
            arch: the model.
            lora: its updates, which count as parameters too; None where all weights are trained.
        """
        weights = sum(math.prod(row.shape) for row in weight_map(arch, 1))
        if lora is None:
            return cls(weights, weights)
        updates = sum(math.prod(matrix.shape) for row in lora_map(arch, 1, lora) for matrix in (row.a, row.b))
        return cls(weights + updates, updates)


def stage_shapes(
    arch: Architecture, layout: Layout, layers: Sequence[int], lora: LoraSettings | None
) -> list[StageShape]:
    """What a rank of each pipeline stage holds.

    Args:
        arch: the model.
        layout: of the ranks.
        layers: of each stage.
        lora: updates; None where all weights are trained.
    """
    tp = layout.tensor
    sizes = arch.padded(tp)
    rows = weight_map(arch, tp)
    updates = [] if lora is None else [m for row in lora_map(arch, tp, lora) for m in (row.a, row.b)]
    table = rank_numbers([row for row in rows if row.hf == EMBEDDING])
    shapes, first_layer = [], 0
    for stage, count in enumerate(layers):
        first, last = stage == 0, stage == len(layers) - 1
        numbers = range(first_layer, first_layer + count)
        own = [row for row in rows if _is_on(row, numbers, first, last)]
        weights = [
            *rank_numbers(own).values(),
            *(table.values() if last and not first and arch.tied_embeddings else ()),
        ]
        low_rank = list(rank_numbers([row for row in updates if _is_on(row, numbers, first, last)]).values())
        trained = weights if lora is None else low_rank
        shapes.append(
            StageShape(
                layers=count,
                first=first,
                last=last,
                hidden=arch.hidden_size,
                heads=sizes.num_heads // tp,
                groups=sizes.num_groups // tp,
                head_size=arch.head_size,
                ffn=arch.ffn_size // tp,
                vocab=sizes.vocab_size // tp,
                whole_vocab=sizes.vocab_size,
                parameters=sum(weights) + sum(low_rank),
                trained=sum(trained),
                largest=max(trained, default=0),
                tied=arch.tied_embeddings,
            )
        )
        first_layer += count
    return shapes


def rank_numbers(rows: Sequence[Row]) -> dict[str, int]:
    """Numbers of each of megatron's parameters on one tensor-parallel rank. Several rows may share a parameter."""
    return {row.megatron: math.prod(row.local_shape) for row in rows}


def _is_on(row: Row, layers: range, first: bool, last: bool) -> bool:
    if row.megatron.startswith("decoder.layers."):
        return int(row.megatron.split(".")[2]) in layers
    return first if row.hf == EMBEDDING else last
