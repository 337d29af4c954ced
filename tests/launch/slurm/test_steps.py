"""Steps that an earlier attempt has left, with commands of Slurm that are played."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fake_slurm import write_commands
from helpers.toy_server import wait_for

from reinforce_rl.launch.slurm.steps import end_stale_steps


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    commands = write_commands(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@contextlib.contextmanager
def earlier_actor(home: Path, when_asked: str) -> Iterator[subprocess.Popen[bytes]]:
    """An actor's step that runs, and what it does at SIGTERM; the file stands in the list of steps."""
    file = home / "step-actor"
    script = f"trap '{when_asked}' TERM; echo $$ >{file}.new; mv {file}.new {file}; while :; do sleep 0.1; done"
    with subprocess.Popen(["sh", "-c", script.replace("FILE", str(file))], start_new_session=True) as step:
        try:
            assert wait_for(file.exists, 20)
            yield step
        finally:
            step.kill()


def test_a_step_that_ends_when_it_is_asked(home):
    said: list[str] = []
    with earlier_actor(home, "rm FILE; exit 0") as step:
        end_stale_steps(["7"], 20.0, said.append)
        assert step.wait(20) == 0
    assert said == ["actor of an earlier attempt still runs, as step 7.actor; it is asked to end"]


def test_a_step_that_does_not_is_killed(home):
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "killed" in text:
            assert step.wait(20) == -signal.SIGKILL
            (home / "step-actor").unlink()

    with earlier_actor(home, ":") as step:
        end_stale_steps(["7"], 1.0, say)
    assert said[1:] == ["actor of an earlier attempt still runs, as step 7.actor; it is killed"]


def test_other_steps_are_let_alone(home):
    (home / "step-batch").write_text("")
    for name in ("bash", "actor-of-mine", "rm-1x"):
        (home / f"step-{name}").write_text("")
    said: list[str] = []
    end_stale_steps(["7", "8"], 2.0, said.append)
    assert said == []
