"""Resuming a checkpoint at another layout gives the losses of its own layout, with padding.

At its own layout it resumes bit for bit. Three steps are compared.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.errors import raises_error
from helpers.layouts import LAYOUTS
from helpers.ranks import run_ranks
from helpers.resharding import (
    CASES,
    ONE,
    assert_equal_but_for_padding,
    load_and_train,
    run_of,
    save_and_train,
    stored_tensors,
    write_model,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from reinforce_rl.megatron import checkpoint_files
from reinforce_rl.megatron.lora import trained_state

SCRIPT = Path(__file__).parents[1] / "helpers/rank_scripts/resharding.py"
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


def run_and_check(mesh, out: Path, cases: list[str], loads: dict[str, list[str]]) -> None:
    layouts = list(loads)
    uninterrupted = {}
    for case in cases:
        write_model(out, case)
        uninterrupted[case], _ = save_and_train(out, case, ONE, mesh)
    plan = {
        "cases": cases,
        "saves": layouts,
        "loads": loads,
        "full_disk": SHARED if SHARED in layouts else None,
    }
    run_ranks(SCRIPT, LAYOUTS[layouts[0]].ranks, out, json.dumps(plan), timeout=600)
    for case in cases:
        if case == "bf16":
            check_main_weights(mesh, out, layouts)
        losses = json.loads((out / case / "losses.json").read_text())
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
    moved = torch.stack([(single[name] - start[name]).norm() for name in single]).norm()
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
