"""Order of prompts over epochs, uniform or blended by file weights, in global batches, and their split over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from reinforce_rl.data.jsonl import weight_faults
from reinforce_rl.errors import CheckpointError, ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Blend:
    """Weighted blending of files: how many of an epoch's draws each file gives.

    An epoch has as many draws as the files have prompts. Each file is walked through in its own shuffled order and
    reshuffled when exhausted, across epochs. Draws interleave evenly, so that every batch has each file's share. A
    repeated prompt gets the number `index + pass * prompts`, so that its samples form two groups even within a batch.

    Raises:
        ConfigError: a weight is not above 0, or too small for a single draw; a file without prompts.
    """

    sizes: tuple[int, ...]  # prompts of each file, in the data set's order
    weights: tuple[float, ...]  # one per file, above 0; need not sum to 1

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
        return sum(self.sizes)

    @property
    def draws(self) -> tuple[int, ...]:
        """Draws of each file per epoch, by largest remainder."""
        total = math.fsum(self.weights)
        shares = [self.num_prompts * weight / total for weight in self.weights]
        counts = [math.floor(share) for share in shares]
        by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
        for i in by_remainder[: self.num_prompts - sum(counts)]:
            counts[i] += 1
        return tuple(counts)

    def epoch(self, seed: int, epoch: int, *, shuffle: bool) -> list[int]:
        """Return the numbers of an epoch (from 0) in order; `number % num_prompts` is the index in the data set."""
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
        # Stable sort: ties go to the file named first.
        return np.concatenate(numbers)[np.argsort(np.concatenate(places), kind="stable")].tolist()

    def __str__(self) -> str:
        parts = [
            f"file {i} gives {draws} ({draws / size:.2f} times its {size} prompts)"
            for i, (size, draws) in enumerate(zip(self.sizes, self.draws, strict=True), 1)
        ]
        return f"Weighted blending: of an epoch's {self.num_prompts} draws, {', '.join(parts)}."


class PromptSampler:
    """Draw every prompt once per epoch, in global batches that are the same on all data-parallel ranks.

    An epoch's permutation depends only on (seed, epoch). With a blend, an epoch has as many draws, split by weight;
    see `Blend`, also for the numbers of repeated prompts. The last batch of an epoch may be smaller and is never
    filled up.

    Args:
        prompts_per_step: prompts of a global batch, over all ranks.
        drop_last: drop the smaller last batch of an epoch.
        max_epochs: None never ends.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        num_prompts: int,
        prompts_per_step: int,
        *,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
        max_epochs: int | None = None,
        blend: Blend | None = None,
    ):
        faults = []
        if num_prompts < 1:
            faults.append(f"num_prompts is {num_prompts}; expected at least 1")
        if prompts_per_step < 1:
            faults.append(f"prompts_per_step is {prompts_per_step}; expected at least 1")
        elif drop_last and prompts_per_step > num_prompts:
            faults.append(
                f"prompts_per_step is {prompts_per_step} with drop_last, but the data set has {num_prompts} prompts, "
                "so that no batch would be left; lower prompts_per_step or set drop_last=false"
            )
        if seed < 0:
            faults.append(f"seed is {seed}; expected at least 0")
        if blend is not None and blend.num_prompts != num_prompts:
            faults.append(f"num_prompts is {num_prompts}, and the files of the blend have {blend.num_prompts}")
        if max_epochs is not None and max_epochs < 1:
            faults.append(f"max_epochs is {max_epochs}; expected at least 1, or null for no limit")
        if faults:
            raise ConfigError(faults)
        self.num_prompts, self.prompts_per_step = num_prompts, prompts_per_step
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.max_epochs, self.blend = max_epochs, blend
        self._epoch = self._position = self._consumed = 0
        self._order: tuple[int, list[int]] | None = None  # (epoch, permutation), made when first needed

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        return self._position

    @property
    def consumed_prompts(self) -> int:
        """Prompts drawn since the first step, over all epochs and resumes."""
        return self._consumed

    @property
    def steps_per_epoch(self) -> int:
        return len(self.batch_sizes)

    @property
    def batch_sizes(self) -> list[int]:
        """Prompts of each batch of a whole epoch."""
        full, rest = divmod(self.num_prompts, self.prompts_per_step)
        return [self.prompts_per_step] * full + ([rest] if rest and not self.drop_last else [])

    @property
    def finished(self) -> bool:
        return self.max_epochs is not None and self._epoch >= self.max_epochs

    def next_batch(self) -> list[int]:
        """Return the next global batch: indices, or a blend's numbers; StopIteration once `finished`."""
        if self.finished:
            raise StopIteration
        if self._order is None or self._order[0] != self._epoch:
            self._order = (self._epoch, self._permutation(self._epoch))
        batch = self._order[1][self._position : self._position + self.prompts_per_step]
        self._position += len(batch)
        self._consumed += len(batch)
        self._end_epoch_if_done()
        return batch

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        return self.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON-ready values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "consumed_prompts": self._consumed,
            **self._identity(),
        }

    def _identity(self) -> dict[str, Any]:
        identity = {"num_prompts": self.num_prompts, "seed": self.seed, "shuffle": self.shuffle}
        if self.blend is None:
            return identity
        return {**identity, "file_sizes": list(self.blend.sizes), "weights": list(self.blend.weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved position. `prompts_per_step` may have changed, as positions count prompts.

        Raises:
            CheckpointError: another data set size, seed, order or blend, or no sampler state.
        """
        missing = [key for key in self.state_dict() if key not in state and key not in ("file_sizes", "weights")]
        if missing:
            raise CheckpointError(
                f"the saved sampler state lacks {', '.join(missing)}; it was not saved by this sampler"
            )
        own: dict[str, Any] = {"file_sizes": None, "weights": None, **self._identity()}
        differences = [
            f"{key} was {state.get(key)}, now is {value}" for key, value in own.items() if state.get(key) != value
        ]
        if differences:
            raise CheckpointError(
                f"the saved sampler state is of another run: {'; '.join(differences)}. Its position means nothing in "
                "this order of prompts: set these back to what they were, or start a new run in another folder"
            )
        epoch, position, consumed = state["epoch"], state["position"], state["consumed_prompts"]
        valid = all(isinstance(value, int) and value >= 0 for value in (epoch, position, consumed))
        if not valid or position >= self.num_prompts:
            raise CheckpointError(
                f"the saved sampler state has epoch {epoch!r}, position {position!r} and consumed_prompts {consumed!r}"
                f"; expected whole numbers from 0, the position below {self.num_prompts}"
            )
        self._epoch, self._position, self._consumed = epoch, position, consumed
        self._end_epoch_if_done()

    def _end_epoch_if_done(self) -> None:
        left = self.num_prompts - self._position
        if left == 0 or (self.drop_last and left < self.prompts_per_step):
            self._epoch += 1
            self._position = 0

    def _permutation(self, epoch: int) -> list[int]:
        if self.blend is not None:
            return self.blend.epoch(self.seed, epoch, shuffle=self.shuffle)
        if not self.shuffle:
            return list(range(self.num_prompts))
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_prompts).tolist()


def shard(indices: Sequence[T], rank: int, world_size: int) -> list[T]:
    """Return a rank's contiguous part of a global batch; sizes differ by at most one and may be 0.

    Raises:
        ConfigError: the rank is not within the world size.
    """
    if not 0 <= rank < world_size:
        raise ConfigError([f"data-parallel rank is {rank}; expected 0 to {world_size - 1}"])
    count = len(indices)
    return list(indices[count * rank // world_size : count * (rank + 1) // world_size])
