"""Batches of prompts for one data-parallel rank: shuffled for training, fixed for validation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.prompts import PromptDataset
from reinforce_rl.data.sampler import PromptSampler, shard
from reinforce_rl.errors import CheckpointError, ConfigError

CollateFn = Callable[[list[Prompt]], Any]


class PromptLoader:
    """Yield this rank's share of the sampler's next global batch, possibly empty. Sampler states agree on all ranks.

    Raises:
        ConfigError: the sampler has another data set size, or the rank is out of range.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        sampler: PromptSampler,
        dp_rank: int = 0,
        dp_size: int = 1,
        collate_fn: CollateFn = list,
    ):
        if sampler.num_prompts != len(dataset):
            raise ConfigError([f"the sampler is for {sampler.num_prompts} prompts, the data set has {len(dataset)}"])
        shard([], dp_rank, dp_size)  # fail on a wrong rank now, not at the first step
        self.dataset, self.sampler = dataset, sampler
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.collate_fn = collate_fn

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        return self

    @property
    def finished(self) -> bool:
        return self.sampler.finished

    @property
    def prompts_per_step(self) -> int:
        """Prompts of a global batch; the last one of an epoch may have fewer."""
        return self.sampler.prompts_per_step

    def __next__(self) -> Any:
        numbers = shard(self.sampler.next_batch(), self.dp_rank, self.dp_size)
        return self.collate_fn([self._prompt(number) for number in numbers])

    def _prompt(self, number: int) -> Prompt:
        prompt = self.dataset[number % len(self.dataset)]
        return prompt if prompt.id == number else replace(prompt, id=number)  # a later pass of a blend

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state and the data's fingerprint; the same on every rank."""
        return {**self.sampler.state_dict(), "fingerprint": self.dataset.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved position.

        Raises:
            CheckpointError: the state belongs to other data, or the sampler refuses it.
        """
        found = str(state.get("fingerprint"))
        if state.get("num_prompts") == len(self.dataset) and found != self.dataset.fingerprint:
            raise CheckpointError(
                f"the checkpoint was saved on other prompts: fingerprint {found[:12]} there, "
                f"{self.dataset.fingerprint[:12]} here. Give the same files and chat template as before, "
                "or start a new run in another folder"
            )
        self.sampler.load_state_dict(state)


class FixedPrompts:
    """Yield the first `num_val_samples` prompts in batches of `prompts_per_batch`, over all ranks; None is all.

    Every rank yields the same number of batches, some of them possibly empty.

    Raises:
        ConfigError: more prompts than the data set has, or an argument out of range.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        num_val_samples: int | None = None,
        dp_rank: int = 0,
        dp_size: int = 1,
        *,
        prompts_per_batch: int | None = None,
        collate_fn: CollateFn = list,
    ):
        count = len(dataset) if num_val_samples is None else num_val_samples
        faults = []
        if not 1 <= count <= len(dataset):
            faults.append(
                f"model.reinforce.num_val_samples is {count}, but the validation data set has {len(dataset)} prompts; "
                f"expected 1 to {len(dataset)}, or null for all"
            )
        if prompts_per_batch is not None and prompts_per_batch < 1:
            faults.append(f"prompts_per_batch is {prompts_per_batch}; expected at least 1, or null for one batch")
        if faults:
            raise ConfigError(faults)
        shard([], dp_rank, dp_size)
        self.dataset, self.num_prompts = dataset, count
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.prompts_per_batch = prompts_per_batch or count
        self.collate_fn = collate_fn

    def __len__(self) -> int:
        return -(-self.num_prompts // self.prompts_per_batch)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self.num_prompts, self.prompts_per_batch):
            batch = range(start, min(start + self.prompts_per_batch, self.num_prompts))
            yield self.collate_fn([self.dataset[index] for index in shard(batch, self.dp_rank, self.dp_size)])
