"""Loaders: the shares of all ranks are the global batch; validation is the same in every pass."""

from __future__ import annotations

from itertools import chain

import pytest

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.loader import FixedPrompts, PromptLoader
from reinforce_rl.data.prompts import PromptDataset
from reinforce_rl.data.sampler import PromptSampler
from reinforce_rl.errors import CheckpointError, ConfigError


def dataset_of(count: int, word: str = "prompt") -> PromptDataset:
    return PromptDataset([Prompt(i, f"{word} {i}", (i + 4,)) for i in range(count)])


def loader_of(dataset: PromptDataset, rank: int = 0, size: int = 1, *, epochs: int | None = 2) -> PromptLoader:
    return PromptLoader(dataset, PromptSampler(len(dataset), 3, seed=5, max_epochs=epochs), rank, size)


def ids(batches: list[list[Prompt]]) -> list[list[int]]:
    return [[prompt.id for prompt in batch] for batch in batches]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_shares_of_all_ranks_join_to_the_global_batches(size):
    dataset = dataset_of(10)
    whole = ids(list(loader_of(dataset)))
    shares = [ids(list(loader_of(dataset, rank, size))) for rank in range(size)]
    assert [list(chain(*parts)) for parts in zip(*shares, strict=True)] == whole
    for epoch in (whole[:4], whole[4:]):
        assert sorted(chain(*epoch)) == list(range(10))
    assert len(loader_of(dataset)) == 4


@pytest.mark.parametrize("step", range(8))
def test_a_resumed_loader_goes_on_as_the_uninterrupted_one(step):
    dataset = dataset_of(10)
    loader = loader_of(dataset)
    for _ in range(step):
        next(loader)
    resumed = loader_of(dataset)
    resumed.load_state_dict(loader.state_dict())
    assert ids(list(resumed)) == ids(list(loader)) == ids(list(loader_of(dataset)))[step:]


def test_a_resume_may_change_the_number_of_ranks():
    dataset = dataset_of(10)
    loader = loader_of(dataset, 1, 2)
    next(loader)
    resumed = loader_of(dataset)
    resumed.load_state_dict(loader.state_dict())
    assert ids(list(resumed)) == ids(list(loader_of(dataset)))[1:]


def test_a_resume_on_other_data_is_refused():
    state = loader_of(dataset_of(10)).state_dict()
    with pytest.raises(CheckpointError, match="other prompts"):
        loader_of(dataset_of(10, "question")).load_state_dict(state)
    with pytest.raises(CheckpointError, match="num_prompts was 10, now is 9"):
        loader_of(dataset_of(9)).load_state_dict(state)


def test_collate_fn_makes_the_batch():
    dataset = dataset_of(4)
    loader = PromptLoader(dataset, PromptSampler(4, 3, seed=0), collate_fn=len)
    assert [next(loader), next(loader), next(loader)] == [3, 1, 3]


def test_wrong_arguments():
    with pytest.raises(ConfigError, match="for 9 prompts, the data set has 10"):
        PromptLoader(dataset_of(10), PromptSampler(9, 3, seed=0))
    with pytest.raises(ConfigError, match="rank is 2"):
        loader_of(dataset_of(10), 2, 2)
    with pytest.raises(ConfigError, match="num_val_samples is 11, but the validation data set has 10"):
        FixedPrompts(dataset_of(10), 11)
    with pytest.raises(ConfigError, match="prompts_per_batch is 0"):
        FixedPrompts(dataset_of(10), prompts_per_batch=0)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("per_batch", [None, 1, 3])
def test_fixed_prompts_are_the_first_in_order_in_every_pass(size, per_batch):
    dataset = dataset_of(10)
    loaders = [FixedPrompts(dataset, 7, rank, size, prompts_per_batch=per_batch) for rank in range(size)]
    for _ in range(2):
        shares = [ids(list(loader)) for loader in loaders]
        assert {len(share) for share in shares} == {len(loaders[0])}  # no rank waits for another in a collective
        joined = [list(chain(*parts)) for parts in zip(*shares, strict=True)]
        assert list(chain(*joined)) == list(range(7))
    assert len(loaders[0]) == {None: 1, 1: 7, 3: 3}[per_batch]


def test_fixed_prompts_take_all_without_a_number():
    assert ids(list(FixedPrompts(dataset_of(4)))) == [[0, 1, 2, 3]]
