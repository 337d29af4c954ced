"""One of two ranks dies or hangs; the other ends within a bound and names it.

The run resumes exactly.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.ranks import reference
from helpers.trainer_processes import SETTINGS, TrainerProcesses, assert_equal_runs

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.errors import EXIT_LOST_RANK
from reinforce_rl.runtime.status import read_status

pytestmark = pytest.mark.more

SLOW = pytest.mark.slow
LIMITS = ["trainer.heartbeat_timeout_seconds=6", "trainer.collective_timeout_seconds=6"]
NOTHING = 0  # the rank stands still
BUSY = -1  # the rank is busy with something else for ever


@pytest.fixture(scope="module")
def processes() -> Iterator[TrainerProcesses]:
    processes = TrainerProcesses()
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def uninterrupted(processes, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    processes.start(folder, *SETTINGS, ranks=2)
    assert processes.wait() == 0, (folder / "log").read_text()
    return folder


def lose(
    processes: TrainerProcesses,
    folder: Path,
    lost: int,
    phase: str,
    step: int,
    number: int,
    key: str,
    **options: object,
) -> str:
    """Start a run and lose one of its ranks.

    Return what the other rank reports; it ends by itself, with an error of this key.
    """
    act = {"rank": lost, "phase": phase, "step": step, "signal": number}
    # A stopped process cannot end itself.
    patience = 1 if number == signal.SIGSTOP else 40
    limits = [] if number == BUSY else LIMITS
    processes.start(folder, *SETTINGS, *limits, ranks=2, patience=patience, act=act, **options)
    processes.wait()
    said = (folder / "log").read_text()
    assert processes.statuses[1 - lost] == EXIT_LOST_RANK, said
    code = EXIT_LOST_RANK if number in (NOTHING, BUSY) else -signal.SIGKILL
    assert processes.statuses[lost] == code, said
    status = read_status(folder / "run")
    assert status is not None
    assert status.state == "failed"
    assert status.exit_code == EXIT_LOST_RANK
    assert f"error: {status.reason} [{key}]" in said
    where = f"phase {phase} of step {step}" if step else f"phase {phase}, before the first step"
    assert f"rank {lost} (host " in status.reason
    assert where in status.reason
    return status.reason


@pytest.mark.parametrize(
    ("lost", "phase", "number", "key"),
    [
        (1, "generate", signal.SIGKILL, "ranks.rank.died"),
        pytest.param(0, "train_time", signal.SIGKILL, "ranks.rank.died", marks=SLOW),
        pytest.param(0, "generate", signal.SIGKILL, "ranks.rank.died", marks=SLOW),
        pytest.param(1, "train_time", signal.SIGKILL, "ranks.rank.died", marks=SLOW),
        pytest.param(1, "generate", signal.SIGSTOP, "ranks.rank.silent", marks=SLOW),
        pytest.param(0, "train_time", signal.SIGSTOP, "ranks.rank.silent", marks=SLOW),
        (1, "generate", NOTHING, "ranks.rank.hangs"),
        pytest.param(0, "train_time", NOTHING, "ranks.rank.hangs", marks=SLOW),
    ],
)
def test_it_is_named_and_the_run_goes_on(
    processes, uninterrupted, tmp_path, lost, phase, number, key
):
    lose(processes, tmp_path, lost, phase, 5, number, key)
    processes.start(tmp_path, *SETTINGS, ranks=2)
    assert processes.wait() == 0, (tmp_path / "log").read_text()
    assert_equal_runs(tmp_path, uninterrupted)


@pytest.mark.parametrize(
    ("phase", "step"),
    [
        ("loading the model", 0),
        pytest.param("checkpoint", 3, marks=SLOW),
        pytest.param("export", 12, marks=SLOW),
    ],
)
def test_outside_of_steps(processes, tmp_path, phase, step):
    lose(processes, tmp_path, 1, phase, step, signal.SIGKILL, "ranks.rank.died")


def limit_collectives(seconds: float) -> None:
    TrainConfig.torch_timeout_seconds = seconds  # type: ignore[assignment, misc]


@pytest.mark.parametrize("lost", [pytest.param(0, marks=SLOW), 1])
def test_torchs_own_limit_of_a_collective(processes, tmp_path, lost):
    """The rank is busy, not still, so it counts as alive until gloo times out."""
    key = "ranks.rank.hangs"
    reason = lose(
        processes,
        tmp_path,
        lost,
        "generate",
        5,
        BUSY,
        key,
        patches=[[reference(limit_collectives), 12]],
    )
    assert "imed out waiting" in reason
    assert "Traceback" not in (tmp_path / "log").read_text()
