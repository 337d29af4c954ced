"""Requests to rewards without a server: what merging does, and what it must not do."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.serve_toy_scorer import TOKEN_RAISE, VOCAB_SIZE, ToyScorer, toy_score
from helpers.tiny_tokenizer import write_tiny_tokenizer

from reinforce_rl.data.tokenizer import TokenizerInfo, load_tokenizer
from reinforce_rl.errors import RankLostError
from reinforce_rl.reward_server.scoring import RequestScorer
from reinforce_rl.rewards import base
from reinforce_rl.rewards.wire import PROTOCOL_VERSION, ServerInfo

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
    assert (scorer.totals.requests, scorer.totals.samples, scorer.totals.failed) == (2, 2, 1)


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
