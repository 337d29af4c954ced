"""What the front door lets through to Triton."""

from __future__ import annotations

import json

import numpy as np
import pytest

from reinforce_rl.reward.limits import FrontLimits, Refusal, check_length, samples_of

triton = pytest.importorskip("tritonclient.http")

LIMITS = FrontLimits(max_request_bytes=10_000, max_samples=8, max_sequence_length=64)


def body_of(*inputs: dict, **rest) -> bytes:
    return json.dumps({"inputs": list(inputs), **rest}).encode()


def tensor(shape, data, name="tokens", datatype="INT64", **rest) -> dict:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data, **rest}


def binary(shape, size: int, datatype="INT64") -> dict:
    return {"name": "tokens", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}


def refused(body: bytes, header: str | None = None) -> str:
    with pytest.raises(Refusal) as caught:
        samples_of(body, header, LIMITS)
    assert caught.value.code in (400, 413)
    return caught.value.text


def with_tail(header: dict, tail: bytes) -> tuple[bytes, str]:
    text = body_of(header)
    return text + tail, str(len(text))


def test_what_tritonclient_sends_is_let_through():
    inputs = [triton.InferInput("tokens", [3, 5], "INT64"), triton.InferInput("sequence_lengths", [3, 1], "INT64")]
    inputs[0].set_data_from_numpy(np.ones((3, 5), np.int64))
    inputs[1].set_data_from_numpy(np.ones((3, 1), np.int64))
    body, json_size = triton.InferenceServerClient.generate_request_body(inputs)
    assert samples_of(body, str(json_size), LIMITS) == 3
    inputs = [triton.InferInput("sentences", [2, 1], "BYTES")]
    for as_binary in (True, False):
        inputs[0].set_data_from_numpy(np.array([["a"], ["bc"]], object), binary_data=as_binary)
        outputs = [triton.InferRequestedOutput("rewards", binary_data=as_binary)]
        body, json_size = triton.InferenceServerClient.generate_request_body(inputs, outputs=outputs, request_id="7")
        assert samples_of(body, None if json_size is None else str(json_size), LIMITS) == 2


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]]], ids=["flat", "nested"])
def test_json_data_may_be_flat_or_nested(data):
    assert samples_of(body_of(tensor([2, 2], data)), None, LIMITS) == 2
    assert samples_of(body_of(), None, LIMITS) == 0


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (body_of(tensor([2**40], [1])), "batch size must be <= 8"),
        (body_of(tensor([9, 1], [1] * 9)), "claims 9 samples"),
        (body_of(tensor([1, 65], [1] * 65)), "max_sequence_length"),
        (body_of(tensor([8, 64], [1])), "claims 512 elements, the whole request has"),
        (body_of(tensor([1, 3], [1, 2])), r"claims 3 elements (shape [1, 3]) and has 2"),
        (body_of(tensor([1, 2], [[[1, 2]]])), "nested deeper than its shape"),
        (body_of(tensor([1, -1], [1])), "0 or more"),
        (body_of(tensor([True, 1], [1])), "0 or more"),
        (body_of(tensor([1, 1], [{}])), "holds an object"),
        (body_of(tensor([1, 1], 5)), "is no list"),
        (body_of(tensor([1, 1], [1], datatype="INT65")), "datatype is none of"),
        (body_of(tensor([1, 1], [1], parameters={"shared_memory_region": "x"})), "shared memory"),
        (body_of(tensor([1, 1], [1]), outputs=[{"name": "r", "parameters": {"shared_memory_region": "x"}}]), "shared"),
        (body_of(tensor([1, 1], [1], parameters={"binary_data_size": 8})), "both 'data' and"),
        (body_of(*[tensor([1, 1], [1])] * 17), "at most 16"),
        (b'{"inputs": [], "inputs": []}', "a key occurs twice"),
        (b'{"inputs": [{"name": "tokens", "datatype": "INT64", "shape": [1, 1], "data": [NaN]}]}', "no NaN"),
        (b'{"inputs": []', "no JSON object"),
        (b"\xff\xfe{}", "no JSON object in UTF-8"),
        (b"[]", "no JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"inputs": [], "parameters": ' + b"[" * 100 + b"]" * 100 + b"}", "nested too deeply"),
        (b'{"inputs": [{"name": "t", "datatype": "INT64", "shape": [' + b"9" * 5000 + b"]}]}", "digits|<= 8"),
    ],
)
def test_what_is_refused(body, text):
    found = refused(body)
    assert any(part in found for part in text.split("|")), found


def test_binary_sizes_must_fit_shape_and_body():
    assert samples_of(*with_tail(binary([2, 1], 16), b"x" * 16), LIMITS) == 2
    assert "needs 16 bytes" in refused(*with_tail(binary([2, 1], 8), b"x" * 8))
    assert "differs from the bytes after the JSON object by 1" in refused(*with_tail(binary([2, 1], 16), b"x" * 15))
    assert "differs" in refused(*with_tail(binary([2, 1], 16), b"x" * 17))
    assert "number of 0 or more" in refused(*with_tail(binary([2, 1], -16), b""))
    assert "needs 8 bytes" in refused(*with_tail(binary([2, 1], 4, "BYTES"), b"x" * 4))


@pytest.mark.parametrize("header", ["-1", "1e3", "999999", "9" * 30, "", "٣", "0x10"])
def test_a_lie_about_the_json_is_refused(header):
    assert "Inference-Header-Content-Length" in refused(body_of(), header)


def test_a_body_has_a_greatest_length():
    check_length(10_000, LIMITS)
    check_length(None, LIMITS)
    with pytest.raises(Refusal, match=r"10001 bytes.*at most 10000"):
        check_length(10_001, LIMITS)
