"""Tokens are labelled with the version of the weights that generated them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.generation.base import PartialResponse
from reinforce_rl.rollout import generator_rank
from reinforce_rl.rollout.generator_rank import GeneratorRank
from reinforce_rl.rollout.messages import GenerationRequest, GenerationResult, NewWeights

pytestmark = pytest.mark.timeout(20)  # a test that waits for missing weights would hang

PROMPT = Prompt(5, "", (3,))


class Engine:
    """An engine whose weights are a number, which it returns as every token.

    So a token says which weights drew it, whatever its label says. Responses have four tokens.
    """

    def __init__(self, rank: Any) -> None:
        self.rank = rank
        self.weights = rank.loaded
        # called before the token of this number, counted from 1
        self.before: dict[int, Callable[[], None]] = {}
        self.drawn = 0

    def refit(self) -> None:
        self.weights = self.rank.loaded

    def infer(self, prompts: Any, num_samples: int, seed: int, *, validation: bool) -> Completions:
        tokens = torch.full((num_samples, 4), self.weights)
        return Completions(tokens, torch.full((num_samples,), 4), ("stop",) * num_samples)

    def resume(
        self, responses: list[PartialResponse], params: Any, updates: Any
    ) -> list[PartialResponse]:
        rows = list(responses)
        while any(row.finish_reason is None for row in rows):
            self.drawn += 1
            self.before.get(self.drawn, lambda: None)()
            action = updates.next_action(sum(row.finish_reason is None for row in rows))
            if action == "stop":
                break
            if action == "load":
                updates.load()
                self.refit()
            for place, row in enumerate(rows):
                if row.finish_reason is None:
                    tokens = (*row.tokens, self.weights)
                    versions = (*row.versions, updates.version)
                    reason = "stop" if len(tokens) == 4 else None
                    rows[place] = replace(
                        row, tokens=tokens, versions=versions, finish_reason=reason
                    )
        return rows


def rank_of(
    monkeypatch: pytest.MonkeyPatch,
    *,
    version: int = 0,
    staleness: int = 0,
    groups: int | None = None,
    inflight: Any = None,
) -> Any:
    """A generator's rank without connections; its weights are the number of their version."""
    rank: Any = object.__new__(GeneratorRank)
    rank._changed = threading.Condition()
    rank._staged = {}
    rank._newest_received = version
    rank._is_of_job = True
    rank._inbox = deque()
    rank._asked = 0
    rank.version = version
    rank.loaded = version
    rank._staleness = staleness
    rank._groups = groups
    rank._inflight = inflight
    rank._is_model_parallel_rank_0 = True
    rank._is_alone = True
    rank._failure = None
    rank._has_ended = False
    rank._unscored = 0
    rank._awake = None
    rank._group = SimpleNamespace(epoch=1, fault="")
    rank._wake = lambda: None
    rank._phases = SimpleNamespace(begin=lambda *_, **__: None, step=0)
    rank._links = SimpleNamespace(send=lambda *_: None)
    engine = Engine(rank)
    mesh = SimpleNamespace(
        from_model_parallel_rank_0=lambda value: value,
        gather_on_model_parallel_rank_0=lambda value: [value],
        is_model_parallel_rank_0=True,
    )
    lm = SimpleNamespace(architecture=SimpleNamespace(vocab_size=100))
    rank._model = SimpleNamespace(
        generator=engine, infer=engine.infer, lm=lm, mesh=mesh, pad_id=99, sampling=None
    )
    rank.engine = engine
    rank.results = []
    rank._deliver = lambda result, future: rank.results.append(result)
    rank._ask_for_scores = lambda request, made: None
    for name in ("load_weights", "exchange_weights"):
        monkeypatch.setattr(
            generator_rank, name, lambda lm, weights: setattr(rank, "loaded", weights)
        )
    return rank


def request_of(
    number: int, version: int, *, allow_newer: bool = False, step: int = 1
) -> GenerationRequest:
    return GenerationRequest(number, step, version, (PROMPT,), 2, 7, allow_newer)


def labels_and_weights(result: GenerationResult) -> tuple[list[list[int]], list[list[int]]]:
    """Return the versions in the tokens' labels, and the versions of the weights that drew them."""
    assert result.completions is not None
    assert result.completions.weight_versions is not None
    return result.completions.weight_versions.tolist(), result.completions.tokens.tolist()


def assert_drawn_with(result: GenerationResult, *versions: int) -> None:
    labels, weights = labels_and_weights(result)
    assert labels == weights == [list(versions)] * len(labels)


class TestWorksInTheirOrder:
    def test_each_is_drawn_with_the_weights_that_it_asks_for(self, monkeypatch):
        """Newer weights that have arrived are not loaded until a request names them."""
        rank = rank_of(monkeypatch, staleness=2)
        rank._staged = {1: 1, 2: 2, 3: 3}
        for number, version in enumerate([0, 1, 1, 2, 3]):
            rank._respond(request_of(number, version))
        for result, version in zip(rank.results, [0, 1, 1, 2, 3], strict=True):
            assert_drawn_with(result, *[version] * 4)

    @pytest.mark.parametrize(
        ("there", "wanted"), [({}, 1), ({1: 1}, 2)], ids=["none", "older ones"]
    )
    def test_a_work_waits_for_its_weights_whatever_is_there(self, there, wanted, monkeypatch):
        rank = rank_of(monkeypatch)
        rank._staged = dict(there)

        def arrive() -> None:
            with rank._changed:
                rank._staged[wanted] = wanted
                rank._changed.notify_all()

        timer = threading.Timer(0.1, arrive)
        timer.start()
        rank._respond(request_of(0, wanted))
        timer.join()
        assert_drawn_with(rank.results[0], *[wanted] * 4)


@pytest.mark.parametrize(
    ("staleness", "kept"), [(0, [5]), (1, [4, 5]), (2, [3, 4, 5]), (9, [1, 2, 3, 4, 5])]
)
def test_as_many_versions_are_kept_as_may_be_asked_for(staleness, kept, monkeypatch):
    """Weights 1 to 5 arrive while idle.

    Requests may name the `staleness` versions before the newest.
    """
    rank = rank_of(monkeypatch, staleness=staleness)
    monkeypatch.setattr(generator_rank, "receive_weights", lambda lm, group: "weights")
    rank._offers = deque()
    for version in (1, 2, 3, 4, 5):
        rank._offers.append(NewWeights(1, version, 1, 2))
    rank._wait = lambda condition, phase="": None  # the thread ends when nothing is offered
    rank._receive()
    assert rank._failure is None
    assert list(rank._staged) == kept


class TestWhateverIsFinishedFirst:
    def groups(self, *requests: GenerationRequest) -> dict[int, Any]:
        groups = {}
        for request in requests:
            responses = [PartialResponse(PROMPT, sample) for sample in range(2)]
            groups[request.number] = (request, responses)
        return groups

    def test_without_updates_in_flight_a_response_has_one_version(self, monkeypatch):
        rank = rank_of(monkeypatch, groups=2)
        rank.engine.before = {2: lambda: rank._staged.update({1: 1, 2: 2})}
        rank._resume_groups(groups := self.groups(request_of(0, 0, allow_newer=True)), 2)
        assert groups == {}
        assert_drawn_with(rank.results[0], 0, 0, 0, 0)

    @pytest.mark.parametrize("inflight", ["keep", "recompute"])
    def test_with_them_every_token_has_the_version_of_its_weights(self, inflight, monkeypatch):
        rank = rank_of(monkeypatch, groups=2, inflight=inflight)
        rank.engine.before = {3: lambda: rank._staged.update({1: 1, 2: 2})}
        groups = self.groups(request_of(0, 0, allow_newer=True))
        rank._resume_groups(groups, 2)
        if inflight == "recompute":
            assert list(groups) == [0], "the call ends, so that the cache is computed anew"
            rank._advance(rank._newest())
            rank._resume_groups(groups, 2)
        assert_drawn_with(rank.results[0], 0, 0, 2, 2)

    @pytest.mark.parametrize(
        ("inflight", "expected"), [(None, [0, 0, 0, 0]), ("recompute", [0, 3, 3, 3])]
    )
    def test_the_newest_weights_are_taken_where_nothing_keeps_older_ones(
        self, inflight, expected, monkeypatch
    ):
        """Weights 3 arrive between two calls.

        One response of a group is under way then, and the other has ended.
        """
        rank = rank_of(monkeypatch, groups=1, inflight=inflight)
        groups = self.groups(request_of(0, 0, allow_newer=True))
        calls = []

        def resume_groups(groups: dict[int, Any], count: int) -> None:
            calls.append(rank.version)
            if len(calls) == 1:  # one token, then the call is interrupted
                request, responses = groups[0]
                begun = [replace(response, tokens=(0,), versions=(0,)) for response in responses]
                ended = replace(begun[1], finish_reason="stop")
                groups[0] = request, [begun[0], ended]
                rank._staged[3] = 3
                return
            GeneratorRank._resume_groups(rank, groups, count)

        rank._resume_groups = resume_groups
        requests = [[groups[0][0]], [], None]
        rank._take = lambda count, room, *, waits=True: requests.pop(0) if requests else None
        rank._answer_groups(1)
        labels, _ = labels_and_weights(rank.results[0])
        assert labels[0] == expected
        assert calls[1:] == [expected[1]]

    def test_while_responses_are_under_way_no_work_is_asked_for_without_updates_in_flight(
        self, monkeypatch
    ):
        """A validation among the requests would be generated with other weights."""
        asked = []
        rank = rank_of(monkeypatch, groups=2)
        request = request_of(0, 0, allow_newer=True)

        def take(count: int, room: int, *, waits: bool = True) -> list[GenerationRequest] | None:
            asked.append(count)
            answers = ([request], [], None)
            return answers[len(asked) - 1]

        def interrupted(groups: dict[int, Any], count: int) -> None:
            """End the call with both responses under way."""

        rank._take = take
        rank._resume_groups = interrupted
        rank._answer_groups(2)
        assert asked == [2, 0, 0]


def test_a_validation_is_drawn_with_its_version_while_nothing_is_under_way(monkeypatch):
    rank = rank_of(monkeypatch, groups=2, version=1)
    rank._staged = {2: 2}
    requests = [[request_of(0, 2, step=0)], None]
    rank._take = lambda count, room, *, waits=True: requests.pop(0)
    rank._answer_groups(2)
    assert_drawn_with(rank.results[0], 2, 2, 2, 2)


def test_the_label_is_of_the_weights_even_where_the_work_asked_for_others(monkeypatch):
    """The trainers refuse such a result; a label with the request's version would hide it."""
    rank = rank_of(monkeypatch, version=3)
    result, _ = rank._answer(request_of(0, 1))
    assert_drawn_with(result, 3, 3, 3, 3)
