"""Metrics of a step's samples: repetition, compression, failures by length, repeated prompts."""

from __future__ import annotations

import math
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from reinforce_rl.monitoring.records import RolloutRow

WORDS = 3  # of an n-gram
MOST_RESPONSES = 128  # read per step
MOST_CHARACTERS = 8192  # read per response


def repeated_texts(train: Iterable[str], held_out: Iterable[str]) -> frozenset[str]:
    """Return training prompts that are on several lines of the data, or in validation."""
    lines = Counter(train)
    validation = set(held_out)
    return frozenset(text for text, count in lines.items() if count > 1 or text in validation)


def sample_metrics(
    rows: Sequence[RolloutRow], repeated: frozenset[str] = frozenset()
) -> dict[str, float]:
    """Return the metrics of a training step, independent of the order of the rows.

    For `repeated` see `repeated_texts`.
    """
    if not rows:
        return {}
    texts = [
        row.response[:MOST_CHARACTERS]
        for row in sorted(rows, key=lambda row: (row.prompt_id, row.sample_id))
    ]
    prompts = {(row.prompt_id, row.prompt) for row in rows}
    metrics = text_metrics(texts[:MOST_RESPONSES])
    metrics["prompts_repeated"] = sum(text in repeated for _, text in prompts) / len(prompts)
    metrics["length_reward_correlation"] = length_reward_correlation(rows)
    metrics["unscored_length_auc"] = unscored_length_auc(rows)
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def text_metrics(texts: Sequence[str]) -> dict[str, float]:
    """Return the share of n-grams that repeat within a response, and the compression ratio."""
    grams = 0
    repeated = 0
    size = 0
    compressed = 0
    for text in texts:
        words = text.split()
        data = text.encode(errors="replace")
        ngrams = list(zip(*(words[start:] for start in range(WORDS)), strict=False))
        grams = grams + len(ngrams)
        repeated = repeated + len(ngrams) - len(set(ngrams))
        size = size + len(data)
        compressed = compressed + len(zlib.compress(data, 1))
    ratio = compressed / size if size else math.nan
    return {"repetition": repeated / grams if grams else 0.0, "compression": ratio}


def unscored_length_auc(rows: Sequence[RolloutRow]) -> float:
    """Return the probability that a sample without a score is longer than one with a score.

    Ties count half. NaN if there are no samples of one kind.
    """
    scored = sorted(row.response_length for row in rows if math.isfinite(row.reward))
    others = [row.response_length for row in rows if not math.isfinite(row.reward)]
    if not scored or not others:
        return math.nan
    below = sum(bisect_left(scored, length) + bisect_right(scored, length) for length in others)
    return below / (2 * len(scored) * len(others))


def length_reward_correlation(rows: Sequence[RolloutRow]) -> float:
    """Return the correlation of length and reward within groups.

    NaN if one of them is constant within each group.
    """
    groups = defaultdict[int, list[tuple[float, float]]](list)
    for row in rows:
        if math.isfinite(row.reward):
            groups[row.prompt_id].append((float(row.response_length), row.reward))
    pairs = []
    for group in groups.values():
        lengths, rewards = (math.fsum(column) / len(group) for column in zip(*group, strict=True))
        pairs += [(length - lengths, reward - rewards) for length, reward in group]
    both, ll, rr = (
        math.fsum(map(f, pairs))
        for f in (lambda p: p[0] * p[1], lambda p: p[0] ** 2, lambda p: p[1] ** 2)
    )
    return both / math.sqrt(ll * rr) if ll * rr > 0 else math.nan
