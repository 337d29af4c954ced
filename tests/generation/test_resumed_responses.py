"""Responses of the native engine that stop and resume while weights change."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.flash import decode_statically
from helpers.policies import megatron_model, transformers_model
from helpers.weight_updates import PlannedUpdates

from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import PartialResponse, SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.generation.responses import new_responses

PARAMS = SamplingParams(max_length=20, stop_token_ids=(2, 5, 6, 7, 8))
KINDS = {
    "stop tokens": PARAMS,
    "no end but the limit": SamplingParams(max_length=20),
    "greedy": replace(PARAMS, use_greedy=True),
    "rules": replace(
        PARAMS, min_length=7, repetition_penalty=1.3, temperature=0.8, top_k=20, top_p=0.9
    ),
    "end strings": replace(PARAMS, end_strings=("e", "th"), min_length=5),
}


def whole(
    engine: NativeGenerator, begun: list[PartialResponse], params: SamplingParams
) -> list[PartialResponse]:
    return engine.resume(begun, params, PlannedUpdates(version=3))


def assert_same(responses: list[PartialResponse], expected: list[PartialResponse]) -> None:
    for mine, other in zip(responses, expected, strict=True):
        assert mine.prompt.id == other.prompt.id
        assert mine.tokens == other.tokens
        assert mine.finish_reason == other.finish_reason
        assert mine.log_probs == pytest.approx(other.log_probs, abs=1e-6)
        assert len(mine.versions) == len(mine.tokens)


def engine_of(lm: Any, folder: Path, max_tokens: int | None = None) -> NativeGenerator:
    return NativeGenerator(lm, load_tokenizer(folder), max_tokens, use_graphs=False)


@pytest.fixture(params=["plain", "static"])
def decoder(request, monkeypatch):
    if request.param == "static":
        decode_statically(monkeypatch)


def test_a_whole_call_is_generate(decoder, lm, folder, prompts):
    engine = engine_of(lm, folder)
    expected = engine.generate(prompts, 4, PARAMS, seed=3)
    responses = whole(engine, new_responses(prompts, 4, 3), PARAMS)
    assert expected.log_probs is not None
    for row, response in enumerate(responses):
        count = int(expected.lengths[row])
        assert list(response.tokens) == expected.tokens[row, :count].tolist()
        assert list(response.log_probs) == expected.log_probs[row, :count].tolist()
        assert response.finish_reason == expected.finish_reasons[row]
        assert set(response.versions) <= {3}


@pytest.mark.parametrize("max_tokens", [None, 75])
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_and_resumed(kind, max_tokens, decoder, lm, folder, prompts):
    engine = engine_of(lm, folder, max_tokens)
    params = KINDS[kind]
    expected = whole(engine, new_responses(prompts, 4, 3), params)
    responses = new_responses(prompts, 4, 3)
    calls = 0
    was_partial = False
    while any(response.finish_reason is None for response in responses):
        responses = engine.resume(
            responses, params, PlannedUpdates(*["continue"] * (calls % 3), "stop")
        )
        was_partial |= any(
            response.finish_reason is None and response.tokens for response in responses
        )
        calls += 1
    assert_same(responses, expected)
    assert calls > 1
    assert was_partial


def test_ended_responses_are_left_unchanged(decoder, lm, folder, prompts):
    engine = engine_of(lm, folder)
    ended = [
        replace(response, tokens=(9, 2), finish_reason="stop")
        for response in new_responses(prompts[:1], 2, 3)
    ]
    begun = [*ended, *new_responses(prompts[1:], 2, 3)]
    responses = whole(engine, begun, PARAMS)
    assert responses[:2] == ended
    expected = whole(engine, begun[2:], PARAMS)
    assert_same(responses[2:], expected)
    assert whole(engine, ended, PARAMS) == ended


class Policy:
    """A model whose weights change in place, and transformers' models of each version."""

    def __init__(self, folder: Path, mesh: Any):
        self.lm = megatron_model(folder, mesh, torch.float64)
        other = transformers_model(folder, torch.float64)
        self.versions = [other, copy.deepcopy(other)]
        self._next = megatron_model(folder, mesh, torch.float64)
        with torch.no_grad():
            for model in (self._next, self.versions[1]):
                for name, parameter in model.named_parameters():
                    if "norm" in name:
                        parameter.mul_(1.3)

    @torch.no_grad()
    def change(self) -> None:
        pairs = zip(self.lm.parameters(), self._next.parameters(), strict=True)
        for parameter, new in pairs:
            parameter.copy_(new)

    @torch.no_grad()
    def log_probs(self, response: PartialResponse, version: int) -> list[float]:
        """Return the response's log-probs under a single version."""
        tokens = torch.tensor([[*response.prompt.tokens, *response.tokens]])
        logits = self.versions[version](tokens).logits[0, len(response.prompt.tokens) - 1 : -1]
        table = logits.log_softmax(dim=-1)
        return table[range(len(response.tokens)), list(response.tokens)].tolist()

    @torch.no_grad()
    def kept(self, response: PartialResponse, count: int) -> list[float]:
        """Return the log-probs after `count` tokens under version 1.

        All but the last of these tokens keep the keys and values of version 0.
        """
        old, new = self.versions
        prompt = list(response.prompt.tokens)
        tokens = list(response.tokens)
        cache = new(torch.tensor([prompt]), use_cache=True).past_key_values
        earlier = old(torch.tensor([prompt + tokens[: count - 1]]), use_cache=True).past_key_values
        for layer, other in zip(cache.layers, earlier.layers, strict=True):
            layer.keys = torch.cat((layer.keys, other.keys[:, :, len(prompt) :]), dim=2)
            layer.values = torch.cat((layer.values, other.values[:, :, len(prompt) :]), dim=2)
        rest = torch.tensor([tokens[count - 1 :]])
        table = new(rest, past_key_values=cache).logits[0, :-1].log_softmax(dim=-1)
        return table[range(len(tokens) - count), tokens[count:]].tolist()


@pytest.fixture
def policy(folder, mesh):
    return Policy(folder, mesh)


LONG = SamplingParams(max_length=20)


def test_weights_that_change_with_the_cache_kept(decoder, policy, folder, prompts):
    responses = engine_of(policy.lm, folder).resume(
        new_responses(prompts, 2, 3),
        LONG,
        PlannedUpdates("continue", "load", load=policy.change, version=3),
    )
    for response in responses:
        count = response.versions.index(4)
        expected = (3,) * count + (4,) * (20 - count)
        assert response.versions == expected
        assert 0 < count < 20
        assert response.log_probs[:count] == pytest.approx(
            policy.log_probs(response, 0)[:count], abs=1e-5
        )
        assert response.log_probs[count:] == pytest.approx(policy.kept(response, count), abs=1e-5)
        anew = policy.log_probs(response, 1)
        gaps = [abs(a - b) for a, b in zip(response.log_probs, anew, strict=True)]
        assert max(gaps) > 0.01


def test_weights_that_change_with_the_cache_rebuilt(decoder, policy, folder, prompts):
    engine = engine_of(policy.lm, folder)
    stopped = engine.resume(
        new_responses(prompts, 2, 3), LONG, PlannedUpdates("continue", "stop", version=3)
    )
    policy.change()
    for response in engine.resume(stopped, LONG, PlannedUpdates(version=4)):
        count = response.versions.index(4)
        assert 0 < count < 20
        expected = policy.log_probs(response, 0)[:count]
        assert response.log_probs[:count] == pytest.approx(expected, abs=1e-5)
        assert response.log_probs[count:] == pytest.approx(
            policy.log_probs(response, 1)[count:], abs=1e-5
        )


def test_samples_that_wait_are_of_the_new_weights_alone(decoder, policy, folder, prompts):
    """A prompt with waiting samples is read again."""
    engine = engine_of(policy.lm, folder, max_tokens=75)
    updates = PlannedUpdates("load", load=policy.change, version=3)
    responses = engine.resume(new_responses(prompts, 4, 3), LONG, updates)
    late = [response for response in responses if set(response.versions) == {4}]
    assert len(late) > 10
    assert updates.running[0] == len(responses), (
        "those that wait count: a call is not over at half of them"
    )
    for response in late:
        assert response.log_probs == pytest.approx(policy.log_probs(response, 1), abs=1e-5)


@pytest.mark.parametrize("is_lean", [True, False])
def test_copies_of_the_weights_are_renewed(is_lean, policy, folder, prompts):
    engine = NativeGenerator(policy.lm, load_tokenizer(folder), 30, is_lean=is_lean)
    responses = engine.resume(
        new_responses(prompts[:1], 3, 3),
        LONG,
        PlannedUpdates("load", load=policy.change, version=3),
    )
    expected = policy.log_probs(responses[-1], 1)
    assert responses[-1].log_probs == pytest.approx(expected, abs=1e-5)
