"""Assign micro-batches to blocks of ranks: a fixed split, or a shared queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Protocol, TypeVar

from reinforce_rl.data.batches import Prompt

if TYPE_CHECKING:
    from reinforce_rl.megatron.mesh import Mesh

T = TypeVar("T")
MicroBatch = Sequence[Prompt]
COUNTER = "reinforce_rl/micro_batches_taken"


class Work(Protocol):
    """Micro-batches of one generation phase, created by all ranks together; iterating yields this block's."""

    def __iter__(self) -> Iterator[MicroBatch]: ...

    def close(self) -> None:
        """Stop taking micro-batches. Leaving early also keeps other blocks from taking this block's work."""
        ...

    def to_owners(self, results: Sequence[T]) -> list[T]:
        """Return the results of this rank's own share, in order, wherever they were generated.

        A collective call over the data-parallel ranks, after every micro-batch was taken. `results` are picklable, one
        per micro-batch that this block took, in order.
        """
        ...


class FixedSplit:
    """Each block takes its own share."""

    def __init__(self, share: Sequence[MicroBatch]):
        self._share = share

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self._share)

    def close(self) -> None:
        """Do nothing: no other block takes this share."""

    def to_owners(self, results: Sequence[T]) -> list[T]:
        return list(results)


class WorkQueue:
    """Work queue over all blocks, first come, first served; a collective call.

    Micro-batches are cut as without a queue, so that each gives the same numbers wherever it is generated. `share` is
    this rank's, the same on all ranks of a block.
    """

    def __init__(self, mesh: Mesh, share: Sequence[MicroBatch]):
        self._mesh = mesh
        if mesh.is_main:
            mesh.reset_count(COUNTER)  # safe: no rank still counts in the last phase or already in this one
        shares = mesh.gather_over_dp(list(share))
        # Ends of shares may be smaller; taking them last shortens the final wait.
        owners = chain.from_iterable(((i, owner) for i in range(len(part))) for owner, part in enumerate(shares))
        places = sorted(owners)
        self._micro_batches: list[MicroBatch] = [shares[owner][i] for i, owner in places]
        self._own = [number for number, (_, owner) in enumerate(places) if owner == mesh.dp_rank]
        self._taken: list[int] = []

    def __iter__(self) -> Iterator[MicroBatch]:
        while (number := self._mesh.count_by_block(COUNTER) - 1) < len(self._micro_batches):
            self._taken.append(number)
            yield self._micro_batches[number]

    def close(self) -> None:
        """Advance the counter past the end."""
        if self._mesh.is_block_leader:
            self._mesh.count(COUNTER, len(self._micro_batches))

    def to_owners(self, results: Sequence[T]) -> list[T]:
        """See `Work.to_owners`; sends only results that another rank owns."""
        found = dict(zip(self._taken, results, strict=True))
        moved = {number: result for number, result in found.items() if number not in self._own}
        for part in self._mesh.gather_over_dp(moved):
            found |= part
        return [found[number] for number in self._own]
