"""Child processes: how they end, and that they end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from helpers.toy_server import is_alive, wait_for

from reinforce_rl.utils.process import Child, Message, ModuleChild, without_secrets

STUBBORN = (
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
)
ECHO = """
from reinforce_rl.utils.process import connect_to_parent, receive, send
connection = connect_to_parent()
while (message := receive(connection)) is not None:
    connection.send_bytes(b"no JSON") if message == "garbage" else send(connection, message)
"""


def python(code: str, **options) -> Child:
    return Child([sys.executable, "-c", code], **options)


@pytest.fixture
def echo(tmp_path, monkeypatch):
    """A ModuleChild that returns its messages, and the list of received ones."""
    (tmp_path / "echo_of_tests.py").write_text(ECHO)
    folders = [str(tmp_path), str(Path(__file__).parents[2])]
    came: list[Message | None] = []
    child = ModuleChild(
        "echo_of_tests", came.append, env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    )
    yield child, came
    child.kill()


LIMITED = """
import os, resource, sys
from reinforce_rl.utils.process import limit_memory
before, fraction = sys.argv[1:]
hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
resource.setrlimit(resource.RLIMIT_DATA, (int(before), hard))
limit_memory(float(fraction))
limit, hard_after = resource.getrlimit(resource.RLIMIT_DATA)
assert hard_after == hard
machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
bytearray(limit // 4)
try:
    bytearray(limit)
except MemoryError:
    print(limit / machine, limit)
"""
UNLIMITED = -1


@pytest.mark.parametrize(
    ("before", "expected_bytes"),
    [(UNLIMITED, None), (1 << 60, None), (200 << 20, 200 << 20)],
)
def test_memory_beyond_a_fraction_of_the_machines_is_not_given(before, expected_bytes):
    fraction = 0.05
    command = [sys.executable, "-c", LIMITED, str(before), str(fraction)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    share, limit = done.stdout.split()
    if expected_bytes is None:
        assert float(share) == pytest.approx(fraction, rel=1e-6)
    else:
        assert int(limit) == expected_bytes


def test_a_child_that_ignores_sigterm_is_killed_and_another_is_not():
    stubborn = python(STUBBORN, stdout=subprocess.PIPE)
    assert stubborn.process.stdout is not None
    assert stubborn.process.stdout.readline()
    assert stubborn.wait(0.0) is None
    assert stubborn.exit_code is None
    stubborn.stop(0.1)
    assert stubborn.exit_code == -signal.SIGKILL
    stubborn.stop(0.1)
    stubborn.process.stdout.close()
    obedient = python("import time; time.sleep(600)")
    obedient.stop(60.0)
    assert obedient.exit_code == -signal.SIGTERM


def test_what_a_child_started_ends_with_it():
    child = Child(["sh", "-c", "sleep 600 & echo $!"], stdout=subprocess.PIPE)
    assert child.process.stdout is not None
    grandchild = psutil.Process(int(child.process.stdout.readline()))
    assert child.wait(30.0) == 0
    assert is_alive(grandchild)
    child.kill()
    assert wait_for(lambda: not is_alive(grandchild), 30)
    child.process.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
def test_a_child_dies_with_a_parent_that_is_killed():
    code = "from reinforce_rl.utils.process import Child; import time; "
    code += "print(Child(['sleep', '600'], death_signal=9).pid, flush=True); time.sleep(600)"
    parent = python(code, stdout=subprocess.PIPE)
    assert parent.process.stdout is not None
    child = psutil.Process(int(parent.process.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    assert wait_for(lambda: not is_alive(child), 30)
    parent.kill()
    parent.process.stdout.close()


def test_messages_come_back_and_the_end_is_one_too(echo):
    child, came = echo
    child.send({"text": "é" * 100_000})
    assert wait_for(lambda: came == [{"text": "é" * 100_000}], 60)
    assert child.fault(60.0) is None
    child.stop(60.0)
    assert child.exit_code == 0
    assert wait_for(lambda: came[-1] is None, 30)
    assert child.fault(60.0) == f"died (process {child.pid}, exit code 0)"
    child.send({})  # nobody reads any more


def test_a_child_that_writes_garbage_counts_as_gone(echo):
    child, came = echo
    child.connection.send_bytes(b'"garbage"')
    assert wait_for(lambda: came == [None], 60)


def test_a_stop_does_not_wait_for_what_is_being_sent(echo):
    child, _ = echo
    child.send({})
    psutil.Process(child.pid).suspend()
    sender = threading.Thread(target=child.send, args=({"text": "x" * 10_000_000},))
    sender.start()
    child.stop(0.1)
    sender.join(30.0)
    assert not sender.is_alive()
    assert child.exit_code == -signal.SIGKILL


def test_secrets_stay_out_of_programs_of_others():
    secret = [
        "REINFORCE_REWARD_TOKEN",
        "WANDB_API_KEY",
        "OPENAI_APIKEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "token",
        "PGPASSWORD",
        "OPENAI_KEY",
        "GITHUB_PAT",
        "DOCKER_AUTH_CONFIG",
    ]
    plain = [
        "PATH",
        "TOKENIZERS_PARALLELISM",
        "KEYBOARD",
        "CUDA_VISIBLE_DEVICES",
        "LD_LIBRARY_PATH",
        "MONKEY",
    ]
    assert list(without_secrets(dict.fromkeys([*secret, *plain], "x"))) == plain
