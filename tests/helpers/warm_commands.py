"""`reinforce-rl` for shell scripts, forked from a process that has imported the package.

As a program it is this process: it listens at a Unix socket and runs one command after another.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

START_SECONDS = 120.0
MAX_BYTES = 1 << 20  # of a command with its environment
# Requests a command and exits with its code; skips site, which takes longer than the rest.
CLIENT = """
import json, os, socket, sys
address, *words = sys.argv[1:]
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(address)
    asked = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
    sys.exit(int(server.recv(16) or b"70"))
"""


class WarmCommands:
    """A context manager; `shell_function` defines `reinforce-rl` for bash."""

    def __init__(self, environment: Mapping[str, str]):
        self._folder = tempfile.TemporaryDirectory(
            prefix="warm-"
        )  # short: socket paths are bounded
        self._address = str(Path(self._folder.name) / "socket")
        self._environment = dict(environment)
        self.shell_function = (
            f"reinforce-rl() {{ {sys.executable} -SE -c {shlex.quote(CLIENT)} "
            f'{shlex.quote(self._address)} "$@"; }}\n'
        )

    def __enter__(self) -> WarmCommands:
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=self._environment,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(START_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()


def serve(address: str) -> None:
    sys.path[0] = str(Path(__file__).parents[1])
    from helpers import warm

    from reinforce_rl.utils.process import die_with_parent

    die_with_parent(os.getppid())
    warm.import_all()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            client, _ = listener.accept()
            with client:
                message, streams, _, _ = socket.recv_fds(client, MAX_BYTES, 3)
                asked = json.loads(message)
                child = os.fork()
                if not child:
                    die_with_parent(os.getppid())
                    for target, stream in enumerate(streams):
                        os.dup2(stream, target)
                    os.chdir(asked["folder"])
                    os.environ.clear()
                    os.environ.update(asked["environment"])
                    warm.be_command(asked["words"])
                for stream in streams:
                    os.close(stream)
                _, status = os.waitpid(child, 0)
                code = os.waitstatus_to_exitcode(status)
                client.send(str(code if code >= 0 else 128 - code).encode())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    serve(sys.argv[1])
