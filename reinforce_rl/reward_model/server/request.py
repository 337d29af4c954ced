"""Validates a client's request and rewrites it for Triton.

Triton merges requests before it reads their tensors, so an unreadable one fails its neighbours, and
it allocates what a shape claims. So only values that were parsed here are passed on.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reinforce_rl.reward_model.server.admission import FrontSettings, Refusal
from reinforce_rl.rewards import wire
from reinforce_rl.rewards.wire import TEXT_LENGTH_BYTES

# parsed in the process that answers /health; send larger batches in binary
MAX_JSON_BYTES = 1 << 24
MAX_TENSORS = 16
BINARY_SIZE = "binary_data_size"
OUTPUTS = (wire.REWARDS, wire.STATUS, wire.ATTRIBUTES, wire.INFO_OUTPUT)


@dataclass(frozen=True)
class TritonRequest:
    samples: int  # rows of each tensor
    body: bytes  # a JSON object, then the binary tensors that it describes
    json_length: int  # bytes


def read_request(
    body: bytes, header_length: str | None, settings: FrontSettings, input_forms: Sequence[str]
) -> TritonRequest:
    """Read a KServe v2 inference request; raise Refusal (400 or 413) if it is invalid.

    `body` is a JSON object, followed by binary tensors if there is a header
    Inference-Header-Content-Length (`header_length`). `input_forms` lists the forms of input that
    the model accepts; it is empty for a model without inputs.
    """
    position = json_length(header_length, len(body))
    request = _parse(body[:position])
    header = {"inputs": [], **_wanted(request)}
    shapes: dict[str, list[int]] = {}
    parts: list[bytes | memoryview] = []
    for tensor in _tensors(request, "inputs"):
        name = tensor["name"]
        if name in shapes or name not in wire.INPUTS:
            raise Refusal(
                400, f"the input {name[:40]!r} is {'there twice' if name in shapes else 'unknown'}"
            )
        datatype, width = wire.INPUTS[name]
        if tensor.get("datatype") != datatype:
            raise Refusal(400, f"the datatype of '{name}' is not {datatype}")
        shape = _shape(tensor, width, settings)
        shapes[name] = shape
        size = _parameters(tensor).get(BINARY_SIZE)
        if size is None:
            part = _written(tensor, shape)
        else:
            if type(size) is not int or size < 0 or "data" in tensor:
                raise Refusal(
                    400,
                    f"{BINARY_SIZE} of '{name}' is not a number of 0 or more, or there is 'data' "
                    "as well",
                )
            part = memoryview(body)[position : position + size]
            position += size
            _check_binary(name, part, size, shape)
        written = {
            "name": name,
            "datatype": datatype,
            "shape": shape,
            "parameters": {BINARY_SIZE: len(part)},
        }
        header["inputs"].append(written)
        parts.append(part)
    if position != len(body):
        difference = abs(position - len(body))
        raise Refusal(
            400,
            f"the sum of {BINARY_SIZE} differs from the bytes after the JSON object by "
            f"{difference}",
        )
    counts = {shape[0] for shape in shapes.values()}
    if len(counts) > 1:
        raise Refusal(400, f"the inputs have different numbers of samples: {sorted(counts)}")
    try:
        wire.check_inputs(set(shapes), input_forms)
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    text = json.dumps(header).encode()
    return TritonRequest(max(counts, default=0), b"".join((text, *parts)), len(text))


def _wanted(request: dict[str, Any]) -> dict[str, Any]:
    """Return the validated id, outputs and output format of a request."""
    name = request.get("id", "")
    if not isinstance(name, str) or not name.isprintable():
        raise Refusal(400, "'id' is not printable text")
    wanted: dict[str, Any] = {"id": name} if name else {}
    if "outputs" in request:
        wanted["outputs"] = []
        for output in _tensors(request, "outputs"):
            if output["name"] not in OUTPUTS:
                raise Refusal(400, f"the output {output['name'][:40]!r} is unknown")
            if "classification" in output.get("parameters", {}):
                raise Refusal(400, "the extension 'classification' is not served")
            wanted["outputs"].append(
                {"name": output["name"], "parameters": _flag(output, "binary_data")}
            )
    return {**wanted, "parameters": _flag(request, "binary_data_output")}


def _flag(entry: dict[str, Any], key: str) -> dict[str, bool]:
    flags = {name: value for name, value in _parameters(entry).items() if name == key}
    if not all(type(value) is bool for value in flags.values()):
        raise Refusal(400, f"{key} is neither true nor false")
    return flags


def _parameters(entry: dict[str, Any]) -> dict[str, Any]:
    return _object(entry.get("parameters", {}), "'parameters'")


def json_length(header: str | None, body_length: int) -> int:
    """Return the bytes of a request's JSON; raise Refusal if the header is invalid or they are too
    many.
    """
    length = body_length
    if header is not None:
        is_number = header.isascii() and header.isdigit() and len(header) < 16
        if not is_number or int(header) > body_length:
            raise Refusal(
                400,
                f"{wire.HEADER_LENGTH} is not a number between 0 and the body's {body_length} "
                "bytes",
            )
        length = int(header)
    if length > MAX_JSON_BYTES:
        raise Refusal(
            413,
            f"the JSON has {length} bytes; expected at most {MAX_JSON_BYTES}: send tensors in "
            "binary",
        )
    return length


def _parse(text: bytes) -> dict[str, Any]:
    gc.disable()  # else it would traverse the growing lists again and again
    try:
        request = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        # bad UTF-8, bad JSON, or Python's limits on digits and depth
        raise Refusal(400, f"the request is not a JSON object in UTF-8: {error}") from error
    finally:
        gc.enable()
    return _object(request, "the request")


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refusal(400, f"{name} is not a JSON object")
    return value


def _tensors(request: dict[str, Any], key: str) -> list[dict[str, Any]]:
    tensors = request.get(key, [])
    if not isinstance(tensors, list) or len(tensors) > MAX_TENSORS:
        raise Refusal(400, f"'{key}' is not a list of at most {MAX_TENSORS} tensors")
    for tensor in tensors:
        if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
            raise Refusal(400, f"'{key}' holds something that is not a tensor with a name")
        if any(name.startswith("shared_memory") for name in _parameters(tensor)):
            raise Refusal(400, "tensors in shared memory are not supported")
    return tensors


def _shape(tensor: dict[str, Any], width: int, settings: FrontSettings) -> list[int]:
    shape = tensor.get("shape")
    samples = settings.inference.max_batch_size
    tokens = settings.max_sequence_length
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(type(d) is int and d >= 1 for d in shape)
    ):
        raise Refusal(
            400, f"the shape of '{tensor['name']}' is not a list of two numbers of 1 or more"
        )
    if width >= 0 and shape[1] != width:
        raise Refusal(
            400, f"the shape of '{tensor['name']}' is {shape}; expected [samples, {width}]"
        )
    if shape[0] > samples:
        raise Refusal(
            400,
            f"the request claims {shape[0]} samples; batch size must be <= {samples} for this "
            "server",
        )
    if shape[1] > tokens:
        most = f"this server takes at most {tokens} (inference.max_sequence_length)"
        raise Refusal(400, f"an input claims rows of {shape[1]} tokens; {most}")
    return shape


def _check_binary(name: str, part: memoryview, size: int, shape: list[int]) -> None:
    count = math.prod(shape)
    place = 0
    texts = 0
    if wire.INPUTS[name][0] == "INT64":
        if size != 8 * count:
            raise Refusal(
                400, f"'{name}' of shape {shape} needs {8 * count} bytes, {BINARY_SIZE} is {size}"
            )
        return
    while place + TEXT_LENGTH_BYTES <= len(part):
        place += TEXT_LENGTH_BYTES + int.from_bytes(
            part[place : place + TEXT_LENGTH_BYTES], "little"
        )
        texts += 1
    if place != size or texts != count:
        raise Refusal(
            400,
            f"the lengths of the texts of '{name}' do not come to {count} texts in {size} bytes",
        )


def _written(tensor: dict[str, Any], shape: list[int]) -> bytes:
    """Encode a tensor given in JSON, flat or nested, as binary data."""
    name = tensor["name"]
    data = tensor.get("data")
    values = _flat(data, len(shape))
    if len(values) != math.prod(shape):
        raise Refusal(
            400,
            f"'{name}' claims {math.prod(shape)} elements (shape {shape}) and has {len(values)}",
        )
    kind = int if tensor["datatype"] == "INT64" else str
    if set(map(type, values)) != {kind}:
        raise Refusal(
            400,
            f"'{name}' holds something that is not a {'whole number' if kind is int else 'string'}",
        )
    if kind is int:
        try:
            return np.array(values, "<i8").tobytes()
        except OverflowError:
            raise Refusal(400, f"'{name}' holds a number that 64 bits cannot") from None
    # Half of a surrogate pair becomes bytes that the scorer refuses, for this sample alone.
    texts = [value.encode("utf-8", "surrogatepass") for value in values]
    return b"".join(len(text).to_bytes(TEXT_LENGTH_BYTES, "little") + text for text in texts)


def _flat(data: Any, dimensions: int) -> list[Any]:
    if not isinstance(data, list) or dimensions == 0:
        raise Refusal(400, "an input's 'data' is not a list, or is nested deeper than its shape")
    if not any(isinstance(child, list) for child in data):
        return data
    return [value for child in data for value in _flat(child, dimensions - 1)]
