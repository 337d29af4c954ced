"""Ports that two jobs on one node cannot share, and the health of a server over plain HTTP."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from helpers.errors import raises_error

from reinforce_rl.launch.slurm import rendezvous
from reinforce_rl.launch.slurm.rendezvous import FIRST_PORT, PORTS, Endpoint, claim_ports, health_fault, own_address
from reinforce_rl.utils import net

CLAIM = """
import sys
from reinforce_rl.launch.slurm.rendezvous import claim_ports
with claim_ports(2, "7-0 actor") as found:
    print(*found, flush=True)
    sys.stdin.read()
"""


def claim_in_another_process() -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen([sys.executable, "-c", CLAIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [int(port) for port in process.stdout.readline().split()]


def test_two_processes_with_the_same_wish_get_different_ports() -> None:
    process, theirs = claim_in_another_process()
    try:
        with claim_ports(2, "7-0 actor") as ours:
            assert len({*ours, *theirs}) == 4
            assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in [*ours, *theirs])
    finally:
        process.kill()
        process.communicate(timeout=30)
    with claim_ports(2, "7-0 actor") as ours:  # a killed process holds nothing
        assert ours == theirs


def test_a_port_that_is_listened_on_is_left_out() -> None:
    with claim_ports(1, "key") as found:
        wish = found[0]
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", wish))
        listener.listen()
        with claim_ports(1, "key") as found:
            assert found != [wish]
    with claim_ports(1, "key") as found:
        assert found == [wish]


def test_the_numbers_wrap_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous.zlib, "crc32", lambda key: PORTS - 1)
    with claim_ports(2, "key") as found:
        assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in found)


def address_with(monkeypatch: pytest.MonkeyPatch, names: dict[str, str], route: str = "") -> str:
    """`own_address` of a node called here, with these addresses of names, from which packets go by `route`."""

    class Probe:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...
        def connect(self, address: tuple[str, int]) -> None: ...
        def getsockname(self) -> tuple[str, int]:
            return route, 0

    monkeypatch.setattr(rendezvous.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(rendezvous, "_address_of", names.get)
    monkeypatch.setattr(net.socket, "socket", Probe)
    return own_address(["there"])


def test_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_with(monkeypatch, {"here": "10.0.0.1"}) == "10.0.0.1"
    # as Debian's installer writes /etc/hosts
    assert address_with(monkeypatch, {"here": "127.0.1.1", "there": "10.0.0.2"}, route="10.0.0.1") == "10.0.0.1"
    assert address_with(monkeypatch, {"here": "127.0.1.1"}) == "127.0.1.1"
    with raises_error("slurm.rendezvous.node_without_address", "here"):
        address_with(monkeypatch, {})
    assert address_with(monkeypatch, {"here": "fd00::2"}) == "fd00::2"
    assert address_with(monkeypatch, {"here": "::1", "there": "fd00::2"}, route="fd00::1") == "fd00::1"
    # several nodes on one machine
    assert address_with(monkeypatch, {"here": "127.0.77.10", "there": "127.0.77.20"}) == "127.0.77.10"


@pytest.fixture
def answer() -> Iterator[dict[str, object]]:
    """What the server on `port` answers: `code` and `body`."""
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
        answer.update(code=code, body=body if isinstance(body, bytes) else json.dumps(body).encode())
        return health_fault(Endpoint("here", "127.0.0.1", 0, int(str(answer["port"]))))

    assert asked(200, {"text": "a small sample was scored"}) is None
    found = asked(503, {"text": "the server is starting"})
    assert found is not None and found.endswith(": the server is starting")
    for body in (b"hello", {"no": "text"}, [1]):
        found = asked(200, body)
        assert found is not None and found.endswith("answers HTTP 200, and not as a reward server does")


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
        endpoint = Endpoint("here", "::1", 0, server.server_port)
        assert endpoint.http == f"[::1]:{server.server_port}"
        assert health_fault(endpoint) is None
        thread.join(10)
    assert str(health_fault(endpoint)).startswith(f"[::1]:{endpoint.http_port} does not answer")


def test_an_answer_that_drips_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "HEALTH_SECONDS", 1.0)

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
        found = health_fault(Endpoint("here", "127.0.0.1", 0, listener.getsockname()[1]))
        seconds = time.monotonic() - begin
        server.join(30)
    assert found is not None and "does not answer" in found
    assert seconds < 10


def test_nothing_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    assert (
        health_fault(Endpoint("here", "127.0.0.1", 0, port))
        == f"127.0.0.1:{port} does not answer (Connection refused)"
    )
