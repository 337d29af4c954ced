"""Train or replay on several ranks; prints what a replay found.

Usage: replay.py train FOLDER OVERRIDE ..., or replay.py stored|restart FOLDER OVERRIDE ... by where scores come from.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from helpers.tiny_run import tiny_config

from reinforce_rl.debugging.replay import replay
from reinforce_rl.trainer.run import train


def main() -> None:
    what, folder, *overrides = sys.argv[1:]
    if what == "train":
        train(tiny_config(Path(folder), *overrides))
        return
    found = replay(Path(folder) / "run", 4, reward=what, overrides=overrides, trust=True)
    if found.phases:
        print("FOUND", json.dumps(found.as_json()))


if __name__ == "__main__":
    main()
