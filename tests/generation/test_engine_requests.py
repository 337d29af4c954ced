"""Requests for the rest of a response, their answers, and requests in an engine's process."""

from __future__ import annotations

import asyncio

import pytest

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.finish_reasons import FINISH_LENGTH, FINISH_STOP
from reinforce_rl.generation.base import PartialResponse, SamplingParams
from reinforce_rl.generation.engine import ABORTED, Answer, EngineSampling, Request
from reinforce_rl.generation.engine.host import RequestsUnderway
from reinforce_rl.generation.engine.requests import extended, request_of, requests_of

PROMPT = Prompt(7, "tea", (6, 7, 8))
PARAMS = SamplingParams(max_length=5, min_length=3, repetition_penalty=1.5)
DRAWN = PartialResponse(PROMPT, 11, tokens=(9, 4), log_probs=(-1.0, -2.0), versions=(3, 4))


def after(count: int) -> PartialResponse:
    return PartialResponse(PROMPT, 11, (4,) * count, (-1.0,) * count, (0,) * count)


def test_a_request_asks_for_what_is_missing():
    request = request_of(DRAWN, PARAMS, pad_id=1)
    assert request.tokens == (6, 7, 8, 9, 4)
    asked = request.sampling
    assert asked.max_tokens == 3
    assert asked.min_tokens == 1
    assert asked.repetition_penalty == 1.5
    assert asked.pad_id == 1
    assert request_of(after(4), PARAMS, pad_id=1).sampling.min_tokens == 0


def test_seeds_are_the_responses_own_and_do_not_come_again():
    seeds = [request_of(after(count), PARAMS, 0).sampling.seed for count in range(5)]
    assert seeds[0] == 11
    assert len(set(seeds)) == 5
    expected = [request_of(after(count), PARAMS, 0).sampling.seed for count in range(5)]
    assert seeds == expected
    for seed in seeds:
        assert 0 <= seed < 2**64
    response = PartialResponse(PROMPT, 12, (4,), (-1.0,), (0,))
    others = [request_of(response, PARAMS, 0).sampling.seed]
    assert others[0] not in seeds
    first, second = requests_of([PROMPT], 2, PARAMS, 3, pad_id=0)
    expected = request_of(PartialResponse(PROMPT, first.sampling.seed), PARAMS, 0)
    assert first == expected
    assert first.sampling.seed != second.sampling.seed


def uncut(whole: Answer) -> Answer:
    return whole


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer((5, 2), (-3.0, -4.0), stopped=True, updates=(1, 2)), FINISH_STOP),
        (Answer((5, 2), (-3.0, -4.0), updates=(1, 2)), FINISH_LENGTH),
        (Answer((5, 2), (-3.0, -4.0), fault=ABORTED, updates=(1, 2)), None),
    ],
    ids=["stopped", "long", "taken_back"],
)
def test_an_answer_adds_tokens_with_the_version_that_drew_each(answer, reason):
    response = extended(DRAWN, answer, {1: 4, 2: 6}, uncut)
    assert response.tokens == (9, 4, 5, 2)
    expected = (-1.0, -2.0, -3.0, -4.0)
    assert response.log_probs == expected
    assert response.versions == (3, 4, 4, 6)
    assert response.finish_reason == reason
    assert response.prompt == PROMPT
    assert response.key == 11


def test_an_answer_without_numbers_is_of_the_last_weights():
    response = extended(DRAWN, Answer((5,), (-3.0,)), {0: 8}, uncut)
    assert response.versions == (3, 4, 8)
    assert extended(DRAWN, Answer(fault=ABORTED), {0: 8}, uncut) == DRAWN


def test_an_end_string_may_begin_in_old_tokens():
    """Text behind it is cut, also if the response was not at its end."""

    def cut(whole: Answer) -> Answer:
        assert whole.tokens == (9, 4, 5, 6)
        expected = (-1.0, -2.0, -3.0, -4.0)
        assert whole.log_probs == expected
        return Answer(whole.tokens[:3], (-1.0, -2.0, -3.0), stopped=True)

    answer = Answer((5, 6), (-3.0, -4.0), fault=ABORTED, updates=(1, 1))
    response = extended(DRAWN, answer, {1: 9}, cut)
    assert response.tokens == (9, 4, 5)
    assert response.log_probs == (-1.0, -2.0, -3.0)
    assert response.versions == (3, 4, 9)
    assert response.finish_reason == FINISH_STOP


class Engine(RequestsUnderway):
    """Answers a request with its first token as soon as its event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.events: dict[int, asyncio.Event] = {}

    async def _complete(self, request: Request, name: str) -> Answer:
        event = asyncio.Event()
        self.events[request.tokens[0]] = event
        await event.wait()
        return Answer(request.tokens)


def asked(token: int) -> Request:
    sampling = EngineSampling(8, 0, 0, None, None, None, None, [])
    return Request((token,), sampling)


class TestUnderway:
    def test_answers_come_as_soon_as_they_are_ready(self):
        async def run():
            engine = Engine()
            begun = await engine.advance({7: asked(1), 8: asked(2)}, 0.0, 60.0)
            engine.events[2].set()
            first = await engine.advance({9: asked(3)}, 0.01, 60.0)
            for event in engine.events.values():
                event.set()
            return (
                begun,
                first,
                await engine.advance({}, 60.0, 60.0),
                await engine.advance({}, 60.0, 60.0),
            )

        begun, first, rest, none = asyncio.run(run())
        assert begun == none == (0, {})
        assert first == (0, {8: Answer((2,))})
        expected = (0, {7: Answer((1,)), 9: Answer((3,))})
        assert rest == expected

    def test_late_requests_are_lost_together(self):
        async def run():
            engine = Engine()
            await engine.advance({7: asked(1), 8: asked(2)}, 0.0, 60.0)
            engine.events[2].set()
            return await engine.advance({}, 0.01, 0.0), await engine.advance({}, 60.0, 0.0)

        late, none = asyncio.run(run())
        expected = (0, {7: Answer(fault="no answer within 0 s"), 8: Answer((2,))})
        assert late == expected
        assert none == (0, {})

    def test_cancelled_requests_say_so(self):
        async def run():
            engine = Engine()
            await engine.advance({7: asked(1), 8: asked(2)}, 0.0, 60.0)
            engine.events[2].set()
            await asyncio.sleep(0)  # its answer arrives first
            await engine.take_back()
            return await engine.advance({}, 60.0, 60.0)

        assert asyncio.run(run()) == (0, {7: Answer(fault=ABORTED), 8: Answer((2,))})
