"""Output of programs for errors of other packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.errors import printed_keys

ROOT = Path(__file__).parents[2]


def run_main(body: str, folder: Path) -> tuple[int, str]:
    """Run a program with this main() and return its exit code and stderr."""
    code = f"""
import os
from reinforce_rl.launch.programs import with_config

@with_config("train_reinforce_actor")
def main(cfg):
    {body}

main()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, f"hydra.run.dir={folder}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=folder, env=environment
    )
    return done.returncode, done.stderr


def test_a_disk_that_fills_is_one_message(tmp_path: Path) -> None:
    code, said = run_main("raise OSError(28, os.strerror(28), '/data/run/metrics.jsonl')", tmp_path)
    assert (code, said.count("\n")) == (1, 1), said
    assert printed_keys(said) == ["disk.file.not_written"]
    assert said.startswith("error: /data/run/metrics.jsonl ")
    assert "No space left on device (" in said
    assert "GB are free on /" in said


def test_other_errors_of_the_system_keep_their_traceback(tmp_path: Path) -> None:
    code, said = run_main("open('/no/such/file')", tmp_path)
    assert code == 1
    assert "Traceback" in said
    assert "/no/such/file" in said


@pytest.mark.parametrize("command", ["train", "report"])
def test_a_folder_that_is_gone_is_one_message(tmp_path: Path, command: str) -> None:
    gone = tmp_path / "gone"
    code = f"import os\nos.chdir({str(tmp_path)!r})\n"
    code += f"os.mkdir('gone')\nos.chdir('gone')\nos.rmdir({str(gone)!r})\n"
    code += "from reinforce_rl.launch.main import main\nmain()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", code, command, "results"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "[launch.folder.gone]" in done.stderr
