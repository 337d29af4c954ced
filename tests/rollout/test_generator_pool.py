"""Which results are too old, which are kept in a checkpoint, and which are accepted."""

from __future__ import annotations

import threading
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.errors import GenerationError, RewardServerError
from reinforce_rl.rewards.base import STATUS_OK, Rewards
from reinforce_rl.rollout.generator_pool import GeneratorPool, _Generator
from reinforce_rl.rollout.message_codec import decode, encode
from reinforce_rl.rollout.messages import (
    HELLO,
    Dismissed,
    EndReceived,
    GenerationRequest,
    GenerationRequests,
    GenerationResult,
    GeneratorFailed,
    Message,
    RequestCredit,
    ResultBounds,
    RunEnded,
)
from reinforce_rl.runtime.links import Links, LinkThread
from reinforce_rl.runtime.roles import RANKS, RankRole

FAILED = STATUS_OK + 1
SILENCE = 30.0


class Sent:
    """Links that record what is sent."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.dismissed: list[int] = []

    def send(self, rank: int, *parts: bytes) -> None:
        message = decode(parts)
        if isinstance(message, Dismissed):
            self.dismissed.append(rank)
        else:
            assert isinstance(message, GenerationRequests)
            self.requests += message.requests


# Rank 1 of this job generates.
ROLE = RankRole(0, 2, trainers=1, block=1, store=None, timeout=timedelta(seconds=1))


def pool_of(
    *requests: GenerationRequest, room: int = 0, role: RankRole | None = None
) -> tuple[Any, Sent]:
    """A pool without connections.

    Its only generator has these requests and asks for `room` more. With a `role` it is a rank of
    the job.
    """
    pool: Any = object.__new__(GeneratorPool)
    pool._begin_empty(ResultBounds(vocab_size=32, max_length=8))
    pool._role = role
    pool._staleness = 9
    pool._newest = 9
    pool._links = Sent()
    generator = _Generator(1, 1, "g1", {RANKS}, is_ready=True, version=9, since=0)
    generator.under_way = {request.number: request for request in requests}
    pool._generators = {1: generator}
    pool._idle = deque([1] * room)
    pool._given = dict(generator.under_way)
    return pool, pool._links


def request_of(
    number: int, *, version: int = 0, allow_newer: bool = True, step: int = 1
) -> GenerationRequest:
    prompts = (Prompt(100 + number, "", (3,)),)
    return GenerationRequest(number, step, version, prompts, 1, 7, allow_newer)


def result_of(
    request: GenerationRequest,
    *versions: int,
    statuses: tuple[int, ...] = (STATUS_OK,),
    **fields: Any,
) -> GenerationResult:
    """One response a status, one token a version."""
    count = len(statuses)
    length = len(versions)
    completions = Completions(
        tokens=torch.ones(count, length, dtype=torch.long),
        lengths=torch.full((count,), length),
        finish_reasons=("stop",) * count,
        weight_versions=torch.tensor([versions] * count),
    )
    values = torch.tensor([1.0 if status == STATUS_OK else float("nan") for status in statuses])
    rewards = Rewards(values, torch.tensor(statuses, dtype=torch.int32))
    prompt_ids = tuple(prompt.id for prompt in request.prompts)
    return GenerationResult(
        request.number,
        prompt_ids,
        completions,
        rewards,
        **fields,
    )


def taken(pool: Any, numbers: list[int], count: int, oldest: int) -> list[int] | None:
    """Return the numbers of the results that a step takes, or None if it has to wait."""
    made = pool.take([(numbers, count)], oldest)
    return None if made is None else [result.number for result in made[0]]


@pytest.mark.parametrize(
    ("versions", "is_taken"),
    [
        ((3, 3), True),
        ((3, 5), True),
        ((2, 3), False),
        ((5, 2), False),
        ((2, 2), False),
        ((4, 4), True),
    ],
)
def test_a_result_is_as_old_as_its_oldest_token(versions, is_taken):
    """Weights of version 3 are just new enough."""
    request = request_of(0)
    pool, _ = pool_of(request)
    pool.readmit(request, result_of(request, *versions))
    assert taken(pool, [0], 1, oldest=3) == ([0] if is_taken else None)


def test_what_is_too_old_is_answered_again_before_the_others_in_its_order():
    requests = [request_of(number) for number in range(4)]
    pool, sent = pool_of(*requests[:3])
    for request in requests[:3]:
        pool.readmit(request, result_of(request, 1))
    pool.submit([requests[3]])
    assert taken(pool, [0, 1, 2, 3], 1, oldest=2) is None
    assert pool._results == {}, "an old answer does not count as new"
    pool._idle.extend([1] * 4)
    pool._assign()
    assert [request.number for request in sent.requests] == [0, 1, 2, 3]


def test_what_is_answered_again_is_waited_for_by_the_next_step_alone():
    requests = [request_of(number) for number in range(3)]
    pool, _ = pool_of(*requests)
    pool.readmit(requests[0], result_of(requests[0], 1))
    pool.readmit(requests[1], result_of(requests[1], 2))
    assert taken(pool, [0, 1, 2], 1, oldest=2) == [1]
    pool.forget([1])
    pool.readmit(requests[2], result_of(requests[2], 2))
    assert taken(pool, [0, 2], 1, oldest=2) is None, "the prompt that was dropped gets its turn"
    pool.readmit(requests[0], result_of(requests[0], 2))
    assert taken(pool, [0, 2], 1, oldest=2) == [0]
    pool.forget([0])
    assert taken(pool, [2], 1, oldest=2) == [2]
    assert pool._given_again == set(), "what is forgotten is not waited for"


def test_what_was_forgotten_has_no_result_any_more():
    done = request_of(0)
    under_way = request_of(1)
    pool, _ = pool_of(done, under_way)
    pool._on_message(RANKS, encode(result_of(done, 0)))
    assert list(pool._results) == [0]
    pool.forget([0, 1])
    assert pool._results == {}
    pool._on_message(RANKS, encode(result_of(under_way, 0)))
    assert pool._results == {}
    assert pool._generators[1].under_way == {}


@pytest.mark.parametrize(
    ("newest", "drawn", "is_accepted"), [(3, 3, True), (3, 4, False), (4, 4, True)]
)
def test_no_token_is_of_weights_that_nobody_was_sent(newest, drawn, is_accepted):
    request = request_of(0)
    pool, _ = pool_of(request, role=ROLE)
    assert pool.group_for(newest) is None, "its generator has newer weights than these"
    pool._on_message(RANKS, encode(result_of(request, drawn)))
    assert list(pool._results) == ([0] if is_accepted else [])
    assert isinstance(pool._failure, GenerationError) is not is_accepted


class TestAGeneratorOfTheJob:
    """If it ends, the run ends: it is not replaced."""

    def test_the_loss_of_its_rank_names_the_rank_of_the_job(self):
        pool, sent = pool_of(request_of(0), role=ROLE)
        pool.group = SimpleNamespace(abandon=lambda *_: None)
        pool._on_lost(RANKS, "died")
        with pytest.raises(ConnectionError, match="rank 1, which generates, died"):
            pool._check()
        assert sent.dismissed == []

    def test_after_its_loss_it_is_not_dismissed_for_what_it_still_sends(self):
        pool, sent = pool_of(request_of(0), role=ROLE)
        pool.group = SimpleNamespace(abandon=lambda *_: None)
        pool._on_lost(RANKS, "died")
        pool._on_message(RANKS, encode(RequestCredit(1)))
        assert pool._generators == {}
        assert sent.dismissed == [], "it waits for the end of the run"

    def test_what_it_cannot_do_is_raised_by_the_trainers(self):
        pool, sent = pool_of(request_of(0), role=ROLE)
        failure = GenerationError("out of memory", key="generation.engine.failed")
        pool._on_message(RANKS, encode(GeneratorFailed(failure)))
        with pytest.raises(GenerationError) as error:
            pool._check()
        assert error.value.key == failure.key
        assert sent.dismissed == [], "it waits for the end of the run"

    def test_scores_that_it_does_not_get_are_left_to_the_trainers(self):
        request = request_of(0)
        pool, _ = pool_of(request, role=ROLE)
        pool._generators[2] = _Generator(2, 1, "g2", {2 * RANKS}, is_ready=True, version=9, since=0)
        failure = RewardServerError("no answer", key="rewards.server.no_answer")
        pool._on_message(RANKS, encode(result_of(request, 0, failure=failure)))
        assert [result.number for result in pool._results.values()] == [0]
        assert pool._failure is None
        assert list(pool._generators) == [1, 2]

    def test_an_answer_that_cannot_be_one_ends_the_run(self):
        request = request_of(0)
        pool, _ = pool_of(request, role=ROLE)
        pool._on_message(RANKS, encode(result_of(request_of(7), 0)))
        with pytest.raises(GenerationError) as error:
            pool._check()
        assert error.value.key == "generators.generator.invalid_message"


def test_a_checkpoint_has_finished_rollouts_that_passed_their_check_alone():
    """Failures, responses without a score and validations are left out."""
    requests = [request_of(number) for number in range(4)]
    validation = request_of(4, allow_newer=False, step=0)
    pool, _ = pool_of(*requests, validation)
    pool.readmit(requests[0], result_of(requests[0], 0))
    pool.readmit(requests[1], result_of(requests[1], 0, statuses=(STATUS_OK, FAILED)))
    pool.readmit(requests[2], result_of(requests[2], 0, failure=GenerationError("out of memory")))
    pool.readmit(validation, result_of(validation, 0))
    assert [result.number for result in pool.finished()] == [0]


def test_works_go_in_their_order_to_who_has_the_least_to_do():
    pool, sent = pool_of(room=1)
    pool._generators[2] = _Generator(2, 1, "g2", {2 * RANKS}, is_ready=True, version=9, since=0)
    pool._idle.extend([2, 2])
    pool.submit([request_of(number) for number in range(4)])
    assert [request.number for request in sent.requests] == [0, 1, 2]
    assert sorted(pool._generators[1].under_way) == [0]
    assert sorted(pool._generators[2].under_way) == [1, 2]
    assert [request.number for request in pool._waiting] == [3]


@pytest.fixture
def pool_and_generator(tmp_path: Path):
    links, invitation = Links.listen("127.0.0.1")
    accepting = threading.Thread(target=links.accept, args=([1], 20.0))
    accepting.start()
    generator = Links.connect(invitation, 1, HELLO, 20.0)
    accepting.join()
    pool = object.__new__(GeneratorPool)
    pool._begin_empty(ResultBounds(vocab_size=10, max_length=8))
    pool._role = None
    pool._folder = tmp_path
    pool.group = SimpleNamespace(close=lambda: None)
    pool._links = links
    pool._thread = LinkThread(links, SILENCE, pool._on_message, pool._on_lost)
    yield pool, generator
    pool.close()
    generator.close()


def test_a_generator_that_is_busy_when_the_run_ends_reads_that_it_has(pool_and_generator):
    """Closing the connection drops unread messages; the generator would report the run as lost."""
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
