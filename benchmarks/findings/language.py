"""A language of small reviews: prompts, a grammar to learn first, and a reward that can be computed.

A prompt tells how somebody felt about a thing, `my sister hated the soup .`; a response is a review in two
clauses, `the look was very bland and the price was nice .`. The feeling decides how good the adjectives are, so the
first policy's reward differs by the prompt, as in a real task.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

PEOPLE = ["i", "my friend", "my sister", "my uncle", "our boss", "our guide"]
# chance of a good adjective
FEELINGS = {"loved": 0.9, "liked": 0.7, "tried": 0.5, "disliked": 0.3, "hated": 0.1}
THINGS = [
    "cafe",
    "hotel",
    "film",
    "book",
    "phone",
    "song",
    "game",
    "soup",
    "train",
    "garden",
    "lamp",
    "coat",
]
ASPECTS = [
    "look",
    "price",
    "start",
    "end",
    "size",
    "idea",
    "feel",
    "sound",
    "quality",
    "service",
    "detail",
    "rest",
]
ADJECTIVES = {
    2.0: ["perfect", "superb", "brilliant", "lovely"],
    1.0: ["good", "nice", "fresh", "clever", "pleasant", "neat"],
    0.0: ["plain", "usual", "common", "simple"],
    -1.0: ["bad", "poor", "bland", "dull", "odd", "cheap"],
    -2.0: ["awful", "terrible", "horrible", "dreadful"],
}
DEGREES = {"very": 1.5, "rather": 0.75, "hardly": -0.5}
JOINTS = ["and", "but", "while"]
CLAUSES = 2
VALUES = {word: value for value, words in ADJECTIVES.items() for word in words}
# The standard deviation of `raw_score` over reviews of the grammar, so that rewards differ by about
# 1.
SCALE = 1.85


def vocabulary() -> list[str]:
    """Every word once."""
    phrases = [*PEOPLE, *FEELINGS, *THINGS, *ASPECTS, *VALUES, *DEGREES, *JOINTS, "the was ."]
    return list(dict.fromkeys(word for phrase in phrases for word in phrase.split()))


def all_prompts() -> list[str]:
    """The 360 prompts, shuffled once and for all."""
    prompts = [
        f"{who} {felt} the {subject} ."
        for who, felt, subject in itertools.product(PEOPLE, FEELINGS, THINGS)
    ]
    random.Random(0).shuffle(prompts)
    return prompts


def write_review(prompt: str, random_source: random.Random) -> str:
    """A response to a prompt, as the grammar gives it."""
    good = next(FEELINGS[word] for word in prompt.split() if word in FEELINGS)
    clauses = []
    for _ in range(CLAUSES):
        degree = random_source.choice([*DEGREES, "", "", "", ""])
        if random_source.random() < 0.2:
            value = 0.0
        else:
            value = random_source.choice([1.0, 1.0, 2.0]) * (
                1 if random_source.random() < good else -1
            )
        adjective = random_source.choice(ADJECTIVES[value])
        clauses.append(
            " ".join(f"the {random_source.choice(ASPECTS)} was {degree} {adjective}".split())
        )
    return f" {random_source.choice(JOINTS)} ".join(clauses) + " ."


def reward(response: str) -> float:
    """What a review says, in units of about one standard deviation of the grammar's reviews.

    The sum over its first two clauses `the ASPECT was [DEGREE] ADJECTIVE` of the adjective's value times the degree's
    factor. A clause whose aspect or adjective has come before counts nothing. More clauses gain nothing either: with a
    reward that grows with the length, a run is a lottery for the first long responses.
    """
    return raw_score(response.split()) / SCALE


def raw_score(words: Sequence[str]) -> float:
    total = 0.0
    seen = set()
    clauses = 0
    for at, (first, aspect, verb) in enumerate(zip(words, words[1:], words[2:], strict=False)):
        if first != "the" or aspect not in ASPECTS or verb != "was":
            continue
        rest = words[at + 3 : at + 5]
        factor = DEGREES.get(rest[0], 1.0) if rest else 1.0
        adjective = next(iter(rest[1:] if rest and rest[0] in DEGREES else rest), "")
        if adjective not in VALUES:
            continue
        clauses += 1
        if clauses <= CLAUSES and not {aspect, adjective} & seen:
            total += factor * VALUES[adjective]
        seen |= {aspect, adjective}
    return total
