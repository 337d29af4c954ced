"""Two tensor-parallel ranks: scores of a fixed batch and their gradient. Usage: log_probs_tp2.py OUT FOLDER...

Writes OUT/NAME.pt for each folder's name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from helpers.token_scores import scores_and_gradients

from reinforce_rl.megatron.mesh import parallel_mesh


def main() -> None:
    out, *folders = map(Path, sys.argv[1:])
    with parallel_mesh(tensor_model_parallel_size=2) as mesh:
        for folder in folders:
            found = scores_and_gradients(folder, mesh)
            if mesh.is_main:
                torch.save(found, out / f"{folder.name}.pt")


if __name__ == "__main__":
    main()
