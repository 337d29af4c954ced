"""A trainable reward model at several layouts. Usage: trainable.py OUT FOLDER LAYOUT...

Writes OUT/LAYOUT.RANK for each, and checkpoints and exported models below OUT/LAYOUT.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from helpers.layouts import LAYOUTS
from helpers.trainable import computed


def main() -> None:
    out, folder, *names = sys.argv[1:]
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in names:
        with LAYOUTS[name].mesh() as mesh:
            results = computed(LAYOUTS[name], folder, mesh, Path(out) / name)
            torch.save(results, Path(out) / f"{name}.{os.environ['RANK']}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
