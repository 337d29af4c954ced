"""Environments in processes of their own: state, keys, limits, faults."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.errors import check_fault

from reinforce_rl.config.environment import EnvironmentConfig
from reinforce_rl.errors import ConfigError, EnvironmentProcessError
from reinforce_rl.rewards import environment_host
from reinforce_rl.rewards.environment import Reply, normalized
from reinforce_rl.rewards.environment_host import Environment, _Host
from reinforce_rl.rewards.environment_pool import EnvironmentPool, Turn

KEYS = {"prompt_key": 5, "sample_key": 6}
# What the host would take if it did not compare the secret before the first space.
FORGED = b'secret {"messages": [], "reward": 9.0, "is_end": true, "fault": "", "text": ""}\n'


# Environments, which the host imports by their names in this module.


def calculator(answer: str, record: dict, rng: random.Random, *, base: int = 10) -> str | None:
    return str(int(answer, base) * record["factor"]) if answer != "end" else None


class GuessANumber:
    def __init__(self, record: dict, rng: random.Random, *, most: int = 100):
        self.number = rng.randint(0, most)
        self.rng = rng
        self.tries = 0

    def __call__(self, answer: str) -> Reply | str:
        self.tries += 1
        if answer == "number":
            return f"{self.number} {self.tries} {self.rng.random()}"
        guess = int(answer)
        if guess == self.number:
            return Reply("right", reward=1.0, is_end=True)
        return "higher" if guess < self.number else "lower"


def misbehaving(answer: str, record: dict, rng: random.Random) -> Any:
    if answer == "raise":
        raise ValueError("no such city: Rome")
    if answer == "exit":
        os._exit(3)
    if answer == "sleep":
        time.sleep(60)
    if answer == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if answer == "large":
        return "x" * (1 << 20)
    if answer == "forge":
        for fd in range(3, 20):
            with contextlib.suppress(OSError):
                os.write(fd, FORGED)
        return None
    if answer == "host":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if answer == "process":
        return str(os.getpid())
    return {"number": 3, "role": {"role": "assistant", "content": "a"}, "text": "fine"}[answer]


def name_of(environment: Any) -> str:
    return f"{__name__}.{environment.__name__}"


@contextlib.contextmanager
def playing(environment: Any, **settings: Any) -> Iterator[EnvironmentPool]:
    name = environment if isinstance(environment, str) else name_of(environment)
    with contextlib.closing(EnvironmentPool(EnvironmentConfig(name=name, **settings))) as pool:
        yield pool


@pytest.fixture(autouse=True)
def this_folder_is_imported_from(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def reply_to(pool: EnvironmentPool, episode: int, answer: str) -> Turn:
    pool.answer(episode, answer)
    (turn,) = pool.replies(30)
    assert turn.episode == episode
    return turn


def text_of(turn: Turn) -> str:
    assert not turn.fault, turn
    (message,) = turn.messages
    return message["content"]


def numpy_end(answer: str, record: dict, rng: random.Random) -> Any:
    if answer == "end":
        return Reply(reward=1.0, is_end=np.True_)  # type: ignore[arg-type]
    if answer == "surrogate":
        return "half of a pair: \ud83d"
    return {"role": "user", "content": "fine", "count": np.int64(3)}


def test_values_that_are_no_json():
    with playing(numpy_end) as pool:
        for episode in (1, 2, 3):
            pool.begin(episode, {}, **KEYS)
        assert reply_to(pool, 1, "end").is_end
        assert "surrogate pair" in reply_to(pool, 2, "surrogate").fault
        assert "int64" in reply_to(pool, 3, "count").fault


def test_an_answer_that_no_pipe_holds():
    """It is written as the process reads it, beside others."""
    with playing(calculator, num_workers=2) as pool:
        pool.begin(1, {"factor": 2}, **KEYS)
        pool.begin(2, {"factor": 3}, **KEYS)
        pool.answer(1, " " * 3_000_000 + "4")
        pool.answer(2, "5")
        turns = []
        while pool.under_way:
            turns += pool.replies(30)
    assert {turn.episode: text_of(turn) for turn in turns} == {1: "8", 2: "15"}


def test_an_episode_that_is_ended_is_not_waited_for():
    with playing(misbehaving, num_workers=1) as pool:
        for episode in (1, 2, 3):
            pool.begin(episode, {}, **KEYS)
            pool.answer(episode, "sleep" if episode < 3 else "process")
        pool.end(1)
        pool.end(2)
        assert pool.under_way == 1
        (turn,) = pool.replies(30)
        assert turn.episode == 3
        assert int(text_of(turn)) > 0


def test_an_episode_without_a_process_fails_alone(monkeypatch):
    """As where the user's processes or open files are used up."""
    environment = Environment(lambda record, rng: str, "", None, None)
    host = _Host(environment, None)  # type: ignore[arg-type]
    monkeypatch.setattr(os, "fork", raising(OSError(11, "Resource temporarily unavailable")))
    before = set(os.listdir("/proc/self/fd"))
    host._begin(4, {})
    assert set(os.listdir("/proc/self/fd")) == before
    sent: list[dict] = []
    monkeypatch.setattr(environment_host, "send", lambda connection, message: sent.append(message))
    host._take({"episode": 4, "answer": "a", "calls": [], "faults": {}, "seconds": 1})
    (message,) = sent
    assert message["fault"].startswith("no process could be started")


def raising(error: Exception) -> Any:
    def function(*args: Any) -> None:
        raise error

    return function


@pytest.mark.more
def test_more_episodes_than_a_process_may_have_open_files():
    """The host's limit of open files is raised to the hard one."""
    count = 600
    with playing(calculator, num_workers=4) as pool:
        for episode in range(count):
            pool.begin(episode, {"factor": 3}, **KEYS)
        for episode in range(count):
            pool.answer(episode, "2")
        turns = []
        while pool.under_way:
            turns += pool.replies(30)
    assert sorted(turn.episode for turn in turns) == list(range(count))
    assert {text_of(turn) for turn in turns} == {"6"}


def test_a_function_is_called_with_each_answer_and_the_record():
    with playing(calculator, kwargs={"base": 16}) as pool:
        pool.begin(1, {"factor": 3}, **KEYS)
        pool.begin(2, {"factor": 5}, **KEYS)
        assert reply_to(pool, 1, "10").messages == ({"role": "user", "content": "48"},)
        assert text_of(reply_to(pool, 2, "f")) == "75"
        last = reply_to(pool, 1, "end")
        assert last.is_end
        assert last.messages == ()
        assert pool.source is not None


def test_a_class_keeps_its_state_and_ends_with_a_reward():
    with playing(GuessANumber) as pool:
        pool.begin(0, {}, **KEYS)
        number = random.Random(5).randint(0, 100)
        assert text_of(reply_to(pool, 0, str(number - 1))) == "higher"
        assert text_of(reply_to(pool, 0, str(number + 1))) == "lower"
        last = reply_to(pool, 0, str(number))
        assert last == Turn(0, ({"role": "user", "content": "right"},), 1.0, True)


def test_starts_are_keyed_by_the_prompt_and_later_draws_by_the_sample():
    with playing(GuessANumber) as pool:
        for episode, prompt_key, sample_key in ((0, 5, 6), (1, 5, 7), (2, 8, 6)):
            pool.begin(episode, {}, prompt_key=prompt_key, sample_key=sample_key)
        words = [text_of(reply_to(pool, episode, "number")).split() for episode in range(3)]
    starts = [number for number, _, _ in words]
    draws = [draw for _, _, draw in words]
    assert starts[0] == starts[1] != starts[2]
    assert draws[0] == draws[2] != draws[1]
    assert [tries for _, tries, _ in words] == ["1"] * 3


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("raise", f"ValueError at {__file__}:"),
        ("exit", "its process ended with exit code 3"),
        ("large", "returned more than 256 KiB"),
        ("number", "returned a int; expected a text"),
        ("role", "role 'assistant'; expected user, tool, system"),
        ("forge", "something other than the environment's return value"),
        pytest.param("sleep", "exceeded the time limit", marks=pytest.mark.more),
        pytest.param("stop", "exceeded the time limit", marks=pytest.mark.more),
    ],
)
def test_a_fault_ends_its_episode_alone(answer, fault):
    with playing(misbehaving, turn_timeout_seconds=10.0) as pool:
        pool.begin(0, {}, **KEYS)
        pool.begin(1, {}, **KEYS)
        turn = reply_to(pool, 0, answer)
        assert fault in turn.fault
        assert "Rome" not in turn.fault
        assert ("Rome" in turn.text) == (answer == "raise")
        assert text_of(reply_to(pool, 1, "text")) == "fine"
        assert "had ended" in reply_to(pool, 0, "text").fault


def test_episodes_of_a_lost_host_fail_and_new_ones_get_another():
    with playing(misbehaving) as pool:
        pool.begin(0, {}, **KEYS)
        pool.begin(1, {}, **KEYS)
        assert "host process ended" in reply_to(pool, 0, "host").fault
        assert "had ended" in reply_to(pool, 1, "text").fault
        pool.begin(2, {}, **KEYS)
        assert text_of(reply_to(pool, 2, "text")) == "fine"


@pytest.mark.more
def test_no_more_replies_than_workers_are_under_way():
    with playing(misbehaving, num_workers=2, turn_timeout_seconds=8.0) as pool:
        for episode in range(4):
            pool.begin(episode, {}, **KEYS)
            pool.answer(episode, "sleep" if episode < 2 else "text")
        assert pool.under_way == 4
        first = pool.replies(30)
        assert {turn.episode for turn in first} <= {0, 1}
        turns = {turn.episode: turn for turn in first}
        while len(turns) < 4:
            turns |= {turn.episode: turn for turn in pool.replies(30)}
        assert [bool(turns[episode].fault) for episode in range(4)] == [True, True, False, False]


def test_processes_end_with_their_episodes_and_the_pool():
    with playing(misbehaving) as pool:
        pool.begin(0, {}, **KEYS)
        pool.begin(1, {}, **KEYS)
        pids = [int(text_of(reply_to(pool, episode, "process"))) for episode in range(2)]
        pool.end(0)
        pool.end(0)
        wait_for_end(pids[0])
        assert Path(f"/proc/{pids[1]}").exists()
    wait_for_end(pids[1])


def wait_for_end(pid: int) -> None:
    until = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_without_an_answer_there_is_no_reply():
    with playing(calculator) as pool:
        pool.begin(0, {"factor": 2}, **KEYS)
        assert pool.replies(5) == []


@pytest.mark.parametrize(
    ("environment", "kwargs", "words"),
    [
        ("test_environment_pool.nothing", {}, ["cannot be imported", "AttributeError"]),
        ("no_such_module.calculator", {}, ["ModuleNotFoundError"]),
        (f"{__name__}.KEYS", {}, ["neither a function nor a class"]),
        (calculator, {"bass": 16}, ["calculator(", "NAME(answer, record, rng", "bass"]),
        (GuessANumber, {"least": 1}, ["NAME(record, rng", "least"]),
        (normalized, {}, ["normalized(", "NAME(answer, record, rng"]),
    ],
)
def test_what_cannot_be_an_environment_is_refused_at_the_start(environment, kwargs, words):
    if environment is normalized:
        environment = "reinforce_rl.rewards.environment.normalized"
    with playing(environment, kwargs=kwargs) as pool, pytest.raises(ConfigError) as raised:
        pool.start()
    check_fault(raised.value.faults, "environment.name.not_usable", *words)


def test_a_module_that_ends_the_host_is_named(tmp_path, monkeypatch):
    (tmp_path / "ending_module.py").write_text("import os; os._exit(4)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with (
        playing("ending_module.nothing") as pool,
        pytest.raises(EnvironmentProcessError) as raised,
    ):
        pool.start()
    assert raised.value.key == "environment.process.not_ready"
    assert "ending_module.nothing" in str(raised.value)
    assert "exit code 4" in str(raised.value)


def test_replies_in_every_form():
    message = {"role": "tool", "content": "4"}
    plain = {"messages": [message], "reward": 0.0, "is_end": False}
    assert normalized(message) == normalized([message]) == normalized(Reply(message)) == plain
    assert normalized(None) == {"messages": [], "reward": 0.0, "is_end": True}
    assert normalized(Reply("a", 2, True)) == {
        "messages": [{"role": "user", "content": "a"}],
        "reward": 2.0,
        "is_end": True,
    }
    for wrong in (Reply("a", float("nan")), {"role": "user"}, ["a"], 3):
        with pytest.raises((TypeError, ValueError)):
            normalized(wrong)
