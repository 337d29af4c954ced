"""How many requests are held, in what order they go on, and when they are told to come back."""

from __future__ import annotations

import asyncio

import pytest

from reinforce_rl.config.rewards import InferenceConfig
from reinforce_rl.reward_model.server.admission import (
    BUFFERED_REQUESTS,
    Admission,
    FrontSettings,
    Refusal,
    check_length,
)


def admission_of(in_flight: int, queue: int) -> Admission:
    inference = InferenceConfig(max_in_flight=in_flight, max_queue=queue)
    return Admission(
        FrontSettings(inference=inference, max_request_bytes=1000, max_sequence_length=1)
    )


async def hold(admission: Admission, name: str, order: list[str], release: asyncio.Event) -> None:
    async with admission.slot():
        order.append(name)
        await release.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_turns_come_in_order_and_one_too_many_is_busy():
    async def run() -> None:
        admission = admission_of(2, 2)
        order = []
        release = asyncio.Event()
        tasks = [asyncio.create_task(hold(admission, name, order, release)) for name in "abcd"]
        await settle()
        assert (order, admission.in_flight, admission.queued) == (["a", "b"], 2, 2)
        with pytest.raises(Refusal) as caught:
            await hold(admission, "e", order, release)
        assert caught.value.code == 503
        assert caught.value.retry_after is not None and caught.value.retry_after >= 1
        release.set()
        await asyncio.gather(*tasks)
        assert (order, admission.in_flight, admission.queued) == (list("abcd"), 0, 0)

    asyncio.run(run())


def test_whoever_hangs_up_frees_the_place():
    async def run() -> None:
        admission = admission_of(1, 5)
        order = []
        release = asyncio.Event()
        tasks = {name: asyncio.create_task(hold(admission, name, order, release)) for name in "abc"}
        await settle()
        tasks["b"].cancel()  # one that waits
        await settle()
        assert (admission.in_flight, admission.queued) == (1, 1)
        tasks["a"].cancel()  # the one that is served
        await settle()
        assert (order, admission.in_flight, admission.queued) == (["a", "c"], 1, 0)
        tasks["c"].cancel()
        await settle()
        assert (admission.in_flight, admission.queued) == (0, 0)
        release.set()
        await hold(admission, "d", order, release)
        assert order == ["a", "c", "d"]

    asyncio.run(run())


def test_a_turn_that_comes_together_with_the_hang_up_is_passed_on():
    async def run() -> None:
        admission = admission_of(1, 5)
        order = []
        release = asyncio.Event()
        first = asyncio.Event()
        tasks = [asyncio.create_task(hold(admission, "a", order, first))]
        tasks += [asyncio.create_task(hold(admission, name, order, release)) for name in "bc"]
        await settle()
        first.set()
        await asyncio.sleep(0)  # a is awake, and gives b its turn within this step
        tasks[1].cancel()
        await settle()
        assert (order, admission.in_flight) == (["a", "c"], 1)
        release.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert admission.in_flight == 0

    asyncio.run(run())


def test_a_drain_sends_those_that_wait_away_and_keeps_the_others():
    async def run() -> None:
        admission = admission_of(1, 5)
        order = []
        release = asyncio.Event()
        served, waiting = (
            asyncio.create_task(hold(admission, name, order, release)) for name in "ab"
        )
        await settle()
        admission.drain()
        await settle()
        with pytest.raises(Refusal, match="stopping"):
            await waiting
        with pytest.raises(Refusal, match="stopping"):
            await hold(admission, "c", order, release)
        assert not served.done()
        release.set()
        await served
        assert admission.in_flight == 0

    asyncio.run(run())


def test_bodies_share_a_bounded_memory():
    admission = admission_of(4, 4)
    admission.hold(1000 * (BUFFERED_REQUESTS - 1))
    admission.hold(900)
    admission.hold(100)
    with pytest.raises(Refusal, match="memory") as caught:
        admission.hold(1)
    assert caught.value.code == 503
    admission.release(1000 * BUFFERED_REQUESTS)
    admission.hold(1000 * BUFFERED_REQUESTS)


def test_the_time_to_come_back_follows_the_queue(monkeypatch):
    admission = admission_of(2, 100)
    admission.note_seconds(3.0)
    assert admission.retry_after() == 3
    admission._inside = 20
    assert admission.retry_after() == 30
    admission._inside = 2000
    assert admission.retry_after() == 60


def test_a_body_has_a_greatest_length():
    limits = FrontSettings(
        inference=InferenceConfig(), max_request_bytes=10_000, max_sequence_length=1
    )
    check_length(10_000, limits)
    check_length(None, limits)
    with pytest.raises(Refusal, match=r"10001 bytes.*at most 10000"):
        check_length(10_001, limits)
