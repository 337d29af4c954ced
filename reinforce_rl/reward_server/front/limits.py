"""Limits on what a client may send to the reward server, and the HTTP errors beyond them."""

from __future__ import annotations

from dataclasses import dataclass

MAX_JSON_BYTES = 1 << 24  # JSON is parsed in the process that answers for health; larger batches are sent in binary


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
        idle_seconds: to a complete header, or between two pieces of a body; then the connection is closed.
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
