"""One HTTP request, over TCP or a Unix socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fake_triton import FakeTriton

from reinforce_rl.rewards.transport import FailedAttempt, HttpAnswer, exchange, url_of, wait_for
from reinforce_rl.utils.net import Address

HERE = Address("localhost", 80)


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with FakeTriton() as fake:
        yield fake


def ask(path: str, socket_path: str, seconds: float, body: bytes | None = None) -> HttpAnswer:
    url = url_of(HERE, path)
    return wait_for(exchange(url, seconds, body=body, socket_path=Path(socket_path)))


def test_a_unix_socket_is_asked_in_place_of_the_host(server: FakeTriton) -> None:
    assert ask("/v2", server.path, 30.0).body == b'{"name": "triton", "extensions": []}'
    server.code = 503
    answer = ask("/v2/models/rm/infer", server.path, 30.0, b"{}")
    assert answer.code == 503
    assert server.seen == [("/v2", b""), ("/v2/models/rm/infer", b"{}")]


def test_a_missing_or_silent_unix_socket_fails_in_time(server: FakeTriton, tmp_path: Path) -> None:
    with pytest.raises(FailedAttempt) as missing:
        ask("/v2", str(tmp_path / "nothing.sock"), 30.0)
    assert not missing.value.timed_out
    silent = tmp_path / "silent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(silent))
        listener.listen()
        with pytest.raises(FailedAttempt) as late:
            ask("/v2", str(silent), 0.2)
    assert late.value.timed_out
