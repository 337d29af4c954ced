"""Order of prompts over epochs, uniform or blended by file weights, and their split over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import numpy as np

from reinforce_rl.errors import CheckpointError, ConfigError, Fault

T = TypeVar("T")
# More than the steps of a run, so that the step seeds of two seeds never coincide.
_SEED_STRIDE = 1_000_003


def step_seed(seed: int, step: int) -> int:
    """Return the seed of a step's random draws, such as the noise of its samples.

    All validations use step 0, so that only the weights differ between them.
    """
    return seed * _SEED_STRIDE + step


@dataclass(frozen=True)
class Blend:
    """Weighted blending of files: the number of draws of each file in an epoch.

    An epoch has as many draws as the files have prompts. Each file is drawn from in its own
    shuffled order and reshuffled when exhausted, across epochs. Draws interleave evenly, so that
    every batch has each file's share. A repeated prompt gets the number `index + pass * prompts`,
    so that its samples form two groups even within a batch.

    Raises:
        ConfigError: a weight is too small for a single draw, or a file has no prompts.
    """

    sizes: tuple[int, ...]  # prompts of each file, in the data set's order
    weights: tuple[float, ...]  # one per file, above 0; need not sum to 1

    def __post_init__(self) -> None:
        key = "model.data.data_prefix.train"
        faults: list[Fault] = []
        files = zip(self.sizes, self.weights, self.draws, strict=True)
        for number, (size, weight, draws) in enumerate(files, 1):
            if size == 0:
                sentence = (
                    f"{key} gives file number {number} a weight, but it has no prompts; omit it"
                )
                faults.append(Fault(sentence, key="data.weights.file_without_prompts"))
            elif draws == 0:
                sentence = (
                    f"{key} gives file number {number} the weight {weight} of "
                    f"{math.fsum(self.weights)}, which is less than one draw in an epoch of "
                    f"{self.num_prompts}; raise it or leave the file out"
                )
                faults.append(Fault(sentence, key="data.weights.too_small"))
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
        """Return the numbers of an epoch (from 0) in order.

        `number % num_prompts` is the index in the data set.
        """
        draws = self.draws
        numbers = []
        places = []
        for file, (size, count) in enumerate(zip(self.sizes, draws, strict=True)):
            turns = np.arange(epoch * count, (epoch + 1) * count)
            passes = turns // size
            within = turns % size
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
        files = enumerate(zip(self.sizes, self.draws, strict=True), 1)
        parts = [
            f"file {i} gives {draws} ({draws / size:.2f} times its {size} prompts)"
            for i, (size, draws) in files
        ]
        return f"Weighted blending: of an epoch's {self.num_prompts} draws, {', '.join(parts)}."


@dataclass(eq=False)
class PromptSampler:
    """Draw every prompt once per epoch, in global batches that are the same on all ranks.

    An epoch's permutation depends only on (seed, epoch). With a blend, an epoch has as many draws,
    split by weight; `Blend` describes the numbers of repeated prompts. The last batch of an epoch
    may be smaller and is never filled up.
    """

    num_prompts: int
    prompts_per_step: int  # of a global batch, over all ranks
    _: KW_ONLY
    seed: int
    shuffle: bool = True
    max_epochs: int | None = None  # None never ends
    blend: Blend | None = None
    epoch: int = 0  # of the next batch
    position: int = 0  # of the next batch in the epoch
    consumed_prompts: int = 0  # since the first step, over all epochs and resumes
    _order: tuple[int, list[int]] | None = None  # (epoch, permutation), made when first needed

    @property
    def batch_sizes(self) -> list[int]:
        """Prompts of each batch of a whole epoch."""
        full, rest = divmod(self.num_prompts, self.prompts_per_step)
        sizes = [self.prompts_per_step] * full
        if rest > 0:
            sizes.append(rest)
        return sizes

    @property
    def steps_per_epoch(self) -> int:
        return len(self.batch_sizes)

    @property
    def finished(self) -> bool:
        return self.max_epochs is not None and self.epoch >= self.max_epochs

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        """Return the next global batch: indices, or a blend's numbers."""
        if self.finished:
            raise StopIteration
        if self._order is None or self._order[0] != self.epoch:
            self._order = (self.epoch, self._permutation())
        batch = self._order[1][self.position : self.position + self.prompts_per_step]
        self.position += len(batch)
        self.consumed_prompts += len(batch)
        if self.position == self.num_prompts:
            self.epoch = self.epoch + 1
            self.position = 0
        return batch

    def _permutation(self) -> list[int]:
        if self.blend is not None:
            return self.blend.epoch(self.seed, self.epoch, shuffle=self.shuffle)
        if not self.shuffle:
            return list(range(self.num_prompts))
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.num_prompts).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the settings that give it a meaning, as JSON-ready values."""
        position = {
            "epoch": self.epoch,
            "position": self.position,
            "consumed_prompts": self.consumed_prompts,
        }
        state = {
            **position,
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
        if self.blend is None:
            return state
        return {**state, "file_sizes": list(self.blend.sizes), "weights": list(self.blend.weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved position.

        `prompts_per_step` may have changed, as positions count prompts.

        Raises:
            CheckpointError: the state has another data set size, seed, order or blend, or is not
                the state of a sampler.
        """
        names = ("epoch", "position", "consumed_prompts")
        current = {"file_sizes": None, "weights": None, **self.state_dict()}
        differences = [
            f"{key} was {state.get(key)}, now is {value}"
            for key, value in current.items()
            if key not in names and state.get(key) != value
        ]
        if differences:
            raise CheckpointError(
                f"the saved sampler state belongs to another run: {'; '.join(differences)}. Its "
                "position does not apply to this order of prompts: restore these settings, or "
                "start a new run in another folder",
                key="checkpoint.sampler.other_run",
            )
        position = {name: state.get(name) for name in names}
        whole = [value for value in position.values() if isinstance(value, int) and value >= 0]
        if len(whole) < len(names) or whole[1] >= self.num_prompts:
            raise CheckpointError(
                f"the saved sampler state has {position}; expected whole numbers from 0, position "
                f"below {self.num_prompts}. Resume from another checkpoint, or start a new run",
                key="checkpoint.sampler.invalid",
            )
        self.epoch, self.position, self.consumed_prompts = whole


def shard(indices: Sequence[T], rank: int, world_size: int) -> list[T]:
    """Return a rank's contiguous part of a global batch.

    Sizes differ by at most one and may be 0.
    """
    count = len(indices)
    return list(indices[count * rank // world_size : count * (rank + 1) // world_size])
