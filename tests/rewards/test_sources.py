"""Reward servers of a configuration, and the weighted sum of several sources."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace

import pytest
import torch
from helpers.errors import raises_error
from helpers.fake_reward_server import FakeRewardServer, answer, describe
from helpers.rewards import request_of
from helpers.tiny_run import compose, tiny_config, tiny_overrides
from helpers.tiny_tokenizer import write_tiny_tokenizer
from helpers.toy_server import free_port

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.load import load_config
from reinforce_rl.data.tokenizer import TokenizerInfo, load_tokenizer
from reinforce_rl.errors import RewardServerError
from reinforce_rl.monitoring.run import SilentMonitor
from reinforce_rl.rewards.base import (
    STATUS_BAD_TEXT,
    STATUS_BAD_TOKEN,
    STATUS_EMPTY,
    STATUS_OK,
    RewardRequest,
    Rewards,
    RewardSource,
    WeightedSource,
)
from reinforce_rl.rewards.client import RemoteGPTRMClient
from reinforce_rl.rewards.sources import CombinedRewards, connect_to_reward_servers, names_of_scores

pytest.importorskip("tritonclient.http")

RM = "remote_rm"
VOCAB_SIZE = 32  # of the tiny model
MORE = f"+{RM}.more_reward_models.safety"
REQUEST = request_of([[5] * 3, [5] * 2])


@pytest.fixture
def closed(monkeypatch) -> list[int]:
    """The ports of the clients that were closed, in order."""
    ports: list[int] = []
    close = RemoteGPTRMClient.close

    def remember(client: RemoteGPTRMClient) -> None:
        ports.append(client.port)
        close(client)

    monkeypatch.setattr(RemoteGPTRMClient, "close", remember)
    return ports


@pytest.fixture
def servers(tmp_path):
    """Two servers that score two samples each, for the tiny model's tokenizer."""
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path / "tokenizer", VOCAB_SIZE))
    with (
        FakeRewardServer([answer([1.0, 2.0], [0, 0])]) as first,
        FakeRewardServer([answer([10.0, 20.0], [0, 0])]) as second,
    ):
        info = TokenizerInfo.from_tokenizer(tokenizer)
        first.info = describe(tokenizer=info, vocab_size=VOCAB_SIZE)
        second.info = first.info
        yield first, second


def connect(cfg: TrainConfig, mesh) -> RewardSource:
    tokenizer = load_tokenizer(cfg.pretrained_checkpoint.restore_from_path)
    return connect_to_reward_servers(
        cfg, mesh, tokenizer, SilentMonitor(cfg.exp_manager.explicit_log_dir)
    )


def test_the_weighted_sum_of_two(tmp_path, mesh, servers, closed):
    first, second = servers
    options = [
        f"{RM}.reward_model.port={first.port}",
        f"{RM}.reward_model.name=helpful",
        f"{RM}.reward_model.weight=0.5",
    ]
    first.info = describe(name="helpful", tokenizer=first.info.tokenizer, vocab_size=VOCAB_SIZE)
    cfg = tiny_config(tmp_path, *options, f"{MORE}.port={second.port}", f"{MORE}.weight=-2")
    rm = connect(cfg, mesh)
    rewards = rm.infer_rm(REQUEST).result()
    assert rewards.values.tolist() == [0.5 - 20.0, 1.0 - 40.0]
    by_source = {name: values.tolist() for name, values in rewards.by_source.items()}
    assert by_source == {"helpful": [1.0, 2.0], "safety": [10.0, 20.0]}
    assert names_of_scores(cfg) == tuple(rewards.by_source)
    second.answers = [answer([10.0, float("nan")], [STATUS_OK, STATUS_BAD_TOKEN])]
    second.calls = 0
    rewards = rm.infer_rm(REQUEST).result()
    assert rewards.status.tolist() == [STATUS_OK, STATUS_BAD_TOKEN]
    assert rewards.values[0] == 0.5 - 20.0
    assert rewards.values.isnan().tolist() == [False, True]
    rm.close()
    assert sorted(closed) == sorted([first.port, second.port])


def test_a_single_one(tmp_path, mesh, servers, closed):
    first, _ = servers
    port = f"{RM}.reward_model.port={first.port}"
    weighted = [f"{RM}.reward_model.weight=3"]
    for options, values in (([], [1.0, 2.0]), (weighted, [3.0, 6.0])):
        rm = connect(tiny_config(tmp_path, port, *options), mesh)
        rewards = rm.infer_rm(REQUEST).result()
        assert rewards.values.tolist() == values
        assert list(rewards.by_source) == (["reward_model"] if options else [])
        rm.close()
    assert closed == [first.port] * 2


def write_ready_file(path, server) -> None:
    path.write_text(json.dumps({"host": "127.0.0.1", "port": server.port, "pid": 1}))


def test_servers_that_write_their_addresses_while_the_trainer_waits(tmp_path, mesh, servers):
    first, second = servers
    files = [tmp_path / "ready-0.json", tmp_path / "ready-1.json"]
    write_ready_file(files[0], first)
    later = threading.Timer(1.0, write_ready_file, (files[1], second))
    later.start()
    ready_files = f"{RM}.reward_model.ready_files=[{files[0]},{files[1]}]"
    cfg = tiny_config(tmp_path, ready_files)
    rm = connect(cfg, mesh)
    later.join()
    assert isinstance(rm, RemoteGPTRMClient)
    rewards = rm.infer_rm(REQUEST).result()
    assert rewards.values.tolist() in ([1.0, 2.0], [10.0, 20.0])
    rm.close()


def test_a_ready_file_that_nobody_writes_or_that_is_none(tmp_path, mesh):
    file = tmp_path / "ready.json"
    cfg = tiny_config(
        tmp_path, f"{RM}.reward_model.ready_files=[{file}]", f"{RM}.ready_timeout_seconds=1"
    )
    with raises_error("reward_server.ready_file.missing", str(file)):
        connect(cfg, mesh)
    for content in ("[]", "{}", '{"host": "a b", "port": 5}', '{"host": "a", "port": 0}'):
        file.write_text(content)
        with raises_error("reward_server.ready_file.no_address", str(file)):
            connect(cfg, mesh)


def test_a_second_one_with_another_tokenizer(tmp_path, mesh, servers, closed):
    first, second = servers
    second.info = describe(vocab_size=VOCAB_SIZE)
    cfg = tiny_config(
        tmp_path, f"{RM}.reward_model.port={first.port}", f"{MORE}.port={second.port}"
    )
    with raises_error("reward_server.tokens.differ", f":{second.port}"):
        connect(cfg, mesh)
    assert sorted(closed) == sorted([first.port, second.port])


def test_a_second_one_that_does_not_answer(tmp_path, mesh, servers, closed):
    first, _ = servers
    port = free_port()
    cfg = tiny_config(
        tmp_path,
        f"{RM}.reward_model.port={first.port}",
        f"{MORE}.port={port}",
        f"{RM}.ready_timeout_seconds=0.2",
    )
    with raises_error("reward_server.server.no_answer", port):
        connect(cfg, mesh)
    assert sorted(closed) == sorted([first.port, port])


def test_a_replica_that_is_down_is_noted_and_the_run_starts(
    tmp_path, mesh, servers, closed, monkeypatch
):
    first, second = servers
    second.answers = first.answers
    down = free_port()
    notes: list[str] = []
    monkeypatch.setattr(SilentMonitor, "note", lambda self, text, **_: notes.append(text))
    replicas = f"{RM}.reward_model.replicas=['127.0.0.1:{down}','127.0.0.1:{second.port}']"
    cfg = tiny_config(tmp_path, f"{RM}.reward_model.port={first.port}", replicas)
    rm = connect(cfg, mesh)
    while not (first.calls and second.calls):
        rewards = rm.infer_rm(REQUEST).result()
        assert rewards.values.tolist() == [1.0, 2.0]
    rm.close()
    assert any(
        f"The reward server at 127.0.0.1:{down} does not answer (connection refused)" in text
        for text in notes
    )
    assert sum("continues with the others" in text for text in notes) == 1


LONGEST = "model.encoder_seq_length"  # 16 in a tiny run
SHORTEST = "model.reinforce.length_params.min_length"
BIASED = "model.reinforce.allow_biased_sampling=true"


@pytest.mark.parametrize(
    ("max_length", "forms", "is_short"),
    [
        (16, ("tokens",), False),
        (None, ("text",), False),
        (15, ("tokens",), True),
        (15, ("text", "tokens"), True),
    ],
)
def test_a_shorter_context_is_said_at_the_start(
    tmp_path, mesh, servers, monkeypatch, max_length, forms, is_short
):
    first, _ = servers
    tokenizer = None if max_length is None else first.info.tokenizer
    first.info = replace(first.info, max_length=max_length, input_forms=forms, tokenizer=tokenizer)
    notes: list[str] = []
    monkeypatch.setattr(SilentMonitor, "note", lambda self, text, **_: notes.append(text))
    cfg = tiny_config(tmp_path, f"{RM}.reward_model.port={first.port}")
    connect(cfg, mesh).close()
    warnings = [text for text in notes if text.startswith("warning: ")]
    assert len(warnings) == is_short
    for text in warnings:
        assert f"127.0.0.1:{first.port}" in text or f"localhost:{first.port}" in text
        assert "reads at most 15 tokens (reward_model.max_length" in text
        assert f"16 ({LONGEST})" in text
        assert "trainer.reinforce.max_failed_fraction" in text
        assert ("tokens of the policy" in text) == ("text" in forms)


def test_a_context_for_which_every_sample_is_too_long(tmp_path, mesh, servers, closed):
    first, _ = servers
    first.info = replace(first.info, max_length=4)
    port = f"{RM}.reward_model.port={first.port}"
    cfg = tiny_config(tmp_path, port, f"{SHORTEST}=3", BIASED)
    connect(cfg, mesh).close()
    values = ["4 tokens", f"5 ({SHORTEST} ", LONGEST]
    with raises_error("reward_server.length.too_short", *values):
        connect(tiny_config(tmp_path, port, f"{SHORTEST}=4", BIASED), mesh)
    assert closed == [first.port] * 2


@pytest.mark.parametrize("name", ["reward_model", "other"])
def test_two_of_one_name_are_refused_before_anything_is_asked(tmp_path, name):
    names = [f"{RM}.reward_model.name={name}", f"+{RM}.more_reward_models.{name}.port=1"]
    with raises_error("config.reward_sources.same_name", f"{name}, {name}"):
        load_config(compose(*tiny_overrides(tmp_path), *names))


@pytest.mark.parametrize(
    "names",
    [
        [f"+{RM}.more_reward_models.with_kl.port=1"],
        [f"{RM}.reward_model.name=with_kl", f"{RM}.reward_model.weight=2"],
    ],
    ids=["second", "weighted"],
)
def test_a_name_that_would_log_over_a_metric_is_refused(tmp_path, names):
    with raises_error("config.reward_sources.named_as_metric", "'with_kl'", "rewards_with_kl"):
        load_config(compose(*tiny_overrides(tmp_path), *names))


def test_a_single_one_is_not_logged_under_its_name_and_may_have_any(tmp_path):
    load_config(compose(*tiny_overrides(tmp_path), f"{RM}.reward_model.name=with_kl"))


FUNCTION = ["reward=function", "reward_function.name=helpers.reward_functions.brief"]


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([], None),
        ([f"{RM}.reward_model.name=helpful", f"{RM}.reward_model.weight=0.5"], ("helpful",)),
        ([f"{RM}.reward_model.name=helpful", f"{MORE}.port=1"], ("helpful", "safety")),
        (FUNCTION, ()),
        ([*FUNCTION, "reward_function.weight=2"], ("brief",)),
        ([*FUNCTION, f"{MORE}.port=1"], ("brief", "safety")),
    ],
    ids=["server", "weighted server", "two servers", "function", "weighted function", "both"],
)
def test_the_names_of_scores_follow_from_the_configuration(tmp_path, overrides, names):
    assert names_of_scores(tiny_config(tmp_path, *overrides)) == names


@pytest.mark.parametrize(
    ("overrides", "is_asked", "terms"),
    [
        ([], True, [("remote_rm.reward_model", "reward_model", 1.0)]),
        (
            ["reward=mine.Source", f"{MORE}.port=1", f"{MORE}.weight=3"],
            False,
            [("reward", "Source", 1.0), ("remote_rm.more_reward_models.safety", "safety", 3.0)],
        ),
        (
            [*FUNCTION, "reward_function.weight=2", f"{MORE}.port=1"],
            False,
            [
                ("reward_function", "brief", 2.0),
                ("remote_rm.more_reward_models.safety", "safety", 1.0),
            ],
        ),
    ],
    ids=["server", "class and server", "function and server"],
)
def test_what_is_asked_follows_from_the_configuration(tmp_path, overrides, is_asked, terms):
    cfg = tiny_config(tmp_path, *overrides)
    assert cfg.uses_reward_model is is_asked
    read_terms = [(term.setting, term.name, term.weight) for term in cfg.reward_terms]
    assert read_terms == terms


THREE = request_of([[0]] * 3)


class Known:
    """Returns the given rewards and logs each request."""

    def __init__(
        self, name: str, values: list[float], log: list[str], status: list[int] | None = None
    ):
        self.name = name
        self.log = log
        statuses = torch.tensor(status or [STATUS_OK] * len(values))
        self.rewards = Rewards(torch.tensor(values), statuses.int())

    def infer_rm(self, request: RewardRequest) -> Known:
        assert request is THREE
        self.log.append(f"ask {self.name}")
        return self

    def result(self) -> Rewards:
        self.log.append(f"wait {self.name}")
        return self.rewards

    def close(self) -> None:
        self.log.append(f"close {self.name}")


def combined(*sources: tuple[Known, float]) -> CombinedRewards:
    return CombinedRewards(
        [WeightedSource(source.name, source, weight) for source, weight in sources]
    )


def test_the_weighted_sum_with_every_part_kept():
    log: list[str] = []
    first = Known("one", [1.0, 2.0, 3.0], log)
    second = Known("two", [10.0, 20.0, -30.0], log)
    source = combined((first, 2.0), (second, -0.5))
    rewards = source.infer_rm(THREE).result()
    assert rewards.values.tolist() == [-3.0, -6.0, 21.0]
    assert rewards.values.dtype == torch.float32
    assert rewards.status.tolist() == [STATUS_OK] * 3
    assert rewards.status.dtype == torch.int32
    by_source = {name: values.tolist() for name, values in rewards.by_source.items()}
    assert by_source == {"one": [1.0, 2.0, 3.0], "two": [10.0, 20.0, -30.0]}


def test_all_are_asked_before_any_is_waited_for():
    log: list[str] = []
    first = Known("one", [1.0] * 3, log)
    second = Known("two", [1.0] * 3, log)
    rm = combined((first, 1.0), (second, 1.0))
    future = rm.infer_rm(THREE)
    assert log == ["ask one", "ask two"]
    future.result()
    rm.close()
    assert log[2:] == ["wait one", "wait two", "close one", "close two"]


@pytest.mark.parametrize("weight", [1.0, 0.0])
@pytest.mark.parametrize("made_up", [math.nan, 0.0, 5.0])
def test_a_sample_that_one_cannot_score_has_failed(weight, made_up):
    """A sum without that part is no reward, whatever the placeholder's value and the weight."""
    log: list[str] = []
    first = Known("one", [1.0, 2.0, made_up], log, [STATUS_OK, STATUS_OK, STATUS_EMPTY])
    second = Known(
        "two", [1.0, made_up, made_up], log, [STATUS_OK, STATUS_BAD_TEXT, STATUS_BAD_TEXT]
    )
    source = combined((first, 1.0), (second, weight))
    rewards = source.infer_rm(THREE).result()
    assert rewards.values[0] == 1.0 + weight
    assert rewards.values[1:].isnan().all()
    assert rewards.status.tolist() == [STATUS_OK, STATUS_BAD_TEXT, STATUS_EMPTY], (
        "the first that failed says why"
    )


def test_one_source_is_that_source():
    statuses = [STATUS_OK, STATUS_EMPTY, STATUS_OK]
    source = Known("one", [0.25, math.nan, -4.0], [], statuses)
    rewards = combined((source, 1.0)).infer_rm(THREE).result()
    torch.testing.assert_close(rewards.values, source.rewards.values, equal_nan=True)
    assert torch.equal(rewards.status, source.rewards.status)


def test_a_server_that_does_not_answer_is_not_left_out_of_the_sum():
    class Silent(Known):
        def result(self) -> Rewards:
            raise RewardServerError("no answer within 3 s")

    log: list[str] = []
    answering = Known("one", [1.0] * 3, log)
    silent = Silent("two", [], log)
    future = combined((answering, 1.0), (silent, 1.0)).infer_rm(THREE)
    with pytest.raises(RewardServerError, match="no answer"):
        future.result()


def test_all_are_closed_also_after_one_that_cannot_be():
    log: list[str] = []

    class Stuck(Known):
        def close(self) -> None:
            super().close()
            raise OSError("cannot be closed")

    first = Known("one", [], log)
    stuck = Stuck("two", [], log)
    third = Known("three", [], log)
    rm = combined((first, 1.0), (stuck, 1.0), (third, 1.0))
    with pytest.raises(OSError, match="cannot be closed"):
        rm.close()
    assert log == ["close one", "close two", "close three"]
