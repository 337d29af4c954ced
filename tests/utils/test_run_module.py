"""A module runs as with `python -m`, and never from the current folder."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from reinforce_rl.utils.process import PACKAGE_PARENT, RUN_MODULE, import_path

PROGRAM = "import json, sys\nprint(json.dumps([__name__, *sys.argv[1:]]))\n"


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder / "mine"), **variables}
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    return subprocess.run(
        [sys.executable, *command, "program", "a", "b"], timeout=60, check=False, **options
    )


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_files_of_the_current_folder_shadow_nothing(safe_path, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "program.py").write_text(PROGRAM)
    (tmp_path / "json.py").write_text("raise SystemExit('json of the current folder')")
    (tmp_path / "runpy.py").write_text("raise SystemExit('runpy of the current folder')")
    done = run(tmp_path, RUN_MODULE, PYTHONSAFEPATH=safe_path)
    assert done.returncode == 0
    assert done.stdout == '["__main__", "a", "b"]\n'
    assert done.stderr == ""
    assert "of the current folder" in run(tmp_path, "-m", PYTHONSAFEPATH="").stderr, (
        "so that the test can fail"
    )


def test_files_beside_the_program_shadow_nothing(tmp_path):
    """Python puts the program's folder first on the path; it has a file `statistics.py`."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "program.py").write_text("import statistics\nprint(statistics.__file__)\n")
    assert Path(RUN_MODULE).with_name("statistics.py").is_file()
    done = run(tmp_path, RUN_MODULE, PYTHONSAFEPATH="")
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.strip() == statistics.__file__


def write_traps(folder: Path) -> None:
    for name in ("yaml", "typer", "torch", "rich", "typing", "__future__"):
        (folder / f"{name}.py").write_text("raise SystemExit('a file of the current folder')")


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "reinforce_rl"],
        ["-m", "reinforce_rl.utils.ranks"],
        ["-Bmreinforce_rl"],
        ["-X", "utf8", "-Wignore", "-Bm", "reinforce_rl"],
    ],
)
def test_the_package_as_a_module_imports_nothing_of_the_current_folder(words, tmp_path):
    write_traps(tmp_path)
    command = [sys.executable, *words, "--help"]
    environment = {**os.environ, "PYTHONPATH": PACKAGE_PARENT, "PYTHONSAFEPATH": ""}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "a file of the current folder" not in done.stderr
    assert done.returncode == 0
    assert "usage" in done.stdout.lower()


def test_the_folder_of_a_module_that_imports_the_package_stays(tmp_path):
    """`python -m mine.program`, whose package imports this one."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import reinforce_rl\n")
    (tmp_path / "mine" / "program.py").write_text("import other\nprint(other.VALUE)\n")
    (tmp_path / "other.py").write_text("VALUE = 3\n")
    environment = {**os.environ, "PYTHONPATH": PACKAGE_PARENT, "PYTHONSAFEPATH": ""}
    command = [sys.executable, "-m", "mine.program", "reinforce_rl"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "3\n"
    assert done.stderr == ""


def test_a_child_finds_what_its_parent_does(tmp_path, monkeypatch):
    """The current folder keeps its place on the path, as in an interactive Python."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/elsewhere"])
    assert import_path().split(os.pathsep)[1:] == [str(tmp_path), "/elsewhere"]
