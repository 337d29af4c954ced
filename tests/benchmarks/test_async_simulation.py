"""The simulation of asynchronous steps.

Its numbers are exact where theory gives the answer; it also accepts a run's data.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import async_simulation
from async_simulation import LLAMA_8B, TAILS, Drawn, read_run
from helpers import tiny_run
from simulated_steps import (
    STEPS,
    WARM,
    Job,
    as_finished,
    best_split,
    call_seconds,
    colocated,
    generate_seconds,
    in_order,
)

COUNTED = STEPS - WARM
LENGTH = 6
PROMPTS = 4
APART = pytest.mark.parametrize("simulate", [in_order, as_finished])


def job(lengths: Callable[[int], Sequence[int]] = lambda number: [LENGTH], **settings) -> Job:
    """Generation takes 6 s for rows of equal length, and training 12 GPU-seconds."""
    known = {
        "decode": Fraction(1),
        "row": Fraction(0),
        "training": Fraction(12, PROMPTS * LENGTH),
        "slots": 64,
    }
    return Job(PROMPTS, lengths, **{**known, **settings})


def test_a_call_lasts_as_its_rows_say():
    paid = job(decode=Fraction(1), row=Fraction(1, 2))
    # two rows for one token, then one row for two
    expected = 1 * 2 + 2 * Fraction(3, 2)
    assert call_seconds(paid, [[1, 3]]) == expected
    # one after another
    assert call_seconds(replace(paid, slots=1), [[1], [3]]) == 4 * Fraction(3, 2)
    # the third takes the place of the first
    assert call_seconds(replace(paid, slots=2), [[1], [3], [2]]) == 3 * 2


def test_colocated_is_the_sum():
    schedule = colocated(job(fixed=Fraction(1), reward=Fraction(2), refit=Fraction(3)), 4)
    expected = LENGTH + 2 + 3 + 1 + Fraction(12, 4)
    assert schedule.seconds == expected


@APART
@pytest.mark.parametrize("trainers", [1, 3])
def test_of_constant_lengths_k_0_is_the_sum_and_k_1_the_longer_one(simulate, trainers):
    """A step's prompts fill two generators."""
    constant = job(send=Fraction(1), reward=Fraction(1, 3), slots=PROMPTS // 2)
    train = Fraction(12, trainers) + 1
    expected = LENGTH + Fraction(1, 3) + train
    assert simulate(constant, trainers, 2, 0).seconds == expected
    for k in (1, 2, 4):
        schedule = simulate(constant, trainers, 2, k)
        assert schedule.seconds == max(LENGTH, train)
        assert schedule.waiting == 1 - train / schedule.seconds
        assert schedule.dropped == 0


@pytest.mark.parametrize("engines", [1, 2])
def test_one_long_response_holds_up_those_in_order_alone(engines):
    def lengths(number: int) -> list[int]:
        return [long if number == 8 * PROMPTS + 1 else LENGTH]  # of the ninth step

    # generation has spare capacity, so that otherwise the trainer never waits
    long = 10 * LENGTH
    train = 12
    k = 2
    constant = job()
    tail = job(lengths)
    assert (
        in_order(constant, 1, engines, k).seconds
        == as_finished(constant, 1, engines, k).seconds
        == train
    )
    schedule = as_finished(tail, 1, engines, k)
    assert schedule.seconds == train
    # it became too old, and was replaced
    assert schedule.dropped == Fraction(1, STEPS * PROMPTS)
    schedule = in_order(tail, 1, engines, k)
    # it started when the trainer had k steps to go
    assert schedule.waiting * schedule.seconds * COUNTED == long - k * train


@pytest.mark.parametrize("k", [0, 1, 2])
def test_no_rollout_is_older_than_k(k):
    drawn = job(Drawn(40, 400, 3), row=Fraction(1, 8))
    schedule = as_finished(drawn, 1, 3, k)
    assert schedule.age <= k
    assert schedule.dropped == 0 if k == 0 else schedule.age > 0
    assert in_order(drawn, 1, 3, k).age == k


def test_the_best_split_is_the_best():
    drawn = job(Drawn(40, 400, 3), row=Fraction(1, 8))
    trainers, generators, schedule = best_split(drawn, 6, in_order, 1)
    assert trainers + generators == 6
    expected = min(in_order(drawn, each, 6 - each, 1).seconds for each in range(1, 6))
    assert schedule.seconds == expected
    paired = replace(drawn, trainer=2, engine=2)
    assert best_split(paired, 6, in_order, 1)[0] in (2, 4)


@pytest.mark.parametrize("tail", TAILS)
def test_the_measured_step_is_simulated_as_it_was_measured(tail):
    small = replace(LLAMA_8B, prompts=16, group=4)
    job = small.job(tail=tail)
    parts = small.generate, small.training, small.fixed, small.refit
    assert colocated(job, small.gpus).seconds == pytest.approx(sum(parts))
    steps = range(WARM, STEPS)
    generate = sum(generate_seconds(job, small.gpus, step) for step in steps) / len(steps)
    assert generate == pytest.approx(small.generate)


@pytest.mark.parametrize("tail", TAILS)
def test_lengths_have_their_mean_and_their_bound(tail):
    drawn = Drawn(50, 100_000, 4, tail)
    lengths = [length for number in range(4000) for length in drawn(number)]
    assert sum(lengths) / len(lengths) == pytest.approx(50, rel=0.05)
    assert max(length for number in range(1000) for length in Drawn(50, 60, 4, tail)(number)) <= 60
    assert drawn(7) == drawn(7) != drawn(8) or tail == "constant"


def test_a_users_run(tmp_path, mesh, monkeypatch, capsys):
    lines = tiny_run.run(
        tmp_path, mesh, "trainer.reinforce.max_steps=4", "trainer.reinforce.max_epochs=4"
    )
    measured, lengths = read_run(tmp_path / "run", 0.5)
    assert measured.gpus == 1
    assert measured.prompts == 4
    assert measured.group == 4
    assert measured.send == 0.5
    generate = sorted(line["timers/generate"] for line in lines if line["step"] > 1)
    assert measured.generate == generate[1]
    rows = tiny_run.rollouts_of(tmp_path, 2)
    first = [row["response_length"] for row in rows if row["prompt_id"] == rows[0]["prompt_id"]]
    assert first in [lengths(number) for number in range(16)]

    out = tmp_path / "rows.json"
    command = [
        "x",
        "--run",
        str(tmp_path / "run"),
        "--gpus",
        "4",
        "--lags",
        "0",
        "1",
        "--json",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", command)
    async_simulation.main()
    assert "colocated" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    expected = [
        ("colocated", None),
        *((name, k) for name in ("in order", "as finished") for k in (0, 1)),
    ]
    assert [(row["placement"], row["k"]) for row in rows] == expected
    for row in rows[1:]:
        assert row["gain"] == pytest.approx(rows[0]["step"]["seconds"] / row["step"]["seconds"])
        assert row["trainers"] + row["generators"] == 4
