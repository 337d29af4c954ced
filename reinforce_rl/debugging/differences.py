"""Where two records of a step part: the first prompt, sample, token, tensor or number, by phase."""

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

# Columns of samples by the phase that makes them, in order.
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
    """Largest differences that are rounding; all 0 for equal bits."""

    absolute: float = 0.0
    relative: float = 0.0

    def __str__(self) -> str:
        if not self.absolute and not self.relative:
            return "bit for bit"
        return f"within {self.absolute:g} or {self.relative:.2%}, which is rounding"

    def allow(self, one: float, other: float) -> bool:
        if one == other or (math.isnan(one) and math.isnan(other)):
            return True
        return abs(one - other) <= self.absolute + self.relative * max(abs(one), abs(other))


EQUAL_BITS = Bounds()
# Sums in another order: of layouts, devices or numbers of threads.
ROUNDING = Bounds(absolute=1e-4, relative=1e-4)  # float32
BF16 = Bounds(absolute=0.05, relative=0.02)
_OF_CUTS = ("sum_sequence_tokens", "sum_padded_tokens")  # numbers that another layout has otherwise


@dataclass(frozen=True)
class FirstDifference:
    """The first of `count` places where one column, tensor or number differs."""

    what: str  # column of the samples, number of an update, or tensor
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
        """Such as `prompt 3, sample 0, token 12`; empty for a tensor or number."""
        parts = {"prompt": self.prompt_id, "sample": self.sample_id, "token": self.token}
        return ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)

    def __str__(self) -> str:
        one, other = _shown_apart(self.first, self.second)
        found = f"{self.what}: {one} and {other}"
        where = f" at {self.place}" if self.place else ""
        size = "" if math.isnan(self.size) else f", by {self.size:.2g} at most"
        return f"{found}{where}; {self.count} of {self.total} differ{size}"


def sample_differences(
    first: pa.Table, second: pa.Table, columns: Sequence[str], bounds: Bounds = EQUAL_BITS
) -> list[FirstDifference]:
    """Compare columns of two tables of the same samples in the same order; one that both lack is equal."""
    ids = list(zip(first["prompt_id"].to_pylist(), first["sample_id"].to_pylist(), strict=True))
    found = []
    for name in columns:
        pair = [
            table[name].to_pylist() if name in table.column_names else [None] * len(ids)
            for table in (first, second)
        ]
        places = [
            (row, _first_token(one, other, bounds))
            for row, (one, other) in enumerate(zip(*pair, strict=True))
            if not _equal(one, other, bounds)
        ]
        if places:
            row, token = places[0]
            one, other = (_at(column[row], token) for column in pair)
            sizes = [_size(pair[0][r], pair[1][r]) for r, _ in places]
            prompt, sample = ids[row]
            size = max((size for size in sizes if not math.isnan(size)), default=math.nan)
            found.append(
                FirstDifference(
                    name, one, other, len(places), len(ids), prompt, sample, token, size
                )
            )
    return found


def missing_samples(first: pa.Table, second: pa.Table) -> FirstDifference | None:
    """Return the first sample that one of the tables lacks, or that stands elsewhere in it; None if there is none."""
    columns = [
        list(zip(t["prompt_id"].to_pylist(), t["sample_id"].to_pylist(), strict=True))
        for t in (first, second)
    ]
    if columns[0] == columns[1]:
        return None
    total = max(map(len, columns))
    pairs: list[tuple[int, int] | None] = []
    row = 0
    for row in range(total):
        pairs = [column[row] if row < len(column) else None for column in columns]
        if pairs[0] != pairs[1]:
            break
    one, other = ("none" if one is None else f"prompt {one[0]}, sample {one[1]}" for one in pairs)
    count = len(set(columns[0]) ^ set(columns[1])) or 1
    return FirstDifference(f"sample {row} of the step", one, other, count, total)


def number_differences(
    first: Mapping[str, Any], second: Mapping[str, Any], bounds: Bounds = EQUAL_BITS
) -> list[FirstDifference]:
    """Compare numbers and texts by name."""
    names = dict.fromkeys((*first, *second))
    pairs = {name: (first.get(name), second.get(name)) for name in names}
    return [
        FirstDifference(name, one, other, 1, 1, size=_size(one, other))
        for name, (one, other) in pairs.items()
        if not _equal(one, other, bounds)
    ]


def update_differences(
    first: StepRecord, second: StepRecord, bounds: Bounds = EQUAL_BITS
) -> list[FirstDifference]:
    """Compare the numbers of all optimizer steps of a step."""
    counts = len(first.updates), len(second.updates)
    if counts[0] != counts[1]:
        return [FirstDifference("optimizer steps", counts[0], counts[1], 1, 1)]
    found = []
    for number, (one, other) in enumerate(zip(first.updates, second.updates, strict=True)):
        prefix = f"optimizer step {number + 1}, " if len(first.updates) > 1 else ""
        differences = number_differences(one, other, bounds)
        if bounds != EQUAL_BITS:
            differences = [each for each in differences if each.what not in _OF_CUTS]
        found += [replace(each, what=prefix + each.what) for each in differences]
    return found


def tensor_differences(
    first: Sequence[RankState], second: Sequence[RankState], kind: str
) -> list[FirstDifference]:
    """Compare checksums of the `RankState` field `kind`; the first tensor of each rank that differs."""
    found = []
    for one, other in zip(first, second, strict=True):
        sums: tuple[dict[str, str], dict[str, str]] = (getattr(one, kind), getattr(other, kind))
        names = [
            name
            for name in dict.fromkeys((*sums[0], *sums[1]))
            if sums[0].get(name) != sums[1].get(name)
        ]
        if names:
            rank = f"rank {one.rank}: " if len(first) > 1 else ""
            values = sums[0].get(names[0], "absent"), sums[1].get(names[0], "absent")
            found.append(
                FirstDifference(
                    f"{rank}tensor {names[0]}",
                    values[0],
                    values[1],
                    len(names),
                    max(map(len, sums)),
                )
            )
    return found


def fact_differences(first: StepRecord, second: StepRecord) -> list[str]:
    """Say what differs between the code, machine, settings, data and reward source of two records."""
    found = []
    defaults = dict(flatten(TrainConfig().model_dump()))
    for title, name in {
        "": "software",
        "machine: ": "machine",
        "layout: ": "layout",
        "setting ": "settings",
    }.items():
        sides: list[Mapping[str, Any]] = [getattr(one, name) for one in (first, second)]
        keys = [
            key
            for key in dict.fromkeys((*sides[0], *sides[1]))
            if sides[0].get(key) != sides[1].get(key)
        ]
        keys = [key for key in keys if not key.startswith(("exp_manager.", "resume_with_changes"))]
        default = defaults if name == "settings" else {}
        pairs = [[_shown(side.get(key, default.get(key))) for side in sides] for key in keys]
        found += [
            f"{title}{key}: {one} -> {other}" for key, (one, other) in zip(keys, pairs, strict=True)
        ]
    for name in dict.fromkeys((*first.files, *second.files)):
        digests = first.files.get(name), second.files.get(name)
        if None not in digests and digests[0] != digests[1]:
            found.append(f"the file of the reward function {name} is another one")
    if first.data.get("fingerprint") != second.data.get("fingerprint"):
        found.append("the prompts of the training data are others")
    if None not in (first.scorer, second.scorer) and first.scorer != second.scorer:
        found.append(
            f"the reward source is another one: {_shown(first.scorer)} -> {_shown(second.scorer)}"
        )
    if None not in (first.reference, second.reference) and first.reference != second.reference:
        found.append("the reference policy's weights are others")
    return found


def _equal(one: Any, other: Any, bounds: Bounds) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return False
        if one and isinstance(one[0], float) and bounds != EQUAL_BITS:
            a, b = np.array(one, dtype=float), np.array(other, dtype=float)
            return bool(
                np.allclose(a, b, rtol=bounds.relative, atol=bounds.absolute, equal_nan=True)
            )
        return one == other or all(_equal(a, b, bounds) for a, b in zip(one, other, strict=True))
    if isinstance(one, tuple) and isinstance(other, tuple):  # name and value of a map
        return len(one) == len(other) and all(
            _equal(a, b, bounds) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, float) and isinstance(other, int | float):
        return bounds.allow(one, float(other))
    return one == other


def _first_token(one: Any, other: Any, bounds: Bounds) -> int | None:
    if not (isinstance(one, list) and isinstance(other, list)):
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if not _equal(a, b, bounds)), min(len(one), len(other)))


def _at(value: Any, token: int | None) -> Any:
    if token is None or not isinstance(value, list):
        return value
    return value[token] if token < len(value) else None


def _size(one: Any, other: Any) -> float:
    if isinstance(one, list) and isinstance(other, list):
        return max((_size(a, b) for a, b in zip(one, other, strict=False)), default=math.nan)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other)
    return math.nan


def _shown_apart(one: Any, other: Any) -> tuple[str, str]:
    """Of long texts, show where they part."""
    if not (isinstance(one, str) and isinstance(other, str)) or max(len(one), len(other)) <= 80:
        return _shown(one), _shown(other)
    place = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    start = max(0, place - 30)
    parts = (json.dumps(text[start : start + 60], ensure_ascii=False) for text in (one, other))
    dots = "..." if start > 0 else ""
    first, second = (f"{dots}{part}" for part in parts)
    return first, f"{second}, from character {place}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
