"""Responses of the real vLLM that continue with newer weights, all weights or LoRA updates.

`make test-engine` runs these.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.altered_vllm import alter
from helpers.policies import random_tokens
from helpers.ranks import call_on_ranks, one_group
from helpers.vllm_engine import (
    PROMPTS,
    SMALL_BUCKET,
    TOLERANCE,
    change_weights,
    generator_of,
    processes_of,
    vllm_model,
    vllm_overrides,
)
from helpers.weight_updates import Action, PlannedUpdates, Versions

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.finish_reasons import FINISH_LENGTH
from reinforce_rl.generation.base import PartialResponse, SamplingParams
from reinforce_rl.generation.engine import process
from reinforce_rl.generation.engine.generator import EngineGenerator
from reinforce_rl.generation.responses import new_responses
from reinforce_rl.megatron.lora import updates_of
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.model.model import CausalLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

AT_ONCE = 4  # requests that the engine decodes at a time; others wait
# Longer than a block of vLLM's cache on a CPU, 128 tokens, so that requests share prefixes.
PROMPT = Prompt(3, "", tuple(random_tokens(32, 140).tolist()))
PARAMS = SamplingParams(max_length=120, temperature=0.7)
SLOW = 0.05  # seconds per forward pass, so that commands arrive long before the end


@dataclass
class Engine:
    lm: CausalLM
    generator: EngineGenerator
    versions: Versions
    change: Callable[[], None]  # changes the weights

    def call(self, command: str, *arguments: object):
        assert self.generator._engine is not None
        return self.generator._engine.call(command, *arguments)

    def load(self) -> None:
        self.change()
        self.versions.keep(1)
        self.call("set_pace", 0.0)

    def once_drawing(self, action: Action, count: int = AT_ONCE) -> Callable[[], Action]:
        """Return a function that gives `action` when `count` requests have tokens."""

        def wait() -> Action:
            while self.call("with_tokens") < count:
                time.sleep(0.01)
            return action

        return wait

    def resume(
        self,
        responses: list[PartialResponse],
        updates: PlannedUpdates,
        params: SamplingParams = PARAMS,
        pace: float = 0.0,
    ) -> list[PartialResponse]:
        with self.generator.awake():
            self.call("set_pace", pace)
            advanced = self.generator.resume(responses, params, updates)
        expected = [(response.prompt, response.key) for response in responses]
        assert [(response.prompt, response.key) for response in advanced] == expected
        for response in advanced:
            assert len(response.log_probs) == len(response.versions) == len(response.tokens)
            assert list(response.versions) == sorted(response.versions)
        return advanced

    def gaps(
        self, version: int, responses: list[PartialResponse], weights: int | None = None
    ) -> list[float]:
        """Return the gaps of this version's tokens, under its weights or another version's."""
        gaps = self.versions.gaps(
            version if weights is None else weights, responses, PARAMS.temperature
        )
        of = [response.versions for response in responses]
        pairs = zip(itertools.chain(*gaps), itertools.chain(*of), strict=True)
        return [gap for gap, drawn in pairs if drawn == version]


@pytest.fixture(scope="module", params=["whole", "lora"])
def made(request, tmp_path_factory, mesh) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp(request.param)
    vllm_model(folder, max_positions=512)
    overrides = ["model.encoder_seq_length=512", f"engine.max_batch_size={AT_ONCE}"]
    if request.param == "lora":
        tuning = "model.peft.lora_tuning"
        overrides += ["model.peft.peft_scheme=lora", f"{tuning}.adapter_dim=3", f"{tuning}.alpha=7"]
    lm, generator = generator_of(folder, mesh, *vllm_overrides(), *overrides)
    alter(generator)
    random = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def change_updates() -> None:
        for parameter in itertools.chain(*(updates.parameters() for updates in updates_of(lm))):
            parameter.add_(torch.randn(parameter.shape, generator=random) * 0.2)

    versions = Versions(lm)
    versions.keep(0)
    change = change_updates if request.param == "lora" else lambda: change_weights(lm)
    yield Engine(
        lm,
        generator,
        versions,
        change,
    )
    generator.close()


@pytest.fixture
def engine(made) -> Engine:
    """Return an engine with the initial weights."""
    made.versions.restore(0)
    made.generator._was_restarted = False
    return made


def test_weights_that_change_within_responses(engine, monkeypatch):
    """Four responses are running and two wait.

    Waiting requests start with the new weights and see no cache of the old ones.
    """
    call = process.EngineProcess.call
    paused = []

    def noted(engine_process, command, *arguments, **options):
        paused.extend([call(engine_process, "passes")] if command == "resume" else [])
        result = call(engine_process, command, *arguments, **options)
        paused.extend([call(engine_process, "passes")] if command == "pause" else [])
        return result

    monkeypatch.setattr(process.EngineProcess, "call", noted)
    updates = PlannedUpdates("continue", engine.once_drawing("load"), load=engine.load)
    with engine.generator.awake():
        engine.call("set_pace", SLOW)
        responses = engine.generator.resume(new_responses([PROMPT], 6, 3), PARAMS, updates)
        last = engine.call("passes")
    assert paused[0] == paused[1] < last, "tokens were drawn while the weights changed"
    assert [response.finish_reason for response in responses] == [FINISH_LENGTH] * 6
    lengths = [len(response.tokens) for response in responses]
    assert lengths == [PARAMS.max_length] * 6
    for response in responses:
        assert list(response.versions) == sorted(response.versions)
    across = [response for response in responses if (response.versions[0] == 0)]
    new = [response for response in responses if (response.versions[0] == 1)]
    assert len(across) == AT_ONCE
    assert len(new) == 2
    assert all(set(response.versions) == {0, 1} for response in across)
    assert all(set(response.versions) == {1} for response in new)

    assert max(engine.gaps(0, across)) < TOLERANCE
    assert max(engine.gaps(1, across, weights=0)) > 10 * TOLERANCE, "the weights did not change"
    assert max(engine.gaps(1, across)) > 10 * TOLERANCE, "the cache was computed anew"
    assert max(engine.gaps(1, new)) < TOLERANCE
    again = engine.resume(new_responses([PROMPT], 2, 4), PlannedUpdates(version=1))
    assert max(engine.gaps(1, again)) < TOLERANCE
    assert max(engine.gaps(1, again, weights=0)) > 10 * TOLERANCE


def test_stopped_and_resumed_under_newer_weights(engine):
    stop = PlannedUpdates("continue", engine.once_drawing("stop"))
    partial = engine.resume(new_responses([PROMPT], 6, 3), stop, pace=SLOW)
    assert [response.finish_reason for response in partial] == [None] * 6
    expected = [False] * 2 + [True] * AT_ONCE
    assert sorted(bool(response.tokens) for response in partial) == expected
    assert all(set(response.versions) <= {0} for response in partial)
    engine.change()
    engine.versions.keep(1)
    responses = engine.resume(partial, PlannedUpdates(version=1))
    for response, before in zip(responses, partial, strict=True):
        count = len(before.tokens)
        assert response.tokens[:count] == before.tokens
        assert response.log_probs[:count] == before.log_probs
        assert response.versions == (0,) * count + (1,) * (PARAMS.max_length - count)
        assert response.finish_reason == FINISH_LENGTH
    for version in (0, 1):
        assert max(engine.gaps(version, responses)) < TOLERANCE
    assert max(engine.gaps(1, responses, weights=0)) > 10 * TOLERANCE


def test_a_greedy_response_in_parts_equals_the_whole(engine):
    """With a penalty for previous tokens, including the prompt.

    An end token must not come too early.
    """
    params = SamplingParams(60, 30, use_greedy=True, repetition_penalty=2.0, stop_token_ids=(19, 5))
    whole = engine.resume(new_responses(PROMPTS, 1, 3), PlannedUpdates(), params)
    early = engine.resume(
        new_responses(PROMPTS, 1, 3), PlannedUpdates(), replace(params, min_length=0)
    )
    for response, other in zip(whole, early, strict=True):
        assert len(other.tokens) < 12
        assert len(response.tokens) >= 30, "the least length changes nothing"
        assert len(set(response.tokens[:8])) > 4, "the penalty changes nothing"
    parts = new_responses(PROMPTS, 1, 3)
    lengths = []
    for _ in range(2):
        parts = engine.resume(
            parts, PlannedUpdates("continue", engine.once_drawing("stop", 2)), params, pace=SLOW
        )
        lengths.append([len(response.tokens) for response in parts])
    for first, second in zip(*lengths, strict=True):
        assert 0 < first < second
    responses = engine.resume(parts, PlannedUpdates(), params)
    for response, other in zip(responses, whole, strict=True):
        assert response.tokens == other.tokens
        assert response.versions == other.versions
        assert response.finish_reason == other.finish_reason
        assert response.log_probs == pytest.approx(other.log_probs, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("made", "name", "command"),
    [
        ("whole", "host", "advance"),
        ("whole", "EngineCore", "pause"),
        ("whole", "EngineCore", "resume"),
        ("lora", "Worker", "update"),
    ],
    indirect=["made"],
)
def test_killed_in_the_middle_it_begins_again_with_the_present_weights(
    engine, monkeypatch, caplog, name, command
):
    """The process is killed in the first such command after the pause."""
    call = process.EngineProcess.call
    seen = []

    def struck(engine_process, called, *arguments, **options):
        seen.append("update" if called in ("update_weights", "load_adapter") else called)
        if seen[-1] == command and "pause" in seen and "struck" not in seen:
            seen.append("struck")
            processes_of(engine.generator)[name].kill()
        return call(engine_process, called, *arguments, **options)

    updates = PlannedUpdates("continue", engine.once_drawing("load"), load=engine.load)
    monkeypatch.setattr(process.EngineProcess, "call", struck)
    responses = engine.resume(new_responses([PROMPT], 6, 3), updates, pace=SLOW)
    assert "struck" in seen
    assert "event=engine_restarted" in caplog.text
    assert [response.finish_reason for response in responses] == [FINISH_LENGTH] * 6
    assert {version for response in responses for version in response.versions} == {updates.version}
    assert updates.version == (0 if command == "pause" else 1)
    assert max(engine.gaps(updates.version, responses)) < TOLERANCE


def load_within_responses(folder: Path) -> dict[str, Any]:
    """Load weights mid-response on two tensor-parallel ranks; return actions and responses."""
    overrides = (
        "trainer.devices=2",
        "model.tensor_model_parallel_size=2",
        "engine.tensor_parallel_size=1",
        "model.encoder_seq_length=128",
    )
    params = SamplingParams(max_length=100)
    with one_group(500), parallel_mesh(2) as mesh:
        lm, generator = generator_of(folder, mesh, *vllm_overrides(), *overrides)
        generator._bucket_bytes = SMALL_BUCKET
        alter(generator)
        engine = generator._engine
        versions = Versions(lm)
        versions.keep(0)

        def once_drawing() -> Action:
            while engine is not None and engine.call("with_tokens") < 4:
                time.sleep(0.01)
            return mesh.from_model_parallel_rank_0("load")

        def load() -> None:
            change_weights(lm)
            versions.keep(1)

        updates = PlannedUpdates("continue", once_drawing, "continue", "stop", load=load)
        with generator.awake():
            if engine is not None:
                engine.call("set_pace", SLOW)
            partial = generator.resume(new_responses(PROMPTS, 2, 3), params, updates)
        with generator.awake():
            responses = generator.resume(partial, params, PlannedUpdates(version=1))
        generator.close()
        gaps = versions.gaps(0, responses)
    gaps_of_drawn = [
        row[: response.versions.count(0)] for row, response in zip(gaps, responses, strict=True)
    ]
    return {
        "running": updates.running,
        "partial": partial,
        "responses": responses,
        "gap": max(itertools.chain(*gaps_of_drawn)),
    }


def test_two_tensor_parallel_ranks_get_the_same_actions(tmp_path):
    vllm_model(tmp_path, max_positions=128)
    first, second = call_on_ranks(load_within_responses, 2, tmp_path, timeout=500)
    assert first == second
    assert first["running"][:2] == [4, 4]
    assert first["gap"] < TOLERANCE
    finish_reasons = [response.finish_reason for response in first["responses"]]
    assert finish_reasons == [FINISH_LENGTH] * 4
    assert all(set(response.versions) == {0, 1} for response in first["responses"])
    for response, before in zip(first["responses"], first["partial"], strict=True):
        count = len(before.tokens)
        assert response.tokens[:count] == before.tokens
        assert response.versions[:count] == before.versions
