"""Several layouts of the same ranks, one after another. Usage: layouts.py OUT FOLDER LAYOUT...

Writes results to OUT/LAYOUT.RANK, and exports the policy to OUT/LAYOUT.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from helpers.layouts import ALL_LAYOUTS, computed


def main() -> None:
    out, folder, *names = sys.argv[1:]
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in names:
        with ALL_LAYOUTS[name].mesh() as mesh:
            if mesh.is_main:
                print(mesh.layout.grid(), flush=True)
            results = computed(ALL_LAYOUTS[name], folder, mesh, Path(out) / name)
            torch.save(results, Path(out) / f"{name}.{os.environ['RANK']}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
