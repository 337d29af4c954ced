"""Make an engine's requests from unfinished responses, and add its answers to the responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.finish_reasons import FINISH_LENGTH, FINISH_STOP
from reinforce_rl.generation.base import PartialResponse, SamplingParams
from reinforce_rl.generation.engine import Answer, EngineSampling, Request
from reinforce_rl.generation.native.sampling import sample_seeds
from reinforce_rl.generation.responses import new_responses


def requests_of(
    prompts: Sequence[Prompt], num_samples: int, params: SamplingParams, seed: int, pad_id: int
) -> list[Request]:
    """Build one request per sample, prompt-major, seeded by (seed, prompt, sample)."""
    return [
        request_of(response, params, pad_id)
        for response in new_responses(prompts, num_samples, seed)
    ]


def request_of(response: PartialResponse, params: SamplingParams, pad_id: int) -> Request:
    """Build the request for the rest of a response.

    The tokens so far belong to its prompt, so the repetition penalty covers them.
    """
    drawn = len(response.tokens)
    seed = response.key
    # An engine restarts its noise at each request, so the rest needs another seed.
    if drawn:
        seed = int(sample_seeds(seed, np.array([drawn]), np.array([0]))[0])
    sampling = EngineSampling(
        max_tokens=response.max_length(params) - drawn,
        min_tokens=max(0, params.min_length - drawn),
        seed=seed,
        temperature=None if params.use_greedy else params.temperature,
        top_k=None if params.use_greedy else params.top_k,
        top_p=None if params.use_greedy else params.top_p,
        repetition_penalty=None if params.repetition_penalty == 1.0 else params.repetition_penalty,
        stop_token_ids=list(params.stop_token_ids),
        pad_id=pad_id,
    )
    return Request(response.prompt.tokens + response.tokens, sampling)


def extended(
    response: PartialResponse,
    answer: Answer,
    versions: Mapping[int, int],
    cut: Callable[[Answer], Answer],
) -> PartialResponse:
    """Return the response with the tokens of an answer.

    Args:
        versions: weight version by number of the engine's update. The last one applies to an engine
            that reports no numbers.
        cut: cuts a whole response at an end string.
    """
    added_versions = [
        versions[update] for update in answer.updates or [max(versions)] * len(answer.tokens)
    ]
    log_probs = response.log_probs + (answer.log_probs or ())
    whole = cut(replace(answer, tokens=response.tokens + answer.tokens, log_probs=log_probs))
    reason = FINISH_STOP if whole.stopped else FINISH_LENGTH if answer.fault is None else None
    return replace(
        response,
        tokens=whole.tokens,
        log_probs=whole.log_probs or (),
        versions=(*response.versions, *added_versions)[: len(whole.tokens)],
        finish_reason=reason,
    )
