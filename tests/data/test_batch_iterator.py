"""Batches of prompts that are generated together."""

from __future__ import annotations

import pytest

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.prompts import DefaultBatchIterator

PROMPTS = [Prompt(number, f"prompt {number}", (number,)) for number in range(5)]


@pytest.mark.parametrize(
    ("validation", "sizes"),
    [(False, [2, 2, 1]), (True, [3, 2])],
    ids=["training", "validation"],
)
def test_every_prompt_comes_once_in_order(validation: bool, sizes: list[int]) -> None:
    batches = list(DefaultBatchIterator(2, 3, PROMPTS, validation))
    assert [len(batch) for batch in batches] == sizes
    assert [prompt for batch in batches for prompt in batch] == PROMPTS


def test_a_rank_without_prompts_generates_nothing() -> None:
    assert list(DefaultBatchIterator(2, 2, [], False)) == []
