"""How the sequences of one call are cut into forward passes, and shared among copies of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from reinforce_rl.actor.micro_batches import micro_batches


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass.

    Attributes:
        rows: int64 [n], where its sequences stand in the call.
        tokens: int64 [n, s], right-padded with 0.
        lengths: int64 [n], tokens of each sequence.
    """

    rows: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class Batching:
    """What bounds a forward pass.

    Attributes:
        micro_batch_size: sequences, where `tokens_per_micro_batch` is None.
        tokens_per_micro_batch: tokens, padding included, instead of a number of sequences.
        pad_to_multiple: sequences are padded to a multiple of so many tokens, so that the passes have few shapes.
    """

    micro_batch_size: int = 8
    tokens_per_micro_batch: int | None = None
    pad_to_multiple: int = 1

    def faults(self, section: str = "inference") -> list[str]:
        """One sentence for each value that cannot work; keys are named below `section`."""
        values = {
            "micro_batch_size": self.micro_batch_size,
            "tokens_per_micro_batch": self.tokens_per_micro_batch,
            "pad_to_multiple": self.pad_to_multiple,
        }
        return [
            f"{section}.{key} is {value}; expected at least 1"
            for key, value in values.items()
            if value is not None and value < 1
        ]

    def plan(self, sequences: Sequence[Sequence[int]]) -> list[MicroBatch]:
        """Passes over sequences of like length, longest first. They follow from the list's content alone.

        Args:
            sequences: N lists of token ids, none empty.
        """
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        padded = -(-lengths // self.pad_to_multiple) * self.pad_to_multiple
        groups = micro_batches(torch.from_numpy(padded), self.micro_batch_size, self.tokens_per_micro_batch)
        return [_fill(sequences, rows.numpy(), lengths, int(padded[rows].max())) for rows in groups]


def share(passes: Sequence[MicroBatch], blocks: int) -> list[list[int]]:
    """Deal the passes to `blocks` copies of the model so that their tokens are about even.

    The largest first, each to the block with the least so far: at most 4/3 of the best split's time (Graham, "Bounds
    on Multiprocessing Timing Anomalies", 1969). A pass is never cut, so the scores do not depend on `blocks`.

    Returns:
        for each block the indices of its passes.
    """
    dealt: list[list[int]] = [[] for _ in range(blocks)]
    load = [0] * blocks
    for index in sorted(range(len(passes)), key=lambda i: (-passes[i].tokens.size, i)):
        block = load.index(min(load))
        dealt[block].append(index)
        load[block] += passes[index].tokens.size
    return dealt


def pack(passes: Sequence[MicroBatch]) -> np.ndarray:
    """The passes as one int64 array, to be sent; `rows` are not part of it."""
    parts: list[np.ndarray] = [np.array([len(passes)], np.int64)]
    for one in passes:
        parts += [np.array(one.tokens.shape, np.int64), one.lengths, one.tokens.reshape(-1)]
    return np.concatenate(parts)


def unpack(values: np.ndarray) -> list[MicroBatch]:
    """Inverse of `pack`; `rows` count through all passes.

    Raises:
        ValueError: it is no such array.
    """
    passes: list[MicroBatch] = []
    position = first_row = 0

    def take(count: int) -> np.ndarray:
        nonlocal position
        if count < 0 or position + count > len(values):
            raise ValueError(f"a message of {len(values)} numbers ends too early")
        position += count
        return values[position - count : position]

    for _ in range(int(take(1)[0])):
        count, width = take(2).tolist()
        lengths = take(count)
        tokens = take(count * width).reshape(count, width)
        passes.append(MicroBatch(np.arange(first_row, first_row + count), tokens, lengths))
        first_row += count
    if position != len(values):
        raise ValueError(f"a message of {len(values)} numbers should end after {position}")
    return passes


def _fill(sequences: Sequence[Sequence[int]], rows: np.ndarray, lengths: np.ndarray, width: int) -> MicroBatch:
    tokens = np.zeros((len(rows), width), np.int64)
    for row, source in enumerate(rows.tolist()):
        tokens[row, : lengths[source]] = sequences[source]
    return MicroBatch(rows, tokens, lengths[rows])
