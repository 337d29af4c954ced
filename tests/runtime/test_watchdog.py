"""Two ranks' watches in one process, with the other side's end of the connection in the test's hand."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from reinforce_rl.errors import EXIT_ERROR, EXIT_LOST_RANK, ReinforceError
from reinforce_rl.runtime import watchdog
from reinforce_rl.runtime.phases import Activity, PlaceWatcher
from reinforce_rl.runtime.rank_reports import Verdict
from reinforce_rl.runtime.stop import StopRequest
from reinforce_rl.runtime.watchdog import Watchdog

DEADLINE = 30.0


class Rank:
    """A watch whose verdict, in place of ending the process, is kept."""

    def __init__(self, rank: int, **limits: float):
        self.verdicts: list[Verdict] = []
        self.left = threading.Event()
        self.activity = Activity()
        limits = {"silence_seconds": 60.0, "hang_seconds": 60.0, **limits}
        self.watch = Watchdog(rank, 2, self.activity, StopRequest(), **limits, leave=self.leave)

    def leave(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        self.left.set()

    def verdict(self) -> Verdict:
        assert self.left.wait(DEADLINE)
        return self.verdicts[0]


@pytest.fixture
def make(monkeypatch) -> Iterator:
    monkeypatch.setattr(watchdog, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "SETTLE_SECONDS", 0.3)
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.1)
    ranks: list[Rank] = []

    def make_pair(**limits: float) -> tuple[Rank, Rank]:
        pair = Rank(0, **limits), Rank(1, **limits)
        ranks.extend(pair)
        pair[1].watch.join(pair[0].watch.open("localhost"))
        for rank in pair:
            rank.watch.start()
        pair[1].activity.at_step(7)
        pair[1].activity.begin("generate")
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
    pair[0].activity.begin("export")
    time.sleep(0.5)
    pair[lost].watch.close()
    verdict = pair[1 - lost].verdict()
    where = ("phase export, before", "phase generate of step 7")[lost]
    assert f"rank {lost} (host {socket.gethostname()}) died in {where}" in verdict.text
    assert (verdict.exit_code, verdict.of_first) == (EXIT_LOST_RANK, lost == 0)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_rank_is_told_to_the_other(make, failing):
    pair = make()
    pair[failing].watch.end(EXIT_ERROR, "ValueError: boom")
    assert f"rank {failing} (host" in (text := pair[1 - failing].verdict().text)
    assert "failed in phase" in text and "ValueError: boom" in text


def test_a_rank_that_stands_still_ends_both(make):
    """The main thread of the test is both ranks' main thread; it sits here."""
    first, second = make(hang_seconds=1.0)
    for rank in (first, second):
        assert "hangs in phase" in rank.verdict().text


def test_strangers_are_turned_away(make):
    first = Rank(0)
    host, port, _ = first.watch.open("localhost")
    first.watch.start()
    try:
        for line in (b"GET / HTTP/1.1\r\n\r\n", json.dumps({"token": "x", "report": {"rank": 1}}).encode() + b"\n"):
            with socket.create_connection((host, port), timeout=DEADLINE) as stranger:
                stranger.sendall(line)
                assert stranger.recv(1) == b""
    finally:
        first.watch.end(0)
        first.watch.close()


def test_a_first_rank_that_cannot_be_reached():
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ReinforceError, match=f"rank 1 .*cannot reach rank 0 at localhost:{port}"):
        Rank(1).watch.join(("localhost", port, ""))


def test_where_a_thread_is():
    watcher = PlaceWatcher(threading.get_ident())
    places = []
    sitting, done = threading.Event(), threading.Event()

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
