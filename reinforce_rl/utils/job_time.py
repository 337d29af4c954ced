"""Time limits of a job: durations in NeMo's form, and Slurm's start and end times."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.utils.slurm_commands import END_VARIABLE, START_VARIABLE, job_times

ASK_SECONDS = 10.0  # for squeue, while other ranks wait
_UNITS = (1, 60, 3600, 86400)  # seconds, minutes, hours, days


def parse_duration(text: str) -> float:
    """Convert `DD:HH:MM:SS` (NeMo's format) to seconds; leading parts may be omitted.

    Raises ValueError.
    """
    if not re.fullmatch(r"\d+(:\d+){0,3}", text):
        raise ValueError("expected DD:HH:MM:SS, such as 00:03:45:00")
    parts = text.split(":")[::-1]
    seconds = sum(int(part) * unit for part, unit in zip(parts, _UNITS, strict=False))
    if seconds == 0:
        raise ValueError("expected more than no time at all")
    return float(seconds)


@dataclass(frozen=True)
class JobTimes:
    """Start and end of a Slurm job, in unix seconds; None if unknown."""

    start: float | None = None
    end: float | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> JobTimes:
        """Read Slurm's variables.

        Raises ConfigError: one is not a time, or the end is not after the start.
        """
        times: dict[str, float | None] = {}
        faults = []
        for name in (START_VARIABLE, END_VARIABLE):
            text = environment.get(name, "")
            is_time = re.fullmatch(r"[0-9]{1,12}", text) is not None
            times[name] = float(text) if is_time else None
            if text and not is_time:
                faults.append(
                    Fault(
                        f"the environment variable {name} is {text!r}; expected unix "
                        "seconds, or unset it",
                        key="slurm.job_time.not_unix_seconds",
                    )
                )
        start = times[START_VARIABLE]
        end = times[END_VARIABLE]
        if start is not None and end is not None and end <= start:
            faults.append(
                Fault(
                    f"the environment variable {END_VARIABLE} is {end:.0f}, not after "
                    f"{START_VARIABLE}, {start:.0f}; correct or unset them",
                    key="slurm.job_time.end_before_start",
                )
            )
        if faults:
            raise ConfigError(faults)
        return cls(start, end)

    @classmethod
    def asked(cls, environment: Mapping[str, str]) -> JobTimes:
        """Like `of`, but ask `squeue` if the end is not set. Slurm 22.05 does not set it.

        Raises ConfigError as `of`, and SlurmCallError where Slurm does not say it.
        """
        times = cls.of(environment)
        job_id = environment.get("SLURM_JOB_ID")
        if times.end is not None or not job_id:
            return times
        components = [
            environment[name]
            for name in sorted(environment)
            if name.startswith("SLURM_JOB_ID_HET_GROUP_") and environment[name] != job_id
        ]
        start, end = job_times(job_id, *components, seconds=ASK_SECONDS)
        if times.start is not None:
            start = times.start
        return cls(start, end)
