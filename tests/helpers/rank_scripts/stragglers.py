"""Several ranks: a plain run of the tiny model, and a run with a slow rank.

Usage: stragglers.py FOLDER SLOW_RANK OVERRIDE... The runs are in FOLDER/plain and FOLDER/slow.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from helpers import tiny_run

from reinforce_rl.config.load import load_config
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.trainer.reinforce import ReinforceTrainer

SECONDS = 2.0


def slow_down(trainer: ReinforceTrainer) -> None:
    model = trainer.model
    infer = model.infer
    train = model.get_loss_and_metrics

    def slow_infer(*args, **options):
        time.sleep(SECONDS)
        return infer(*args, **options)

    def slow_train(*args, **options):
        time.sleep(SECONDS)
        return train(*args, **options)

    model.infer = slow_infer  # type: ignore[method-assign]
    model.get_loss_and_metrics = slow_train  # type: ignore[method-assign]


def main() -> None:
    folder, slow, *overrides = sys.argv[1:]
    tp = next(
        int(text.partition("=")[2])
        for text in overrides
        if text.startswith("model.tensor_model_parallel_size")
    )
    with parallel_mesh(tensor_model_parallel_size=tp) as mesh:
        for name in ("plain", "slow"):
            run_folder = Path(folder) / name / "run"
            config = load_config(
                tiny_run.compose(*overrides, f"exp_manager.explicit_log_dir={run_folder}")
            )
            with tiny_run.tiny_trainer(config, mesh) as trainer:
                if name == "slow" and mesh.rank == int(slow):
                    slow_down(trainer)
                trainer.fit()


if __name__ == "__main__":
    main()
