"""The lab itself: heterogeneous jobs, crashing nodes, and no leftovers of a killed owner."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers.slurm_lab import assert_nothing_left, processes_of
from helpers.toy_server import is_alive, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.more]
TESTS = Path(__file__).parents[2]
HETJOB = """\
#!/bin/bash
#SBATCH --job-name=hello --time=2 --requeue
#SBATCH -N 2 --ntasks-per-node=1 --nodelist=rm[0-1]
#SBATCH hetjob
#SBATCH -N 2 --ntasks-per-node=1 --nodelist=act[0-1]
srun --mpi=none --het-group=0 -J first bash -c "$1" &
srun --mpi=none --het-group=1 -J second bash -c "$1" &
wait
"""

MEETS = """
import json, os
from reinforce_rl.launch.slurm.rendezvous import meet_ranks_of_step
print(json.dumps(meet_ranks_of_step(os.environ)))
"""

SLEEPS_FIRST = """\
hostname
[ "$SLURM_RESTART_COUNT" ] && exit
trap "rm -f /dev/shm/segment" TERM
touch /dev/shm/segment
sleep 600 & wait
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "hello.sbatch"
    path.write_text(HETJOB)
    return path


def test_a_heterogeneous_job_over_four_nodes(lab, script, tmp_path):
    job = lab.submit(
        str(script), "hostname; touch /dev/shm/$(hostname); getent hosts rm1", log=tmp_path / "log"
    )
    assert [part.state for part in lab.wait(job, 60)] == ["COMPLETED", "COMPLETED"]
    lines = job.output.split("\n")
    assert sorted(line for line in lines if re.fullmatch(r"(rm|act)\d", line)) == [
        "act0",
        "act1",
        "rm0",
        "rm1",
    ]
    assert len({line for line in lines if line.endswith(" rm1")}) == 1
    with pytest.raises(AssertionError, match=r"shared memory .*/act0/act0"):
        assert_nothing_left(lab, job, seconds=0.0)
    for node in ("act0", "act1", "rm0", "rm1"):
        (lab.shared_memory / node / node).unlink()
    assert_nothing_left(lab, job)


def test_the_tasks_of_each_step_become_ranks_by_a_file(lab, script, tmp_path):
    """Two steps of a job run at once, each on two nodes."""
    file = f"{shlex.quote(str(tmp_path))}/$SLURM_JOB_ID.$SLURM_STEP_ID"
    program = f"{shlex.quote(sys.executable)} -c {shlex.quote(MEETS)}"
    job = lab.submit(
        str(script),
        f"export REINFORCE_RENDEZVOUS_FILE={file}; {program}",
        log=tmp_path / "log",
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
    )
    assert [part.state for part in lab.wait(job, 90)] == ["COMPLETED", "COMPLETED"], job.output
    ranks = [json.loads(line) for line in job.output.splitlines() if line.startswith("{")]
    places = [
        (rank["RANK"], rank["WORLD_SIZE"], rank["LOCAL_RANK"], rank["LOCAL_WORLD_SIZE"])
        for rank in ranks
    ]
    assert sorted(places) == 2 * [("0", "2", "0", "1")] + 2 * [("1", "2", "0", "1")]
    meetings = [(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks]
    assert sorted(meetings.count(meeting) for meeting in meetings) == [2, 2, 2, 2]
    assert_nothing_left(lab, job)


def test_what_is_left_of_a_running_job_is_found(lab, script, tmp_path):
    job = lab.submit(str(script), "setsid sleep 600 & wait", log=tmp_path / "log")
    lab.wait_for_attempt(job, 0, 30)
    assert wait_for(lambda: len(lab.steps(job)) == 2, 20)
    assert wait_for(
        lambda: sum(p.cmdline()[:1] == ["sleep"] for p in processes_of(lab, job)) == 4, 20
    )
    with pytest.raises(AssertionError, match=r"(?s)step first.*slurmstepd.*sleep 600"):
        assert_nothing_left(lab, job, seconds=0.0)
    lab.cancel(job)
    assert {part.state for part in lab.wait(job, 60)} == {"CANCELLED"}
    assert_nothing_left(lab, job)


@pytest.mark.slow
def test_a_node_that_crashes_requeues_the_job(lab, script, tmp_path):
    job = lab.submit(str(script), SLEEPS_FIRST, log=tmp_path / "log")
    lab.wait_for_attempt(job, 0, 30)
    assert wait_for(lambda: len(lab.steps(job)) == 2, 20)
    assert wait_for((lab.shared_memory / "act1" / "segment").exists, 20)
    lab.crash("act1")
    lab.up("act1")
    assert {(part.state, part.restarts) for part in lab.wait(job, 90)} == {("COMPLETED", 1)}
    assert job.output.count("rm0\n") == 2
    assert_nothing_left(lab, job)


OWNER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from helpers.slurm_lab import SlurmLab
with SlurmLab() as lab:
    print(lab.folder, *(process.pid for process in lab.descendants()), flush=True)
    time.sleep(600)
"""


def test_a_second_lab_beside_the_first_goes_when_its_owner_is_killed(lab):
    command = [sys.executable, "-c", OWNER, str(TESTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            folder, *pids = owner.stdout.readline().split()
        finally:
            os.kill(owner.pid, signal.SIGKILL)
    processes = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
    assert wait_for(lambda: not any(map(is_alive, processes)), 20), processes
    assert len(pids) > 9
    assert folder not in Path("/proc/mounts").read_text()
    shutil.rmtree(folder, ignore_errors=True)
    lab.wait_for_nodes(10)
