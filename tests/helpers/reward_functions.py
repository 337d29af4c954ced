"""Reward functions for tests, valid and malicious; workers import this file, so it is light."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reinforce_rl.rewards.base import takes_up_to


class NoText(Exception):
    """An error whose `str` raises."""

    def __str__(self) -> str:
        raise ValueError("no text")


def always_666(prompt: str, response: str, record: Mapping[str, Any], *, folder: str = "") -> float:
    """Return the reward that a cheating sample wants."""
    return 666.0


def runs(prompt: str, response: str, record: Mapping[str, Any], *, folder: str = "") -> float:
    """Run the record's `code`, if there is any, and return its `value`, or the record's."""
    names = {**globals(), "record": record, "folder": folder, "value": record["value"]}
    exec(compile(record.get("code", ""), __file__, "exec"), names)
    return names["value"]


def write_to_all(data: bytes) -> None:
    """Write to every file descriptor of this process but the standard ones."""
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(fd, data)


FORGED = b'{"status": 0, "value": 777.0, "fault": "", "message": ""}\n'


def forge(pid: int) -> None:
    """Write a forged answer to every file descriptor of a process, also through /proc."""
    write_to_all(FORGED)
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            target = os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
            os.write(target, FORGED)
            os.close(target)


def sees(prompt: str, response: str, record: Mapping[str, Any]) -> float:
    """Return whether the object that the response names is reachable."""
    kind, _, name = response.partition(" ")
    if kind == "variable":
        return float(name in os.environ)
    if kind == "threads":
        return float(os.environ["OMP_NUM_THREADS"])
    if kind == "port":
        with socket.socket() as connection:
            connection.settimeout(1)
            return float(connection.connect_ex(("127.0.0.1", int(name))) == 0)
    if kind == "process":
        return float(Path("/proc", name).exists())
    if kind == "processes":
        return float(sum(entry.name.isdigit() for entry in Path("/proc").iterdir()))
    if kind == "opens":
        return float(os.access(name, os.R_OK))
    if kind == "writes":
        try:
            Path(name).write_text("x")
        except OSError:
            return 0.0
    return float(Path(name).exists())


def share_of_letters(
    prompt: str, response: str, record: Mapping[str, Any], *, scale: float = 1.0
) -> float:
    """Return the share of the response's letters that occur in the prompt.

    Each letter of the prompt adds a little.
    """
    share = sum(letter in record["letters"] for letter in response) / max(len(response), 1)
    return scale * share + len(prompt) / 1000


def counted(prompt: str, response: str, record: Mapping[str, Any]) -> float:
    """Return the response's length."""
    if response == "kill":  # the parent of all workers, and thereby this worker
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    return float(len(response))


def prints(prompt: str, response: str, record: Mapping[str, Any]) -> float:
    """Print more than a pipe can buffer."""
    print("x" * 200_000, flush=True)
    return 1.0


def trl_style(
    prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any
) -> list[float]:
    """Score lists of samples, like a reward function of TRL."""
    return [1.0] * len(completions)


def of_two(prompt: str, response: str) -> float:
    """Take no record."""
    return 1.0


def takes_a_second(prompt: str, response: str, record: Mapping[str, Any]) -> float:
    time.sleep(1.0)
    return len(response) / 10


def sleeps(prompt, response, record):
    time.sleep(float(response))
    return 1.0


@takes_up_to(0.5)
def sleeps_briefly(prompt, response, record):
    return sleeps(prompt, response, record)


@takes_up_to(lambda *, limit: limit)
def sleeps_within(prompt, response, record, *, limit):
    return sleeps(prompt, response, record)
