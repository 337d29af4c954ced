"""A real PyTriton server with a toy model, called by curl and tritonclient."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.serve_toy_scorer import (
    MAX_LENGTH,
    TOKEN_NAN,
    TOKEN_RAISE,
    TOKEN_SLOW,
    VOCAB_SIZE,
    ToyScorer,
)
from helpers.tiny_tokenizer import write_tiny_tokenizer
from helpers.toy_server import ToyServer, wait_for
from helpers.wire_requests import int_tensor

from reinforce_rl.data.tokenizer import TokenizerInfo, load_tokenizer
from reinforce_rl.rewards import base
from reinforce_rl.rewards.wire import ServerInfo

pytestmark = pytest.mark.more

pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")
triton = pytest.importorskip("tritonclient.http")

NOISE = 0.001  # toy model: the score depends on the number of samples of a call
SLOW_SECONDS = 1.5
SECRET = "xylophone"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(
        write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=VOCAB_SIZE)
    )


@pytest.fixture(scope="module")
def server_options():
    quick = ["--batch-noise", str(NOISE), "--slow", str(SLOW_SECONDS)]
    return [*quick, "inference.max_queue_delay_ms=50.0"]


def direct(sequences: list[list[int]]) -> list[float]:
    """The scorer without a server, in float32 as in the protocol."""
    return np.asarray(ToyScorer(0.0, NOISE).score(sequences), np.float32).tolist()


def padded(sequences: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    return tokens, np.array([[len(sequence)] for sequence in sequences], np.int64)


def curl(server: ToyServer, inputs: list[dict], model: str = "reward_model") -> tuple[int, dict]:
    url = f"http://127.0.0.1:{server.port}/v2/models/{model}/infer"
    command = [
        "curl",
        "-sS",
        "-m",
        "30",
        "-w",
        "\n%{http_code}",
        "-d",
        json.dumps({"inputs": inputs}),
        url,
    ]
    output = subprocess.run(command, capture_output=True, text=True, timeout=40, check=True).stdout
    body, code = output.rsplit("\n", 1)
    return int(code), json.loads(body)


def json_inputs(tokens: np.ndarray, lengths: np.ndarray, datatype: str = "INT64") -> list[dict]:
    first = {**int_tensor("tokens", tokens.tolist()), "datatype": datatype}
    return [first, int_tensor("sequence_lengths", lengths.tolist())]


def sentence_inputs(texts: list[str]) -> list[dict]:
    return [{"name": "sentences", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}]


def outputs_of(body: dict) -> tuple[list[float], list[int]]:
    outputs = {output["name"]: output for output in body["outputs"]}
    assert outputs["rewards"]["datatype"] == "FP32"
    assert outputs["status"]["datatype"] == "INT32"
    assert (
        outputs["rewards"]["shape"]
        == outputs["status"]["shape"]
        == [len(outputs["status"]["data"]), 1]
    )
    return outputs["rewards"]["data"], outputs["status"]["data"]


def infer(server: ToyServer, **arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Score by tritonclient, with binary tensors."""
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=60) as client:
        inputs = []
        for name, array in arrays.items():
            datatype = "BYTES" if array.dtype == object else "INT64"
            inputs.append(triton.InferInput(name, list(array.shape), datatype))
            inputs[-1].set_data_from_numpy(array)
        answer = client.infer("reward_model", inputs)
        return answer.as_numpy("rewards")[:, 0], answer.as_numpy("status")[:, 0]


def infer_sequences(server: ToyServer, sequences: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    tokens, lengths = padded(sequences)
    return infer(server, tokens=tokens, sequence_lengths=lengths)


def test_curl_scores_tokens_as_the_scorer_does(server):
    sequences = [[5, 6, 7], [9], [1, 2]]
    code, body = curl(server, json_inputs(*padded(sequences)))
    assert code == 200
    rewards, status = outputs_of(body)
    assert status == [0, 0, 0]
    np.testing.assert_allclose(rewards, direct(sequences), rtol=1e-6)


def test_curl_scores_sentences_as_the_scorer_does(server, tokenizer):
    texts = ["hello", "a cat sat"]
    code, body = curl(server, sentence_inputs(texts))
    assert code == 200
    rewards, status = outputs_of(body)
    assert status == [0, 0]
    np.testing.assert_allclose(rewards, direct(tokenizer(texts)["input_ids"]), rtol=1e-6)


def test_tritonclient_agrees_with_the_scorer_in_both_forms(server, tokenizer):
    texts = ["hello", "a cat sat"]
    sequences = tokenizer(texts)["input_ids"]
    by_tokens, status = infer_sequences(server, sequences)
    by_text, text_status = infer(
        server, sentences=np.array([[text.encode()] for text in texts], object)
    )
    assert status.tolist() == text_status.tolist() == [0, 0]
    assert by_tokens.tolist() == by_text.tolist() == direct(sequences)


def test_padding_does_not_matter(server):
    tokens, lengths = padded([[5, 6, 7], [9]])
    wide = np.full((2, 20), 77, np.int64)
    wide[0, :3] = [5, 6, 7]
    wide[1, :1] = [9]
    narrow_rewards, _ = infer(server, tokens=tokens, sequence_lengths=lengths)
    wide_rewards, _ = infer(server, tokens=wide, sequence_lengths=lengths)
    assert narrow_rewards.tolist() == wide_rewards.tolist()


def test_each_bad_token_sample_fails_alone(server):
    width = MAX_LENGTH + 4
    tokens = np.ones((8, width), np.int64)
    tokens[3, 1] = VOCAB_SIZE
    tokens[4, 0] = -1
    tokens[7, 0] = TOKEN_NAN
    lengths = np.array([[4], [0], [MAX_LENGTH + 1], [4], [4], [width + 1], [-1], [4]])
    rewards, status = infer(server, tokens=tokens, sequence_lengths=lengths)
    expected = [
        base.STATUS_OK,
        base.STATUS_EMPTY,
        base.STATUS_TOO_LONG,
        base.STATUS_BAD_TOKEN,
        base.STATUS_BAD_TOKEN,
    ]
    expected += [base.STATUS_BAD_LENGTH, base.STATUS_BAD_LENGTH, base.STATUS_NOT_FINITE]
    assert status.tolist() == expected
    assert rewards[0] == direct([[1] * 4, [TOKEN_NAN, 1, 1, 1]])[0]
    assert np.isnan(rewards[1:]).all()


def test_each_bad_text_fails_alone(server, tokenizer):
    texts = [b"good", b"", b"\xff\xfe", b"x" * (MAX_LENGTH + 1)]
    rewards, status = infer(server, sentences=np.array([[text] for text in texts], object))
    assert status.tolist() == [
        base.STATUS_OK,
        base.STATUS_EMPTY,
        base.STATUS_BAD_TEXT,
        base.STATUS_TOO_LONG,
    ]
    assert rewards[0] == direct([tokenizer("good")["input_ids"]])[0]
    assert np.isnan(rewards[1:]).all()


def test_a_model_that_raises_gives_a_status_and_goes_on(server):
    rewards, status = infer_sequences(server, [[1, 2], [TOKEN_RAISE, 1]])
    assert status.tolist() == [base.STATUS_OK, base.STATUS_INTERNAL]
    assert rewards[0] == direct([[1, 2]])[0]
    assert np.isnan(rewards[1])
    assert infer_sequences(server, [[1, 2]])[0].tolist() == direct([[1, 2]])


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (json_inputs(*padded([[1, 2]]), datatype="INT32"), "the datatype of 'tokens' is not INT64"),
        (json_inputs(*padded([[1, 2]]))[:1], "this request holds ['tokens']"),
        (
            json_inputs(*padded([[1, 2]])) + sentence_inputs(["a"]),
            "this model reads tokens or text",
        ),
        (json_inputs(*padded([[1, 2]] * 9)), "<= 8"),
        ([], "this request holds []"),
    ],
    ids=["wrong type", "no lengths", "both forms", "too many samples", "no inputs"],
)
def test_a_malformed_request_is_refused_and_the_server_stays_up(server, inputs, text):
    code, body = curl(server, inputs)
    assert code == 400
    assert text in body["error"]
    assert infer_sequences(server, [[1, 2]])[0].tolist() == direct([[1, 2]])


def test_scores_do_not_depend_on_other_clients(server):
    """The toy's scores change with the number of samples in a call: merged requests would show."""
    rng = np.random.default_rng(0)
    requests = [rng.integers(0, 100, (1 + i % 4, 6)).tolist() for i in range(24)]
    alone = [infer_sequences(server, request)[0].tolist() for request in requests]
    with ThreadPoolExecutor(8) as pool:
        together = list(
            pool.map(lambda request: infer_sequences(server, request)[0].tolist(), requests)
        )
    assert together == alone == [direct(request) for request in requests]


def test_the_server_describes_itself(server, tokenizer):
    code, body = curl(server, [], model="reward_server_info")
    assert code == 200
    info = ServerInfo.from_json(body["outputs"][0]["data"][0])
    assert info.name == "reward_model"
    assert info.max_batch_size == 8
    assert info.max_length == MAX_LENGTH
    assert info.vocab_size == VOCAB_SIZE
    assert info.tokenizer == TokenizerInfo.from_tokenizer(tokenizer)


def test_only_the_front_door_listens_and_on_the_loopback(server):
    listening = [
        c.laddr
        for p in server.descendants
        for c in p.net_connections("tcp")
        if c.status == "LISTEN"
    ]
    addresses = [(address.ip, address.port) for address in listening]
    assert addresses == [("127.0.0.1", server.port)]


@pytest.mark.parametrize("meeting_host", [None, "192.0.2.7"], ids=["alone", "rank 0"])
def test_a_free_port_is_in_the_ready_file(tmp_path, monkeypatch, meeting_host):
    if meeting_host is not None:
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setenv("MASTER_ADDR", meeting_host)
    everywhere = ("inference.port=0", "inference.host=0.0.0.0", "inference.allow_no_token=true")
    with ToyServer(tmp_path, *everywhere) as server:
        published = json.loads(server.ready_file.read_text())
        assert published["pid"] == server.server_pid
        assert published["port"] not in (0, server.port)
        server.port = published["port"]
        assert meeting_host in (None, published["host"])
        reachable = [published["host"]] if meeting_host is None else []
        for host in (*reachable, "127.0.0.1"):
            answer = subprocess.run(
                ["curl", "-fsS", f"http://{host}:{server.port}/v2/health/ready"],
                capture_output=True,
                timeout=30,
            )
            assert answer.returncode == 0, answer.stderr
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert wait_for(lambda: not server.left_behind()), server.left_behind()


def test_sigterm_lets_calls_finish_and_leaves_nothing(server):
    """The last test of this file, since it ends the server.

    An idle connection must not delay the stop.
    """
    curl(server, sentence_inputs([SECRET]))
    curl(server, sentence_inputs([SECRET * 9]))  # a bad one is logged
    answers = []
    call = threading.Thread(
        target=lambda: answers.append(infer_sequences(server, [[TOKEN_SLOW, 1]]))
    )
    with socket.create_connection(("127.0.0.1", server.port)) as idle:
        idle.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in idle.recv(1000)
        call.start()
        time.sleep(SLOW_SECONDS / 3)
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(60) == 0
    call.join(5)
    rewards, status = answers[0]
    assert status.tolist() == [0]
    assert math.isclose(rewards[0], direct([[TOKEN_SLOW, 1]])[0], rel_tol=1e-6)
    assert wait_for(lambda: not server.left_behind()), server.left_behind()
    log = Path(server.log).read_text()
    assert "event=stopped signal=SIGTERM" in log
    assert "Timeout 0:" not in log  # Triton waits so long for an open connection
    assert SECRET not in log
