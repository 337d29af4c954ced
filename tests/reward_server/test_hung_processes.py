"""Every process of a real reward server is stopped in turn: the server ends by itself, names it and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest
from helpers.http_call import call
from helpers.toy_server import ToyServer, is_alive, wait_for

from reinforce_rl.rewards.transport import FailedAttempt

pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")


def with_argument(text: str) -> Callable[[ToyServer], psutil.Process]:
    return lambda server: next(
        p for p in server.descendants if is_alive(p) and any(text in argument for argument in p.cmdline())
    )


def manager_of(stub: str) -> Callable[[ToyServer], psutil.Process]:
    """The process of a stub that keeps its shared memory."""
    return lambda server: next(
        p
        for p in server.descendants
        if is_alive(p) and "multiprocessing.spawn" in str(p.cmdline()) and stub in str(p.parents()[0].cmdline())
    )


VICTIMS: dict[str, Callable[[ToyServer], psutil.Process]] = {
    "tritonserver": lambda server: server.tritonserver,
    "front": lambda server: server.front,
    "stub": with_argument("reward_model_0_0"),
    "stub of the description": with_argument("reward_server_info_0_0"),
    "shared memory": manager_of("reward_model_0_0"),
    "shared memory of the description": manager_of("reward_server_info_0_0"),
    "main": lambda server: psutil.Process(server.server_pid),
}
find_guard = with_argument("reinforce_rl.utils.guard")


def check_that_it_ends_by_name(folder, which: str, stuck_seconds: float, seconds: float) -> None:
    server = ToyServer(folder, "--front", json.dumps({"stuck_seconds": stuck_seconds})).start()
    try:
        victim = VICTIMS[which](server)
        victim.suspend()
        texts = []
        code, end = None, time.monotonic() + seconds
        while code is None and time.monotonic() < end:
            if which != "front":  # nobody else answers
                with contextlib.suppress(FailedAttempt):
                    answer = call("127.0.0.1", server.port, "/health", 15.0)
                    texts += [json.loads(answer.body)["text"]] if answer.code != 200 else []
            time.sleep(0.2)
            code = server.process.poll()
        assert code == (-signal.SIGKILL if which == "main" else 1), (code, texts)
        assert which == "front" or texts
        error = next(line for line in server.log.read_text().splitlines() if line.startswith("error: "))
        assert f"process {victim.pid}" in error and "inference.stuck_seconds" in error
        assert wait_for(lambda: not server.left_behind()), server.left_behind()
    finally:
        server.close()


def test_a_stopped_tritonserver_ends_the_server_by_name(tmp_path):
    check_that_it_ends_by_name(tmp_path, "tritonserver", 4.0, 60.0)


@pytest.mark.slow
@pytest.mark.parametrize("which", VICTIMS)
def test_every_stopped_process_ends_the_server_by_name(tmp_path, which):
    check_that_it_ends_by_name(tmp_path, which, 6.0, 60.0)


@pytest.mark.parametrize("how", ["kill", "suspend"])
def test_a_lost_guard_is_replaced_and_the_next_one_cleans_up(tmp_path, how):
    server = ToyServer(tmp_path, "--front", '{"stuck_seconds": 3.0}').start()
    try:
        first = find_guard(server)
        getattr(first, how)()
        assert wait_for(lambda: f"event=guard_replaced process={first.pid}" in server.log.read_text(), 15)
        server.descendants = psutil.Process(server.server_pid).children(recursive=True)
        assert find_guard(server).pid != first.pid
        assert call("127.0.0.1", server.port, "/health", 10.0).code == 200
        time.sleep(2.0)  # it looks for what is there once a second
        os.kill(server.server_pid, signal.SIGKILL)
        server.process.wait(10)
        assert wait_for(lambda: not server.left_behind()), server.left_behind()
        assert not is_alive(first)
    finally:
        server.close()
