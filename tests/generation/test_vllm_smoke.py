"""A short test of generation by the real vLLM on a CPU.

`make test-engine` has the others, in test_vllm.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.policies import all_logits
from helpers.vllm_engine import (
    NUM_SAMPLES,
    PARAMS,
    TOLERANCE,
    change_weights,
    draw,
    generator_of,
    log_prob_gap,
    vllm_model,
    vllm_overrides,
)

from reinforce_rl.data.batches import Prompt


@pytest.mark.more
@pytest.mark.timeout(900)  # it may have to create vLLM's environment
def test_log_probs_are_the_trainers_before_and_after_an_update(tmp_path, mesh):
    vllm_model(tmp_path)
    overrides = ("engine.max_batch_size=8", "engine.max_num_tokens=16")
    lm, generator = generator_of(tmp_path, mesh, *vllm_overrides(), *overrides)
    logits_of = partial(all_logits, lm)
    before = draw(generator)
    assert log_prob_gap(logits_of, before) < TOLERANCE
    change_weights(lm)
    after = draw(generator)
    assert log_prob_gap(logits_of, after) < TOLERANCE
    assert log_prob_gap(logits_of, before) > 10 * TOLERANCE, "the update changed nothing"
    assert torch.equal(draw(generator).tokens, after.tokens), "the same seeds"
    long = Prompt(1, "", tuple(range(6, 15)))
    with generator.awake():
        completions = generator.generate([long], NUM_SAMPLES, replace(PARAMS, max_length=4), 1)
    assert len(completions.lengths) == NUM_SAMPLES, (
        "prompts that do not all fit into one forward pass"
    )
    generator.close()
