"""A real reward server with a token: bad requests, its log, and dead or stopped processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers.errors import raises_error
from helpers.fake_triton import infer_body
from helpers.http_call import call
from helpers.rewards import request_of
from helpers.serve_toy_scorer import MAX_LENGTH, TOKEN_SLOW, VOCAB_SIZE, toy_score
from helpers.toy_server import ToyServer, free_port, is_alive, wait_for
from helpers.wire_requests import RequestFuzzer, WireRequest

from reinforce_rl.errors import RewardServerError
from reinforce_rl.rewards.client import RemoteGPTRMClient
from reinforce_rl.rewards.transport import FailedAttempt

pytestmark = pytest.mark.more

pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")
triton = pytest.importorskip("tritonclient.http")

TOKEN = "a-token-of-24-characters"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
MAX_SAMPLES = 8
CHECK = ("-m", "reinforce_rl", "check", "server")
SECRET_IDS = [76, 65, 76, 65, 76]
SECRET = ", ".join(map(str, SECRET_IDS))


@pytest.fixture(scope="module")
def server_options(tmp_path_factory):
    token_file = tmp_path_factory.mktemp("token") / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    return [f"inference.token_file={token_file}", "inference.max_request_bytes=100000"]


@pytest.fixture
def client(server):
    client = RemoteGPTRMClient(
        port=server.port, token=TOKEN, caller="run-rank2", deadline_seconds=60.0
    )
    yield client
    client.close()


DOUBLE = """
import json, os, sys, time
places = dict(argument.split("=", 1) for argument in sys.argv[1:])
with open(places["inference.ready_file"] + ".new", "w") as file:
    json.dump({"pid": os.getpid()}, file)
os.rename(file.name, places["inference.ready_file"])
time.sleep(600)
"""
STARTS_ONE = """
import sys, time
from pathlib import Path
from helpers.toy_server import ToyServer
ToyServer.script = Path(sys.argv[1])
print(ToyServer(Path(sys.argv[2])).start().server_pid, flush=True)
time.sleep(600)
"""


def test_a_test_run_that_is_killed_leaves_no_server(tmp_path):
    double = tmp_path / "double.py"
    double.write_text(DOUBLE)
    tests = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{tests}:{tests.parent}", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", STARTS_ONE, str(double), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        server = psutil.Process(int(run.stdout.readline()))
        assert is_alive(server)
        run.kill()
    assert wait_for(lambda: not is_alive(server), 10)


def check(port: int, token: str | None, folder: Path) -> tuple[int, str]:
    arguments = []
    if token is not None:
        path = folder / "token"
        path.write_text(token)
        path.chmod(0o600)
        arguments = ["--token-file", str(path)]
    command = [sys.executable, *CHECK, f"http://127.0.0.1:{port}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_tritonclient_and_our_client_get_in_with_the_token(server, client):
    assert client.infer_rm(request_of([[1, 2], [3, 4]])).result().values.tolist() == [
        np.float32(toy_score([1, 2])),
        np.float32(toy_score([3, 4])),
    ]
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as other:
        assert other.is_server_live()
        assert other.is_server_ready()
        headers = dict(BEARER)  # the client adds to the given headers
        assert other.is_model_ready("reward_model", headers=headers)
        assert not other.is_model_ready("reward_model")
        assert other.get_model_metadata("reward_model", headers=headers)["name"] == "reward_model"
        inputs = [
            triton.InferInput("tokens", [1, 2], "INT64"),
            triton.InferInput("sequence_lengths", [1, 1], "INT64"),
        ]
        for tensor, array in zip(inputs, ([[1, 2]], [[2]]), strict=True):
            tensor.set_data_from_numpy(np.array(array, np.int64))
        answer = other.infer("reward_model", inputs, headers=headers)
        assert answer.as_numpy("rewards").tolist() == [[np.float32(toy_score([1, 2]))]]


@pytest.mark.parametrize(
    ("token", "key"),
    [
        (None, "reward_server.token.not_sent"),
        ("w" * 20, "reward_server.token.unknown"),
    ],
)
def test_a_wrong_token_is_an_error_at_once(server, token, key):
    client = RemoteGPTRMClient(port=server.port, token=token, deadline_seconds=60.0)
    start = time.monotonic()
    with raises_error(key, "remote_rm.reward_model.token_file"):
        client.infer_rm(request_of([[1]])).result()
    assert time.monotonic() - start < 30  # far from the deadline
    client.close()


def test_the_check_tells_a_person(server, tmp_path):
    code, text = check(server.port, TOKEN, tmp_path)
    assert code == 0, text
    for part in (
        "its state is 'ready'",
        "a small sample was scored",
        "serves: 'reward_model'",
        f"limits: {MAX_SAMPLES} samples a request, {MAX_LENGTH} tokens a sample",
        f"tokenizer: {VOCAB_SIZE} tokens",
        "scored by itself",
        "samples/s",
        "OK: it can be used",
    ):
        assert part in text, text
    code, text = check(server.port, "w" * 20, tmp_path)
    assert code == 1
    assert ("--token-file" in text.splitlines()[-1]) is True
    code, text = check(free_port(), None, tmp_path)
    assert code == 1
    assert ("nothing listens" in text) is True


def test_a_request_of_a_gigabyte_is_refused_before_it_is_read(server, client):
    values = ["run-rank2-call0", "HTTP 413", "max_request_bytes"]
    with raises_error("reward_server.request.refused", *values):
        client.infer_rm(request_of([[1] * 20_000])).result()
    path = "/v2/models/reward_model/infer"
    answer = call(server.port, path, body=bytes(10**9), headers=BEARER)
    assert answer.code == 413


def test_nothing_of_a_request_is_in_the_logs_and_ids_are(server, client, caplog):
    caplog.set_level(logging.INFO)
    client.infer_rm(request_of([SECRET_IDS])).result()
    texts = {
        "name": "sentences",
        "datatype": "BYTES",
        "shape": [2, 1],
        "data": ["xylophone", "xylophone" * 9],
    }
    body = json.dumps({"inputs": [texts]})
    headers = {**BEARER, "X-Request-ID": "mine"}
    path = "/v2/models/reward_model/infer"
    assert call(server.port, path, body=body.encode(), headers=headers).code == 200
    for wrong in (
        body.replace("sentences", "xylophone"),
        body[:-9],
        body.replace('"BYTES"', '"xylophone"'),
    ):
        assert call(server.port, path, body=wrong.encode(), headers=headers).code >= 400
    assert wait_for(lambda: server.log.read_text().count("id=mine ") == 4)
    log = server.log.read_text()
    assert "id=run-rank2-call0-" in log
    for text in (log, caplog.text):
        assert "xylophone" not in text
        assert SECRET not in text
        assert TOKEN not in text


class Sender:
    """Sends requests over one connection, which it reopens if the server closes it."""

    def __init__(self, port: int):
        self.port = port
        self.codes: Counter[int] = Counter()
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def send(self, request: WireRequest) -> None:
        headers = {**BEARER, **request.headers}
        self._connection.request("POST", "/v2/models/reward_model/infer", request.body, headers)
        answer = self._connection.getresponse()
        body = answer.read()
        self.codes[answer.status] += 1
        assert answer.status not in (502, 504), request  # the back end has died or hangs
        if request.scores is not None:
            assert answer.status == 200, (request, body)
            # binary outputs are sent only on request
            assert answer.headers["Inference-Header-Content-Length"] is None
            outputs = {output["name"]: output["data"] for output in json.loads(body)["outputs"]}
            assert outputs["status"] == [0] * len(request.scores)
            np.testing.assert_allclose(outputs["rewards"], request.scores, rtol=1e-6)

    def send_a_part(self, request: WireRequest, claimed: int) -> None:
        """Send a request that ends before its Content-Length."""
        headers = {**BEARER, **request.headers, "Host": "x", "Content-Length": str(claimed)}
        head = "POST /v2/models/reward_model/infer HTTP/1.1\r\n"
        head += "".join(f"{key}: {value}\r\n" for key, value in headers.items())
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(head.encode() + b"\r\n" + request.body)
            if claimed >= 10**9:
                assert b" 413 " in connection.recv(4096)
                self.codes[413] += 1

    def close(self) -> None:
        self._connection.close()


def fuzz(server: ToyServer, rounds: int, seed: int) -> Counter[int]:
    """Send an invalid and a valid request a round, and now and then a part of the valid one."""
    rng = random.Random(seed)
    fuzzer = RequestFuzzer(seed)
    with contextlib.closing(Sender(server.port)) as sender:
        for _ in range(rounds):
            bad, good = fuzzer.batch(good=1)
            sender.send(bad)
            sender.send(good)
            if rng.random() < 0.1:
                length = len(good.body) + rng.randint(1, 100)
                sender.send_a_part(good, claimed=rng.choice((10**9, 2**62, length)))
    return sender.codes


def assert_well(server: ToyServer, pids: set[int]) -> None:
    assert server.process.poll() is None
    assert {process.pid for process in server.descendants if process.is_running()} == pids
    assert wait_for(
        lambda: json.loads(call(server.port, "/health").body)["in_flight"] == 0,
        30,
    )
    answer = call(server.port, "/health")
    assert answer.code == 200, answer.body


def test_fuzzed_requests_leave_the_server_well(server):
    pids = {process.pid for process in server.descendants}
    codes = fuzz(server, 375, seed=1)
    assert codes[200] >= 375
    assert codes[400] > 100
    assert codes[413] > 5
    assert_well(server, pids)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sixteen_thousand_fuzzed_requests_of_four_clients_leave_the_server_well(server):
    pids = {process.pid for process in server.descendants}
    with ThreadPoolExecutor(4) as pool:
        codes = sum(pool.map(lambda seed: fuzz(server, 2000, seed), range(100, 104)), Counter())
    assert codes[200] >= 8000
    print(f"answers by code: {dict(codes)}")
    assert_well(server, pids)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ab") is None, reason="Debian's apache2-utils are not installed")
def test_apache_bench_is_a_client(server, tmp_path):
    body = tmp_path / "body.json"
    body.write_bytes(infer_body([1, 2, 3]))
    url = f"http://127.0.0.1:{server.port}/v2/models/reward_model/infer"
    command = [
        "ab",
        "-n",
        "2000",
        "-c",
        "16",
        "-k",
        "-s",
        "60",
        "-H",
        f"Authorization: Bearer {TOKEN}",
    ]
    command += ["-T", "application/json", "-p", str(body), url]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    print(output)
    assert "Complete requests:      2000" in output
    assert "Failed requests:        0" in output
    assert "Non-2xx" not in output


def test_a_stuck_model_ends_the_server_and_leaves_nothing(tmp_path):
    with ToyServer(tmp_path, "--slow", "1000", "inference.model_timeout_seconds=2.0") as server:
        client = RemoteGPTRMClient(port=server.port, deadline_seconds=4.0, on_wait=lambda _: None)
        with pytest.raises(RewardServerError):  # and no reward
            client.infer_rm(request_of([[1, TOKEN_SLOW]])).result()
        client.close()
        assert server.process.wait(60) == 1
        assert wait_for(lambda: not server.left_behind()), server.left_behind()
        said = re.search(
            r"error: the model has been in one call for (\d+) s (.*)", server.log.read_text()
        )
        assert said
        assert int(said.group(1)) in range(4, 60)
        assert said.group(2).startswith("(inference.model_timeout_seconds is 2)")


def test_a_dead_front_door_ends_the_server_and_leaves_nothing(server):
    server.front.kill()
    assert server.process.wait(60) == 1
    assert "the HTTP front end" in server.log.read_text()
    assert wait_for(lambda: not server.left_behind()), server.left_behind()


@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_server_takes_its_front_door_along(server, hangs):
    """Only the server's own process is killed; its reaper and the end of a pipe do the rest.

    A stopped front door reads no pipe and ignores no signal.
    """
    if hangs:
        server.front.suspend()
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(30)
    assert wait_for(lambda: not server.left_behind()), server.left_behind()


def with_argument(text: str) -> Callable[[ToyServer], psutil.Process]:
    return lambda server: next(
        p
        for p in server.descendants
        if is_alive(p) and any(text in argument for argument in p.cmdline())
    )


def manager_of(stub: str) -> Callable[[ToyServer], psutil.Process]:
    """Return the process of a stub that keeps its shared memory."""
    return lambda server: next(
        p
        for p in server.descendants
        if is_alive(p)
        and "multiprocessing.spawn" in str(p.cmdline())
        and stub in str(p.parents()[0].cmdline())
    )


VICTIMS: dict[str, Callable[[ToyServer], psutil.Process]] = {
    "tritonserver": lambda server: server.tritonserver,
    "front": lambda server: server.front,
    "stub": with_argument("reward_model_0_0"),
    "shared memory": manager_of("reward_model_0_0"),
    "main": lambda server: psutil.Process(server.server_pid),
}
find_reaper = with_argument("reinforce_rl.utils.process_reaper")


def check_that_it_ends_by_name(
    folder, which: str, model_timeout_seconds: float, seconds: float
) -> None:
    with ToyServer(folder, f"inference.model_timeout_seconds={model_timeout_seconds}") as server:
        victim = VICTIMS[which](server)
        victim.suspend()
        texts = []
        code = None
        end = time.monotonic() + seconds
        while code is None and time.monotonic() < end:
            if which != "front":  # no other process answers
                with contextlib.suppress(FailedAttempt):
                    answer = call(server.port, "/health", 15.0)
                    texts += [json.loads(answer.body)["text"]] if answer.code != 200 else []
            time.sleep(0.2)
            code = server.process.poll()
        assert code == (-signal.SIGKILL if which == "main" else 1), (code, texts)
        assert which == "front" or texts
        error = next(
            line for line in server.log.read_text().splitlines() if line.startswith("error: ")
        )
        assert f"process {victim.pid}" in error
        assert "inference.model_timeout_seconds" in error
        assert wait_for(lambda: not server.left_behind()), server.left_behind()


def test_a_stopped_tritonserver_ends_the_server_by_name(tmp_path):
    check_that_it_ends_by_name(tmp_path, "tritonserver", 4.0, 60.0)


@pytest.mark.slow
@pytest.mark.parametrize("which", VICTIMS)
def test_every_stopped_process_ends_the_server_by_name(tmp_path, which):
    check_that_it_ends_by_name(tmp_path, which, 6.0, 60.0)


@pytest.mark.parametrize("how", [pytest.param("kill", marks=pytest.mark.slow), "suspend"])
@pytest.mark.slow
def test_a_lost_reaper_is_replaced_and_the_next_one_cleans_up(tmp_path, how):
    with ToyServer(tmp_path, "inference.model_timeout_seconds=3.0") as server:
        first = find_reaper(server)
        getattr(first, how)()
        assert wait_for(
            lambda: f"event=reaper_replaced process={first.pid}" in server.log.read_text(), 15
        )

        def is_replaced() -> bool:
            server.descendants = psutil.Process(server.server_pid).children(recursive=True)
            with contextlib.suppress(StopIteration):  # it has not called exec yet
                return find_reaper(server).pid != first.pid
            return False

        assert wait_for(is_replaced)
        assert call(server.port, "/health", 10.0).code == 200
        time.sleep(2.0)  # it checks once a second
        os.kill(server.server_pid, signal.SIGKILL)
        server.process.wait(10)
        assert wait_for(lambda: not server.left_behind()), server.left_behind()
        assert not is_alive(first)
