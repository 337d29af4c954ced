"""How the front door reads a request and rewrites it for Triton."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from helpers.wire_requests import arrays_of

from reinforce_rl.config.rewards import InferenceConfig
from reinforce_rl.reward_model.server.admission import FrontSettings, Refusal
from reinforce_rl.reward_model.server.request import read_request
from reinforce_rl.rewards import wire

triton = pytest.importorskip("tritonclient.http")

LIMITS = FrontSettings(
    inference=InferenceConfig(max_batch_size=8), max_request_bytes=10_000, max_sequence_length=64
)
ALL_FORMS = (wire.TOKENS_FORM, wire.TEXT_FORM)


def body_of(*inputs: dict, **rest) -> bytes:
    return json.dumps({"inputs": list(inputs), **rest}).encode()


def tensor(shape, data, name="tokens", datatype="INT64", **rest) -> dict:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data, **rest}


def output_with(parameter: str) -> dict:
    return {"name": "rewards", "parameters": {parameter: 1}}


def binary(shape, size: int, name="tokens", datatype="INT64") -> dict:
    return {
        "name": name,
        "datatype": datatype,
        "shape": shape,
        "parameters": {"binary_data_size": size},
    }


def samples_of(body: bytes, header: str | None) -> int:
    """Return the request's samples, after a check that Triton can read the rewritten request."""
    request = read_request(body, header, LIMITS, ALL_FORMS)
    arrays_of(request)
    return request.samples


def lengths(count: int) -> dict:
    return tensor([count, 1], [1] * count, "sequence_lengths")


def refused(body: bytes, header: str | None = None) -> str:
    with pytest.raises(Refusal) as caught:
        samples_of(body, header)
    assert caught.value.code in (400, 413)
    return caught.value.text


def with_tail(tensors: list[dict], tail: bytes) -> tuple[bytes, str]:
    text = body_of(*tensors)
    return text + tail, str(len(text))


def test_what_tritonclient_sends_is_let_through():
    inputs = [
        triton.InferInput("tokens", [3, 5], "INT64"),
        triton.InferInput("sequence_lengths", [3, 1], "INT64"),
    ]
    inputs[0].set_data_from_numpy(np.ones((3, 5), np.int64))
    inputs[1].set_data_from_numpy(np.ones((3, 1), np.int64))
    body, json_size = triton.InferenceServerClient.generate_request_body(inputs)
    assert samples_of(body, str(json_size)) == 3
    inputs = [triton.InferInput("sentences", [2, 1], "BYTES")]
    for as_binary in (True, False):
        inputs[0].set_data_from_numpy(np.array([["a"], ["bc"]], object), binary_data=as_binary)
        outputs = [triton.InferRequestedOutput("rewards", binary_data=as_binary)]
        body, json_size = triton.InferenceServerClient.generate_request_body(
            inputs, outputs=outputs, request_id="7"
        )
        assert samples_of(body, None if json_size is None else str(json_size)) == 2


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]]], ids=["flat", "nested"])
def test_json_data_may_be_flat_or_nested(data):
    body = body_of(tensor([2, 2], data), lengths(2))
    assert samples_of(body, None) == 2
    assert arrays_of(read_request(body, None, LIMITS, ALL_FORMS))["tokens"].tolist() == [
        [1, 2],
        [3, 4],
    ]


def test_a_model_without_inputs_has_no_samples():
    assert read_request(body_of(), None, LIMITS, ()).samples == 0
    with pytest.raises(
        Refusal, match=r"this model reads no input; this request holds \['sequence_lengths'\]"
    ):
        read_request(body_of(lengths(1)), None, LIMITS, ())


def test_what_is_asked_of_the_answer_is_passed_on_and_nothing_else():
    output = {"name": "rewards", "parameters": {"binary_data": True, "more": 1}}
    rest = {
        "id": "7",
        "outputs": [output],
        "parameters": {"timeout": -1, "binary_data_output": False},
        "more": [{}],
    }
    request = read_request(
        body_of(tensor([1, 1], [1]), lengths(1), **rest), None, LIMITS, ALL_FORMS
    )
    written = json.loads(request.body[: request.json_length])
    names = [tensor["name"] for tensor in written.pop("inputs")]
    assert names == ["tokens", "sequence_lengths"]
    assert written == {
        "id": "7",
        "outputs": [{"name": "rewards", "parameters": {"binary_data": True}}],
        "parameters": {"binary_data_output": False},
    }


def test_texts_are_written_as_they_were_and_half_a_pair_as_bytes_that_are_no_text():
    texts = ["", "\u00fc\U0001f600\0", "\ud800"]
    body = body_of(tensor([3, 1], texts, "sentences", "BYTES"))
    sentences = arrays_of(read_request(body, None, LIMITS, ALL_FORMS))["sentences"][:, 0].tolist()
    assert sentences == [text.encode("utf-8", "surrogatepass") for text in texts]


@pytest.mark.parametrize(
    ("shape", "data", "text"),
    [
        ([2**40, 1], [1], "batch size must be <= 8"),
        ([9, 1], [1] * 9, "claims 9 samples"),
        ([1, 65], [1] * 65, "max_sequence_length"),
        ([8, 64], [1], "claims 512 elements"),
        ([1, 3], [1, 2], r"claims 3 elements (shape [1, 3]) and has 2"),
        ([1, 2], [[[1, 2]]], "nested deeper than its shape"),
        ([1, -1], [1], "1 or more"),
        ([True, 1], [1], "1 or more"),
        ([0, 1], [], "1 or more"),
        ([1, 0], [], "1 or more"),
        ([1], [1], "1 or more"),
        ([1, 1], [{}], "not a whole number"),
        ([1, 1], [1.0], "not a whole number"),
        ([1, 1], [True], "not a whole number"),
        ([1, 1], [2**63], "64 bits cannot"),
        ([1, 1], [-(10**400)], "64 bits cannot"),
        ([1, 1], [1], "this request holds ['tokens']"),
        ([1, 1], 5, "is not a list"),
    ],
)
def test_a_tensor_that_is_refused(shape, data, text):
    assert text in refused(body_of(tensor(shape, data)))


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        ({"id": "\ud800"}, "'id'"),
        ({"id": 5}, "'id'"),
        ({"parameters": 5}, "'parameters'"),
        ({"parameters": {"binary_data_output": 1}}, "neither true nor false"),
        ({"outputs": [{"name": "x"}]}, "the output 'x' is unknown"),
        ({"outputs": [output_with("shared_memory_region")]}, "shared"),
        ({"outputs": [output_with("classification")]}, "classification"),
    ],
)
def test_what_is_refused_besides_the_inputs(rest, text):
    assert text in refused(body_of(tensor([1, 1], [1]), lengths(1), **rest))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (body_of(tensor([1, 1], [7])).replace(b"7", b"1e999"), "not a whole number"),
        (body_of(tensor([1, 1], [7])).replace(b"7", b"NaN"), "not a whole number"),
        (body_of(tensor([1, 1], [7], "sentences", "BYTES")), "not a string"),
        (
            body_of(tensor([1, 1], [1]), lengths(1), tensor([1, 1], ["a"], "sentences", "BYTES")),
            "this request holds",
        ),
        (body_of(tensor([2, 1], [1, 2]), lengths(1)), "different numbers of samples: [1, 2]"),
        (body_of(lengths(1), lengths(1)), "there twice"),
        (body_of(tensor([1, 1], [1], "x")), "'x' is unknown"),
        (body_of(tensor([1, 2], [1, 2], "sequence_lengths")), "expected [samples, 1]"),
        (body_of(tensor([1, 1], [1], datatype="INT65")), "the datatype of 'tokens' is not INT64"),
        (body_of(tensor([1, 1], [1], parameters={"shared_memory_region": "x"})), "shared memory"),
        (body_of(tensor([1, 1], [1], parameters={"binary_data_size": 8})), "'data' as well"),
        (body_of(*[tensor([1, 1], [1])] * 17), "at most 16"),
        (b'{"inputs": []', "not a JSON object"),
        (b"\xff\xfe{}", "not a JSON object in UTF-8"),
        (b"[]", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (body_of(tensor([7], [1])).replace(b"7", b"9" * 5000), "digits"),
    ],
)
def test_what_is_refused(body, text):
    assert text in refused(body)


def test_binary_sizes_must_fit_shape_and_body():
    tail = struct.pack("<4q", 5, 6, 1, 1)
    body, header = with_tail([binary([2, 1], 16), binary([2, 1], 16, "sequence_lengths")], tail)
    assert samples_of(body, header) == 2
    assert "needs 16 bytes" in refused(*with_tail([binary([2, 1], 8)], b"x" * 8))
    assert "differs from the bytes after the JSON object by 1" in refused(
        *with_tail([binary([2, 1], 16)], b"x" * 15)
    )
    assert "differs" in refused(*with_tail([binary([2, 1], 16)], b"x" * 17))
    assert "number of 0 or more" in refused(*with_tail([binary([2, 1], -16)], b""))


@pytest.mark.parametrize(
    ("count", "tail"),
    [
        (1, b"\3\0\0\0ab"),
        (1, b"\1\0\0\0ab"),
        (1, b"\xff\xff\xff\xffab"),
        (1, b"\0\0\0\0\0\0\0\0"),
        (2, b"\6\0\0\0\2\0\0\0ab"),
        (2, b"\2\0\0\0ababc"),
        (2, b"\2\0\0\0ab"),
        (1, b""),
    ],
)
def test_lengths_inside_a_tensor_of_texts_must_fit(count, tail):
    """A text follows its length in four bytes."""
    body, header = with_tail([binary([count, 1], len(tail), "sentences", "BYTES")], tail)
    assert "the lengths of the texts of 'sentences' do not come to" in refused(body, header)


@pytest.mark.parametrize("header", ["-1", "1e3", "999999", "9" * 30, "", "٣", "0x10"])
def test_a_lie_about_the_json_is_refused(header):
    assert "Inference-Header-Content-Length" in refused(body_of(), header)
