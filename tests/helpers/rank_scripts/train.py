"""Two ranks: a whole run of the tiny model. Usage: train.py FOLDER REWARD OVERRIDE...

See `tiny_run` for REWARD.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from helpers import tiny_run

from reinforce_rl.config.load import load_config
from reinforce_rl.megatron.mesh import parallel_mesh


def main() -> None:
    folder, reward, *overrides = sys.argv[1:]
    config = load_config(tiny_run.compose(*overrides))
    with (
        parallel_mesh() as mesh,
        tiny_run.tiny_trainer(config, mesh, getattr(tiny_run, reward)) as trainer,
    ):
        trainer.fit()
        torch.save(tiny_run.weights(trainer), Path(folder) / f"weights.{mesh.rank}")


if __name__ == "__main__":
    main()
