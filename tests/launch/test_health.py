"""Health checks of a reward server over plain HTTP."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
from helpers.fake_http import FakeHttpServer

from reinforce_rl.launch import health
from reinforce_rl.launch.health import health_fault
from reinforce_rl.utils.net import Address


def test_answers() -> None:
    replies: list[tuple[int, object]] = []

    def reply(path: str, *_: object) -> tuple[int, object]:
        assert path == "/health"
        return replies.pop()

    with FakeHttpServer(reply) as server:

        def asked(code: int, body: object) -> str | None:
            replies.append((code, body))
            return health_fault(Address("127.0.0.1", server.port))

        assert asked(200, {"text": "a small sample was scored"}) is None
        starting = asked(503, {"text": "the server is starting"})
        assert starting is not None
        assert starting.endswith(": the server is starting")
        for body in (b"hello", {"no": "text"}, [1]):
            foreign = asked(200, body)
            assert foreign is not None
            assert foreign.endswith("answers HTTP 200, and not as a reward server does")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_server_on_ipv6() -> None:
    with FakeHttpServer(lambda *_: (200, {"text": "a sample was scored"}), host="::1") as server:
        address = Address("::1", server.port)
        assert health_fault(address) is None
    fault = health_fault(address)
    assert str(fault).startswith(f"[::1]:{address.port} does not answer")


def test_an_answer_that_drips_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HEALTH_SECONDS", 1.0)

    def drip() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            for _ in range(100):  # 20 s
                connection.sendall(b"H")
                time.sleep(0.2)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=drip)
        server.start()
        begin = time.monotonic()
        fault = health_fault(Address("127.0.0.1", listener.getsockname()[1]))
        seconds = time.monotonic() - begin
        server.join(30)
    assert fault is not None
    assert "does not answer" in fault
    assert seconds < 10


def test_nothing_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    fault = health_fault(Address("127.0.0.1", port))
    assert fault == f"127.0.0.1:{port} does not answer (connection refused)"
