"""Tests of every engine: TensorRT-LLM's fake, and the real vLLM by `make test-engine`."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.engine_fake import install_fake, uninstalled_after
from helpers.errors import raises_error
from helpers.partners import Partner
from helpers.vllm_engine import (
    NUM_SAMPLES,
    PARAMS,
    PROMPTS,
    draw,
    generator_of,
    vllm_model,
    vllm_overrides,
)
from helpers.weight_updates import PlannedUpdates

from reinforce_rl.data.finish_reasons import FINISH_LENGTH, FINISH_STOP
from reinforce_rl.generation.base import PartialResponse
from reinforce_rl.generation.engine import Answer, process
from reinforce_rl.generation.engine import generator as of_engine
from reinforce_rl.generation.engine.generator import EngineGenerator
from reinforce_rl.generation.responses import converse_in_rounds, new_responses

pytestmark = pytest.mark.timeout(600)
# Each of these starts vLLM once or twice more; test_vllm.py and test_vllm_weights.py have similar
# tests.
vllm_is_slow = pytest.mark.parametrize(
    "engine",
    ["tensorrt_llm", pytest.param("vllm", marks=[pytest.mark.engine, pytest.mark.slow])],
    indirect=True,
)


@pytest.fixture(
    scope="module", params=["tensorrt_llm", pytest.param("vllm", marks=pytest.mark.engine)]
)
def engine(request, tmp_path_factory, mesh) -> Iterator[EngineGenerator]:
    folder = tmp_path_factory.mktemp(request.param)
    vllm_model(folder)
    is_fake = request.param == "tensorrt_llm"
    with uninstalled_after() if is_fake else contextlib.nullcontext():
        if is_fake:
            install_fake(folder / "engine", model="scripted")
            overrides = ["generation=tensorrt_llm", "engine.request_timeout_seconds=5"]
        else:
            overrides = [*vllm_overrides(), "engine.request_timeout_seconds=20"]
        _, generator = generator_of(folder, mesh, *overrides)
        yield generator
        generator.close()


@pytest.fixture(scope="module")
def expected(engine) -> torch.Tensor:
    return draw(engine).tokens


@pytest.fixture(autouse=True)
def another_restart(engine):
    engine._was_restarted = False


def strike(
    engine: EngineGenerator,
    monkeypatch,
    command: str,
    attack: Callable[[Any], None],
    times: int = 1,
) -> None:
    """Call `attack` with the engine's process at the start of the next commands."""
    call = process.EngineProcess.call
    left = [command] * times

    def struck(engine_process, name, *arguments, **options):
        if name in left:
            left.remove(name)
            attack(engine_process._child)
        return call(engine_process, name, *arguments, **options)

    monkeypatch.setattr(process.EngineProcess, "call", struck)


def kill_soon(child: Any) -> None:
    """Kill it during the command."""
    child.send_signal(signal.SIGSTOP)
    threading.Timer(0.5, child.send_signal, (signal.SIGKILL,)).start()


def test_a_sample_depends_on_seed_prompt_and_sample_alone(engine, expected):
    with engine.awake():
        alone = engine.generate(PROMPTS[1:], NUM_SAMPLES, PARAMS, 3)
        others = engine.generate(PROMPTS, NUM_SAMPLES, PARAMS, 4)
    width = alone.tokens.shape[1]
    assert torch.equal(expected[NUM_SAMPLES:, :width], alone.tokens)
    assert len({tuple(row) for row in expected.tolist()}) > 4
    assert others.tokens.shape != expected.shape or not torch.equal(others.tokens, expected)
    assert alone.log_probs is not None
    assert alone.log_probs.shape == alone.tokens.shape


@pytest.mark.more
@pytest.mark.parametrize("command", ["generate", "update_weights"])
def test_an_engine_that_dies_in_a_command_is_restarted(
    engine, expected, monkeypatch, caplog, command
):
    strike(engine, monkeypatch, command, kill_soon)
    assert torch.equal(draw(engine).tokens, expected)
    assert f"event=engine_restarted reason=the engine ended in {command} (status -9)" in caplog.text


@pytest.mark.more
@vllm_is_slow
def test_an_engine_that_hangs_is_killed_and_restarted(engine, expected, monkeypatch, caplog):
    monkeypatch.setattr(process, "ABORT_SECONDS", 0.0)
    strike(engine, monkeypatch, "generate", lambda child: child.send_signal(signal.SIGSTOP))
    assert torch.equal(draw(engine).tokens, expected)
    seconds = engine._config.request_timeout_seconds
    assert (
        f"no answer to generate within {seconds:g} s (engine.request_timeout_seconds)"
        in caplog.text
    )


@pytest.mark.more
@vllm_is_slow
def test_the_second_time_the_run_ends(engine, expected, monkeypatch):
    strike(engine, monkeypatch, "generate", kill_soon, times=2)
    with raises_error("generation.engine.failed_again", "generate", "status -9"):
        draw(engine)


def misdirect(engine: EngineGenerator, monkeypatch, times: int) -> None:
    """Send the next buckets to a device that no worker has."""
    bucket_of = engine._adapter.bucket_of
    count = 0

    def misdirected(offers):
        nonlocal count
        bucket = bucket_of(offers)
        count = count + 1
        if count > times:
            return bucket
        (place,) = bucket["places"].values()
        return {**bucket, "places": {"GPU-9": place}}

    monkeypatch.setattr(engine._adapter, "bucket_of", misdirected)


REFUSED = ("update_weights", "no weights came for cpu", "but for GPU-9")


@pytest.mark.more
@vllm_is_slow
def test_an_engine_that_refuses_its_weights_is_restarted(engine, expected, monkeypatch, caplog):
    misdirect(engine, monkeypatch, times=1)
    assert torch.equal(draw(engine).tokens, expected)
    assert "event=engine_restarted reason=the engine's update_weights failed" in caplog.text


@vllm_is_slow
def test_an_engine_that_always_refuses_them_ends_the_run(engine, expected, monkeypatch):
    misdirect(engine, monkeypatch, times=99)
    with raises_error("generation.engine.failed_again", *REFUSED):
        draw(engine)


class TestResumedResponses:
    def resume(
        self, engine: EngineGenerator, responses=None, updates: PlannedUpdates | None = None
    ):
        with engine.awake():
            responses = new_responses(PROMPTS, NUM_SAMPLES, 3) if responses is None else responses
            return engine.resume(
                responses, PARAMS, PlannedUpdates() if updates is None else updates
            )

    def check(
        self, responses: list[PartialResponse], expected: torch.Tensor, version: int = 0
    ) -> None:
        """Check that they equal the results of `generate`, and that they have ended."""
        assert len(responses) == len(expected)
        for response, row in zip(responses, expected, strict=True):
            count = len(response.tokens)
            assert list(response.tokens) == row[:count].tolist()
            assert not row[count:].any()
            assert len(response.log_probs) == count
            assert response.versions == (version,) * count
            ends = count and response.tokens[-1] in PARAMS.stop_token_ids
            assert response.finish_reason == (FINISH_STOP if ends else FINISH_LENGTH)

    def test_from_their_beginning_they_equal_generate(self, engine, expected):
        updates = PlannedUpdates(version=5)
        self.check(self.resume(engine, updates=updates), expected, version=5)
        assert updates.running[0] == len(expected)
        assert all(updates.running)

    def test_what_is_at_its_end_is_not_asked_for(self, engine, expected, monkeypatch):
        advance = process.EngineProcess.advance
        asked = []

        def noted(engine_process, requests, wait):
            asked.extend(requests)
            return advance(engine_process, requests, wait)

        monkeypatch.setattr(process.EngineProcess, "advance", noted)
        ended = self.resume(engine)
        shorter = len(expected) - 3
        del asked[:]
        responses = self.resume(
            engine, [*ended[:shorter], *new_responses(PROMPTS, NUM_SAMPLES, 3)[shorter:]]
        )
        assert responses == ended
        assert asked == list(range(shorter, len(expected)))
        del asked[:]
        tokens = (4,) * PARAMS.max_length
        log_probs = (-1.0,) * PARAMS.max_length
        long = PartialResponse(PROMPTS[0], 1, tokens, log_probs, (0,) * 8)
        finish_reasons = [
            response.finish_reason for response in self.resume(engine, [long, ended[0]])
        ]
        assert finish_reasons == [
            FINISH_LENGTH,
            ended[0].finish_reason,
        ]
        assert asked == []

    def test_stopped_at_once_they_are_as_before(self, engine):
        responses = [
            PartialResponse(PROMPTS[0], 1, (4,), (-1.0,), (2,)),
            PartialResponse(PROMPTS[1], 2),
        ]
        updates = PlannedUpdates("stop")
        assert self.resume(engine, responses, updates) == responses
        assert updates.running == [2]

    def test_an_engine_that_dies_is_restarted(self, engine, expected, monkeypatch, caplog):
        strike(engine, monkeypatch, "advance", kill_soon)
        self.check(self.resume(engine), expected)
        assert (
            "event=engine_restarted reason=the engine ended in advance (status -9)" in caplog.text
        )

    def lose(self, monkeypatch, times: dict[int, int]) -> None:
        """Lose the answers of these requests so many times; all answers come at once."""
        advance = process.EngineProcess.advance
        left = dict(times)
        monkeypatch.setattr(of_engine, "POLL_SECONDS", 60.0)

        def lost(engine_process, requests, wait):
            number, answers = advance(engine_process, requests, wait)
            for row in answers.keys() & left:
                left[row] -= 1
                if left[row] >= 0:
                    answers[row] = Answer(fault="it is lost")
            return number, answers

        monkeypatch.setattr(process.EngineProcess, "advance", lost)

    def test_a_request_that_is_lost_is_made_again(self, engine, expected, monkeypatch, caplog):
        self.lose(monkeypatch, {1: 1, 6: 1})
        self.check(self.resume(engine), expected)
        assert "event=requests_lost count=2 reason=it is lost" in caplog.text
        assert "engine_restarted" not in caplog.text

    @vllm_is_slow
    def test_lost_twice_it_ends_the_run_and_the_engine(self, engine, expected, monkeypatch, caplog):
        self.lose(monkeypatch, {1: 2, 6: 1})
        lost = ("1 of 2 requests", "[7]", "it is lost", "engine.request_timeout_seconds")
        with raises_error("generation.engine.lost_requests_twice", *lost):
            self.resume(engine)
        assert engine._engine is not None
        assert engine._engine._child is None
        assert torch.equal(draw(engine).tokens, expected), (
            "another is started with the next weights"
        )
        assert "engine_restarted" not in caplog.text

    def converse(self, engine: EngineGenerator, **options: int) -> list[list[PartialResponse]]:
        responses = [
            replace(response, limit=13) for response in new_responses(PROMPTS, NUM_SAMPLES, 3)
        ]
        partner = Partner(responses, room=13, vocab_size=20, answers_cut=True, **options)
        with engine.awake():
            if options:
                engine.converse(responses, PARAMS, partner)
            else:
                converse_in_rounds(engine, responses, PARAMS, partner)
        return partner.answers

    def test_turns_are_answered_as_in_rounds(self, engine):
        rounds = self.converse(engine)
        assert max(len(answers) for answers in rounds) > 2
        assert self.converse(engine, patience=9) == rounds

    def test_turns_outlive_lost_requests_and_a_restart(self, engine, monkeypatch, caplog):
        rounds = self.converse(engine)
        self.lose(monkeypatch, {1: 1, 6: 1})
        assert self.converse(engine, patience=3) == rounds
        assert "event=requests_lost" in caplog.text
        strike(engine, monkeypatch, "advance", kill_soon)
        assert self.converse(engine, patience=3) == rounds
        assert "event=engine_restarted" in caplog.text

    @vllm_is_slow
    def test_if_all_are_lost_the_engine_is_restarted(self, engine, expected, monkeypatch, caplog):
        times = dict.fromkeys(range(len(expected)), 1)
        self.lose(monkeypatch, times)
        self.check(self.resume(engine), expected)
        assert (
            "event=engine_restarted reason=the engine lost all 8 requests: it is lost"
            in caplog.text
        )
