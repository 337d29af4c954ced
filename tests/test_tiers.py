"""Which tests plain pytest runs: the fast tier, or what its arguments name."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.models import ROOT

FILE = "tests/tools/test_docs_site.py"
SLOW = "test_search_finds_a_message_and_no_other_host_is_asked"


def collected(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--collect-only", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.more
@pytest.mark.parametrize(
    ("arguments", "has_slow", "has_fast"),
    [
        ([FILE], False, True),
        ([FILE, "-m", "slow"], True, False),
        ([FILE, "-m", ""], True, True),
        ([f"{FILE}::{SLOW}"], True, False),
    ],
)
def test_plain_pytest_is_the_fast_tier_and_other_tiers_can_be_chosen(arguments, has_slow, has_fast):
    names = collected(*arguments)
    assert (SLOW in names) == has_slow
    assert any(name != SLOW for name in names) == has_fast
