"""Child processes: start, messages both ways, signs of life, the ladder of stopping, death with the parent.

Standard library and Python 3.9 only, since the supervisor of a Slurm job uses it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # they ask for a stop in good order
PR_SET_PDEATHSIG = 1
MOST_BETWEEN = 2.0
PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])

Message = dict[str, Any]


def heard_signals() -> list[signal.Signals]:
    """STOP_SIGNALS, less those that this process was started to ignore, as `nohup` does with SIGHUP."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class Silence:
    """Seconds since something was last heard, without those in which this process was suspended with its job."""

    def __init__(self) -> None:
        self._heard = True
        self._total = self._asked = 0.0

    def heard(self) -> None:
        """Begin anew, from any thread."""
        self._heard = True

    def seconds(self) -> float:
        """To be called at least every MOST_BETWEEN seconds."""
        now = time.monotonic()
        self._total = 0.0 if self._heard else self._total + min(now - self._asked, MOST_BETWEEN)
        self._heard, self._asked = False, now
        return self._total


class Child:
    """`python -m MODULE`, which reads messages from its input and writes messages to its output: JSON, one a line.

    The child must end at the end of its input: its parent is gone then, however it went.

    Args:
        module: what to run.
        on_message: called on a thread with each message, and with None at their end; None: `process.stdout` is read.
        environment: None for this process's.
        own_session: signals to this process's group do not reach it.
        pass_fds: file descriptors that it inherits.
    """

    def __init__(
        self,
        module: str,
        on_message: Callable[[Message | None], None] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        own_session: bool = False,
        pass_fds: Sequence[int] = (),
    ):
        environment = os.environ if environment is None else environment
        places = filter(None, [PACKAGE_PARENT, environment.get("PYTHONPATH")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, "PYTHONPATH": os.pathsep.join(places)},
            start_new_session=own_session,
            pass_fds=pass_fds,
        )
        self.pid = self.process.pid
        self.silence = Silence()
        if on_message is not None:
            threading.Thread(target=self._read, args=(on_message,), daemon=True, name=f"{module}-messages").start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    def send(self, message: Message) -> None:
        """A child that has ended takes none; `fault` tells."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the latter after `stop`
            self.process.stdin.write((json.dumps(message) + "\n").encode())
            self.process.stdin.flush()

    def fault(self, seconds: float) -> str | None:
        """Say what is wrong if the child has ended or was silent for `seconds`; else None. Read it after its name."""
        if self.exit_code is not None:
            return f"died (process {self.pid}, exit code {self.exit_code})"
        silent = self.silence.seconds()
        return f"hangs (process {self.pid}): no sign of life for {silent:.0f} s" if silent > seconds else None

    def stop(self, seconds: float) -> None:
        """Close its input, wait up to `seconds` for its end, then kill it. Safe to call twice."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """Kill it, before it can notice the end of its input."""
        self.process.kill()
        self.process.wait()

    def _read(self, on_message: Callable[[Message | None], None]) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.silence.heard()
                on_message(json.loads(line))
        on_message(None)


def send_to_parent(message: Message) -> None:
    """From a `Child`. A parent that has gone is noticed by the end of the input."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), (json.dumps(message) + "\n").encode())


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends; a hung process reads no pipe.

    Args:
        parent: its process id, since it may be gone already.
        number: of the signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
