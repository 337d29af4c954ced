"""Two tensor-parallel ranks; vLLM loads weights mid-response. Usage: vllm_updates.py FOLDER.

FOLDER contains a model. Each rank writes FOLDER/rank_N.json with the actions and the responses.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import torch
from helpers.altered_vllm import alter
from helpers.vllm_engine import (
    PROMPTS,
    SMALL_BUCKET,
    change_weights,
    generator_of,
    vllm_overrides,
)
from helpers.weight_updates import Action, PlannedUpdates, Versions

from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.responses import new_responses
from reinforce_rl.megatron.mesh import parallel_mesh

OVERRIDES = (
    "trainer.devices=2",
    "model.tensor_model_parallel_size=2",
    "engine.tensor_parallel_size=1",
    "model.encoder_seq_length=128",
)
PARAMS = SamplingParams(max_length=100)
SLOW = 0.05


def main() -> None:
    folder = Path(sys.argv[1])
    torch.distributed.init_process_group("gloo")
    with parallel_mesh(2) as mesh:
        lm, generator = generator_of(folder, mesh, *vllm_overrides(), *OVERRIDES)
        generator._bucket_bytes = SMALL_BUCKET
        engine = generator._engine
        alter(generator)
        versions = Versions(lm)
        versions.keep(0)

        def once_drawing() -> Action:
            while engine is not None and engine.call("with_tokens") < 4:
                time.sleep(0.01)
            return mesh.from_model_parallel_rank_0("load")

        def load() -> None:
            change_weights(lm)
            versions.keep(1)

        updates = PlannedUpdates("continue", once_drawing, "continue", "stop", load=load)
        with generator.awake():
            if engine is not None:
                engine.call("set_pace", SLOW)
            partial = generator.resume(new_responses(PROMPTS, 2, 3), PARAMS, updates)
        with generator.awake():
            responses = generator.resume(partial, PARAMS, PlannedUpdates(version=1))
        generator.close()
        gaps = versions.gaps(0, responses)
        report = {
            "running": updates.running,
            "partial": [dataclasses.asdict(response) for response in partial],
            "found": [dataclasses.asdict(response) for response in responses],
            "gap": max(
                gap
                for row, response in zip(gaps, responses, strict=True)
                for gap in row[: response.versions.count(0)]
            ),
        }
        (folder / f"rank_{mesh.rank}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
