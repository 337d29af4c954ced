"""Write each rank's memory use in each configuration: OUT FOLDER NAME..."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from helpers.memory_use import CASES, measured, overrides_of
from torch import distributed


def main(out: Path, folder: Path, names: list[str]) -> None:
    if "RANK" in os.environ:
        # one mesh for all cases: ranks that join anew each time may miss each other
        distributed.init_process_group("gloo")
    for name in names:
        case = CASES[name]
        use = measured(overrides_of(folder, case.ranks, *case.overrides))
        path = out / f"{name}.{os.environ.get('RANK', '0')}"
        path.write_text(json.dumps(dataclasses.asdict(use)))
    if "RANK" in os.environ:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
