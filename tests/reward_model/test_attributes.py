"""Named attributes from a head of several scores to the client.

A served classifier equals transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.classifiers import (
    HELPSTEER,
    classifier_folder,
    sequences_to_score,
    transformers_scores,
)
from helpers.errors import raises_error
from helpers.fake_reward_server import FakeRewardServer, answer, describe
from helpers.real_run import RealServer
from helpers.rewards import request_of
from helpers.serve_toy_scorer import TOKEN_NAN, TOKEN_RAISE, VOCAB_SIZE, ToyScorer, toy_score
from helpers.tiny_tokenizer import write_tiny_tokenizer

from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.reward_model.server.scoring import RequestScorer
from reinforce_rl.rewards import base, wire
from reinforce_rl.rewards.base import AttributeScores, Rewards, WeightedSource
from reinforce_rl.rewards.client import RemoteGPTRMClient
from reinforce_rl.rewards.sources import CombinedRewards

ROOT = Path(__file__).parents[2]
NAMES = ("sum", "length", "odd")
TOKEN_ODD_NAN = 104  # one attribute is not finite, but the reward is
WEIGHTS = {"helpfulness": 0.65, "correctness": 0.8, "verbosity": -0.4}


class AttributeToy(ToyScorer):
    """The toy's score, the length, and whether it is odd; the reward is the toy's score."""

    attributes = NAMES

    def score_attributes(self, sequences: list[list[int]]) -> AttributeScores:
        rewards = self.score(sequences)
        rows = []
        for reward, sequence in zip(rewards, sequences, strict=True):
            parity = float("inf") if TOKEN_ODD_NAN in sequence else len(sequence) % 2
            rows.append([reward, float(len(sequence)), parity])
        return AttributeScores(rewards, rows)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(
        write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=VOCAB_SIZE)
    )


def arrays_of(sequences: list[list[int]]) -> dict[str, np.ndarray]:
    width = max(map(len, sequences))
    tokens = np.zeros((len(sequences), width), np.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    lengths = np.array([[len(s)] for s in sequences], np.int64)
    return {"tokens": tokens, "sequence_lengths": lengths}


@pytest.mark.parametrize("deterministic", [True, False])
def test_each_request_gets_its_own_attributes(tokenizer, deterministic):
    scorer = RequestScorer(AttributeToy(0.0, 0.0), tokenizer, deterministic=deterministic)
    sequences = [[1, 2, 3], [4, 5]]
    wrong = [[6], [TOKEN_NAN], [TOKEN_ODD_NAN, 7]]
    first, second = scorer([arrays_of(sequences), arrays_of(wrong)])
    assert first["attributes"].dtype == np.float32
    expected = [[toy_score([1, 2, 3]), 3, 1], [toy_score([4, 5]), 2, 0]]
    np.testing.assert_allclose(first["attributes"], expected)
    expected = [
        base.STATUS_OK,
        base.STATUS_NOT_FINITE,
        base.STATUS_NOT_FINITE,
    ]
    assert second["status"][:, 0].tolist() == expected
    expected_first = [toy_score([6]), 1, 1]
    np.testing.assert_allclose(second["attributes"][0], expected_first)
    assert np.isnan(second["attributes"][1:]).all()
    assert np.isnan(second["rewards"][1:]).all()


def test_a_model_that_raises_gives_no_attributes(tokenizer):
    scorer = RequestScorer(AttributeToy(0.0, 0.0), tokenizer)
    (answer,) = scorer([arrays_of([[TOKEN_RAISE]])])
    assert np.isnan(answer["attributes"]).all()
    assert answer["status"].tolist() == [[base.STATUS_INTERNAL]]


def test_without_attributes_the_answer_is_as_before(tokenizer):
    scorer = RequestScorer(ToyScorer(0.0, 0.0), tokenizer)
    (answer,) = scorer([arrays_of([[1, 2]])])
    assert set(answer) == {"rewards", "status"}


def attribute_answer(values: list[float], count: int, columns: int) -> tuple[int, dict]:
    code, body = answer([1.0, 2.0], [0, base.STATUS_INTERNAL])
    extra = {"name": "attributes", "datatype": "FP32", "shape": [count, columns], "data": values}
    return code, {**body, "outputs": [*body["outputs"], extra]}


def test_the_client_hands_on_attributes_by_name():
    answers = [attribute_answer([1.0, 2.0, 3.0, 4.0], 2, 2)]
    with FakeRewardServer(answers) as fake:
        fake.info = describe(attributes=["kind", "brief"])
        client = RemoteGPTRMClient(port=fake.port, deadline_seconds=20)
        rewards = client.infer_rm(request_of([[1], [2]])).result()
        client.close()
    assert list(rewards.by_source) == ["kind", "brief"]
    expected = torch.tensor([2.0, torch.nan])
    torch.testing.assert_close(rewards.by_source["brief"], expected, equal_nan=True)


def test_attributes_of_another_shape_are_no_answer():
    answers = [attribute_answer([1.0] * 6, 2, 3)]
    with FakeRewardServer(answers) as fake:
        fake.info = describe(attributes=["kind", "brief"])
        client = RemoteGPTRMClient(port=fake.port, deadline_seconds=20, first_backoff_seconds=0.02)
        values = ["'attributes'", "float32 [2, 3]", "float32 [2, 2]"]
        with raises_error("reward_server.answer.wrong", *values):
            client.infer_rm(request_of([[1], [2]])).result()
        client.close()


def test_several_sources_keep_their_attributes_apart():
    class Source:
        def infer_rm(self, request):
            return self

        def result(self):
            kinds = {"kind": torch.tensor([0.5])}
            return Rewards(torch.ones(1), torch.zeros(1).int(), kinds)

        def close(self):
            pass

    sources = [WeightedSource(name, Source(), 1.0) for name in ("a", "b")]
    rewards = CombinedRewards(sources).infer_rm(request_of([[1]])).result()
    assert set(rewards.by_source) == {"a", "a/kind", "b", "b/kind"}


@pytest.mark.more
def test_a_served_classifier_equals_transformers(tmp_path):
    pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")
    folder = classifier_folder(tmp_path / "model", "qwen3", 5)
    sequences = sequences_to_score()
    expected = transformers_scores(folder, sequences, padded=True)
    weights = ",".join(f"{name}:{weight}" for name, weight in WEIGHTS.items())
    merging = [
        f"reward_model.attribute_weights={{{weights}}}",
        "reward_model.mean=0.25",
        "reward_model.std=2",
    ]
    with RealServer(tmp_path, f"reward_model.restore_from_path={folder}", *merging) as server:
        client = RemoteGPTRMClient(port=server.port, deadline_seconds=60)
        info = client.wait_until_ready()
        rewards = client.infer_rm(request_of(sequences)).result()
        client.close()
    assert tuple(info.attributes) == HELPSTEER == tuple(rewards.by_source)
    assert info.details["mean"] == 0.25
    assert info.details["attribute_weights"]["correctness"] == 0.8
    for column, values in enumerate(rewards.by_source.values()):
        torch.testing.assert_close(values, expected[:, column], atol=1e-5, rtol=0)
    columns = {name: expected[:, HELPSTEER.index(name)] for name in WEIGHTS}
    merged = sum(weight * columns[name] for name, weight in WEIGHTS.items())
    torch.testing.assert_close(rewards.values, (merged - 0.25) / 2, atol=1e-5, rtol=0)
    assert json.loads(info.to_json())["attributes"] == list(HELPSTEER)
    assert wire.ServerInfo.from_json(info.to_json()) == info
