"""Generation by the real vLLM on a CPU, in the least time; `make test-engine` has the rest, in test_vllm.py."""

from __future__ import annotations

import pytest
import torch
from helpers.vllm_engine import TOLERANCE, change_weights, draw, engine_generator, log_prob_gap, vllm_model


@pytest.mark.timeout(900)  # it may have to make vLLM's environment
def test_log_probs_are_the_trainers_before_and_after_an_update(tmp_path, mesh):
    vllm_model(tmp_path)
    lm, generator = engine_generator(tmp_path, mesh)
    before = draw(generator)
    assert log_prob_gap(lm, before) < TOLERANCE
    change_weights(lm)
    after = draw(generator)
    assert log_prob_gap(lm, after) < TOLERANCE
    assert log_prob_gap(lm, before) > 10 * TOLERANCE, "the update changed nothing"
    assert torch.equal(draw(generator).tokens, after.tokens), "the same seeds"
    generator.close()
