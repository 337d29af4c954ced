"""Requests of texts to a reward function, without a server."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future

import numpy as np
import pytest

from reinforce_rl.reward_server.function_scoring import FunctionRequestScorer, FunctionScorer
from reinforce_rl.reward_server.progress import Progress
from reinforce_rl.rewards import base, wire
from reinforce_rl.rewards.base import TextSample
from reinforce_rl.rewards.function_process.pool import PING, FunctionPool, PendingScores, Scores
from reinforce_rl.rewards.wire import text_arrays


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
        future: Future[Scores] = Future()
        future.set_result(Scores(np.where(lengths == 0, np.nan, lengths).astype(np.float32), status))
        return PendingScores(future, time.monotonic())


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
    assert (scorer.totals.requests, scorer.totals.samples, scorer.totals.failed) == (2, 4, 2)
    assert scorer.input_forms == (wire.TEXT_FORM,)


def test_the_canary_does_not_reach_the_function(pool):
    scorer = FunctionRequestScorer(FunctionScorer(pool, "f"))
    canary = {one["name"]: np.array([[one["data"][0].encode()]], object) for one in scorer.canary_inputs()}
    scorer([canary])
    assert pool.asked == [(PING, 1)]


def test_each_sample_is_progress(pool, tmp_path, monkeypatch):
    """A long batch of a function that is slow, but within its time limit, is no stuck server."""
    beats: list[None] = []
    scorer = FunctionRequestScorer(FunctionScorer(pool, "f"))
    scorer.report_to(Progress(tmp_path / "progress", create=True))
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
