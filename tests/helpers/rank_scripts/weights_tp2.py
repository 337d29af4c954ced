"""Two tensor-parallel ranks: import and export of each folder given, against transformers' logits.

Usage: weights_tp2.py OUT FOLDER...   Rank 0 writes {folder name}.pt with the logits, and the exported folders.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from helpers.policies import all_logits, megatron_model, random_tokens

from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.weights.hf_weights import export_hf_folder


def main() -> None:
    out, *folders = map(Path, sys.argv[1:])
    with parallel_mesh(tensor_model_parallel_size=2) as mesh:
        for folder in folders:
            lm = megatron_model(folder, mesh)
            logits = all_logits(lm, random_tokens(lm.architecture.vocab_size, 2, 40))
            export_hf_folder(lm, folder, out / folder.name)
            if mesh.is_main:
                torch.save(logits, out / f"{folder.name}.pt")


if __name__ == "__main__":
    main()
