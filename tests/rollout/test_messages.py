"""A result must match the request that it names."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.errors import RewardServerError
from reinforce_rl.rewards.base import Rewards
from reinforce_rl.rollout.messages import (
    GenerationRequest,
    GenerationResult,
    ResultBounds,
    fault_of_result,
)

NEWEST = 5
PROMPTS = (Prompt(3, "hi", (5, 6)), Prompt(9, "", ()))
REQUEST = GenerationRequest(number=7, step=4, version=3, prompts=PROMPTS, num_samples=2, seed=1)
BOUNDS = ResultBounds(vocab_size=12, max_length=3)
ALLOW_NEWER = replace(REQUEST, allow_newer=True)


def completions_of(versions: torch.Tensor | None) -> Completions:
    """Four responses of 3, 0, 1 and 2 tokens; versions of padding are ignored."""
    reasons = ("stop", "length", "outside_vocabulary", "stop")
    tokens = torch.arange(12).reshape(4, 3)
    return Completions(tokens, torch.tensor([3, 0, 1, 2]), reasons, weight_versions=versions)


def result_of(
    versions: torch.Tensor | None, tokens: torch.Tensor | None = None, **changes: Any
) -> GenerationResult:
    completions = completions_of(versions)
    if tokens is not None:
        completions = replace(completions, tokens=tokens)
    return replace(GenerationResult(7, (3, 9), completions, rewards_of()), **changes)


def rewards_of(*sources: str) -> Rewards:
    values = torch.ones(4)
    return Rewards(values, torch.zeros(4).int(), dict.fromkeys(sources, values))


def with_log_probs(log_probs: torch.Tensor) -> GenerationResult:
    return result_of(None, completions=replace(completions_of(all_of(3)), log_probs=log_probs))


def all_of(version: int) -> torch.Tensor:
    return torch.full((4, 3), version)


def rows(*versions: list[float]) -> torch.Tensor:
    return torch.tensor(versions)


def with_history(history: list[int], policy: list[int] | None) -> GenerationResult:
    result = result_of(all_of(3))
    lengths = torch.full((4,), 3)
    masks = [
        None if mask is None else torch.tensor(mask, dtype=torch.bool).expand(4, 3)
        for mask in (history, policy)
    ]
    completions = replace(
        result.completions, lengths=lengths, history_mask=masks[0], policy_mask=masks[1]
    )
    return replace(result, completions=completions)


PADDED = rows([3, 3, 3], [9, 9, 9], [3, 0, 0], [3, 3, 8])
BACKWARDS = rows([3, 5, 4], [9, 9, 9], [5, 0, 0], [3, 3, 8])
NAN_IN_PADDING = rows([0, 0, 0], [0, 0, 0], [0, 0, math.nan], [0, 0, 0])
SEVERAL = rows([3, 4, 5], [9, 9, 9], [5, 0, 0], [3, 3, 8])
RIGHT = {
    "the request's weights": (REQUEST, result_of(all_of(3))),
    "padding of any version": (REQUEST, result_of(PADDED)),
    "newer weights, where they are allowed": (ALLOW_NEWER, result_of(all_of(NEWEST))),
    "weights of several versions, likewise": (ALLOW_NEWER, result_of(SEVERAL)),
    "no scores, for which there is a reason": (
        REQUEST,
        result_of(all_of(3), rewards=None, failure=RewardServerError("a")),
    ),
    "log-probs of at most 0": (REQUEST, with_log_probs(torch.linspace(-9, 0, 12).reshape(4, 3))),
    "older weights, which are dropped later": (ALLOW_NEWER, result_of(all_of(0))),
    "a rewritten history": (REQUEST, with_history([0, 1, 0], [1, 0, 1])),
}
WRONG = {
    "other prompts": (REQUEST, result_of(all_of(3), prompt_ids=(9, 3))),
    "too few responses": (replace(REQUEST, num_samples=3), result_of(all_of(3))),
    "no versions": (REQUEST, result_of(None)),
    "the weights before": (REQUEST, result_of(all_of(2))),
    "the weights after": (REQUEST, result_of(all_of(4))),
    "one token of the weights after": (
        REQUEST,
        result_of(rows([3, 3, 3], [3, 3, 3], [3, 3, 3], [3, 4, 3])),
    ),
    "one token of the weights before": (
        REQUEST,
        result_of(rows([3, 3, 3], [3, 3, 3], [2, 3, 3], [3, 3, 3])),
    ),
    "weights that nobody has": (ALLOW_NEWER, result_of(all_of(NEWEST + 1))),
    "an id beyond the vocabulary": (REQUEST, result_of(all_of(3), tokens=torch.full((4, 3), 12))),
    "an id below 0": (REQUEST, result_of(all_of(3), tokens=torch.full((4, 3), -1))),
    "neither scores nor a failure": (REQUEST, result_of(all_of(3), rewards=None)),
    "older weights after newer ones": (ALLOW_NEWER, result_of(BACKWARDS)),
    "a log-prob above 0": (REQUEST, with_log_probs(torch.full((4, 3), 0.5))),
    "a log-prob that is no number": (REQUEST, with_log_probs(torch.full((4, 3), math.nan))),
    "a log-prob that is not finite": (REQUEST, with_log_probs(torch.full((4, 3), -math.inf))),
    "no number among the padding": (REQUEST, with_log_probs(NAN_IN_PADDING)),
    "a version below 0": (ALLOW_NEWER, result_of(all_of(-1))),
    "a rewritten history that the policy wrote": (REQUEST, with_history([0, 1, 0], [1, 1, 0])),
    "a rewritten history without an environment": (REQUEST, with_history([0, 1, 0], None)),
}


@pytest.mark.parametrize(("asked", "result"), RIGHT.values(), ids=RIGHT)
def test_an_answer_to_the_work_has_no_fault(asked, result):
    assert fault_of_result(asked, result, newest=NEWEST, bounds=BOUNDS) == ""


@pytest.mark.parametrize(("asked", "result"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_the_answer_is_said(asked, result):
    assert fault_of_result(asked, result, newest=NEWEST, bounds=BOUNDS) != ""


def fault_within(bounds: ResultBounds, result: GenerationResult) -> str:
    return fault_of_result(REQUEST, result, newest=NEWEST, bounds=bounds)


@pytest.mark.parametrize(("max_length", "is_right"), [(3, True), (2, False)])
def test_no_response_is_longer_than_may_be_drawn(max_length, is_right):
    fault = fault_within(ResultBounds(12, max_length), result_of(all_of(3)))
    assert fault == ("" if is_right else "it has a response of 3 tokens, expected at most 2")


@pytest.mark.parametrize("needs_log_probs", [True, False])
def test_an_engine_that_reports_log_probs_reports_them_always(needs_log_probs):
    fault = fault_within(ResultBounds(12, 3, needs_log_probs=needs_log_probs), result_of(all_of(3)))
    assert fault == ("it has no log-probs" if needs_log_probs else "")


@pytest.mark.parametrize(
    ("expected", "sources", "fault"),
    [
        (None, (), ""),
        (None, ("helpful", "brief"), ""),
        ((), (), ""),
        ((), ("helpful",), "it has scores of the source 'helpful', expected none by name"),
        (("a", "b"), ("b", "a", "a/helpful"), ""),
        (("a", "b"), ("a", "b", "c"), "it has scores of the source 'c', expected a, b"),
        (("a", "b"), ("a", "b", "c/a"), "it has scores of the source 'c/a', expected a, b"),
        (("a", "b"), ("a", "a/b"), "it has no scores of the source 'b'"),
    ],
)
def test_scores_are_of_the_configured_sources(expected, sources, fault):
    result = result_of(all_of(3), rewards=rewards_of(*sources))
    assert fault_within(ResultBounds(12, 3, sources=expected), result) == fault
