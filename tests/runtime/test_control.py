"""The watches of two ranks in one process; the test holds the other end of the connection."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import zmq
from helpers.errors import check_error, raises_error

from reinforce_rl.errors import (
    EXIT_DIVERGED,
    EXIT_ERROR,
    EXIT_LOST_RANK,
    EXIT_STOPPED,
    LostRankError,
    StoppedEarly,
)
from reinforce_rl.runtime import control
from reinforce_rl.runtime.control import (
    Report,
    RunControl,
    Verdict,
    Watchdog,
    failed,
    hung,
    lost,
    waited_for,
)
from reinforce_rl.runtime.links import Invitation
from reinforce_rl.runtime.phases import PhaseTracker, StackWatcher
from reinforce_rl.runtime.status import EXIT_INTERRUPTED, StatusFile, read_status
from reinforce_rl.runtime.stop import StopRequest

DEADLINE = 30.0


class Rank:
    """A watch that keeps its verdict and does not end the process."""

    def __init__(self, rank: int, **limits: float):
        self.verdicts: list[Verdict] = []
        self.left = threading.Event()
        self.phases = PhaseTracker()
        limits = {"silence_seconds": 60.0, "hang_seconds": 60.0, **limits}
        self.stop = StopRequest()
        self.watch = Watchdog(self, rank, 2, **limits)

    def leave(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        self.left.set()

    def verdict(self) -> Verdict:
        assert self.left.wait(DEADLINE)
        return self.verdicts[0]


@pytest.fixture
def make(monkeypatch) -> Iterator:
    monkeypatch.setattr(control, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(control, "SETTLE_SECONDS", 0.3)
    monkeypatch.setattr(control, "GRACE_SECONDS", 0.1)
    ranks: list[Rank] = []

    def make_pair(**limits: float) -> tuple[Rank, Rank]:
        pair = Rank(0, **limits), Rank(1, **limits)
        ranks.extend(pair)
        pair[1].watch.join(pair[0].watch.open("localhost"))
        for rank in reversed(pair):
            rank.watch.start()
        pair[1].phases.step = 7
        pair[1].phases.begin("generate")
        return pair

    yield make_pair
    for rank in ranks:
        rank.watch.end(0)
        rank.watch.close()


def test_a_good_end_is_no_loss(make):
    first, second = make()
    second.watch.end(0)
    second.watch.close()
    time.sleep(1.0)
    assert not first.left.is_set()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_connection_that_closes_without_a_word_is_a_death(make, lost):
    pair = make()
    pair[0].phases.begin("export")
    time.sleep(0.5)
    pair[lost].watch.close()
    verdict = pair[1 - lost].verdict()
    where = ("phase export", "phase generate of step 7")[lost]
    rank = f"rank {lost} (host {socket.gethostname()})"
    check_error(verdict.error(), "ranks.rank.died", rank, where)
    assert verdict.exit_code == EXIT_LOST_RANK
    assert verdict.of_first == (lost == 0)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_rank_is_reported_to_the_other(make, failing):
    pair = make()
    pair[failing].watch.end(EXIT_ERROR, "ValueError: boom")
    verdict = pair[1 - failing].verdict()
    rank = f"rank {failing} (host"
    error = verdict.error()
    check_error(error, "ranks.rank.failed", rank, "phase", "ValueError: boom")
    assert isinstance(error, LostRankError)
    assert error.exit_code == EXIT_LOST_RANK
    assert error.code_of_lost == EXIT_ERROR


CODES_OF_RUNS = [
    # such as a rank of another role that has diverged alone
    (failed(Report(1, "b"), EXIT_DIVERGED, "diverged"), EXIT_DIVERGED, "failed"),
    (failed(Report(1, "b"), EXIT_ERROR, "boom"), EXIT_ERROR, "failed"),
    (failed(Report(1, "b"), EXIT_INTERRUPTED, "interrupted"), EXIT_INTERRUPTED, "interrupted"),
    (failed(Report(1, "b"), EXIT_STOPPED, "stopped"), EXIT_STOPPED, "stopped"),
    (lost([Report(1, "b")], [], 60.0), EXIT_LOST_RANK, "failed"),
]


@pytest.mark.parametrize(("verdict", "code", "state"), CODES_OF_RUNS)
def test_the_status_has_the_code_of_the_rank_that_failed_first(tmp_path, verdict, code, state):
    run = RunControl(tmp_path, StopRequest(), StatusFile(tmp_path, enabled=True))
    error = verdict.error()
    with pytest.raises(type(error)), run.running():
        raise error
    status = read_status(tmp_path)
    assert status is not None
    assert status.exit_code == code
    assert status.state == state


@pytest.mark.parametrize(("verdict", "code", "state"), CODES_OF_RUNS)
def test_so_it_has_where_the_main_thread_is_stuck(tmp_path, monkeypatch, verdict, code, state):
    exit_codes: list[int] = []
    monkeypatch.setattr(os, "_exit", exit_codes.append)
    run = RunControl(tmp_path, StopRequest(), StatusFile(tmp_path, enabled=True))
    run.status.begin()
    run.leave(verdict)
    status = read_status(tmp_path)
    assert status is not None
    assert status.exit_code == code
    assert status.state == state
    assert exit_codes == [EXIT_STOPPED if code == EXIT_STOPPED else EXIT_LOST_RANK]


def test_a_rank_that_was_stopped_gives_the_others_its_key(make):
    first, second = make()
    second.watch.end(EXIT_STOPPED, "stopped by SIGTERM", "run.stop.by_signal")
    error = first.verdict().error()
    assert isinstance(error, StoppedEarly)
    check_error(error, "run.stop.by_signal", "SIGTERM")


def test_a_rank_that_stands_still_ends_both(make):
    """The test's main thread is the main thread of both ranks; it waits here."""
    first, second = make(hang_seconds=1.0)
    for rank in (first, second):
        check_error(rank.verdict().error(), "ranks.rank.hangs", "phase")


def test_strangers_are_turned_away(make):
    """Clients that do not speak the protocol, and clients with other keys."""
    first = Rank(0)
    invitation = first.watch.open("localhost")
    try:
        with socket.create_connection(
            (invitation.host, invitation.port), timeout=DEADLINE
        ) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(100):
                    pass
        public_key, secret_key = zmq.curve_keypair()
        forged = replace(invitation, public_key=public_key, secret_key=secret_key)
        with raises_error("ranks.rank.not_connected", "rank 1", "closed the connection"):
            Rank(1).watch.join(forged)
    finally:
        first.watch.close()


def test_a_first_rank_that_cannot_be_reached():
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
    invitation = Invitation("127.0.0.1", port, *(zmq.curve_keypair()[0] for _ in range(3)))
    address = f"127.0.0.1:{port}"
    with raises_error("ranks.rank.not_connected", "rank 1", address, "Connection refused"):
        Rank(1).watch.join(invitation)


def test_a_first_rank_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(control, "CONNECT_SECONDS", 0.3)
    with socket.create_server(("localhost", 0)) as silent_one:
        keys = (zmq.curve_keypair()[0] for _ in range(3))
        port = silent_one.getsockname()[1]
        with raises_error("ranks.rank.not_connected", f"127.0.0.1:{port}", "timed out"):
            Rank(1).watch.join(Invitation("127.0.0.1", port, *keys))


def test_where_a_thread_is():
    watcher = StackWatcher(threading.get_ident())
    places = []
    sitting = threading.Event()
    done = threading.Event()

    def look() -> None:
        sitting.wait(DEADLINE)
        for _ in range(5):
            places.append(watcher.look())
            time.sleep(0.05)
        done.set()

    thread = threading.Thread(target=look)
    thread.start()
    sitting.set()
    done.wait(DEADLINE)
    thread.join()
    assert places[-1].still_since == places[-2].still_since
    assert not places[-1].in_collective
    watcher.look()
    assert watcher.look().still_since >= places[-1].still_since


WAITS = Report(
    0, "a", "generate", 3, 17, in_collective=True, still=40.0, line="megatron/mesh.py:183"
)
HANGS = Report(1, "b", "generate", 3, 17, line="generation/native/generator.py:95", still=41.0)


def test_a_rank_that_does_not_wait_hangs_once_nobody_moves():
    verdict = hung([WAITS, HANGS], 30.0)
    assert verdict is not None
    assert verdict.exit_code == EXIT_LOST_RANK
    assert not verdict.of_first
    error = verdict.error()
    assert isinstance(error, LostRankError)
    check_error(
        error, "ranks.rank.hangs", "rank 1 (host b)", "phase generate of step 3", HANGS.line, "40 s"
    )
    assert hung([WAITS, replace(HANGS, still=29.0)], 30.0) is None
    assert hung([replace(WAITS, still=1.0), HANGS], 30.0) is None


def test_where_all_wait_the_ones_behind_are_to_blame():
    behind = [replace(WAITS, rank=rank, number=16, phase="logprobs") for rank in (1, 2)]
    verdict = hung([WAITS, *behind], 30.0)
    assert verdict is not None
    assert verdict.text.startswith("rank 1 (host a), rank 2 (host a) ")
    check_error(verdict.error(), "ranks.rank.hangs", "phase logprobs of step 3")


def test_who_waits_for_the_reward_server_is_left_alone():
    assert hung([WAITS, replace(HANGS, has_deadline=True)], 30.0) is None
    assert waited_for([WAITS, replace(HANGS, has_deadline=True)], {0: "Timed out"}) is None


def test_a_collective_that_timed_out_is_blamed_on_whom_it_waited_for():
    """Rank 0 timed out, rank 1 computes and moves, and rank 2 waits for it too."""
    moves = replace(HANGS, still=0.1)
    also_waits = replace(WAITS, rank=2)
    gave_up = replace(WAITS, in_collective=False, still=0.1)
    verdict = waited_for([gave_up, moves, also_waits], {0: "Timed out waiting 60000ms for recv\n"})
    assert verdict is not None
    assert verdict.exit_code == EXIT_LOST_RANK
    assert not verdict.of_first
    assert verdict.text.startswith("rank 1 (host b) ")
    waiter = ("rank 0", "(Timed out waiting 60000ms for recv).")
    check_error(
        verdict.error(), "ranks.rank.hangs", "phase generate of step 3", HANGS.line, *waiter
    )
    assert waited_for([gave_up, moves], {}) is None
    assert waited_for([gave_up, moves], {0: "Timed out", 1: "Timed out"}) is None


def test_what_is_said_of_a_lost_rank():
    silent = [replace(HANGS, rank=0, step=0, phase="export")]
    verdict = lost([HANGS], silent, 60.0)
    assert verdict is not None
    check_error(verdict.error(), "ranks.rank.died", "rank 1 (host b)", "phase generate of step 3")
    verdict = lost([], silent, 60.0)
    assert verdict is not None
    assert verdict.of_first
    check_error(verdict.error(), "ranks.rank.silent", "60 s", "phase export")
    assert "of step" not in verdict.text
    assert lost([], [], 60.0) is None
    broken = failed(HANGS, 1, "ValueError: {not a format}")
    cause = "ValueError: {not a format}"
    where = "phase generate of step 3"
    check_error(broken.error(), "ranks.rank.failed", "rank 1 (host b)", where, cause)
    stopped = failed(HANGS, EXIT_STOPPED, "stopped by SIGTERM", "run.stop.by_signal")
    assert stopped.exit_code == EXIT_STOPPED
    assert stopped.key == "run.stop.by_signal"
    many = lost([replace(WAITS, rank=rank) for rank in range(1, 11)], [], 60.0)
    assert many is not None
    assert "rank 8 (host a) and 2 more" in many.text
