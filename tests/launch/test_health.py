"""Health checks of a reward server over plain HTTP."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from reinforce_rl.launch import health
from reinforce_rl.launch.health import health_fault
from reinforce_rl.utils.net import Address


@pytest.fixture
def answer() -> Iterator[dict[str, object]]:
    """Yield the answer of the server on `port`: `code` and `body`."""
    says: dict[str, object] = {"code": 200, "body": b""}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/health"
            self.send_response(says["code"])  # type: ignore[arg-type]
            self.end_headers()
            self.wfile.write(says["body"])  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    says["port"] = server.server_port
    yield says
    server.shutdown()
    thread.join()
    server.server_close()


def test_answers(answer: dict[str, object]) -> None:
    def asked(code: int, body: object) -> str | None:
        answer.update(
            code=code, body=body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        return health_fault(Address("127.0.0.1", int(str(answer["port"]))))

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
    class Server(http.server.HTTPServer):
        address_family = socket.AF_INET6

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"text": "a small sample was scored"}')

        def log_message(self, *_: object) -> None: ...

    with Server(("::1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        address = Address("::1", server.server_port)
        assert health_fault(address) is None
        thread.join(10)
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
