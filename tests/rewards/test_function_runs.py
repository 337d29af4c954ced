"""Runs with a reward function, in the trainer and behind the server: both give the same numbers."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path

import pytest
import torch
from helpers import reward_functions
from helpers.errors import check_error, raises_error
from helpers.real_run import RealServer
from helpers.tiny_run import (
    compose,
    rollouts_of,
    three_letters,
    tiny_overrides,
    tiny_trainer,
    weights,
)

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.load import load_config
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import TooManyFailedRewardsError
from reinforce_rl.monitoring.run import SilentMonitor
from reinforce_rl.rewards import transport, wire
from reinforce_rl.rewards.base import (
    STATUS_BAD_PROMPT,
    STATUS_INTERNAL,
    STATUS_OK,
    RewardRequest,
    RewardSource,
)
from reinforce_rl.rewards.client import RemoteGPTRMClient
from reinforce_rl.rewards.sources import CombinedRewards, FunctionRewards, connect_to_reward_servers
from reinforce_rl.rewards.transport import ModelAddress
from reinforce_rl.rewards.wire import text_arrays
from reinforce_rl.utils.net import Address

SHARE = "helpers.reward_functions.share_of_letters"
TESTS = Path(__file__).parents[1]
RUNS = "helpers.reward_functions.runs"
LETTERS = ("etaoi", "nshrd", "lucmf", "wygpb")
FUNCTION = ["reward=function", f"reward_function.name={SHARE}", "+reward_function.kwargs.scale=2.0"]


def function_config(folder: Path, *overrides: str) -> TrainConfig:
    """Return the configuration of a run of two steps.

    Each line of prompts is rendered as messages and has the `letters` that the function reads.
    """
    options = tiny_overrides(folder)
    lines = []
    for i, text in enumerate(three_letters(8)):
        messages = [{"role": "user", "content": text[:1]}]
        letters = LETTERS[i % len(LETTERS)]
        line = {"messages": messages, "letters": letters, "number": i}
        lines.append(json.dumps(line) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))
    options += ["trainer.reinforce.max_steps=2", "model.data.data_prefix.validation=null"]
    return load_config(compose(*options, *overrides))


class Remembering:
    """A reward source that keeps the requests."""

    def __init__(self, source: RewardSource):
        self.source = source
        self.requests: list[RewardRequest] = []

    def infer_rm(self, request: RewardRequest):
        self.requests.append(request)
        return self.source.infer_rm(request)

    def close(self) -> None:
        self.source.close()


def connect(cfg: TrainConfig, mesh) -> RewardSource:
    tokenizer = load_tokenizer(cfg.pretrained_checkpoint.restore_from_path)
    return connect_to_reward_servers(
        cfg, mesh, tokenizer, SilentMonitor(cfg.exp_manager.explicit_log_dir)
    )


def run(
    folder: Path, mesh, *overrides: str
) -> tuple[list[float], list[torch.Tensor], list[RewardRequest]]:
    """Return the rewards of both steps, the final weights and the samples of the requests."""
    folder.mkdir()
    cfg = function_config(folder, *overrides)
    source = connect(cfg, mesh)
    remembering = Remembering(source)
    try:
        with tiny_trainer(cfg, mesh, remembering) as trainer:
            trainer.fit()
            final = weights(trainer)
    finally:
        source.close()
    rows = [row for step in (1, 2) for row in rollouts_of(folder, step)]
    return [row["reward"] for row in rows], final, remembering.requests


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")
    options = [f"reward_function.name={SHARE}", "+reward_function.kwargs.scale=2.0"]
    with pytest.MonkeyPatch.context() as patch:
        folders = [str(TESTS), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(folders))
        server = RealServer(tmp_path_factory.mktemp("server"), *options).start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def in_trainer(tmp_path_factory, mesh):
    folder = tmp_path_factory.mktemp("in_trainer") / "run"
    return run(folder, mesh, *FUNCTION), folder


def test_a_run_asks_the_function_with_the_prompts_own_fields(in_trainer):
    (rewards, _, requests), folder = in_trainer
    samples = [sample for request in requests for sample in request.samples]
    assert len(rewards) == len(samples) == 2 * 4 * 4
    expected = []
    for sample in samples:
        count = sum(sample.response.count(letter) for letter in sample.record["letters"])
        share = count / max(len(sample.response), 1)
        expected.append(2.0 * share + len(sample.prompt) / 1000)
    assert rewards == pytest.approx(expected, abs=1e-6)
    assert len(set(rewards)) > 3
    rows = [row for step in (1, 2) for row in rollouts_of(folder, step)]
    for sample, row in zip(samples, rows, strict=True):
        assert sample.messages == ({"role": "user", "content": sample.prompt[3]},)
        assert sample.prompt == row["prompt"]
        assert sample.response == row["response"]
        assert sample.finished == (row["finish_reason"] == "stop")
        assert set(sample.record) == {"letters", "number"}
    assert {sample.finished for sample in samples} == {True, False}


@pytest.mark.more
def test_the_served_function_makes_the_same_run(in_trainer, server, tmp_path, mesh):
    port = f"remote_rm.reward_model.port={server.port}"
    rewards, final, _ = run(tmp_path / "run", mesh, port)
    (expected, expected_final, _), _ = in_trainer
    assert rewards == expected
    for left, right in zip(final, expected_final, strict=True):
        assert torch.equal(left, right)


@pytest.mark.more
def test_the_served_functions_answers(server):
    model = ModelAddress(Address("127.0.0.1", server.port), "reward_model", None)
    info = transport.wait_for(transport.ask_description(model, 10.0))
    assert info.input_forms == (wire.TEXT_FORM,)
    assert info.tokenizer is None
    assert info.max_length is None
    assert info.vocab_size is None
    assert info.details["function"] == SHARE
    assert info.details["kwargs"] == {"scale": 2.0}
    assert len(info.details["source_sha256"]) == 64

    def ask(*columns: tuple[str, list[str]]) -> dict:
        inputs = []
        for name, data in columns:
            shape = [len(data), 1]
            inputs.append({"name": name, "datatype": "BYTES", "shape": shape, "data": data})
        return transport.infer_json(model, inputs, 30.0)

    record = json.dumps({"letters": "e"})
    metadata = [record, "{}", "{", record]
    prompts = ("prompts", ["abc"] * 4)
    responses = ("responses", ["eeoo"] * 3 + [""])
    answer = ask(prompts, responses, ("metadata", metadata))
    assert answer["status"] == [
        STATUS_OK,
        STATUS_INTERNAL,
        STATUS_BAD_PROMPT,
        STATUS_OK,
    ]
    rewards = answer["rewards"]
    assert rewards[0] == pytest.approx(2 * 0.5 + 0.003)
    assert rewards[3] == pytest.approx(0.003)
    for row in (1, 2):
        assert math.isnan(rewards[row])
    with raises_error("reward_server.answer.not_proper", "HTTP 400"):
        ask(("sentences", ["abc"]))


@pytest.mark.more
def test_a_request_larger_than_the_servers_limit_is_split(server):
    prompts = [f"p{i}" for i in range(300)]
    request = request_of(prompts, ["e"] * 300, [{"letters": "e"}] * 300)
    client = RemoteGPTRMClient(port=server.port)
    try:
        values = client.infer_rm(request).result().values
    finally:
        client.close()
    expected = [2.0 + len(prompt) / 1000 for prompt in prompts]
    assert values.tolist() == pytest.approx(expected)


def request_of(prompts: list[str], responses: list[str], records: list[dict]) -> RewardRequest:
    tokens = torch.zeros((len(prompts), 1), dtype=torch.long)
    lengths = torch.ones(len(prompts), dtype=torch.long)
    return RewardRequest(
        tokens,
        lengths,
        tuple(prompts),
        tuple(responses),
        metadata=tuple(records),
    )


def test_several_functions_are_a_weighted_sum(tmp_path, mesh):
    added = "+reward_function.more_functions.runs"
    cfg = function_config(
        tmp_path,
        *FUNCTION,
        "reward_function.weight=0.5",
        f"{added}.name={RUNS}",
        f"{added}.weight=-3",
    )
    source = connect(cfg, mesh)
    try:
        assert isinstance(source, CombinedRewards)
        records = [{"letters": "e", "value": 1.0}, {"letters": "e"}, {"letters": "x", "value": 0.5}]
        request = request_of(["", "", ""], ["ee", "ee", "ee"], records)
        scores = source.infer_rm(request).result()
    finally:
        source.close()
    assert scores.status.tolist() == [STATUS_OK, STATUS_INTERNAL, STATUS_OK]
    weighted_sums = [0.5 * 2.0 - 3.0, 0.5 * 0.0 - 1.5]
    assert scores.values[[0, 2]].tolist() == weighted_sums
    assert scores.values[1].isnan()
    assert scores.by_source["share_of_letters"].tolist() == [2.0, 2.0, 0.0]


@pytest.mark.parametrize(
    "overrides",
    [[], [f"+reward_function.more_functions.runs.name={RUNS}"]],
    ids=["one", "several"],
)
def test_a_function_that_raises_is_named_with_its_line(tmp_path, mesh, overrides):
    name = "helpers.reward_functions.share_of_letters"
    cfg = function_config(tmp_path, *FUNCTION, *overrides)
    prompts = tmp_path / "train.jsonl"
    lines = []
    for line in prompts.read_text().splitlines():
        record = json.loads(line)
        del record["letters"]
        lines.append(json.dumps(record) + "\n")
    prompts.write_text("".join(lines))
    source = connect(cfg, mesh)
    code = Path(reward_functions.__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(code, 1) if '["letters"]' in text)
    try:
        with (
            tiny_trainer(cfg, mesh, source) as trainer,
            pytest.raises(TooManyFailedRewardsError) as caught,
        ):
            trainer.fit()
    finally:
        source.close()
    reason = f"{name}: KeyError at {reward_functions.__file__}:{line}: 'letters' (16)"
    check_error(caught.value, "rewards.samples.too_many_failed", reason)
    assert "server" not in str(caught.value), "there is none, whose log could say more"


class OtherRank:
    """A mesh of a rank that does not request rewards."""

    is_model_parallel_rank_0 = False

    raise_on_all_ranks = staticmethod(contextlib.nullcontext)


def test_only_the_rank_that_asks_starts_processes(tmp_path):
    source = connect(function_config(tmp_path, *FUNCTION), OtherRank())
    assert isinstance(source, FunctionRewards)
    future = source.infer_rm(request_of([""], [""], [{}]))
    with raises_error("reward_function.processes.not_started"):
        future.result()
    source.close()


def test_an_unknown_function_ends_the_start(tmp_path, mesh):
    cfg = function_config(tmp_path, "reward=function", f"reward_function.name={SHARE}s")
    with raises_error(
        "reward_function.name.unknown", "reward_function.name", f"{SHARE}s", f"{SHARE}?"
    ):
        connect(cfg, mesh)


def test_arrays_of_a_request_need_no_metadata():
    request = request_of(["a"], ["b"], [])
    assert text_arrays(request.samples)[wire.METADATA].tolist() == [[b"{}"]]
