"""Asks a reward server whether it can score."""

from __future__ import annotations

from reinforce_rl.rewards.transport import FailedAttempt, exchange, url_of, wait_for
from reinforce_rl.utils.net import Address
from reinforce_rl.utils.untrusted_files import parse_json

HEALTH_SECONDS = 5.0  # from connecting to the whole answer
ANSWER_BYTES = 1 << 16


def health_fault(server: Address) -> str | None:
    """Query /health of a reward server; return why it cannot score, or None."""
    question = exchange(url_of(server, "/health"), HEALTH_SECONDS, max_bytes=ANSWER_BYTES)
    try:
        answer = wait_for(question)
    except FailedAttempt as error:
        return f"{server} {error}"
    try:
        text = parse_json(answer.body)["text"]
    except (ValueError, KeyError, TypeError):
        return f"{server} answers HTTP {answer.code}, and not as a reward server does"
    return None if answer.code == 200 else f"{server}: {text}"
