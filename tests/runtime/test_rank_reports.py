"""Whom the ranks' reports blame."""

from __future__ import annotations

from dataclasses import replace

from reinforce_rl.errors import EXIT_LOST_RANK, EXIT_STOPPED
from reinforce_rl.runtime.rank_reports import Report, died, failed, hung, silent, waited_for

WAITS = Report(0, "a", "generate", 3, 17, 40.0, in_collective=True, still=40.0, line="megatron/mesh.py:183")
HANGS = Report(1, "b", "generate", 3, 17, 41.0, line="generation/native/generator.py:95", still=41.0)


def test_a_rank_that_does_not_wait_hangs_once_nobody_moves():
    verdict = hung([WAITS, HANGS], 30.0)
    assert verdict is not None and verdict.exit_code == EXIT_LOST_RANK and not verdict.of_first
    assert "rank 1 (host b) hangs in phase generate of step 3 at generation/native/generator.py:95" in verdict.text
    assert "no rank has got any further for 40 s" in verdict.text
    assert hung([WAITS, replace(HANGS, still=29.0)], 30.0) is None
    assert hung([replace(WAITS, still=1.0), HANGS], 30.0) is None


def test_where_all_wait_the_ones_behind_are_to_blame():
    behind = [replace(WAITS, rank=rank, number=16, phase="logprobs") for rank in (1, 2)]
    verdict = hung([WAITS, *behind], 30.0)
    assert verdict is not None
    assert verdict.text.startswith("rank 1 (host a), rank 2 (host a) hangs in phase logprobs of step 3")


def test_who_waits_for_the_reward_server_is_left_alone():
    assert hung([WAITS, replace(HANGS, has_deadline=True)], 30.0) is None
    assert waited_for([WAITS, replace(HANGS, has_deadline=True)], {0: "Timed out"}) is None


def test_a_collective_that_timed_out_is_blamed_on_whom_it_waited_for():
    """Rank 0 gave up waiting, rank 1 does something and moves, rank 2 waits for it too."""
    moves, also_waits = replace(HANGS, still=0.1), replace(WAITS, rank=2)
    gave_up = replace(WAITS, in_collective=False, still=0.1)
    verdict = waited_for([gave_up, moves, also_waits], {0: "Timed out waiting 60000ms for recv\n"})
    assert verdict is not None and verdict.exit_code == EXIT_LOST_RANK and not verdict.of_first
    assert verdict.text.startswith(
        "rank 1 (host b) hangs in phase generate of step 3 at generation/native/generator.py:95: "
    )
    assert "rank 0 has waited for longer than torch's own limit (Timed out waiting 60000ms for recv)." in verdict.text
    assert waited_for([gave_up, moves], {}) is None
    assert waited_for([gave_up, moves], {0: "Timed out", 1: "Timed out"}) is None


def test_what_is_said_of_a_lost_rank():
    assert "rank 1 (host b) died in phase generate of step 3" in died([HANGS]).text
    text = silent([replace(HANGS, rank=0, step=0, phase="export")], 60.0)
    assert text.of_first and "60 s ago, in phase export, before the first step" in text.text
    broken = failed(HANGS, 1, "ValueError: {not a format}")
    assert "rank 1 (host b) failed in phase generate of step 3: ValueError: {not a format}" in broken.text
    assert failed(HANGS, EXIT_STOPPED, "stopped by SIGTERM").exit_code == EXIT_STOPPED
    assert "rank 8 (host a) and 2 more" in died([replace(WAITS, rank=rank) for rank in range(1, 11)]).text
