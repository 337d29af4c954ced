"""Resuming a checkpoint at another layout gives the losses of its own layout, with padding.

At its own layout it resumes bit for bit. Three steps are compared.
"""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.checkpoint_run import Run
from helpers.errors import check_error, raises_error
from helpers.layouts import LAYOUTS
from helpers.ranks import call_on_ranks, one_group
from helpers.resharding import (
    ALL_LAYOUTS,
    CASES,
    ONE,
    SAVED_AFTER,
    load_and_train,
    run_of,
    save_and_train,
    stored_tensors,
    write_model,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from reinforce_rl.errors import CheckpointError
from reinforce_rl.megatron import checkpoint_files
from reinforce_rl.megatron.checkpointer import latest_checkpoint
from reinforce_rl.megatron.lora import trained_state
from reinforce_rl.megatron.mesh import Mesh

SHARED = "DP2 distributed optimizer"
ON_TWO = ("TP2 SP", "PP2", "PP2 uneven", "CP2", "DP2", SHARED, "CP2 distributed optimizer")
ON_FOUR = ("TP2 PP2 SP", "PP2 DP2 distributed optimizer", "PP4", "CP2 DP2")
# From each kind of layout to another, from the distributed optimizer to the plain one and back.
QUICK = {
    "TP2 SP": [ONE, "PP2 uneven"],
    "PP2 uneven": [SHARED],
    "CP2": ["TP2 SP"],
    SHARED: [SHARED, "TP2 SP"],
}


def assert_equal_but_for_padding(first: Tensor, second: Tensor) -> None:
    """Assert bitwise equality where both have values, and zeros in the padding."""
    common = tuple(slice(0, min(sizes)) for sizes in zip(first.shape, second.shape, strict=True))
    assert torch.equal(first[common], second[common])
    for tensor in (first, second):
        assert int(tensor.count_nonzero()) == int(tensor[common].count_nonzero())


def save_and_load(out: Path, cases: list[str], loads: dict[str, list[str]]) -> dict:
    """Save checkpoints at each layout and load them at others.

    Returns the losses of three steps, uninterrupted and after each load, by case. A load at the
    layout of its checkpoint is compared here, bit for bit.
    """
    losses = {case: {} for case in cases}
    uninterrupted = {}
    with one_group():
        for layout in loads:
            with ALL_LAYOUTS[layout].mesh() as mesh:
                for case in cases:
                    losses[case][layout], uninterrupted[case, layout] = save_and_train(
                        out, case, layout, mesh
                    )
                if layout == SHARED:
                    for full_rank in (0, 1):
                        save_on_a_full_disk(
                            run_of(out, cases[0], layout, layout, mesh), mesh, full_rank
                        )
        for layout, sources in loads.items():
            with ALL_LAYOUTS[layout].mesh() as mesh:
                for case in cases:
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
    return losses


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


def run_and_check(mesh, out: Path, cases: list[str], loads: dict[str, list[str]]) -> None:
    layouts = list(loads)
    uninterrupted = {}
    for case in cases:
        write_model(out, case)
        uninterrupted[case], _ = save_and_train(out, case, ONE, mesh)
    ranks = LAYOUTS[layouts[0]].ranks
    losses_by_case = call_on_ranks(save_and_load, ranks, out, cases, loads, timeout=600)[0]
    for case in cases:
        if case == "bf16":
            check_main_weights(mesh, out, layouts)
        losses = losses_by_case[case]
        for source in (*layouts, ONE):
            losses[f"{source} to {ONE}"], _ = load_and_train(out, case, source, ONE, mesh)
        assert losses[f"{ONE} to {ONE}"] == uninterrupted[case]
        exact = CASES[case].dtype == torch.float32
        for runs, losses_of_runs in losses.items():
            assert losses_of_runs == pytest.approx(
                uninterrupted[case], rel=1e-5 if exact else 2e-2, abs=0.0
            ), (case, runs)
        for source in (*layouts, ONE):
            saved = stored_tensors(out / case / source)
            kinds = ("exp_avg.", "exp_avg_sq.", *(() if exact else ("fp32_param.",)))
            for kind in kinds:
                assert any(name.startswith(f"optimizer.state.{kind}") for name in saved)
            for target in (*layouts, ONE):
                if f"{source} to {target}" not in losses:
                    continue
                folder = out / case / f"{source} to {target}"
                again = stored_tensors(folder)
                assert again.keys() == saved.keys()
                for name, tensor in saved.items():
                    assert_equal_but_for_padding(again[name], tensor)


def check_main_weights(mesh, out: Path, layouts: list[str]) -> None:
    """Compare fp32 weights of one process and of each layout, two steps after a common start."""
    fresh = run_of(out, "bf16", ONE, "start", mesh).checkpointer
    fresh.save(1, {"step": 1})
    fresh.finish()

    def main_weights(folder: str) -> dict[str, torch.Tensor]:
        stored = stored_tensors(out / "bf16" / folder)
        return {
            name: tensor
            for name, tensor in stored.items()
            if name.startswith("optimizer.state.fp32_param.")
        }

    start = main_weights("start")
    single = main_weights(ONE)
    steps = [single[name] - start[name] for name in single]
    moved = torch.stack([step.norm() for step in steps]).norm()
    for layout in layouts:
        other = main_weights(layout)
        # without padding
        differences = []
        for name, weight in single.items():
            differences.append(weight - other[name][tuple(map(slice, weight.shape))])
        distance = torch.stack([difference.norm() for difference in differences]).norm()
        assert float(distance / moved) < 5e-2, layout


@pytest.mark.more
def test_three_steps_after_a_load(mesh, tmp_path):
    run_and_check(mesh, tmp_path, ["tied"], QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [ON_TWO, ON_FOUR], ids=["two ranks", "four ranks"])
def test_every_layout_to_every_other(layouts, mesh, tmp_path):
    loads = {target: [*layouts, ONE] for target in layouts}
    run_and_check(mesh, tmp_path, ["bf16 lora"], loads)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "bf16 lora"])
@pytest.mark.parametrize("layouts", [ON_TWO, ON_FOUR], ids=["two ranks", "four ranks"])
def test_every_layout_to_itself_and_two_others(case, layouts, mesh, tmp_path):
    loads = {}
    for position, target in enumerate(layouts):
        following = layouts[(position + 1) % len(layouts)]
        loads[target] = [target, following, ONE]
    run_and_check(mesh, tmp_path, [case], loads)


@pytest.mark.parametrize(("extra_rows", "fits"), [(0, True), (1, True), (-1, False)])
def test_a_smaller_vocabulary_is_not_padding(extra_rows, fits, mesh, tmp_path, monkeypatch):
    write_model(tmp_path, "tied")
    lm = run_of(tmp_path, "tied", ONE, "run", mesh).lm
    state = trained_state(lm)
    vocabulary = lm.architecture.vocab_size
    stored = {
        t.key: SimpleNamespace(global_shape=t.global_shape, dtype=t.dtype)
        for t in state.values()
        if isinstance(t, ShardedTensor)
    }
    embeddings = next(key for key in stored if "word_embeddings" in key)
    stored[embeddings].global_shape = (
        vocabulary + extra_rows,
        *stored[embeddings].global_shape[1:],
    )
    monkeypatch.setattr(
        checkpoint_files.dist_checkpointing, "load_tensors_metadata", lambda folder: stored
    )
    refused = raises_error("checkpoint.weights.another_model", embeddings)
    with contextlib.nullcontext() if fits else refused:
        checkpoint_files.allow_other_padding(lm, state, tmp_path)
