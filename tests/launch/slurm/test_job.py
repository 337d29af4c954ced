"""The job's script, with fakes of Slurm's commands and of the programs."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import printed_keys
from helpers.fake_slurm import write_commands, write_python
from helpers.ranks import kill_tree
from hydra.core.override_parser.overrides_parser import OverridesParser

from reinforce_rl.config.compose import with_quotes
from reinforce_rl.launch.slurm.outcome import (
    Attempt,
    TaskEnd,
    read_attempts,
    read_ends,
    record,
    write_attempt,
)
from reinforce_rl.launch.slurm.script import filled_script

REPOSITORY = Path(__file__).parents[3]
BATCH_FILE = REPOSITORY / "slurm" / "train_hetjob.sbatch"
SECONDS = 180.0


class Job:
    """The script as a process, for a job with one server and one node with two actor tasks."""

    def __init__(
        self, folder: Path, settings: dict[str, int | Path] | None = None, **variables: str
    ):
        self.folder = folder
        submitted_in = folder / "submitted"
        submitted_in.mkdir(exist_ok=True)
        self.run_dir = Path(variables.get("REINFORCE_RUN_DIR") or folder / "run")
        self.home = folder / "home"
        self.home.mkdir(exist_ok=True)
        commands = folder / "bin"
        if not commands.exists():
            write_commands(commands)
            write_python(folder / "programs")
        allocation = {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID": "7"}
        for group, (job, node, tasks) in enumerate((("7", "rm0", "1"), ("8", "act0", "2"))):
            allocation |= {
                f"SLURM_JOB_ID_HET_GROUP_{group}": job,
                f"SLURM_JOB_NODELIST_HET_GROUP_{group}": node,
                f"SLURM_JOB_NUM_NODES_HET_GROUP_{group}": "1",
                f"SLURM_TASKS_PER_NODE_HET_GROUP_{group}": tasks,
            }
        arguments = ["a=1", *variables.pop("FAKE_ARGUMENTS", "").split()]
        settings = {
            "repository": REPOSITORY,
            "python": folder / "programs" / "python",
            "batch_python": sys.executable,
            **(settings or {}),
        }
        script = folder / "job.sbatch"
        script.write_text(filled_script(BATCH_FILE.read_text(), settings))
        self.process = subprocess.Popen(
            ["bash", str(script), *arguments, "--", "b=2"],
            cwd=submitted_in,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "PYTHONSAFEPATH": "",
                "PATH": f"{commands}:{os.environ['PATH']}",
                "FAKE_SLURM": str(self.home),
                "REINFORCE_RUN_DIR": str(self.run_dir),
                "SLURM_SUBMIT_DIR": "/",
                "REINFORCE_GRACE_SECONDS": "20",
                **allocation,
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> tuple[int, list[str]]:
        """Return the exit code and the output lines without times of day."""
        output, _ = self.process.communicate(timeout=SECONDS)
        assert not list(self.home.glob("step-*")), output
        return self.process.returncode, [line[9:] for line in output.splitlines()]

    def wait_until_training(self) -> None:
        deadline = time.monotonic() + SECONDS
        while len(list(self.run_dir.glob("began.*"))) < 2:  # tasks of the actor
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)

    def wait_for(self, path: Path) -> None:
        deadline = time.monotonic() + SECONDS
        while not path.exists():
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def rank(self, number: int) -> dict[str, Any]:
        """Return the `arguments` and `environment` of a rank of the actor."""
        return json.loads((self.run_dir / f"began.{number}").read_text())

    @property
    def attempts(self) -> list[Attempt]:
        return read_attempts(self.run_dir / "slurm")

    @property
    def requeued(self) -> bool:
        return (self.home / "requeued").exists()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[type[Job]]:
    jobs: list[Job] = []

    class Started(Job):
        def __init__(self, settings: dict[str, int | Path] | None = None, **variables: str):
            super().__init__(tmp_path, settings, **variables)
            jobs.append(self)

    yield Started
    for job in jobs:
        if job.process.poll() is None:
            kill_tree(job.process.pid)
            job.process.wait()


@pytest.mark.more
def test_a_run_that_finishes_and_the_next_link_of_its_chain(started: type[Job]) -> None:
    job = started()
    code, lines = job.finish()
    assert code == 0, lines
    assert lines[-2:] == [
        "the run has finished",
        "the run is at step 9, which was 0 when this attempt began; nothing is left to do",
    ]
    (attempt,) = job.attempts
    assert (attempt.step_before, attempt.step_after, attempt.exit_code, attempt.requeued) == (
        0,
        9,
        0,
        False,
    )
    token = job.run_dir / "slurm" / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text().strip()) > 16

    link = started(SLURM_JOB_ID="9")
    code, lines = link.finish()
    assert code == 0
    assert lines == [f"the run in {job.run_dir} has finished, at step 9; nothing was started"]


@pytest.mark.more
@pytest.mark.parametrize(
    ("number", "step_before", "expected"),
    [
        (signal.SIGUSR1, 0, "; requeued: from step 0 to step 7, restart 1 of 10"),
        (
            signal.SIGUSR1,
            7,
            "not requeued: this attempt saved nothing beyond step 7",
        ),
        (signal.SIGTERM, 0, "not requeued after SIGTERM"),
    ],
    ids=["time limit", "nothing new", "cancelled"],
)
def test_a_signal_saves_and_requeues_what_got_further(
    started: type[Job], tmp_path: Path, number: signal.Signals, step_before: int, expected: str
) -> None:
    if step_before:
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / "latest").write_text(f"step_{step_before:08d}")
    job = started(FAKE_ACTOR="trains")
    job.wait_until_training()
    job.process.send_signal(number)
    code, lines = job.finish()
    assert code == 75, lines
    assert expected in lines[-1], lines
    assert lines[-3] == "the actor has ended; the newest checkpoint is of step 7"
    assert job.requeued is job.attempts[0].requeued is ("; requeued" in expected)
    assert job.requeued is not lines[-1].endswith(
        "; submit the same command again to resume from step 7"
    )


@pytest.mark.more
@pytest.mark.parametrize(
    ("number", "seconds_left", "grace", "saves"),
    [
        (signal.SIGUSR1, 600, 2, True),  # before the time limit: all remaining time
        (signal.SIGUSR1, 25, 60, True),  # at least ten seconds
        # Slurm does not say how long it waits after a cancellation
        (signal.SIGTERM, 600, 2, False),
    ],
    ids=["much time", "no time", "cancelled"],
)
def test_how_long_an_actor_may_take_to_save(
    started: type[Job], number: signal.Signals, seconds_left: int, grace: int, saves: bool
) -> None:
    times = {"FAKE_SECONDS_LEFT": str(seconds_left), "REINFORCE_GRACE_SECONDS": str(grace)}
    times["FAKE_SAVE_SECONDS"] = "5" if saves else "60"
    job = started(FAKE_ACTOR="saves slowly", **times)
    job.wait_until_training()
    job.process.send_signal(number)
    _, lines = job.finish()
    assert any("has not ended in time; killing it" in line for line in lines) is not saves, lines
    assert job.attempts[0].step_after == (7 if saves else 0)
    assert job.requeued is saves


@pytest.mark.more
def test_an_actor_that_hangs_is_killed_in_time_for_a_requeue(started: type[Job]) -> None:
    """It is killed half a minute before the allocation ends, although its own limit is longer."""
    begin = time.time()
    job = started(
        FAKE_ACTOR="saves and hangs", FAKE_SECONDS_LEFT="42", REINFORCE_GRACE_SECONDS="150"
    )
    job.wait_until_training()
    signalled = time.time()
    job.process.send_signal(signal.SIGUSR1)
    _, lines = job.finish()
    assert any("actor has not ended in time; killing it" in line for line in lines), lines
    assert job.requeued, lines
    assert "; requeued: from step 0 to step 7" in lines[-1], lines
    due = max(begin + 42 - 30, signalled + 10)
    assert due - 2 < time.time() < due + 25, lines


@pytest.mark.parametrize("others", ["stops alone", "stops alone, others start"])
def test_tasks_that_wait_for_one_that_was_stopped_alone_are_stopped_too(
    started: type[Job], others: str
) -> None:
    """Slurm may end tasks of a new attempt on one node, because that node missed the last end.

    The other tasks wait for it, or are programs that are still starting and die of the signal.
    """
    job = started(FAKE_ACTOR=others)
    code, lines = job.finish()
    assert code == 75, lines
    (line,) = [line for line in lines if "the others have not" in line]
    assert line.startswith("actor rank 1 on ")
    assert "exit code 75" in line
    assert not any("killing it" in line for line in lines), lines
    assert job.requeued, lines
    assert job.attempts[0].requeued, lines
    assert (job.attempts[0].step_before, job.attempts[0].step_after) == (0, 0)


@pytest.mark.more
@pytest.mark.parametrize(
    ("actor_fault", "expected", "how"), [("fails", 5, "exit code 5"), ("killed", 137, "SIGKILL")]
)
def test_an_actor_task_that_fails(
    started: type[Job], actor_fault: str, expected: int, how: str
) -> None:
    job = started(FAKE_ACTOR=actor_fault)
    code, lines = job.finish()
    assert code == expected, lines
    assert lines[-2].startswith("first to fail: actor rank 1 on ")
    assert how in lines[-2]
    assert "not requeued after a failure" in lines[-1]
    assert "  | an error of rank 1" in lines or actor_fault == "killed"
    (attempt,) = job.attempts
    assert (attempt.first_failed or "").startswith("actor rank 1 on ")
    assert attempt.exit_code == expected


@pytest.mark.more
@pytest.mark.parametrize(
    ("server", "actor", "expected", "first", "last"),
    [
        # The server's code, although the actor has saved.
        (
            "dies",
            "trains",
            137,
            "first to fail: rm-0 rank 0 on ",
            "requeued: from step 0 to step 7",
        ),
        # It has made progress, but would fail again.
        ("", "diverges", 77, "first to fail: actor rank ", "not requeued: the policy has diverged"),
        (
            "",
            "alerts",
            78,
            "first to fail: actor rank ",
            "not requeued: an alert has stopped the run",
        ),
    ],
)
def test_a_failed_job_is_requeued_where_that_was_asked_for(
    started: type[Job], server: str, actor: str, expected: int, first: str, last: str
) -> None:
    job = started(FAKE_SERVER=server, FAKE_ACTOR=actor, REINFORCE_RESTART_AFTER_CRASH="true")
    code, lines = job.finish()
    assert code == expected, lines
    assert lines[-2].startswith(first)
    assert last in lines[-1]
    assert job.requeued is (actor == "trains")


THREE_SERVERS = {
    "SLURM_JOB_NODELIST_HET_GROUP_0": "rm0,rm1,rm2",
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "3",
}


def recording_python(folder: Path) -> Path:
    """Write a `batch_python` that records the calls of the script."""
    python = folder / "recording-python"
    python.write_text(
        "#!/bin/sh\nwords=$*\n"
        "case $words in\n"
        f'*slurm.attempt*) echo "${{words##*slurm.attempt }}" >>{folder}/calls ;;\n'
        "esac\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o700)
    return python


@pytest.mark.more
def test_a_run_continues_while_one_of_its_servers_lives(started: type[Job], tmp_path: Path) -> None:
    job = started(
        FAKE_SERVER="dies1",
        FAKE_ACTOR="finishes later",
        settings={"servers": 3, "batch_python": recording_python(tmp_path)},
        **THREE_SERVERS,
    )
    code, lines = job.finish()
    assert code == 0, lines
    assert "rm-1 has ended without being asked to; the run continues with rm-0, rm-2" in lines
    assert lines[-2] == "the run has finished"
    drains = [line.split() for line in job.calls() if line.startswith("drain")]
    assert [words[3] for words in drains] == ["rm-"], "there are no generators"
    assert len(drains[0]) == 4 + 2, "the srun of rm-1 has ended, and its number may be another's"


GENERATORS = {
    "SLURM_HET_SIZE": "3",
    "SLURM_JOB_ID_HET_GROUP_2": "9",
    "SLURM_JOB_NODELIST_HET_GROUP_2": "gen0",
    "SLURM_JOB_NUM_NODES_HET_GROUP_2": "1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_2": "2",
}


@pytest.mark.more
def test_a_generator_that_dies_is_started_again_and_all_are_drained(started: type[Job]) -> None:
    gpus = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    job = started(FAKE_ACTOR="trains", FAKE_GENERATOR="dies once", **gpus, **GENERATORS)
    job.wait_until_training()
    deadline = time.monotonic() + SECONDS
    while len(list(job.run_dir.glob("generates.*"))) < 3:
        assert job.process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    job.process.send_signal(signal.SIGUSR1)
    code, lines = job.finish()
    assert code == 75, lines
    again = [line for line in lines if line.endswith("; restart 1 of 5")]
    assert len(again) == 1, lines
    assert "was ended by SIGKILL (exit code 137)" in again[0], lines
    name = again[0].partition(" ")[0]
    assert f"{name}.1: log {job.run_dir}/slurm/7-0/{name}.1.log" in lines
    assert len(list(job.run_dir.glob("drained.*"))) == 2
    assert job.requeued
    assert "; requeued: from step 0 to step 7" in lines[-1]
    logs = [(job.run_dir / "slurm" / "7-0" / f"gen-{number}.log").read_text() for number in (0, 1)]
    assert [log.split()[0] for log in logs] == ["MIG-a", "MIG-b"], "devices of one node"
    assert all(
        "'generation_ranks=0'" in log and "remote_rm.reward_model.ready_files=" in log
        for log in logs
    )
    # with a loopback address only tasks of one node could meet
    assert all("'generator_host=act0'" in log for log in logs)
    assert "generator_host=act0" in job.rank(0)["arguments"]


@pytest.mark.more
def test_a_generator_that_always_dies_is_left_out_and_the_run_continues(
    started: type[Job], tmp_path: Path
) -> None:
    variables = {**GENERATORS, "SLURM_TASKS_PER_NODE_HET_GROUP_2": "1"}
    once: dict[str, int | Path] = {
        "generator_restarts": 1,
        "batch_python": recording_python(tmp_path),
    }
    job = started(once, FAKE_ACTOR="trains", FAKE_GENERATOR="always dies", **variables)
    said: list[str] = []
    assert job.process.stdout is not None
    for line in job.process.stdout:
        said.append(line[9:].strip())
        if said[-1].startswith("no generator is left"):
            job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(SECONDS) == 75, said
    assert [
        line
        for line in said
        if "it was started 2 times (generator_restarts) and is not restarted" in line
    ]
    assert len(list(job.run_dir.glob("generates.*"))) == 2
    assert [line for line in said if line.startswith("the actor ended cleanly after SIGTERM")]
    (drained,) = [line.split() for line in job.calls() if "gen-" in line and "drain" in line]
    assert drained[3:] == ["gen-"], "its process has ended"


def test_generators_and_components_belong_together(started: type[Job]) -> None:
    external = "placement=disaggregated generation_ranks=0"
    job = started(**{**GENERATORS, "SLURM_HET_SIZE": "2", "FAKE_ARGUMENTS": external})
    output, _ = job.process.communicate(timeout=SECONDS)
    assert job.process.returncode == 1
    assert printed_keys(output) == ["slurm.components.wrong_number"]
    assert "2 components" in output
    assert "generators" in output


@pytest.mark.more
@pytest.mark.parametrize(
    ("server_fault", "expected", "start", "detail"),
    [
        ("loads", 1, "no healthy reward server within 4 s (rm-0: ", "log"),
        ("fails", 3, "rm-0 ended before it was healthy; first to fail: rm-0 rank 0 on ", ""),
    ],
)
def test_a_server_that_is_never_healthy(
    started: type[Job], server_fault: str, expected: int, start: str, detail: str
) -> None:
    job = started(
        FAKE_SERVER=server_fault, REINFORCE_READY_SECONDS="4" if server_fault == "loads" else "600"
    )
    code, lines = job.finish()
    assert code == expected, lines
    assert lines[-2].startswith(start)
    assert detail in lines[-2]
    assert not list(job.run_dir.glob("began.*"))


@pytest.mark.more
def test_an_actor_whose_step_starts_no_task_is_not_waited_for(started: type[Job]) -> None:
    begin = time.monotonic()
    job = started(
        FAKE_ACTOR="never begins", REINFORCE_READY_SECONDS="4", REINFORCE_GRACE_SECONDS="600"
    )
    code, lines = job.finish()
    assert time.monotonic() - begin < 90, "there is nothing to save"
    assert code == 1, lines
    assert lines[-2] == "no task of actor has begun within 4 s of its step's start"
    assert lines[-1].endswith("requeued, as another attempt may begin")
    assert job.requeued


@pytest.mark.more
def test_files_of_the_folder_of_sbatch_shadow_nothing(started: type[Job], tmp_path: Path) -> None:
    checkout = tmp_path / "submitted" / "reinforce_rl"
    checkout.mkdir(parents=True)
    for file in (checkout / "__init__.py", checkout.with_name("json.py")):
        file.write_text("raise SystemExit('of the folder of sbatch')")
    code, lines = started().finish()
    assert code == 0, lines


def test_the_import_path_of_an_image_stays(started: type[Job], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "$PYTHONPATH"\nexit 3\n')
    python.chmod(0o755)
    job = started({"python": python}, FAKE_IMAGE_PYTHONPATH="/opt/image")
    assert job.finish()[0] == 3
    log = job.run_dir / "slurm" / "7-0" / "rm-0.log"
    assert log.read_text() == f"{REPOSITORY}:/opt/image\n"


@pytest.mark.parametrize("program", [None, "exit 1"], ids=["missing", "too old"])
def test_a_batch_host_without_the_interpreter(
    started: type[Job], tmp_path: Path, program: str | None
) -> None:
    python = tmp_path / "python3.8"
    if program is not None:
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o755)
    job = started({"batch_python": python})
    output, _ = job.process.communicate(timeout=SECONDS)
    assert job.process.returncode == 1
    assert f"batch_python is '{python}'" in output
    assert "3.9" in output
    assert not job.run_dir.exists()


@pytest.mark.slow
def test_tasks_that_hang_after_one_was_stopped_alone_get_a_minute(started: type[Job]) -> None:
    begin = time.monotonic()
    job = started(FAKE_ACTOR="stops alone, others hang", REINFORCE_GRACE_SECONDS="600")
    code, lines = job.finish()
    assert 60 < time.monotonic() - begin < 140, lines
    assert (code, job.requeued) == (75, True), lines


@pytest.mark.more
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_job_that_is_cancelled_while_its_servers_drain_is_not_requeued(
    started: type[Job], is_cancelled: bool
) -> None:
    job = started(FAKE_ACTOR="stops in time", FAKE_SERVER="drains slowly")
    job.wait_for(job.run_dir / "slurm" / "7-0" / "draining")
    if is_cancelled:
        time.sleep(1)
        job.process.send_signal(signal.SIGTERM)
    code, lines = job.finish()
    assert (code, job.requeued) == (75, not is_cancelled), lines


@pytest.mark.more
def test_the_first_signal_counts(started: type[Job]) -> None:
    job = started(FAKE_ACTOR="trains", FAKE_SERVER="drains slowly")
    job.wait_until_training()
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for(job.run_dir / "slurm" / "7-0" / "draining")
    job.process.send_signal(signal.SIGTERM)
    code, lines = job.finish()
    assert (code, job.requeued) == (75, True), lines


@pytest.mark.more
def test_a_run_in_a_folder_whose_name_needs_quotes(started: type[Job], tmp_path: Path) -> None:
    job = started(REINFORCE_RUN_DIR=str(tmp_path / "lr=1e-6~#é"))
    code, lines = job.finish()
    assert code == 0, lines
    (ready_files,) = [word for word in job.rank(0)["arguments"] if "ready_files" in word]
    parsed = OverridesParser.create().parse_override(with_quotes(ready_files))
    assert parsed.value() == [f"{job.run_dir}/slurm/7-0/ready-0.json"]


@pytest.mark.more
def test_a_server_has_its_time_after_what_an_earlier_attempt_has_left(
    started: type[Job], tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    left = tmp_path / "home" / "step-rm-0"
    script = f"trap 'sleep 12; rm {left}; exit 0' TERM; while :; do sleep 0.1; done"
    with subprocess.Popen(["sh", "-c", script], start_new_session=True) as process:
        left.write_text(str(process.pid))
        code, lines = started(REINFORCE_READY_SECONDS="10").finish()
        assert process.wait(SECONDS) == 0
    assert code == 0, lines


@pytest.mark.more
def test_ranks_of_a_launcher_around_the_job_are_forgotten(started: type[Job]) -> None:
    job = started(
        RANK="3", WORLD_SIZE="8", MASTER_ADDR="elsewhere", FAKE_IMAGE="RANK=5 WORLD_SIZE=6"
    )
    assert job.finish()[0] == 0
    environment = job.rank(1)["environment"]
    assert environment.keys().isdisjoint({"RANK", "WORLD_SIZE", "MASTER_ADDR"})


@pytest.mark.more
@pytest.mark.parametrize("left", ["900", "unlimited"])
def test_tasks_know_when_their_job_ends(started: type[Job], left: str) -> None:
    begin = time.time()
    job = started(FAKE_SECONDS_LEFT=left, SLURM_JOB_END_TIME="5")
    assert job.finish()[0] == 0
    environment = job.rank(0)["environment"]
    assert environment["SLURM_JOB_START_TIME"] == "1000"
    end = environment.get("SLURM_JOB_END_TIME")
    if left == "unlimited":
        assert end is None
    else:
        assert end is not None
        assert 899 <= int(end) - begin < 1000


@pytest.mark.more
def test_a_folder_is_read_before_a_file_is_missed(started: type[Job], tmp_path: Path) -> None:
    """Like on NFS, a missing file appears after its folder is read."""
    commands = write_commands(tmp_path / "bin")
    programs = write_python(tmp_path / "programs").parent
    for name, file in (
        ("serve", "ready"),
        ("train", 'Path(os.environ["REINFORCE_RENDEZVOUS_FILE"])'),
    ):
        program = programs / f"{name}.py"
        text = program.read_text()
        assert f"{file}.write_text" in text
        program.write_text(
            text.replace(f"{file}.write_text", f"{file}.with_suffix('.unseen').write_text")
        )
    script = (
        'for file in "$1"/*.unseen; do [ -e "$file" ] && mv "$file" "${file%.unseen}.json"; done'
    )
    (commands / "ls").write_text(f"#!/bin/sh\n{script}\n")
    (commands / "ls").chmod(0o700)
    job = started(FAKE_ACTOR="finishes later", REINFORCE_READY_SECONDS="4")
    code, lines = job.finish()
    assert code == 0, lines


@pytest.mark.slow
def test_the_log_says_what_is_waited_for(started: type[Job]) -> None:
    _, lines = started(FAKE_SERVER="loads", REINFORCE_READY_SECONDS="32").finish()
    (line,) = [line for line in lines if line.startswith("waiting, ")]
    assert line.endswith(" s of 32 s: rm-0: see the log")


@pytest.mark.more
def test_a_server_that_is_healthy_is_named(started: type[Job]) -> None:
    _, lines = started().finish()
    assert 'rm-0: healthy, {"host": "127.0.0.1", "port": 9}' in lines


def test_a_server_that_fails_is_noticed_while_another_loads(started: type[Job]) -> None:
    job = started({"servers": 3}, FAKE_SERVER="fails1", **THREE_SERVERS)
    code, lines = job.finish()
    assert code == 3, lines
    assert lines[-2].startswith("rm-1 ended before it was healthy; first to fail: rm-1 rank 0 on ")


@pytest.mark.more
def test_files_of_another_job_with_the_same_number_count_for_nothing(
    started: type[Job], tmp_path: Path
) -> None:
    folder = tmp_path / "run" / "slurm" / "7-0"
    (folder / "exit").mkdir(parents=True)
    record(folder, TaskEnd("actor", 0, "act0", 5, 1.0))
    for name in ("ready-0.json", "rendezvous-actor.json", "draining", "gen-0.1.srun"):
        (folder / name).touch()
    job = started(FAKE_SERVER="loads", REINFORCE_READY_SECONDS="4")
    code, lines = job.finish()
    assert code == 1, lines
    assert lines[-2].startswith("no healthy reward server"), lines
    assert not list(job.run_dir.glob("began.*"))
    assert not (folder / "draining").exists()
    assert not (folder / "gen-0.1.srun").exists()
    assert [end.component for end in read_ends(folder)] == ["rm-0"]


@pytest.mark.more
def test_seconds_are_no_octal_numbers(started: type[Job]) -> None:
    job = started(REINFORCE_READY_SECONDS="099", REINFORCE_GRACE_SECONDS="08")
    code, lines = job.finish()
    assert code == 0, lines
    assert not any("base" in line for line in lines), lines


@pytest.mark.parametrize("component", [0, 1, 2])
def test_nodes_that_scontrol_does_not_name(started: type[Job], component: int) -> None:
    nodes = {f"SLURM_JOB_NODELIST_HET_GROUP_{component}": "nowhere"}
    job = started(**{**(GENERATORS if component == 2 else {}), **nodes})
    code, lines = job.finish()
    assert code == 1, lines
    assert lines[-2].startswith("scontrol show hostnames has named no node"), lines
    assert not list(job.run_dir.glob("began.*"))


def test_a_job_that_gets_no_further_does_not_train(started: type[Job], tmp_path: Path) -> None:
    for restart in range(3):
        write_attempt(tmp_path / "run" / "slurm", Attempt("7", restart, 1.0, 0))
    code, lines = started(SLURM_RESTART_COUNT="3").finish()
    assert code == 1
    (line,) = lines
    assert line.startswith("error: ")
    assert printed_keys(line) == ["slurm.job.no_progress"]
    assert "3 attempts" in line
    assert line.count("step 0") == 2


def test_two_jobs_do_not_work_in_one_folder(started: type[Job], tmp_path: Path) -> None:
    write_attempt(tmp_path / "run" / "slurm", Attempt("5", 0, 1.0, 0))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "running-5").touch()
    code, lines = started().finish()
    assert code == 1
    assert printed_keys(lines[0]) == ["slurm.run_dir.in_use"]
    assert "job 5" in lines[0]
    assert str(tmp_path / "run") in lines[0]
    assert "scancel 5" in lines[0]


@pytest.mark.more
def test_more_steps_than_a_finished_run_was_asked_for(started: type[Job], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "status.json").write_text(json.dumps({"state": "finished", "step": 4}))
    done = Attempt(
        "5",
        0,
        1.0,
        0,
        (("max_steps=4",), ()),
        2.0,
        4,
        "",
        0,
    )
    write_attempt(run_dir / "slurm", done)
    code, lines = started().finish()
    assert code == 0
    assert lines[-2] == "the run has finished"
    write_attempt(run_dir / "slurm", replace(done, job="8", arguments=(("a=1",), ("b=2",))))
    code, lines = started().finish()
    assert code == 0
    assert lines[0].endswith("nothing was started")


def test_all_faults_of_the_settings_are_reported(started: type[Job]) -> None:
    job = started(
        {"servers": 0},
        REINFORCE_MAX_RESTARTS="many",
        REINFORCE_SERVERS="2",
        FAKE_ARGUMENTS="exp_manager.explicit_log_dir=/elsewhere",
    )
    output, _ = job.process.communicate(timeout=SECONDS)
    assert job.process.returncode == 1
    assert output.startswith("error: 4 faults in the configuration:")
    assert printed_keys(output) == [
        "slurm.variable.invalid",
        "slurm.run_dir.set_twice",
        "slurm.variable.not_read",
        "slurm.variable.invalid",
    ]


def test_a_job_without_a_folder_says_so(started: type[Job]) -> None:
    job = started(REINFORCE_RUN_DIR="")
    output, _ = job.process.communicate(timeout=SECONDS)
    assert job.process.returncode == 1
    assert "REINFORCE_RUN_DIR" in output
    assert not list(job.folder.glob("slurm"))
