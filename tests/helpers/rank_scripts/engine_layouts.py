"""Two ranks train on the fake engine, tensor-parallel and then in two stages. Usage: engine_layouts.py FOLDER.

Below FOLDER/tp2 and FOLDER/pp2 there is a model each; the runs, what the engine was given and the exported weights go
there too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from helpers.engine_fake import install_fake
from helpers.tiny_run import tiny_config, tiny_trainer

from reinforce_rl.megatron.mesh import parallel_mesh

OVERRIDES = (
    "generation=tensorrt_llm",
    "trainer.devices=2",
    "trainer.reinforce.val_check_interval=2",
    "trainer.reinforce.initial_policy_kl_penalty=0",
)


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")  # once, as joining the same store again is a race
    for name, key in (("tp2", "tensor"), ("pp2", "pipeline")):
        place = folder / name
        install_fake(place / "engine", rank=rank)
        config = tiny_config(place, *OVERRIDES, f"model.{key}_model_parallel_size=2")
        with parallel_mesh(*((2, 1) if name == "tp2" else (1, 2))) as mesh, tiny_trainer(config, mesh) as trainer:
            trainer.fit()
            trainer.model.export(place / "model", place / "exported")
            trainer.model.generator.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
