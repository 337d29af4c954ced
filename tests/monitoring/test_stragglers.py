"""Who is slowest in which phase, and when that is said."""

from __future__ import annotations

import random
import socket
import statistics
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.ranks import TESTS, run_ranks
from helpers.tiny_run import metrics_of, tiny_overrides, without_times

from reinforce_rl.monitoring.stragglers import (
    REPEAT_STEPS,
    RankSeconds,
    Slowest,
    StragglerLines,
    of_this_rank,
    slowest_of_phases,
    timing_metrics,
)
from reinforce_rl.runtime.phases import WaitMeter

SCRIPT = TESTS / "helpers" / "rank_scripts" / "stragglers.py"


def test_what_is_told():
    ranks = [RankSeconds(f"node{rank // 2}", {"generate": 2.1, "train_time": 1.0}) for rank in range(6)]
    ranks[5] = RankSeconds("node2", {"generate": 3.2, "train_time": 1.1})
    found = slowest_of_phases(ranks)
    assert str(found[0]) == ("generate 3.2 s on rank 5 (node2), median 2.1 s (1.5x), slowest node node2, 2.7 s a rank")
    assert timing_metrics(found) == {
        "generate/max": 3.2,
        "generate/median": 2.1,
        "generate/rank": 5,
        "train_time/max": 1.1,
        "train_time/median": 1.0,
        "train_time/rank": 5,
    }
    assert StragglerLines(1.5).line(1, found, 5.0) == f"straggler: {found[0]}"
    assert StragglerLines(1.6).line(1, found, 5.0) is None
    assert StragglerLines(1.0).line(1, found, 1.0) == f"straggler: {found[0]}; {found[1]}"


def test_against_brute_force():
    draw = random.Random(3)
    for _ in range(200):
        count = draw.randint(2, 9)
        hosts = [f"h{draw.randint(0, 2)}" for _ in range(count)]
        seconds = [round(draw.uniform(0, 4), 3) for _ in range(count)]
        (found,) = slowest_of_phases([RankSeconds(h, {"p": s}) for h, s in zip(hosts, seconds, strict=True)])
        most = seconds.index(max(seconds))
        assert (found.seconds, found.rank, found.host) == (seconds[most], most, hosts[most])
        assert found.median == sorted(seconds)[(count - 1) // 2]
        if len(set(hosts)) == 1:
            assert found.node is None
            continue
        means = {h: statistics.fmean(s for s, of in zip(seconds, hosts, strict=True) if of == h) for h in hosts}
        assert found.node_seconds == max(means.values()) and means[str(found.node)] == found.node_seconds


def test_noise_is_no_straggler_and_two_ranks_are_compared_with_the_faster_one():
    def slowest(*seconds: float) -> Slowest:
        return slowest_of_phases([RankSeconds("a", {"generate": value}) for value in seconds])[0]

    assert slowest(1.0, 1.6).stands_out(1.5, 2.0)
    assert not slowest(1.0, 1.4).stands_out(1.5, 2.0)
    assert not slowest(0.01, 0.1).stands_out(1.5, 0.2), "milliseconds"
    assert not slowest(1.0, 1.6).stands_out(1.5, 100.0), "a step of minutes"
    assert slowest(0.0, 1.0).stands_out(1.5, 1.0) and "x)" not in str(slowest(0.0, 1.0))


def test_only_ranks_that_ask_wait_for_rewards():
    seconds = {"generate": 1.0, "reward_wait": 0.0}
    assert of_this_rank(seconds, asks_for_rewards=False) == RankSeconds(socket.gethostname(), {"generate": 1.0})
    asking = RankSeconds("a", {"generate": 1.0, "reward_wait": 2.0})
    found = {s.phase: s for s in slowest_of_phases([asking, of_this_rank(seconds, asks_for_rewards=False)])}
    assert found["reward_wait"].median == 2.0


def test_what_stays_the_same_is_said_again_after_a_while():
    lines = StragglerLines(1.5)
    slow = slowest_of_phases([RankSeconds("a", {"p": 1.0}), RankSeconds("a", {"p": 3.0})])
    other = slowest_of_phases([RankSeconds("a", {"p": 3.0}), RankSeconds("a", {"p": 1.0})])
    said = [step for step in range(1, 2 * REPEAT_STEPS) if lines.line(step, slow, 4.0)]
    assert said == [1, 1 + REPEAT_STEPS]
    assert lines.line(30, other, 4.0) and lines.line(31, slow, 4.0) and not lines.line(32, slow, 4.0)
    assert lines.line(33, [], 4.0) is None and lines.line(34, slow, 4.0)


def test_only_waits_in_collectives_are_measured(monkeypatch, tmp_path):
    """A function of a file with a collective's name stands for one."""
    path = tmp_path / "torch" / "distributed" / "distributed_c10d.py"
    path.parent.mkdir(parents=True)
    path.write_text("def wait(sleep, seconds):\n    sleep(seconds)\n")
    namespace: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    meter = WaitMeter(threading.get_ident())
    before = threading.active_count()
    with meter.measuring():
        time.sleep(0.5)
        namespace["wait"](time.sleep, 1.0)
    assert threading.active_count() == before
    assert 0.5 < meter.seconds < 1.4
    with pytest.raises(RuntimeError), meter.measuring():
        raise RuntimeError
    assert meter.seconds == 0.0 and threading.active_count() == before
    assert Path(dist.distributed_c10d.__file__).parts[-3:] == ("torch", "distributed", "distributed_c10d.py")


@pytest.mark.parametrize(
    ("ranks", "tensor", "slow"),
    [
        (2, 1, 1),
        pytest.param(4, 1, 2, marks=pytest.mark.slow),
        pytest.param(4, 2, 3, marks=pytest.mark.slow),  # whose neighbour waits for it within each pass
    ],
)
def test_a_slow_rank_is_named(tmp_path, ranks, tensor, slow):
    base = [*tiny_overrides(tmp_path), f"model.tensor_model_parallel_size={tensor}", f"trainer.devices={ranks}"]
    output = run_ranks(SCRIPT, ranks, tmp_path, slow, *base, timeout=280)
    lines = metrics_of(tmp_path / "slow")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        for phase in ("generate", "train_time"):
            assert line[f"timing/{phase}/rank"] == slow
            assert line[f"timing/{phase}/max"] >= 1.0  # of 2 s; what was seen of waiting is a sample
            assert line[f"timing/{phase}/max"] > line[f"timing/{phase}/median"] + 0.4
    named = f"generate {lines[0]['timing/generate/max']:.1f} s on rank {slow} ({socket.gethostname()})"
    assert f"straggler: {named}, median " in output
    plain = metrics_of(tmp_path / "plain")
    assert [without_times(line) for line in plain] == [without_times(line) for line in lines], "numbers are the same"
