"""The bytes that the preflight reports against the bytes of a real policy and optimizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.memory_use import CASES, PROMPT, overrides_of, planned
from helpers.models import tiny_llama_folder
from helpers.ranks import run_ranks
from helpers.tiny_run import write_prompts

SCRIPT = Path(__file__).parents[1] / "helpers" / "rank_scripts" / "memory_use.py"
OF_ONE = ("one", "full", "lora")


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request, tmp_path_factory) -> Path:
    """Large enough that torch's rounding and tensors of a few numbers do not matter."""
    folder = tiny_llama_folder(
        tmp_path_factory.mktemp("model"),
        vocab_size=2000,
        tied=request.param == "tied",
        heads=8,
        groups=2,
        layers=4,
        hidden=128,
        ffn=352,
        logit_scale=1.0,
    )
    write_prompts(folder / "prompts.jsonl", ["e" * PROMPT] * 16)
    return folder


def compare(names, folder: Path, out: Path) -> None:
    run_ranks(SCRIPT, CASES[names[0]].ranks, out, folder, *names, timeout=600)
    wrong = []
    for name in names:
        case = CASES[name]
        plan = planned(overrides_of(folder, case.ranks, *case.overrides))
        for rank in range(case.ranks):
            measured = json.loads((out / f"{name}.{rank}").read_text())
            of_stage = plan[rank if len(plan) > 1 else 0]
            for kind in ("weights", "gradients", "optimizer"):
                said = getattr(of_stage, kind)
                if abs(said - measured[kind]) > 0.02 * measured[kind]:
                    wrong.append(
                        f"{name}, rank {rank}, {kind}: {said} said, {measured[kind]} found"
                    )
            for phase in of_stage.phases:
                if phase.name not in measured["phases"]:
                    continue  # the reference's pass is the policy's
                there = (
                    measured["weights"]
                    + measured["gradients"]
                    + measured["optimizer"]
                    + measured["phases"][phase.name]
                )
                in_phase = measured["phases"][phase.name]
                sizes = f"{phase.total / 1e6:.2f} MB said, {in_phase / 1e6:.2f} found"
                ratio = phase.total / in_phase
                print(f"{name}, rank {rank}, {phase.name}: {sizes}, ratio {ratio:.3f}")
                said = of_stage.weights + of_stage.gradients + of_stage.optimizer + phase.total
                if abs(said - there) > 0.25 * there:
                    wrong.append(f"{name}, rank {rank}, {phase.name}: {said} said, {there} found")
    assert not wrong, "\n".join(wrong)


@pytest.mark.more
@pytest.mark.parametrize("folder", ["tied"], indirect=True)
def test_states_and_peaks(folder, tmp_path):
    compare(OF_ONE, folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_states_and_peaks_of_every_case(ranks, folder, tmp_path):
    names = [name for name, case in CASES.items() if case.ranks == ranks]
    compare(names, folder, tmp_path)
