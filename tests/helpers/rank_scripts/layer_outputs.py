"""Layer outputs of a sharded model. Usage: layer_outputs.py FOLDER OUT TP PP SP TOKEN...

Each rank writes OUT.RANK.
"""

from __future__ import annotations

import sys

import torch
from helpers.policies import megatron_model

from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.model.layer_outputs import layer_outputs


def main() -> None:
    folder, out, *numbers = sys.argv[1:]
    tensor, pipeline, shares, *tokens = map(int, numbers)
    with parallel_mesh(tensor, pipeline, sequence_parallel=bool(shares)) as mesh:
        torch.save(layer_outputs(megatron_model(folder, mesh), tokens), f"{out}.{mesh.rank}")


if __name__ == "__main__":
    main()
