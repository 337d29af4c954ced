"""Rollouts in the order in which they finish, and weight updates during generation.

Responses under way are kept, dropped or resumed.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.errors import check_fault, raises_error
from helpers.tiny_run import rollouts_of, tiny_config
from helpers.trainer_processes import NUM_PROMPTS, SETTINGS, TrainerProcesses, assert_sound

from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.errors import EXIT_STOPPED, ConfigError, GenerationError
from reinforce_rl.generation.base import PartialResponse
from reinforce_rl.policy.build import build_generator
from reinforce_rl.rewards.base import Rewards
from reinforce_rl.rollout.generator_pool import GeneratorPool, _Generator
from reinforce_rl.rollout.generator_rank import GeneratorRank
from reinforce_rl.rollout.message_codec import decode, encode
from reinforce_rl.rollout.messages import (
    GenerationRequest,
    GenerationRequests,
    GenerationResult,
    RequestCredit,
    ResultBounds,
)
from reinforce_rl.rollout.remote import RemoteRollouts
from reinforce_rl.rollout.source import RolloutContext, RolloutHandle
from reinforce_rl.runtime.roles import RANKS, RankRole
from reinforce_rl.runtime.stop import StopRequest

SLOW = pytest.mark.slow
FINISHED = ("placement=disaggregated", "generation_ranks=1", "rollout_order=finished")
INFLIGHT = (*FINISHED, "inflight_updates=recompute")
MODES = {
    "between calls": FINISHED,
    "in flight": INFLIGHT,
    "in flight, cache kept": (*FINISHED, "inflight_updates=keep"),
}


@pytest.fixture(scope="module")
def processes() -> Iterator[TrainerProcesses]:
    processes = TrainerProcesses()
    yield processes
    processes.close()


def finish(processes: TrainerProcesses, folder: Path, *overrides: str, ranks: int = 2) -> Path:
    return processes.finish(folder, *SETTINGS, *overrides, ranks=ranks)


@pytest.mark.more
@pytest.mark.parametrize("mode", MODES)
def test_every_prompt_once_an_epoch(mode, processes, tmp_path):
    assert_sound(finish(processes, tmp_path, *MODES[mode]), one_version=mode == "between calls")


@pytest.mark.more
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(4, (*INFLIGHT, "generation_ranks=2", "max_staleness=2"), id="two and two"),
        pytest.param(
            3,
            (*INFLIGHT, "generation_ranks=2", "generation_tensor_parallel_size=2"),
            id="TP2 generates",
            marks=SLOW,
        ),
        pytest.param(
            3,
            (
                *MODES["in flight, cache kept"],
                "generation_ranks=2",
                "generation_tensor_parallel_size=2",
            ),
            id="TP2 generates, cache kept",
            marks=SLOW,
        ),
    ],
)
def test_several_ranks(ranks, overrides, processes, tmp_path):
    staleness = 2 if "max_staleness=2" in overrides else 1
    assert_sound(finish(processes, tmp_path, *overrides, ranks=ranks), staleness)


@pytest.mark.more
@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=SLOW)])
def test_killed_at_random_moments(kills, processes, tmp_path):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the moments: {seed}")
    draw = random.Random(seed)
    for _ in range(kills):
        processes.kill_at_random(tmp_path, draw, 3.0, *SETTINGS, *INFLIGHT, ranks=2)
    assert_sound(finish(processes, tmp_path, *INFLIGHT))


@pytest.mark.slow
def test_a_signal_keeps_what_is_finished(processes, tmp_path):
    act = {"rank": 0, "phase": "train_time", "step": 5, "signal": signal.SIGTERM}
    processes.start(
        tmp_path, *SETTINGS, *FINISHED, "max_staleness=2", ranks=2, patience=60, act=act
    )
    processes.wait()
    assert processes.statuses[0] == EXIT_STOPPED, (tmp_path / "log").read_text()
    assert_sound(
        finish(processes, tmp_path, *FINISHED, "max_staleness=2"), staleness=2, one_version=True
    )


@pytest.mark.more
@pytest.mark.parametrize("other", ["colocated", pytest.param("in the prompts' order", marks=SLOW)])
def test_another_order_goes_on_with_the_prompts_under_way(other, processes, tmp_path):
    processes.start(tmp_path, *SETTINGS, *FINISHED, die_before="rollouts/step_00008", ranks=2)
    processes.wait()
    overrides = ()
    ranks = 1
    if other != "colocated":
        overrides = FINISHED[:2]
        ranks = 2
    finish(processes, tmp_path, *overrides, "resume_with_changes=true", ranks=ranks)
    drawn: Counter[int] = Counter()
    for step in range(1, 13):
        drawn.update(row["prompt_id"] for row in rollouts_of(tmp_path, step))
    assert drawn == dict.fromkeys(range(NUM_PROMPTS), 16)


@pytest.mark.parametrize(
    ("overrides", "key", "named"),
    [
        (
            ["rollout_order=finished"],
            "config.placement.not_disaggregated",
            ["rollout_order", "placement", "disaggregated"],
        ),
        (
            [*FINISHED, "max_staleness=0"],
            "config.rollout_order.without_max_staleness",
            ["rollout_order", "max_staleness"],
        ),
        (
            [*FINISHED[:2], "inflight_updates=recompute"],
            "config.inflight_updates.without_rollout_order_finished",
            ["inflight_updates", "rollout_order", "finished"],
        ),
        (
            [*FINISHED, "trainer.reinforce.dynamic_filtering=true"],
            "config.dynamic_filtering.conflicts_with_max_staleness",
            ["dynamic_filtering", "max_staleness"],
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides, key, named, tmp_path):
    with pytest.raises(ConfigError) as error:
        tiny_config(tmp_path, "trainer.devices=2", *overrides)
    check_fault(error.value.faults, key, *named)


class WholeAnswersOnly:
    def __init__(self, *given: object):
        pass


def test_a_generator_without_resume_is_refused(tmp_path):
    name = f"{__name__}.WholeAnswersOnly"
    cfg = tiny_config(tmp_path, "trainer.devices=2", *FINISHED, f"generation={name}")
    named = (name, "resume", "rollout_order=prompts")
    with raises_error("generation.class.no_resume", *named):
        build_generator(cfg, None, None)  # type: ignore[arg-type]


def request_of(number: int, prompt: int) -> GenerationRequest:
    prompts = (Prompt(prompt, "", (3,)),)
    return GenerationRequest(number, 1, 0, prompts, 2, 0, allow_newer=True)


def result_of(request: GenerationRequest, *versions: int) -> GenerationResult:
    tokens = torch.ones(1, len(versions), dtype=torch.long)
    lengths = torch.tensor([len(versions)])
    completions = Completions(tokens, lengths, ("stop",), weight_versions=torch.tensor([versions]))
    rewards = Rewards(torch.ones(1), torch.zeros(1).int())
    return GenerationResult(request.number, (request.prompts[0].id,), completions, rewards)


class Sent:
    def __init__(self) -> None:
        self.requests: list[int] = []

    def send(self, rank: int, *parts: bytes) -> None:
        message = decode(parts)
        assert isinstance(message, GenerationRequests)
        self.requests += [request.number for request in message.requests]


def pool_of(requests: list[GenerationRequest], results: list[GenerationResult]) -> tuple[Any, Sent]:
    """A pool without connections, whose only generator, a rank of the job, has no room."""
    pool: Any = object.__new__(GeneratorPool)
    pool._begin_empty(ResultBounds(vocab_size=32, max_length=8))
    pool._role = RankRole(0, 2, trainers=1, block=1, store=None, timeout=timedelta(seconds=1))
    pool._staleness = 9
    pool._newest = 3
    pool._links = Sent()
    pool._generators = {1: _Generator(1, 1, "g1", {RANKS}, is_ready=True, version=9, since=0)}
    pool._given = {request.number: request for request in requests}
    pool._results = {result.number: result for result in results}
    return pool, pool._links


def numbers_of(taken: tuple[list[GenerationResult], int] | None) -> tuple[list[int], int] | None:
    if taken is None:
        return None
    results, count = taken
    return [result.number for result in results], count


REQUESTS = [request_of(number, prompt) for number, prompt in enumerate([10, 11, 12, 11, 14])]


def pool_with(*numbers: int) -> Any:
    """A pool in which these requests have results of version 3."""
    results = [result_of(REQUESTS[number], 3) for number in numbers]
    pool, _ = pool_of(REQUESTS, results)
    return pool


@pytest.mark.parametrize("filters", [False, True])
def test_prompts_under_way_are_drawn_once_by_filtering_too(filters):
    submitted = []

    def submit(prompts: Any, *rest: Any) -> RolloutHandle:
        submitted.append(prompts)
        return RolloutHandle([[]], 0)

    parts: Any = {
        "cfg": SimpleNamespace(dynamic_filtering=filters, num_rollouts_per_prompt=2),
        "model": SimpleNamespace(settings=SimpleNamespace(seed=1)),
        "loader": SimpleNamespace(prompts_per_step=2, state_dict=dict, share=list),
        "rm": None,
        "batch_iterator_cls": None,
        "clock": SimpleNamespace(phase=lambda name: contextlib.nullcontext()),
        "stop": StopRequest(),
        "staleness": 2,
    }
    generators: Any = SimpleNamespace(
        publish=lambda version, as_oldest: None,
        restore=lambda content: {},
        submit=submit,
        takes_finished=False,
    )
    source = RemoteRollouts(RolloutContext(**parts), generators)
    source.load_state_dict({"step": 4, "under_way": [3, 5, 7], "rollouts": b""})
    ahead = [batch.prompts for batch in source._ahead]
    assert ahead == [[3, 5], [7]]
    assert submitted == ([] if filters else [[3, 5], [7]])  # filtering submits them itself


@pytest.mark.parametrize("is_right", [True, False])
def test_an_answer_of_other_weights_ends_the_run(is_right):
    pool, _ = pool_of(REQUESTS, [])
    request = replace(REQUESTS[2], num_samples=1)
    pool._given[2] = request
    pool._generators[1].under_way[2] = request
    pool._on_message(RANKS, encode(result_of(request, 3 if is_right else 4)))
    assert list(pool._results) == ([2] if is_right else [])
    assert isinstance(pool._failure, GenerationError) is not is_right


class TestWhatAStepTakes:
    def test_a_share_that_needs_nothing_waits_for_nothing(self):
        pool, _ = pool_of(REQUESTS, [result_of(REQUESTS[0], 3)])
        pool._given_again = {4}
        taken = numbers_of(pool.take([([0], 1), ([4], 0)], 3))
        assert taken == ([0], 0)
        assert pool.take([([0], 1), ([4], 1)], 3) is None

    def test_works_that_are_not_asked_for_any_more(self):
        pool, _ = pool_of([], [])
        for message in (3, -2, -4, 1):
            pool._on_message(RANKS, encode(RequestCredit(message)))
        assert list(pool._idle) == [1]

    def test_what_is_finished_first_in_the_order_of_numbers(self):
        pool = pool_with(4, 0, 2)
        taken = numbers_of(pool.take([(range(5), 2)], 3))
        assert taken == ([0, 4], 0)

    def test_it_waits_for_as_many_as_it_needs(self):
        pool = pool_with(4, 0)
        assert pool.take([(range(5), 3)], 3) is None

    def test_each_share_has_its_own(self):
        pool = pool_with(4, 0, 2)
        assert pool.take([([0, 1], 1), ([2, 3, 4], 3)], 3) is None
        taken = numbers_of(pool.take([([0, 1], 1), ([2, 3, 4], 2)], 3))
        assert taken == ([0, 2, 4], 0)
        taken = numbers_of(pool.take([([0, 1], 1), ([], 0)], 3))
        assert taken == ([0], 0)

    def test_a_prompt_of_two_epochs_is_taken_once(self):
        pool = pool_with(3, 1, 2)
        taken = numbers_of(pool.take([(range(5), 2)], 3))
        assert taken == ([2, 3], 0)

    def test_the_rest_is_taken_where_there_is_no_more(self):
        results = [result_of(request, 3) for request in REQUESTS[:2]]
        pool, _ = pool_of(REQUESTS[:2], results)
        taken = numbers_of(pool.take([(range(2), 4)], 3))
        assert taken == ([0, 1], 0)

    def test_one_token_that_is_too_old_is_enough_to_be_drawn_again(self):
        """It is submitted at once, before waiting prompts.

        The next call waits for it, this one does not.
        """
        results = [
            result_of(REQUESTS[0], 2, 3),
            result_of(REQUESTS[1], 3, 4),
            result_of(REQUESTS[2], 4),
        ]
        pool, sent = pool_of(REQUESTS, results)
        pool.submit([REQUESTS[4]])
        taken = numbers_of(pool.take([(range(5), 2)], 3))
        assert taken == ([1, 2], 1)
        pool.forget([1, 2])
        pool._idle.extend([1, 1])
        pool._assign()
        assert sent.requests == [0, 4]
        pool._results[4] = result_of(REQUESTS[4], 4)
        pool._results[3] = result_of(REQUESTS[3], 4)
        assert pool.take([([0, 3, 4], 2)], 4) is None
        pool._results[0] = result_of(REQUESTS[0], 5)
        taken = numbers_of(pool.take([([0, 3, 4], 2)], 4))
        assert taken == ([0, 4], 0)


class Links:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def send(self, rank: int, *parts: bytes) -> None:
        message = decode(parts)
        assert isinstance(message, RequestCredit)
        self.asked.append(message.count)


class PlannedGenerator:
    """Draws one token a response at a time, after asking for the next action.

    Responses of prompt 0 end after two tokens.
    """

    def __init__(self, before: dict[int, Any]):
        self.before = before
        self.calls = 0
        self.steps = 0

    def resume(
        self, responses: list[PartialResponse], params: Any, updates: Any
    ) -> list[PartialResponse]:
        from dataclasses import replace

        self.calls += 1
        drawn = list(responses)
        while any(response.finish_reason is None for response in drawn):
            self.steps += 1
            self.before.get(self.steps, lambda: None)()
            action = updates.next_action(sum(response.finish_reason is None for response in drawn))
            if action == "stop":
                break
            if action == "load":
                updates.load()
            for row, response in enumerate(drawn):
                if response.finish_reason is None:
                    versions = (*response.versions, updates.version)
                    length = 2 if response.prompt.id == 0 else 6
                    ends = "stop" if len(versions) == length else None
                    drawn[row] = replace(
                        response,
                        tokens=(*response.tokens, 5),
                        versions=versions,
                        finish_reason=ends,
                    )
        return drawn


def rank_of(
    generator: PlannedGenerator, inflight: str | None, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """A generator's rank without connections and model; its results are kept."""
    rank: Any = object.__new__(GeneratorRank)
    mesh = SimpleNamespace(
        from_model_parallel_rank_0=lambda value: value,
        gather_on_model_parallel_rank_0=lambda value: [value],
        is_model_parallel_rank_0=True,
    )
    architecture = SimpleNamespace(vocab_size=10)
    rank._model = SimpleNamespace(
        generator=generator,
        mesh=mesh,
        pad_id=0,
        sampling=None,
        lm=SimpleNamespace(),
    )
    rank._model.lm.architecture = architecture
    generator_context = SimpleNamespace(refit=lambda: None)
    generator.refit = generator_context.refit  # type: ignore[attr-defined]
    rank._changed = threading.Condition()
    rank._staged = {}
    rank._inbox = deque()
    rank._asked = 0
    rank.version = 1
    rank._is_model_parallel_rank_0 = True
    rank._failure = None
    rank._has_ended = False
    rank._is_alone = True
    rank._is_of_job = True
    rank._groups = 4
    rank._inflight = inflight
    rank._awake = SimpleNamespace(close=lambda: None)
    rank._links = Links()
    rank._wake = lambda: None
    rank.results = []
    rank._deliver = lambda result, future: rank.results.append(result)
    rank._ask_for_scores = lambda request, completions: None
    monkeypatch.setattr(
        "reinforce_rl.rollout.generator_rank.load_weights", lambda lm, weights: None
    )
    return rank


def groups_of(*prompts: int) -> dict[int, Any]:
    groups = {}
    for number, prompt in enumerate(prompts):
        request = request_of(number, prompt)
        responses = [PartialResponse(request.prompts[0], sample) for sample in range(2)]
        groups[number] = (request, responses)
    return groups


class TestWeightsThatComeWhileResponsesAreDrawn:
    def versions(self, result: GenerationResult) -> list[list[int]]:
        assert result.completions is not None
        assert result.completions.weight_versions is not None
        return result.completions.weight_versions.tolist()

    def test_they_wait(self, monkeypatch):
        """A finished group is returned too, once half of the responses have ended."""
        generator = PlannedGenerator({2: lambda: rank._staged.update({2: {}})})
        rank = rank_of(generator, None, monkeypatch)
        rank._resume_groups(groups := groups_of(0, 7), 4)
        assert list(groups) == [1]
        assert self.versions(rank.results[0]) == [[1] * 2] * 2
        rank._resume_groups(groups, 4)
        assert not groups
        assert self.versions(rank.results[1]) == [[1] * 6] * 2

    def test_the_call_ends_and_goes_on_with_them(self, monkeypatch):
        generator = PlannedGenerator({4: lambda: rank._staged.update({3: {}})})
        rank = rank_of(generator, "recompute", monkeypatch)
        rank._resume_groups(groups := groups_of(7, 8), 4)
        assert list(groups) == [0, 1]
        assert not rank.results
        lengths = [
            len(response.tokens) for _, responses in groups.values() for response in responses
        ]
        assert lengths == [3] * 4
        rank._advance(3)
        rank._resume_groups(groups, 4)
        assert not groups
        versions = [self.versions(result) for result in rank.results]
        assert versions == [[[1, 1, 1, 3, 3, 3]] * 2] * 2

    def test_the_call_goes_on_with_them(self, monkeypatch):
        generator = PlannedGenerator({4: lambda: rank._staged.update({2: {}, 3: {}})})
        rank = rank_of(generator, "keep", monkeypatch)
        rank._resume_groups(groups := groups_of(7), 4)
        assert generator.calls == 1
        assert rank.version == 3
        assert not rank._staged
        assert not groups
        assert self.versions(rank.results[0]) == [[1, 1, 1, 3, 3, 3]] * 2

    def test_prompts_that_come_are_drawn_beside_them(self, monkeypatch):
        generator = PlannedGenerator({4: lambda: rank._inbox.append(request_of(9, 9))})
        rank = rank_of(generator, "recompute", monkeypatch)
        rank._resume_groups(groups := groups_of(7), 4)
        assert list(groups) == [0]
        lengths = [len(response.tokens) for response in groups[0][1]]
        assert lengths == [3, 3]

    def test_weights_that_newer_ones_have_replaced_are_not_waited_for(self, monkeypatch):
        """The next version may come while an engine goes to sleep; the previous one is dropped."""
        rank = rank_of(PlannedGenerator({}), "recompute", monkeypatch)
        rank._staged = {5: {}}

        def replace_staged() -> None:
            rank._staged.clear()
            rank._staged[6] = {}

        rank._awake = SimpleNamespace(close=replace_staged)
        rank._advance(5)
        assert rank.version == 6
        assert not rank._staged

    def test_nor_are_those_that_are_replaced_as_they_are_taken(self, monkeypatch):
        rank = rank_of(PlannedGenerator({}), "recompute", monkeypatch)
        rank._staged = {5: {}}

        def next_version_comes(versions: set[int]) -> list[set[int]]:
            rank._staged = {6: {}}
            return [versions]

        rank._model.mesh.gather_on_model_parallel_rank_0 = next_version_comes
        rank._advance(5)
        assert rank.version == 6
        assert not rank._staged

    def test_other_works_wait_for_responses_of_one_version(self, monkeypatch):
        """A validation would change the weights during their generation."""
        rank = rank_of(PlannedGenerator({}), None, monkeypatch)
        rank._inbox.append(request_of(9, 9))
        assert rank._take(0, 0, waits=False) == []
        assert not rank._links.asked
        taken_numbers = [request.number for request in rank._take(2, 2, waits=False)]
        assert taken_numbers == [9]
        assert rank._links.asked == [1]
        assert not rank._inbox

    def test_those_that_are_on_their_way_come_along(self, monkeypatch):
        """Otherwise a generator with half of its prompts keeps half, at the same cost a call."""
        rank = rank_of(PlannedGenerator({}), None, monkeypatch)
        rank._phases = SimpleNamespace(begin=lambda phase: None)
        monkeypatch.setattr("reinforce_rl.rollout.generator_rank._ON_THEIR_WAY_SECONDS", 30.0)

        def answer() -> None:
            requests = GenerationRequests((request_of(2, 2), request_of(3, 3)))
            threading.Timer(0.2, lambda: rank._on_message(0, encode(requests))).start()

        rank._inbox.extend([request_of(0, 0), request_of(1, 1)])
        rank._links.send = lambda to, *parts: answer()
        taken_numbers = [request.number for request in rank._take(4, 4)]
        assert taken_numbers == [0, 1, 2, 3]

    def test_no_more_groups_than_there_is_room_for(self, monkeypatch):
        """At an update a generator asks for one more request, which may be a validation."""
        generator = PlannedGenerator({2: lambda: rank._inbox.append(request_of(9, 9))})
        rank = rank_of(generator, "recompute", monkeypatch)
        rank._resume_groups(groups := groups_of(7), 1)
        assert not groups, "the call was not stopped for it"
        rank._inbox.append(replace(request_of(8, 8), allow_newer=False, step=0))
        taken_numbers = [request.number for request in rank._take(1, 0, waits=False)]
        assert taken_numbers == [8]
        taken_numbers = [request.number for request in rank._take(1, 1, waits=False)]
        assert taken_numbers == [9]
        assert not rank._inbox

    @pytest.mark.parametrize("inflight", [None, "recompute"])
    def test_what_it_cannot_begin_soon_is_left_to_others(self, inflight, monkeypatch):
        rank = rank_of(PlannedGenerator({}), inflight, monkeypatch)
        rank._asked = 3
        rank._resume_groups(groups_of(7), 4)
        assert rank._links.asked == ([] if inflight else [-3])
        assert rank._asked == (3 if inflight else 0)
        rank._on_message(0, encode(GenerationRequests((request_of(9, 9),))))  # it was on its way
        assert len(rank._inbox) == 1
        assert rank._asked == (2 if inflight else 0)

    def test_the_end_of_the_run_ends_the_call(self, monkeypatch):
        generator = PlannedGenerator({2: lambda: setattr(rank, "_has_ended", True)})
        rank = rank_of(generator, None, monkeypatch)
        rank._resume_groups(groups := groups_of(7), 4)
        lengths = [len(response.tokens) for response in groups[0][1]]
        assert lengths == [1, 1]
        assert not rank.results
