"""The first difference of two records of a step: a prompt, sample, token, tensor or number."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.monitoring.step_record import RankState, StepRecord
from reinforce_rl.runtime.settings import flatten

# Columns of the samples, by the phase that computes them, in order.
COLUMNS = {
    "prompts": ("prompt", "prompt_tokens", "record"),
    "generate": (
        *("response_tokens", "response", "response_length", "finish_reason"),
        *("generator_log_probs", "weight_versions"),
    ),
    "score": ("reward", "source_rewards", "score_fault"),
    "logprobs": ("policy_log_probs", "reference_log_probs"),
    "advantages": (
        "valid",
        "kl",
        "shaped_reward",
        "reward_with_kl",
        "baseline",
        "advantage",
        "token_advantages",
    ),
}


@dataclass(frozen=True)
class Bounds:
    """Largest differences that count as rounding; all 0 for equal bits."""

    absolute: float = 0.0
    relative: float = 0.0

    def __str__(self) -> str:
        if not self.absolute and not self.relative:
            return "bit for bit"
        return f"within {self.absolute:g} or {self.relative:.2%}, which is rounding"

    def allow(self, first: float, second: float) -> bool:
        if first == second or (math.isnan(first) and math.isnan(second)):
            return True
        return abs(first - second) <= self.absolute + self.relative * max(abs(first), abs(second))


EQUAL_BITS = Bounds()
# Layouts, devices and numbers of threads change the order of sums.
ROUNDING = Bounds(absolute=1e-4, relative=1e-4)  # float32
BF16 = Bounds(absolute=0.05, relative=0.02)
# Numbers of an update that depend on how the layout divides it into micro-batches.
_OF_LAYOUT = ("sum_sequence_tokens", "sum_padded_tokens")


@dataclass(frozen=True)
class FirstDifference:
    """The first of `count` places where one column, tensor or number differs."""

    quantity: str  # column of the samples, number of an update, or tensor
    first: Any
    second: Any
    count: int
    total: int
    prompt_id: int | None = None
    sample_id: int | None = None
    token: int | None = None  # position within the prompt or the response, from 0
    size: float = math.nan  # largest absolute difference of numbers

    @property
    def place(self) -> str:
        """Return a text such as `prompt 3, sample 0, token 12`; empty for a tensor or number."""
        parts = {"prompt": self.prompt_id, "sample": self.sample_id, "token": self.token}
        return ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)

    def __str__(self) -> str:
        first, second = _shown_apart(self.first, self.second)
        values = f"{self.quantity}: {first} and {second}"
        where = f" at {self.place}" if self.place else ""
        size = "" if math.isnan(self.size) else f", by {self.size:.2g} at most"
        return f"{values}{where}; {self.count} of {self.total} differ{size}"


def sample_differences(
    first: pa.Table, second: pa.Table, columns: Sequence[str], bounds: Bounds = EQUAL_BITS
) -> list[FirstDifference]:
    """Compare columns of two tables of the same samples in the same order.

    A column that both tables lack is equal.
    """
    ids = _sample_ids(first)
    differences = []
    for name in columns:
        pairs = list(zip(_column(first, name), _column(second, name), strict=True))
        rows = [row for row, pair in enumerate(pairs) if not _equal(*pair, bounds)]
        if rows:
            left, right = pairs[rows[0]]
            token = _first_token(left, right, bounds)
            prompt, sample = ids[rows[0]]
            sizes = [_size(*pairs[row]) for row in rows]
            differences.append(
                FirstDifference(
                    name,
                    _at(left, token),
                    _at(right, token),
                    count=len(rows),
                    total=len(ids),
                    prompt_id=prompt,
                    sample_id=sample,
                    token=token,
                    size=max((size for size in sizes if not math.isnan(size)), default=math.nan),
                )
            )
    return differences


def missing_samples(first: pa.Table, second: pa.Table) -> FirstDifference | None:
    """Return the first row in which the tables have different samples; None if all are the same."""
    columns = [_sample_ids(table) for table in (first, second)]
    if columns[0] == columns[1]:
        return None
    total = max(map(len, columns))
    pairs: list[tuple[int, int] | None] = []
    row = 0
    for row in range(total):
        pairs = [column[row] if row < len(column) else None for column in columns]
        if pairs[0] != pairs[1]:
            break
    texts = ["none" if pair is None else f"prompt {pair[0]}, sample {pair[1]}" for pair in pairs]
    count = len(set(columns[0]) ^ set(columns[1])) or 1
    return FirstDifference(f"sample {row} of the step", texts[0], texts[1], count, total)


def number_differences(
    first: Mapping[str, Any], second: Mapping[str, Any], bounds: Bounds = EQUAL_BITS
) -> list[FirstDifference]:
    """Compare numbers and texts by name."""
    names = dict.fromkeys((*first, *second))
    pairs = {name: (first.get(name), second.get(name)) for name in names}
    return [
        FirstDifference(name, left, right, 1, 1, size=_size(left, right))
        for name, (left, right) in pairs.items()
        if not _equal(left, right, bounds)
    ]


def update_differences(
    first: StepRecord, second: StepRecord, bounds: Bounds = EQUAL_BITS
) -> list[FirstDifference]:
    """Compare the numbers of all optimizer steps of a step."""
    counts = len(first.updates), len(second.updates)
    if counts[0] != counts[1]:
        return [FirstDifference("optimizer steps", counts[0], counts[1], 1, 1)]
    differences = []
    for number, (left, right) in enumerate(zip(first.updates, second.updates, strict=True)):
        prefix = f"optimizer step {number + 1}, " if len(first.updates) > 1 else ""
        of_update = number_differences(left, right, bounds)
        if bounds != EQUAL_BITS:
            of_update = [
                difference for difference in of_update if difference.quantity not in _OF_LAYOUT
            ]
        differences += [
            replace(difference, quantity=prefix + difference.quantity) for difference in of_update
        ]
    return differences


def tensor_differences(
    first: Sequence[RankState], second: Sequence[RankState], kind: str
) -> list[FirstDifference]:
    """Compare the checksums of the `RankState` field `kind`.

    Returns the first different tensor of each rank.
    """
    differences = []
    for left, right in zip(first, second, strict=True):
        sums: tuple[dict[str, str], dict[str, str]] = (getattr(left, kind), getattr(right, kind))
        names = _differing_names(*sums)
        if names:
            rank = f"rank {left.rank}: " if len(first) > 1 else ""
            values = sums[0].get(names[0], "absent"), sums[1].get(names[0], "absent")
            differences.append(
                FirstDifference(
                    f"{rank}tensor {names[0]}",
                    values[0],
                    values[1],
                    len(names),
                    max(map(len, sums)),
                )
            )
    return differences


def fact_differences(first: StepRecord, second: StepRecord) -> list[str]:
    """Describe differences in code, machine, layout, settings, data and reward source."""
    facts = []
    defaults = dict(flatten(TrainConfig().model_dump()))
    for title, name in {
        "": "software",
        "machine: ": "machine",
        "layout: ": "layout",
        "setting ": "settings",
    }.items():
        left: Mapping[str, Any] = getattr(first, name)
        right: Mapping[str, Any] = getattr(second, name)
        for key in _differing_names(left, right):
            if key.startswith(("exp_manager.", "resume_with_changes")):
                continue
            default = defaults.get(key) if name == "settings" else None
            before = _shown(left.get(key, default))
            after = _shown(right.get(key, default))
            facts.append(f"{title}{key}: {before} -> {after}")
    for name in dict.fromkeys((*first.files, *second.files)):
        digests = first.files.get(name), second.files.get(name)
        if None not in digests and digests[0] != digests[1]:
            facts.append(f"the file of the reward function {name} differs")
    if first.data.get("fingerprint") != second.data.get("fingerprint"):
        facts.append("the prompts of the training data differ")
    if None not in (first.scorer, second.scorer) and first.scorer != second.scorer:
        facts.append(
            f"the reward source differs: {_shown(first.scorer)} -> {_shown(second.scorer)}"
        )
    if None not in (first.reference, second.reference) and first.reference != second.reference:
        facts.append("the reference policy's weights differ")
    return facts


def _sample_ids(table: pa.Table) -> list[tuple[int, int]]:
    return list(zip(table["prompt_id"].to_pylist(), table["sample_id"].to_pylist(), strict=True))


def _column(table: pa.Table, name: str) -> list[Any]:
    """Return a column's values, None in each row if the table lacks it."""
    if name not in table.column_names:
        return [None] * table.num_rows
    return table[name].to_pylist()


def _differing_names(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys((*first, *second))
    return [name for name in names if first.get(name) != second.get(name)]


def _equal(first: Any, second: Any, bounds: Bounds) -> bool:
    if isinstance(first, list) and isinstance(second, list):
        if len(first) != len(second):
            return False
        if first and isinstance(first[0], float) and bounds != EQUAL_BITS:
            a = np.array(first, dtype=float)
            b = np.array(second, dtype=float)
            return bool(
                np.allclose(a, b, rtol=bounds.relative, atol=bounds.absolute, equal_nan=True)
            )
        return first == second or all(
            _equal(a, b, bounds) for a, b in zip(first, second, strict=True)
        )
    if isinstance(first, tuple) and isinstance(second, tuple):  # name and value of a map
        return len(first) == len(second) and all(
            _equal(a, b, bounds) for a, b in zip(first, second, strict=True)
        )
    if isinstance(first, float) and isinstance(second, int | float):
        return bounds.allow(first, float(second))
    return first == second


def _first_token(first: Any, second: Any, bounds: Bounds) -> int | None:
    if not (isinstance(first, list) and isinstance(second, list)):
        return None
    pairs = enumerate(zip(first, second, strict=False))
    return next(
        (i for i, (a, b) in pairs if not _equal(a, b, bounds)), min(len(first), len(second))
    )


def _at(value: Any, token: int | None) -> Any:
    if token is None or not isinstance(value, list):
        return value
    return value[token] if token < len(value) else None


def _size(first: Any, second: Any) -> float:
    if isinstance(first, list) and isinstance(second, list):
        return max((_size(a, b) for a, b in zip(first, second, strict=False)), default=math.nan)
    if isinstance(first, float) and isinstance(second, float):
        return abs(first - second)
    return math.nan


def _shown_apart(first: Any, second: Any) -> tuple[str, str]:
    """Return both values as text, of long texts the part around their first difference."""
    if (
        not (isinstance(first, str) and isinstance(second, str))
        or max(len(first), len(second)) <= 80
    ):
        return _shown(first), _shown(second)
    place = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    start = max(0, place - 30)
    parts = (json.dumps(text[start : start + 60], ensure_ascii=False) for text in (first, second))
    dots = "..." if start > 0 else ""
    first_part, second_part = (f"{dots}{part}" for part in parts)
    return first_part, f"{second_part}, from character {place}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
