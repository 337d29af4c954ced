"""Import paths of before, which users' code and configurations hold."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from reinforce_rl.aliases import OLD


@pytest.mark.parametrize("old", OLD)
def test_an_old_path_gives_the_module_of_today(old: str) -> None:
    module = importlib.import_module(old)
    assert module is importlib.import_module(OLD[old])
    assert module.__name__ == OLD[old] and module.__spec__ is not None and module.__spec__.name == OLD[old]


def test_statements_that_users_have() -> None:
    code = """
import reinforce_rl.reward.functions as functions
from reinforce_rl.reward import base
from reinforce_rl.reward.base import TextSample
from reinforce_rl.algorithms.advantages import leave_one_out
import reinforce_rl.rewards.functions, reinforce_rl.rewards.base
assert functions is reinforce_rl.rewards.functions and base is reinforce_rl.rewards.base
assert base.TextSample is TextSample and callable(leave_one_out)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
