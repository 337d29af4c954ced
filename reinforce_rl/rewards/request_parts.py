"""A request as the arrays that a server reads, cut into parts that it takes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from reinforce_rl.rewards import protocol
from reinforce_rl.rewards.base import RewardRequest
from reinforce_rl.rewards.protocol import ServerInfo
from reinforce_rl.rewards.text_form import text_arrays

ENVELOPE_BYTES = 4096  # of a request's JSON: names, types and shapes of at most six inputs
TEXT_LENGTH_BYTES = 4  # before each text


def arrays_of(request: RewardRequest, form: str, pad_to_length: int | None, pad_id: int) -> dict[str, np.ndarray]:
    """The inputs by name, each [N, ...].

    Args:
        request: N samples.
        form: tokens or text.
        pad_to_length: tokens that rows are padded to; None: not padded.
        pad_id: the token id for it.
    """
    if form == protocol.TEXT_FORM:
        return text_arrays(request.samples)
    tokens = request.tokens.detach().cpu().numpy().astype(np.int64, copy=True)
    lengths = request.lengths.detach().cpu().numpy().astype(np.int64, copy=True)
    width = max(pad_to_length or 0, tokens.shape[1], 1)  # Triton cannot carry a width of 0
    if width > tokens.shape[1]:
        padding = ((0, 0), (0, width - tokens.shape[1]))
        tokens = np.pad(tokens, padding, constant_values=pad_id)
    return {protocol.TOKENS: tokens, protocol.SEQUENCE_LENGTHS: lengths[:, None]}


def cut(arrays: Mapping[str, np.ndarray], info: ServerInfo) -> list[dict[str, np.ndarray]]:
    """Consecutive samples, as many in each part as the server's limits allow, in order.

    The parts follow from the samples and the limits alone, never from which servers are up: scores may depend on the
    request that a sample is in, to the last bit. A sample that is too large by itself is a part of its own, for the
    server to refuse.

    Args:
        arrays: the inputs by name, each [N, ...].
        info: the server's description.
    """
    sizes = sum(_sample_bytes(array) for array in arrays.values())
    room = None if info.max_request_bytes is None else info.max_request_bytes - ENVELOPE_BYTES
    starts, filled = [], 0
    for row, size in enumerate(np.asarray(sizes).tolist()):
        full = bool(starts) and row - starts[-1] == info.max_batch_size
        if not starts or full or (room is not None and filled + size > room):
            starts.append(row)
            filled = 0
        filled += size
    ends = [*starts[1:], None]
    return [
        {name: array[start:end] for name, array in arrays.items()} for start, end in zip(starts, ends, strict=True)
    ]


def _sample_bytes(array: np.ndarray) -> np.ndarray:
    """Bytes of each sample as it is sent, int64 [N]."""
    if array.dtype == object:
        return np.array([sum(len(text) + TEXT_LENGTH_BYTES for text in row) for row in array.tolist()], np.int64)
    return np.full(len(array), array.itemsize * int(np.prod(array.shape[1:])), np.int64)
