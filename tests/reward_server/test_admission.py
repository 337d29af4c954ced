"""How many requests are held, in what order they go on, and when they are told to come back."""

from __future__ import annotations

import asyncio

import pytest

from reinforce_rl.reward_server.front.admission import BUFFERED_REQUESTS, Gate
from reinforce_rl.reward_server.front.limits import FrontLimits, Refusal


def gate_of(in_flight: int, queue: int) -> Gate:
    return Gate(FrontLimits(1000, 8, 64, max_in_flight=in_flight, max_queue=queue))


async def hold(gate: Gate, name: str, order: list[str], release: asyncio.Event) -> None:
    with gate.admitted():
        async with gate.slot():
            order.append(name)
            await release.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_turns_come_in_order_and_one_too_many_is_busy():
    async def run() -> None:
        gate, order, release = gate_of(2, 2), [], asyncio.Event()
        tasks = [asyncio.create_task(hold(gate, name, order, release)) for name in "abcd"]
        await settle()
        assert (order, gate.in_flight, gate.queued) == (["a", "b"], 2, 2)
        with pytest.raises(Refusal) as caught, gate.admitted():
            pass
        assert caught.value.code == 503
        assert caught.value.retry_after is not None and caught.value.retry_after >= 1
        release.set()
        await asyncio.gather(*tasks)
        assert (order, gate.in_flight, gate.queued) == (list("abcd"), 0, 0)

    asyncio.run(run())


def test_whoever_hangs_up_frees_the_place():
    async def run() -> None:
        gate, order, release = gate_of(1, 5), [], asyncio.Event()
        tasks = {name: asyncio.create_task(hold(gate, name, order, release)) for name in "abc"}
        await settle()
        tasks["b"].cancel()  # one that waits
        await settle()
        assert (gate.in_flight, gate.queued) == (1, 1)
        tasks["a"].cancel()  # the one that is served
        await settle()
        assert (order, gate.in_flight, gate.queued) == (["a", "c"], 1, 0)
        tasks["c"].cancel()
        await settle()
        assert (gate.in_flight, gate.queued) == (0, 0)
        release.set()
        await hold(gate, "d", order, release)
        assert order == ["a", "c", "d"]

    asyncio.run(run())


def test_a_turn_that_comes_together_with_the_hang_up_is_passed_on():
    async def run() -> None:
        gate, order, release = gate_of(1, 5), [], asyncio.Event()
        first = asyncio.Event()
        tasks = [asyncio.create_task(hold(gate, "a", order, first))]
        tasks += [asyncio.create_task(hold(gate, name, order, release)) for name in "bc"]
        await settle()
        first.set()
        await asyncio.sleep(0)  # a is awake, and gives b its turn within this step
        tasks[1].cancel()
        await settle()
        assert (order, gate.in_flight) == (["a", "c"], 1)
        release.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.in_flight == 0

    asyncio.run(run())


def test_a_drain_sends_those_that_wait_away_and_keeps_the_others():
    async def run() -> None:
        gate, order, release = gate_of(1, 5), [], asyncio.Event()
        served, waiting = (asyncio.create_task(hold(gate, name, order, release)) for name in "ab")
        await settle()
        gate.drain()
        await settle()
        with pytest.raises(Refusal, match="stopping"):
            await waiting
        with pytest.raises(Refusal, match="stopping"), gate.admitted():
            pass
        assert not served.done()
        release.set()
        await served
        assert gate.in_flight == 0

    asyncio.run(run())


def test_bodies_share_a_bounded_memory():
    gate = gate_of(4, 4)
    with gate.memory() as first, gate.memory() as second:
        first.grow_to(1000 * (BUFFERED_REQUESTS - 1))
        second.grow_to(900)
        second.grow_to(1000)
        with pytest.raises(Refusal, match="memory") as caught:
            second.grow_to(1001)
        assert caught.value.code == 503
    with gate.memory() as third:
        third.grow_to(1000 * BUFFERED_REQUESTS)


def test_the_time_to_come_back_follows_the_queue(monkeypatch):
    gate = gate_of(2, 100)
    gate._note(3.0)
    assert gate.retry_after() == 3
    gate._inside = 20
    assert gate.retry_after() == 30
    gate._inside = 2000
    assert gate.retry_after() == 60
