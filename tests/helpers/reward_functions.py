"""Reward functions for tests, good and bad. Worker processes import this file, so it imports nothing heavy."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEAVY = ("torch", "megatron", "transformers")


def told(prompt: str, response: str, record: Mapping[str, Any], *, folder: str = "") -> float:
    """Does what the response says; else the record's number."""
    if response == "sleep":
        time.sleep(600)
    if response == "loop":
        while True:
            pass
    if response == "backtrack":  # in C, where no Python signal handler runs
        re.fullmatch("(a+)+b", "a" * 60)
    if response == "exit":
        os._exit(7)
    if response == "sys.exit":
        sys.exit(1)
    if response == "heavy":
        return float(sum(name in sys.modules for name in HEAVY))
    if response == "threads":
        return float(os.environ["OMP_NUM_THREADS"])
    if response == "print":
        print("this must not get between the answers", flush=True)
    if response in ("pid", "pid and loop"):
        Path(folder, str(os.getpid())).touch()
    if response == "pid and loop":
        while True:
            pass
    if response == "secret":
        raise ValueError(response)
    return record["value"]


def share_of_letters(prompt: str, response: str, record: Mapping[str, Any], *, scale: float = 1.0) -> float:
    """How much of the response is made of the prompt's own letters, and a little for every letter of the prompt."""
    share = sum(letter in record["letters"] for letter in response) / max(len(response), 1)
    return scale * share + len(prompt) / 1000


def counted(prompt: str, response: str, record: Mapping[str, Any]) -> float:
    """The response's length."""
    if response == "kill":  # the parent of all workers, and this one with it
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    return float(len(response))
