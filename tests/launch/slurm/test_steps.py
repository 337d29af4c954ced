"""Slurm's commands, the lines of srun, and steps that an earlier attempt has left, with played commands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.fake_slurm import write_commands
from helpers.toy_server import wait_for

from reinforce_rl.launch.slurm.rendezvous import Endpoint
from reinforce_rl.launch.slurm.settings import Allocation, Component, Settings
from reinforce_rl.launch.slurm.steps import (
    START_TASK,
    Step,
    StepPlan,
    actor_plan,
    end_stale_steps,
    server_plan,
    srun_line,
)

FOLDER = Path("/run/slurm/7-0")
SETTINGS = Settings(
    Path("/run"), Path("/repo"), python="/opt/python", actor_args=("a=1",), server_args=("b=2",)
)
ALLOCATION = Allocation("7", 0, Component(0, "7", 2, 1, 1, None), Component(1, "8", 2, 4, 4, 2))
SERVERS = [Endpoint("rm0", "10.0.0.1", 20000, 20001)]


def server_line(settings: Settings, number: int = 0) -> list[str]:
    plan = server_plan(settings, ALLOCATION, number, ["rm0", "rm1"], FOLDER, ["act0"])
    return srun_line(settings, plan, FOLDER)


def actor_line(settings: Settings, servers: list[Endpoint] = SERVERS) -> list[str]:
    return srun_line(settings, actor_plan(settings, ALLOCATION, servers, ["rm0"]), FOLDER)


def test_the_servers_line() -> None:
    line = server_line(SETTINGS)
    split = line.index("/opt/python")
    expected = "srun --job-name=rm-0 --het-group=0 --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1"
    assert line[:split] == [
        *expected.split(),
        "--export=ALL",
        "--label",
        "--output=/run/slurm/7-0/rm-0.log",
    ]
    assert line[split + 1 : -1] == ["-c", START_TASK, "/repo"]
    script = "/repo/examples/serve_reward_model.py b=2 inference.token_file=/run/slurm/token"
    script += " inference.ready_file=/run/slurm/7-0/ready-0.json num_nodes=2 devices=1"
    expected = {
        "component": "rm-0",
        "folder": "/run/slurm/7-0",
        "repository": "/repo",
        "launcher": "srun",
    }
    expected |= {
        "devices": 1,
        "seconds": 600.0,
        "peers": ["act0"],
        "serves": True,
        "script": script.split(),
    }
    assert json.loads(line[-1]) == expected


def test_the_actors_line() -> None:
    line = actor_line(SETTINGS)
    assert "--ntasks=8" in line and "--ntasks-per-node=4" in line and "--cpus-per-task=2" in line
    assert json.loads(line[-1])["serves"] is False
    expected = "/repo/examples/train_reinforce_actor.py a=1 trainer.num_nodes=2 trainer.devices=4"
    expected += " exp_manager.explicit_log_dir=/run remote_rm.reward_model.ip=10.0.0.1"
    expected += (
        " remote_rm.reward_model.port=20001 remote_rm.reward_model.token_file=/run/slurm/token"
    )
    assert json.loads(line[-1])["script"] == expected.split()


def test_tasks_of_an_installed_wheel_run_its_commands(tmp_path: Path) -> None:
    (tmp_path / "reinforce_rl" / "conf").mkdir(parents=True)
    settings = replace(SETTINGS, repository=tmp_path)
    for line, command in ((server_line(settings), "serve"), (actor_line(settings), "train")):
        assert json.loads(line[-1])["script"][:3] == ["-m", "reinforce_rl", command]


def test_what_the_person_has_said_is_not_said_again() -> None:
    line = actor_line(
        replace(
            SETTINGS, actor_args=("trainer.devices=4",), server_args=("inference.name=helpful",)
        )
    )
    script = json.loads(line[-1])["script"]
    assert script.count("trainer.devices=4") == 1
    assert "remote_rm.reward_model.name=helpful" in script


def test_torchrun_is_one_task_a_node_with_all_its_cores() -> None:
    line = actor_line(replace(SETTINGS, launcher="torchrun"))
    assert "--ntasks=2" in line and "--ntasks-per-node=1" in line and "--cpus-per-task=8" in line
    task = json.loads(line[-1])
    assert (task["launcher"], task["devices"]) == ("torchrun", 4)


def test_several_servers_have_nodes_of_their_own() -> None:
    settings = replace(SETTINGS, servers=2)
    for number in (0, 1):
        line = server_line(settings, number)
        assert f"--nodelist=rm{number}" in line and "--nodes=1" in line and "--ntasks=1" in line
        assert f"--job-name=rm-{number}" in line and "num_nodes=1" in json.loads(line[-1])["script"]
    others = [Endpoint("rm1", "10.0.0.2", 1, 20003), Endpoint("rm2", "10.0.0.3", 1, 20005)]
    line = actor_line(settings, [*SERVERS, *others])
    assert (
        "remote_rm.reward_model.replicas=[10.0.0.2:20003,10.0.0.3:20005]"
        in json.loads(line[-1])["script"]
    )


def test_options_that_not_every_slurm_has_are_there_only_where_asked_for() -> None:
    assert not [word for word in actor_line(SETTINGS) if "mpi" in word or "container" in word]
    images = {
        "container_image": "a.sqsh",
        "server_container_image": "b.sqsh",
        "container_mounts": ("/data:/data",),
    }
    settings = replace(SETTINGS, mpi="pmix", srun_args=("--cpu-bind=none",), **images)
    for line, image in ((actor_line(settings), "a.sqsh"), (server_line(settings), "b.sqsh")):
        assert f"--container-image={image}" in line
        assert "--container-mounts=/repo:/repo,/run:/run,/data:/data" in line
        assert "--mpi=pmix" in line and "--cpu-bind=none" in line


@pytest.fixture
def plan() -> StepPlan:
    return StepPlan("actor", ALLOCATION.actor, (), 1, ("program.py",), False, "", ())


def test_the_actor_does_not_get_the_servers_memory(plan: StepPlan, tmp_path: Path) -> None:
    # as Slurm 22.05 sets them for `--mem=100 : --mem=300`
    given = {
        "SLURM_MEM_PER_NODE": "100",
        "SLURM_MEM_PER_NODE_HET_GROUP_1": "300",
        "SLURM_JOB_ID": "7",
    }
    step = Step(plan, ["/bin/sh", "-c", f"/usr/bin/env >{tmp_path}/env"], given, tmp_path, print)
    assert wait_for(lambda: step.has_ended, 30)
    found = (tmp_path / "env").read_text().splitlines()
    assert {"SLURM_MEM_PER_NODE_HET_GROUP_1=300", "SLURM_JOB_ID=7"} <= {*found}
    assert "SLURM_MEM_PER_NODE=100" not in found


def run_after_srun(line: list[str]) -> subprocess.CompletedProcess[str]:
    """What srun would start, but with another program than the wrapper."""
    setup = line[line.index("bash") : line.index("/opt/python")]
    start = [*setup, sys.executable, "-c", "import os;print(os.environ['X'])"]
    return subprocess.run(start, capture_output=True, text=True, timeout=60)


def test_setup_is_a_file_or_a_line(plan: StepPlan, tmp_path: Path) -> None:
    file = tmp_path / "it's set up.sh"
    file.write_text("export X=from_file\n")
    for setup, expected in ((str(file), "from_file"), ("Y=line; export X=from_$Y", "from_line")):
        done = run_after_srun(srun_line(replace(SETTINGS, setup=setup), plan, FOLDER))
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


def test_a_setup_that_fails_ends_the_task(plan: StepPlan) -> None:
    done = run_after_srun(srun_line(replace(SETTINGS, setup="export X=1; false"), plan, FOLDER))
    assert done.returncode == 1
    assert "REINFORCE_SETUP failed" in done.stderr


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    commands = write_commands(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@contextlib.contextmanager
def earlier_actor(home: Path, when_asked: str) -> Iterator[subprocess.Popen[bytes]]:
    """An actor's step that runs, and what it does at SIGTERM; the file stands in the list of steps."""
    file = home / "step-actor"
    script = f"trap '{when_asked}' TERM; echo $$ >{file}.new; mv {file}.new {file}; while :; do sleep 0.1; done"
    with subprocess.Popen(
        ["sh", "-c", script.replace("FILE", str(file))], start_new_session=True
    ) as step:
        try:
            assert wait_for(file.exists, 20)
            yield step
        finally:
            step.kill()


def test_a_step_that_ends_when_it_is_asked(home):
    said: list[str] = []
    with earlier_actor(home, "rm FILE; exit 0") as step:
        end_stale_steps(["7"], 20.0, said.append)
        assert step.wait(20) == 0
    assert said == ["actor of an earlier attempt still runs, as step 7.actor; it is asked to end"]


def test_a_step_that_does_not_is_killed(home):
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "killed" in text:
            assert step.wait(20) == -signal.SIGKILL
            (home / "step-actor").unlink()

    with earlier_actor(home, ":") as step:
        end_stale_steps(["7"], 1.0, say)
    assert said[1:] == ["actor of an earlier attempt still runs, as step 7.actor; it is killed"]


def test_other_steps_are_let_alone(home):
    (home / "step-batch").write_text("")
    for name in ("bash", "actor-of-mine", "rm-1x"):
        (home / f"step-{name}").write_text("")
    said: list[str] = []
    end_stale_steps(["7", "8"], 2.0, said.append)
    assert said == []
