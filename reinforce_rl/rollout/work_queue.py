"""Micro-batches of prompts, shared out, or handed out one by one to whichever rank is free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from reinforce_rl.data.batches import Prompt

if TYPE_CHECKING:
    from reinforce_rl.megatron.mesh import Mesh

T = TypeVar("T")
MicroBatch = Sequence[Prompt]
COUNTER = "reinforce_rl/micro_batches_taken"


class WorkQueue:
    """Micro-batches of one generation phase, created by all ranks together.

    Iterating yields this block's: its own share, or with `shared` what it takes from one queue of
    all, first come, first served. Micro-batches are cut as without a queue, so that each gives the
    same numbers wherever it is generated. `share` is the same on all ranks of a block.
    """

    def __init__(self, mesh: Mesh, share: Sequence[MicroBatch], *, shared: bool):
        self._mesh = mesh
        self._shared = shared
        self._micro_batches = list(share)
        self._own = list(range(len(share)))
        self._taken: list[int] = []
        if not shared:
            return
        if mesh.is_main:
            # safe: no rank still counts in the last phase or already in this one
            mesh.reset_count(COUNTER)
        shares = mesh.gather_over_dp(self._micro_batches)
        # Ends of shares may be smaller; taking them last shortens the final wait.
        places = sorted(
            chain.from_iterable(
                ((i, owner) for i in range(len(p))) for owner, p in enumerate(shares)
            )
        )
        self._micro_batches = [shares[owner][i] for i, owner in places]
        self._own = [number for number, (_, owner) in enumerate(places) if owner == mesh.dp_rank]

    def __iter__(self) -> Iterator[MicroBatch]:
        if not self._shared:
            yield from self._micro_batches
            return
        while (number := self._mesh.count_by_block(COUNTER) - 1) < len(self._micro_batches):
            self._taken.append(number)
            yield self._micro_batches[number]

    def close(self) -> None:
        """Stop taking micro-batches, on the other blocks too: advance the counter past the end."""
        if self._shared and self._mesh.is_model_parallel_rank_0:
            self._mesh.count(COUNTER, len(self._micro_batches))

    def to_owners(self, results: Sequence[T]) -> list[T]:
        """Return the results of this rank's own share, in order, wherever they were generated.

        A collective call over the data-parallel ranks, after every micro-batch was taken. `results`
        are picklable, one per micro-batch that this block took, in order. Only results that another
        rank owns are sent.
        """
        if not self._shared:
            return list(results)
        by_number = dict(zip(self._taken, results, strict=True))
        moved = {number: result for number, result in by_number.items() if number not in self._own}
        for part in self._mesh.gather_over_dp(moved):
            by_number |= part
        return [by_number[number] for number in self._own]
