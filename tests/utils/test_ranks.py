"""The launcher of one machine's ranks: its sockets, and its messages when a rank fails."""

from __future__ import annotations

import json
import os

import psutil
import pytest
from helpers.other_user import as_nobody
from helpers.ranks import launch_ranks

from reinforce_rl.errors import EXIT_LOST_RANK
from reinforce_rl.megatron.mesh import parallel_mesh


def print_listeners() -> None:
    """Print where two ranks and their launcher listen, and what another user can open."""
    with parallel_mesh(2) as mesh:
        pids = [os.getppid(), *mesh.gather_on_main(os.getpid())]
        if mesh.is_main:
            listening = []
            for pid in pids:
                for connection in psutil.Process(pid).net_connections("inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        listening.append((pid, connection.laddr.ip))
            store = os.environ.get("REINFORCE_STORE")
            opened = as_nobody("open_files", [store]) if store and os.geteuid() == 0 else []
            report = {"launcher": pids[0], "listening": listening, "opened": opened}
            print(json.dumps(report), flush=True)
        mesh.barrier()


@pytest.mark.more
@pytest.mark.timeout(300)
def test_nobody_else_reaches_the_ranks_of_one_machine():
    """torchrun's own store is open to the network, and the launcher unpickles its contents."""
    done = launch_ranks(__file__, 2)
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
    done = launch_ranks(script, 2)
    assert done.returncode == code
    assert done.stderr == said


if __name__ == "__main__":
    print_listeners()
