"""`reinforce-rl check machine`; see also test_check_server.py, generation/test_comparison.py."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from reinforce_rl.launch import check
from reinforce_rl.launch.main import app


def lines() -> list[str]:
    result = CliRunner().invoke(app, ["check", "machine"])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_packages_cores_and_disk_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = lines()
    assert shown[0].startswith(f"python {platform.python_version()} ")
    assert f"torch {version('torch')}, for everything" in shown
    assert any(line.startswith(f"cores: {len(os.sched_getaffinity(0))};") for line in shown)
    assert any(line.startswith(f"{tmp_path}: ") and line.endswith(" GB free") for line in shown)


def test_a_missing_package_is_reported(monkeypatch):
    monkeypatch.setitem(check._PACKAGES, "no-such-package", "nothing")
    assert "no-such-package is not installed, for nothing" in lines()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("cuda", "words"), [(None, "a CPU build"), ("12.8", "built for CUDA 12.8")]
)
def test_without_a_gpu_the_build_of_torch_is_reported(monkeypatch, cuda, words):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert f"GPUs: none that torch can use ({words})" in lines()


@pytest.fixture
def gpu(monkeypatch):
    """Make torch.cuda report one GPU, with made-up properties."""
    properties = SimpleNamespace(name="H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


def test_a_gpu_is_named_with_its_memory(monkeypatch, gpu):
    memory = (100_000_000_000, 141_000_000_000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: memory)
    line = "GPU 0: H200, compute capability 9.0, 100.0 GB of 141.0 GB free"
    assert line in lines()


def test_an_unusable_gpu_is_reported(monkeypatch, gpu):
    def fails(index):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fails)
    line = "GPU 0: H200, compute capability 9.0, cannot be used: CUDA error: out of memory"
    assert line in lines()
