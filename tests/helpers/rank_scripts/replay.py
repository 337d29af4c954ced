"""Train or replay on several ranks; print what a replay reports.

Usage: replay.py train FOLDER OVERRIDE..., or replay.py stored|restart FOLDER OVERRIDE... for the
source of scores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from helpers.tiny_run import tiny_config

from reinforce_rl.debugging.replay import replay
from reinforce_rl.trainer.run import train


def main() -> None:
    task, folder, *overrides = sys.argv[1:]
    if task == "train":
        train(tiny_config(Path(folder), *overrides))
        return
    report = replay(Path(folder) / "run", 4, reward=task, overrides=overrides, trust=True)
    if report.phases:
        print("FOUND", json.dumps(report.as_json()))


if __name__ == "__main__":
    main()
