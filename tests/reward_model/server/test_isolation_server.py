"""On a real server, requests that Triton merges with a bad request get their right scores."""

from __future__ import annotations

import asyncio
import json
import re
import struct
from collections import Counter

import numpy as np
import pytest
from aiohttp import ClientSession, ClientTimeout
from helpers.http_call import call
from helpers.toy_server import ToyServer
from helpers.wire_requests import Draft, RequestFuzzer, WireRequest, int_tensor, text_tensor

pytestmark = pytest.mark.more

pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")

DELAY = 30.0  # milliseconds in which eight requests arrive and are merged


@pytest.fixture(scope="module")
def server_options():
    """All requests of a batch share one call of the model, so a bad one is next to others."""
    options = ["deterministic=false", f"max_queue_delay_ms={DELAY}", "max_batch_size=64"]
    return [f"inference.{option}" for option in options]


async def send(session: ClientSession, port: int, request: WireRequest) -> tuple[int, bytes]:
    url = f"http://127.0.0.1:{port}/v2/models/reward_model/infer"
    async with session.post(url, data=request.body, headers=request.headers) as answer:
        return answer.status, await answer.read()


async def send_batches(
    port: int, batches: list[list[WireRequest]]
) -> list[list[tuple[int, bytes]]]:
    async with ClientSession(timeout=ClientTimeout(120)) as session:
        answers = []
        for batch in batches:
            calls = [send(session, port, draft) for draft in batch]
            answers.append(await asyncio.gather(*calls))
        return answers


def outputs_of(body: bytes) -> dict[str, list]:
    return {output["name"]: output["data"] for output in json.loads(body)["outputs"]}


def check_right(request: WireRequest, answer: tuple[int, bytes], bad: WireRequest) -> None:
    code, body = answer
    assert code == 200, (bad, code, body)
    outputs = outputs_of(body)
    assert outputs["status"] == [0] * len(request.scores), (bad, outputs)
    np.testing.assert_allclose(outputs["rewards"], request.scores, rtol=1e-5, err_msg=str(bad))


def merged_requests(server: ToyServer) -> tuple[float, float]:
    """Return the number of requests with code 200, and the number of their batches."""
    text = call(server.port, "/metrics").body.decode()
    matches = [re.search(rf"^{name} (\S+)$", text, re.M) for name in REQUESTS_AND_BATCHES]
    return tuple(float(match.group(1)) if match else 0.0 for match in matches)


REQUESTS_AND_BATCHES = (
    r'reward_server_requests_total\{code="200"\}',
    "reward_server_model_batches_total",
)


def texts(**columns: list[bytes]) -> list[dict]:
    return [text_tensor(name, column) for name, column in columns.items()]


def lie(texts: list[dict], raw: bytes) -> list[dict]:
    return [{**texts[0], "data": raw}, *texts[1:]]


HI = texts(prompts=[b"hi"], responses=[b"a"])
SPOKEN = texts(prompts=[b"hi"], responses=[b"a"], messages=[b""])
LONG = struct.pack("<I", 999) + b"hi"
SHORT = struct.pack("<I", 1) + b"hi"
ROW = [int_tensor("tokens", [[5, 6]]), int_tensor("sequence_lengths", [[2]])]


def ids(data: list) -> Draft:
    return Draft([{**ROW[0], "data": data}, ROW[1]], False)


def said(**message: object) -> list[dict]:
    conversation = [{"role": "user", "content": "hi", **message}]
    return [
        *HI,
        *texts(messages=[json.dumps(conversation).encode()]),
    ]


REFUSED = {
    "a text's length beyond the tensor": Draft(lie(HI, LONG)),
    "a text's length below the tensor's": Draft(lie(HI, SHORT)),
    "a sentence's length": Draft(lie(texts(sentences=[b"hi"]), LONG)),
    "no width": Draft([int_tensor("tokens", [[]]), ROW[1]]),
    "no width in JSON": Draft([int_tensor("tokens", [[]]), ROW[1]], False),
    "no samples": Draft([{**tensor, "shape": [0, 1], "data": []} for tensor in ROW], False),
    "two forms": Draft([*HI, *ROW]),
    "two other forms": Draft([*texts(sentences=[b"a"]), *ROW], False),
    "a float": ids([5, 6.5]),
    "a whole float": ids([5, 6.0]),
    "2^63": ids([5, 2**63]),
    "a huge number": ids([5, 10**400]),
    "an overflowing float": ids([5, "HUGE"]),
    "null": ids([5, None]),
    "true": ids([5, True]),
    "a text for a number": ids([5, "6"]),
    "a number for a text": Draft([{**texts(sentences=[b""])[0], "data": [6]}], False),
    "classes for scores": Draft(
        ROW, rest={"outputs": [{"name": "rewards", "parameters": {"classification": 1}}]}
    ),
    "an unknown output": Draft(ROW, rest={"outputs": [{"name": "none"}]}),
    "numbers of 4 bytes": Draft([{**ROW[0], "datatype": "INT32"}, ROW[1]], False),
    "an unknown input": Draft([*ROW, *texts(unknown=[b"a"])]),
    "an input that is missing": Draft(ROW[:1]),
    "an input twice": Draft([*ROW, ROW[0]]),
    "other numbers of samples": Draft([int_tensor("tokens", [[5, 6]] * 2), ROW[1]]),
}
ANSWERED = {
    "half a surrogate pair": (Draft(said(content="\ud800")), [9]),
    "tool_calls": (Draft(said(tool_calls=5)), [9]),
    "half a pair, plainly": (
        Draft([{**texts(sentences=[b""])[0], "data": ["\ud800"]}], False),
        [5],
    ),
    "a time limit": (Draft(ROW, rest={"parameters": {"timeout": -1}}), None),
}


@pytest.mark.parametrize(
    ("draft", "expected"),
    [*((draft, 400) for draft in REFUSED.values()), *ANSWERED.values()],
    ids=[*REFUSED, *ANSWERED],
)
def test_a_bad_request_is_refused_and_its_neighbours_are_scored(server, draft, expected):
    bad = draft.write()
    bad = WireRequest(bad.body.replace(b'"HUGE"', b"1e999"), bad.headers)
    form = (
        "sentences" if b"sentences" in bad.body else "text" if b"prompts" in bad.body else "tokens"
    )
    optional = ["messages"] if b"messages" in bad.body else []
    fuzzer = RequestFuzzer(1)
    good = [fuzzer.right(form, 2, optional) for _ in range(7)]
    for _ in range(2):  # in the second round, connections are open
        batches = [[bad, *good]]
        ((first, *others),) = asyncio.run(send_batches(server.port, batches))
        for request, answer in zip(good, others, strict=True):
            check_right(request, answer, bad)
        code, body = first
        assert b"Traceback" not in body and b'File "' not in body, body
        if isinstance(expected, int):
            assert code == expected, body
            assert json.loads(body)["error"]
        elif expected is not None:
            assert code == 200, body
            assert outputs_of(body)["status"] == expected


def fuzz(server: ToyServer, rounds: int, seed: int) -> None:
    fuzzer = RequestFuzzer(seed)
    codes = Counter()
    kinds = Counter()
    before = merged_requests(server)
    for _ in range(rounds):
        batch = fuzzer.batch(good=7)
        (answers,) = asyncio.run(send_batches(server.port, [batch]))
        code, body = answers[0]
        codes[code] += 1
        kinds[batch[0].fault] += 1
        assert code in (200, 400, 413, 415), (batch[0], code, body)
        assert b"Traceback" not in body and b'File "' not in body, (batch[0], body)
        for request, answer in zip(batch[1:], answers[1:], strict=True):
            check_right(request, answer, batch[0])
    requests, batches = np.subtract(merged_requests(server), before)
    per_batch = requests / batches
    print(f"seed {seed}: bad answers by code {dict(codes)}, {per_batch:.1f} requests in a batch")
    assert codes[400] > rounds / 10
    assert codes[200] > rounds / 10
    assert per_batch > 3  # requests were merged


def test_one_bad_request_among_seven_good(server):
    fuzz(server, 100, seed=18)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_one_bad_request_among_seven_good_a_thousand_times(server):
    fuzz(server, 1000, seed=1800)
