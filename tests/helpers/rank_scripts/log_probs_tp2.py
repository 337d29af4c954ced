"""Two tensor-parallel ranks: log-probs of a fixed batch. Usage: log_probs_tp2.py OUT FOLDER...

Writes OUT/NAME.pt for each folder's name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from helpers.policies import megatron_model, padded_sequences

from reinforce_rl.megatron.log_probs import response_log_probs
from reinforce_rl.megatron.mesh import parallel_mesh


def main() -> None:
    out, *folders = map(Path, sys.argv[1:])
    with parallel_mesh(tensor_model_parallel_size=2) as mesh:
        for folder in folders:
            lm = megatron_model(folder, mesh)
            batch = padded_sequences([5, 1, 9, 3], [4, 7, 1, 0], lm.architecture.vocab_size)
            found = response_log_probs(lm, lm, *batch, temperature=0.7, width=7)
            assert found.requires_grad
            if mesh.is_main:
                torch.save(found.detach(), out / f"{folder.name}.pt")


if __name__ == "__main__":
    main()
