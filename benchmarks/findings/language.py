"""A language of small reviews: prompts, a grammar to learn first, and a computable reward.

A prompt says how a person felt, `my sister hated the soup .`; a response is a review in two
clauses, `the look was very bland and the price was nice .`. The feeling decides how good the
adjectives are, so the first policy's reward differs by the prompt, as in a real task.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

PEOPLE = ["i", "my friend", "my sister", "my uncle", "our boss", "our guide"]
# chance of a good adjective
FEELINGS = {"loved": 0.9, "liked": 0.7, "tried": 0.5, "disliked": 0.3, "hated": 0.1}
SUBJECTS = [
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
    phrases = [*PEOPLE, *FEELINGS, *SUBJECTS, *ASPECTS, *VALUES, *DEGREES, *JOINTS, "the was ."]
    words = " ".join(phrases).split()
    return list(dict.fromkeys(words))


def all_prompts() -> list[str]:
    """The 360 prompts, always in the same random order."""
    prompts = []
    for person, feeling, subject in itertools.product(PEOPLE, FEELINGS, SUBJECTS):
        prompts.append(f"{person} {feeling} the {subject} .")
    random.Random(0).shuffle(prompts)
    return prompts


def write_review(prompt: str, random_source: random.Random) -> str:
    """A response to a prompt, as the grammar gives it."""
    good = next(FEELINGS[word] for word in prompt.split() if word in FEELINGS)
    clauses = []
    for _ in range(CLAUSES):
        degree = random_source.choice([*DEGREES, "", "", "", ""])
        value = 0.0
        if random_source.random() >= 0.2:
            value = random_source.choice([1.0, 1.0, 2.0])
            if random_source.random() >= good:
                value = -value
        adjective = random_source.choice(ADJECTIVES[value])
        aspect = random_source.choice(ASPECTS)
        words = ["the", aspect, "was", degree, adjective]
        clauses.append(" ".join(filter(None, words)))
    joint = random_source.choice(JOINTS)
    review = f" {joint} ".join(clauses)
    return f"{review} ."


def reward(response: str) -> float:
    """The judgement of a review, in units of about one standard deviation of the grammar's reviews.

    The sum over its first two clauses `the ASPECT was [DEGREE] ADJECTIVE` of the adjective's value
    times the degree's factor. A clause that repeats an aspect or adjective counts nothing. Further
    clauses gain nothing either: with a reward that grows with the length, a run would be a lottery
    for the first long responses.
    """
    return raw_score(response.split()) / SCALE


def raw_score(words: Sequence[str]) -> float:
    total = 0.0
    seen = set()
    clauses = 0
    for at, (first, aspect, verb) in enumerate(zip(words, words[1:], words[2:], strict=False)):
        if first != "the" or aspect not in ASPECTS or verb != "was":
            continue
        rest = list(words[at + 3 : at + 5])
        factor = 1.0
        if rest and rest[0] in DEGREES:
            factor = DEGREES[rest.pop(0)]
        adjective = rest[0] if rest else ""
        if adjective not in VALUES:
            continue
        clauses += 1
        pair = {aspect, adjective}
        if clauses <= CLAUSES and not pair & seen:
            total += factor * VALUES[adjective]
        seen |= pair
    return total
