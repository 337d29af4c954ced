"""Two ranks train with the fake engine. Usage: engine_layouts.py FOLDER.

They use tensor, then pipeline, then context parallelism. The folders FOLDER/tp2, FOLDER/pp2 and
FOLDER/cp2 each contain a model; runs, records of the engine and exported weights are written there
too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from helpers.engine_fake import in_small_buckets, install_fake
from helpers.tiny_run import tiny_config, tiny_trainer

from reinforce_rl.megatron.mesh import parallel_mesh

OVERRIDES = (
    "generation=tensorrt_llm",
    "trainer.devices=2",
    "trainer.reinforce.val_check_interval=2",
    "trainer.reinforce.initial_policy_kl_penalty=0",
)


def main() -> None:
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")  # once: joining the same store again is a race
    layouts = {
        "tp2": ("tensor_model_parallel_size", (2, 1, 1)),
        "pp2": ("pipeline_model_parallel_size", (1, 2, 1)),
        "cp2": ("context_parallel_size", (1, 1, 2)),
    }
    for name, (key, sizes) in layouts.items():
        place = folder / name
        install_fake(place / "engine", rank=rank)
        config = tiny_config(place, *OVERRIDES, f"model.{key}=2")
        with parallel_mesh(*sizes) as mesh, tiny_trainer(config, mesh) as trainer:
            in_small_buckets(trainer.model.generator)
            trainer.fit()
            trainer.model.export(place / "model", place / "exported")
            trainer.model.generator.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
