"""Divides a rank's prompts into batches for generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reinforce_rl.data.batches import Prompt


class DefaultBatchIterator:
    """Yields consecutive prompts in batches of `micro_batch_size`.

    In a validation the batches have `val_micro_batch_size` prompts.
    """

    def __init__(
        self,
        micro_batch_size: int,
        val_micro_batch_size: int,
        prompts: Sequence[Prompt],
        validation: bool,
    ):
        self._prompts = prompts
        self._size = val_micro_batch_size if validation else micro_batch_size

    def __iter__(self) -> Iterator[Sequence[Prompt]]:
        for start in range(0, len(self._prompts), self._size):
            yield self._prompts[start : start + self._size]
