"""Parallel layout. Torch-free, so that it can be checked at config time."""

from __future__ import annotations

from dataclasses import dataclass

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
        return (2 * self.context if self.context > 1 else 1) * (self.tensor if self.sequence_parallel else 1)

    def grid(self) -> str:
        """Describe the ranks of each block, one line per block."""
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
    """Return the rank at these coordinates. Tensor-parallel ranks are adjacent, stages farthest apart.

    Args:
        sizes: tensor, context, data, pipeline.
    """
    tp_size, cp_size, dp_size, _ = sizes
    return tp + tp_size * (cp + cp_size * (dp + dp_size * pp))
