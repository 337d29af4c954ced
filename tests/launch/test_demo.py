"""The demo as a user runs it, shortened; and what DEMO_STEPS may be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.models import smollm2_folder
from helpers.tiny_run import compose, json_lines

from reinforce_rl.errors import ConfigError
from reinforce_rl.launch.demo import steps_override

SCRIPT = Path(__file__).parents[2] / "examples" / "demo" / "run_demo.py"


def run_demo(out: Path, steps: str, *overrides: str, seconds: float) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DEMO_STEPS": steps}
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        timeout=seconds,
    )


def test_without_demo_steps_the_configuration_stands():
    assert steps_override("") == []


def test_demo_steps_validates_and_saves_after_its_last_step():
    cfg = compose(*steps_override("7"), name="demo_actor")
    reinforce = cfg.trainer.reinforce
    assert (reinforce.max_steps, reinforce.val_check_interval, reinforce.save_interval) == (7, 7, 7)


@pytest.mark.parametrize("text", ["0", "00", "-3", "1.5", "ten", " 4", "²"])
def test_demo_steps_must_be_a_whole_number_above_zero(text):
    with pytest.raises(ConfigError, match=r"DEMO_STEPS is .*; expected a whole number above 0"):
        steps_override(text)


def test_a_wrong_demo_steps_ends_before_anything_is_made(tmp_path):
    done = run_demo(tmp_path / "out", "many", seconds=100)
    assert done.returncode == 1
    assert "DEMO_STEPS is 'many'" in done.stdout
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_steps_of_the_real_demo(tmp_path):
    pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")
    smollm2_folder()
    out = tmp_path / "demo"
    few = ["model.reinforce.num_val_samples=4", "model.reinforce.num_rollout_samples=2", "model.seed=3"]
    try:
        done = run_demo(out, "2", *few, seconds=850)
        assert done.returncode == 0, done.stdout
        assert "Traceback" not in done.stdout
        assert [line["step"] for line in json_lines(out / "metrics.jsonl")] == [0, 1, 2]
        assert "val/rewards" in json_lines(out / "metrics.jsonl")[-1]
        assert [len(json_lines(path)) for path in sorted((out / "validation").iterdir())] == [4, 4]
        assert (out / "report.html").stat().st_size > 10_000
        assert (out / "hf" / "config.json").is_file()
        assert (out / "hf" / "tokenizer_config.json").is_file()
        assert list((out / "checkpoints").iterdir())
        assert (out / "logs" / "server.log").is_file()
        last_lines = done.stdout[done.stdout.index("\nThe mean validation reward") :].strip().splitlines()
        for name in ("report.html", "rollouts", "checkpoints", "hf"):
            assert any(line.endswith(str(out / name)) for line in last_lines), done.stdout
        assert "minutes" in last_lines[-1]
    finally:
        shutil.rmtree(out, ignore_errors=True)  # gigabytes, which pytest would keep for three sessions
