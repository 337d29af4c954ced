"""Unfinished responses: made of prompts, played in rounds, and joined into `Completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.data.finish_reasons import FINISH_LENGTH
from reinforce_rl.generation.base import (
    Generator,
    PartialResponse,
    Partner,
    SamplingParams,
)
from reinforce_rl.generation.native.sampling import sample_seeds


def new_responses(prompts: Sequence[Prompt], num_samples: int, seed: int) -> list[PartialResponse]:
    """Return empty responses, `num_samples` per prompt, prompt-major."""
    ids = np.repeat([prompt.id for prompt in prompts], num_samples)
    keys = (
        sample_seeds(seed, ids, np.tile(np.arange(num_samples), len(prompts))).tolist()
        if prompts
        else []
    )
    repeated = (prompt for prompt in prompts for _ in range(num_samples))
    return [PartialResponse(prompt, key) for prompt, key in zip(repeated, keys, strict=True)]


class SameWeights:
    """`WeightUpdates` of a call during which no weights arrive."""

    version = 0

    def next_action(self, unfinished: int) -> Literal["continue", "load", "stop"]:
        return "continue"

    def load(self) -> None:
        raise RuntimeError("no weights arrive during this call")


def converse_in_rounds(
    generator: Generator,
    responses: Sequence[PartialResponse],
    params: SamplingParams,
    partner: Partner,
) -> None:
    """See `ConversingGenerator.converse`; in each round, all rows wait for the slowest."""
    turns = dict(enumerate(responses))
    while turns:
        resumed = generator.resume(list(turns.values()), params, SameWeights())
        answers = dict(zip(turns, resumed, strict=True))
        waiting = len(answers)
        turns = {}
        while waiting:
            replies = partner(answers, waits=True)
            answers = {}
            waiting -= len(replies)
            turns |= {row: turn for row, turn in replies.items() if turn is not None}
        turns = dict(sorted(turns.items()))  # prompt by prompt, as an engine may group them


def completions_of(responses: Sequence[PartialResponse], pad_id: int) -> Completions:
    """Join responses.

    Padding has the newest weight version of any token, so a minimum over versions ignores it.
    """
    newest = max((version for response in responses for version in response.versions), default=0)

    def padded(name: str, dtype: torch.dtype, value: float) -> torch.Tensor:
        rows = [torch.tensor(getattr(response, name), dtype=dtype) for response in responses]
        return pad_sequence(rows, batch_first=True, padding_value=value)

    return Completions(
        tokens=padded("tokens", torch.long, pad_id),
        lengths=torch.tensor([len(response.tokens) for response in responses]),
        finish_reasons=tuple(response.finish_reason or FINISH_LENGTH for response in responses),
        log_probs=padded("log_probs", torch.float32, 0.0),
        weight_versions=padded("versions", torch.long, newest),
    )
