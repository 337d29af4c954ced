"""Which block of ranks generates which micro-batch: each block its own, or whichever is free the next one."""

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
    """The micro-batches of one generation phase. All ranks make one together; iterating gives those of this block."""

    def __iter__(self) -> Iterator[MicroBatch]: ...

    def close(self) -> None:
        """This block takes no more; a block that leaves before the end keeps the others from doing its work."""
        ...

    def to_owners(self, results: Sequence[T]) -> list[T]:
        """One result for each micro-batch of this rank's own share, in order, wherever it was generated.

        A collective call over the data-parallel ranks, once every micro-batch was taken.

        Args:
            results: picklable, one for each micro-batch that this block took, in order.
        """
        ...


class FixedSplit:
    """Each block takes its own share.

    Args:
        share: of this rank.
    """

    def __init__(self, share: Sequence[MicroBatch]):
        self._share = share

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self._share)

    def close(self) -> None:
        """Nobody else takes them."""

    def to_owners(self, results: Sequence[T]) -> list[T]:
        """They are there."""
        return list(results)


class WorkQueue:
    """The next micro-batch goes to the block that asks first; a collective call.

    The shares are cut as they are without a queue, so that each micro-batch gives the same numbers wherever it is
    generated.

    Args:
        mesh: counts what was taken.
        share: of this rank; all ranks of a block have the same one.
    """

    def __init__(self, mesh: Mesh, share: Sequence[MicroBatch]):
        self._mesh = mesh
        if mesh.is_main:
            mesh.reset_count(COUNTER)  # nobody counts any more in an earlier phase, nor yet in this one
        shares = mesh.gather_over_dp(list(share))
        # The ends of shares, which may have fewer prompts, come last: then less is waited for.
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
        """As if all of them were taken."""
        if self._mesh.is_block_leader:
            self._mesh.count(COUNTER, len(self._micro_batches))

    def to_owners(self, results: Sequence[T]) -> list[T]:
        """See `Work.to_owners`; only what another rank owns is sent."""
        found = dict(zip(self._taken, results, strict=True))
        moved = {number: result for number, result in found.items() if number not in self._own}
        for part in self._mesh.gather_over_dp(moved):
            found |= part
        return [found[number] for number in self._own]
