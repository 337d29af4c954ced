"""Requests to rewards without a server: what merging does, and what it must not do."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.serve_toy_scorer import TOKEN_RAISE, VOCAB_SIZE, ToyScorer, toy_score
from helpers.tiny_tokenizer import write_tiny_tokenizer

from reinforce_rl.data.tokenizer import TokenizerInfo, load_tokenizer
from reinforce_rl.errors import RankLostError
from reinforce_rl.reward_server.progress import Progress
from reinforce_rl.reward_server.scoring import FunctionRequestScorer, FunctionScorer, RequestScorer
from reinforce_rl.rewards import base, wire
from reinforce_rl.rewards.base import TextSample
from reinforce_rl.rewards.function_pool import PING, FunctionPool, PendingScores, Scores
from reinforce_rl.rewards.wire import PROTOCOL_VERSION, ServerInfo, text_arrays

NOISE = 0.25


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=VOCAB_SIZE))


def request_of(*rows: list[int]) -> dict[str, np.ndarray]:
    return {"tokens": np.array(rows, np.int64), "sequence_lengths": np.array([[len(row)] for row in rows], np.int64)}


def test_deterministic_requests_are_scored_apart_and_others_together(tokenizer):
    requests = [request_of([1, 2]), request_of([3, 4], [5, 6])]
    apart = RequestScorer(ToyScorer(0.0, NOISE), tokenizer, deterministic=True)(requests)
    merged = RequestScorer(ToyScorer(0.0, NOISE), tokenizer, deterministic=False)(requests)
    for index, request in enumerate(requests):
        exact = np.array([[toy_score(row)] for row in request["tokens"].tolist()])
        assert np.allclose(apart[index]["rewards"], exact + NOISE * len(exact))
        assert np.allclose(merged[index]["rewards"], exact + NOISE * 3)
        assert apart[index]["status"].shape == merged[index]["status"].shape == exact.shape


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_request_that_makes_the_model_raise_does_not_fail_another(tokenizer, deterministic):
    scorer = RequestScorer(ToyScorer(0.0, 0.0), tokenizer, deterministic=deterministic)
    good, bad = scorer([request_of([1, 2]), request_of([TOKEN_RAISE, 2])])
    assert good["status"].tolist() == [[base.STATUS_OK]]
    assert good["rewards"][0, 0] == np.float32(toy_score([1, 2]))
    assert bad["status"].tolist() == [[base.STATUS_INTERNAL]]
    assert math.isnan(bad["rewards"][0, 0])
    done = scorer.progress.read()
    assert (done.requests, done.samples, done.failed) == (
        2,
        2,
        1,
    )


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_lost_rank_is_an_error_of_the_request_and_no_status(tokenizer, deterministic):
    """A status would be final; an HTTP error is tried again, and the next server can score the samples."""

    class Lost(ToyScorer):
        def score(self, sequences):
            raise RankLostError("rank 1 died")

    with pytest.raises(RankLostError, match="rank 1 died"):
        RequestScorer(Lost(0.0, 0.0), tokenizer, deterministic=deterministic)([request_of([1]), request_of([2])])


@pytest.mark.parametrize("score", [1e300, math.inf, -math.inf, math.nan])
def test_scores_that_float32_cannot_hold_are_refused(tokenizer, score):
    class Constant(ToyScorer):
        def score(self, sequences):
            return [score] * len(sequences)

    (answer,) = RequestScorer(Constant(0.0, 0.0), tokenizer)([request_of([1, 2])])
    assert answer["status"].tolist() == [[base.STATUS_NOT_FINITE]]
    assert math.isnan(answer["rewards"][0, 0])


@pytest.mark.parametrize("scores", [[], [1.0, 2.0]], ids=["too few", "too many"])
def test_a_model_that_gives_another_number_of_scores_is_an_internal_error(tokenizer, scores):
    class Miscounting(ToyScorer):
        def score(self, sequences):
            return scores

    (answer,) = RequestScorer(Miscounting(0.0, 0.0), tokenizer)([request_of([1, 2])])
    assert answer["status"].tolist() == [[base.STATUS_INTERNAL]]
    assert math.isnan(answer["rewards"][0, 0])


def test_a_description_survives_its_json_and_other_versions_are_refused(tokenizer):
    info = ServerInfo("rm", 8, 32, 128, TokenizerInfo.from_tokenizer(tokenizer), True, False, {"pooling": "mean"})
    assert ServerInfo.from_json(info.to_json()) == info
    with pytest.raises(ValueError, match=f"this client version {PROTOCOL_VERSION}:"):
        ServerInfo.from_json(info.to_json().replace(f'"protocol": {PROTOCOL_VERSION}', '"protocol": 99'))
    for text in ("[]", "{}", f'{{"protocol": {PROTOCOL_VERSION}}}', "no json"):
        with pytest.raises(ValueError):
            ServerInfo.from_json(text)


class LengthPool(FunctionPool):
    """Scores by the response's length, at once; an empty one times out."""

    def __init__(self):
        self.asked: list[tuple[str, int]] = []

    def submit(self, function, samples, on_sample=lambda: None):
        self.asked.append((function, len(samples)))
        for _ in samples:
            on_sample()
        lengths = np.array([len(sample.response) for sample in samples], np.float32)
        status = np.where(lengths == 0, base.STATUS_TIMED_OUT, base.STATUS_OK).astype(np.int32)
        scores = Scores(np.where(lengths == 0, np.nan, lengths).astype(np.float32), status)
        pending = PendingScores(function, scores, 0, on_sample)
        pending.future.set_result(scores)
        return pending


@pytest.fixture
def pool() -> LengthPool:
    return LengthPool()


def test_merged_requests_are_asked_together_and_a_bad_sample_is_left_out(pool):
    scorer = FunctionRequestScorer(FunctionScorer(pool, "f"))
    first = text_arrays([TextSample("p", text) for text in ("abc", "", "ab")])
    second = text_arrays([TextSample("", "a")])
    first[wire.METADATA][2, 0] = b"{"
    left, right = scorer([first, second])
    assert left["status"].tolist() == [[base.STATUS_OK], [base.STATUS_TIMED_OUT], [base.STATUS_BAD_PROMPT]]
    assert left["rewards"][0, 0] == 3 and all(math.isnan(value) for value in left["rewards"][1:, 0])
    assert (right["status"].tolist(), right["rewards"].tolist()) == ([[0]], [[1.0]])
    assert pool.asked == [("f", 2), ("f", 1)]
    done = scorer.progress.read()
    assert (done.requests, done.samples, done.failed) == (
        2,
        4,
        2,
    )
    assert scorer.input_forms == (wire.TEXT_FORM,)


def test_the_canary_does_not_reach_the_function(pool):
    scorer = FunctionRequestScorer(FunctionScorer(pool, "f"))
    canary = {one["name"]: np.array([[one["data"][0].encode()]], object) for one in scorer.canary_inputs()}
    scorer([canary])
    assert pool.asked == [(PING, 1)]


def test_each_sample_is_progress(pool, monkeypatch):
    """A long batch of a function that is slow, but within its time limit, is no stuck server."""
    beats: list[None] = []
    scorer = FunctionRequestScorer(FunctionScorer(pool, "f"))
    monkeypatch.setattr(Progress, "beat", lambda _: beats.append(None))
    scorer([text_arrays([TextSample("p", "a"), TextSample("p", "b"), TextSample("p", "c")])])
    assert len(beats) == 3 + 2  # and at the beginning and the end


def test_tokens_are_refused(pool):
    tokens = {"tokens": np.zeros((1, 1), np.int64), "sequence_lengths": np.ones((1, 1), np.int64)}
    with pytest.raises(ValueError, match=r"this model reads text; this request holds"):
        FunctionRequestScorer(FunctionScorer(pool, "f"))([tokens])


@pytest.mark.parametrize("record", [{"reinforce_rl_canary": True}, {"canary": True}, {"canary": 32 * "0"}])
def test_no_sample_of_a_client_passes_for_the_canary(pool, record):
    scorer = FunctionRequestScorer(FunctionScorer(pool, "f"))
    scorer([text_arrays([TextSample("", "abc", record=record)])])
    assert pool.asked == [("f", 1)]
