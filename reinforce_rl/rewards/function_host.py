"""Host process that forks for each sample: `python -m reinforce_rl.rewards.function_host`.

The trainer and the server have threads, torch and CUDA and cannot fork, so this process imports the
functions instead. A fork per sample isolates its side effects from the others. When the owner's
connection ends, so do all processes.

Receives `FunctionPool`'s settings; then per sample (ID, JSON, SECONDS): the JSON is {"function",
"prompt", "response", "record"}, or {} for a ping, SECONDS the sample's time limit.

Sends {"faults": [[SENTENCE, KEY], ...], "sources": {NAME: sha256}, "seconds": {NAME: SECONDS}} as
JSON; then per sample {"id", "status", "value", "fault", "message"}.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import gc
import importlib
import inspect
import json
import math
import os
import pkgutil
import secrets
import stat
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from select import POLLIN
from typing import Any

from reinforce_rl.errors import Fault
from reinforce_rl.rewards import base
from reinforce_rl.rewards.base import FunctionSpec
from reinforce_rl.rewards.user_forks import (
    MEBIBYTE,
    MESSAGE_LETTERS,
    definition_of,
    end_process,
    limit_memory,
    place_of,
    reap_others,
    share_no_flags,
    source_sha256,
    use_of,
    wait_for_events,
)
from reinforce_rl.utils.process import (
    connect_to_parent,
    die_with_parent,
    hide_from_other_processes,
    send,
)

PROVIDED = "reinforce_rl.rewards.functions"
ANSWER_BYTES = 1 << 16  # maximum
STATUSES = (base.STATUS_OK, base.STATUS_NOT_FINITE, base.STATUS_INTERNAL)

Functions = Mapping[str, Callable[..., Any]]


class LoadFault(Exception):
    """Raised when a function cannot be used.

    The message is one sentence; `key` goes into its `Fault`.
    """

    def __init__(self, message: str, *, key: str):
        super().__init__(message)
        self.key = key


def load_function(spec: FunctionSpec) -> partial[Any]:
    """Return the function with its kwargs bound; raise LoadFault if it cannot be loaded or they do
    not fit.
    """
    module_name, _, name = spec.name.rpartition(".")
    setting = f"{spec.key}.name is {spec.name!r}"
    if not module_name:
        raise LoadFault(
            f"{setting}; expected a dotted name, such as {PROVIDED}.gsm8k",
            key="reward_function.name.not_dotted",
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise LoadFault(
                f"{setting}, but {module_name} imports '{missing}', which is not installed",
                key="reward_function.module.needs_package",
            ) from error
        raise LoadFault(
            f"{setting}, but there is no module '{missing}'{_module_advice(missing)}",
            key="reward_function.module.missing",
        ) from error
    except BaseException as error:  # a user's file may raise anything, SystemExit included
        raise LoadFault(
            f"{setting}, but the import of {module_name} raised {type(error).__name__}: {error}",
            key="reward_function.module.import_failed",
        ) from error
    function = getattr(module, name, None)
    if function is None:
        functions = {key: value for key, value in vars(module).items() if inspect.isfunction(value)}
        defined_here = [
            n
            for n, value in functions.items()
            if value.__module__ == module.__name__ and not n.startswith("_")
        ]
        advice = _advice(name, defined_here, module_name)
        raise LoadFault(
            f"{setting}, but {module_name} has no '{name}'{advice}",
            key="reward_function.name.unknown",
        )
    if not callable(function):
        raise LoadFault(
            f"{setting}, which is not a function; expected the name of a function",
            key="reward_function.name.no_function",
        )
    _check_kwargs(function, spec)
    return partial(function, **spec.kwargs)


def _module_advice(missing: str) -> str:
    parent, _, last = missing.rpartition(".")
    if not parent:
        return "; its file belongs in the folder where you start, or on PYTHONPATH"
    folders = getattr(importlib.import_module(parent), "__path__", [])
    return _advice(last, [module.name for module in pkgutil.iter_modules(folders)], parent)


def _advice(wanted: str, known: list[str], prefix: str) -> str:
    close = [f"{prefix}.{name}" for name in difflib.get_close_matches(wanted, known)]
    return (
        f"; did you mean {' or '.join(close)}?"
        if close
        else f"; it has {', '.join(sorted(known)) or 'none'}"
    )


def declared_seconds(function: partial[Any], setting: str) -> float:
    """Return the time limit that a loaded function declares; raise LoadFault if it is invalid."""
    seconds = getattr(function.func, "sample_seconds", base.SAMPLE_SECONDS)
    if callable(seconds):
        try:
            seconds = seconds(**function.keywords)
        except Exception as error:
            raise LoadFault(
                f"{setting}.name declares takes_up_to by a function that raises "
                f"{type(error).__name__}: {error}; it gets the kwargs of the configuration, "
                "without defaults",
                key="reward_function.seconds.raised",
            ) from error
    if isinstance(seconds, bool) or not (
        isinstance(seconds, int | float) and 0 < seconds < math.inf
    ):
        raise LoadFault(
            f"{setting}.name is a function that declares takes_up_to({seconds!r}); expected a "
            "finite number of seconds above 0",
            key="reward_function.seconds.invalid",
        )
    return float(seconds)


def _check_kwargs(function: Callable[..., Any], spec: FunctionSpec) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some builtins
        return
    called = f"{spec.name}{signature}"
    kinds = {name: p.kind for name, p in signature.parameters.items() if p.kind < p.KEYWORD_ONLY}
    takes_lists = "completions" in list(kinds)[:3]
    if takes_lists or (len(kinds) < 3 and inspect.Parameter.VAR_POSITIONAL not in kinds.values()):
        raise LoadFault(
            f"{spec.key}.name is {called}; expected NAME(prompt, response, record, **kwargs), "
            "called once for each sample; wrap a function of TRL, which takes lists, as "
            '"From TRL" in docs/migration.md shows',
            key="reward_function.arguments.wrong",
        )
    try:
        signature.bind("", "", {}, **spec.kwargs)
    except TypeError as error:
        how = f"give each as +{spec.key}.kwargs.NAME=VALUE"
        raise LoadFault(
            f"{spec.key}.kwargs do not fit {called}: {error}; {how}",
            key="reward_function.kwargs.do_not_fit",
        ) from error
    try:
        getattr(function, "check", lambda **kwargs: None)(**spec.kwargs)
    except ValueError as error:
        raise LoadFault(
            f"{spec.key}.kwargs of {spec.name}: {error}",
            key="reward_function.kwargs.wrong_value",
        ) from error
    except TypeError as error:
        raise LoadFault(
            f"{spec.key}.kwargs of {spec.name} has a value of a wrong type: {error}",
            key="reward_function.kwargs.wrong_type",
        ) from error


@dataclass(frozen=True)
class Outcome:
    status: int  # STATUS_OK, STATUS_NOT_FINITE, STATUS_INTERNAL or STATUS_TIMED_OUT
    value: float = math.nan  # NaN unless STATUS_OK
    fault: str = ""  # what failed and where, without any text of the sample
    message: str = ""  # the error's own text, which may quote the sample


@dataclass
class _Sample:
    id: int
    pid: int
    answer_fd: int
    # precedes its answer; a program that a function starts does not know it, a fork does
    secret: bytes
    deadline: float  # in time.monotonic
    answer: bytearray = field(default_factory=bytearray)


class _Host:
    """Forks for each sample. Single-threaded, since it forks."""

    def __init__(self, functions: Functions, settings: dict[str, Any], connection: Connection):
        self._functions = functions
        self._num_workers = int(settings["num_workers"])
        self._connection = connection
        self._running: dict[int, _Sample] = {}  # by answer_fd

    def run(self) -> None:
        """Score samples until the owner's end of the connection is closed."""
        owner = self._connection.fileno()
        while True:
            first = min((sample.deadline for sample in self._running.values()), default=math.inf)
            # A sample is read when there is room for it, so a large batch waits in the owner's
            # memory.
            has_room = len(self._running) < self._num_workers
            ready = wait_for_events(owner, self._running, first, reads_owner=has_room)
            event = ready.pop(owner, 0)
            if event & ~POLLIN:
                break
            if event:
                self._start(*self._connection.recv())
            for fd in ready:
                sample = self._running[fd]
                chunk = os.read(fd, ANSWER_BYTES)
                sample.answer += chunk
                if not chunk or b"\n" in chunk or len(sample.answer) > ANSWER_BYTES:
                    self._finish(sample)
            now = time.monotonic()
            for sample in [
                running for running in self._running.values() if running.deadline <= now
            ]:
                late = Outcome(
                    base.STATUS_TIMED_OUT,
                    fault="exceeded the time limit",
                    message=use_of(sample.pid),
                )
                self._finish(sample, late)
        for sample in self._running.values():
            end_process(sample.pid)

    def _start(self, number: int, request: bytes, seconds: float) -> None:
        parent = os.getpid()
        secret = secrets.token_hex(16).encode()
        try:
            read_end, write_end = os.pipe()
            pid = os.fork()
        except OSError as error:  # too many processes or files
            self._send(
                number, Outcome(base.STATUS_INTERNAL, fault=f"no process could be started: {error}")
            )
            return
        if pid == 0:
            try:
                for fd in (self._connection.fileno(), read_end, *self._running):
                    os.close(fd)
                _work(self._functions, request, write_end, parent, secret)
            finally:
                os._exit(1)
        os.close(write_end)
        deadline = time.monotonic() + seconds
        self._running[read_end] = _Sample(number, pid, read_end, secret, deadline)

    def _finish(self, sample: _Sample, outcome: Outcome | None = None) -> None:
        """End a sample's process and send `outcome`, or else the answer that the process wrote."""
        code = end_process(sample.pid)
        del self._running[sample.answer_fd]
        os.close(sample.answer_fd)
        reap_others({sample.pid for sample in self._running.values()})
        self._send(sample.id, outcome or _outcome_of(sample, code))

    def _send(self, number: int, outcome: Outcome) -> None:
        send(self._connection, {"id": number, **asdict(outcome)})


def _outcome_of(sample: _Sample, code: int) -> Outcome:
    line = bytes(sample.answer).partition(b"\n")[0]
    secret, _, answer = line.partition(b" ")
    if line and not secrets.compare_digest(secret, sample.secret):
        return Outcome(
            base.STATUS_INTERNAL,
            fault="something other than the function's return value was written to its answer",
        )
    try:
        read = json.loads(answer)
        outcome = Outcome(
            int(read["status"]), float(read["value"]), str(read["fault"]), str(read["message"])
        )
        if outcome.status in STATUSES:  # else the function has written it, not its process
            return outcome
    except (ArithmeticError, ValueError, TypeError, KeyError, RecursionError):
        pass
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return Outcome(base.STATUS_INTERNAL, fault=f"its process ended with {how}")


def _work(functions: Functions, request: bytes, answer_fd: int, parent: int, secret: bytes) -> None:
    """Score one sample in the forked process, write its `Outcome` as a line of JSON behind the
    secret, and exit.
    """
    os.setpgid(0, 0)  # so that killpg also ends what the function starts
    die_with_parent(parent)
    share_no_flags()
    outcome = _score(functions, request)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os.write(answer_fd, secret + b" " + json.dumps(asdict(outcome)).encode() + b"\n")
    os._exit(0)


def _score(functions: Functions, request: bytes) -> Outcome:
    sample = json.loads(request)
    if "function" not in sample:
        return Outcome(base.STATUS_OK, 0.0)  # a ping
    function = functions[sample["function"]]
    defined = definition_of(function)
    try:
        value = function(sample["prompt"], sample["response"], sample["record"])
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
            kind = type(value).__name__
            return Outcome(
                base.STATUS_INTERNAL, fault=f"returned a {kind}; expected a number{defined}"
            )
        number = float(value)
    except BaseException as error:  # KeyboardInterrupt and SystemExit too
        # what an error says about itself without any text of the sample
        public = getattr(error, "public", "")
        public = public[:MESSAGE_LETTERS] if isinstance(public, str) else ""
        fault = f"{type(error).__name__}{public and f': {public}'}{place_of(error)}"
        message = str(error)[:MESSAGE_LETTERS].removeprefix(public).removeprefix(": ")
        return Outcome(base.STATUS_INTERNAL, fault=fault, message=message)
    if not math.isfinite(number):
        fault = f"returned {number}; expected a finite number{defined}"
        return Outcome(base.STATUS_NOT_FINITE, fault=fault)
    return Outcome(base.STATUS_OK, number)


def main() -> None:
    # any thread of the owner's may have started this process
    connection = connect_to_parent(death_signal=None)
    hide_from_other_processes()  # programs that a function starts cannot open its descriptors
    settings = connection.recv()
    functions = {}
    sources = {}
    seconds = {}
    faults: list[Fault] = []
    for name, spec in settings["functions"].items():
        before = _open_files()
        try:
            functions[name] = load_function(spec)
            sources[name] = source_sha256(functions[name].func)
            seconds[name] = declared_seconds(functions[name], spec.key)
        except LoadFault as fault:
            faults.append(Fault(str(fault), key=fault.key))
        for path in sorted(_open_files() - before):
            faults.append(
                Fault(
                    f"{spec.key}.name is {spec.name!r}, whose module keeps {path} open. All "
                    "samples would share its file position: read the whole file at import, or open "
                    "it in the function",
                    key="reward_function.module.keeps_file_open",
                )
            )
    sys.stdout.flush()  # else each fork would print the buffer again
    gc.freeze()  # else a collection in a fork copies every page (copy-on-write)
    limit_memory(settings["sample_memory_mb"] * MEBIBYTE)
    faults_with_keys = [(fault, fault.key) for fault in faults]
    send(connection, {"faults": faults_with_keys, "sources": sources, "seconds": seconds})
    if not faults:
        _Host(functions, settings, connection).run()
    os._exit(0)


def _open_files() -> set[str]:
    """Return the regular files that this process has open for reading."""
    targets = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            is_read = fcntl.fcntl(int(fd), fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
            if is_read and stat.S_ISREG(os.fstat(int(fd)).st_mode):
                targets.add(os.readlink(f"/proc/self/fd/{fd}"))
    return targets


if __name__ == "__main__":
    main()
