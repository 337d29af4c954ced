"""Layouts for runs with and without the fake Transformer Engine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from helpers.layouts import ALL_LAYOUTS, Layout
from helpers.ranks import TESTS, run_ranks

FAKE = TESTS / "helpers/fake_te"


def with_te(layout: Layout) -> Layout:
    return replace(layout, model=replace(layout.model, transformer_engine=True))


# Layouts with Transformer Engine, by number of ranks.
TE_LAYOUTS = {
    1: {"TE": with_te(Layout())},
    2: {
        f"TE {name}": with_te(ALL_LAYOUTS[name])
        for name in (
            "TP2",
            "TP2 SP full recompute",
            "CP2",
            "PP2",
            "DP2 distributed optimizer",
            "TP2 SP LoRA",
        )
    },
}
# Checkpoints saved with Transformer Engine and loaded without it, and the reverse.
CASES = ("tied", "untied", "bf16", "lora")  # cases of `helpers.resharding`
SAVED = {1: "TE", 2: "TE TP2 SP full recompute"}


def run_with_fake(monkeypatch, script: Path, ranks: int, *args: object) -> str:
    """Run a script with the fake Transformer Engine importable; return what it printed."""
    monkeypatch.setenv("PYTHONPATH", str(FAKE), prepend=os.pathsep)
    return run_ranks(script, ranks, *args, timeout=280)
