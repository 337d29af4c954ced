"""Seeded requests to a reward server: invalid in many ways, with valid ones in between."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass

HEADER_LENGTH = "Inference-Header-Content-Length"
WRONG_VALUES = (
    None,
    True,
    -1,
    0,
    2**40,
    2**63,
    10**400,
    1.5,
    "1",
    "",
    [],
    {},
    [[]],
    [None],
    "\udfff",
    "ü" * 9,
)
DATATYPES = (
    "INT64",
    "INT32",
    "FP32",
    "FP64",
    "BYTES",
    "BOOL",
    "UINT8",
    "FP16",
    "BF16",
    "INT65",
    "",
    "int64",
)
SHAPES = (
    [],
    [0],
    [1],
    [2**40],
    [2**62, 2**62],
    [1, 0],
    [0, 1],
    [1, -1],
    [3, 3, 3],
    [1] * 9,
    [1.5, 1],
    ["1", 1],
    [None],
)


@dataclass(frozen=True)
class FuzzedRequest:
    """A request as it is sent.

    Attributes:
        body: the HTTP body.
        headers: headers besides Content-Length.
        claimed: the Content-Length, if it differs from the body's.
        sequences: the samples of a valid request; None for an invalid one.
    """

    body: bytes
    headers: dict[str, str]
    claimed: int | None = None
    sequences: list[list[int]] | None = None


def fuzzed_requests(
    count: int, seed: int, *, vocab_size: int, max_samples: int, max_length: int
) -> Iterator[FuzzedRequest]:
    """Yield `count` requests, every fourth valid."""
    rng = random.Random(seed)
    for index in range(count):
        sequences = [
            [rng.randrange(100) for _ in range(rng.randint(1, max_length))]
            for _ in range(rng.randint(1, max_samples))
        ]
        if index % 4 == 0:
            make = rng.choice((_in_json, _in_binary))
            body, headers = make(_tensors(sequences))
            yield FuzzedRequest(body, headers, sequences=sequences)
        else:
            yield rng.choice(_WRONG)(rng, sequences, vocab_size)


def _tensors(sequences: list[list[int]]) -> list[dict]:
    width = max(map(len, sequences))
    data = [token for row in sequences for token in row + [0] * (width - len(row))]
    return [
        {"name": "tokens", "datatype": "INT64", "shape": [len(sequences), width], "data": data},
        {
            "name": "sequence_lengths",
            "datatype": "INT64",
            "shape": [len(sequences), 1],
            "data": [len(row) for row in sequences],
        },
    ]


def _in_json(tensors: object) -> tuple[bytes, dict[str, str]]:
    return json.dumps({"inputs": tensors}).encode(), {}


def _in_binary(tensors: list[dict]) -> tuple[bytes, dict[str, str]]:
    header = []
    tail = b""
    for tensor in tensors:
        part = struct.pack(f"<{len(tensor['data'])}q", *tensor["data"])
        header.append({**tensor, "parameters": {"binary_data_size": len(part)}})
        del header[-1]["data"]
        tail += part
    text = json.dumps({"inputs": header}).encode()
    return text + tail, {HEADER_LENGTH: str(len(text))}


def _wrong_value(rng: random.Random, sequences: list[list[int]], _: int) -> FuzzedRequest:
    """Change one key of one tensor, in JSON or in a binary header."""
    tensors = _tensors(sequences)
    tensor = rng.choice(tensors)
    key = rng.choice(("name", "datatype", "shape", "data", "parameters"))
    tensor[key] = rng.choice(WRONG_VALUES + (DATATYPES if key == "datatype" else SHAPES))
    return FuzzedRequest(*_in_json(tensors))


def _wrong_data(rng: random.Random, sequences: list[list[int]], _: int) -> FuzzedRequest:
    """Return one invalid, extra or missing element."""
    tensors = _tensors(sequences)
    data = rng.choice(tensors)["data"]
    place = rng.randrange(len(data))
    if rng.random() < 0.7:
        data[place] = rng.choice(WRONG_VALUES)
    elif rng.random() < 0.5:
        del data[place]
    else:
        data.insert(place, 1)
    return FuzzedRequest(*_in_json(tensors))


def _wrong_ids(rng: random.Random, sequences: list[list[int]], vocab_size: int) -> FuzzedRequest:
    """Return samples with ids outside the vocabulary or wrong lengths, which get a status."""
    tensors = _tensors(sequences)
    tensor = rng.choice(tensors)
    tensor["data"][rng.randrange(len(tensor["data"]))] = rng.choice(
        (vocab_size, -1, 2**63 - 1, -(2**63), vocab_size + 7)
    )
    return FuzzedRequest(*rng.choice((_in_json, _in_binary))(tensors))


def _wrong_binary(rng: random.Random, sequences: list[list[int]], _: int) -> FuzzedRequest:
    """Return sizes, shapes and types that disagree with the bytes."""
    body, headers = _in_binary(_tensors(sequences))
    length = int(headers[HEADER_LENGTH])
    request = json.loads(body[:length])
    tail = body[length:]
    tensor = rng.choice(request["inputs"])
    choice = rng.randrange(5)
    if choice == 0:
        tensor["parameters"]["binary_data_size"] = rng.choice(
            (0, -8, 7, 2**40, 2**63, "8", None, [8])
        )
    elif choice == 1:
        tensor["shape"] = rng.choice(SHAPES)
    elif choice == 2:
        tensor["datatype"] = rng.choice(DATATYPES)
    elif choice == 3:
        tail = (
            tail[: rng.randrange(len(tail))]
            if rng.random() < 0.5
            else tail + b"x" * rng.randint(1, 99)
        )
    else:
        tensor["data"] = [1]
    text = json.dumps(request).encode()
    return FuzzedRequest(text + tail, {HEADER_LENGTH: str(len(text))})


def _wrong_header(rng: random.Random, sequences: list[list[int]], _: int) -> FuzzedRequest:
    """Return a wrong JSON length or content type."""
    body, headers = rng.choice((_in_json, _in_binary))(_tensors(sequences))
    if rng.random() < 0.8:
        lie = rng.choice(
            ("-1", "0", "1", str(len(body)), str(len(body) + 1), "9" * 25, "x", "1.5", " ", "0x10")
        )
        headers = {**headers, HEADER_LENGTH: lie}
    else:
        headers = {**headers, "Content-Encoding": rng.choice(("gzip", "deflate", "br", "x"))}
    return FuzzedRequest(body, headers)


def _wrong_json(rng: random.Random, sequences: list[list[int]], _: int) -> FuzzedRequest:
    """Return invalid JSON, or JSON that is not a request."""
    body, _headers = _in_json(_tensors(sequences))
    choice = rng.randrange(6)
    if choice == 0:
        body = body[: rng.randrange(len(body))]
    elif choice == 1:  # overwrite some bytes
        mutable = bytearray(body)
        for _ in range(rng.randint(1, 8)):
            mutable[rng.randrange(len(mutable))] = rng.randrange(256)
        body = bytes(mutable)
    elif choice == 2:
        body = rng.choice((b"[", b'{"a":', b'{"inputs":[')) * rng.choice((10, 1000, 50_000))
    elif choice == 3:
        body = rng.randbytes(rng.randrange(200))
    elif choice == 4:
        body = json.dumps(rng.choice(WRONG_VALUES)).encode()
    else:
        body = body.replace(
            b"[", rng.choice((b"[NaN, ", b"[Infinity, ", b"[-Infinity, ", b"[1e999, ")), 2
        )
    return FuzzedRequest(body, {})


def _wrong_text(rng: random.Random, sequences: list[list[int]], _: int) -> FuzzedRequest:
    """Return texts that are empty, too long, not UTF-8 or have wrong lengths."""
    texts = [
        rng.choice((b"", b"\xff\xfe", b"a" * 50, b"\xed\xa0\x80", b"\x00", "ü😀".encode()))
        for _ in sequences
    ]
    tail = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if rng.random() < 0.4:
        place = rng.randrange(len(tail))
        tail = tail[:place] + rng.randbytes(4) + tail[place + 4 :]
    tensor = {
        "name": "sentences",
        "datatype": "BYTES",
        "shape": [len(texts), 1],
        "parameters": {"binary_data_size": len(tail)},
    }
    text = json.dumps({"inputs": [tensor]}).encode()
    return FuzzedRequest(text + tail, {HEADER_LENGTH: str(len(text))})


def _wrong_set(rng: random.Random, sequences: list[list[int]], _: int) -> FuzzedRequest:
    """Return missing, duplicate or extra inputs, or other malformed parts."""
    tensors = _tensors(sequences)
    choice = rng.randrange(5)
    if choice == 0:
        tensors.pop(rng.randrange(2))
    elif choice == 1:
        tensors.append(rng.choice(tensors))
    elif choice == 2:
        tensors = tensors * rng.choice((2, 20))
    elif choice == 3:
        tensors.append(
            {"name": "sentences", "datatype": "BYTES", "shape": [len(sequences), 1], "data": ["a"]}
        )
    request = {"inputs": tensors}
    if choice == 4:
        key = rng.choice(("id", "outputs", "parameters"))
        request[key] = rng.choice(
            (
                *WRONG_VALUES,
                [{"name": "rewards", "parameters": {"classification": 3}}],
                [{"name": "none"}],
                {"sequence_id": 3, "sequence_start": True},
                {"binary_data_output": True},
                {"priority": 2**63},
                {"timeout": -1},
            )
        )
    return FuzzedRequest(json.dumps(request).encode(), {})


def _wrong_length(rng: random.Random, sequences: list[list[int]], _: int) -> FuzzedRequest:
    """Return a Content-Length of a gigabyte, or one that the body does not reach."""
    body, headers = _in_binary(_tensors(sequences))
    return FuzzedRequest(
        body, headers, claimed=rng.choice((10**9, 2**62, len(body) + rng.randint(1, 100)))
    )


_WRONG = (
    _wrong_value,
    _wrong_value,
    _wrong_data,
    _wrong_ids,
    _wrong_binary,
    _wrong_binary,
    _wrong_header,
    _wrong_json,
    _wrong_text,
    _wrong_set,
    _wrong_length,
)
