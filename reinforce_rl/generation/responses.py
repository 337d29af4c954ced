"""Responses one by one, for calls of a generator that may end before they do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.data.finish_reasons import FINISH_LENGTH
from reinforce_rl.generation.base import PartialResponse
from reinforce_rl.generation.native.sampling import sample_seeds


def new_responses(prompts: Sequence[Prompt], num_samples: int, seed: int) -> list[PartialResponse]:
    """Return the responses to draw for these prompts, prompt-major."""
    ids = np.repeat([prompt.id for prompt in prompts], num_samples)
    keys = (
        sample_seeds(seed, ids, np.tile(np.arange(num_samples), len(prompts))).tolist()
        if prompts
        else []
    )
    repeated = (prompt for prompt in prompts for _ in range(num_samples))
    return [PartialResponse(prompt, key) for prompt, key in zip(repeated, keys, strict=True)]


def completions_of(responses: Sequence[PartialResponse], pad_id: int) -> Completions:
    """Join responses; padding has the newest version of any token, so that a minimum is of tokens alone."""
    newest = max((version for one in responses for version in one.versions), default=0)

    def padded(name: str, dtype: torch.dtype, value: float) -> torch.Tensor:
        rows = [torch.tensor(getattr(one, name), dtype=dtype) for one in responses]
        return pad_sequence(rows, batch_first=True, padding_value=value)

    return Completions(
        tokens=padded("tokens", torch.long, pad_id),
        lengths=torch.tensor([len(one.tokens) for one in responses]),
        finish_reasons=tuple(one.finish_reason or FINISH_LENGTH for one in responses),
        log_probs=padded("log_probs", torch.float32, 0.0),
        weight_versions=padded("versions", torch.long, newest),
    )
