"""Questions to a reward server over plain HTTP, each with a timeout: is it there, is it ours, what does it serve."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.request
from typing import Any

from reinforce_rl.errors import RewardServerError
from reinforce_rl.reward import protocol
from reinforce_rl.reward.protocol import ServerInfo

GATEWAY_CODES = (502, 503, 504)  # a proxy whose back end is not there yet


class NotReadyYet(Exception):
    """The server may still come: nothing listens, it is starting, or it is loading its model.

    Attributes:
        unknown: a Triton server answers, but none that describes itself as ours. That is normal for a moment while a
            server starts, and a mistake when it lasts.
    """

    def __init__(self, text: str, *, unknown: bool = False):
        super().__init__(text)
        self.unknown = unknown


def check_once(host: str, port: int, name: str, timeout: float) -> ServerInfo:
    """Ask once whether the reward model `name` is being served.

    Raises:
        NotReadyYet: it may be worth asking again.
        RewardServerError: it is not: another program is on the port, or it serves another model.
    """
    url = f"http://{host}:{port}"
    code, body = _call(f"{url}/v2/models/{protocol.INFO_MODEL}/infer", timeout, {"inputs": []})
    if code != 200:
        if code in GATEWAY_CODES:
            raise NotReadyYet(f"answers HTTP {code}")
        if not _is_triton(url, timeout):
            raise RewardServerError(_foreign(host, port, f"HTTP {code}"))
        raise NotReadyYet(f"is a Triton server without '{protocol.INFO_MODEL}' (HTTP {code})", unknown=True)
    try:
        info = ServerInfo.from_json(json.loads(body)["outputs"][0]["data"][0])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise RewardServerError(_foreign(host, port, f"an answer that is not a reward server's ({error})")) from error
    if info.name != name:
        raise RewardServerError(
            f"the reward server at {host}:{port} serves the model '{info.name}', and '{name}' was asked for. "
            f"Set remote_rm.reward_model.name={info.name}, or the port to the other server's."
        )
    code, _ = _call(f"{url}/v2/models/{name}/ready", timeout)
    if code != 200:
        raise NotReadyYet(f"is up, its model '{name}' is not ready")
    return info


def infer_json(host: str, port: int, name: str, inputs: list[dict[str, Any]], timeout: float) -> dict[str, list[Any]]:
    """One KServe v2 inference in JSON, as `curl` would send it.

    Returns:
        each output's flat list of data, by name.

    Raises:
        RewardServerError: anything but a proper answer.
    """
    try:
        code, body = _call(f"http://{host}:{port}/v2/models/{name}/infer", timeout, {"inputs": inputs})
        if code != 200:
            raise RewardServerError(f"{host}:{port} answered HTTP {code} to a request to '{name}': {body[:500]!r}")
        return {output["name"]: output["data"] for output in json.loads(body)["outputs"]}
    except (NotReadyYet, ValueError, KeyError, TypeError) as error:
        raise RewardServerError(f"{host}:{port} gave no proper answer to a request to '{name}': {error}") from error


def _call(url: str, timeout: float, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """Status and body of a GET, or of a POST where there is a body; NotReadyYet where no HTTP answer came."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    # Proxies of the environment are for the outside world; a reward server is a neighbour.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as response:
            return response.status, response.read(1 << 20)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(1 << 20)
    except http.client.RemoteDisconnected as error:
        raise NotReadyYet("closed the connection without an answer") from error
    except http.client.HTTPException as error:
        host = request.host or url
        raise RewardServerError(f"what listens on {host} does not speak HTTP ({error!r}). Check the port.") from error
    except OSError as error:
        raise NotReadyYet(f"does not answer ({reason_of(error)})") from error


def reason_of(error: BaseException) -> str:
    """The cause of a network error in a few words."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        error = error.reason
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, socket.gaierror):
        return "the host name is unknown"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


def _is_triton(url: str, timeout: float) -> bool:
    code, body = _call(f"{url}/v2", timeout)
    try:
        return code == 200 and "extensions" in json.loads(body)
    except (ValueError, TypeError):
        return False


def _foreign(host: str, port: int, found: str) -> str:
    return (
        f"another program listens on {host}:{port}: expected a reward server, got {found}. "
        "Check host and port against the server's line 'ready at http://...'."
    )
