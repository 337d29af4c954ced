"""Answers that no preference data shows and a policy in search of reward finds: ended at once, or one phrase repeated.

A head that was trained on people's preferences alone has no opinion of them, and may well score them above every
sensible answer. So for some pairs such an answer is made from the pair's own words, and the head is taught that the
pair's answers are better. Chosen and rejected serve as the better one by turns, so nothing is said of these two.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from reinforce_rl.reward_model.pairs import EncodedPair

MAX_EARLY_TOKENS = 3
MAX_PHRASE_TOKENS = 4
CHOSEN, REJECTED = 0, 1


@dataclass(frozen=True)
class DegenerateAnswer:
    """A made answer, and the real one that is better.

    Attributes:
        pair: index of the pair it was made from.
        tokens: the made answer.
        better: `CHOSEN` or `REJECTED`, which of the pair's answers is better.
    """

    pair: int
    tokens: tuple[int, ...]
    better: int


def degenerate_answers(
    pairs: Sequence[EncodedPair], fraction: float, *, end_id: int, min_tokens: int, max_tokens: int, seed: int
) -> list[DegenerateAnswer]:
    """Two made answers for each of a share of the pairs: one that ends early, and one that repeats itself.

    Args:
        pairs: to draw from.
        fraction: share of the pairs, from 0 to 1, rounded.
        end_id: the end-of-turn token.
        min_tokens, max_tokens: length of a repetition, drawn evenly. It has no end-of-turn token.
        seed: draws the pairs and the answers.
    """
    rng = random.Random(seed)
    drawn = sorted(rng.sample(range(len(pairs)), round(fraction * len(pairs))))
    made = []
    for number, index in enumerate(drawn):
        answers = (pairs[index].chosen, pairs[index].rejected)
        # Of the early ends, two in five are the end-of-turn token alone: the one that a policy finds first.
        kept = max(0, rng.randint(-1, MAX_EARLY_TOKENS))
        early = (*(t for t in rng.choice(answers)[:kept] if t != end_id), end_id)
        made.append(DegenerateAnswer(index, early, number % 2))
        words = tuple(t for t in rng.choice(answers) if t != end_id)
        if words:
            start = rng.choice((0, rng.randrange(len(words))))
            phrase = words[start : start + rng.randint(1, MAX_PHRASE_TOKENS)]
            length = rng.randint(min_tokens, max_tokens)
            repeated = (phrase * length)[:length]
            made.append(DegenerateAnswer(index, repeated, (number + 1) % 2))
    return made
