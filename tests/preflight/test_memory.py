"""The bytes that the preflight reports against the bytes of a real policy and optimizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from helpers.memory_use import CASES, PROMPT, measured, overrides_of, planned
from helpers.models import tiny_llama_folder
from helpers.ranks import call_on_ranks, one_group
from helpers.tiny_run import write_prompts

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


def use_on_ranks(names, folder: Path) -> dict[str, dict[str, Any]]:
    with one_group():
        uses = {}
        for name in names:
            case = CASES[name]
            use = measured(overrides_of(folder, case.ranks, *case.overrides))
            uses[name] = dataclasses.asdict(use)
        return uses


def compare(names, folder: Path) -> None:
    ranks = call_on_ranks(use_on_ranks, CASES[names[0]].ranks, names, folder, timeout=600)
    wrong = []
    for name in names:
        case = CASES[name]
        plan = planned(overrides_of(folder, case.ranks, *case.overrides))
        for rank, uses in enumerate(ranks):
            use = uses[name]
            of_stage = plan[rank if len(plan) > 1 else 0]
            for kind in ("weights", "gradients", "optimizer"):
                said = getattr(of_stage, kind)
                if abs(said - use[kind]) > 0.02 * use[kind]:
                    wrong.append(f"{name}, rank {rank}, {kind}: {said} said, {use[kind]} found")
            for phase in of_stage.phases:
                if phase.name not in use["phases"]:
                    continue  # the reference's pass is the policy's
                in_phase = use["phases"][phase.name]
                there = use["weights"] + use["gradients"] + use["optimizer"] + in_phase
                sizes = f"{phase.total / 1e6:.2f} MB said, {in_phase / 1e6:.2f} found"
                ratio = phase.total / in_phase
                print(f"{name}, rank {rank}, {phase.name}: {sizes}, ratio {ratio:.3f}")
                said = of_stage.weights + of_stage.gradients + of_stage.optimizer + phase.total
                if abs(said - there) > 0.25 * there:
                    wrong.append(f"{name}, rank {rank}, {phase.name}: {said} said, {there} found")
    assert not wrong, "\n".join(wrong)


@pytest.mark.more
@pytest.mark.parametrize("folder", ["tied"], indirect=True)
def test_states_and_peaks(folder):
    compare(OF_ONE, folder)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_states_and_peaks_of_every_case(ranks, folder):
    names = [name for name, case in CASES.items() if case.ranks == ranks]
    compare(names, folder)
