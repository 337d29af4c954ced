"""Inspect a reward server: its state, its model, its speed, and its faults."""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

from reinforce_rl.errors import ConfigError, Fault, ReinforceError, RewardServerError
from reinforce_rl.rewards import transport, wire
from reinforce_rl.rewards.transport import FailedAttempt, ModelAddress, NoHttp
from reinforce_rl.utils.control_characters import quoted
from reinforce_rl.utils.net import Address
from reinforce_rl.utils.untrusted_files import parse_json

HEALTH_SECONDS = 30.0  # the server may be scoring its canary
SCORE_SECONDS = 120.0
REPEATS = 5
BATCH_SAMPLES = 32
BATCH_LENGTH = 64
_TOKEN_REFUSED = ("reward_server.token.not_sent", "reward_server.token.unknown")


def check_server(url: str, token: str | None, say: Callable[[str], None]) -> None:
    """Inspect the server at `url`, http://HOST:PORT or HOST:PORT; `say` gets one line at a time.

    Raises ReinforceError if it is down, not a reward server, not ready, not healthy, or refuses
    this client.
    """
    server = _address_of(url)
    health = _health(server)
    say(f"http://{server} is a reward server; its state is '{health['state']}'")
    say(f"queue: {health['in_flight']} requests with the model, {health['queued']} waiting")
    if health["state"] != "ready":
        remedies = {
            "starting": (
                "it is starting; ask again in a minute, and look at its log if that does not change"
            ),
            "draining": (
                "it was asked to stop and is shutting down. Start it again on the same port; "
                "clients retry meanwhile"
            ),
            "failed": (
                f"it has failed and is ending: {health['text']}. Its log has more; start it again"
            ),
        }
        remedy = remedies.get(str(health["state"]), health["text"])
        raise ReinforceError(
            f"http://{server} takes no requests now: {remedy}",
            key="check_server.server.not_ready",
        )
    if not health["healthy"]:
        raise ReinforceError(
            f"http://{server} takes requests, but does not score them: {health['text']}. Look at "
            "the end of its log, then end it (SIGTERM) and start it again; clients retry meanwhile",
            key="check_server.server.not_healthy",
        )
    say(f"health: {health['text']}")
    model = ModelAddress(server, str(health["model"]), token)
    try:
        info = transport.wait_for(transport.ask_description(model, 30.0))
    except RewardServerError as error:
        hint = " (For this script: --token-file FILE.)" if error.key in _TOKEN_REFUSED else ""
        raise ReinforceError(f"{error}{hint}", key=error.key) from error
    except FailedAttempt as error:
        raise ReinforceError(
            f"http://{server} {error}: it may be starting or stopping; ask again in a minute",
            key="check_server.server.no_description",
        ) from error
    length = info.max_length
    tokenizer = info.tokenizer
    say(
        f"serves: '{info.name}'"
        + "".join(f", {key} {value}" for key, value in info.details.items())
    )
    of_tokens = (
        "" if length is None else f", {length} tokens a sample, token ids below {info.vocab_size}"
    )
    say(f"limits: {info.max_batch_size} samples a request{of_tokens}")
    tokenizer_text = (
        f"{tokenizer.vocab_size} tokens, hash {tokenizer.vocab_sha256[:12]}"
        if tokenizer
        else "none; it reads texts"
    )
    say(f"tokenizer: {tokenizer_text}")
    apart = "by itself (deterministic)" if info.deterministic else "together with others"
    added = "added" if info.add_special_tokens else "not added"
    say(f"options: each request is scored {apart}; special tokens are {added} to text")
    if length is None:
        say("speed: not measured; a reward function is called with the samples of a run alone")
        return
    single = [_seconds(model, 1, min(8, length)) for _ in range(REPEATS)]
    say(
        f"speed: one short sample takes {1000 * statistics.median(single):.1f} ms (median of "
        f"{REPEATS})"
    )
    samples = min(BATCH_SAMPLES, info.max_batch_size)
    length = min(BATCH_LENGTH, length)
    batch = min(_seconds(model, samples, length) for _ in range(2))
    say(
        f"speed: {samples} samples of {length} tokens take {batch:.2f} s, "
        f"{samples / batch:.1f} samples/s"
    )


def _address_of(url: str) -> Address:
    place = url.removeprefix("http://").rstrip("/")
    try:
        has_port = re.search(r"[^:]:\d+$", place) is not None
        return Address.parse(place if has_port else f"{place}:{wire.DEFAULT_PORT}")
    except ValueError as error:
        raise ConfigError(
            [
                Fault(
                    f"'{url}' is not the address of a reward server; expected http://HOST:PORT, "
                    "where an IPv6 address stands in brackets: http://[::1]:5555",
                    key="check_server.address.invalid",
                )
            ]
        ) from error


def _health(server: Address) -> dict[str, Any]:
    try:
        answer = transport.wait_for(
            transport.exchange(transport.url_of(server, "/health"), HEALTH_SECONDS)
        )
        reply = f"HTTP {answer.code} without a reward server's answer"
        with contextlib.suppress(ValueError, AttributeError):
            values = parse_json(answer.body)
            if {"state", "healthy", "text", "model", "in_flight", "queued"} <= values.keys():
                return values
    except NoHttp:
        reply = "no HTTP"
    except FailedAttempt as error:
        if "connection refused" in str(error):
            raise ReinforceError(
                f"nothing listens on http://{server} (connection refused): the server is not "
                "running, is still loading its model, or runs elsewhere. Start it, or check host "
                "and port against its line 'ready at http://...'; a server on 127.0.0.1 is reached "
                "from its own machine only (inference.host)",
                key="check_server.server.not_listening",
            ) from error
        raise ReinforceError(
            f"http://{server} cannot be reached: it {error}. Check the host's name, that the "
            "machine is up, and that no firewall blocks the connection",
            key="check_server.server.unreachable",
        ) from error
    raise ReinforceError(
        f"another program listens on http://{server} (/health gave {reply}): check the port "
        "against the server's line 'ready at http://...'; on that machine, ss -ltnp names the "
        "program",
        key="check_server.server.other_program",
    )


def _seconds(model: ModelAddress, samples: int, length: int) -> float:
    shapes = {wire.TOKENS: ([samples, length], 0), wire.SEQUENCE_LENGTHS: ([samples, 1], length)}
    inputs: list[dict[str, Any]] = [
        {"name": key, "datatype": "INT64", "shape": shape, "data": [value] * (shape[0] * shape[1])}
        for key, (shape, value) in shapes.items()
    ]
    started = time.monotonic()
    try:
        answer = transport.infer_json(model, inputs, SCORE_SECONDS)
    except RewardServerError as error:
        is_busy = "HTTP 503" in str(error)
        advice = (
            "it is busy, and clients retry by themselves; ask again later"
            if is_busy
            else "look at its log"
        )
        raise ReinforceError(
            f"http://{model.place} did not score a request: {error}: {advice}",
            key=error.key,
        ) from error
    statuses = answer.get(wire.STATUS, ["missing"])
    if any(statuses):
        raise ReinforceError(
            f"http://{model.place} could not score a sample of {length} tokens of id 0 (status "
            f"{quoted(sorted(set(map(str, statuses))))}); its log says why",
            key="check_server.sample.not_scored",
        )
    return time.monotonic() - started
