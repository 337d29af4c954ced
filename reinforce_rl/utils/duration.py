"""Parses durations, and the start and end of a Slurm allocation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from reinforce_rl.errors import ConfigError

START_VARIABLE, END_VARIABLE = "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"


def parse_duration(text: str) -> float:
    """Convert `DD:HH:MM:SS` (NeMo's format) to seconds; leading parts may be omitted (`30:00` is half an hour).

    Raises:
        ValueError: wrong format, or zero.
    """
    if not re.fullmatch(r"\d+(:\d+){0,3}", text):
        raise ValueError("expected DD:HH:MM:SS, such as 00:03:45:00")
    seconds = 0
    for part, unit in zip(reversed(text.split(":")), (1, 60, 3600, 86400), strict=False):
        seconds += int(part) * unit
    if seconds == 0:
        raise ValueError("expected more than no time at all")
    return float(seconds)


@dataclass(frozen=True)
class Allocation:
    """Start and end of an allocation, in unix seconds; None if unknown."""

    start: float | None = None  # unix seconds
    end: float | None = None  # unix seconds

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Allocation:
        """Read the variables set by Slurm; an empty one counts as unset.

        Raises:
            ConfigError: a value is not a time, or the end is not after the start.
        """
        times: list[float | None] = []
        faults = []
        for name in (START_VARIABLE, END_VARIABLE):
            text = environment.get(name, "")
            plain = re.fullmatch(r"[0-9]{1,12}", text) is not None
            times.append(float(text) if plain else None)
            if text and not plain:
                faults.append(f"the environment variable {name} is {text!r}; expected unix seconds, or unset it")
        start, end = times
        if start is not None and end is not None and end <= start:
            faults.append(
                f"the environment variable {END_VARIABLE} is {end:.0f}, not after {START_VARIABLE}, {start:.0f}; "
                "correct or unset them"
            )
        if faults:
            raise ConfigError(faults)
        return cls(start, end)
