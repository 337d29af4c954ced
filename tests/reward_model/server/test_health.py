"""The scorer's progress as the front door sees it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from reinforce_rl.reward_model.server import health
from reinforce_rl.reward_model.server.health import (
    Health,
    Progress,
    ProgressReader,
    Snapshot,
    Verdict,
)
from reinforce_rl.rewards import base


class Server:
    """Counts the health checks, and answers at once unless it hangs."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.questions = 0
        self.hangs = False
        self.reader = ProgressReader(self.ask)

    def ask(self) -> None:
        self.questions += 1
        if not self.hangs:
            self.reader.answer(asdict(self.progress.read()))


def test_each_answer_is_new() -> None:
    async def read_twice() -> list[Snapshot]:
        server = Server()
        first = await server.reader.read()
        server.progress.begin()
        server.progress.count(2, {base.STATUS_OK: 3, base.STATUS_EMPTY: 1}, 11, 0.02)
        return [first, await server.reader.read()]

    before, after = asyncio.run(read_twice())
    assert before.busy == 0
    assert before.samples == 0
    assert after.busy == 1
    assert after.batches == 1
    assert after.requests == 2
    assert after.tokens == 11
    assert after.samples == 4
    assert after.failed == 1
    assert after.seconds == 0.02
    bounds = enumerate(health.SECONDS_BOUNDS)
    counts = [after.buckets[i] for i, bound in bounds if bound == 0.025]
    assert counts == [1]
    assert sum(after.buckets) == 1


def test_a_server_that_hangs_is_asked_once_and_its_last_answer_ages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "ANSWER_SECONDS", 0.05)

    async def read_meanwhile() -> tuple[Server, list[Snapshot]]:
        server = Server()
        server.progress.begin()
        last = await server.reader.read()
        server.hangs = True
        server.progress.end()
        unanswered = await asyncio.gather(server.reader.read(), server.reader.read())
        unanswered.append(await server.reader.read())
        return server, [last, *unanswered]

    server, (last, *unanswered) = asyncio.run(read_meanwhile())
    assert server.questions == 2
    assert unanswered == [last] * 3
    assert last.busy == 1
    assert last.quiet_seconds >= 0.1
    assert last.why_stuck(0.05) is not None
    assert last.why_stuck(60.0) is None


def test_an_answer_that_comes_late_ends_the_wait_and_the_next_read_asks_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "ANSWER_SECONDS", 30.0)

    async def read_late() -> tuple[Server, Snapshot, float]:
        server = Server()
        server.hangs = True
        server.progress.begin()
        reading = asyncio.create_task(server.reader.read())
        await asyncio.sleep(0.01)
        started = time.monotonic()
        server.reader.answer(asdict(server.progress.read()))
        late = await reading
        seconds = time.monotonic() - started
        server.hangs = False
        await server.reader.read()
        return server, late, seconds

    server, late, seconds = asyncio.run(read_late())
    assert late.busy == 1
    assert seconds < 10.0
    assert server.questions == 2


@pytest.mark.parametrize(
    ("is_busy", "model_timeout_seconds", "health_timeout_seconds", "is_healthy"),
    [(True, 60.0, 0.05, True), (True, 0.05, 60.0, False), (False, 60.0, 0.05, False)],
)
def test_a_silent_process_is_named_and_not_its_model(
    is_busy: bool,
    model_timeout_seconds: float,
    health_timeout_seconds: float,
    is_healthy: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "ANSWER_SECONDS", 0.1)

    async def never_asked(body: bytes) -> tuple[int, bytes]:
        raise AssertionError("no sample is sent to a process that is silent")

    async def check() -> Verdict:
        server = Server()
        if is_busy:
            server.progress.begin()
        await server.reader.read()
        server.hangs = True
        inference = SimpleNamespace(
            model_timeout_seconds=model_timeout_seconds,
            health_timeout_seconds=health_timeout_seconds,
        )
        settings: Any = SimpleNamespace(canary="{}", inference=inference)
        return await Health(never_asked, lambda: 0, server.reader, settings).check()

    verdict = asyncio.run(check())
    assert verdict.healthy == is_healthy
    assert "the server's process has been silent" in verdict.text
