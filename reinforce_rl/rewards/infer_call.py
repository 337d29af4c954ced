"""One request for scores to one server: sent, read, and judged where it failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reinforce_rl.errors import RewardServerError
from reinforce_rl.rewards import access, protocol
from reinforce_rl.rewards.health import ask_who, text_of, token_refused
from reinforce_rl.rewards.retrying import FailedAttempt
from reinforce_rl.rewards.transport import HttpAnswer, exchange
from reinforce_rl.utils.addresses import ModelAddress

PROBE_SECONDS = 10.0  # for one question about health
RETRIED_CODES = (408, 425, 429)  # besides every 5xx


@dataclass(frozen=True)
class Scores:
    """A server's answer.

    Attributes:
        values: float32 [N]; NaN where a sample failed.
        status: int32 [N].
        attributes: float32 [N, K]; K is 0 for most.
    """

    values: np.ndarray
    status: np.ndarray
    attributes: np.ndarray

    @classmethod
    def join(cls, parts: Sequence[Scores]) -> Scores:
        """At least one, in order."""
        return cls(
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.status for part in parts]),
            np.concatenate([part.attributes for part in parts]),
        )


async def infer(
    model: ModelAddress, arrays: Mapping[str, np.ndarray], attributes: int, timeout: float, request_id: str
) -> Scores:
    """Ask once for the scores of N samples.

    Args:
        model: whom.
        arrays: the inputs, each [N, ...].
        attributes: K, which the server's description names.
        timeout: seconds until the answer must be here.
        request_id: in the request, in the server's log and in messages.

    Raises:
        FailedAttempt: it may be worth asking again, or another server.
        RewardServerError: the server refuses this request, as any other of the same model would.
    """
    # tritonclient writes and reads the bodies. It has no deadline for a whole answer, so the sending is done here.
    import tritonclient.http as triton
    from tritonclient.utils import np_to_triton_dtype

    inputs = []
    for name, array in arrays.items():
        inputs.append(triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    count = len(next(iter(arrays.values())))
    keys = [protocol.REWARDS, protocol.STATUS, *([protocol.ATTRIBUTES] if attributes else [])]
    outputs = [triton.InferRequestedOutput(key) for key in keys]
    body, json_size = triton.InferenceServerClient.generate_request_body(
        inputs, outputs=outputs, request_id=request_id
    )
    headers = {
        "Content-Type": "application/octet-stream",
        protocol.HEADER_LENGTH: str(json_size),
        protocol.REQUEST_ID: request_id,
        **access.bearer(model.token),
    }
    answer = await exchange(model.place, f"/v2/models/{model.name}/infer", timeout, body=body, headers=headers)
    if answer.code != 200:
        raise await _judge(model, answer, request_id)
    answer.check_digest(body)
    try:
        json_length = answer.headers.get(protocol.HEADER_LENGTH)
        found = triton.InferenceServerClient.parse_response_body(
            answer.body, header_length=int(json_length) if json_length else None
        )
        if (found_id := found.get_response().get("id")) != request_id:
            raise ValueError(f"it is to the request with the id {found_id!r}, not {request_id!r}")
        values, status = protocol.check_answer(
            found.as_numpy(protocol.REWARDS), found.as_numpy(protocol.STATUS), count
        )
        scores = found.as_numpy(protocol.ATTRIBUTES) if attributes else np.zeros((count, 0), np.float32)
        return Scores(values, status, protocol.check_attributes(scores, status, attributes))
    except Exception as error:  # whatever tritonclient makes of bytes that are no such answer
        if not answer.delimited:
            raise FailedAttempt("does not answer (the answer was cut short, or is none)") from error
        raise FailedAttempt(f"gave a wrong answer: {error}", bad_answer=True) from error


async def _judge(model: ModelAddress, answer: HttpAnswer, request_id: str) -> Exception:
    """What an HTTP error of the server means: worth another attempt, or not."""
    code, text, place = answer.code, text_of(answer), model.place
    if code in (401, 403):
        return FailedAttempt(f"answers HTTP {code}", fault=token_refused(model))
    if code >= 500 or code in RETRIED_CODES:
        return FailedAttempt(f"answers HTTP {code}{text}", retry_after=answer.retry_after)
    try:  # while starting, Triton calls its models unknown
        await ask_who(model, PROBE_SECONDS)
    except FailedAttempt as error:
        return error
    except RewardServerError as error:
        return FailedAttempt(f"answers HTTP {code}{text}", fault=error)
    if "unknown model" in text or "not ready" in text:  # it has become ready since
        return FailedAttempt(f"answers HTTP {code}{text}")
    if answer.headers.get(protocol.REQUEST_ID) != request_id:  # a proxy's, or of another request
        return FailedAttempt(f"answers HTTP {code}{text}, and not to this request", bad_answer=True)
    return RewardServerError(f"the reward server at {place} refused a request (id {request_id}): HTTP {code}{text}")
