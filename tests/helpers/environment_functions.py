"""Environments for tests; their host imports them by their names in this module."""

from __future__ import annotations

import random
import time
from typing import ClassVar

from reinforce_rl.rewards.environment import Reply, Tools


def odd_letters(answer: str, record: dict, rng: random.Random) -> Reply:
    """Reply twice on average: with the record's word and a digit that differs between samples."""
    reward = len(answer) % 3 / 4
    if len(answer) % 2:
        return Reply(reward=reward)
    return Reply(f"{record.get('word', 'on')} {rng.randint(0, 9)}", reward=reward)


def slow_odd_letters(answer: str, record: dict, rng: random.Random) -> Reply:
    """`odd_letters` after up to 30 ms."""
    time.sleep(random.uniform(0, 0.03))
    return odd_letters(answer, record, rng)


def graded_once(answer: str, record: dict, rng: random.Random) -> Reply:
    """End every episode after its first answer; the reward is `length_parity`'s."""
    return Reply(reward=length_parity(answer))


def length_parity(answer: str) -> float:
    return len(answer) % 2 + answer.count("e") / 8


def parity_reward(prompt: str, response: str, record: dict) -> float:
    """A reward function that gives what `graded_once` gives."""
    return length_parity(response)


class FailsAtTheSecond:
    """Raise at the second answer of the prompts whose record says so."""

    def __init__(self, record: dict, rng: random.Random):
        self._fails = record["fails"]
        self._answers = 0

    def __call__(self, answer: str) -> Reply:
        self._answers += 1
        if self._answers < 2:
            return Reply("once more", reward=1.0)
        if self._fails:
            raise KeyError("no table")
        return Reply(reward=1.0)


class TwoTools(Tools):
    """Add and look up; an answer without calls has the reward of `graded_once`."""

    def __init__(self, record: dict, rng: random.Random):
        self._word = record.get("word", "on")
        self._rng = rng

    def add(self, a: int, b: int) -> int:
        """Add two integers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    def word(self) -> str:
        """Return the record's word and a digit."""
        return f"{self._word} {self._rng.randint(0, 9)}"

    tools: ClassVar = [add, word]

    def __call__(self, answer: str) -> Reply:
        return Reply(reward=length_parity(answer), is_end=True)


def slow_reply(answer: str, record: dict, rng: random.Random, median: float, spread: float) -> str:
    """Reply after a time of a log-normal distribution, in seconds."""
    time.sleep(rng.lognormvariate(0, spread) * median)
    return f"{record['word']} {rng.randint(0, 99)}"


class TwoTurns:
    """Ask for a second answer, whatever the first one is."""

    def __init__(self, record: dict, rng: random.Random):
        self._answers = 0

    def __call__(self, answer: str) -> Reply:
        self._answers += 1
        return Reply("once more", reward=0.5, is_end=self._answers == 2)
