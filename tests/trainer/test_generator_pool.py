"""Rank 0's end of the connections to generators, with real connections."""

from __future__ import annotations

import threading
import time

import pytest

from reinforce_rl.runtime.links import Links, LinkThread
from reinforce_rl.trainer.generator_pool import GeneratorPool
from reinforce_rl.trainer.message_codec import decode, encode
from reinforce_rl.trainer.messages import EndReceived, Message, RunEnded

SILENCE = 30.0


@pytest.fixture
def pool_and_generator():
    links, invitation = Links.listen("127.0.0.1")
    accepting = threading.Thread(target=links.accept, args=([1], 20.0))
    accepting.start()
    generator = Links.connect(invitation, 1, b"hello", 20.0)
    accepting.join()
    pool = object.__new__(GeneratorPool)
    pool._begin_empty(vocab_size=10)
    pool._links = links
    pool._thread = LinkThread(links, SILENCE, pool._on_message, pool._on_lost)
    yield pool, generator
    pool.close()
    generator.close()


def test_a_generator_that_is_busy_when_the_run_ends_reads_that_it_has(pool_and_generator):
    """A closed connection takes with it what its peer has not read, and the generator would call the run lost."""
    pool, generator = pool_and_generator
    closing = threading.Thread(target=pool.close)
    closing.start()
    time.sleep(1.0)
    messages: list[Message] = []
    deadline = time.monotonic() + 20
    while not messages and not generator.peers[0].closed and time.monotonic() < deadline:
        messages += [decode(parts) for _, parts in generator.poll(0.1)]
    assert messages == [RunEnded()]
    assert closing.is_alive()
    generator.send(0, *encode(EndReceived()))
    while closing.is_alive() and time.monotonic() < deadline:
        generator.poll(0.1)
    assert not closing.is_alive()


def test_one_that_has_gone_is_not_waited_for(pool_and_generator):
    pool, generator = pool_and_generator
    generator.close()
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 5.0
