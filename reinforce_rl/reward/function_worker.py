"""What runs inside a worker process of reward functions: nothing here imports torch."""

from __future__ import annotations

import math
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reinforce_rl.reward import base
from reinforce_rl.reward.function_loading import FunctionSpec, LoadFault, load_function, source_sha256
from reinforce_rl.utils.process import die_with_parent

MESSAGE_LETTERS = 500  # an answer must fit into one write to a pipe, which a kill cannot cut in two


@dataclass(frozen=True)
class Outcome:
    """Of one sample.

    Attributes:
        status: STATUS_OK, STATUS_NOT_FINITE or STATUS_INTERNAL.
        value: NaN unless the status is STATUS_OK.
        fault: what went wrong and where, without any text of the sample.
        message: the error's own text, which may hold the sample's.
    """

    status: int
    value: float
    fault: str = ""
    message: str = ""


_functions: dict[str, Callable[..., Any]] = {}
_faults: list[str] = []


def start(parent: int, specs: Mapping[str, FunctionSpec]) -> None:
    """Load the functions. It never raises: what was wrong is told by `look`, and a sample then fails."""
    die_with_parent(parent)
    # Pebble's own handler runs between two bytecodes: never, in a regular expression that backtracks for ever.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name, spec in specs.items():
        try:
            _functions[name] = load_function(spec)
        except LoadFault as fault:
            _faults.append(str(fault))


def look() -> tuple[list[str], dict[str, str | None]]:
    """The faults of loading, and the hash of each function's file."""
    return _faults, {name: source_sha256(function) for name, function in _functions.items()}


def score(name: str, prompt: str, response: str, record: Mapping[str, Any]) -> Outcome:
    """One sample by one function."""
    try:
        value = _functions[name](prompt, response, record)
        if isinstance(value, (str, bytes)):
            raise TypeError(f"a reward function returned a {type(value).__name__}; expected a number")
        number = float(value)
    except (Exception, SystemExit) as error:  # whatever a user's function does
        places = traceback.extract_tb(error.__traceback__)
        place = f" at {os.path.basename(places[-1].filename)}:{places[-1].lineno}" if places else ""
        return Outcome(base.STATUS_INTERNAL, math.nan, f"{type(error).__name__}{place}", str(error)[:MESSAGE_LETTERS])
    if not math.isfinite(number):
        return Outcome(base.STATUS_NOT_FINITE, math.nan, f"returned {number}")
    return Outcome(base.STATUS_OK, number)


def ping() -> Outcome:
    """Nothing but a proof that a worker answers."""
    return Outcome(base.STATUS_OK, 0.0)
