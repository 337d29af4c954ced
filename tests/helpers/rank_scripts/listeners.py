"""List where two ranks and their launcher listen, and files that another user can open."""

from __future__ import annotations

import json
import os
import sys

import psutil
from helpers.other_user import as_nobody

from reinforce_rl.megatron.mesh import parallel_mesh


def main() -> None:
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
            print(
                json.dumps({"launcher": pids[0], "listening": listening, "opened": opened}),
                file=sys.stdout,
                flush=True,
            )
        mesh.barrier()


if __name__ == "__main__":
    main()
