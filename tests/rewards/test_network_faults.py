"""Faults of the network between client and reward server: single requests, and a whole run."""

from __future__ import annotations

import itertools
import math
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import raises_error
from helpers.fake_reward_server import FakeRewardServer, describe
from helpers.faulty_proxy import ALL, HARMLESS, REPLAY, FaultyProxy
from helpers.rewards import request_of
from helpers.tiny_run import (
    PROMPT_TOKENS,
    metrics_of,
    odd_share,
    rollouts_of,
    run,
    tiny_overrides,
    without_times,
)
from helpers.toy_server import wait_for

from reinforce_rl.errors import RewardServerError
from reinforce_rl.megatron.checkpointer import latest_checkpoint
from reinforce_rl.rewards.base import RewardRequest
from reinforce_rl.rewards.client import RemoteGPTRMClient, RemoteRewardFuture
from reinforce_rl.utils.net import Address

pytest.importorskip("tritonclient.http")

QUICK: Any = {
    "first_backoff_seconds": 0.02,
    "max_backoff_seconds": 0.2,
    "attempt_timeout_seconds": 0.5,
}
INFO = b"/models/reward_server_info"
REQUEST = request_of([[5, 6, 7], [8, 9]])
SCORES = [18.0, 17.0]
LASTING = {
    "drop": "does not answer",
    "silence": "timed out",
    "trickle": "timed out",
    "truncate_request": "does not answer",
    "truncate": "does not answer",
    "duplicate_bytes": "does not answer|wrong answer",
    "garbage": "does not answer",
    "cut_body": "does not answer",
    "undelimited": "does not answer",
    "change_request": "3 wrong answers.*digest",
    "wrong_id": "3 wrong answers.*id",
    "wrong_digest": "3 wrong answers.*digest",
    "no_digest": "3 wrong answers.*digest",
    "long_header": "does not answer",
    "negative_length": "does not answer",
    "huge_length": "does not answer",
    "no_json_length": "3 wrong answers",
    "negative_json": "3 wrong answers",
    "gzip_bomb": "does not answer",
    "continues": "timed out",
    "redirect": "3 wrong answers.*HTTP 307",
    "others_refusal": "3 wrong answers.*HTTP 400",
    "deep_error": "HTTP 500",
    "far_away": "HTTP 503",
}


@contextmanager
def connected(port: int, deadline_seconds: float = 30.0, **options) -> Iterator[RemoteGPTRMClient]:
    client = RemoteGPTRMClient(port=port, deadline_seconds=deadline_seconds, **QUICK, **options)
    try:
        yield client
    finally:
        client.close()


def share_of_response(row: list[int]) -> float:
    return odd_share(row[PROMPT_TOKENS:])


def outcome(fault: str) -> tuple[int, list[str], list[str], str]:
    """Return the proxy's port, the faults that occurred, the reports and the error of a request."""
    said: list[str] = []
    seconds = 60.0 if LASTING[fault].startswith("3 wrong answers") else 4.0
    with (
        FakeRewardServer(score=sum) as server,
        FaultyProxy(server.port, itertools.repeat(fault), late_seconds=60.0) as proxy,
        connected(
            proxy.port, deadline_seconds=seconds, on_wait=said.append, wait_report_seconds=0.01
        ) as client,
    ):
        try:
            text = f"scores {client.infer_rm(REQUEST).result().values.tolist()}"
        except RewardServerError as error:
            text = str(error)
        return proxy.port, proxy.happened, said, text


@pytest.fixture(scope="module")
def outcomes():
    """Outcomes of all faults that last; they run in parallel, since they mostly wait."""
    with ThreadPoolExecutor(len(LASTING)) as pool:
        return {fault: pool.submit(outcome, fault) for fault in LASTING}


@pytest.mark.more
@pytest.mark.parametrize("fault", LASTING)
def test_a_fault_that_lasts_is_a_named_error_within_the_deadline(outcomes, fault):
    port, happened, said, text = outcomes[fault].result(timeout=60)
    assert f"127.0.0.1:{port}" in text
    messages = "\n".join([*said, text])
    assert re.search(LASTING[fault], messages), (said, text)
    assert fault in happened


def test_every_fault_has_its_test():
    assert {*LASTING, *HARMLESS} == set(ALL)


def test_late_doubled_and_compressed_answers_are_answers():
    with FakeRewardServer(score=sum) as server:
        for fault in HARMLESS:
            faults = itertools.repeat(fault)
            with (
                FaultyProxy(server.port, faults, late_seconds=0.2) as proxy,
                connected(proxy.port) as client,
            ):
                for _ in range(2):
                    assert client.infer_rm(REQUEST).result().values.tolist() == SCORES
                assert proxy.happened == [fault] * 2
        assert server.calls == 2 + 4 + 2 + 2


@pytest.mark.parametrize("replays", [2, 9])
def test_the_answer_to_another_request_is_never_a_reward(replays):
    """Of two requests of equal size the second gets the first one's answer, once or each time."""
    faults = [None, *[REPLAY] * replays]
    with (
        FakeRewardServer(score=sum) as server,
        FaultyProxy(server.port, faults) as proxy,
        connected(proxy.port) as client,
    ):
        request = request_of([[50, 60], [70, 80]])
        rewards = client.infer_rm(request).result()
        assert rewards.values.tolist() == [
            110.0,
            150.0,
        ]
        if replays == 2:
            assert client.infer_rm(REQUEST).result().values.tolist() == SCORES
        else:
            with raises_error("reward_server.answer.wrong", "3 wrong answers", "digest"):
                client.infer_rm(REQUEST).result()


@pytest.mark.parametrize(
    "faults",
    [
        ["cut_body"] * 5,  # a lost connection, at each attempt
        ["undelimited"] * 5,
        # each byte comes in time, but not the whole answer
        ["trickle", "continues"],
        ["far_away"] * 2,  # an absurd Retry-After
    ],
    ids=lambda faults: faults[0],
)
def test_a_fault_that_passes_costs_attempts_and_no_more(faults):
    with (
        FakeRewardServer(score=sum) as server,
        FaultyProxy(server.port, faults, late_seconds=60.0) as proxy,
        connected(proxy.port) as client,
    ):
        assert client.infer_rm(REQUEST).result().values.tolist() == SCORES
        assert proxy.happened == faults


@pytest.mark.parametrize(
    "fault",
    [
        "drop",
        "silence",
        "trickle",
        "truncate_request",
        "cut_body",
        "huge_length",
        "far_away",
        "change_request",
        "wrong_digest",
        "no_digest",
        *HARMLESS,
    ],
)
def test_the_request_for_the_description_bears_the_same(fault, monkeypatch):
    monkeypatch.setattr("reinforce_rl.rewards.transport.PROBE_SECONDS", 0.5)
    late = 60.0 if fault == "trickle" else 0.2
    with (
        FakeRewardServer(score=sum) as server,
        FaultyProxy(server.port, [fault] * 2, late, INFO) as proxy,
        connected(proxy.port) as client,
    ):
        assert client.infer_rm(REQUEST).result().values.tolist() == SCORES
        assert proxy.happened[0] == fault


def test_another_servers_description_is_not_believed():
    """A proxy returns the description of a server that ran there before."""
    with FakeRewardServer(score=sum) as server, FaultyProxy(server.port, path=INFO) as proxy:
        with connected(proxy.port) as client:
            client.wait_until_ready()
        server.info = describe(name="the_new_one")
        proxy.faults = itertools.repeat(REPLAY)
        no_answer = raises_error("reward_server.server.no_answer", "1 s", "another request")
        with connected(proxy.port, deadline_seconds=1.0) as client, no_answer:
            client.wait_until_ready()


def test_a_server_of_the_protocol_before_digests_is_refused_by_name():
    with FakeRewardServer(score=sum) as server, connected(server.port) as client:
        server.info = describe(protocol=1)
        with raises_error("reward_server.protocol.other_version", "version 1", "version 2"):
            client.wait_until_ready()
        assert server.calls == 0


def test_the_network_is_cut_during_a_call_and_restored():
    said: list[str] = []
    with (
        FakeRewardServer(score=sum) as server,
        FaultyProxy(server.port) as proxy,
        connected(proxy.port, on_wait=said.append, wait_report_seconds=0.05) as client,
    ):
        client.wait_until_ready()
        server.gate.clear()
        future = client.infer_rm(REQUEST)
        assert wait_for(lambda: server.calls > 0, 20)
        proxy.cut()
        server.gate.set()
        assert wait_for(lambda: any("connection refused" in text for text in said), 20), said
        assert not future.done()
        proxy.restore()
        assert future.result().values.tolist() == SCORES


class Disturbed:
    """A reward source that cuts networks at certain requests and restores them a little later."""

    def __init__(self, client: RemoteGPTRMClient, cuts: dict[int, list[FaultyProxy]]):
        self._client = client
        self._cuts = cuts
        self._calls = 0

    def infer_rm(self, request: RewardRequest) -> RemoteRewardFuture:
        for proxy in self._cuts.get(self._calls, []):
            proxy.cut()
            threading.Timer(0.5, proxy.restore).start()
        self._calls += 1
        return self._client.infer_rm(request)

    def close(self) -> None:
        self._client.close()


def rows_of(folder: Path, steps: int) -> list[list[dict]]:
    return [rollouts_of(folder, step) for step in range(1, steps + 1)]


@pytest.mark.more
def test_a_run_through_bad_networks_and_two_servers_equals_the_one_through_a_good_one(
    tmp_path, mesh
):
    """Each step sends two requests, the first in two parts.

    Both networks have each kind of fault, and are cut.
    """
    steps = 6
    options = ["trainer.reinforce.max_epochs=3"]
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    with (
        FakeRewardServer(score=share_of_response) as first,
        FakeRewardServer(score=share_of_response) as second,
    ):
        client = RemoteGPTRMClient(port=first.port, deadline_seconds=60.0)
        try:
            run(tmp_path / "good", mesh, *options, rm=client)
        finally:
            client.close()
        asked = first.requests
        first.requests = []
        # At most two wrong answers a request: three would fail it.
        lost = [fault for fault in ALL if "wrong answer" not in LASTING.get(fault, "")]
        faults = {
            first: ["change_request", *lost],
            second: [*reversed(lost), "wrong_digest"],
        }
        with (
            FaultyProxy(first.port, faults[first], late_seconds=0.1) as left,
            FaultyProxy(second.port, faults[second], late_seconds=0.1) as right,
        ):
            client = RemoteGPTRMClient(
                port=left.port,
                replicas=[Address("127.0.0.1", right.port)],
                deadline_seconds=60.0,
                **QUICK,
            )
            cuts = {3: [left], 5: [right], 8: [left, right]}
            rm = Disturbed(client, cuts)
            try:
                run(tmp_path / "bad", mesh, *options, rm=rm)
            finally:
                client.close()
            happened = {*left.happened, *right.happened}
            assert len(happened) >= 5, (left.happened, right.happened)
    good = [without_times(line) for line in metrics_of(tmp_path / "good")]
    bad = [without_times(line) for line in metrics_of(tmp_path / "bad")]
    assert len(good) == steps
    assert good == bad
    assert rows_of(tmp_path / "good", steps) == rows_of(tmp_path / "bad", steps)
    # The parts are the same, whichever server got them and however often.
    assert first.requests
    assert second.requests
    received = {str(part) for part in first.requests + second.requests}
    assert {str(part) for part in asked} == received


def test_a_sample_that_the_server_could_not_score_leaves_its_group(tmp_path, mesh):
    """From HTTP to advantages: the baseline of its neighbours is the mean of two, not of three."""

    def score(row: list[int]) -> float:
        scored.append(row)
        if len(scored) == 7:
            return math.nan
        return float(sum(row) % 11)

    scored: list[list[int]] = []
    with FakeRewardServer(score=score) as server:
        client = RemoteGPTRMClient(port=server.port, max_in_flight=1)
        try:
            options = [
                "trainer.reinforce.max_steps=1",
                "trainer.reinforce.initial_policy_kl_penalty=0",
            ]
            run(tmp_path, mesh, *options, rm=client)
        finally:
            client.close()
    rows = rollouts_of(tmp_path, 1)
    unscored = [i for i, row in enumerate(rows) if row["reward"] is None]
    assert unscored == [6]
    assert rows[6]["valid"] is False
    assert rows[6]["advantage"] == 0.0
    for start in range(0, 16, 4):
        group = [row for row in rows[start : start + 4] if row["valid"]]
        assert len(group) == (3 if start == 4 else 4)
        for row in group:
            others = [other["reward"] for other in group if other is not row]
            mean = sum(others) / len(others)
            assert row["baseline"] == pytest.approx(mean)
            advantage = row["reward"] - row["baseline"]
            assert row["advantage"] == pytest.approx(advantage, abs=1e-6)


def test_too_many_such_samples_save_and_end_the_run(tmp_path, mesh):
    tiny_overrides(tmp_path)
    calls = itertools.count()
    with FakeRewardServer(score=lambda row: 1.0 if next(calls) < 16 else math.nan) as server:
        client = RemoteGPTRMClient(port=server.port)
        try:
            with raises_error("rewards.samples.too_many_failed", "100.0%", "step 2"):
                run(tmp_path, mesh, rm=client)
        finally:
            client.close()
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.trainer_state["step"] == 1
