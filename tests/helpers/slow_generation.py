"""Delays of generation, as a patch of `train_tiny.py`."""

from __future__ import annotations

import time
from typing import Any

from helpers.ranks import reference

from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel


def lengthen_generation(seconds: float) -> None:
    """Delay each call of the generator for a step; if it can be interrupted, each token."""
    infer = MegatronGPTReinforceActorModel.infer

    def slow_infer(*args, validation: bool = False):
        if not validation:
            time.sleep(seconds)
        return infer(*args, validation=validation)

    MegatronGPTReinforceActorModel.infer = slow_infer  # type: ignore[method-assign]
    resume = NativeGenerator.resume

    def slow_resume(generator: NativeGenerator, responses, params, updates):
        return resume(
            generator, responses, params, SlowTokens(updates, seconds / params.max_length)
        )

    NativeGenerator.resume = slow_resume  # type: ignore[method-assign]


class SlowTokens:
    """`WeightUpdates` with a delay per token that does not depend on the number of responses."""

    def __init__(self, updates, seconds: float):
        self._updates = updates
        self._seconds = seconds

    def __getattr__(self, name: str):
        return getattr(self._updates, name)

    def next_action(self, unfinished: int) -> str:
        time.sleep(self._seconds)
        return self._updates.next_action(unfinished)


def generating(seconds: float) -> list[Any]:
    return [reference(lengthen_generation), seconds]
