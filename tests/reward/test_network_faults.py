"""What bad networks do to requests for rewards, one by one, and to a whole run, which must not notice."""

from __future__ import annotations

import itertools
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import faulty_proxy
from helpers.fake_reward_server import FakeRewardServer
from helpers.faulty_proxy import FaultyProxy
from helpers.tiny_run import PROMPT_TOKENS, metrics_of, odd_share, rollouts_of, run, tiny_overrides, without_times

from reinforce_rl.errors import RewardServerError, TooManyFailedRewardsError
from reinforce_rl.megatron.checkpoint import latest_checkpoint
from reinforce_rl.reward.addresses import Address
from reinforce_rl.reward.base import RewardRequest
from reinforce_rl.reward.client import RemoteGPTRMClient, RemoteRewardFuture

pytest.importorskip("tritonclient.http")

QUICK: Any = {"first_backoff_seconds": 0.02, "max_backoff_seconds": 0.2, "attempt_timeout_seconds": 0.5}
REQUEST = RewardRequest(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([3, 2]), ("", ""), ("", ""))
LASTING = {
    faulty_proxy.DROP: "does not answer",
    faulty_proxy.SILENCE: "timed out",
    faulty_proxy.TRICKLE: "not answered",
    faulty_proxy.TRUNCATE_REQUEST: "does not answer",
    faulty_proxy.TRUNCATE: "cut short|does not answer|wrong answer",
    faulty_proxy.DUPLICATE_BYTES: "3 wrong answers",
    faulty_proxy.GARBAGE: "does not answer",
}


def share_of_response(row: list[int]) -> float:
    return odd_share(row[PROMPT_TOKENS:])


@pytest.mark.parametrize("fault", LASTING)
def test_a_fault_that_lasts_is_a_named_error_within_the_deadline(fault):
    start = time.monotonic()
    with (
        FakeRewardServer(score=sum) as server,
        FaultyProxy(server.port, itertools.repeat(fault), late_seconds=60.0) as proxy,
    ):
        client = RemoteGPTRMClient(port=proxy.port, deadline_seconds=1.0, **QUICK)
        with pytest.raises(RewardServerError, match=LASTING[fault]) as caught:
            client.infer_rm(REQUEST).result()
        assert f"127.0.0.1:{proxy.port}" in str(caught.value)
        client.close()
        assert fault in proxy.happened
    assert time.monotonic() - start < 20


def test_every_fault_has_its_test():
    assert {*LASTING, faulty_proxy.DELAY, faulty_proxy.DUPLICATE} == set(faulty_proxy.ALL)


def test_late_and_doubled_answers_are_answers():
    with FakeRewardServer(score=sum) as server:
        for fault in (faulty_proxy.DELAY, faulty_proxy.DUPLICATE):
            with FaultyProxy(server.port, itertools.repeat(fault), late_seconds=0.2) as proxy:
                client = RemoteGPTRMClient(port=proxy.port, deadline_seconds=30.0, **QUICK)
                assert client.infer_rm(REQUEST).result().values.tolist() == [18.0, 17.0]
                assert client.infer_rm(REQUEST).result().values.tolist() == [18.0, 17.0]
                client.close()
                assert proxy.happened == [fault] * 2
        assert server.calls == 2 + 4


def test_the_network_is_cut_during_a_call_and_restored():
    said: list[str] = []
    with FakeRewardServer(score=sum) as server, FaultyProxy(server.port) as proxy:
        client = RemoteGPTRMClient(
            port=proxy.port, deadline_seconds=30.0, on_wait=said.append, wait_report_seconds=0.05, **QUICK
        )
        client.wait_until_ready()
        server.gate.clear()
        future = client.infer_rm(REQUEST)
        while server.calls == 0:
            time.sleep(0.01)
        proxy.cut()
        server.gate.set()
        while not any("connection refused" in text for text in said):
            time.sleep(0.01)
        assert not future.done()
        proxy.restore()
        assert future.result().values.tolist() == [18.0, 17.0]
        client.close()


class Disturbed:
    """A reward source that cuts networks with certain requests, and restores them a little later."""

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


def test_a_run_through_bad_networks_and_two_servers_equals_the_one_through_a_good_one(tmp_path, mesh):
    """Each step makes two requests, the first of two parts. Both networks fail in each way, and are cut."""
    steps, options = 6, ["trainer.reinforce.max_epochs=3"]
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    with FakeRewardServer(score=share_of_response) as first, FakeRewardServer(score=share_of_response) as second:
        client = RemoteGPTRMClient(port=first.port, deadline_seconds=60.0)
        try:
            run(tmp_path / "good", mesh, *options, rm=client)
        finally:
            client.close()
        asked = first.requests
        first.requests = []
        # Of wrong answers one request may have two, so that no chance gives it three.
        faults = {
            first: [fault for fault in faulty_proxy.ALL if fault != faulty_proxy.DUPLICATE_BYTES],
            second: [fault for fault in reversed(faulty_proxy.ALL) if fault != faulty_proxy.TRUNCATE],
        }
        with (
            FaultyProxy(first.port, faults[first], late_seconds=0.1) as left,
            FaultyProxy(second.port, faults[second], late_seconds=0.1) as right,
        ):
            client = RemoteGPTRMClient(
                port=left.port, replicas=[Address("127.0.0.1", right.port)], deadline_seconds=60.0, **QUICK
            )
            rm = Disturbed(client, {3: [left], 5: [right], 8: [left, right]})
            try:
                run(tmp_path / "bad", mesh, *options, rm=rm)
            finally:
                client.close()
            assert len({*left.happened, *right.happened}) >= 5, (left.happened, right.happened)
    found = [list(map(without_times, metrics_of(tmp_path / name))) for name in ("good", "bad")]
    assert len(found[0]) == steps
    assert found[0] == found[1]
    assert rows_of(tmp_path / "good", steps) == rows_of(tmp_path / "bad", steps)
    # Whoever was asked, and however often, it was for the same parts.
    assert first.requests and second.requests
    assert {str(part) for part in asked} == {str(part) for part in first.requests + second.requests}


def test_a_sample_that_the_server_could_not_score_leaves_its_group(tmp_path, mesh):
    """From HTTP to advantages: the baseline of its three neighbours is the mean of two, not of three."""

    def score(row: list[int]) -> float:
        scored.append(row)
        return math.nan if len(scored) == 7 else float(sum(row) % 11)

    scored: list[list[int]] = []
    with FakeRewardServer(score=score) as server:
        client = RemoteGPTRMClient(port=server.port, max_in_flight=1)
        try:
            options = ["trainer.reinforce.max_steps=1", "trainer.reinforce.initial_policy_kl_penalty=0"]
            run(tmp_path, mesh, *options, rm=client)
        finally:
            client.close()
    rows = rollouts_of(tmp_path, 1)
    assert [i for i, row in enumerate(rows) if row["reward"] is None] == [6]
    assert (rows[6]["valid"], rows[6]["advantage"]) == (False, 0.0)
    for start in range(0, 16, 4):
        group = [row for row in rows[start : start + 4] if row["valid"]]
        assert len(group) == (3 if start == 4 else 4)
        for row in group:
            others = [other["reward"] for other in group if other is not row]
            assert row["baseline"] == pytest.approx(sum(others) / len(others))
            assert row["advantage"] == pytest.approx(row["reward"] - row["baseline"], abs=1e-6)


def test_too_many_such_samples_save_and_end_the_run(tmp_path, mesh):
    tiny_overrides(tmp_path)
    calls = itertools.count()
    with FakeRewardServer(score=lambda row: 1.0 if next(calls) < 16 else math.nan) as server:
        client = RemoteGPTRMClient(port=server.port)
        try:
            with pytest.raises(TooManyFailedRewardsError, match=r"100\.0%.*step 2"):
                run(tmp_path, mesh, rm=client)
        finally:
            client.close()
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None and checkpoint.trainer_state["step"] == 1
