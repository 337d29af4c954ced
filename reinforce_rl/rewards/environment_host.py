"""Host process of environments: `python -m reinforce_rl.rewards.environment_host`.

It imports the environment and forks for each episode, for the reasons of `function_host`. The
process of an episode lives until the episode ends; when the owner's connection ends, so do all.

Receives `EnvironmentPool`'s settings; then messages {"episode": ID, ...}: with "begin", the
episode's record and random keys; with "answer", "calls", "faults" and "seconds", an answer, its
tool calls, what is wrong with them, and the time limit of its reply; with neither, the end of the
episode.

Sends {"faults": [[SENTENCE, KEY], ...], "source": sha256, "tools": definitions} as JSON; then for
each answer {"episode", "messages", "reward", "is_end", "fault", "text"}.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import math
import os
import random
import resource
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from select import POLLIN
from typing import Any

from reinforce_rl.errors import Fault
from reinforce_rl.rewards.environment import Tools, normalized
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
    receive,
    send,
)
from reinforce_rl.utils.user_class import OR_A_CLASS, import_user_class

REPLY_BYTES = 1 << 18  # maximum of a reply, as JSON
_CHUNK = 1 << 16
_CALLERS = (inspect.getfile(Tools), __file__)  # of the user's code

# Called with (record, rng); returns what is called with each answer.
Start = Callable[[dict[str, Any], random.Random], Callable[[str], object]]


@dataclass(frozen=True)
class Environment:
    start: Start
    definition: str  # where it is defined, for messages
    source: str | None  # SHA-256 of that file
    tools: list[dict[str, Any]] | None  # in OpenAI's form; None if it is no `Tools`


def load_environment(name: str, kwargs: dict[str, Any]) -> Environment:
    """Import an environment and bind its kwargs.

    Raises ValueError, the end of a sentence behind the setting and its value.
    """
    try:
        environment = import_user_class(name)
    except ImportError as error:
        raise ValueError(f"which {error}. Expected a function {OR_A_CLASS}") from error
    if not callable(environment):
        raise ValueError("which is neither a function nor a class")
    is_class = inspect.isclass(environment)
    _check_call(environment, name, kwargs, is_class=is_class)
    bound: Any = partial(environment, **kwargs)
    start: Start = bound if is_class else _called_with_each_answer(bound)
    tools = None
    if is_class and issubclass(environment, Tools):
        tools = environment.definitions()
    return Environment(start, definition_of(environment), source_sha256(environment), tools)


def _check_call(
    environment: Callable[..., object], name: str, kwargs: dict[str, Any], *, is_class: bool
) -> None:
    try:
        signature = inspect.signature(environment)
    except (TypeError, ValueError):  # of some builtins
        return
    arguments = ({}, random.Random(0))
    form = "NAME(record, rng, **kwargs)"
    if not is_class:
        arguments = ("", *arguments)
        form = "NAME(answer, record, rng, **kwargs)"
    try:
        signature.bind(*arguments, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"which is {name.rpartition('.')[2]}{signature}; expected {form}, and "
            f"environment.kwargs that fit: {error}"
        ) from error


def _called_with_each_answer(function: Callable[..., object]) -> Start:
    return lambda record, rng: lambda answer: function(answer, record, rng)


@dataclass
class _Episode:
    id: int
    pid: int
    answers_fd: int  # to its process
    replies_fd: int  # from its process
    secret: bytes  # precedes its replies; a program that it starts does not know it
    unsent: bytes = b""  # of an answer; the pipe may take a few KiB at a time
    deadline: float = math.inf  # in time.monotonic, of the reply that is waited for
    reply: bytearray = field(default_factory=bytearray)


class _Host:
    """Forks for each episode. Single-threaded, since it forks."""

    def __init__(self, environment: Environment, connection: Connection):
        self._environment = environment
        self._connection = connection
        self._episodes: dict[int, _Episode] = {}
        self._not_begun: dict[int, str] = {}  # why, of episodes without a process

    def run(self) -> None:
        """Play episodes until the owner's end of the connection is closed."""
        owner = self._connection.fileno()
        while True:
            waited_for = [e for e in self._episodes.values() if e.deadline < math.inf]
            of_fd = {episode.replies_fd: episode for episode in waited_for}
            unsent = {episode.answers_fd: episode for episode in waited_for if episode.unsent}
            first = min((episode.deadline for episode in waited_for), default=math.inf)
            ready = wait_for_events(owner, of_fd, first, written=unsent)
            event = ready.pop(owner, 0)
            if event & ~POLLIN:
                break
            # Before the owner's message, which may end an episode and close its descriptors.
            for fd in ready.keys() & unsent.keys():
                _send_answer(unsent[fd])
            for fd in ready.keys() & of_fd.keys():
                self._read(of_fd[fd])
            if event:
                message = receive(self._connection)
                if message is None:
                    break
                self._take(message)
            now = time.monotonic()
            for episode in [e for e in self._episodes.values() if e.deadline <= now]:
                self._fail(episode, "exceeded the time limit", use_of(episode.pid))
        for episode in self._episodes.values():
            end_process(episode.pid)

    def _take(self, message: dict[str, Any]) -> None:
        number = message["episode"]
        if "begin" in message:
            self._begin(number, message["begin"])
            return
        episode = self._episodes.get(number)
        if episode is None:
            if "answer" in message:
                ended = "its process had ended before the answer"
                fault = self._not_begun.pop(number, ended)
                send(self._connection, {"episode": number, "fault": fault, "text": ""})
            return
        if "answer" not in message:
            self._end(episode)
            return
        episode.deadline = time.monotonic() + message["seconds"]
        read = {key: message[key] for key in ("answer", "calls", "faults")}
        episode.unsent = json.dumps(read).encode() + b"\n"
        _send_answer(episode)

    def _begin(self, number: int, begin: dict[str, Any]) -> None:
        """Fork for an episode. Without a process, each of its answers fails."""
        parent = os.getpid()
        secret = secrets.token_hex(16).encode()
        with contextlib.ExitStack() as on_failure:
            try:
                answers_end, answers_fd = _pipe(on_failure)
                replies_fd, replies_end = _pipe(on_failure)
                pid = os.fork()
            except OSError as error:  # too many open files or processes
                self._not_begun[number] = f"no process could be started: {error}"
                return
            on_failure.pop_all()
        if pid == 0:
            try:
                others = [e.answers_fd for e in self._episodes.values()]
                others += [e.replies_fd for e in self._episodes.values()]
                for fd in (self._connection.fileno(), answers_fd, replies_fd, *others):
                    os.close(fd)
                player = _Player(self._environment, begin)
                _play(player, answers_end, replies_end, parent, secret)
            finally:
                os._exit(1)
        os.close(answers_end)
        os.close(replies_end)
        os.set_blocking(answers_fd, False)  # a process that does not read must not stop the others
        self._episodes[number] = _Episode(number, pid, answers_fd, replies_fd, secret)

    def _read(self, episode: _Episode) -> None:
        chunk = os.read(episode.replies_fd, _CHUNK)
        episode.reply += chunk
        line, newline, rest = bytes(episode.reply).partition(b"\n")
        if not newline:
            if not chunk:
                code = end_process(episode.pid)
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                self._fail(episode, f"its process ended with {how}", ended=True)
            elif len(episode.reply) > REPLY_BYTES:
                self._fail(episode, f"returned more than {REPLY_BYTES // 1024} KiB")
            return
        secret, _, text = line.partition(b" ")
        is_own = secrets.compare_digest(secret, episode.secret) and not rest
        try:
            reply = json.loads(text) if is_own else None
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            fault = "something other than the environment's return value was written to its reply"
            self._fail(episode, fault)
            return
        episode.reply.clear()
        episode.deadline = math.inf
        send(self._connection, {"episode": episode.id, **reply})
        if reply["fault"] or reply["is_end"]:
            self._end(episode)

    def _fail(self, episode: _Episode, fault: str, text: str = "", *, ended: bool = False) -> None:
        send(self._connection, {"episode": episode.id, "fault": fault, "text": text})
        self._end(episode, ended=ended)

    def _end(self, episode: _Episode, *, ended: bool = False) -> None:
        if not ended:
            end_process(episode.pid)
        del self._episodes[episode.id]
        os.close(episode.answers_fd)
        os.close(episode.replies_fd)
        reap_others({other.pid for other in self._episodes.values()})


def _pipe(on_failure: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        on_failure.callback(os.close, end)
    return ends


def _send_answer(episode: _Episode) -> None:
    """Write what the pipe takes of an answer."""
    try:
        episode.unsent = episode.unsent[os.write(episode.answers_fd, episode.unsent) :]
    except BrokenPipeError:  # its end is read from the other pipe
        episode.unsent = b""
    except BlockingIOError:
        pass


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _play(player: _Player, answers_fd: int, replies_fd: int, parent: int, secret: bytes) -> None:
    """Play one episode in the forked process: read answers, write a line of JSON for each."""
    os.setpgid(0, 0)  # so that killpg also ends what the environment starts
    die_with_parent(parent)
    share_no_flags()
    with open(answers_fd, "rb") as answers:
        for line in answers:
            reply = player.reply(**json.loads(line))
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            write_all(replies_fd, secret + b" " + json.dumps(reply).encode() + b"\n")
    os._exit(0)


class _Player:
    """An episode's environment and the random numbers that it draws."""

    def __init__(self, environment: Environment, begin: dict[str, Any]):
        self._environment = environment
        self._begin = begin
        self._episode: Callable[[str], object] | None = None

    def reply(
        self, answer: str, calls: list[dict[str, Any]], faults: dict[str, str]
    ) -> dict[str, Any]:
        """Return the environment's reply to an answer and its calls, or its fault."""
        try:
            if self._episode is None:
                # Equal for all samples of a prompt, which an advantage compares.
                rng = random.Random(self._begin["prompt_key"])
                self._episode = self._environment.start(self._begin["record"], rng)
                rng.seed(self._begin["sample_key"])
            if calls and isinstance(self._episode, Tools):
                returned: object = self._episode.answer_calls(calls, faults)
            else:
                returned = self._episode(answer)
        except BaseException as error:  # KeyboardInterrupt and SystemExit too
            fault = f"{type(error).__name__}{place_of(error, _CALLERS)}"
            return {"fault": fault, "text": str(error)[:MESSAGE_LETTERS]}
        try:
            reply = {**normalized(returned), "fault": "", "text": ""}
            json.dumps(reply)
            return reply
        except (TypeError, ValueError) as error:
            fault = f"{str(error)[:MESSAGE_LETTERS]}{self._environment.definition}"
            return {"fault": fault, "text": ""}


def _allow_descriptors() -> None:
    """Raise the limit on open files, of which an episode takes two, as far as is allowed."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    # any thread of the owner's may have started this process
    connection = connect_to_parent(death_signal=None)
    hide_from_other_processes()  # programs that an environment starts cannot open its descriptors
    _allow_descriptors()
    settings = connection.recv()
    faults: list[Fault] = []
    environment = None
    try:
        environment = load_environment(settings["name"], settings["kwargs"])
    except ValueError as error:
        sentence = f"environment.name is {settings['name']!r}, {error}"
        faults.append(Fault(sentence, key="environment.name.not_usable"))
    sys.stdout.flush()  # else each fork would print the buffer again
    gc.freeze()  # else a collection in a fork copies every page (copy-on-write)
    limit_memory(settings["episode_memory_mb"] * MEBIBYTE)
    faults_with_keys = [(fault, fault.key) for fault in faults]
    source = None if environment is None else environment.source
    tools = None if environment is None else environment.tools
    send(connection, {"faults": faults_with_keys, "source": source, "tools": tools})
    if environment is not None:
        _Host(environment, connection).run()
    os._exit(0)


if __name__ == "__main__":
    main()
