"""What a signal does to a process that has all but ended."""

from __future__ import annotations

import subprocess
import sys

import pytest

from reinforce_rl.errors import EXIT_STOPPED
from reinforce_rl.runtime.stop import STOP_SIGNALS

# An object that lives until the modules are taken down, when Python no longer runs handlers of signals.
PROGRAM = f"""
import os, sys
from reinforce_rl.runtime.stop import StopRequest

class Last:
    def __del__(self, kill=os.kill, write=os.write, pid=os.getpid(), number=int(sys.argv[1])):
        kill(pid, number)
        write(1, b"after the signal")

request = StopRequest.on_signals()
request.wait_for_checks()
os.kill(os.getpid(), int(sys.argv[1]))
assert request.reason
last = Last()
sys.exit({EXIT_STOPPED})
"""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_second_signal_while_python_shuts_down_does_not_change_the_exit_code(number):
    found = subprocess.run([sys.executable, "-c", PROGRAM, str(int(number))], capture_output=True, timeout=60)
    assert (found.returncode, found.stdout) == (EXIT_STOPPED, b"after the signal"), found.stderr
