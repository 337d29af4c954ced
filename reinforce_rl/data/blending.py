"""Weighted blending: an epoch that draws from each file as often as its weight says, in place of each prompt once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reinforce_rl.errors import ConfigError


@dataclass(frozen=True)
class Blend:
    """How much of an epoch each file gives.

    An epoch has as many draws as the files have prompts. Each file is walked through in its own shuffled order, no
    prompt twice before all of the file had their turn, then in another order, on through the epochs. Draws of the
    files alternate evenly, so that every batch has each file's share, and not only the epoch.

    A prompt that comes again does so under another number, `index + pass * prompts`: a small file of a large weight
    may come twice in a batch, and the two must be two groups of samples.

    Attributes:
        sizes: prompts of each file, in the data set's order.
        weights: of each file, above 0; their sum is of no importance.

    Raises:
        ConfigError: a weight is not above 0, or so small that its file is never drawn; a file without prompts.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        faults = weight_faults(self.weights)
        if not faults:
            told = "model.data.data_prefix.train gives a weight to file number"
            faults += [f"{told} {i}, which has no prompt" for i, size in enumerate(self.sizes, 1) if size == 0]
            faults += [
                f"{told} {i}, {weight} of {math.fsum(self.weights)}, that is less than one draw in an epoch of "
                f"{self.num_prompts}; raise it or leave the file out"
                for i, (weight, draws) in enumerate(zip(self.weights, self.draws, strict=True), 1)
                if draws == 0
            ]
        if faults:
            raise ConfigError(faults)

    @property
    def num_prompts(self) -> int:
        """Of all files, and draws of an epoch."""
        return sum(self.sizes)

    @property
    def draws(self) -> tuple[int, ...]:
        """Draws of each file in an epoch, every epoch the same: by largest remainder."""
        total = math.fsum(self.weights)
        shares = [self.num_prompts * weight / total for weight in self.weights]
        counts = [math.floor(share) for share in shares]
        by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
        for i in by_remainder[: self.num_prompts - sum(counts)]:
            counts[i] += 1
        return tuple(counts)

    def epoch(self, seed: int, epoch: int, *, shuffle: bool) -> list[int]:
        """The numbers of an epoch's draws, in order; `number % num_prompts` is the prompt's index in the data set.

        Args:
            seed: of the order within files.
            epoch: from 0.
            shuffle: False walks through each file from its first prompt to its last.
        """
        draws, numbers, places = self.draws, [], []
        for file, (size, count) in enumerate(zip(self.sizes, draws, strict=True)):
            turns = np.arange(epoch * count, (epoch + 1) * count)
            passes, within = turns // size, turns % size
            for pass_ in np.unique(passes).tolist():
                order = np.arange(size)
                if shuffle:
                    order = np.random.default_rng([seed, file, pass_]).permutation(size)
                first = sum(self.sizes[:file])
                numbers.append(first + order[within[passes == pass_]] + pass_ * self.num_prompts)
            places.append((np.arange(count) + 0.5) / count)
        # Stable: where two files want the same place, the one that is named first has it.
        return np.concatenate(numbers)[np.argsort(np.concatenate(places), kind="stable")].tolist()

    def __str__(self) -> str:
        parts = [
            f"file {i} gives {draws} ({draws / size:.2f} times its {size} prompts)"
            for i, (size, draws) in enumerate(zip(self.sizes, self.draws, strict=True), 1)
        ]
        return f"Weighted blending: of an epoch's {self.num_prompts} draws, {', '.join(parts)}."


def weight_faults(weights: Sequence[float]) -> list[str]:
    """Weights that mean nothing."""
    return [
        f"model.data.data_prefix.train has the weight {weight}; expected a number above 0"
        for weight in weights
        if not (math.isfinite(weight) and weight > 0)
    ]
