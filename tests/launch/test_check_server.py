"""Errors about unusable servers; test_server_faults.py tests usable ones."""

from __future__ import annotations

import pytest
from helpers.errors import check_error, raises_error
from helpers.fake_http import FakeHttpServer
from helpers.fake_reward_server import FakeRewardServer
from helpers.fake_triton import FrontBeforeFake
from helpers.toy_server import free_port, wait_for

from reinforce_rl.errors import ReinforceError
from reinforce_rl.launch.check_server import _seconds, check_server
from reinforce_rl.reward_model.server.front import FAILED
from reinforce_rl.rewards.transport import ModelAddress
from reinforce_rl.utils.net import Address, listen


def fault(port: int, token: str | None = None) -> ReinforceError:
    with pytest.raises(ReinforceError) as caught:
        check_server(f"http://127.0.0.1:{port}", token, lambda line: None)
    return caught.value


def test_each_state_is_reported_with_what_to_do():
    front = FrontBeforeFake(ready=False, health_timeout_seconds=5.0)
    try:
        check_error(fault(front.port), "check_server.server.not_ready", "it is starting")
        front.process.set_state("ready")
        front.backend.status = 7
        assert wait_for(lambda: front.get("/v2/health/ready").code == 200)
        check_error(fault(front.port), "check_server.server.not_healthy", "a small sample failed")
        front.process.set_state(FAILED, "tritonserver died")
        assert wait_for(lambda: front.health()[1]["state"] == "failed")
        values = ("it has failed", "tritonserver died")
        check_error(fault(front.port), "check_server.server.not_ready", *values)
        front.process.set_state("draining")
        assert wait_for(lambda: front.health()[1]["state"] == "draining")
        check_error(fault(front.port), "check_server.server.not_ready", "it was asked to stop")
    finally:
        front.close()


@pytest.mark.parametrize(
    ("outputs", "status"),
    [
        ([], "missing"),
        ([{"name": "status", "data": [0, 7]}], "'7'"),
        ([{"name": "status", "data": [["a\x1b"]]}], "a"),
    ],
    ids=["no status", "a failed sample", "a nested text"],
)
def test_a_sample_without_a_score_is_reported_with_its_status(outputs, status):
    with FakeRewardServer([(200, {"outputs": outputs})]) as fake:
        model = ModelAddress(Address("127.0.0.1", fake.port), "reward_model", None)
        with raises_error("check_server.sample.not_scored", status) as error:
            _seconds(model, 2, 4)
    assert "\x1b" not in str(error.value)


def test_nobody_and_somebody_else():
    port = free_port()
    check_error(fault(port), "check_server.server.not_listening", f"http://127.0.0.1:{port} ")

    answers = [b"hello", b"[" * 100_000]
    with FakeHttpServer(lambda *_: (200, answers.pop())) as foreign:
        for _ in range(2):
            check_error(
                fault(foreign.port),
                "check_server.server.other_program",
                f"http://127.0.0.1:{foreign.port} ",
                "HTTP 200",
            )
    with listen("::1", 0) as silent:
        port = silent.getsockname()[1]
    for url in (f"http://[::1]:{port}", f"[::1]:{port}/"):
        with raises_error("check_server.server.not_listening", f"http://[::1]:{port} "):
            check_server(url, None, lambda line: None)
    with raises_error("check_server.server.unreachable", "http://no-such-host.invalid:5555"):
        check_server("http://no-such-host.invalid:5555", None, lambda line: None)


@pytest.mark.parametrize(
    "url", ["https://a:1", "http://", "http://a:99999", "http://a:1/path", "ftp://a"]
)
def test_invalid_addresses(url):
    with raises_error("check_server.address.invalid", f"'{url}'", "http://HOST:PORT"):
        check_server(url, None, lambda line: None)
