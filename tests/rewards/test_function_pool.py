"""Reward functions in worker processes: a sample that misbehaves fails alone."""

from __future__ import annotations

import logging
import os
import pty
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers.errors import check_fault, raises_error
from helpers.toy_server import is_alive, wait_for

from reinforce_rl.config.rewards import RewardFunctionConfig
from reinforce_rl.errors import ConfigError
from reinforce_rl.rewards.base import (
    STATUS_INTERNAL,
    STATUS_NOT_FINITE,
    STATUS_OK,
    STATUS_TIMED_OUT,
    FunctionSpec,
    TextSample,
)
from reinforce_rl.rewards.function_pool import (
    FORK_SECONDS,
    PING,
    SLACK_SECONDS,
    FunctionPool,
    _Host,
)

RUNS = "helpers.reward_functions.runs"
PID = "Path(folder, str(os.getpid())).touch()"
LOOP = "while True: pass"
PID_AND_LOOP = f"{PID}\n{LOOP}"
TESTS = Path(__file__).parents[1]


def sample(code: str = "", value: object = 1.0) -> TextSample:
    return TextSample("prompt", "", {"value": value, "code": code})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pool")


@pytest.fixture(scope="module")
def pool(folder):
    function = FunctionSpec("reward_function", RUNS, {"folder": str(folder)})
    pool = FunctionPool(
        {"f": function},
        RewardFunctionConfig(sample_timeout_seconds=2.0),
    )
    pool.start()
    yield pool
    pool.close()


def processes() -> list[psutil.Process]:
    """Return the hosts that this process has started, and their workers."""
    children = psutil.Process().children()
    hosts = [p for p in children if "reinforce_rl.rewards.function_host" in p.cmdline()]
    return [*hosts, *(child for host in hosts for child in host.children(recursive=True))]


@pytest.mark.more
def test_every_failure_has_its_status_and_the_others_their_rewards(pool, caplog):
    kinds = {
        "time.sleep(600)": STATUS_TIMED_OUT,
        LOOP: STATUS_TIMED_OUT,
        # in C, where Python's signal handlers do not run
        "import re; re.fullmatch('(a+)+b', 'a' * 60)": STATUS_TIMED_OUT,
        "os._exit(7)": STATUS_INTERNAL,
        "raise SystemExit(1)": STATUS_INTERNAL,
        "raise ValueError('secret')": STATUS_INTERNAL,
    }
    values = {
        float("nan"): STATUS_NOT_FINITE,
        1e300: STATUS_NOT_FINITE,  # float32 cannot hold it
        None: STATUS_INTERNAL,
        "1.0": STATUS_INTERNAL,
        True: STATUS_OK,
    }
    bad = [sample(kind) for kind in kinds] + [sample("", value) for value in values]
    prints = "print('this must not get between the answers', flush=True)"
    good = [sample(prints, 0.5 + i) for i in range(len(bad))]
    mixed = [text_sample for pair in zip(bad, good, strict=True) for text_sample in pair]
    with caplog.at_level(logging.INFO):
        scores = pool.submit("f", mixed).result()
    expected = [*kinds.values(), *values.values()]
    assert scores.status[0::2].tolist() == expected
    is_missing = np.isnan(scores.values[0::2]).tolist()
    assert is_missing == [code != STATUS_OK for code in expected]
    assert scores.status[1::2].tolist() == [STATUS_OK] * len(good)
    good_values = [0.5 + i for i in range(len(good))]
    assert scores.values[1::2].tolist() == good_values
    assert re.fullmatch(rf"{RUNS}: ValueError at /.*/reward_functions\.py:\d+", scores.faults[10])
    defined = r" \(defined at /.*/reward_functions\.py:\d+\)"
    assert re.fullmatch(
        rf"{RUNS}: returned nan; expected a finite number{defined}", scores.faults[12]
    )
    assert re.fullmatch(
        rf"{RUNS}: returned a NoneType; expected a number{defined}", scores.faults[16]
    )
    use = re.compile(r"it used (\d) s of CPU and was in state ([RSD])$")
    used = {row: use.match(scores.texts[row]) for row in (0, 2)}
    assert used[0]
    assert used[0].groups() == ("0", "S")
    # 0 if a busy machine gave it less than half a second
    assert used[2]
    assert used[2][1] in "012"
    # the caller reports or logs it
    assert "secret" not in caplog.text
    assert "function_failed" not in caplog.text


def test_the_texts_of_errors_are_apart(pool):
    samples = [sample(""), sample("raise ValueError('secret')"), TextSample("", "")]
    scores = pool.submit("f", samples).result()
    assert scores.texts == {1: "secret", 2: "'value'"}
    assert scores.faults.keys() == {1, 2}


def test_workers_are_light_have_one_thread_and_are_replaced(pool, folder):
    heavy = "import sys; value = len({'torch', 'megatron', 'transformers'} & sys.modules.keys())"
    threads = "value = float(os.environ['OMP_NUM_THREADS'])"
    samples = [sample(heavy), sample(threads), *[sample(PID)] * 50]
    scores = pool.submit("f", samples).result()
    assert scores.values[:2].tolist() == [0.0, 1.0]
    before = {int(path.name) for path in folder.iterdir()}
    pool.submit("f", [sample(LOOP)] * 2).result()
    for path in folder.iterdir():
        path.unlink()
    pool.submit("f", [sample(PID)] * 50).result()
    assert before.isdisjoint(int(path.name) for path in folder.iterdir())
    assert not any(psutil.pid_exists(pid) for pid in before)


def test_several_batches_at_once_and_none_at_all(pool):
    pending = [pool.submit("f", [sample("", i)] * i) for i in (0, 3, 1)]
    values = [scores.result().values.tolist() for scores in pending]
    assert values == [[], [3.0] * 3, [1.0]]


def test_a_ping_calls_no_function(pool):
    scores = pool.submit(PING, [sample("os._exit(7)")]).result()
    assert scores.status.tolist() == [STATUS_OK]
    assert scores.values.tolist() == [0.0]


def test_the_hosts_death_fails_what_is_under_way_and_the_next_request_has_another(pool):
    pending = pool.submit("f", [sample("time.sleep(600)")])
    processes()[0].kill()
    key = "reward_function.processes.ended_under_way"
    with raises_error(key, "1 samples", "exit code -9"):
        pending.result()
    scores = pool.submit("f", [sample("", 4.0)]).result()
    assert scores.values.tolist() == [4.0]


def test_faults_come_at_the_start_and_leave_no_process():
    before = {process.pid for process in processes()}
    functions = {
        "a": FunctionSpec("reward_function", "helpers.reward_functions.run"),
        "b": FunctionSpec("reward_function.more_functions.b", RUNS, {"foldr": ""}),
    }
    pool = FunctionPool(
        functions,
        RewardFunctionConfig(),
    )
    with pytest.raises(ConfigError) as caught:
        pool.start()
    unknown, does_not_fit = caught.value.faults
    check_fault([unknown], "reward_function.name.unknown", "helpers.reward_functions.runs?")
    named = ["more_functions.b.kwargs", "folder: 'str'"]
    check_fault([does_not_fit], "reward_function.kwargs.do_not_fit", *named)
    assert {process.pid for process in processes()} == before
    with raises_error("reward_function.processes.not_started"):
        pool.submit("a", [sample("")]).result()


OWNER = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from reinforce_rl.config.rewards import RewardFunctionConfig
from reinforce_rl.rewards.base import FunctionSpec, TextSample
from reinforce_rl.rewards.function_pool import FunctionPool
spec = FunctionSpec("reward_function", {RUNS!r}, {{"folder": sys.argv[1]}})
pool = FunctionPool({{"f": spec}}, RewardFunctionConfig(sample_timeout_seconds=600.0))
pool.start()
record = {{"value": 1.0, "code": {PID_AND_LOOP!r}}}
pool.submit("f", [TextSample("", "", record)] * 2).result()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_workers_die_with_their_owner_however_it_ends(number, tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)])
    try:
        assert wait_for(lambda: len(list(tmp_path.iterdir())) == 2, 90)
        started = psutil.Process(owner.pid).children(recursive=True)
        assert len(started) >= 3
        os.kill(owner.pid, number)
        owner.wait(20)
        assert wait_for(lambda: not any(map(is_alive, started)), 20), started
    finally:
        owner.kill()
        owner.wait()


def test_workers_die_with_a_killed_host(tmp_path):
    spec = FunctionSpec("reward_function", RUNS, {"folder": str(tmp_path)})
    pool = FunctionPool(
        {"f": spec}, RewardFunctionConfig(num_workers=1, sample_timeout_seconds=600.0)
    )
    before = {process.pid for process in processes()}
    pool.start()
    try:
        pool.submit("f", [sample(PID_AND_LOOP)])
        assert wait_for(lambda: list(tmp_path.iterdir()), 90)
        host, *workers = [process for process in processes() if process.pid not in before]
        assert workers
        host.kill()
        assert wait_for(lambda: not any(map(is_alive, workers)), 20), workers
    finally:
        pool.close()


class Queued:
    """Stands in for the processes.

    It keeps the queue, with `in_flight` samples of earlier requests.
    """

    ended = False

    def __init__(self, in_flight: int = 0):
        self.in_flight = in_flight

    def add(self, batch: object, requests: list[object], seconds: float) -> int:
        self.in_flight += len(requests)
        return self.in_flight


class TestDeadlines:
    """A request's deadline covers all samples before it and in it, one by one on each worker."""

    def seconds(self, samples: int, workers: int, in_flight: int = 0) -> float:
        config = RewardFunctionConfig(num_workers=workers, sample_timeout_seconds=3.0)
        pool = FunctionPool({"f": FunctionSpec("reward_function", RUNS)}, config)
        pool._host = Queued(in_flight)  # type: ignore[assignment]
        before = time.monotonic()
        pending = pool.submit("f", [sample()] * samples)
        return pending.deadline - before

    @pytest.mark.parametrize(
        ("samples", "workers", "in_flight", "rounds"),
        [
            (1, 1, 0, 1),
            (4, 1, 0, 4),
            (4, 2, 0, 2),
            (5, 2, 0, 3),
            (1, 8, 0, 1),
            (1000, 8, 0, 125),
            (1, 2, 6, 4),
        ],
    )
    def test_a_request_has_time_for_all_rounds(self, samples, workers, in_flight, rounds):
        """Otherwise a large batch would time out although each sample stays within its limit of 3
        s.
        """
        seconds = self.seconds(samples, workers, in_flight)
        assert seconds == pytest.approx(rounds * (3.0 + FORK_SECONDS) + SLACK_SECONDS, abs=1.0)

    def test_the_host_counts_what_is_in_flight_of_all_requests(self):
        host = object.__new__(_Host)
        host.ended = False
        host._lock = threading.Lock()
        host._samples = {}
        host._next_id = 0
        host._waiting = queue.SimpleQueue()
        batch = object()
        assert host.add(batch, [(0, b"{}"), (1, b"{}")], 5.0) == 2  # type: ignore[arg-type]
        assert host.add(batch, [(0, b"{}")], 5.0) == 3  # type: ignore[arg-type]
        host._samples.pop(0)
        assert host.add(batch, [(0, b"{}")], 5.0) == 3  # type: ignore[arg-type]
        assert sorted(host._samples) == [1, 2, 3]


def test_what_a_sample_s_program_prints_is_shown_on_a_terminal(tmp_path):
    """It prints through a pipe, whose text the pool passes on."""
    (tmp_path / "printing.py").write_text(
        "import subprocess, sys\n"
        "def f(prompt, response, record):\n"
        "    program = r\"print('\\x1b[2J\\x9b \\xe4')\"\n"
        "    subprocess.run([sys.executable, '-c', program], check=True)\n"
        "    return 1.0\n"
    )
    program = (
        "from reinforce_rl.config.rewards import RewardFunctionConfig\n"
        "from reinforce_rl.rewards.base import FunctionSpec, TextSample\n"
        "from reinforce_rl.rewards.function_pool import FunctionPool\n"
        "functions = {'f': FunctionSpec('reward_function', 'printing.f', {})}\n"
        "pool = FunctionPool(functions, RewardFunctionConfig())\n"
        "pool.start()\n"
        "pool.submit('f', [TextSample('', '', {})]).result()\n"
        "pool.close()\n"
    )
    terminal, end = pty.openpty()
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUTF8": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], stderr=end, timeout=120, env=environment, check=False
        )
        printed = os.read(terminal, 1 << 16).decode()
    finally:
        os.close(end)
        os.close(terminal)
    assert done.returncode == 0, printed
    assert r"\x1b[2J\u009b " + "\xe4" in printed
    assert "\x1b" not in printed


@pytest.mark.parametrize(
    ("configured", "scored"),
    [
        (None, {"sleeps": True, "sleeps_briefly": False, "sleeps_within": True}),
        (1.0, {"sleeps": False, "sleeps_briefly": False, "sleeps_within": False}),
        (20.0, {"sleeps": True, "sleeps_briefly": True, "sleeps_within": True}),
    ],
)
def test_the_limit_is_the_configured_one_or_else_what_the_function_declares(configured, scored):
    """A sample of 2 s, with 5 s, 0.5 s and 20 s where nothing is configured."""
    kwargs = {"sleeps_within": {"limit": 20.0}}
    functions = {
        name: FunctionSpec(
            "reward_function", f"helpers.reward_functions.{name}", kwargs.get(name, {})
        )
        for name in scored
    }
    pool = FunctionPool(
        functions, RewardFunctionConfig(sample_timeout_seconds=configured, num_workers=3)
    )
    pool.start()
    try:
        pending = {name: pool.submit(name, [TextSample("prompt", "2", {})]) for name in scored}
        status = {name: int(scores.result().status[0]) for name, scores in pending.items()}
    finally:
        pool.close()
    assert status == {
        name: STATUS_OK if is_scored else STATUS_TIMED_OUT for name, is_scored in scored.items()
    }


def test_a_function_that_declares_nothing_has_five_seconds_and_a_judge_its_own():
    judge = "reinforce_rl.rewards.judge.llm_judge"
    settings = {"url": "http://127.0.0.1:9/v1", "model": "m", "timeout": 10.0, "retries": 1}
    pool = FunctionPool(
        {
            "sleeps": FunctionSpec("reward_function", "helpers.reward_functions.sleeps", {}),
            "judge": FunctionSpec("reward_function", judge, settings),
        },
        RewardFunctionConfig(),
    )
    pool.start()
    pool.close()
    assert pool.seconds_of("sleeps") == 5.0
    assert pool.seconds_of("judge") == 2 * 10.0 + 8.0


def test_a_limit_that_is_no_time_is_refused():
    spec = FunctionSpec(
        "reward_function", "helpers.reward_functions.sleeps_within", {"limit": -1.0}
    )
    with raises_error("reward_function.seconds.invalid", "takes_up_to(-1.0)"):
        FunctionPool({"f": spec}, RewardFunctionConfig()).start()
