"""Commands of Slurm that fail or do not answer, and a job's times with a fake squeue."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.slurm_client import SlurmClient

from reinforce_rl.utils.job_time import JobTimes
from reinforce_rl.utils.slurm_commands import SlurmCallError, call, job_times


def test_a_command_that_does_not_answer() -> None:
    with pytest.raises(SlurmCallError, match=r"^sleep 60: no answer within 0 s"):
        call(["sleep", "60"], seconds=0.2)


def test_a_command_that_fails() -> None:
    with pytest.raises(SlurmCallError, match=r"^sh -c .*: it is full$") as caught:
        call(["sh", "-c", "echo it is full >&2; exit 3"])
    assert caught.value.said == "it is full"
    with pytest.raises(SlurmCallError, match="false: exit code 1"):
        call(["false"])
    with pytest.raises(SlurmCallError, match=r"nothing-of-this-name: .*No such file"):
        call(["nothing-of-this-name"])


def test_its_environment() -> None:
    show = ["/bin/sh", "-c", 'echo "$A$B"']
    assert call(show, env={"A": "1", "B": "2"}) == "12\n"


def test_both_outputs() -> None:
    line = ["sh", "-c", "echo out; echo err >&2"]
    assert call(line) == "out\n"
    assert call(line, stderr=True) == "out\nerr\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmClient:
    client = SlurmClient(tmp_path / "slurm")
    monkeypatch.setenv("PATH", client.path)
    return client


def test_the_times_of_a_job(slurm: SlurmClient) -> None:
    slurm.answer("squeue", "12|1000|5000\n13|2000|4000\n14|N/A|NONE\n")
    assert job_times("12") == (1000, 5000)
    assert job_times("12", "13") == (1000, 4000)
    assert job_times("14") == (None, None)
    assert job_times("15") == (None, None)
    assert slurm.calls("squeue")[1] == ["-h", "-j", "12,13", "-o", "%A|%S|%e"]


def test_a_job_asks_for_its_end_where_slurm_has_not_set_it(slurm: SlurmClient) -> None:
    slurm.answer("squeue", "12|1000|5000\n13|2000|4000\n")
    components = {"SLURM_JOB_ID_HET_GROUP_0": "12", "SLURM_JOB_ID_HET_GROUP_1": "13"}
    job = {"SLURM_JOB_ID": "12"}
    assert JobTimes.asked(job) == JobTimes(1000, 5000)
    assert JobTimes.asked({**job, **components}) == JobTimes(1000, 4000)
    assert JobTimes.asked({**job, "SLURM_JOB_START_TIME": "7"}) == JobTimes(7, 5000)
    number = len(slurm.calls("squeue"))
    assert JobTimes.asked({**job, "SLURM_JOB_END_TIME": "9"}) == JobTimes(None, 9)
    assert JobTimes.asked(components) == JobTimes.asked({}) == JobTimes()
    assert len(slurm.calls("squeue")) == number == 3


def test_a_slurm_that_does_not_say_it(slurm: SlurmClient) -> None:
    slurm.answer("squeue", error="Unable to contact slurm controller", code=1)
    with pytest.raises(SlurmCallError, match="Unable to contact") as caught:
        JobTimes.asked({"SLURM_JOB_ID": "12"})
    assert caught.value.said == "Unable to contact slurm controller"
