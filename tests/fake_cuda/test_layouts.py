"""Every layout of the layout tests, rank by rank: no tensor on a wrong device, and no two ranks at odds."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fake_cuda import check_collectives, run_layout
from helpers.layouts import ALL_LAYOUTS, Layout

from reinforce_rl.preflight.fake_cuda.machine import Machine


@pytest.mark.parametrize("layout", ALL_LAYOUTS.values(), ids=ALL_LAYOUTS.keys())
def test_ranks_agree(machine: Machine, folders: dict[int, Path], layout: Layout) -> None:
    ledgers = run_layout(machine, layout, folders[2 if layout.pp == 1 else 4])
    assert check_collectives(ledgers) > 0
