"""What a request may ask of the reward server, checked before the request is handed on.

Triton believes what a request claims of itself: it has no limit on sizes, and it allocates what a shape asks for. So
each claim is compared here with the bytes that came.
"""

from __future__ import annotations

import gc
import json
import math
from dataclasses import dataclass
from typing import Any

MAX_JSON_BYTES = 1 << 24  # JSON is parsed in the process that answers for health; larger batches are sent in binary
MAX_TENSORS = 16
MAX_DEPTH = 32  # of lists and objects in JSON; Triton's parser recurses
BINARY_SIZE = "binary_data_size"

# Bytes of one element; a BYTES element brings its length in 4 bytes of its own.
ELEMENT_BYTES = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
    "BYTES": 4,
}


class Refusal(Exception):
    """A request that is answered with an HTTP error.

    Attributes:
        code: the HTTP status.
        text: for the client; it may quote the request, so it must not be logged.
        retry_after: seconds after which the client may try again.
    """

    def __init__(self, code: int, text: str, *, retry_after: int | None = None):
        super().__init__(text)
        self.code = code
        self.text = text
        self.retry_after = retry_after


@dataclass(frozen=True)
class FrontLimits:
    """Bounds on requests and on time.

    Attributes:
        max_request_bytes: of one request's body.
        max_samples: in one request.
        max_sequence_length: tokens that a row may claim, padding included.
        max_in_flight: requests that Triton has at the same time.
        max_queue: requests that wait for that; more are answered 503.
        request_seconds: for Triton's answer to one request.
        stuck_seconds: health turns red, and the server ends, when the scorer has been in one call of the model for so
            long.
        canary_seconds: for health's own sample while the scorer is idle.
        idle_seconds: a connection is closed that sends no complete header, or no more of a body, for so long.
    """

    max_request_bytes: int
    max_samples: int
    max_sequence_length: int
    max_in_flight: int = 64
    max_queue: int = 256
    request_seconds: float = 600.0
    stuck_seconds: float = 300.0
    canary_seconds: float = 10.0
    idle_seconds: float = 60.0


def default_request_bytes(max_samples: int, max_sequence_length: int) -> int:
    """Room for a full batch of int64 tokens, and 1 MiB for whatever is around it."""
    return 8 * max_samples * max_sequence_length + (1 << 20)


def check_length(length: int | None, limits: FrontLimits) -> None:
    """Raises Refusal where a body is, or says it is, too long."""
    if length is not None and length > limits.max_request_bytes:
        raise Refusal(
            413,
            f"the request has {length} bytes, this server takes at most {limits.max_request_bytes} "
            "(inference.max_request_bytes); send fewer samples at a time",
        )


def samples_of(body: bytes, header_length: str | None, limits: FrontLimits) -> int:
    """Check a KServe v2 inference request, and count its samples.

    What is wrong without being dangerous (names, types, missing inputs) is left to Triton, which knows the model.

    Args:
        body: a JSON object, and where `header_length` is given, binary tensors after it.
        header_length: the header Inference-Header-Content-Length.
        limits: the server's.

    Raises:
        Refusal: code 400 or 413.
    """
    text_length = json_length(header_length, len(body))
    request = _parse(body[:text_length])
    tensors = _tensors(request, "inputs")
    _tensors(request, "outputs")
    binary_left = len(body) - text_length
    samples = 0
    for index, tensor in enumerate(tensors):
        shape = _shape(tensor, limits, len(body))
        count = math.prod(shape)
        size = _binary_size(tensor)
        if size is None:
            found = _count(tensor.get("data"), len(shape))
            if found != count:
                raise Refusal(400, f"an input claims {count} elements (shape {shape}) and has {found}")
        else:
            wanted = count * ELEMENT_BYTES[tensor["datatype"]]
            if size != wanted and (tensor["datatype"] != "BYTES" or size < wanted):
                raise Refusal(400, f"an input of shape {shape} needs {wanted} bytes, {BINARY_SIZE} is {size}")
            binary_left -= size
        if index == 0:
            samples = shape[0] if shape else 0
    if binary_left != 0:
        raise Refusal(
            400, f"the sum of {BINARY_SIZE} differs from the bytes after the JSON object by {abs(binary_left)}"
        )
    return samples


def json_length(header: str | None, body_length: int) -> int:
    """Bytes of a request's JSON; Refusal where the header says none that can be, or they are too many."""
    if header is None:
        length = body_length
    elif header.isascii() and header.isdigit() and len(header) < 16 and int(header) <= body_length:
        length = int(header)
    else:
        raise Refusal(
            400, f"Inference-Header-Content-Length is no number between 0 and the body's {body_length} bytes"
        )
    if length > MAX_JSON_BYTES:
        raise Refusal(413, f"the JSON has {length} bytes; expected at most {MAX_JSON_BYTES}: send tensors in binary")
    return length


def _parse(text: bytes) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):  # one parser takes the first, another the last
            raise ValueError("a key occurs twice")
        return found

    def no_constant(_: str) -> None:
        raise ValueError("JSON has no NaN and no infinity")

    gc.disable()  # it would go through all of the lists of millions, again and again
    try:
        request = json.loads(
            text.decode("utf-8"), object_pairs_hook=no_duplicates, parse_constant=no_constant, strict=True
        )
    except RecursionError as error:
        raise Refusal(400, "the JSON is nested too deeply") from error
    except ValueError as error:  # of UTF-8, of JSON, of Python's limit on the digits of a number
        raise Refusal(400, f"the request is no JSON object in UTF-8: {error}") from error
    finally:
        gc.enable()
    if not isinstance(request, dict):
        raise Refusal(400, "the request is no JSON object")
    rest = {key: value for key, value in request.items() if key not in ("inputs", "outputs")}
    _check_depth(rest, MAX_DEPTH)
    return request


def _check_depth(node: Any, left: int) -> None:
    if left == 0:
        raise Refusal(400, "the JSON is nested too deeply")
    if isinstance(node, dict):
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            if isinstance(child, (dict, list)):
                _check_depth(child, left - 1)


def _tensors(request: dict[str, Any], key: str) -> list[dict[str, Any]]:
    tensors = request.get(key, [])
    if not isinstance(tensors, list) or len(tensors) > MAX_TENSORS:
        raise Refusal(400, f"'{key}' is no list of at most {MAX_TENSORS} tensors")
    for tensor in tensors:
        if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
            raise Refusal(400, f"'{key}' holds something that is no tensor with a name")
        parameters = tensor.get("parameters", {})
        if not isinstance(parameters, dict) or any(isinstance(value, (dict, list)) for value in parameters.values()):
            raise Refusal(400, f"the parameters of one of '{key}' are no object of plain values")
        if any(name.startswith("shared_memory") for name in parameters):
            raise Refusal(400, "tensors in shared memory are not taken")
        _check_depth({name: value for name, value in tensor.items() if name != "data"}, 4)
    return tensors


def _shape(tensor: dict[str, Any], limits: FrontLimits, body_length: int) -> list[int]:
    shape, datatype = tensor.get("shape"), tensor.get("datatype")
    if not isinstance(datatype, str) or datatype not in ELEMENT_BYTES:
        raise Refusal(400, f"an input's datatype is none of {', '.join(ELEMENT_BYTES)}")
    if not isinstance(shape, list) or not 1 <= len(shape) <= 4 or not all(type(d) is int and d >= 0 for d in shape):
        raise Refusal(400, "an input's shape is no list of one to four numbers of 0 or more")
    if shape[0] > limits.max_samples:
        raise Refusal(
            400, f"the request claims {shape[0]} samples; batch size must be <= {limits.max_samples} for this server"
        )
    if any(dimension > limits.max_sequence_length for dimension in shape[1:]):
        raise Refusal(
            400,
            f"an input claims rows of {max(shape[1:])} tokens; this server takes at most "
            f"{limits.max_sequence_length} (inference.max_sequence_length)",
        )
    if math.prod(shape) > body_length:
        raise Refusal(400, f"an input claims {math.prod(shape)} elements, the whole request has {body_length} bytes")
    return shape


def _binary_size(tensor: dict[str, Any]) -> int | None:
    size = tensor.get("parameters", {}).get(BINARY_SIZE)
    if size is None:
        return None
    if type(size) is not int or size < 0:
        raise Refusal(400, f"{BINARY_SIZE} is no number of 0 or more")
    if "data" in tensor:
        raise Refusal(400, f"an input has both 'data' and {BINARY_SIZE}")
    return size


def _count(data: Any, dimensions: int) -> int:
    """Elements of a list, or of lists in lists down to the shape's dimensions."""
    if not isinstance(data, list) or dimensions == 0:
        raise Refusal(400, "an input's 'data' is no list, or is nested deeper than its shape")
    nested = [child for child in data if isinstance(child, (list, dict))]
    if any(isinstance(child, dict) for child in nested):
        raise Refusal(400, "an input's 'data' holds an object")
    return len(data) - len(nested) + sum(_count(child, dimensions - 1) for child in nested)
