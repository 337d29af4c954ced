"""Compare two generators: first differing greedy token, and log-prob gaps before it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.generation.base import Generator, SamplingParams


@dataclass(frozen=True)
class Comparison:
    """Differences between two generators on the same prompts."""

    responses: int
    equal_responses: int  # equal token by token
    tokens: int  # of the first generator
    common_tokens: int  # before the first difference
    mean_gap: float  # absolute log-prob difference of common tokens, nats; NaN if a generator reports none
    largest_gap: float  # same
    seconds: tuple[float, float]  # per generator

    def __str__(self) -> str:
        return (
            f"{self.equal_responses} of {self.responses} responses equal, {self.common_tokens} of {self.tokens} "
            f"tokens before a difference; log-probs there differ by {self.mean_gap:.2g} on average, "
            f"{self.largest_gap:.2g} at most; {self.seconds[0]:.2f} s and {self.seconds[1]:.2f} s"
        )


def compare(first: Generator, second: Generator, prompts: Sequence[Prompt], params: SamplingParams) -> Comparison:
    """Generate one response per prompt with both and compare; waking them counts towards their time.

    `params` should be greedy, otherwise the noise makes them differ.
    """
    (left, left_seconds), (right, right_seconds) = (_timed(one, prompts, params) for one in (first, second))
    common = [_common(left, right, row) for row in range(len(prompts))]
    equal = sum(count == int(left.lengths[row]) == int(right.lengths[row]) for row, count in enumerate(common))
    mean = largest = float("nan")
    if left.log_probs is not None and right.log_probs is not None:
        pairs = zip(left.log_probs, right.log_probs, common, strict=True)
        gaps = torch.cat([(one[:count] - other[:count]).abs() for one, other, count in pairs])
        mean, largest = (float(gaps.mean()), float(gaps.max())) if len(gaps) else (0.0, 0.0)
    return Comparison(
        responses=len(prompts),
        equal_responses=equal,
        tokens=int(left.lengths.sum()),
        common_tokens=sum(common),
        mean_gap=mean,
        largest_gap=largest,
        seconds=(left_seconds, right_seconds),
    )


def _timed(generator: Generator, prompts: Sequence[Prompt], params: SamplingParams) -> tuple[Completions, float]:
    start = time.perf_counter()
    with generator.awake():
        found = generator.generate(prompts, 1, params, seed=0)
    return found, time.perf_counter() - start


def _common(left: Completions, right: Completions, row: int) -> int:
    count = min(int(left.lengths[row]), int(right.lengths[row]))
    differs = (left.tokens[row, :count] != right.tokens[row, :count]).nonzero()
    return int(differs[0]) if len(differs) else count
