"""Reward requests as bytes: a writer, a reader, and seeded faults of requests.

All requests of a batch have one form and, for tokens, one width, which Triton requires for merging.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import string
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from helpers.serve_toy_scorer import MAX_LENGTH, TOKEN_NAN, TOKEN_RAISE, VOCAB_SIZE, toy_score
from helpers.tiny_tokenizer import write_tiny_tokenizer
from tritonclient.utils import deserialize_bytes_tensor

from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.reward_model.server.request import TritonRequest
from reinforce_rl.rewards.wire import TEXT_OPTIONAL

HEADER_LENGTH = "Inference-Header-Content-Length"
FORMS = ("tokens", "sentences", "text")
DATATYPES = (
    "INT64",
    "INT32",
    "FP32",
    "FP64",
    "BYTES",
    "BOOL",
    "UINT8",
    "BF16",
    "INT65",
    "int64",
    "",
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
ODD_SIZES = (0, -8, 7, 2**40, 2**63, "8", None, [8])
ODD_IDS = (
    -1,
    0,
    MAX_LENGTH + 1,
    VOCAB_SIZE,
    2**31,
    2**63 - 1,
    -(2**63),
    TOKEN_NAN,
    TOKEN_RAISE,
)
ODD_BYTES = (
    b"",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\x00",
    b"a" * 5000,
    "ü😀".encode(),
    b"\xf0\x9f",
    b"{}",
    b"[]",
)
LONE = "\ud800"
ODD_VALUES = (
    None,
    True,
    False,
    -1,
    0,
    5,
    2**40,
    2**63,
    -(2**63) - 1,
    10**400,
    1.0,
    1.5,
    1e308,
    float("nan"),
    "",
    "1",
    "ü" * 9,
    "a" * 3000,
    LONE,
    [],
    {},
    [[]],
    [None],
    [5],
    {"a": 5},
)
ODD_KEYS = ("role", "content", "tool_calls", "name", "tool_call_id", "reasoning_content", LONE, "")
ODD_PARTS = (  # of a request besides its inputs
    *ODD_VALUES,
    [{"name": "rewards", "parameters": {"classification": 3}}],
    [{"name": "status"}, {"name": "status"}],
    [{"name": "none"}],
    {"sequence_id": 3, "sequence_start": True},
    {"sequence_id": "3"},
    {"priority": 2**63},
    {"priority": 1},
    {"timeout": 1},
    {"timeout": -1},
    {"triton_x": 1},
    {LONE: LONE},
    {"x": 1e308, "y": 2**64, "z": "\u0000"},
)


@dataclass(frozen=True)
class WireRequest:
    """A request as it is sent.

    Attributes:
        body: the HTTP body.
        headers: headers besides Content-Length.
        scores: expected scores of a valid request, float32 [N].
        fault: the fault of an invalid request, for messages of failed tests.
    """

    body: bytes
    headers: dict[str, str]
    scores: np.ndarray | None = None
    fault: str = ""


def binary_request(header: object, tail: bytes) -> WireRequest:
    text = json.dumps(header).encode()
    return WireRequest(text + tail, {HEADER_LENGTH: str(len(text))})


@dataclass
class Draft:
    """A request before encoding: its tensors, whose `data` may be raw bytes, and transport."""

    tensors: list[dict[str, Any]]
    binary: bool = True
    rest: dict[str, Any] = field(default_factory=dict)

    def write(self) -> WireRequest:
        """Write JSON in place of binary tensors if an element has no binary form."""
        lists = [tensor.get("data") for tensor in self.tensors]
        elements = itertools.chain.from_iterable(data for data in lists if isinstance(data, list))
        binary = self.binary and all(map(_has_binary_form, elements))
        inputs = []
        tail = b""
        for tensor in self.tensors:
            entry = dict(tensor)
            data = entry.get("data")
            if binary and isinstance(data, list):
                data = b"".join(map(_packed, data))
            if isinstance(data, bytes):
                del entry["data"]
                entry["parameters"] = {"binary_data_size": len(data)}
                tail += data
            inputs.append(entry)
        request = {"inputs": inputs, **self.rest}
        if binary:
            return binary_request(request, tail)
        decode = functools.partial(bytes.decode, errors="replace")
        return WireRequest(json.dumps(request, default=decode).encode(), {})


def _has_binary_form(value: Any) -> bool:
    return isinstance(value, bytes) or (type(value) is int and abs(value) < 2**63)


def _packed(value: bytes | int) -> bytes:
    if isinstance(value, bytes):
        return struct.pack("<I", len(value)) + value
    return struct.pack("<q", value)


def int_tensor(name: str, rows: list[list[int]]) -> dict[str, Any]:
    data = [value for row in rows for value in row]
    return {"name": name, "datatype": "INT64", "shape": [len(rows), len(rows[0])], "data": data}


def text_tensor(name: str, texts: list[bytes]) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(texts), 1], "data": list(texts)}


def arrays_of(request: TritonRequest) -> dict[str, np.ndarray]:
    """Return the arrays that Triton reads; assert that it can."""
    tail = request.body[request.json_length :]
    arrays = {}
    for tensor in json.loads(request.body[: request.json_length])["inputs"]:
        size = tensor["parameters"]["binary_data_size"]
        part = tail[:size]
        tail = tail[size:]
        is_text = tensor["datatype"] == "BYTES"
        array = deserialize_bytes_tensor(part) if is_text else np.frombuffer(part, "<i8")
        arrays[tensor["name"]] = array.reshape(tensor["shape"])
        assert array.size > 0
        assert tensor["shape"][0] == request.samples
    assert not tail
    return arrays


@functools.cache
def _tokenizer():
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(write_tiny_tokenizer(folder, vocab_size=VOCAB_SIZE))


def toy_encode(text: str) -> list[int]:
    """Return the token ids of a text as the toy server encodes it."""
    return _tokenizer()(text, add_special_tokens=False)["input_ids"]


class RequestFuzzer:
    """Generate requests from a seed.

    Args:
        encode: maps text to token ids.
        score: scores token ids, or whatever else `encode` returns.
        forms: request forms to choose from.
    """

    def __init__(
        self,
        seed: int,
        *,
        encode: Callable[[str], list[Any]] = toy_encode,
        score: Callable[[list[Any]], float] = toy_score,
        forms: tuple[str, ...] = FORMS,
    ):
        self._rng = random.Random(seed)
        self._encode = encode
        self._score = score
        self._forms = forms

    def batch(self, good: int) -> list[WireRequest]:
        """Return an invalid request followed by `good` valid ones."""
        form = self._rng.choice(self._forms)
        width = self._rng.randint(1, MAX_LENGTH)
        num_optional = self._rng.randint(0, len(TEXT_OPTIONAL))
        optional = self._rng.sample(sorted(TEXT_OPTIONAL), num_optional)
        return [
            self._wrong(form, width, optional),
            *(self.right(form, width, optional) for _ in range(good)),
        ]

    def right(self, form: str, width: int, optional: list[str]) -> WireRequest:
        draft, sequences = self._draft(form, width, optional, self._rng.choice((1, 1, 2, 8)))
        scores = np.asarray([self._score(sequence) for sequence in sequences], np.float32)
        return replace(draft.write(), scores=scores)

    def _draft(
        self, form: str, width: int, optional: list[str], count: int
    ) -> tuple[Draft, list[list[Any]]]:
        rng = self._rng
        binary = rng.random() < 0.7
        if form == "tokens":
            sequences = [
                [rng.randrange(100) for _ in range(rng.randint(1, width))] for _ in range(count)
            ]
            rows = [sequence + [0] * (width - len(sequence)) for sequence in sequences]
            lengths = [[len(sequence)] for sequence in sequences]
            return Draft(
                [int_tensor("tokens", rows), int_tensor("sequence_lengths", lengths)], binary
            ), sequences
        texts = [
            "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 8))) for _ in range(count)
        ]
        if form == "sentences":
            draft = Draft([text_tensor("sentences", [text.encode() for text in texts])], binary)
            return draft, [self._encode(text) for text in texts]
        finished = [rng.randrange(2) for _ in texts]
        metadata = {"answer": "4", "deep": [{"a": None}]}
        tensors = {
            "prompts": text_tensor("prompts", [b"hi"] * count),
            "responses": text_tensor("responses", [text.encode() for text in texts]),
            "messages": text_tensor("messages", [b'[{"role": "user", "content": "hi"}]'] * count),
            "metadata": text_tensor("metadata", [json.dumps(metadata).encode()] * count),
            "finished": int_tensor("finished", [[value] for value in finished]),
        }
        if "finished" not in optional:
            finished = [1] * count
        rendered = [
            f"U: hi<eos>A: {text}" + ("<eos>" if end else "")
            for text, end in zip(texts, finished, strict=True)
        ]
        kept = [tensors[name] for name in ("prompts", "responses", *optional)]
        return Draft(kept, binary), [self._encode(text) for text in rendered]

    def _wrong(self, form: str, width: int, optional: list[str]) -> WireRequest:
        rng = self._rng
        draft, _ = self._draft(form, width, optional, rng.choice((1, 2, 3)))
        changes = [self._odd_value] * 6
        changes += [self._odd_element, self._odd_lengths, self._odd_shape, self._odd_key]
        changes += [self._odd_set, self._odd_rest, self._odd_sizes, self._odd_header]
        change = rng.choice([*changes, self._odd_body])
        written = change(draft, rng.choice(draft.tensors)) or draft.write()
        return replace(written, fault=f"{form} {change.__name__}")

    def _odd_value(self, draft: Draft, tensor: dict[str, Any]) -> None:
        """Make a sample that cannot be scored."""
        rng = self._rng
        value = rng.choice((*ODD_BYTES, rng.randbytes(rng.randrange(40))))
        if tensor["datatype"] == "INT64":
            value = rng.choice((*ODD_IDS, TOKEN_NAN, TOKEN_RAISE))
        elif tensor["name"] == "messages" and rng.random() < 0.8:
            value = self._messages()
        elif tensor["name"] == "metadata" and rng.random() < 0.8:
            odd = rng.choice(ODD_VALUES)
            value = self._json(rng.choice((odd, {rng.choice(ODD_KEYS): odd})))
        tensor["data"][rng.randrange(len(tensor["data"]))] = value

    def _messages(self) -> bytes:
        rng = self._rng
        message: Any = {"role": "user", "content": "hi"}
        for _ in range(rng.randint(1, 2)):
            message[rng.choice(ODD_KEYS)] = rng.choice(ODD_VALUES)
        if rng.random() < 0.2:
            message.pop(rng.choice(("role", "content")), None)
        whole = (
            [message] if rng.random() < 0.9 else rng.choice((message, [*ODD_VALUES], [message, 5]))
        )
        return self._json(whole)

    def _json(self, value: Any) -> bytes:
        rng = self._rng
        if rng.random() < 0.15:
            depth = rng.choice((30, 100, 490, 700, 900, 960, 990, 1100, 50_000))
            opening, ending = rng.choice((("[", "]"), ('{"a":', "}")))
            core = opening * depth + "1" + ending * depth
            return rng.choice(
                (core, f'{{"a": {core}}}', f'[{{"role": "user", "content": {core}}}]')
            ).encode()
        raw = json.dumps(value).encode()
        if rng.random() < 0.2:
            raw = raw[: rng.randrange(len(raw) + 1)]
        elif rng.random() < 0.1:
            raw = raw.replace(b"5", rng.choice((b"9" * 4299, b"9" * 5000, b"1e999", b"-Infinity")))
        return raw

    def _odd_element(self, draft: Draft, tensor: dict[str, Any]) -> None:
        """Make JSON with an element of another type, or with one element too many or too few."""
        rng = self._rng
        draft.binary = False
        place = rng.randrange(len(tensor["data"]))
        if rng.random() < 0.8:
            tensor["data"][place] = rng.choice(ODD_VALUES)
        elif rng.random() < 0.5:
            del tensor["data"][place]
        else:
            tensor["data"].insert(place, tensor["data"][place])

    def _odd_lengths(self, draft: Draft, tensor: dict[str, Any]) -> None:
        """Make binary texts with wrong length prefixes but the correct total size."""
        rng = self._rng
        draft.binary = True
        raw = bytearray(b"".join(map(_packed, tensor["data"])))
        lie = rng.choice((0, 1, len(raw), 2**31 - 1, 2**31, 2**32 - 1, rng.randrange(2**32)))
        if rng.random() < 0.6:
            place = rng.choice((0, rng.randrange(len(raw) - 3)))
            raw[place : place + 4] = struct.pack("<I", lie)
        elif rng.random() < 0.5:
            raw += rng.randbytes(rng.randint(1, 9))
        else:
            raw = raw[: -rng.randint(1, min(5, len(raw)))] or raw
        tensor["data"] = bytes(raw)

    def _odd_shape(self, draft: Draft, tensor: dict[str, Any]) -> None:
        rng = self._rng
        choice = rng.randrange(3)
        if choice == 0:
            tensor["shape"] = rng.choice(
                (*SHAPES, [tensor["shape"][0]], [*tensor["shape"], 1], [1, len(tensor["data"])])
            )
        elif choice == 1:  # as many elements in total, no row, or no column
            for entry in draft.tensors:
                num_rows = entry["shape"][0]
                num_columns = entry["shape"][1]
                entry["shape"] = rng.choice(([0, num_columns], [num_rows, 0]))
                entry["data"] = []
        else:
            tensor["datatype"] = rng.choice(DATATYPES)

    def _odd_key(self, draft: Draft, tensor: dict[str, Any]) -> None:
        rng = self._rng
        key = rng.choice(("name", "datatype", "shape", "data", "parameters", LONE))
        tensor[key] = rng.choice(ODD_VALUES)

    def _odd_set(self, draft: Draft, tensor: dict[str, Any]) -> None:
        """Make a missing, duplicate or unknown input, two forms at once, or too many inputs."""
        rng = self._rng
        choice = rng.randrange(5)
        count = tensor["shape"][0]
        others = [
            int_tensor("tokens", [[1, 2]] * count),
            int_tensor("sequence_lengths", [[2]] * count),
        ]
        others += [
            text_tensor(name, [b"a"] * count)
            for name in ("sentences", "prompts", "responses", "unknown")
        ]
        if choice == 0:
            draft.tensors.remove(tensor)
        elif choice == 1:
            draft.tensors.append(tensor)
        elif choice == 2:
            draft.tensors *= 20
        else:
            draft.tensors += rng.sample(others, rng.randint(1, len(others)))
        rng.shuffle(draft.tensors)

    def _odd_rest(self, draft: Draft, _: object) -> None:
        key = self._rng.choice(("id", "outputs", "parameters", "model_name", LONE))
        odd = self._rng.choice(ODD_VALUES)
        of_rewards = {"name": "rewards", "parameters": {"binary_data": odd}}
        draft.rest = {
            key: self._rng.choice((*ODD_PARTS, [of_rewards], {"binary_data_output": odd}))
        }

    def _odd_sizes(self, draft: Draft, _: object) -> WireRequest:
        """Return binary tensors with another size than the shape's or the body's."""
        rng = self._rng
        draft.binary = True
        written = draft.write()
        length = int(written.headers[HEADER_LENGTH])
        header = json.loads(written.body[:length])
        tail = written.body[length:]
        choice = rng.randrange(4)
        if choice == 0:
            rng.choice(header["inputs"])["parameters"]["binary_data_size"] = rng.choice(ODD_SIZES)
        elif choice == 1:
            rng.choice(header["inputs"])["data"] = [1]
        elif choice == 2:
            tail = tail[: rng.randrange(len(tail))]
        else:
            tail += b"x" * rng.randint(1, 99)
        return binary_request(header, tail)

    def _odd_header(self, draft: Draft, _: object) -> WireRequest:
        """Return a wrong JSON length or content encoding."""
        rng = self._rng
        written = draft.write()
        size = len(written.body)
        name = HEADER_LENGTH
        value = rng.choice(("-1", "0", "1", str(size + 1), "9" * 25, "x", "1.5", " ", "0x10"))
        if rng.random() < 0.2:
            name = "Content-Encoding"
            value = rng.choice(("gzip", "deflate", "br", "x"))
        return replace(written, headers={**written.headers, name: value})

    def _odd_body(self, draft: Draft, _: object) -> WireRequest:
        """Return changed bytes, or JSON that is not a request."""
        rng = self._rng
        written = draft.write()
        body = written.body
        number = rng.choice((b"[NaN, ", b"[Infinity, ", b"[-Infinity, ", b"[1e999, "))
        opening = rng.choice((b"[", b'{"a":', b'{"inputs":['))
        return replace(
            written,
            body=rng.choice(
                (
                    self._overwritten(body),
                    body[: rng.randrange(len(body))],
                    opening * rng.choice((10, 1000, 50_000)),
                    rng.randbytes(rng.randrange(200)),
                    json.dumps(rng.choice(ODD_VALUES)).encode(),
                    body.replace(b"[", number, 2),
                )
            ),
        )

    def _overwritten(self, body: bytes) -> bytes:
        raw = bytearray(body)
        for _ in range(self._rng.randint(1, 8)):
            raw[self._rng.randrange(len(raw))] = self._rng.randrange(256)
        return bytes(raw)
