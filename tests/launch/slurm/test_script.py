"""The batch file passes shellcheck, and its settings are filled in."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from reinforce_rl.launch.slurm.script import BATCH_FILE, SETTINGS, filled_script

TEMPLATE = (Path(__file__).parents[3] / "slurm" / BATCH_FILE).read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck on this machine")
def test_shellcheck_has_nothing_to_say() -> None:
    command = ["shellcheck", "-"]
    done = subprocess.run(command, input=TEMPLATE, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_it_reads_few_variables_of_our_own() -> None:
    assert set(re.findall(r"REINFORCE_[A-Z_]+", TEMPLATE)) == {
        "REINFORCE_RUN_DIR",
        "REINFORCE_READY_SECONDS",
        "REINFORCE_GRACE_SECONDS",
        "REINFORCE_RENDEZVOUS_FILE",
    }


def test_settings_are_filled_in_as_a_shell_reads_them() -> None:
    values = {
        "repository": Path("/a folder"),
        "python": "/opt/py'thon",
        "batch_python": "python3.9",
        "servers": 2,
        "generator_ranks": 4,
        "generator_restarts": 0,
        "srun_options": ["--mpi=pmix", "--gres=gpu:a b"],
        "setup": r"echo '\1' $HOME",
    }
    assert values.keys() == set(SETTINGS)
    script = filled_script(TEMPLATE, values)
    assert len(script.splitlines()) == len(TEMPLATE.splitlines())
    lines = [line for line in script.splitlines() if line.partition("=")[0] in SETTINGS]
    show = [f'echo "${{{name}[*]}}|${{#{name}[@]}}"' for name in SETTINGS]
    text = "\n".join([*lines, *show])
    done = subprocess.run(["bash", "-ec", text], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "/a folder|1",
        "/opt/py'thon|1",
        "python3.9|1",
        "2|1",
        "4|1",
        "0|1",
        "--mpi=pmix --gres=gpu:a b|2",
        r"echo '\1' $HOME|1",
    ]
    for number, (line, filled) in enumerate(
        zip(TEMPLATE.splitlines(), script.splitlines(), strict=True)
    ):
        assert line == filled or line.partition("=")[0] in SETTINGS, number


def test_a_value_that_looks_like_a_setting_is_none() -> None:
    script = filled_script(TEMPLATE, {"repository": "/a\nservers=3", "servers": 2})
    assert "\nservers=2 " in script
    assert "repository='/a\nservers=3' " in script


def test_an_unknown_setting_is_a_defect() -> None:
    with pytest.raises(ValueError, match="launcher"):
        filled_script(TEMPLATE, {"launcher": "srun"})
