"""Several ranks save checkpoints at each layout and load them at others.

Usage: resharding.py OUT PLAN. The plan is JSON: `cases`, `saves` (layouts), `loads` (source layouts
of each layout) and `full_disk` (a layout or null), at which saving fails on one rank. Writes
OUT/CASE/losses.json: the losses of three steps, uninterrupted and after each load. A load at the
layout of its checkpoint is compared here, bit for bit.
"""

from __future__ import annotations

import json
import resource
import sys
from datetime import timedelta
from pathlib import Path

import torch
from helpers.checkpoint_run import Run
from helpers.errors import check_error
from helpers.resharding import ALL_LAYOUTS, SAVED_AFTER, load_and_train, run_of, save_and_train

from reinforce_rl.errors import CheckpointError
from reinforce_rl.megatron.checkpointer import latest_checkpoint
from reinforce_rl.megatron.mesh import Mesh


def save_on_a_full_disk(run: Run, mesh: Mesh, full_rank: int) -> None:
    """Both ranks raise; the previous checkpoint is unchanged."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.rank == full_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        run.checkpointer.save(SAVED_AFTER + 1, {"step": SAVED_AFTER + 1})
        run.checkpointer.finish()
    except CheckpointError as error:
        check_error(error, "checkpoint.disk.full", f"rank {full_rank}")
    else:
        raise AssertionError("no error")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    newest = latest_checkpoint(run.checkpointer.folder)
    assert newest is not None
    assert newest.trainer_state == {"step": SAVED_AFTER}


def main() -> None:
    out = Path(sys.argv[1])
    plan = json.loads(sys.argv[2])
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    losses = {case: {} for case in plan["cases"]}
    uninterrupted = {}
    for layout in plan["saves"]:
        with ALL_LAYOUTS[layout].mesh() as mesh:
            for case in plan["cases"]:
                losses[case][layout], uninterrupted[case, layout] = save_and_train(
                    out, case, layout, mesh
                )
            if layout == plan["full_disk"]:
                for full_rank in (0, 1):
                    save_on_a_full_disk(
                        run_of(out, plan["cases"][0], layout, layout, mesh), mesh, full_rank
                    )
    for layout, sources in plan["loads"].items():
        with ALL_LAYOUTS[layout].mesh() as mesh:
            for case in plan["cases"]:
                for source in sources:
                    resumed, weights = load_and_train(out, case, source, layout, mesh)
                    losses[case][f"{source} to {layout}"] = resumed
                    if source == layout:
                        expected = uninterrupted[case, layout]
                        uninterrupted_losses = losses[case][layout]
                        assert resumed == uninterrupted_losses, (case, layout, resumed)
                        assert weights.keys() == expected.keys()
                        for name, weight in weights.items():
                            assert torch.equal(weight, expected[name]), (case, layout, name)
    if torch.distributed.get_rank() == 0:
        for case, losses_of_case in losses.items():
            (out / case / "losses.json").write_text(json.dumps(losses_of_case))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
