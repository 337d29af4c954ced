"""What users write as Slurm does: times, memory and GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass

UNLIMITED = ("UNLIMITED", "INFINITE", "INFINITY", "-1")
_SECONDS = (
    # Slurm reads M, M:S, H:M:S without days, and D-H, D-H:M, D-H:M:S with them.
    (re.compile(r"(\d+)"), (60,)),
    (re.compile(r"(\d+):(\d+)"), (60, 1)),
    (re.compile(r"(\d+):(\d+):(\d+)"), (3600, 60, 1)),
    (re.compile(r"(\d+)-(\d+)"), (86400, 3600)),
    (re.compile(r"(\d+)-(\d+):(\d+)"), (86400, 3600, 60)),
    (re.compile(r"(\d+)-(\d+):(\d+):(\d+)"), (86400, 3600, 60, 1)),
)
_MEGABYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


def parse_time(text: str) -> int | None:
    """Seconds of a time limit; None where there is none.

    Raises:
        ValueError: it is no time.
    """
    if text.upper() in UNLIMITED:
        return None
    for form, units in _SECONDS:
        if found := form.fullmatch(text):
            seconds = sum(int(part) * unit for part, unit in zip(found.groups(), units, strict=True))
            if seconds > 0:
                return seconds
    raise ValueError(f"'{text}'; expected MINUTES, HH:MM:SS, D-HH:MM:SS or UNLIMITED")


def parse_memory(text: str) -> int:
    """Megabytes of Slurm's SIZE[K|M|G|T]; 0 stands for all of a node's.

    Raises:
        ValueError: it is no size.
    """
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if found is None:
        raise ValueError(f"'{text}'; expected SIZE[K|M|G|T], such as 64G, or 0 for all of a node's memory")
    number, unit = found.groups()
    megabytes = int(number) * _MEGABYTES[unit or "M"]
    return int(megabytes) if megabytes == int(megabytes) else int(megabytes) + 1


@dataclass(frozen=True)
class Gpus:
    """GPUs of one node.

    Attributes:
        count: how many.
        type: as the cluster calls them; None: any, or not known.
    """

    count: int
    type: str | None = None

    def __str__(self) -> str:
        return f"{self.type}:{self.count}" if self.type else str(self.count)

    @classmethod
    def parse(cls, text: str) -> Gpus | None:
        """Of [TYPE:]COUNT; None for 0.

        Raises:
            ValueError: it is nothing of the kind.
        """
        found = re.fullmatch(r"(?:([\w.-]*[A-Za-z][\w.-]*):)?(\d+)", text)
        if found is None:
            raise ValueError(f"'{text}'; expected GPUs of a node as [TYPE:]COUNT, such as 8 or h100:8, or 0 for none")
        return cls(int(found.group(2)), found.group(1)) if int(found.group(2)) else None
