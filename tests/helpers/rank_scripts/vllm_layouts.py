"""Two ranks train with the real vLLM at several layouts. Usage: vllm_layouts.py FOLDER NAME...

NAME is a key of LAYOUTS and a folder with a model below FOLDER; or "smollm2", whose model is in
FOLDER itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from helpers.tiny_run import tiny_config, tiny_trainer
from helpers.vllm_engine import OF_RUNS, SMALL_BUCKET, SMOLLM2, vllm_overrides

from reinforce_rl.generation.engine.generator import EngineGenerator
from reinforce_rl.launch.check_engine import TEXTS
from reinforce_rl.megatron.mesh import parallel_mesh

# Tensor and pipeline parallel sizes, and an engine's workers.
LAYOUTS = {
    "tp2_engine1": (2, 1, 1),
    "tp2_engine2": (2, 1, 2),
    "pp2_engine1": (1, 2, 1),
    "pp2_engine2": (1, 2, 2),
    "dp2": (1, 1, 1),
    "smollm2": (1, 1, 1),
}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.distributed.init_process_group("gloo")  # once: joining the same store again is a race
    for name in sys.argv[2:]:
        is_tiny = name != "smollm2"
        tensor, pipeline, workers = LAYOUTS[name]
        config = tiny_config(
            folder / name if is_tiny else folder,
            *OF_RUNS,
            *vllm_overrides(),
            *(() if is_tiny else SMOLLM2),
            "trainer.devices=2",
            f"model.tensor_model_parallel_size={tensor}",
            f"model.pipeline_model_parallel_size={pipeline}",
            f"engine.tensor_parallel_size={workers}",
            prompts=None if is_tiny else TEXTS,
        )
        with parallel_mesh(tensor, pipeline) as mesh, tiny_trainer(config, mesh) as trainer:
            generator = trainer.model.generator
            assert isinstance(generator, EngineGenerator)
            if is_tiny:
                generator._bucket_bytes = SMALL_BUCKET
            trainer.fit()
            generator.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
