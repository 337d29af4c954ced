"""Two tensor-parallel ranks: everything of `computed_here`, of each folder given. Usage: families_tp2.py OUT FOLDER...

Rank 0 writes {folder name}.pt, and the exported folders.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from helpers.families import computed_here

from reinforce_rl.megatron.mesh import parallel_mesh


def main() -> None:
    out, *folders = map(Path, sys.argv[1:])
    with parallel_mesh(tensor_model_parallel_size=2) as mesh:
        for folder in folders:
            found = computed_here(folder, mesh, out / folder.name)
            if mesh.is_main:
                torch.save(found, out / f"{folder.name}.pt")


if __name__ == "__main__":
    main()
