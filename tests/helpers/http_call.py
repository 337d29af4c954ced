"""One HTTP exchange, for tests that inspect responses themselves."""

from __future__ import annotations

from collections.abc import Mapping

from reinforce_rl.rewards.transport import HttpAnswer, exchange, url_of, wait_for
from reinforce_rl.utils.net import Address


def call(
    port: int,
    path: str,
    timeout: float = 60.0,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> HttpAnswer:
    """Send a GET to this machine, or a POST if there is a body."""
    return wait_for(
        exchange(url_of(Address("127.0.0.1", port), path), timeout, body=body, headers=headers)
    )
