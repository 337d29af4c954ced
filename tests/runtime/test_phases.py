"""Where the main thread is, seen from another thread."""

from __future__ import annotations

import subprocess
import sys

SECONDS = 3
LOOKING = f"""
import faulthandler, gc, sys, threading, time
from reinforce_rl.runtime.phases import StackWatcher

faulthandler.dump_traceback_later(60, exit=True)

class Garbage:
    def __init__(self):
        self.cycle = self
    def __del__(self):
        sum(range(2000))  # Python code, in which another thread may take over

def look():
    watcher = StackWatcher(threading.main_thread().ident)
    while time.monotonic() < end:
        Garbage()
        watcher.look()

def start():
    while time.monotonic() < end:
        Garbage()
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

gc.set_threshold(1)
sys.setswitchinterval(1e-6)
end = time.monotonic() + {SECONDS}
threads = [threading.Thread(target=target) for target in (look, look, start)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(gc.isenabled())
"""


def test_looking_never_meets_a_garbage_collection():
    """Which deadlocks CPython 3.11 within `sys._current_frames`."""
    result = subprocess.run([sys.executable, "-c", LOOKING], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr
