"""The batch file of a job: `slurm/train_hetjob.sbatch`, and copies of it with its settings filled
in.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

BATCH_FILE = "train_hetjob.sbatch"
# The lines that a person edits or `submit` fills in.
SETTINGS = (
    "repository",
    "python",
    "batch_python",
    "servers",
    "generator_ranks",
    "generator_restarts",
    "srun_options",
    "setup",
)


def filled_script(template: str, values: Mapping[str, str | int | Path | Sequence[str]]) -> str:
    """Return the batch file with these settings, by their names of `SETTINGS`; a sequence is a
    shell's array.
    """
    lines = template.splitlines(keepends=True)
    for name, value in values.items():
        numbers = [number for number, line in enumerate(lines) if line.startswith(f"{name}=")]
        if name not in SETTINGS or len(numbers) != 1:
            raise ValueError(f"{BATCH_FILE} has no setting {name}")
        is_array = not isinstance(value, (str, int, Path))
        shown = f"({shlex.join(value)})" if is_array else shlex.quote(str(value))
        _, *comment = re.split(r"( *(?:#|$))", lines[numbers[0]], maxsplit=1)
        lines[numbers[0]] = "".join([f"{name}={shown}", *comment])
    return "".join(lines)
