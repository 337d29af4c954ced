"""Parallel layout, and its rules on configurations.

Torch-free, so that it can be checked at config time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforce_rl.config.model_folder import model_values
from reinforce_rl.errors import Fault
from reinforce_rl.utils.job_rank import ranks_started

if TYPE_CHECKING:
    from reinforce_rl.config.model import ParallelConfig

_LINES_OF_GRID = 16


@dataclass(frozen=True)
class Layout:
    """Sizes of the four kinds of parallelism, whose product is the number of ranks."""

    tensor: int
    pipeline: int
    context: int
    data: int
    sequence_parallel: bool = False  # tensor-parallel ranks share positions too

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def sequence_multiple(self) -> int:
        """Sequence lengths are padded to a multiple of this, so that ranks share them evenly."""
        return (2 * self.context if self.context > 1 else 1) * (
            self.tensor if self.sequence_parallel else 1
        )

    def grid(self) -> str:
        """Describe the ranks of each block, one line per block."""
        sizes = (self.tensor, self.context, self.data, self.pipeline)
        shared = " with sequence parallelism" if self.sequence_parallel else ""
        lines = [
            f"{self.ranks} ranks: {self.data} data x {self.pipeline} pipeline x {self.context} "
            f"context x {self.tensor} tensor parallel{shared}"
        ]
        for dp in range(min(self.data, _LINES_OF_GRID)):
            stages = []
            for pp in range(self.pipeline):
                parts = (
                    [rank_at(tp, cp, dp, pp, sizes) for tp in range(self.tensor)]
                    for cp in range(self.context)
                )
                stages.append(
                    f"stage {pp} [{' | '.join(' '.join(map(str, part)) for part in parts)}]"
                )
            lines.append(f"  data {dp}: {', '.join(stages)}")
        if self.data > _LINES_OF_GRID:
            lines.append(f"  and {self.data - _LINES_OF_GRID} more")
        return "\n".join(lines)


def rank_at(tp: int, cp: int, dp: int, pp: int, sizes: tuple[int, int, int, int]) -> int:
    """Return the rank at these coordinates. Tensor-parallel ranks are adjacent, stages farthest
    apart.

    `sizes` are tensor, context, data, pipeline.
    """
    tp_size, cp_size, dp_size, _ = sizes
    return tp + tp_size * (cp + cp_size * (dp + dp_size * pp))


def layout_faults(
    tensor: int,
    pipeline: int,
    context: int,
    sequence_parallel: bool,
    world: int,
    ranks: str,
    section: str = "model",
) -> Iterator[Fault]:
    """Check sizes of at least 1; `ranks` is the expression for the number `world`, `section` that
    of the keys.
    """
    sizes = {"tensor_model": tensor, "pipeline_model": pipeline, "context": context}
    block = tensor * pipeline * context
    if world % block:
        used = {f"{section}.{kind}_parallel_size": size for kind, size in sizes.items() if size > 1}
        product = (
            " x ".join(f"{key} ({size})" for key, size in used.items())
            if len(used) > 1
            else next(iter(used))
        )
        yield Fault(
            f"{product} is {block}, which does not divide the {world} ranks of {ranks}",
            key="config.parallel_sizes.not_a_divisor_of_ranks",
        )
    if sequence_parallel and tensor == 1:
        yield Fault(
            f"{section}.sequence_parallel is true with {section}.tensor_model_parallel_size=1; "
            "it shares positions among tensor-parallel ranks, so set that above 1 or this to false",
            key="config.sequence_parallel.without_tensor_parallel",
        )


def ranks_faults(
    model: Any, num_nodes: int, devices: int, prefix: str, section: str = "model", others: int = 0
) -> Iterator[Fault]:
    """Check the layout of a section with parallel sizes, and the number of started ranks.

    `prefix` goes before `num_nodes` in messages; `others` ranks have another layout.
    """
    world = num_nodes * devices
    ranks = f"{prefix}num_nodes x {prefix}devices = {num_nodes} x {devices}"
    context = getattr(model, "context_parallel_size", 1)
    sizes = (model.tensor_model_parallel_size, model.pipeline_model_parallel_size, context)
    if min(*sizes, world - others) >= 1:
        counted = f"{ranks}, less {others} (generation_ranks)" if others else ranks
        yield from layout_faults(*sizes, model.sequence_parallel, world - others, counted, section)
    started = ranks_started()
    if started is not None and started != str(world):
        yield Fault(
            f"{started} ranks were started (WORLD_SIZE), but {ranks} = {world}",
            key="config.devices.not_the_ranks_started",
        )


def recomputation_faults(model: ParallelConfig) -> Iterator[Fault]:
    key = "model.activations_checkpoint_"
    granularity = model.activations_checkpoint_granularity
    method = model.activations_checkpoint_method
    num_layers = model.activations_checkpoint_num_layers
    if granularity == "full":
        if method is None:
            yield Fault(
                f"{key}method is null with granularity=full; expected uniform or block",
                key="config.activations_checkpoint_method.missing",
            )
        if num_layers is None:
            yield Fault(
                f"{key}num_layers is null with granularity=full; expected a number, such as 1",
                key="config.activations_checkpoint_num_layers.missing",
            )
    elif granularity in (None, "selective") and (method, num_layers) != (None, None):
        read = f"which only granularity=full reads; it is {granularity!r}"
        yield Fault(
            f"{key}method is {method!r} and num_layers is {num_layers!r}, {read}",
            key="config.activations_checkpoint_method.without_granularity_full",
        )


def model_faults(
    folder: str,
    tensor: int,
    section: str = "model",
    length_key: str = "",
    length: int | None = None,
) -> Iterator[Fault]:
    """Check a length and the feed-forward size against `config.json`; heads, groups and vocabulary
    are padded.
    """
    values = model_values(folder)
    place = Path(folder) / "config.json"
    limit = values.get("max_position_embeddings")
    size = values.get("intermediate_size")
    if isinstance(limit, int) and length is not None and length > limit:
        positions = f"{limit} positions (max_position_embeddings)"
        yield Fault(
            f"{length_key} is {length}, above the {positions} of {place}",
            key="config.length.above_positions_of_model",
        )
    if isinstance(size, int) and tensor > 1 and size % tensor:
        yield Fault(
            f"{section}.tensor_model_parallel_size is {tensor}, which does not divide "
            f"the feed-forward size {size} (intermediate_size) of {place}",
            key="config.tensor_model_parallel_size.not_a_divisor_of_feed_forward",
        )
