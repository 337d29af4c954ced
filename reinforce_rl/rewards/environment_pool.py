"""Plays episodes with an environment, each in a process of its own.

`environment_host.py` is the other side.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reinforce_rl.config.environment import EnvironmentConfig
from reinforce_rl.errors import (
    ConfigError,
    EnvironmentProcessError,
    Fault,
    ReinforceError,
)
from reinforce_rl.rewards.user_code import START_SECONDS, STOP_SECONDS, UserCode
from reinforce_rl.utils.job_rank import is_first_rank
from reinforce_rl.utils.process import Message

_SLACK_SECONDS = 30.0  # for a busy machine, beyond the time limit of a reply


@dataclass(frozen=True)
class Turn:
    """An environment's reply to an answer of an episode."""

    episode: int
    messages: tuple[Mapping[str, Any], ...] = ()
    reward: float = 0.0
    is_end: bool = False
    fault: str = ""  # what failed and where, without any text of the episode; "" if nothing did
    text: str = ""  # the error's own text, which may quote the episode


def environment_faults(config: EnvironmentConfig) -> list[str]:
    """Load the environment on rank 0 in a process of its own; return why not."""
    if config.name is None or not is_first_rank():
        return []
    try:
        with contextlib.closing(EnvironmentPool(config)) as pool:
            pool.start()
    except ConfigError as error:
        return error.faults
    except ReinforceError as error:
        return [Fault(str(error), key=error.key)]
    return []


class EnvironmentPool:
    """Episodes of one environment, by numbers of the caller's choice. Not thread-safe.

    At most `config.num_workers` replies are computed at a time; other answers wait.
    """

    def __init__(self, config: EnvironmentConfig):
        self._config = config
        self._host: UserCode | None = None
        self._messages: queue.SimpleQueue[tuple[UserCode, Message | None]] = queue.SimpleQueue()
        self._episodes: set[int] = set()  # that have a process
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()  # answers
        self._deadlines: dict[int, float] = {}  # of the replies under way, in time.monotonic
        self._lost: list[Turn] = []  # replies to answers of episodes without a process
        self.source: str | None = None  # SHA-256 of the environment's file
        # Tools that it describes, in OpenAI's form; None before `start`, or if it runs no calls.
        self.tools: tuple[Mapping[str, Any], ...] | None = None

    def start(self) -> None:
        """Start the host process and load the environment.

        Raises:
            ConfigError: the environment cannot be loaded, or its kwargs do not fit.
            EnvironmentProcessError: no process could be started.
        """
        if self._host is not None:
            return
        config = self._config
        host = UserCode(
            "reinforce_rl.rewards.environment_host",
            allowed=config.variables,
            sandbox="environment.sandbox" if config.sandbox else None,
        )
        answer = host.load(config.model_dump(include={"name", "kwargs", "episode_memory_mb"}))
        if answer is None:
            raise EnvironmentProcessError(
                f"the process of the environment {config.name} ended before it was ready (exit "
                f"code {host.exit_code}; it is killed after {START_SECONDS:.0f} s); its output is "
                "above. Check that the import of its module ends",
                key="environment.process.not_ready",
            )
        if answer["faults"]:
            host.stop(STOP_SECONDS)
            raise ConfigError([Fault(sentence, key=key) for sentence, key in answer["faults"]])
        self.source = answer["source"]
        self.tools = None if answer["tools"] is None else tuple(answer["tools"])
        self._host = host
        host.listen(lambda message: self._messages.put((host, message)))

    def begin(
        self, episode: int, record: Mapping[str, Any], *, prompt_key: int, sample_key: int
    ) -> None:
        """Begin an episode.

        Args:
            record: the prompt's record; JSON values.
            prompt_key: of the random numbers of its start, equal for all samples of a prompt.
            sample_key: of the later ones.
        """
        try:
            self.start()
        except (ConfigError, OSError) as error:  # it had started before
            raise EnvironmentProcessError(
                f"the environment could not be started again: {error}",
                key="environment.process.not_restarted",
            ) from error
        assert self._host is not None
        keys = {"prompt_key": prompt_key, "sample_key": sample_key}
        self._host.send({"episode": episode, "begin": {"record": dict(record), **keys}})
        self._episodes.add(episode)

    def answer(
        self,
        episode: int,
        text: str,
        calls: Sequence[Mapping[str, Any]] = (),
        faults: Mapping[str, str] | None = None,
    ) -> None:
        """Give the policy's answer to an episode; `replies` returns the environment's reply.

        Args:
            calls: its tool calls, in OpenAI's form.
            faults: what is wrong with a call that could not be read, by its id.
        """
        if episode not in self._episodes:
            fault = "its process had ended before the answer"
            self._lost.append(Turn(episode, fault=fault))
            return
        answer = {"answer": text, "calls": list(calls), "faults": dict(faults or {})}
        self._waiting.append((episode, answer))
        self._send_waiting()

    def end(self, episode: int) -> None:
        """End an episode's process; no error if it has ended."""
        if episode in self._episodes and self._host is not None:
            self._host.send({"episode": episode})
        self._episodes.discard(episode)
        self._deadlines.pop(episode, None)
        self._waiting = deque(entry for entry in self._waiting if entry[0] != episode)
        self._send_waiting()

    @property
    def under_way(self) -> int:
        """Answers without a reply."""
        return len(self._waiting) + len(self._deadlines) + len(self._lost)

    def replies(self, seconds: float) -> list[Turn]:
        """Return the replies that are there; wait up to `seconds` for the first.

        A reply that takes longer than its time limit, or whose process ended, has a fault.
        """
        turns = self._lost
        self._lost = []
        until = time.monotonic() + seconds
        while self.under_way:
            now = time.monotonic()
            late = min(self._deadlines.values(), default=until)
            try:
                host, message = self._messages.get(
                    block=not turns and now < until, timeout=max(0.0, min(until, late) - now)
                )
            except queue.Empty:
                if late <= time.monotonic():
                    turns += self._lose_host("did not answer within the time limit of a reply")
                if turns or time.monotonic() >= until:
                    break
                continue
            if host is self._host:
                turns += self._taken(message)
        return turns

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        host = self._host
        self._host = None
        if host is not None:
            host.stop(STOP_SECONDS)

    def _taken(self, message: Message | None) -> list[Turn]:
        if message is None:
            return self._lose_host("ended")
        episode = int(message["episode"])
        if self._deadlines.pop(episode, None) is None:
            return []  # the episode has been ended here
        turn = Turn(episode, fault=message["fault"], text=message["text"])
        if not turn.fault:
            messages = tuple(message["messages"])
            turn = Turn(episode, messages, message["reward"], message["is_end"])
        if turn.fault or turn.is_end:
            self._episodes.discard(episode)
        self._send_waiting()
        return [turn]

    def _lose_host(self, how: str) -> list[Turn]:
        """Return the faults of all answers under way; the next `begin` starts another process."""
        assert self._host is not None
        self._host.kill()
        fault = f"the environment's host process {how} (exit code {self._host.exit_code})"
        self._host = None
        numbers = [*self._deadlines, *(episode for episode, _ in self._waiting)]
        self._deadlines.clear()
        self._waiting.clear()
        self._episodes.clear()
        return [Turn(number, fault=fault) for number in numbers]

    def _send_waiting(self) -> None:
        while self._waiting and len(self._deadlines) < self._config.num_workers:
            episode, answer = self._waiting.popleft()
            seconds = self._config.turn_timeout_seconds
            self._deadlines[episode] = time.monotonic() + seconds + _SLACK_SECONDS
            if self._host is not None:
                self._host.send({"episode": episode, "seconds": seconds, **answer})


def environment_tools(config: EnvironmentConfig) -> tuple[Mapping[str, Any], ...] | None:
    """Return the tools that an environment describes; None if it runs no calls.

    Its process is started for this and ended. Raises the errors of `EnvironmentPool.start`.
    """
    with contextlib.closing(EnvironmentPool(config)) as pool:
        pool.start()
        return pool.tools
