"""Where the main thread is, as another thread sees it."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from reinforce_rl.runtime import phases
from reinforce_rl.runtime.phases import (
    StackLocation,
    StackWatcher,
    WaitMeter,
    wait_for_ranks,
    wait_for_role,
)

sys.path[:0] = [str(Path(__file__).parents[2] / "tools")]
import house  # noqa: E402

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


@pytest.mark.more
def test_looking_never_meets_a_garbage_collection():
    """A collection within `sys._current_frames` deadlocks CPython 3.11."""
    result = subprocess.run(
        [sys.executable, "-c", LOOKING], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr


def seen(wait: Callable[[], object], end: Callable[[], object]) -> tuple[StackLocation, float]:
    """Return where a thread is while it waits, and its seconds of waiting."""
    thread = threading.Thread(target=wait)
    thread.start()
    assert thread.ident is not None
    meter = WaitMeter(thread.ident)
    with meter.measuring():
        time.sleep(0.5)
        place = StackWatcher(thread.ident).look()
        end()
        thread.join()
    return place, meter.seconds


@pytest.mark.parametrize("condition", [None, lambda: False], ids=["notified", "with a condition"])
def test_a_wait_for_another_role_is_seen(condition: Callable[[], bool] | None) -> None:
    changed = threading.Condition()

    def wait() -> None:
        with changed:
            wait_for_role(changed, 1.0, condition)

    place, seconds = seen(wait, lambda: None)
    assert place.in_collective
    assert place.of_role
    assert seconds > 0.2


def test_a_wait_for_a_collective_is_seen() -> None:
    done = threading.Lock()
    done.acquire()
    work = SimpleNamespace(wait=done.acquire)  # waits outside of Python, as torch's function does
    place, seconds = seen(lambda: wait_for_ranks(work), done.release)
    assert place.in_collective
    assert not place.of_role
    assert seconds > 0.2


def test_other_waits_are_not_for_ranks() -> None:
    done = threading.Event()
    place, seconds = seen(done.wait, done.set)
    assert not place.in_collective
    assert not place.of_role
    assert seconds == 0.0


def test_a_wait_is_named_by_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """This folder stands for the package."""
    changed = threading.Condition()

    def wait() -> None:
        with changed:
            wait_for_role(changed, 1.0)

    monkeypatch.setattr(phases, "PACKAGE", Path(phases.__file__).parents[2])
    place, _ = seen(wait, lambda: None)
    assert place.line.startswith("tests/runtime/test_phases.py:")
    assert place.of_role


def test_nothing_here_names_a_file_of_a_higher_folder() -> None:
    """Code in other folders reports its waits by `wait_for_role` and `wait_for_ranks`."""
    higher = house.FLOORS[house.FLOORS.index("runtime") + 1 :]
    named = []
    for path in house.source_files(house.PACKAGE / "runtime"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named += [node.value for floor in higher if f"reinforce_rl/{floor}/" in node.value]
    assert named == []
