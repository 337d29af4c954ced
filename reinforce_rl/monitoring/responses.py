"""Metrics of a step's samples: repetition, compression, failures by length, prompts seen before."""

from __future__ import annotations

import math
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b

from reinforce_rl.monitoring.records import RolloutRow

WORDS = 3  # of an n-gram
MOST_RESPONSES, MOST_CHARACTERS = 128, 8192  # whose texts are looked at in a step
MOST_PROMPTS = 500_000  # remembered


class SampleMetrics:
    """Holds the prompts that have been seen, as hashes."""

    def __init__(self) -> None:
        self._seen: dict[bytes, tuple[str, int]] = {}

    def of_validation(self, rows: Sequence[RolloutRow]) -> None:
        """Remember the prompts of a validation: training must not see them."""
        for row in rows:
            self._first_seen("validation", row.prompt_id, row.prompt)

    def of_step(self, rows: Sequence[RolloutRow]) -> dict[str, float]:
        """Return the metrics of a training step; the same whatever the order of the rows."""
        if not rows:
            return {}
        texts = [
            row.response[:MOST_CHARACTERS] for row in sorted(rows, key=lambda row: (row.prompt_id, row.sample_id))
        ]
        prompts = sorted({(row.prompt_id, row.prompt) for row in rows})
        again = sum(self._first_seen("train", *prompt) != ("train", prompt[0]) for prompt in prompts)
        found = {**text_metrics(texts[:MOST_RESPONSES]), "prompts_seen_before": again / len(prompts)}
        found["length_reward_correlation"] = length_reward_correlation(rows)
        longer = longer_if_unscored(rows)
        return found if math.isnan(longer) else found | {"unscored_longer": longer}

    def _first_seen(self, kind: str, prompt_id: int, prompt: str) -> tuple[str, int]:
        key = blake2b(prompt.encode(errors="replace"), digest_size=8).digest()
        if len(self._seen) >= MOST_PROMPTS:
            return self._seen.get(key, (kind, prompt_id))
        return self._seen.setdefault(key, (kind, prompt_id))


def text_metrics(texts: Sequence[str]) -> dict[str, float]:
    """Return the share of n-grams of words that their response had before, and its size once compressed."""
    grams = repeated = size = compressed = 0
    for text in texts:
        words, data = text.split(), text.encode(errors="replace")
        found = list(zip(*(words[start:] for start in range(WORDS)), strict=False))
        grams, repeated = grams + len(found), repeated + len(found) - len(set(found))
        size, compressed = size + len(data), compressed + len(zlib.compress(data, 1))
    ratio = compressed / size if size else math.nan
    return {"repetition": repeated / grams if grams else 0.0, "compression": ratio}


def longer_if_unscored(rows: Sequence[RolloutRow]) -> float:
    """Return how likely a sample without a score is longer than one with it, ties half; NaN without either."""
    scored = sorted(row.response_length for row in rows if math.isfinite(row.reward))
    others = [row.response_length for row in rows if not math.isfinite(row.reward)]
    if not scored or not others:
        return math.nan
    below = sum(bisect_left(scored, length) + bisect_right(scored, length) for length in others)
    return below / (2 * len(scored) * len(others))


def length_reward_correlation(rows: Sequence[RolloutRow]) -> float:
    """Return the correlation of length and reward within the groups; NaN if either is the same throughout them."""
    groups = defaultdict[int, list[tuple[float, float]]](list)
    for row in rows:
        if math.isfinite(row.reward):
            groups[row.prompt_id].append((float(row.response_length), row.reward))
    pairs = []
    for group in groups.values():
        lengths, rewards = (math.fsum(column) / len(group) for column in zip(*group, strict=True))
        pairs += [(length - lengths, reward - rewards) for length, reward in group]
    both, ll, rr = (
        math.fsum(map(f, pairs)) for f in (lambda p: p[0] * p[1], lambda p: p[0] ** 2, lambda p: p[1] ** 2)
    )
    return both / math.sqrt(ll * rr) if ll * rr > 0 else math.nan
