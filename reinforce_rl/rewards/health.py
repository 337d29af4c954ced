"""Questions to a reward server over plain HTTP, each with a deadline: is it there, is it ours, what does it serve."""

from __future__ import annotations

import json
import uuid
from typing import Any

from reinforce_rl.errors import RewardServerError
from reinforce_rl.rewards import access, protocol
from reinforce_rl.rewards.protocol import ServerInfo
from reinforce_rl.rewards.retrying import FailedAttempt
from reinforce_rl.rewards.transport import HttpAnswer, NoHttp, exchange, wait_for
from reinforce_rl.utils.addresses import Address, ModelAddress

GATEWAY_CODES = (502, 503, 504)  # a proxy whose back end is not there yet


def check_once(host: str, port: int, name: str, timeout: float, *, token: str | None = None) -> ServerInfo:
    """`ask_who` of the reward model `name` there."""
    return wait_for(ask_who(ModelAddress(Address(host, port), name, token), timeout))


async def ask_who(model: ModelAddress, timeout: float) -> ServerInfo:
    """Ask once whether a reward model is being served.

    Args:
        timeout: seconds for each answer.

    Raises:
        FailedAttempt: it may be worth asking again.
        RewardServerError: it is not: another program is on the port, it serves another model or another version of
            the protocol, or it wants another token.
    """
    place = model.place
    question = json.dumps({"id": uuid.uuid4().hex, "inputs": []}).encode()
    answer = await _ask(model, f"/v2/models/{protocol.INFO_MODEL}/infer", timeout, question)
    code = answer.code
    if code in (401, 403):
        raise token_refused(model)
    if code != 200:
        if code in GATEWAY_CODES:
            raise FailedAttempt(f"answers HTTP {code}{text_of(answer)}", retry_after=answer.retry_after)
        if not await _is_triton(model, timeout):
            raise RewardServerError(_foreign(place, f"HTTP {code}"))
        raise FailedAttempt(f"is a Triton server without '{protocol.INFO_MODEL}' (HTTP {code})", unknown=True)
    try:
        info = ServerInfo.from_json(json.loads(answer.body)["outputs"][0]["data"][0])
    except protocol.OtherVersion as error:
        raise RewardServerError(f"the reward server at {place} {error}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise RewardServerError(_foreign(place, f"an answer that is not a reward server's ({error})")) from error
    answer.check_digest(question)
    if info.name != model.name:
        raise RewardServerError(
            f"the reward server at {place} serves the model '{info.name}', and '{model.name}' was asked for. "
            f"Set remote_rm.reward_model.name={info.name}, or the port to the other server's."
        )
    answer = await _ask(model, f"/v2/models/{model.name}/ready", timeout)
    if answer.code != 200:
        raise FailedAttempt(f"is up, its model '{model.name}' is not ready", retry_after=answer.retry_after)
    return info


def token_refused(model: ModelAddress) -> RewardServerError:
    """For a server that answered 401."""
    found = "no token was sent" if model.token is None else "it does not know the token that was sent"
    return RewardServerError(
        f"the reward server at {model.place} asks for an access token, and {found}. Give the server's token by "
        f"remote_rm.reward_model.token_file=FILE or by the environment variable {access.TOKEN_VARIABLE}."
    )


def text_of(answer: HttpAnswer) -> str:
    """': ' and the error's text, where the answer has one."""
    try:
        error = json.loads(answer.body)["error"]
    except (ValueError, KeyError, TypeError):
        return ""
    return f": {' '.join(str(error).split())[-600:]}"


def infer_json(
    host: str, port: int, name: str, inputs: list[dict[str, Any]], timeout: float, *, token: str | None = None
) -> dict[str, list[Any]]:
    """One KServe v2 inference in JSON, as `curl` would send it.

    Returns:
        each output's flat list of data, by name.

    Raises:
        RewardServerError: anything but a proper answer.
    """
    model = ModelAddress(Address(host, port), name, token)
    body = json.dumps({"inputs": inputs}).encode()
    try:
        answer = wait_for(_ask(model, f"/v2/models/{name}/infer", timeout, body))
        if answer.code != 200:
            raise RewardServerError(
                f"{host}:{port} answered HTTP {answer.code} to a request to '{name}'{text_of(answer)}"
            )
        return {output["name"]: output["data"] for output in json.loads(answer.body)["outputs"]}
    except (FailedAttempt, ValueError, KeyError, TypeError) as error:
        raise RewardServerError(f"{host}:{port} gave no proper answer to a request to '{name}': {error}") from error


async def _ask(model: ModelAddress, path: str, timeout: float, body: bytes | None = None) -> HttpAnswer:
    headers = {"Content-Type": "application/json", **access.bearer(model.token)}
    try:
        return await exchange(model.place, path, timeout, body=body, headers=headers)
    except NoHttp as error:
        raise RewardServerError(
            f"what listens on {model.place} does not speak HTTP ({error}). Check the port."
        ) from error


async def _is_triton(model: ModelAddress, timeout: float) -> bool:
    answer = await _ask(model, "/v2", timeout)
    try:
        return answer.code == 200 and "extensions" in json.loads(answer.body)
    except (ValueError, TypeError):
        return False


def _foreign(place: Address, found: str) -> str:
    return (
        f"another program listens on {place}: expected a reward server, got {found}. "
        "Check host and port against the server's line 'ready at http://...'."
    )
