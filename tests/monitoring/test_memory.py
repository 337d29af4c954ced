"""The memory peak of a phase, as opposed to the whole run's."""

from __future__ import annotations

import pytest
import torch

from reinforce_rl.runtime import phases
from reinforce_rl.runtime.phases import PeakMemory

GIGABYTE = 1e9


def use(gigabytes: float) -> None:
    torch.ones(int(gigabytes * GIGABYTE / 4)).sum()


def test_each_phase_has_its_own_peak():
    if not phases.CLEAR_REFS.exists():
        pytest.skip("the kernel's peak of a process cannot be reset here")
    peak = PeakMemory(torch.device("cpu"))
    peak.start()
    before = peak.gigabytes()
    use(0.6)
    assert 0.55 < peak.gigabytes() - before < 0.8
    peak.start()
    use(0.2)
    assert peak.gigabytes() - before < 0.4


def test_without_the_kernels_help_it_is_what_the_process_has(monkeypatch, tmp_path):
    monkeypatch.setattr(phases, "CLEAR_REFS", tmp_path / "no" / "clear")
    monkeypatch.setattr(phases, "STATUS", tmp_path / "no" / "status")
    peak = PeakMemory(torch.device("cpu"))
    peak.start()
    assert peak.gigabytes() > 0.05
