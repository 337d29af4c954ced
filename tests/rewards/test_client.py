"""The client against a real PyTriton server that is killed, and against one that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.errors import check_fault, raises_error
from helpers.fake_http import FakeHttpServer
from helpers.fake_reward_server import FakeRewardServer, answer, describe
from helpers.faulty_proxy import ALL, FaultyProxy
from helpers.rewards import request_of
from helpers.serve_toy_scorer import TOKEN_NAN, TOKEN_SLOW, VOCAB_SIZE, toy_scores
from helpers.tiny_tokenizer import write_tiny_tokenizer
from helpers.toy_server import ToyServer, free_port, wait_for

from reinforce_rl.data.tokenizer import TokenizerInfo, load_tokenizer
from reinforce_rl.errors import ConfigError
from reinforce_rl.rewards import transport
from reinforce_rl.rewards.base import (
    STATUS_BAD_TOKEN,
    STATUS_EMPTY,
    STATUS_NOT_FINITE,
    STATUS_OK,
    RewardRequest,
)
from reinforce_rl.rewards.client import RemoteGPTRMClient
from reinforce_rl.rewards.transport import Call

pytest.importorskip("tritonclient.http")

SLOW_SECONDS = 1.0


@pytest.fixture(scope="module")
def server_options():
    return ["--slow", str(SLOW_SECONDS)]


@pytest.fixture
def make_client():
    clients = []

    def make(port: int, **options) -> RemoteGPTRMClient:
        options = {
            "first_backoff_seconds": 0.02,
            "max_backoff_seconds": 0.3,
            "deadline_seconds": 30.0,
            **options,
        }
        clients.append(RemoteGPTRMClient(port=port, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


# With a real server.


@pytest.mark.parametrize(
    "options", [{}, {"pad_to_length": 24, "pad_id": 99}], ids=["plain", "padded"]
)
def test_large_batches_are_split_and_joined_in_order(server, make_client, options):
    rng = random.Random(1)
    # Three requests of at most 8.
    sequences = []
    for _ in range(19):
        length = rng.randrange(1, 12)
        sequences.append([rng.randrange(4, 100) for _ in range(length)])
    client = make_client(server.port, **options)
    rewards = client.infer_rm(request_of(sequences)).result()
    assert rewards.values.dtype == torch.float32
    assert rewards.status.dtype == torch.int32
    assert rewards.status.tolist() == [0] * 19
    assert rewards.values.tolist() == toy_scores(sequences)


def test_a_proxy_of_the_environment_is_not_asked(server, make_client, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        client = make_client(server.port, attempt_timeout_seconds=1.0)
        rewards = client.infer_rm(request_of([[5, 6]])).result()
    assert rewards.values.tolist() == toy_scores([[5, 6]])


@pytest.mark.parametrize("fault", ALL)
def test_a_fault_of_the_network_between_is_borne(server, make_client, fault):
    sequences = [[row + 4, 2 * row + 4] for row in range(19)]
    with FaultyProxy(server.port, [fault] * 2) as proxy:
        client = make_client(proxy.port, attempt_timeout_seconds=1.0)
        rewards = client.infer_rm(request_of(sequences)).result()
        assert proxy.happened == [fault] * 2
    assert rewards.status.tolist() == [0] * 19
    assert rewards.values.tolist() == toy_scores(sequences)


def test_failed_samples_are_nan_and_keep_their_status(server, make_client):
    sequences = [[1, 2], [], [TOKEN_NAN], [VOCAB_SIZE], [3]]
    request = request_of(sequences)
    rewards = make_client(server.port).infer_rm(request).result()
    assert rewards.status.tolist() == [
        STATUS_OK,
        STATUS_EMPTY,
        STATUS_NOT_FINITE,
        STATUS_BAD_TOKEN,
        STATUS_OK,
    ]
    is_missing = torch.isnan(rewards.values)
    assert is_missing.tolist() == [False, True, True, True, False]
    ends = [rewards.values[0].item(), rewards.values[4].item()]
    assert ends == toy_scores([[1, 2], [3]])


def test_requests_without_samples_or_tokens(server, make_client):
    client = make_client(server.port)
    rewards = client.infer_rm(request_of([])).result()
    assert rewards.values.shape == (0,)
    rewards = client.infer_rm(request_of([[], []])).result()
    assert rewards.status.tolist() == [STATUS_EMPTY] * 2


def test_infer_rm_returns_at_once_and_several_can_be_under_way(server, make_client):
    client = make_client(server.port)
    futures = [client.infer_rm(request_of([[TOKEN_SLOW, i]])) for i in range(2)]
    assert not futures[0].done()
    scores = [f.result().values.tolist() for f in futures]
    assert scores == [toy_scores([[TOKEN_SLOW, i]]) for i in range(2)]


def test_conversations_go_as_texts_and_plain_prompts_as_tokens(server, make_client, tmp_path):
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path, vocab_size=VOCAB_SIZE))
    messages = ({"role": "user", "content": "hi"},)
    tokens = request_of([[7, row] for row in range(6)])
    request = replace(
        tokens,
        prompts=("hi",) * 6,
        responses=tuple("abcdef"),
        messages=(messages, (), messages, (), (), messages),
        finished=(True, True, False, True, True, True),
    )
    rendered = {
        0: "U: hi<eos>A: a<eos>",
        2: "U: hi<eos>A: c",  # cut
        5: "U: hi<eos>A: f<eos>",
    }
    sequences = [[7, row] for row in range(6)]
    for row, text in rendered.items():
        sequences[row] = tokenizer(text, add_special_tokens=False)["input_ids"]
    client = make_client(server.port)
    info = TokenizerInfo.from_tokenizer(tokenizer)
    assert client.check_compatible(info, VOCAB_SIZE) == "tokens"
    rewards = client.infer_rm(request).result()
    assert rewards.values.tolist() == pytest.approx(toy_scores(sequences))
    assert client.check_compatible(info, VOCAB_SIZE, "tokens") == "tokens"
    as_tokens = client.infer_rm(request).result().values.tolist()
    assert as_tokens == toy_scores([[7, row] for row in range(6)]), (
        "the policy's own, where it is asked for"
    )


def test_the_handshake_accepts_the_same_tokenizer_and_names_every_difference(
    server, make_client, tmp_path
):
    same = TokenizerInfo.from_tokenizer(
        load_tokenizer(write_tiny_tokenizer(tmp_path / "same", vocab_size=VOCAB_SIZE))
    )
    other_tokenizer = load_tokenizer(
        write_tiny_tokenizer(tmp_path / "other", vocab_size=VOCAB_SIZE - 30)
    )
    other = TokenizerInfo.from_tokenizer(other_tokenizer)
    client = make_client(server.port)
    assert client.check_compatible(same, VOCAB_SIZE) == "tokens"
    assert client.check_compatible(other, VOCAB_SIZE + 1) == "text"  # by the server's own template
    with pytest.raises(ConfigError) as caught:
        client.check_compatible(other, VOCAB_SIZE + 1, "tokens")
    faults = caught.value.faults
    place = f"127.0.0.1:{server.port}"
    check_fault(faults, "reward_server.tokens.differ", place, "vocabulary size 98 here, 128 there")
    check_fault(faults, "reward_server.tokens.differ", place, "vocabulary hash")
    check_fault(faults, "reward_server.tokens.differ", place, "129 token ids", 128)


def test_a_wrong_model_name_is_answered_with_the_right_one(server, make_client):
    with raises_error("reward_server.model.other_name", "'reward_model'", "'other'"):
        make_client(server.port, name="other").wait_until_ready()


@pytest.mark.more
def test_a_kill_during_a_call_and_a_restart_give_the_right_scores(server, make_client):
    said = []
    client = make_client(
        server.port, deadline_seconds=400.0, on_wait=said.append, wait_report_seconds=0.5
    )
    client.wait_until_ready()
    sequences = [[TOKEN_SLOW, 5], [7, 8, 9]]
    future = client.infer_rm(request_of(sequences))
    time.sleep(SLOW_SECONDS / 4)
    assert not future.done()
    server.kill_group()
    assert wait_for(lambda: not server.left_behind()), server.left_behind()
    assert wait_for(lambda: any("connection refused" in text for text in said)), said
    server.start()
    assert future.result().values.tolist() == toy_scores(sequences)
    assert any(f"127.0.0.1:{server.port}" in text and "s of 400 s" in text for text in said)


@pytest.mark.more
def test_a_dead_tritonserver_ends_the_server_with_an_error_and_leaves_nothing(server, make_client):
    client = make_client(server.port, deadline_seconds=3.0)
    client.wait_until_ready()
    future = client.infer_rm(request_of([[TOKEN_SLOW, 1]]))
    time.sleep(SLOW_SECONDS / 4)
    server.tritonserver.kill()
    place = f"127.0.0.1:{server.port}"
    with raises_error("reward_server.server.no_answer", place, "3 s") as caught:
        future.result()
    assert re.search("refused|HTTP 502", str(caught.value))
    assert server.process.wait(30) == 1
    # not the last line: the interpreter may print a warning as it exits
    assert "died" in server.log.read_text()
    assert wait_for(lambda: not server.left_behind()), server.left_behind()


@pytest.mark.slow
def test_five_thousand_requests_leave_nothing_behind(tmp_path):
    """Memory, threads, tasks and open files of a process that sends many requests."""
    pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")
    script = """
import asyncio, sys, threading
import psutil
from helpers.rewards import request_of
from helpers.serve_toy_scorer import toy_scores
from reinforce_rl.rewards import transport
from reinforce_rl.rewards.client import RemoteGPTRMClient
from reinforce_rl.rewards.transport import Call

async def tasks():
    return len(asyncio.all_tasks())

sequences = [[row + 4, 2 * row + 4] for row in range(8)]
process = psutil.Process()
usage = []
client = RemoteGPTRMClient(port=int(sys.argv[1]))
for number in range(1, 5001):
    assert client.infer_rm(request_of(sequences)).result().values.tolist() == toy_scores(sequences)
    if number % 1000 == 0:
        num_tasks = transport.wait_for(tasks())
        memory = process.memory_info().rss
        usage.append((memory, threading.active_count(), num_tasks, process.num_fds()))
client.close()
for row in usage:
    print(*row)
"""
    with ToyServer(tmp_path) as server:
        command = [sys.executable, "-c", script, str(server.port)]
        tests = Path(__file__).parents[1]
        folders = [str(tests), str(tests.parent)]
        paths = os.pathsep.join(folders)
        output = subprocess.check_output(
            command, env={**os.environ, "PYTHONPATH": paths}, timeout=900, text=True
        )
    memory, threads, tasks, files = zip(
        *([int(n) for n in line.split()] for line in output.splitlines()), strict=True
    )
    assert memory[-1] - memory[0] < 4e6, memory
    assert max(threads) - threads[0] <= 0, threads
    assert max(tasks) == 1, tasks
    assert max(files) - files[0] <= 1, files


# Without a real server.


def test_past_the_deadline_is_an_error_that_says_what_to_check(make_client):
    said = []
    port = free_port()
    client = make_client(port, deadline_seconds=1.0, on_wait=said.append, wait_report_seconds=0.3)
    start = time.monotonic()
    place = f"127.0.0.1:{port}"
    what_to_check = f"curl http://{place}/v2/health/ready"
    with raises_error("reward_server.server.no_answer", place, "connection refused", what_to_check):
        client.infer_rm(request_of([[1]])).result()
    assert time.monotonic() - start > 0.9
    assert said[0] == (
        f"reward server 127.0.0.1:{port} does not answer (connection refused); retrying, 0 s of 1 s"
    )
    assert 2 <= len(said) <= 5  # at most every 0.3 s


def test_a_server_that_takes_its_time_is_said_to_be_scoring(make_client):
    said = []
    with FakeRewardServer(score=sum) as server:
        client = make_client(
            server.port, deadline_seconds=60.0, on_wait=said.append, wait_report_seconds=0.1
        )
        client.wait_until_ready()
        server.gate.clear()
        future = client.infer_rm(request_of([[1], [2]]))
        threading.Timer(1.5, server.gate.set).start()
        assert future.result().values.tolist() == [1.0, 2.0]
    assert 1 <= len(said) <= 10, "none for the first intervals"
    for text in said:
        assert f"127.0.0.1:{server.port} is scoring 2 samples, " in text, said


def test_a_silent_server_is_given_up_at_the_deadline(make_client):
    """The server accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        client = make_client(port, deadline_seconds=1.0)
        with raises_error("reward_server.server.no_answer", f"127.0.0.1:{port}", "1 s") as caught:
            client.infer_rm(request_of([[1]])).result()
        assert re.search(r"timed out|not answered", str(caught.value)), caught.value


def test_an_answer_that_takes_longer_than_one_attempt_may_comes_in_the_end(make_client):
    """The server starts again at each attempt and takes 0.5 s: attempts of 0.15 and 0.3 s fail."""
    with FakeRewardServer(score=lambda _: (time.sleep(0.5), 1.5)[1]) as fake:
        client = make_client(fake.port, attempt_timeout_seconds=0.15, deadline_seconds=12.0)
        for number in (1, 2):
            before = len(fake.requests)
            rewards = client.infer_rm(request_of([[number]])).result()
            assert rewards.values.tolist() == [1.5]
            attempts = fake.requests[before:]
            assert attempts == [[[number]]] * len(attempts), "each asks for the same"
            assert len(attempts) >= 3, "the next request begins with a short attempt again"


def test_a_foreign_program_on_the_port_is_named(make_client):
    with (
        FakeHttpServer(lambda *_: (200, b"hello")) as foreign,
        raises_error("reward_server.port.other_program", f"127.0.0.1:{foreign.port}"),
    ):
        make_client(foreign.port).wait_until_ready()


def test_server_errors_are_retried_and_refusals_are_not(make_client):
    scored = answer([1.5], [0])
    answers = [(500, {"error": "ouch"}), (503, {}), scored]
    with FakeRewardServer(answers) as fake:
        client = make_client(fake.port)
        rewards = client.infer_rm(request_of([[1]])).result()
        assert rewards.values.tolist() == [1.5]
        assert fake.calls == 3
    with FakeRewardServer([(400, {"error": "such requests are refused"})]) as fake:
        with raises_error("reward_server.request.refused", "HTTP 400: such requests are refused"):
            make_client(fake.port).infer_rm(request_of([[1]])).result()
        assert fake.calls == 1


def test_a_busy_server_says_when_to_come_back(make_client):
    """The client waits for Retry-After, which exceeds its own pause, and keeps the request's id."""
    busy = (503, {"error": "busy"}, {"Retry-After": "1"})
    with FakeRewardServer([busy, answer([1.5], [0])]) as fake:
        client = make_client(
            fake.port, token="t" * 20, caller="run-rank1", max_backoff_seconds=0.05
        )
        start = time.monotonic()
        rewards = client.infer_rm(request_of([[1]])).result()
        assert rewards.values.tolist() == [1.5]
        assert time.monotonic() - start >= 1.0
        first, second = fake.headers
    assert first["X-Request-ID"] == second["X-Request-ID"]
    assert first["X-Request-ID"].startswith("run-rank1-call0-")
    assert first["Authorization"] == f"Bearer {'t' * 20}"


def test_a_refused_token_is_not_tried_again(make_client):
    with FakeRewardServer([(401, {"error": "no"})]) as fake:
        with raises_error("reward_server.token.not_sent", "REINFORCE_REWARD_TOKEN"):
            make_client(fake.port).infer_rm(request_of([[1]])).result()
        assert fake.calls == 1


def test_a_redirect_takes_the_token_nowhere(make_client):
    with FakeRewardServer([answer([1.0], [0])]) as other:
        there = f"http://127.0.0.1:{other.port}/v2/models/reward_model/infer"
        with FakeRewardServer([(307, {}, {"Location": there})]) as fake:
            client = make_client(fake.port, token="t" * 20)
            with raises_error("reward_server.request.refused", "HTTP 307"):
                client.infer_rm(request_of([[1]])).result()
            assert fake.headers[0]["Authorization"] == f"Bearer {'t' * 20}"
        assert other.calls == 0


def test_wrong_answers_are_an_error_and_never_a_reward(make_client):
    with FakeRewardServer([answer([1.0, 2.0], [0, 0])]) as fake:
        shapes = ["float32 [2, 1]", "float32 [1, 1]"]
        with raises_error("reward_server.answer.wrong", "'rewards'", *shapes):
            make_client(fake.port).infer_rm(request_of([[1]])).result()
        assert fake.calls == 3


@pytest.mark.parametrize("value", ["1", True, None], ids=str)
def test_what_is_no_number_is_no_reward(make_client, value):
    """numpy would convert these values to 1.0 or NaN."""
    with FakeRewardServer([answer([value], [0])]) as fake:
        with raises_error("reward_server.answer.wrong", "'rewards'", "JSON"):
            make_client(fake.port).infer_rm(request_of([[1]])).result()
        assert fake.calls == 3


def test_what_a_server_says_is_reported_briefly(make_client):
    """The long text with control characters is an id, an error or the name of a model."""
    said = "a\x1b[2J\ud800" * 20_000
    body = answer([1.0], [0])[1]
    wrong_id = (200, {**body, "id": said})
    answers = {
        "reward_server.answer.wrong": wrong_id,
        "reward_server.request.refused": (400, {"error": said}),
    }
    for key, served in answers.items():
        with FakeRewardServer([served]) as fake, raises_error(key) as error:
            make_client(fake.port).infer_rm(request_of([[1]])).result()
        assert len(str(error.value)) < 2500
        assert "\x1b" not in str(error.value)
        assert "\ud800" not in str(error.value)
    with FakeRewardServer([answer([1.0], [0])]) as fake:
        fake.info = describe(name="other\n\x1b" * 50_000)
        with raises_error("reward_server.model.other_name", "'other") as error:
            make_client(fake.port).wait_until_ready()
        assert len(str(error.value)) < 700
        assert "\x1b" not in str(error.value)


def test_an_answer_may_be_as_long_as_its_scores_need(make_client, monkeypatch):
    body = answer([1.0], [0])[1]
    with FakeRewardServer([(200, {**body, "more": "a" * 3000})]) as fake:
        client = make_client(fake.port, deadline_seconds=5.0)
        rewards = client.infer_rm(request_of([[1]])).result()
        assert rewards.values.tolist() == [1.0]
        client = make_client(fake.port, deadline_seconds=0.5)
        client.wait_until_ready()
        monkeypatch.setattr("reinforce_rl.rewards.transport.MAX_ANSWER_BYTES", 2000)
        with raises_error("reward_server.server.no_answer", "2064 bytes"):
            client.infer_rm(request_of([[1]])).result()


def test_another_model_behind_the_same_address_is_noticed_after_an_outage(make_client):
    again = answer([2.0], [0])
    answers = [answer([1.0], [0]), (503, {}), again]
    with FakeRewardServer(answers) as fake:
        client = make_client(fake.port)
        rewards = client.infer_rm(request_of([[1]])).result()
        assert rewards.values.tolist() == [1.0]
        fake.info = describe(details={"head_path": "another"})
        with raises_error("reward_server.server.replaced", f"127.0.0.1:{fake.port}", "head_path"):
            client.infer_rm(request_of([[1]])).result()


def test_jitter_leaves_the_random_state_of_the_trainer_alone(make_client):
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    state = random.getstate()
    numpy_state = np.random.get_state()[1].tolist()
    torch_state = torch.get_rng_state()
    with raises_error("reward_server.server.no_answer"):
        client = make_client(free_port(), deadline_seconds=0.3)
        client.infer_rm(request_of([[1]])).result()
    assert random.getstate() == state
    assert np.random.get_state()[1].tolist() == numpy_state
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_a_request_whose_shapes_do_not_fit_is_refused(make_client):
    tokens = torch.zeros(2, 3, dtype=torch.long)
    request = RewardRequest(tokens, torch.zeros(3), ("",), ("",))
    with pytest.raises(ValueError, match=r"expected \[N, S\] and \[N\]"):
        make_client(1).infer_rm(request)


class TestDeadlines:
    """A call ends at its deadline, whatever an attempt may take."""

    def call(self, seconds: float, elapsed: float) -> Call:
        return Call("test", seconds, time.monotonic() - elapsed)

    def attempts(
        self, make_client, monkeypatch, call: Call, outcomes: Sequence[object], **options: float
    ) -> list[float]:
        """Return the seconds that each attempt of a call may take.

        `outcomes` are raised or returned in turn.
        """
        client = make_client(1, **options)
        given: list[float] = []
        left = list(outcomes)

        async def infer(
            model: object, arrays: object, attributes: int, seconds: float, request_id: str
        ) -> object:
            given.append(seconds)
            outcome = left.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        @contextlib.asynccontextmanager
        async def lease(samples: int, call: Call) -> AsyncIterator[object]:
            yield SimpleNamespace(place="here")

        monkeypatch.setattr(transport, "infer", infer)
        monkeypatch.setattr(client._replicas, "lease", lease)
        monkeypatch.setattr(client._replicas, "report", lambda call: None)
        asyncio.run(client._attempts({"tokens": np.zeros((2, 3))}, 0, call))
        return given

    def test_an_attempt_takes_no_longer_than_its_call_has_left(self, make_client, monkeypatch):
        call = self.call(seconds=100.0, elapsed=97.0)
        (seconds,) = self.attempts(
            make_client, monkeypatch, call, ["scores"], attempt_timeout_seconds=60.0
        )
        assert 2.0 < seconds <= 3.0

    def test_nor_than_an_attempt_may_take(self, make_client, monkeypatch):
        call = self.call(seconds=100.0, elapsed=0.0)
        (seconds,) = self.attempts(
            make_client, monkeypatch, call, ["scores"], attempt_timeout_seconds=60.0
        )
        assert seconds == 60.0

    def test_attempts_that_time_out_get_longer_and_others_do_not(self, make_client, monkeypatch):
        late = transport.FailedAttempt("timed out", timed_out=True)
        refused = transport.FailedAttempt("connection refused")
        outcomes = [late, refused, late, "scores"]
        call = self.call(seconds=100.0, elapsed=0.0)
        given = self.attempts(make_client, monkeypatch, call, outcomes, attempt_timeout_seconds=5.0)
        assert given == [5.0, 10.0, 10.0, 20.0]

    def test_a_call_whose_time_is_up_asks_for_next_to_nothing(self, make_client, monkeypatch):
        """The timeout is small and positive: a negative one would mean no timeout."""
        call = self.call(seconds=10.0, elapsed=11.0)
        (seconds,) = self.attempts(make_client, monkeypatch, call, ["scores"])
        assert 0.0 < seconds <= 0.01

    def test_wrong_answers_have_an_end(self, make_client, monkeypatch):
        wrong = [transport.FailedAttempt("gave a wrong answer", bad_answer=True)] * 50
        with raises_error("reward_server.answer.wrong", "here"):
            self.attempts(make_client, monkeypatch, self.call(seconds=1000.0, elapsed=0.0), wrong)

    def test_a_server_that_does_not_answer_is_given_up_in_time(self, make_client):
        """The server describes itself; a call waits for it for a minute."""
        with FakeRewardServer(score=sum) as fake:
            client = make_client(fake.port, deadline_seconds=1.0, attempt_timeout_seconds=60.0)
            client.wait_until_ready()
            fake.gate.clear()
            began = time.monotonic()
            with raises_error("reward_server.server.no_answer", "1 s"):
                client.infer_rm(request_of([[1]])).result()
            assert time.monotonic() - began < 10.0
            fake.gate.set()

    def test_conversations_and_plain_prompts_keep_their_rows(self, make_client, monkeypatch):
        """The two kinds are sent as separate requests.

        The scores come back in the order of the rows.
        """
        client = make_client(1)
        info = describe(input_forms=("tokens", "text"))
        client._sends_chats_as_texts = True
        client._form = "tokens"

        async def described(call: Call) -> tuple[object, None]:
            return info, None

        async def scored(
            arrays: dict[str, np.ndarray], attributes: int, call: Call
        ) -> tuple[np.ndarray, ...]:
            count = len(next(iter(arrays.values())))
            is_text = "tokens" not in "".join(arrays)
            values = np.arange(count, dtype=np.float32)
            if is_text:
                values += 100.0
            status = np.zeros(count, np.int32)
            return values, status, np.zeros((count, 0), np.float32)

        monkeypatch.setattr(client._replicas, "describe", described)
        monkeypatch.setattr(client, "_attempts", scored)
        chat = ({"role": "user", "content": "hi"},)
        tokens = request_of([[1], [2], [3], [4]])
        request = replace(tokens, messages=(chat, (), chat, ()))
        rewards = asyncio.run(client._score(request, self.call(seconds=10.0, elapsed=0.0)))
        assert rewards.values.tolist() == [100.0, 0.0, 101.0, 1.0]
