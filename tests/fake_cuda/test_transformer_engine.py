"""Transformer Engine's layers on fake CUDA tensors, in a process that imports its fake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.ranks import TESTS
from helpers.with_te import run_with_fake

SCRIPT = TESTS / "helpers/rank_scripts/te_fake_cuda.py"


def test_fewer_kernels_and_the_same_collectives_on_all_ranks(
    folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = run_with_fake(monkeypatch, SCRIPT, 1, folders[2])
    counts = json.loads(printed.splitlines()[-1])
    of_engine = counts["with"]
    layers = 2
    assert of_engine["wgrad_accumulate"] == 4 * layers
    assert of_engine["rope"] == 4 * layers  # queries and keys, forward and backward
    assert of_engine["rmsnorm_fwd"] == of_engine["rmsnorm_bwd"] == 2 * layers + 1
    assert of_engine["swiglu"] == of_engine["dswiglu"] == layers
    # A bound that may only fall: kernels per layer, both ways, that Transformer Engine saves.
    without, using = (
        # a query, not a kernel
        sum(count for kernel, count in counts[name].items() if kernel != "device")
        for name in ("without", "with")
    )
    saved = without - using
    # torch's CPU build splits silu_backward into 7 kernels; its CUDA build has one.
    if "silu_backward" not in counts["without"]:
        saved -= 6 * layers
    assert saved >= 45 * layers, counts
