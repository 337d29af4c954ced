"""An engine's process that fails to start: it prints FAILING_HOST and raises a vague error."""

from __future__ import annotations

import os

from reinforce_rl.utils.process import connect_to_parent

if __name__ == "__main__":
    connection = connect_to_parent()
    connection.recv()
    print(os.environ["FAILING_HOST"], flush=True)
    connection.send(("RuntimeError: Engine core initialization failed. See root cause above", None))
    connection.recv()
