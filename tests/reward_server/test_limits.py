"""How much a client may ask."""

from __future__ import annotations

import pytest

from reinforce_rl.reward_server.front.limits import FrontLimits, Refusal, check_length

LIMITS = FrontLimits(max_request_bytes=10_000, max_samples=8, max_sequence_length=64)


def test_a_body_has_a_greatest_length():
    check_length(10_000, LIMITS)
    check_length(None, LIMITS)
    with pytest.raises(Refusal, match=r"10001 bytes.*at most 10000"):
        check_length(10_001, LIMITS)
