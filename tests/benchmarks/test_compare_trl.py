"""The comparison with TRL: its checks can fail, its ratios are correct, its short form runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.environments import needs_peers, peers_environment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from rloo_step.comparison import STEP, NotTheSame, Pair, check_same, compare  # noqa: E402
from rloo_step.reward import vowels  # noqa: E402
from rloo_step.workload import (  # noqa: E402
    GENERATION,
    LOG_PROBS,
    OTHER,
    Sample,
    SideReport,
    Step,
    Workload,
    read_report,
    with_other,
    write,
)

WORKLOAD = Workload(
    model="model",
    prompts=[["ab", "cd"], ["ef", "gh"]],
    warm_up_steps=1,
    group=2,
    prompt_tokens=2,
    response_tokens=3,
    beta=0.1,
    lr=0.0,
    seed=1,
    threads=2,
    batch=4,
    own_batch=4,
    overrides=[],
)


def step(number: int, seconds: float = 3.0, **phases: float) -> Step:
    first = 10 * number
    prompts = ([first, 1], [first, 1], [first, 2], [first, 2])
    samples = [
        Sample(prompt, 3, text, vowels("", text, {}))
        for prompt, text in zip(prompts, "abcd", strict=True)
    ]
    return Step(seconds, with_other(seconds, {GENERATION: 2.0, **phases}), samples)


def side(name: str, *steps: Step, peak_bytes: int = 10) -> SideReport:
    return SideReport(name, {"torch": "2"}, 2, 7, "float32", list(steps), peak_bytes)


def same_pair() -> Pair:
    ours = step(1)
    peer = step(1)
    # The order of samples may differ.
    reversed_peer = replace(peer, samples=peer.samples[::-1])
    return Pair(side("ours", ours, step(2)), side("peer", reversed_peer, step(2)))


def test_sides_that_did_the_same_pass():
    check_same(WORKLOAD, same_pair())


def with_samples(pair: Pair, **fields: object) -> Pair:
    """Change the peer's last sample of the second step."""
    last = pair.peer.steps[1]
    samples = [*last.samples[:-1], replace(last.samples[-1], **fields)]
    changed = replace(last, samples=samples)
    peer = replace(pair.peer, steps=[pair.peer.steps[0], changed])
    return replace(pair, peer=peer)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (
            replace(same_pair(), peer=replace(same_pair().peer, threads=1)),
            "threads: ours had 2, peer 1",
        ),
        (
            replace(same_pair(), peer=replace(same_pair().peer, dtype="bfloat16")),
            "dtype: ours had float32, peer bf",
        ),
        (
            replace(same_pair(), peer=replace(same_pair().peer, parameters=8)),
            "parameters: ours had 7, peer 8",
        ),
        (replace(same_pair(), ours=side("ours", step(1))), "ours made 1 steps, expected 2"),
        (
            with_samples(same_pair(), response_tokens=2),
            "step 2 of peer: responses have 1 of 2, 3 of 3 tokens",
        ),
        (
            with_samples(same_pair(), prompt=[20, 2, 3]),
            "step 2 of peer: prompts have \\[2, 3\\] tokens",
        ),
        (with_samples(same_pair(), prompt=[20, 3]), "step 2: the sides had different prompts"),
        (with_samples(same_pair(), prompt=[20, 1]), "step 2: the sides had different prompts"),
        (with_samples(same_pair(), reward=0.5), "step 2 of peer: 'd' has reward 0.5, expected 0"),
        (with_samples(same_pair(), reward=float("nan")), "has reward nan"),
        (
            Pair(*(side(name, step(1), replace(step(2), samples=[])) for name in "ab")),
            "step 2 of a has 0 samples",
        ),
    ],
)
def test_sides_that_did_different_work_are_refused(pair, message):
    with pytest.raises(NotTheSame, match=message.replace("bf", "bfloat16")):
        check_same(WORKLOAD, pair)


def test_both_sides_with_other_threads_than_asked_for_are_refused():
    with pytest.raises(NotTheSame, match="both sides had 2, expected 4"):
        check_same(replace(WORKLOAD, threads=4), same_pair())


def test_ratios_are_of_pairs_and_leave_the_warm_up_out():
    slow = step(1, seconds=1000.0)
    pairs = []
    for ours, peer in ((4.0, 8.0), (40.0, 120.0), (10.0, 100.0)):
        ours_side = side("ours", slow, step(2, ours), peak_bytes=3)
        peer_side = side("peer", slow, step(2, peer, **{LOG_PROBS: 1.0}), peak_bytes=6)
        pairs.append(Pair(ours_side, peer_side))
    comparison = compare(pairs, warm_up_steps=1)
    assert comparison.pair_speedups == pytest.approx([2.0, 3.0, 10.0])
    assert comparison.speedup == pytest.approx(3.0)  # the ratio of medians would be 10
    assert comparison.memory == pytest.approx(0.5)
    rows = {row.name: row for row in comparison.rows}
    assert rows[STEP].ours == 10.0
    assert rows[STEP].peer == 100.0
    assert rows[GENERATION].ratio == pytest.approx(1.0)
    assert rows[LOG_PROBS].ratio is None  # this project has no such phase
    assert rows[OTHER].ours == 8.0
    assert rows[OTHER].peer == 97.0


def test_report_comes_back_from_its_file(tmp_path):
    report = same_pair().ours
    write(tmp_path / "report.json", report)
    assert read_report(tmp_path / "report.json") == report


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "0", "--pairs", "0"], "--prompts is 0, --pairs is 0; expected at least 1"),
        (["--batch", "3"], "--batch 3 does not divide 4 x 4 sequences"),
    ],
)
def test_impossible_sizes_are_refused_in_a_line(options, message):
    command = [sys.executable, str(BENCHMARKS / "compare_trl.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip() == message


@pytest.mark.slow
@needs_peers
@pytest.mark.timeout(1500)
def test_short_form_runs_both_sides_and_writes_what_it_says(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "compare_trl.py"), "--short"]
    command += ["--environment", str(peers_environment()), "--out", str(tmp_path / "bench.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "bench.json").read_text())
    comparison = written["comparison"]
    summary = f"speedup: {comparison['speedup']:.2f}x memory: {comparison['memory']:.2f}"
    assert done.stdout.splitlines()[-1] == summary
    ours = written["pairs"][0]["ours"]["steps"][-1]["phases"]
    peer = written["pairs"][0]["peer"]["steps"][-1]["phases"]
    # Our `rewards` may take no time: they arrive while log-probs are computed.
    for phases in (ours, peer):
        for name in (GENERATION, "reference log-probs", "loss and gradient", "optimizer"):
            assert phases[name] > 0
