"""Requests without a server, decoded by the front door, Triton and PyTriton."""

from __future__ import annotations

import json
import struct

import numpy as np
from helpers.fuzz_batches import WireRequest
from helpers.fuzz_requests import HEADER_LENGTH

from reinforce_rl.config.rewards import InferenceConfig
from reinforce_rl.reward_model.server.admission import FrontSettings
from reinforce_rl.reward_model.server.request import TritonRequest, read_request
from reinforce_rl.rewards import wire

LIMITS = FrontSettings(
    inference=InferenceConfig(max_batch_size=64), max_request_bytes=1 << 20, max_sequence_length=128
)
ALL_FORMS = (wire.TOKENS_FORM, wire.TEXT_FORM)


def let_in(request: WireRequest, forms: tuple[str, ...] = ALL_FORMS) -> dict[str, np.ndarray]:
    """Admit a request. Raises Refusal."""
    return arrays_of(read_request(request.body, request.headers.get(HEADER_LENGTH), LIMITS, forms))


def arrays_of(request: TritonRequest) -> dict[str, np.ndarray]:
    """Return the arrays; assert that Triton can read them."""
    header = json.loads(request.body[: request.json_length])
    tail = request.body[request.json_length :]
    arrays = {}
    for tensor in header["inputs"]:
        shape = tensor["shape"]
        size = tensor["parameters"]["binary_data_size"]
        part = tail[:size]
        tail = tail[size:]
        count = shape[0] * shape[1]
        assert count > 0 and shape[0] == request.samples
        if tensor["datatype"] == "INT64":
            arrays[tensor["name"]] = np.frombuffer(part, "<i8", count).reshape(shape)
            continue
        texts = []
        while part:
            (length,) = struct.unpack_from("<I", part)
            assert 4 + length <= len(part)
            texts.append(part[4 : 4 + length])
            part = part[4 + length :]
        array = np.empty(count, object)
        array[:] = texts
        arrays[tensor["name"]] = array.reshape(shape)
    assert not tail
    return arrays
