"""The front door as a process in front of a fake Triton: admission, limits and descriptions."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.fake_triton import FrontBeforeFake, infer_body
from helpers.http_call import call
from helpers.toy_server import wait_for

from reinforce_rl.reward_model.server.front import FAILED
from reinforce_rl.reward_model.server.health import CACHE_SECONDS, STATUS_LABELS
from reinforce_rl.rewards import base, wire
from reinforce_rl.rewards.transport import FailedAttempt

TOKEN = "a-token-of-24-characters"
BODY = infer_body([1, 2, 3])
INFO = f"/v2/models/{wire.INFO_MODEL}/infer"


@pytest.fixture
def start():
    fronts = []

    def start_one(**options) -> FrontBeforeFake:
        fronts.append(FrontBeforeFake(**options))
        return fronts[-1]

    yield start_one
    for front in fronts:
        front.close()


def error_of(answer) -> str:
    return json.loads(answer.body)["error"]


def test_only_the_token_lets_in_and_health_is_open(start):
    front = start(token=TOKEN)
    right = {"Authorization": f"Bearer {TOKEN}"}
    for headers in ({}, {"Authorization": "Bearer wrong-wrong-wrong"}, {"Authorization": TOKEN}):
        refused = [
            front.infer(BODY, **headers),
            front.get("/v2", **headers),
            front.get("/metrics", **headers),
        ]
        refused += [front.get("/v2/models/rm/ready", **headers)]
        assert [answer.code for answer in refused] == [401] * 4
        assert "Authorization: Bearer" in error_of(refused[0])
        assert refused[0].headers["www-authenticate"] == "Bearer"
    assert front.backend.seen == []
    assert front.health()[0] == 200
    assert front.infer(BODY, **right).code == 200
    assert front.get("/v2/models/rm/ready", **right).code == 200
    assert b'reward_server_requests_total{code="401"} 3.0' in front.get("/metrics", **right).body


def test_the_front_door_itself_describes_the_server(start):
    """The model's side may be busy or hang."""
    front = start(token=TOKEN, description='{"name": "rm"}')
    front.backend.dead = True
    right = {"Authorization": f"Bearer {TOKEN}"}
    for body, echoed in ((b'{"inputs": []}', {}), (b'{"id": "7", "inputs": []}', {"id": "7"})):
        answer = call(front.port, INFO, body=body, headers=right)
        assert answer.code == 200
        answer.check_digest(body)
        output = {
            "name": wire.INFO_OUTPUT,
            "datatype": "BYTES",
            "shape": [1],
            "data": ['{"name": "rm"}'],
        }
        described = {"model_name": wire.INFO_MODEL, "model_version": "1", "outputs": [output]}
        assert json.loads(answer.body) == {**described, **echoed}
    ready = f"/v2/models/{wire.INFO_MODEL}/ready"
    assert front.get(ready, **right).code == 200
    assert front.get(ready).code == 401
    assert call(front.port, INFO, body=b'{"inputs": []}').code == 401
    wrong = infer_body([1])
    assert call(front.port, INFO, body=wrong, headers=right).code == 400
    assert front.backend.seen == []


def test_a_description_is_asked_for_once_the_server_is_ready(start):
    front = start(ready=False)
    assert call(front.port, INFO, body=b'{"inputs": []}').code == 503
    assert front.get(f"/v2/models/{wire.INFO_MODEL}/ready").code == 503


def test_what_is_not_served_does_not_reach_triton(start):
    front = start()
    for path in (
        "/v2/repository/index",
        "/v2/repository/models/rm/unload",
        "/v2/systemsharedmemory/status",
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/models/stats",
        "/v2/models/rm/stats",
        "/v2/models/rm/../../repository/index",
        "/v2/models/rm/%2e%2e/%2e%2e/repository/index",
        "/v2/models/other",
        "/",
        "//v2",
    ):
        for body in (None, b"{}"):
            assert call(front.port, path, 10.0, body=body).code in (404, 405), path
    assert call(front.port, "/v2/models/other/infer", 10.0, body=BODY).code == 404
    assert front.get("/v2/models/rm/infer").code == 405
    assert front.backend.seen == []


def test_sizes_are_capped_before_and_while_reading(start):
    front = start()
    answer = front.infer(infer_body([1] * 65))
    assert answer.code == 400
    assert ("max_sequence_length" in error_of(answer)) is True
    answer = front.infer(infer_body(*[[1]] * 9))
    assert answer.code == 400
    assert ("<= 8" in error_of(answer)) is True
    answer = front.infer(BODY, Content_Encoding="gzip")
    assert answer.code == 415
    answer = front.infer(b" " * 10_001)
    assert answer.code == 413
    assert ("10001 bytes" in error_of(answer)) is True
    head = "POST /v2/models/rm/infer HTTP/1.1\r\nHost: x\r\n"
    for headers, sent in (
        ("Content-Length: 1000000000\r\n", b""),  # Content-Length is enough
        ("Content-Length: 1000000000\r\nExpect: 100-continue\r\n", b""),
        # an endless body ends here
        ("Transfer-Encoding: chunked\r\n", b"4000\r\n" + b" " * 0x4000 + b"\r\n"),
    ):
        with socket.create_connection(("127.0.0.1", front.port), timeout=10) as connection:
            connection.sendall((head + headers + "\r\n").encode() + sent)
            assert b" 413 " in connection.recv(1000).split(b"\r\n")[0]
    assert front.backend.seen == []
    assert front.infer(BODY).code == 200


def health_from(port: int, source: str) -> bytes:
    """Return the first line of the answer to a client at another address."""
    with socket.create_connection(
        ("127.0.0.1", port), timeout=10, source_address=(source, 0)
    ) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return connection.recv(1000).split(b"\r\n")[0]


@pytest.mark.more
def test_half_sent_headers_of_one_address_shut_nobody_out(start):
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most))  # as systemd sets it
    try:
        front = start(idle_seconds=5.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(usual, 2048), most))
    connections = [
        socket.create_connection(("127.0.0.1", front.port), timeout=20) for _ in range(1100)
    ]
    try:
        for connection in connections:
            connection.sendall(b"POST /v2/models/rm/infer HTTP/1.1\r\nHost: ")
        assert health_from(front.port, "127.0.0.2") == b"HTTP/1.1 200 OK"
        answer = connections[-1].recv(1000)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After" in answer
        assert connections[0].recv(1000) == b""  # the header did not come in time
        assert wait_for(lambda: health_from(front.port, "127.0.0.1") == b"HTTP/1.1 200 OK")
    finally:
        for connection in connections:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))


@pytest.mark.more
def test_bodies_that_pause_take_no_place_and_no_memory(start):
    """Each declares the largest length, and has sent one byte."""
    front = start(max_in_flight=1, max_queue=0, max_request_bytes=1 << 20, idle_seconds=5.0)
    head = f"POST /v2/models/rm/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 20}\r\n\r\n{{"
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", front.port), timeout=20))
            for _ in range(300)
        ]
        for connection in connections:
            connection.sendall(head.encode())
        assert front.infer(BODY).code == 200
        assert b" 408 " in connections[0].recv(1000).split(b"\r\n")[0]


def test_others_are_answered_while_a_long_json_is_read(start):
    front = start(max_request_bytes=1 << 25, max_sequence_length=1 << 22)
    width = 2_000_000
    body = infer_body([1] * width, [1] * width)
    before = front.backend.inferences
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(call, front.port, "/v2/models/rm/infer", 200.0, body=body)
        waits = []
        while front.health()[1]["in_flight"] == 0 and not answer.done():
            started = time.monotonic()
            health_from(front.port, "127.0.0.1")
            waits.append(time.monotonic() - started)
        assert answer.result().code == 200
    assert front.backend.inferences > before
    assert len(waits) > 5, waits


def test_a_full_queue_is_busy_and_frees_itself(start):
    front = start(max_in_flight=1, max_queue=2)
    front.backend.go.clear()
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(front.infer, BODY) for _ in range(3)]
        assert wait_for(lambda: front.health()[1]["in_flight"] + front.health()[1]["queued"] == 3)
        answer = front.infer(BODY)
        assert answer.code == 503
        assert ("busy" in error_of(answer)) is True
        assert answer.retry_after is not None
        assert 1 <= answer.retry_after <= 60
        assert front.backend.inferences - canaries_of(front) == 1
        front.backend.go.set()
        assert [call.result().code for call in calls] == [200] * 3
    assert front.infer(BODY).code == 200


def canaries_of(front) -> int:
    return sum(
        path.endswith("/infer") and b'"data": [0]' in body for path, body in front.backend.seen
    )


def test_a_client_that_hangs_up_frees_its_place(start):
    front = start(max_in_flight=1, max_queue=0)
    front.backend.go.clear()
    request = (
        b"POST /v2/models/rm/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY)
        + BODY
    )
    with socket.create_connection(("127.0.0.1", front.port)) as connection:
        connection.sendall(request)
        assert wait_for(lambda: front.health()[1]["in_flight"] == 1)
        assert front.infer(BODY).code == 503
    assert wait_for(lambda: front.health()[1]["in_flight"] == 0)
    front.backend.go.set()
    assert front.infer(BODY).code == 200


@pytest.mark.more
def test_health_tells_busy_from_stuck_and_from_dead(start):
    front = start(model_timeout_seconds=3.0)
    code, values = front.health()
    assert code == 200
    assert values["healthy"] is True
    assert values["state"] == "ready"
    before = front.backend.inferences
    began = time.monotonic()
    for _ in range(50):
        front.health()
    seconds = time.monotonic() - began
    assert front.backend.inferences - before <= 2 + (seconds) / CACHE_SECONDS

    front.progress.begin()  # a long call that finishes samples now and then
    for _ in range(5):
        time.sleep(0.9)
        front.progress.beat()
        code, values = front.health()
        assert code == 200, values
    assert "busy" in values["text"]
    assert wait_for(lambda: front.health()[0] == 503)  # nothing finishes any more
    assert "stuck" in front.health()[1]["text"]
    front.progress.end()
    assert wait_for(lambda: front.health()[0] == 200)

    front.backend.go.clear()  # idle, without an answer
    assert wait_for(lambda: front.health()[0] == 503)
    assert "no answer within 0.5 s" in front.health()[1]["text"]
    front.backend.go.set()
    assert wait_for(lambda: front.health()[0] == 200)
    front.backend.status = 7
    assert wait_for(lambda: "raised an error" in front.health()[1]["text"])
    front.backend.dead = True
    assert wait_for(lambda: "does not answer" in front.health()[1]["text"])
    assert front.infer(BODY).code == 502


def test_health_is_not_held_up_by_other_work(start):
    """The canary waits behind Triton's requests; the answer to another request shows health."""
    front = start(model_timeout_seconds=30.0)
    front.backend.holds_canaries_only = True
    front.backend.go.clear()
    answers = []
    canary = threading.Thread(target=lambda: answers.append(front.health()))
    canary.start()
    assert wait_for(lambda: front.backend.inferences == 1)
    assert front.infer(BODY).code == 200
    canary.join(20)
    assert answers[0][0] == 200
    assert "answered other requests" in answers[0][1]["text"]


def test_a_canary_that_was_scored_and_not_answered_is_no_health(start):
    front = start(model_timeout_seconds=30.0)
    front.backend.go.clear()
    canary = threading.Thread(target=front.health)
    canary.start()
    assert wait_for(lambda: front.backend.inferences == 1)
    front.progress.begin()
    front.progress.count(1, {0: 1}, 3, 0.1)
    front.progress.end()
    canary.join(20)
    code, values = front.health()
    assert code == 503
    assert ("had no answer" in values["text"]) is True


def test_states(start):
    front = start(ready=False)
    assert front.health() == (503, {**front.health()[1], "state": "starting", "healthy": False})
    answer = front.infer(BODY)
    assert answer.code == 503
    assert ("starting" in error_of(answer)) is True
    assert answer.retry_after == 5.0
    assert front.get("/v2/health/live").code == 200
    assert front.get("/v2/health/ready").code == 503
    front.process.set_state(FAILED, "tritonserver died")
    assert wait_for(lambda: front.health()[1]["state"] == "failed")
    assert front.health()[1]["text"] == "tritonserver died"


def test_a_drain_finishes_what_is_in_flight_and_refuses_the_rest(start):
    front = start(max_in_flight=1)
    front.backend.go.clear()
    with ThreadPoolExecutor(3) as pool:
        served = pool.submit(front.infer, BODY)
        assert wait_for(lambda: front.health()[1]["in_flight"] == 1)
        waiting = pool.submit(front.infer, BODY)
        assert wait_for(lambda: front.health()[1]["queued"] == 1)
        drained = pool.submit(front.process.drain, 30.0)
        assert waiting.result(20).code == 503
        assert front.infer(BODY).retry_after is not None
        assert front.health()[1]["state"] == "draining"
        assert not served.done()
        assert not drained.done()
        front.backend.go.set()
        assert served.result(20).code == 200
        assert drained.result(20)


def test_requests_have_ids_and_metrics(start, caplog, capfd):
    caplog.set_level(logging.INFO)
    front = start()
    answer = front.infer(infer_body([1, 2], [3, 4]), X_Request_ID="run-rank3-call7")
    assert answer.headers["x-request-id"] == "run-rank3-call7"
    made = []
    for bad in ("", "a b", "x" * 129):
        answer = front.infer(BODY, **{"X-Request-ID": bad})
        made.append(answer.headers["x-request-id"])
    assert len(set(made)) == 3
    for request_id in made:
        assert len(request_id) == 16
    front.infer(b"{")
    statuses = {0: 5, 3: 2, 8: 3, 9: 4}
    front.progress.count(4, statuses, 11, 0.02)
    text = front.get("/metrics").body.decode()
    for line in (
        'reward_server_requests_total{code="200"} 4.0',
        'reward_server_requests_total{code="400"} 1.0',
        "reward_server_samples_total 5.0",
        "reward_server_request_seconds_count 4.0",
        "reward_server_model_tokens_total 11.0",
        'reward_server_model_samples_total{status="bad_token"} 2.0',
        'reward_server_model_samples_total{status="timed_out"} 3.0',
        'reward_server_model_samples_total{status="bad_prompt"} 4.0',
        'reward_server_model_seconds_bucket{le="0.01"} 0.0',
        'reward_server_model_seconds_bucket{le="0.025"} 1.0',
        "reward_server_in_flight 0.0",
        "reward_server_ready 1.0",
    ):
        assert line in text, text
    front.close()
    log = capfd.readouterr().err
    assert "event=request id=run-rank3-call7 path=/v2/models/rm/infer code=200" in log
    assert "samples=2" in log


def test_nothing_of_a_request_is_logged(start, caplog, capfd):
    caplog.set_level(logging.INFO)
    secret = "xylophone"
    front = start()
    front.infer(infer_body([1]).replace(b'"tokens"', b'"%s"' % secret.encode()))
    for body in (
        secret.encode(),
        b'{"%s": ' % secret.encode(),
        b'{"inputs": [{"name": "%s"}]}' % secret.encode(),
    ):
        front.infer(body, X_Request_ID=f"{secret} {secret}")
    front.get(f"/{secret}")
    for raw in (
        f"{secret} / {secret}\r\n\r\n",
        f"GET / HTTP/1.1\r\n{secret}\r\n\r\n",
        f"POST /{secret} HTTP/9.9\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", front.port), timeout=10) as connection:
            connection.sendall(raw.encode())
            assert b"400" in connection.recv(1000)
    front.close()
    log = capfd.readouterr().err
    assert log.count("event=request") >= 4
    assert secret not in log


def test_every_status_has_a_label_in_the_metrics():
    assert set(STATUS_LABELS) == set(base.STATUS_TEXT)
    assert STATUS_LABELS[base.STATUS_TOO_LONG] == "too_long"


def test_nothing_of_an_error_inside_is_shown(start, capfd):
    """PyTriton's traceback may quote a sample, so clients do not get it; Triton's log has it."""
    front = start()
    front.backend.code = 500
    answer = front.infer(BODY)
    assert answer.code == 500
    assert (
        answer.body == b'{"error": "the model backend failed; the reward server\'s log says why"}'
    )
    front.backend.error = "Stub process 'rm_0_0' is not healthy."
    assert b"not healthy" not in front.infer(BODY).body
    front.close()
    log = capfd.readouterr().err
    assert log.count("event=backend_fault code=500") == 1
    assert "is not healthy." in log
    assert "secret" not in log


def test_the_front_ends_with_its_server(start):
    front = start()
    assert front.process.exit_code is None
    front.process.close()
    assert front.process.exit_code == 0
    with pytest.raises(FailedAttempt, match="connection refused"):
        front.get("/health")
