"""What runs in the process of one sample, which the host forked for it: nothing here imports torch."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from reinforce_rl.rewards import base
from reinforce_rl.utils.process import die_with_parent

MESSAGE_LETTERS = 500  # an answer must fit into a pipe that nobody reads yet

Functions = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Outcome:
    """Of one sample.

    Attributes:
        status: STATUS_OK, STATUS_NOT_FINITE, STATUS_INTERNAL or STATUS_TIMED_OUT.
        value: NaN unless the status is STATUS_OK.
        fault: what went wrong and where, without any text of the sample.
        message: the error's own text, which may hold the sample's.
    """

    status: int
    value: float = math.nan
    fault: str = ""
    message: str = ""


def work(functions: Functions, request: bytes, answer_fd: int, parent: int) -> None:
    """Score the sample, write its `Outcome` as a line of JSON and end the process."""
    code = 1
    try:
        os.setpgid(0, 0)  # what the function starts is ended with it
        die_with_parent(parent)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        with contextlib.suppress(OSError):  # opened anew: flags such as O_NONBLOCK are not other samples' too
            output = os.open("/proc/self/fd/1", os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
        outcome = _score(functions, request)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os.write(answer_fd, json.dumps(asdict(outcome)).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


def _score(functions: Functions, request: bytes) -> Outcome:
    sample = json.loads(request)
    if "function" not in sample:
        return Outcome(base.STATUS_OK, 0.0)  # a ping
    try:
        value = functions[sample["function"]](sample["prompt"], sample["response"], sample["record"])
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
            return Outcome(base.STATUS_INTERNAL, fault=f"returned a {type(value).__name__}; expected a number")
        number = float(value)
    except BaseException as error:  # whatever a user's function raises, KeyboardInterrupt and SystemExit too
        fault = f"{type(error).__name__}{_place(error)}"
        return Outcome(base.STATUS_INTERNAL, fault=fault, message=str(error)[:MESSAGE_LETTERS])
    if not math.isfinite(number):
        return Outcome(base.STATUS_NOT_FINITE, fault=f"returned {number}")
    return Outcome(base.STATUS_OK, number)


def _place(error: BaseException) -> str:
    """The last line of the function's own file that the error went through, where it went through any."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
