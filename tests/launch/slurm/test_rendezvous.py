"""Tasks of a step that meet by a file, and the health of a reward server over plain HTTP."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.errors import printed_keys, raises_error

from reinforce_rl.launch.slurm import rendezvous
from reinforce_rl.launch.slurm.rendezvous import (
    RENDEZVOUS_VARIABLE,
    Endpoint,
    health_fault,
    meet_ranks_of_step,
)
from reinforce_rl.utils.job_rank import JobRank
from reinforce_rl.utils.net import Address, claim_ports

ROOT = Path(__file__).parents[3]


def variables_of_task(file: Path | str, number: int, **others: str) -> dict[str, str]:
    """What Slurm sets for a task of a step of two nodes with two tasks each."""
    return {
        RENDEZVOUS_VARIABLE: str(file),
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "1",
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number % 2),
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        **others,
    }


def test_the_tasks_of_a_step_meet_at_the_first(tmp_path: Path) -> None:
    file = tmp_path / "attempt" / "actor.json"
    with ThreadPoolExecutor() as threads:
        others = [
            threads.submit(meet_ranks_of_step, variables_of_task(file, number))
            for number in (3, 1, 2)
        ]
        time.sleep(0.5)
        first = meet_ranks_of_step(variables_of_task(file, 0, SLURM_CPUS_PER_TASK="8"))
        third, second, _ = [other.result(30) for other in others]
    expected = JobRank(0, 4, 0, 2, first["MASTER_ADDR"], first["MASTER_PORT"])
    assert first == expected.variables() | {"OMP_NUM_THREADS": "8"}
    assert third == {**first, "RANK": "3", "LOCAL_RANK": "1", "OMP_NUM_THREADS": "1"}
    assert second["RANK"] == "1" and second["LOCAL_RANK"] == "1"
    with claim_ports(1, str(file)) as ports:  # which looks at the same port first
        assert ports != [int(first["MASTER_PORT"])]


def test_a_file_of_an_earlier_step_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "STEP_SECONDS", 1.0)
    file = tmp_path / "actor.json"
    meet_ranks_of_step(variables_of_task(file, 0))
    for changed in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"):
        later = variables_of_task(file, 1, **{changed: "8"})
        with raises_error("slurm.rendezvous.no_address", file, "1 s"):
            meet_ranks_of_step(later)
    assert meet_ranks_of_step(variables_of_task(file, 1))["RANK"] == "1"


def test_what_is_not_asked_to_meet_is_no_rank(tmp_path: Path) -> None:
    task = variables_of_task(tmp_path / "actor.json", 0)
    assert meet_ranks_of_step({**task, RENDEZVOUS_VARIABLE: ""}) == {}
    assert meet_ranks_of_step({**task, "RANK": "0"}) == {}
    assert meet_ranks_of_step({RENDEZVOUS_VARIABLE: task[RENDEZVOUS_VARIABLE]}) == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["train", "generate", "serve", "train-rm"])
def test_a_command_becomes_a_rank_of_its_step(tmp_path: Path, command: str) -> None:
    """Rank 0 of a folder that cannot be made says so, and does not go on as the only rank."""
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-m", "reinforce_rl", command, "--help"],
        env={
            **{name: value for name, value in os.environ.items() if name not in ("RANK",)},
            **variables_of_task(tmp_path / "file" / "actor.json", 0),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout
    assert printed_keys(done.stderr) == ["slurm.rendezvous.not_written"]


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
        answer.update(
            code=code, body=body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        return health_fault(Address("127.0.0.1", int(str(answer["port"]))))

    assert asked(200, {"text": "a small sample was scored"}) is None
    found = asked(503, {"text": "the server is starting"})
    assert found is not None and found.endswith(": the server is starting")
    for body in (b"hello", {"no": "text"}, [1]):
        found = asked(200, body)
        assert found is not None and found.endswith(
            "answers HTTP 200, and not as a reward server does"
        )


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
        assert str(endpoint.http) == f"[::1]:{server.server_port}"
        assert health_fault(endpoint.http) is None
        thread.join(10)
    fault = health_fault(endpoint.http)
    assert str(fault).startswith(f"[::1]:{endpoint.http_port} does not answer")


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
        found = health_fault(Address("127.0.0.1", listener.getsockname()[1]))
        seconds = time.monotonic() - begin
        server.join(30)
    assert found is not None and "does not answer" in found
    assert seconds < 10


def test_nothing_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    fault = health_fault(Address("127.0.0.1", port))
    assert fault == f"127.0.0.1:{port} does not answer (Connection refused)"
