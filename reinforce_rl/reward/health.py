"""Questions to a reward server over plain HTTP, each with a timeout: is it there, is it ours, what does it serve."""

from __future__ import annotations

import http.client
import json
from typing import Any

from reinforce_rl.errors import RewardServerError
from reinforce_rl.reward import access, protocol
from reinforce_rl.reward.http_call import HttpAnswer, call, reason_of
from reinforce_rl.reward.protocol import ServerInfo

GATEWAY_CODES = (502, 503, 504)  # a proxy whose back end is not there yet


class NotReadyYet(Exception):
    """The server may still come: nothing listens, it is starting, or it is loading its model.

    Attributes:
        unknown: a Triton server answers, but none that describes itself as ours. That is normal for a moment while a
            server starts, and a mistake when it lasts.
        retry_after: seconds after which the server wants to be asked again, where it said so.
    """

    def __init__(self, text: str, *, unknown: bool = False, retry_after: float | None = None):
        super().__init__(text)
        self.unknown = unknown
        self.retry_after = retry_after


def check_once(host: str, port: int, name: str, timeout: float, *, token: str | None = None) -> ServerInfo:
    """Ask once whether the reward model `name` is being served.

    Args:
        timeout: seconds of silence that are borne.
        token: the access token, where the server asks for one.

    Raises:
        NotReadyYet: it may be worth asking again.
        RewardServerError: it is not: another program is on the port, it serves another model, or it wants another
            token.
    """
    answer = _call(host, port, f"/v2/models/{protocol.INFO_MODEL}/infer", timeout, {"inputs": []}, token=token)
    code = answer.code
    if code in (401, 403):
        raise token_refused(host, port, token)
    if code != 200:
        if code in GATEWAY_CODES:
            raise NotReadyYet(f"answers HTTP {code}{text_of(answer)}", retry_after=answer.retry_after)
        if not _is_triton(host, port, timeout, token):
            raise RewardServerError(_foreign(host, port, f"HTTP {code}"))
        raise NotReadyYet(f"is a Triton server without '{protocol.INFO_MODEL}' (HTTP {code})", unknown=True)
    try:
        info = ServerInfo.from_json(json.loads(answer.body)["outputs"][0]["data"][0])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise RewardServerError(_foreign(host, port, f"an answer that is not a reward server's ({error})")) from error
    if info.name != name:
        raise RewardServerError(
            f"the reward server at {host}:{port} serves the model '{info.name}', and '{name}' was asked for. "
            f"Set remote_rm.reward_model.name={info.name}, or the port to the other server's."
        )
    answer = _call(host, port, f"/v2/models/{name}/ready", timeout, token=token)
    if answer.code != 200:
        raise NotReadyYet(f"is up, its model '{name}' is not ready", retry_after=answer.retry_after)
    return info


def token_refused(host: str, port: int, token: str | None) -> RewardServerError:
    """For a server that answered 401."""
    found = "no token was sent" if token is None else "it does not know the token that was sent"
    return RewardServerError(
        f"the reward server at {host}:{port} asks for an access token, and {found}. Give the server's token by "
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
    try:
        answer = _call(host, port, f"/v2/models/{name}/infer", timeout, {"inputs": inputs}, token=token)
        if answer.code != 200:
            raise RewardServerError(
                f"{host}:{port} answered HTTP {answer.code} to a request to '{name}'{text_of(answer)}"
            )
        return {output["name"]: output["data"] for output in json.loads(answer.body)["outputs"]}
    except (NotReadyYet, ValueError, KeyError, TypeError) as error:
        raise RewardServerError(f"{host}:{port} gave no proper answer to a request to '{name}': {error}") from error


def _call(
    host: str,
    port: int,
    path: str,
    timeout: float,
    body: dict[str, Any] | None = None,
    *,
    token: str | None = None,
) -> HttpAnswer:
    """The answer to a GET, or to a POST where there is a body; NotReadyYet where no HTTP answer came."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **access.bearer(token)}
    try:
        return call(host, port, path, timeout, body=data, headers=headers)
    except http.client.RemoteDisconnected as error:
        raise NotReadyYet("closed the connection without an answer") from error
    except http.client.IncompleteRead as error:
        raise NotReadyYet("cut its answer short") from error
    except http.client.HTTPException as error:
        raise RewardServerError(
            f"what listens on {host}:{port} does not speak HTTP ({error!r}). Check the port."
        ) from error
    except OSError as error:
        raise NotReadyYet(f"does not answer ({reason_of(error)})") from error


def _is_triton(host: str, port: int, timeout: float, token: str | None) -> bool:
    answer = _call(host, port, "/v2", timeout, token=token)
    try:
        return answer.code == 200 and "extensions" in json.loads(answer.body)
    except (ValueError, TypeError):
        return False


def _foreign(host: str, port: int, found: str) -> str:
    return (
        f"another program listens on {host}:{port}: expected a reward server, got {found}. "
        "Check host and port against the server's line 'ready at http://...'."
    )
