"""The launcher as a process: once with the real toy server, and with stand-ins for each fault."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers.errors import printed_keys, raises_error
from helpers.fake_reward_server import FakeRewardServer
from helpers.toy_server import free_port, is_alive, wait_for

from reinforce_rl.launch.local import make_plan, split_arguments
from reinforce_rl.launch.slurm.settings import override_of

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "examples" / "launch_local.py"
TOY_SERVER = ROOT / "tests" / "helpers" / "serve_toy_scorer.py"
FAKE_SERVER = ROOT / "tests" / "helpers" / "fake_reward_server.py"

# Scores a sample at the address that the launcher chose, and exits with code 7.
SCORING_ACTOR = """
import sys, torch
from reinforce_rl.rewards.base import RewardRequest
from reinforce_rl.rewards.client import RemoteGPTRMClient
options = dict(argument.split("=", 1) for argument in sys.argv[1:])
client = RemoteGPTRMClient(
    options["remote_rm.reward_model.ip"],
    int(options["remote_rm.reward_model.port"]),
    options["remote_rm.reward_model.name"],
    deadline_seconds=20,
)
request = RewardRequest(torch.tensor([[10, 20]]), torch.tensor([2]), ("",), ("",))
values = client.infer_rm(request).result().values.tolist()
print("the actor got", values, options["extra"], flush=True)
sys.exit(7)
"""

# Starts a rank, writes both process ids, and waits. SIGTERM makes it exit with code 5, SIGUSR1 with
# 6.
WAITING_ACTOR = """
import os, signal, subprocess, sys, time
options = dict(argument.split("=", 1) for argument in sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(6))
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
with open(options["pids"] + ".tmp", "w") as file:
    file.write(f"{os.getpid()} {rank.pid}")
os.replace(options["pids"] + ".tmp", options["pids"])
time.sleep(120)
"""


class Launched:
    """A launcher process and its observed descendants."""

    def __init__(self, folder: Path, server: Path, actor_code: str, *arguments: str):
        actor = folder / "actor.py"
        actor.write_text(actor_code)
        self.run_dir = folder / "run"
        self.pids = folder / "pids"
        options = [
            "--run-dir",
            str(self.run_dir),
            "--server-script",
            str(server),
            "--actor-script",
            str(actor),
        ]
        command = [sys.executable, str(LAUNCHER), *options, "--grace-seconds", "15", *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @property
    def log(self) -> Path:
        return self.run_dir / "logs" / "server.log"

    def descendants_once_running(self) -> list[psutil.Process]:
        assert wait_for(self.pids.exists, 40), "the actor did not start"
        processes = psutil.Process(self.process.pid).children(recursive=True)
        ids = {int(text) for text in self.pids.read_text().split()}
        assert ids <= {process.pid for process in processes}
        return processes

    def finish(self, seconds: float = 60.0) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, output


@pytest.fixture
def start(tmp_path):
    started = []

    def start_one(server: Path, actor_code: str, *arguments: str) -> Launched:
        started.append(Launched(tmp_path, server, actor_code, *arguments))
        return started[-1]

    yield start_one
    for launched in started:
        if launched.process.poll() is None:
            launched.process.kill()  # its reaper stops the other processes
        launched.process.communicate(timeout=30)


def gone(processes: list[psutil.Process], seconds: float = 20.0) -> list[psutil.Process]:
    """Return the processes that are still alive after a while; there should be none."""
    wait_for(lambda: not any(map(is_alive, processes)), seconds)
    return [process for process in processes if is_alive(process)]


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_real_server_and_an_actor_that_scores(start, host):
    pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")
    server_args = ["inference.max_batch_size=4", f"inference.host={host}"]
    launched = start(
        TOY_SERVER, SCORING_ACTOR, "--server-args", *server_args, "--actor-args", "extra=yes"
    )
    assert wait_for(
        lambda: launched.log.exists() and "ready at http" in launched.log.read_text(), 90
    )
    seen = psutil.Process(launched.process.pid).children(recursive=True)
    code, output = launched.finish()
    assert code == 7, output
    assert "the actor got [0.5] yes" in output
    # the launcher's line; the server's lines go to its log
    place = r"ready at http://(\[::1\]|127\.0\.0\.1):\d+"
    assert "".join(re.findall(place, output)).strip("[]") == host
    assert re.search(place, launched.log.read_text())
    assert "tritonserver" not in output
    assert "event=stopped signal=SIGTERM" in launched.log.read_text()
    assert gone(seen) == []


def test_a_server_that_dies_at_the_start_is_shown_with_its_last_lines(start):
    launched = start(
        FAKE_SERVER, WAITING_ACTOR, "--server-args", "fail", "--actor-args", "pids=unused"
    )
    code, output = launched.finish()
    assert code == 1
    assert printed_keys(output) == ["launch.server.ended"]
    assert "before it was ready, with exit code 3" in output
    assert "| the fake reward server was told to fail" in output


def test_a_server_that_dies_later_stops_the_actor(start, tmp_path):
    launched = start(FAKE_SERVER, WAITING_ACTOR, "--actor-args", f"pids={tmp_path / 'pids'}")
    processes = launched.descendants_once_running()
    server = next(process for process in processes if str(FAKE_SERVER) in process.cmdline())
    server.kill()
    code, output = launched.finish()
    assert code == 1
    assert printed_keys(output) == ["launch.server.ended"]
    assert "while the actor was running, with exit code -9" in output
    assert "| fake reward server is starting" in output
    assert gone(processes) == []


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 5), (signal.SIGUSR1, 6)])
def test_a_signal_reaches_the_actor_and_its_exit_code_comes_back(start, tmp_path, number, expected):
    launched = start(FAKE_SERVER, WAITING_ACTOR, "--actor-args", f"pids={tmp_path / 'pids'}")
    processes = launched.descendants_once_running()
    launched.process.send_signal(number)
    code, output = launched.finish()
    assert code == expected, output
    assert gone(processes) == []


def test_a_killed_launcher_leaves_nothing(start, tmp_path):
    launched = start(FAKE_SERVER, WAITING_ACTOR, "--actor-args", f"pids={tmp_path / 'pids'}")
    processes = launched.descendants_once_running()
    os.kill(launched.process.pid, signal.SIGKILL)
    launched.process.wait(10)
    assert gone(processes) == []


@pytest.mark.more
def test_a_foreign_server_on_the_port_is_not_accepted(start):
    with FakeRewardServer() as other:
        arguments = ["--server-args", f"inference.port={other.port}", "--actor-args", "pids=unused"]
        launched = start(FAKE_SERVER, WAITING_ACTOR, *arguments)
        code, output = launched.finish()
    assert code == 1
    assert f"port {other.port} of 127.0.0.1 is in use" in output
    assert not launched.log.exists()


def test_faults_of_the_actors_configuration_come_before_the_server_starts(tmp_path):
    command = [
        sys.executable,
        str(LAUNCHER),
        "--run-dir",
        str(tmp_path),
        "--actor-args",
        "trainer.devces=2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "config.key.unknown" in printed_keys(done.stderr)
    assert "trainer.devces" in done.stderr
    assert "trainer.devices" in done.stderr
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("given", "listens", "asked"),
    [
        ("::1", "::1", "::1"),
        ("::", "::", "::1"),
        ("0.0.0.0", "0.0.0.0", "127.0.0.1"),
        ("localhost", "localhost", "localhost"),
        ("'::1'", "::1", "::1"),
    ],
)
def test_the_servers_own_host_is_asked(tmp_path, given, listens, asked):
    plan = make_plan(tmp_path, [f"inference.host={given}"], [], server=("s",), actor=("a",))
    assert plan.address.host == listens
    assert plan.address.local.host == asked
    assert plan.server[2] == f"inference.host={given}"
    assert f"remote_rm.reward_model.ip={asked}" in plan.actor


def test_an_invalid_host_is_named(tmp_path):
    with raises_error("launch.host.invalid", "inference.host is 'fe80::1%eth0'"):
        make_plan(tmp_path, ["inference.host=fe80::1%eth0"], [], server=("s",), actor=("a",))


def test_port_and_token_go_to_both_sides_unless_the_user_chose(tmp_path):
    scripts = {"server": ["s"], "actor": ["a"]}
    plan = make_plan(tmp_path, ["x=1"], ["y=2"], **scripts, grace_seconds=3.0)
    assert plan.grace_seconds == 3.0
    assert plan.server == (
        sys.executable,
        "s",
        "x=1",
        "inference.host=127.0.0.1",
        f"inference.port={plan.address.port}",
    )
    assert plan.actor == (
        sys.executable,
        "a",
        "y=2",
        "remote_rm.reward_model.ip=127.0.0.1",
        f"remote_rm.reward_model.port={plan.address.port}",
        "remote_rm.reward_model.name=reward_model",
    )
    port = free_port()
    chosen = make_plan(tmp_path, [f"inference.port={port}", "inference.name=rm"], [], **scripts)
    assert chosen.address.port == port
    assert chosen.server[1:] == (
        "s",
        f"inference.port={port}",
        "inference.name=rm",
        "inference.host=127.0.0.1",
    )
    assert f"remote_rm.reward_model.port={port}" in chosen.actor
    assert "remote_rm.reward_model.name=rm" in chosen.actor
    free = make_plan(tmp_path, ["inference.port=0"], [], **scripts)
    assert free.address.port > 0
    assert override_of(free.server, "inference.port") == str(free.address.port)
    assert f"remote_rm.reward_model.port={free.address.port}" in free.actor
    token_file = tmp_path / "token"
    token_file.write_text("0123456789abcdef")
    token_file.chmod(0o600)
    guarded = make_plan(tmp_path, [f"inference.token_file={token_file}"], [], **scripts)
    assert f"remote_rm.reward_model.token_file={token_file}" in guarded.actor
    assert "0123456789abcdef" not in repr(guarded)
    with raises_error("launch.port.invalid", "inference.port is 'many'"):
        make_plan(tmp_path, ["inference.port=many"], [])


def test_arguments_are_split_in_any_order():
    argv = ["--run-dir", "r", "--actor-args", "a=1", "-m", "--server-args", "b=2", "+c=3"]
    assert split_arguments(argv) == (["--run-dir", "r"], ["b=2", "+c=3"], ["a=1", "-m"])
    assert override_of(["a=1", "+a=2"], "a") == "2"
    assert override_of(["ab=1"], "a") is None
