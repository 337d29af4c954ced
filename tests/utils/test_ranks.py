"""The launcher of one machine's ranks: its sockets, and its messages when a rank fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reinforce_rl.errors import EXIT_LOST_RANK

LISTENERS = Path(__file__).parents[1] / "helpers" / "rank_scripts" / "listeners.py"


def launch(script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "reinforce_rl.utils.ranks",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=280, env=environment
    )


@pytest.mark.more
@pytest.mark.timeout(300)
def test_nobody_else_reaches_the_ranks_of_one_machine():
    """torchrun's own store is open to the network, and the launcher unpickles its contents."""
    done = launch(LISTENERS)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["listening"]
    assert [pid for pid, _ in report["listening"] if pid == report["launcher"]] == []
    assert {address for _, address in report["listening"]} == {"127.0.0.1"}
    assert report["opened"] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("print('error: told', file=sys.stderr, flush=True); sys.exit(3)", 3, "error: told\n"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            EXIT_LOST_RANK,
            "error: rank 0 was ended by SIGKILL\n",
        ),
    ],
)
def test_an_error_is_reported_once(tmp_path, end, code, said):
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, signal, sys, time\nif os.environ['RANK'] == '0':\n    {end}\ntime.sleep(60)\n"
    )
    done = launch(script)
    assert done.returncode == code
    assert done.stderr == said
