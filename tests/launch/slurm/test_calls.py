"""Calls of Slurm's commands: deadlines, and errors that show what was said."""

from __future__ import annotations

import pytest

from reinforce_rl.launch.slurm.calls import SlurmCallError, call


def test_a_command_that_does_not_answer() -> None:
    with pytest.raises(SlurmCallError, match=r"^sleep 60: no answer within 0 s"):
        call(["sleep", "60"], seconds=0.2)


def test_a_command_that_fails() -> None:
    with pytest.raises(SlurmCallError, match=r"^sh -c .*: it is full$") as caught:
        call(["sh", "-c", "echo it is full >&2; exit 3"])
    assert caught.value.said == "it is full"
    with pytest.raises(SlurmCallError, match="false: exit code 1"):
        call(["false"])
    with pytest.raises(SlurmCallError, match=r"nothing-of-this-name: .*No such file"):
        call(["nothing-of-this-name"])


def test_its_environment() -> None:
    show = ["/bin/sh", "-c", 'echo "$A$B"']
    assert call(show, base={"A": "1"}, B="2") == "12\n"
