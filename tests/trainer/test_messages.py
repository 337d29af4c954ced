"""A result has to be the answer to the work that it names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.errors import GenerationError
from reinforce_rl.trainer.messages import Result, Work, fault_of_result

NEWEST = 5
PROMPTS = (Prompt(3, "hi", (5, 6)), Prompt(9, "", ()))
WORK = Work(number=7, step=4, version=3, prompts=PROMPTS, num_samples=2, seed=1)
OR_NEWER = replace(WORK, or_newer=True)


def completions_of(versions: torch.Tensor | None) -> Completions:
    """Four responses of 3, 0, 1 and 2 tokens; the rest of a row is padding, whose version counts for nothing."""
    reasons = ("stop", "length", "outside_vocabulary", "stop")
    tokens = torch.arange(12).reshape(4, 3)
    return Completions(tokens, torch.tensor([3, 0, 1, 2]), reasons, weight_versions=versions)


def result_of(versions: torch.Tensor | None, tokens: torch.Tensor | None = None, **changes: Any) -> Result:
    completions = completions_of(versions)
    if tokens is not None:
        completions = replace(completions, tokens=tokens)
    return replace(Result(7, (3, 9), completions), **changes)


def all_of(version: int) -> torch.Tensor:
    return torch.full((4, 3), version)


def rows(*versions: list[int]) -> torch.Tensor:
    return torch.tensor(versions)


PADDED = rows([3, 3, 3], [9, 9, 9], [3, 0, 0], [3, 3, 8])
SEVERAL = rows([3, 4, 5], [9, 9, 9], [5, 0, 0], [3, 3, 8])
RIGHT = {
    "the work's weights": (WORK, result_of(all_of(3))),
    "padding of any version": (WORK, result_of(PADDED)),
    "a failure": (WORK, Result(7, (3, 9), failure=GenerationError("a"))),
    "newer weights, where they are allowed": (OR_NEWER, result_of(all_of(NEWEST))),
    "weights of several versions, likewise": (OR_NEWER, result_of(SEVERAL)),
    "older weights, which are dropped later": (OR_NEWER, result_of(all_of(0))),
}
WRONG = {
    "other prompts": (WORK, result_of(all_of(3), prompt_ids=(9, 3))),
    "neither responses nor a failure": (WORK, result_of(None, completions=None)),
    "too few responses": (replace(WORK, num_samples=3), result_of(all_of(3))),
    "no versions": (WORK, result_of(None)),
    "the weights before": (WORK, result_of(all_of(2))),
    "the weights after": (WORK, result_of(all_of(4))),
    "one token of the weights after": (WORK, result_of(rows([3, 3, 3], [3, 3, 3], [3, 3, 3], [3, 4, 3]))),
    "one token of the weights before": (WORK, result_of(rows([3, 3, 3], [3, 3, 3], [2, 3, 3], [3, 3, 3]))),
    "weights that nobody has": (OR_NEWER, result_of(all_of(NEWEST + 1))),
    "an id beyond the vocabulary": (WORK, result_of(all_of(3), tokens=torch.full((4, 3), 12))),
    "an id below 0": (WORK, result_of(all_of(3), tokens=torch.full((4, 3), -1))),
    "a version below 0": (OR_NEWER, result_of(all_of(-1))),
}


@pytest.mark.parametrize(("work", "result"), RIGHT.values(), ids=RIGHT)
def test_an_answer_to_the_work_has_no_fault(work, result):
    assert fault_of_result(work, result, newest=NEWEST, vocab_size=12) == ""


@pytest.mark.parametrize(("work", "result"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_the_answer_is_said(work, result):
    assert fault_of_result(work, result, newest=NEWEST, vocab_size=12) != ""
