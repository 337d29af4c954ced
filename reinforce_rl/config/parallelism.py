"""A layout of ranks, and what cannot work of one or of recomputation: told without torch, before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

RECOMPUTE_GRANULARITIES = ("selective", "full")
RECOMPUTE_METHODS = ("uniform", "block")
_LINES_OF_GRID = 16


@dataclass(frozen=True)
class Layout:
    """Sizes of the four kinds of parallelism; their product is the ranks of the job.

    Attributes:
        tensor, pipeline, context, data: ranks of each kind.
        sequence_parallel: tensor-parallel ranks share positions too.
    """

    tensor: int
    pipeline: int
    context: int
    data: int
    sequence_parallel: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def sequence_multiple(self) -> int:
        """Positions of a batch are padded to a multiple of this, so that the ranks can share them evenly."""
        return (2 * self.context if self.context > 1 else 1) * (self.tensor if self.sequence_parallel else 1)

    def grid(self) -> str:
        """Which ranks form which block, one line a block."""
        sizes = (self.tensor, self.context, self.data, self.pipeline)
        shared = " with sequence parallelism" if self.sequence_parallel else ""
        lines = [
            f"{self.ranks} ranks: {self.data} data x {self.pipeline} pipeline x {self.context} context x "
            f"{self.tensor} tensor parallel{shared}"
        ]
        for dp in range(min(self.data, _LINES_OF_GRID)):
            stages = [
                " | ".join(
                    " ".join(str(rank_at(tp, cp, dp, pp, sizes)) for tp in range(self.tensor))
                    for cp in range(self.context)
                )
                for pp in range(self.pipeline)
            ]
            lines.append(f"  data {dp}: " + ", ".join(f"stage {pp} [{stage}]" for pp, stage in enumerate(stages)))
        if self.data > _LINES_OF_GRID:
            lines.append(f"  and {self.data - _LINES_OF_GRID} more")
        return "\n".join(lines)


def rank_at(tp: int, cp: int, dp: int, pp: int, sizes: tuple[int, int, int, int]) -> int:
    """The rank at these coordinates. Tensor-parallel ranks are neighbours, which talk most; stages lie farthest apart.

    Args:
        sizes: tensor, context, data, pipeline.
    """
    tp_size, cp_size, dp_size, _ = sizes
    return tp + tp_size * (cp + cp_size * (dp + dp_size * pp))


def layout_faults(
    tensor: int,
    pipeline: int,
    context: int,
    sequence_parallel: bool,
    world_size: int,
    ranks: str,
    section: str = "model",
) -> list[str]:
    """What is wrong with a layout, one sentence a fault.

    Args:
        tensor, pipeline, context: the three model-parallel sizes, each at least 1.
        sequence_parallel: as configured.
        world_size: ranks of the job.
        ranks: how to call them in the message.
        section: of the configuration that has the keys.
    """
    faults = []
    sizes = {
        f"{section}.tensor_model_parallel_size": tensor,
        f"{section}.pipeline_model_parallel_size": pipeline,
        f"{section}.context_parallel_size": context,
    }
    block = tensor * pipeline * context
    if world_size % block:
        used = {key: size for key, size in sizes.items() if size > 1}
        if len(used) == 1:
            key, size = next(iter(used.items()))
            faults.append(f"{key} is {size}, which does not divide the {world_size} ranks of {ranks}")
        else:
            factors = " x ".join(f"{key} ({size})" for key, size in used.items())
            faults.append(f"{factors} is {block}, which does not divide the {world_size} ranks of {ranks}")
    if sequence_parallel and tensor == 1:
        faults.append(
            f"{section}.sequence_parallel is true with {section}.tensor_model_parallel_size=1; it shares positions "
            "among tensor-parallel ranks, so set that above 1 or this to false"
        )
    return faults


def recomputation_faults(granularity: str | None, method: str | None, num_layers: int | None) -> list[str]:
    """What is wrong with `model.activations_checkpoint_*`, one sentence a fault."""
    key = "model.activations_checkpoint_"
    if granularity not in (None, *RECOMPUTE_GRANULARITIES):
        return [f"{key}granularity is {granularity!r}; expected null, {' or '.join(RECOMPUTE_GRANULARITIES)}"]
    faults = []
    if granularity == "full":
        if method not in RECOMPUTE_METHODS:
            faults.append(
                f"{key}method is {method!r} with granularity=full; expected {' or '.join(RECOMPUTE_METHODS)}"
            )
        if num_layers is None:
            faults.append(f"{key}num_layers is null with granularity=full; expected a number of layers, such as 1")
    elif method is not None or num_layers is not None:
        faults.append(
            f"{key}method is {method!r} and num_layers is {num_layers!r}, which only granularity=full reads; "
            f"it is {granularity!r}"
        )
    return faults
