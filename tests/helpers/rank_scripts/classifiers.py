"""Two ranks score with each classifier folder. Usage: classifiers.py OUT TP PP CP FOLDER...

Every rank writes the attributes to OUT/{folder name}.RANK.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from helpers.classifiers import sequences_to_score

from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.reward_model.scorer import Batching, load_reward_model


def main() -> None:
    out, tp, pp, cp, *folders = sys.argv[1:]
    with parallel_mesh(int(tp), int(pp), int(cp), sequence_parallel=False) as mesh:
        for folder in folders:
            model = load_reward_model(folder, None, mesh, batching=Batching(4))
            scores = model.score_attributes(sequences_to_score())
            torch.save(
                torch.tensor(scores.attributes), Path(out) / f"{Path(folder).name}.{mesh.rank}"
            )


if __name__ == "__main__":
    main()
