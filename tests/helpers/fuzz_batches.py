"""Seeded batches of requests to merge: one invalid request among valid ones.

All requests of a batch have one form and, for tokens, one width, which Triton requires for merging.
"""

from __future__ import annotations

import json
import random
import string
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from helpers.fuzz_requests import DATATYPES, HEADER_LENGTH, SHAPES, WRONG_VALUES
from helpers.serve_toy_scorer import MAX_LENGTH, TOKEN_NAN, TOKEN_RAISE, VOCAB_SIZE, toy_score

from reinforce_rl.rewards.wire import TEXT_OPTIONAL

FORMS = ("tokens", "sentences", "text")
ODD_IDS = (-1, VOCAB_SIZE, 2**31, 2**63 - 1, -(2**63), TOKEN_NAN, TOKEN_RAISE)
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
    0,
    -1,
    5,
    1e308,
    float("nan"),
    10**100,
    "",
    "x",
    LONE,
    "a" * 3000,
    [],
    {},
    [[]],
    [5],
    {"a": 5},
)
ODD_KEYS = ("role", "content", "tool_calls", "name", "tool_call_id", "reasoning_content", LONE, "")


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


@dataclass
class Draft:
    """A request before encoding: its tensors and transport."""

    tensors: list[dict[str, Any]]
    binary: bool
    rest: dict[str, Any] = field(default_factory=dict)

    def write(self) -> WireRequest:
        header = []
        tail = b""
        known = [
            value
            for tensor in self.tensors
            if isinstance(tensor.get("data"), list)
            for value in tensor["data"]
        ]
        if not all(
            isinstance(value, bytes) or (type(value) is int and abs(value) < 2**63)
            for value in known
        ):
            self.binary = False
        for tensor in self.tensors:
            entry = dict(tensor)
            data = entry.get("data")
            if self.binary and isinstance(data, list):
                part = entry.pop("raw", None) or b"".join(map(_packed, data))
                del entry["data"]
                entry["parameters"] = {"binary_data_size": len(part)}
                tail += part
            else:
                entry.pop("raw", None)
                if isinstance(data, list):
                    entry["data"] = [
                        x.decode("utf-8", "replace") if isinstance(x, bytes) else x for x in data
                    ]
            header.append(entry)
        text = json.dumps({"inputs": header, **self.rest}).encode()
        return WireRequest(text + tail, {HEADER_LENGTH: str(len(text))} if self.binary else {})


def _packed(value: Any) -> bytes:
    if isinstance(value, bytes):
        return struct.pack("<I", len(value)) + value
    return struct.pack("<q", value)


def int_tensor(name: str, rows: list[list[int]]) -> dict[str, Any]:
    data = [value for row in rows for value in row]
    return {"name": name, "datatype": "INT64", "shape": [len(rows), len(rows[0])], "data": data}


def text_tensor(name: str, texts: list[bytes]) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(texts), 1], "data": list(texts)}


class BatchFuzzer:
    """Generate batches from a seed.

    Args:
        encode: maps text to token ids.
        score: scores token ids, or text if `encode` is None.
        forms: request forms to choose from.
    """

    def __init__(
        self,
        seed: int,
        encode: Callable[[str], list[int]],
        *,
        score: Callable[[list[int]], float] = toy_score,
        forms: tuple[str, ...] = FORMS,
    ):
        self._rng = random.Random(seed)
        self._encode = encode
        self._score = score
        self._forms = forms

    def batch(self, good: int = 7) -> list[WireRequest]:
        """Return the invalid request followed by `good` valid ones."""
        form = self._rng.choice(self._forms)
        width = self._rng.randint(1, MAX_LENGTH)
        num_optional = self._rng.randint(0, len(TEXT_OPTIONAL))
        optional = self._rng.sample(sorted(TEXT_OPTIONAL), num_optional)
        return [
            self._wrong(form, width, optional),
            *(self._right(form, width, optional) for _ in range(good)),
        ]

    def _right(self, form: str, width: int, optional: list[str]) -> WireRequest:
        draft, sequences = self._draft(form, width, optional, self._rng.choice((1, 1, 2)))
        scores = np.asarray([self._score(sequence) for sequence in sequences], np.float32)
        return replace(draft.write(), scores=scores)

    def _draft(
        self, form: str, width: int, optional: list[str], count: int
    ) -> tuple[Draft, list[list[int]]]:
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
        draft, _ = self._draft(form, width, optional, self._rng.choice((1, 2, 3)))
        kinds = [
            self._odd_value,
            self._odd_value,
            self._odd_value,
            self._odd_element,
            self._odd_lengths,
        ]
        kinds += [self._odd_shape, self._odd_key, self._odd_set, self._odd_rest, self._odd_body]
        kind = self._rng.choice(kinds)
        written = kind(draft)
        return replace(written, fault=f"{form} {kind.__name__}")

    def _odd_value(self, draft: Draft) -> WireRequest:
        """Return a sample that cannot be scored."""
        rng = self._rng
        tensor = self._rng.choice(draft.tensors)
        place = rng.randrange(len(tensor["data"]))
        if tensor["datatype"] == "INT64":
            tensor["data"][place] = rng.choice(
                (*ODD_IDS, TOKEN_NAN, TOKEN_RAISE, 0, MAX_LENGTH + 1)
            )
        elif tensor["name"] == "messages" and rng.random() < 0.8:
            tensor["data"][place] = self._messages()
        elif tensor["name"] == "metadata" and rng.random() < 0.8:
            record = rng.choice(
                (rng.choice(ODD_VALUES), {rng.choice(ODD_KEYS): rng.choice(ODD_VALUES)})
            )
            tensor["data"][place] = self._json(record)
        else:
            tensor["data"][place] = rng.choice((*ODD_BYTES, rng.randbytes(rng.randrange(40))))
        return draft.write()

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

    def _odd_element(self, draft: Draft) -> WireRequest:
        """Return JSON with an element of another type, or with one element too many or too few."""
        rng = self._rng
        tensor = self._rng.choice(draft.tensors)
        draft.binary = False
        place = rng.randrange(len(tensor["data"]))
        if rng.random() < 0.8:
            tensor["data"][place] = rng.choice(
                (*WRONG_VALUES, 1.0, 1e300, -(2**63) - 1, False, LONE)
            )
        elif rng.random() < 0.5:
            del tensor["data"][place]
        else:
            tensor["data"].insert(place, tensor["data"][place])
        return draft.write()

    def _odd_lengths(self, draft: Draft) -> WireRequest:
        """Return binary texts with wrong length prefixes but the correct total size."""
        rng = self._rng
        tensor = self._rng.choice(draft.tensors)
        draft.binary = True
        raw = bytearray(b"".join(map(_packed, tensor["data"])))
        lie = rng.choice((0, 1, len(raw), 2**31 - 1, 2**31, 2**32 - 1, rng.randrange(2**32)))
        if rng.random() < 0.6:
            raw[:4] = struct.pack("<I", lie)
        elif rng.random() < 0.5:
            raw += rng.randbytes(rng.randint(1, 9))
        else:
            raw = raw[: -rng.randint(1, min(5, len(raw)))] or raw
        tensor["raw"] = bytes(raw)
        return draft.write()

    def _odd_shape(self, draft: Draft) -> WireRequest:
        rng = self._rng
        tensor = self._rng.choice(draft.tensors)
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
        return draft.write()

    def _odd_key(self, draft: Draft) -> WireRequest:
        rng = self._rng
        tensor = self._rng.choice(draft.tensors)
        tensor[rng.choice(("name", "datatype", "shape", "data", "parameters", LONE))] = rng.choice(
            WRONG_VALUES
        )
        return draft.write()

    def _odd_set(self, draft: Draft) -> WireRequest:
        """Return a missing, duplicate or unknown input, or two forms at once."""
        rng = self._rng
        choice = self._rng.randrange(4)
        count = draft.tensors[0]["shape"][0]
        others = [
            int_tensor("tokens", [[1, 2]] * count),
            int_tensor("sequence_lengths", [[2]] * count),
        ]
        others += [
            text_tensor(name, [b"a"] * count)
            for name in ("sentences", "prompts", "responses", "unknown")
        ]
        if choice == 0:
            draft.tensors.pop(rng.randrange(len(draft.tensors)))
        elif choice == 1:
            draft.tensors.append(dict(rng.choice(draft.tensors)))
        else:
            draft.tensors += rng.sample(others, rng.randint(1, len(others)))
        rng.shuffle(draft.tensors)
        return draft.write()

    def _odd_rest(self, draft: Draft) -> WireRequest:
        rng = self._rng
        values = (
            *WRONG_VALUES,
            [{"name": "rewards", "parameters": {"classification": 3}}],
            [{"name": "rewards", "parameters": {"binary_data": rng.choice(WRONG_VALUES)}}],
            [{"name": "status"}, {"name": "status"}],
            [{"name": "none"}],
            {"sequence_id": 3, "sequence_start": True},
            {"sequence_id": "3"},
            {"binary_data_output": rng.choice((True, *WRONG_VALUES))},
            {"priority": 2**63},
            {"priority": 1},
            {"timeout": 1},
            {"timeout": -1},
            {"triton_x": 1},
            {LONE: LONE},
            {"x": 1e308, "y": 2**64, "z": "\u0000"},
        )
        draft.rest = {
            rng.choice(("id", "outputs", "parameters", "model_name", LONE)): rng.choice(values)
        }
        return draft.write()

    def _odd_body(self, draft: Draft) -> WireRequest:
        rng = self._rng
        written = draft.write()
        raw = bytearray(written.body)
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return replace(written, body=bytes(raw))
