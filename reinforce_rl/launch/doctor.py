"""Inspects a reward server for a person: whether it is up, what it serves, how fast, and what is wrong."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from reinforce_rl.errors import ConfigError, ReinforceError, RewardServerError
from reinforce_rl.rewards import wire
from reinforce_rl.rewards.transport import (
    FailedAttempt,
    HttpAnswer,
    NoHttp,
    check_once,
    exchange,
    infer_json,
    wait_for,
)
from reinforce_rl.rewards.wire import ServerInfo
from reinforce_rl.utils.net import Address

HEALTH_SECONDS = 30.0  # the server may be scoring its canary
SCORE_SECONDS = 120.0
REPEATS = 5
BATCH_SAMPLES = 32
BATCH_LENGTH = 64


class Unwell(ReinforceError):
    """The server cannot be used now; the text gives the reason and a remedy."""


@dataclass(frozen=True)
class _Server:
    address: Address
    token: str | None

    @property
    def url(self) -> str:
        return f"http://{self.address}"


def check_server(url: str, token: str | None, say: Callable[[str], None]) -> None:
    """Inspect a server step by step.

    Args:
        url: http://HOST:PORT, or HOST:PORT.
        say: called with one line at a time.

    Raises:
        ConfigError: invalid URL.
        Unwell: it is down, not a reward server, not ready, not healthy, or refuses this client.
    """
    server = _server_of(url, token)
    health = _health(server)
    say(f"{server.url} is a reward server; its state is '{health['state']}'")
    busy = f"{health['in_flight']} requests with the model, {health['queued']} waiting"
    say(f"queue: {busy}")
    if health["state"] != "ready":
        raise Unwell(_not_ready(server, health))
    if not health["healthy"]:
        raise Unwell(
            f"{server.url} takes requests and does not score them: {health['text']}. Look at the last lines of its "
            "log, then end it (SIGTERM) and start it again; clients wait and retry meanwhile"
        )
    say(f"health: {health['text']}")
    info = _description(server, str(health["model"]))
    for line in _lines_of(info):
        say(line)
    for line in _measure(server, info):
        say(line)


def _server_of(url: str, token: str | None) -> _Server:
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port or wire.DEFAULT_PORT
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or port == 0 or parts.path.strip("/"):
        raise ConfigError([f"'{url}' is no address of a reward server; expected http://HOST:PORT"])
    return _Server(Address(parts.hostname, port), token)


def _health(server: _Server) -> dict[str, Any]:
    try:
        answer = wait_for(exchange(server.address, "/health", HEALTH_SECONDS))
    except NoHttp as error:
        raise Unwell(_foreign(server, "no HTTP")) from error
    except FailedAttempt as error:
        if "connection refused" in str(error):
            raise Unwell(
                f"nothing listens on {server.url} (connection refused): the server is not running, is still loading "
                "its model, or runs elsewhere. Start it, or check host and port against its line 'ready at "
                "http://...'; a server on 127.0.0.1 is reached from its own machine only (inference.host)"
            ) from error
        raise Unwell(
            f"{server.url} cannot be reached: it {error}. Check the host's name, that the machine is up, and that no "
            "firewall is between"
        ) from error
    values = _json_of(answer)
    if not {"state", "healthy", "text", "model", "in_flight", "queued"} <= values.keys():
        raise Unwell(_foreign(server, f"HTTP {answer.code} without a reward server's answer"))
    return values


def _json_of(answer: HttpAnswer) -> dict[str, Any]:
    try:
        values = json.loads(answer.body)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _foreign(server: _Server, found: str) -> str:
    return (
        f"another program listens on {server.url} (/health gave {found}): check the port against the server's line "
        "'ready at http://...'; on that machine, ss -ltnp names the program"
    )


def _not_ready(server: _Server, health: dict[str, Any]) -> str:
    advice = {
        "starting": "it is starting; ask again in a minute, and look at its log if that does not change",
        "draining": "it was told to stop: it finishes what it has and ends. Start it again on the same port; clients "
        "wait and retry meanwhile",
        "failed": f"it has failed and is ending: {health['text']}. Its log has more; start it again",
    }
    return f"{server.url} takes no requests now: {advice.get(str(health['state']), health['text'])}"


def _description(server: _Server, name: str) -> ServerInfo:
    try:
        return check_once(server.address.host, server.address.port, name, 30.0, token=server.token)
    except RewardServerError as error:
        hint = " (For this script: --token-file FILE.)" if "token" in str(error) else ""
        raise Unwell(f"{error}{hint}") from error
    except FailedAttempt as error:
        raise Unwell(f"{server.url} {error}: it may be starting or stopping; ask again in a minute") from error


def _lines_of(info: ServerInfo) -> list[str]:
    tokenizer = info.tokenizer
    apart = "by itself (deterministic)" if info.deterministic else "together with others"
    return [
        f"serves: '{info.name}'" + "".join(f", {key} {value}" for key, value in info.details.items()),
        f"limits: {info.max_batch_size} samples a request"
        + (
            ""
            if info.max_length is None
            else f", {info.max_length} tokens a sample, token ids below {info.vocab_size}"
        ),
        "tokenizer: none; it reads texts"
        if tokenizer is None
        else f"tokenizer: {tokenizer.vocab_size} tokens, hash {tokenizer.vocab_sha256[:12]}",
        f"options: each request is scored {apart}; special tokens are "
        f"{'' if info.add_special_tokens else 'not '}added to text",
    ]


def _measure(server: _Server, info: ServerInfo) -> list[str]:
    if info.max_length is None:
        return ["speed: not measured; a reward function is called with the samples of a run alone"]
    single = [_seconds(server, info.name, 1, min(8, info.max_length)) for _ in range(REPEATS)]
    samples, length = min(BATCH_SAMPLES, info.max_batch_size), min(BATCH_LENGTH, info.max_length)
    batch = min(_seconds(server, info.name, samples, length) for _ in range(2))
    return [
        f"speed: one short sample takes {1000 * statistics.median(single):.1f} ms (median of {REPEATS})",
        f"speed: {samples} samples of {length} tokens take {batch:.2f} s, {samples / batch:.1f} samples/s",
    ]


def _seconds(server: _Server, name: str, samples: int, length: int) -> float:
    inputs = [
        {
            "name": wire.TOKENS,
            "datatype": "INT64",
            "shape": [samples, length],
            "data": [0] * (samples * length),
        },
        {
            "name": wire.SEQUENCE_LENGTHS,
            "datatype": "INT64",
            "shape": [samples, 1],
            "data": [length] * samples,
        },
    ]
    started = time.monotonic()
    try:
        answer = infer_json(server.address.host, server.address.port, name, inputs, SCORE_SECONDS, token=server.token)
    except RewardServerError as error:
        advice = "look at its log"
        if "HTTP 503" in str(error):
            advice = "it is busy; clients are told to come back, and do. Ask again later"
        raise Unwell(f"{server.url} did not score a request: {error}: {advice}") from error
    if any(answer[wire.STATUS]):
        raise Unwell(
            f"{server.url} could not score a sample of {length} tokens of id 0 "
            f"(status {sorted(set(answer[wire.STATUS]))}); its log says why"
        )
    return time.monotonic() - started
