"""Two ranks: checkpoints of other layouts, and saves that fail on one rank.

Usage: resharding.py OUT PORT PORT PORT MODEL...   OUT/NAME/tp1 holds a checkpoint of one rank for each model folder.
This writes tp2 and dp2 beside it, and OUT/NAME/losses.json with the losses of three steps: without interruption, and
after a load.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

from helpers.checkpoint_run import Run

from reinforce_rl.errors import CheckpointError
from reinforce_rl.megatron.checkpoint import latest_checkpoint
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh


def save_on_a_full_disk(run: Run, mesh: Mesh, full_rank: int) -> None:
    """Both ranks hear of it; the checkpoint before is untouched."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.rank == full_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        run.checkpointer.save(3, {"step": 3})
        run.checkpointer.finish()
    except CheckpointError as error:
        assert f"rank {full_rank} cannot write the checkpoint" in str(error), error
    else:
        raise AssertionError("no error")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    newest = latest_checkpoint(run.checkpointer.folder)
    assert newest is not None
    assert newest.trainer_state == {"step": 2}


def main() -> None:
    out, ports, models = Path(sys.argv[1]), sys.argv[2:5], [Path(argument) for argument in sys.argv[5:]]
    # torchrun's store serves one process group; each layout gets a store of its own.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    losses: dict[str, dict[str, list[float]]] = {model.name: {} for model in models}
    layouts = (("dp2", ["tp1"], 1), ("tp2", ["tp1", "dp2"], 2), ("dp2", ["tp2"], 1))
    for port, (own, sources, tp_size) in zip(ports, layouts, strict=True):
        os.environ["MASTER_PORT"] = port
        with parallel_mesh(tp_size) as mesh:
            for model in models:
                folder, found = out / model.name, losses[model.name]
                if own not in found:
                    run = Run(mesh, model, folder / own, asynchronous=own == "dp2")
                    run.train_on(0, 2)
                    run.checkpointer.save(2, {"step": 2})
                    found[own] = run.train_on(2, 3)
                    run.checkpointer.finish()
                    if model is models[0]:
                        for full_rank in (0, 1):
                            save_on_a_full_disk(run, mesh, full_rank)
                for source in sources:
                    run = Run(mesh, model, folder / own)
                    run.train_on(50, 1)
                    newest = latest_checkpoint(folder / source)
                    assert newest is not None
                    run.checkpointer.restore(newest)
                    found[f"{source} to {own}"] = run.train_on(2, 3)
    if mesh.is_main:
        for name, found in losses.items():
            (out / name / "losses.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
