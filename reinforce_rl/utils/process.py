"""Child processes: start, messages in both directions, heartbeats, stop ladder, parent death.

Uses the standard library and Python 3.9 only: the wrapper of Slurm tasks imports it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # request a graceful stop
KILL_SECONDS = 60.0  # from SIGKILL to the end of a child; freeing much memory takes a while
MAX_INTERVAL = 2.0
PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
RUN_MODULE = str(Path(__file__).resolve().with_name("run_module.py"))
MAX_MESSAGE_BYTES = 1 << 24
# Operations of prctl(2).
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36

# Names such as REINFORCE_REWARD_TOKEN, WANDB_API_KEY and AWS_SECRET_ACCESS_KEY.
_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSPHRASE|CREDENTIALS?|PAT|AUTH|API_?KEY|KEY)(_|$)|PASSW(OR)?D", re.I
)

Message = dict[str, Any]


def import_path() -> str:
    """Return this process's import path as PYTHONPATH, so that a child imports the same modules."""
    folders = [entry or os.getcwd() for entry in sys.path]
    return os.pathsep.join([PACKAGE_PARENT, *folders])


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables whose names say that they are secret.

    For a third-party program.
    """
    return {name: value for name, value in environment.items() if not _SECRET.search(name)}


def limit_memory(fraction: float) -> None:
    """Limit this process to a fraction of the machine's memory; above it Python raises MemoryError.

    Writable private memory counts (RLIMIT_DATA), mapped files do not. A lower limit is kept.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = int(machine * fraction)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY or soft > limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def active_stop_signals() -> list[signal.Signals]:
    """Return the stop signals that this process does not ignore.

    Under `nohup`, SIGHUP is ignored from the start.
    """
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that started it ends.

    This works even if the process hangs. Exits at once if the process `parent` is already gone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def hide_from_other_processes() -> None:
    """Keep this user's other processes from tracing this one and opening its files in /proc.

    Forks of this process still can, and so can root unless it has no capabilities, as in a sandbox.
    A program that this process starts is not hidden.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends (PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Child:
    """A child process. `kill` ends it with its process group.

    Args:
        own_session: start a new session and process group. `kill` reaches all of it, and Ctrl-C in
            this process does not.
        death_signal: sent by the kernel when the starting thread ends, even by SIGKILL. None if the
            child notices by itself, or if the starting thread may end before the child.
        ignored_signals: ignored by the child from the start.
        popen: further arguments of `subprocess.Popen`, which raises OSError if the child cannot be
            started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        own_session: bool = True,
        death_signal: int | None = None,
        ignored_signals: Sequence[int] = (),
        **popen: Any,
    ):
        parent = os.getpid()

        def in_child() -> None:
            if death_signal is not None:
                die_with_parent(parent, death_signal)
            for number in ignored_signals:
                signal.signal(number, signal.SIG_IGN)

        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            start_new_session=own_session,
            # Only if needed: it makes Popen fork this process, which may have threads and much
            # memory.
            preexec_fn=in_child if death_signal is not None or ignored_signals else None,
            **popen,
        )
        self.pid = self.process.pid
        self._has_group = own_session

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while the child runs, -N if signal N killed it."""
        return self.process.poll()

    def send_signal(self, number: int) -> None:
        """Signal the process, not its group; no-op if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the child's end. Return the exit code; None if it still runs after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(None if seconds is None else max(0.0, seconds))
        return None

    def stop(self, seconds: float) -> None:
        """Send SIGTERM, wait up to `seconds`, then `kill`. Safe to call twice."""
        if self.exit_code is None:
            self.send_signal(signal.SIGTERM)
            self.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the child and its process group, and wait for the child's end.

        The group may have survivors when the child itself has ended.
        """
        if self._has_group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.send_signal(signal.SIGKILL)
        self.wait(KILL_SECONDS)


class ModuleChild(Child):
    """A child that runs a module and exchanges JSON messages with this process.

    The module gets the arguments FD and PARENT and must first call `connect_to_parent`. The child
    ends when the connection does, so it never outlives this process. Without `on_message` the
    caller may use `connection` directly.

    Args:
        on_message: called on a thread with each message, and with None at the end of the
            connection.
        prefix: command that runs the interpreter.
        env: None for the environment of this process, with this package on PYTHONPATH.
    """

    def __init__(
        self,
        module: str,
        on_message: Callable[[Message | None], None] | None = None,
        *,
        prefix: Sequence[str] = (),
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        **popen: Any,
    ):
        if env is None:
            folders = filter(None, [PACKAGE_PARENT, os.environ.get("PYTHONPATH")])
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
        self.connection, theirs = Pipe()
        with theirs:
            command = [*prefix, python, RUN_MODULE, module, str(theirs.fileno()), str(os.getpid())]
            super().__init__(command, env=env, pass_fds=[theirs.fileno(), *pass_fds], **popen)
        self._sending = threading.Lock()
        self._silence = Silence()
        if on_message is not None:
            self.listen(on_message)

    def listen(self, on_message: Callable[[Message | None], None]) -> None:
        """Call `on_message` on a thread with each further message."""
        threading.Thread(
            target=self._read, args=(on_message,), daemon=True, name=f"messages of {self.pid}"
        ).start()

    def send(self, message: Message) -> None:
        """Send a message from any thread; no error if the child has ended, see `fault`."""
        with self._sending:
            send(self.connection, message)

    def fault(self, seconds: float) -> str | None:
        """Return what is wrong with the child, to follow its name in a sentence.

        None if it runs and its last message is at most `seconds` old.
        """
        if self.exit_code is not None:
            return f"died (process {self.pid}, exit code {self.exit_code})"
        silent = self._silence.seconds()
        return (
            f"hangs (process {self.pid}): no heartbeat for {silent:.0f} s"
            if silent > seconds
            else None
        )

    def stop(self, seconds: float) -> None:
        """Close the connection, wait up to `seconds` for the child's end, then kill the child.

        Safe to call twice.
        """
        # shutdown, not close: a thread may be reading from the connection, and a fork of this
        # process may hold a copy of it.
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self.connection.fileno())) as end,
        ):
            end.shutdown(socket.SHUT_WR)
        self.wait(seconds)
        self.kill()

    def _read(self, on_message: Callable[[Message | None], None]) -> None:
        while (message := receive(self.connection)) is not None:
            self._silence.reset()
            on_message(message)
        on_message(None)


def connect_to_parent(death_signal: int | None = signal.SIGKILL) -> Connection:
    """Return the child's end of a `ModuleChild` connection; `death_signal` as for `Child`."""
    descriptor = int(sys.argv[1])
    parent = int(sys.argv[2])
    if death_signal is not None:
        die_with_parent(parent, death_signal)
    os.set_inheritable(descriptor, False)
    return Connection(descriptor)


def receive(connection: Connection) -> Message | None:
    """Wait for a JSON message.

    None at the end of the connection, or for a message that is not JSON.
    """
    try:
        return json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES))
    except (EOFError, OSError, ValueError, RecursionError):
        return None


def send(connection: Connection, message: Message) -> None:
    """Send a JSON message; no error if the receiver has gone."""
    with contextlib.suppress(OSError):
        connection.send_bytes(json.dumps(message).encode())


class Silence:
    """Seconds since the last sign of life.

    The time during which this process itself was suspended does not count.
    """

    def __init__(self) -> None:
        self._was_reset = True
        self._total = 0.0
        self._asked = 0.0

    def reset(self) -> None:
        self._was_reset = True

    def seconds(self) -> float:
        """Return the seconds; call at least every MAX_INTERVAL seconds."""
        now = time.monotonic()
        self._total = 0.0 if self._was_reset else self._total + min(now - self._asked, MAX_INTERVAL)
        self._was_reset = False
        self._asked = now
        return self._total
