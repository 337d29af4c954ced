"""Comparison of two validations by prompt."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from operator import attrgetter

from reinforce_rl.monitoring.records import RolloutRow
from reinforce_rl.utils.statistics import Difference, paired

REWARD: Callable[[RolloutRow], float] = attrgetter("reward")


def compare_validation(
    before: Sequence[RolloutRow],
    after: Sequence[RolloutRow],
    value: Callable[[RolloutRow], float] = REWARD,
) -> Difference:
    """Compare two validations by prompt; samples of a prompt count as their mean."""
    return paired(by_prompt(before, value), by_prompt(after, value))


def by_prompt(
    rows: Sequence[RolloutRow], value: Callable[[RolloutRow], float] = REWARD
) -> dict[int, float]:
    """Return the mean of each prompt's samples; NaN if one of them has no value."""
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row.prompt_id, []).append(value(row))
    means = {}
    for prompt_id, values in groups.items():
        is_scored = all(math.isfinite(value) for value in values)
        means[prompt_id] = statistics.fmean(values) if is_scored else math.nan
    return means
