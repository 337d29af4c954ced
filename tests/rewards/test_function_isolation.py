"""What a hostile sample can do to other samples, of its batch and later, and to the machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers.errors import raises_error
from helpers.toy_server import is_alive, wait_for

from reinforce_rl.config.rewards import RewardFunctionConfig
from reinforce_rl.errors import ConfigError
from reinforce_rl.rewards import function_pool
from reinforce_rl.rewards.base import (
    STATUS_BAD_PROMPT,
    STATUS_INTERNAL,
    STATUS_OK,
    FunctionSpec,
    TextSample,
)
from reinforce_rl.rewards.function_pool import FunctionPool, Scores
from reinforce_rl.rewards.user_code import bubblewrap

NAME = "helpers.reward_functions."
SANDBOX = "reward_function.sandbox"
# What `runs` of helpers/reward_functions.py runs.
ATTACKS = {
    "code": "runs.__code__ = always_666.__code__",
    "float": "import builtins; builtins.float = lambda _: 666.0",
    "isfinite": "import math; math.isfinite = lambda _: False",
    "worker": "import __main__ as host; host._score = host._work = host._Host = None",
    "modules": "import sys; sys.modules.clear()",
    "alarm": "import signal; signal.setitimer(signal.ITIMER_REAL, 0.001)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "GeneratorExit": "raise GeneratorExit",
    "SystemExit": "raise SystemExit",
    "MemoryError": "raise MemoryError",
    "NoText": "raise NoText",
    "exit 0": "os._exit(0)",
    "exit 7": "os._exit(7)",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "group": "import signal; os.killpg(0, signal.SIGKILL)",
    "host": "import signal; os.kill(os.getppid(), signal.SIGKILL)",
    "memory": "value = float(len(bytearray(8 << 30)))",
    "file": "os.truncate(Path(record['folder'], 'large').open('wb').fileno(), 1 << 30)",
    "close all": "os.closerange(0, 1024); time.sleep(600)",
    "garbage": """write_to_all(b'{"status": "x"}\\n' * 9000)""",
    "nonblocking": "os.set_blocking(1, False)",
    "is blocking": "value = float(os.get_blocking(1))",
    "fork": "os.fork()",
    "child": "import subprocess; subprocess.Popen(['sleep', '6543'])",
    "forges": "forge(os.getpid())",
    "its program forges": """
import subprocess, sys
code = "from helpers.reward_functions import forge; "
code += f"forge({os.getpid()}); forge({os.getppid()})"
subprocess.run([sys.executable, "-c", code], close_fds=False, check=True)
""",
    "its fork forges": """
if os.fork() == 0:
    forge(os.getppid())
    os._exit(0)
os.wait()
""",
}


def sample(response: str, value: object = 1.0, **record: object) -> TextSample:
    return TextSample("prompt", response, {"value": value, **record})


def attack(name: str, **record: object) -> TextSample:
    return sample("", code=ATTACKS[name], **record)


def run_all(pool: FunctionPool, *samples: TextSample) -> Scores:
    scores = pool.submit("f", samples).result()
    assert "NameError" not in str(scores.faults), "an attack lacks an import"
    return scores


@contextlib.contextmanager
def started(function: str, **options) -> Iterator[FunctionPool]:
    spec = FunctionSpec("reward_function", NAME + function)
    pool = FunctionPool({"f": spec}, RewardFunctionConfig(**options))
    pool.start()
    try:
        yield pool
    finally:
        pool.close()


def run_alone(*lines: str, **options) -> subprocess.CompletedProcess[str]:
    """Run these lines in another process, as `owner_code` does."""
    code = owner_code(*lines)
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", code, tests]
    return subprocess.run(command, timeout=120, text=True, check=False, **options)


def owner_code(*lines: str) -> str:
    """Return a program of these lines; its argument is the folder of the tests.

    The lines may use `sample` and `started`.
    """
    head = (
        "import sys; sys.path.insert(0, sys.argv[1])",
        "from rewards.test_function_isolation import sample, started",
    )
    return "\n".join([*head, *lines])


def bubblewrap_or_host(pool: FunctionPool) -> psutil.Process:
    """Return the process that the pool has started."""
    assert pool._host is not None
    children = psutil.Process().children()
    (host,) = [p for p in children if p.pid == pool._host.process.pid]
    return host


@pytest.fixture(scope="module")
def pool():
    """A pool of one worker, so that each sample runs where the sample before it ran."""
    with started("runs", num_workers=1, sample_timeout_seconds=20.0) as pool:
        yield pool


STATE = ["code", "float", "isfinite", "worker", "modules", "alarm"]
ERRORS = ["KeyboardInterrupt", "GeneratorExit", "SystemExit", "MemoryError", "NoText"]
ENDS = {
    "exit 0": "exit code 0",
    "exit 7": "exit code 7",
    "segfault": "signal 11",
    "group": "signal 9",
}


@pytest.mark.parametrize(
    "bad", [*STATE, *ERRORS, *ENDS, "memory", "close all", "garbage", "fork", "child"]
)
def test_whatever_one_sample_does_the_others_have_their_scores(pool, bad):
    samples = [sample("", 2.0 + i) for i in range(6)]
    scores = run_all(pool, sample("", 0.5), attack(bad), *samples)
    others = [0, 2, 3, 4, 5, 6, 7]
    assert scores.values[others].tolist() == [0.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert scores.status[others].tolist() == [STATUS_OK] * 7
    has_failed = scores.status[1] != STATUS_OK
    assert np.isnan(scores.values[1]) == has_failed
    if bad in (*ERRORS, *ENDS, "memory"):
        assert scores.status[1] == STATUS_INTERNAL


def test_flags_of_the_output_are_not_those_of_later_samples(pool):
    scores = run_all(pool, attack("nonblocking"), attack("is blocking"))
    assert scores.values[1] == 1.0


@pytest.mark.parametrize("key", ["status", "value"])
@pytest.mark.parametrize("number", ["999", "1" + 30 * "0", "1" + 400 * "0", "-1"])
def test_an_answer_that_a_function_writes_itself_stays_with_its_sample(pool, key, number):
    """The function does not know the prefix of an answer, so only its own sample fails."""
    answer = {"status": "0", "value": "1.0", key: number}
    forged = f'"status": {answer["status"]}, "value": {answer["value"]}, "fault": "", "message": ""'
    line = f"{{{forged}}}\n".encode()
    forging = sample("", code=f"write_to_all({line}); os._exit(0)")
    samples = [sample("", 0.5), forging, sample("", 1.5)]
    scores = pool.submit("f", samples).result()
    assert scores.values[[0, 2]].tolist() == [0.5, 1.5]
    assert scores.status[[0, 2]].tolist() == [STATUS_OK] * 2
    assert scores.status[1] == STATUS_INTERNAL
    last_scores = pool.submit("f", [sample("", 2.5)]).result()
    assert last_scores.values.tolist() == [2.5]


@pytest.mark.parametrize("how", ["forges", "its program forges", "its fork forges"])
def test_an_answer_that_is_forged_is_no_score(pool, how):
    scores = run_all(pool, sample("", 0.5), attack(how), sample("", 1.5))
    assert scores.values[[0, 2]].tolist() == [0.5, 1.5]
    # The sample has its own score if the forged line was ignored, and never the forged score.
    assert scores.status[1] == STATUS_INTERNAL or scores.values[1] == 1.0


def test_a_module_that_keeps_a_file_open_is_refused(tmp_path, monkeypatch):
    (tmp_path / "table.txt").write_text("letters")
    code = (
        "HANDLE = open({!r})\n"
        "def f(prompt, response, record):\n"
        "    return float(len(HANDLE.read()))\n"
    )
    (tmp_path / "keeps_a_file.py").write_text(code.format(str(tmp_path / "table.txt")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = FunctionPool(
        {"f": FunctionSpec("reward_function", "keeps_a_file.f")}, RewardFunctionConfig()
    )
    table = (tmp_path / "table.txt").resolve()
    with raises_error("reward_function.module.keeps_file_open", "keeps_a_file.f", table):
        pool.start()
    pool.close()


def test_a_log_that_is_full_holds_up_nobody():
    with open("/dev/full", "w") as full:
        done = run_alone(
            "with started('prints', num_workers=1, sample_timeout_seconds=20.0) as pool:",
            "    scores = pool.submit('f', [sample('')] * 5).result()",
            "    sys.stdout.write(str(scores.values.tolist()))",
            stdout=subprocess.PIPE,
            stderr=full,
        )
    assert done.stdout == "[1.0, 1.0, 1.0, 1.0, 1.0]"


@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_ended_is_no_time_out(pool, end):
    scores = pool.submit("f", [attack(end)]).result()
    assert scores.status.tolist() == [STATUS_INTERNAL]
    assert ENDS[end] in scores.faults[0]


def test_a_file_cannot_fill_the_disk(pool, tmp_path):
    scores = run_all(pool, attack("file", folder=str(tmp_path)))
    assert scores.status[0] == STATUS_INTERNAL
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0]


def test_what_a_sample_started_ends_with_it(pool):
    run_all(pool, attack("child"))
    time.sleep(0.1)
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "6543"]
    ]


def test_a_record_that_is_nested_too_deeply_fails_alone(pool):
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    samples = [sample("", 1.0), sample("", 2.0, deep=deep), sample("", 3.0)]
    scores = pool.submit("f", samples).result()
    assert scores.status.tolist() == [STATUS_OK, STATUS_BAD_PROMPT, STATUS_OK]
    assert scores.values[[0, 2]].tolist() == [1.0, 3.0]


@pytest.mark.parametrize("odd", ["\ud800", "\x00", "\n", '"}\n{"', "é" * 3_000_000])
def test_odd_texts_are_scored(pool, odd):
    samples = [sample(odd, 1.0), sample("", 2.0)]
    scores = pool.submit("f", samples).result()
    assert scores.values.tolist() == [1.0, 2.0]


def test_secrets_are_not_in_the_functions_environment(monkeypatch):
    monkeypatch.setenv("REINFORCE_REWARD_TOKEN", "secret")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    names = ["REINFORCE_REWARD_TOKEN", "WANDB_API_KEY", "PATH", "PYTHONPATH"]
    with started("sees") as pool:
        samples = [sample(f"variable {name}") for name in names]
        scores = pool.submit("f", samples).result()
    assert scores.values.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_which_variables_a_function_sees(monkeypatch):
    given = {
        "HF_HOME": "/cache",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": "/cache",
        "SSL_CERT_DIR": "/certificates",
        "CUDA_VISIBLE_DEVICES": "1",
        "https_proxy": "http://proxy.example:3128",
        "NO_PROXY": "127.0.0.1,.example",
    }
    secret = {
        "HF_TOKEN": "x",
        "HUGGING_FACE_HUB_TOKEN": "x",
        "OPENAI_API_KEY": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "HTTP_PROXY": "http://user:word@proxy.example:3128",
        "ALL_PROXY": "user:word@proxy.example:3128",
    }
    for name, value in {**given, **secret}.items():
        monkeypatch.setenv(name, value)
    with started("sees") as pool:
        names = [*given, *secret]
        samples = [sample(f"variable {name}") for name in names]
        scores = pool.submit("f", samples).result()
    expected = [1.0] * len(given) + [0.0] * len(secret)
    assert scores.values.tolist() == expected


def test_a_variable_that_is_named_is_seen_as_it_is(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://user:word@proxy.example:3128")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with started("sees", environment=["HTTP_PROXY"]) as pool:
        more_samples = [sample("variable HTTP_PROXY"), sample("threads")]
        scores = pool.submit("f", more_samples).result()
        assert scores.values.tolist() == [1.0, 1.0]
    with started("sees", environment=["OMP_NUM_THREADS"]) as pool:
        last_scores = pool.submit("f", [sample("threads")]).result()
        assert last_scores.values.tolist() == [3.0]


def bubblewrap_fault() -> str:
    try:
        bubblewrap([], SANDBOX)
    except ConfigError as error:
        return str(error)
    return ""


needs_bubblewrap = pytest.mark.skipif(bool(bubblewrap_fault()), reason=bubblewrap_fault() or "-")


@needs_bubblewrap
class TestSandbox:
    @pytest.fixture
    def sandboxed(self):
        with started("sees", sandbox=True, sample_timeout_seconds=10.0) as pool:
            yield pool

    def test_what_a_function_reaches(self, sandboxed, tmp_path):
        (tmp_path / "secret").write_text("token")
        here = str(Path(__file__).parent)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            kinds = {
                f"port {port}": 0.0,
                f"process {os.getpid()}/cmdline": 0.0,
                f"path {tmp_path}/secret": 0.0,
                "path /etc/passwd": 0.0,
                "path /run": 0.0,
                f"writes {here}/written": 0.0,
                f"writes {sys.prefix}/written": 0.0,
                "writes /written": 0.0,
                "writes /tmp/written": 1.0,
                "writes /dev/shm/written": 1.0,
                f"path {__file__}": 1.0,
            }
            scores = sandboxed.submit("f", [sample(kind) for kind in kinds]).result()
        assert dict(zip(kinds, scores.values.tolist(), strict=True)) == kinds

    @pytest.mark.parametrize("folder", ["/", "/tmp", "/dev"])
    def test_a_current_folder_that_holds_the_whole_machine_is_not_shown(
        self, folder, monkeypatch, tmp_path
    ):
        (tmp_path / "secret").write_text("token")
        monkeypatch.chdir(folder)
        kinds = {
            "opens /etc/shadow": 0.0,
            "opens /etc/hostname": 0.0,
            f"opens {tmp_path}/secret": 0.0,
            f"process {os.getpid()}": 0.0,
            "writes /tmp/written": 1.0,
        }
        with started("sees", sandbox=True, sample_timeout_seconds=10.0) as pool:
            samples = [sample(kind) for kind in [*kinds, "processes"]]
            scores = pool.submit("f", samples).result()
        assert dict(zip(kinds, scores.values.tolist(), strict=False)) == kinds
        assert scores.values[-1] < 12, "its own processes alone"

    @pytest.mark.parametrize("folder", ["/", "/tmp", "/proc"])
    def test_folders_that_hold_the_whole_machine_are_refused(self, folder):
        key = "reward_function.sandbox.folder_too_wide"
        with raises_error(key, "reward_function.sandbox", f" {folder}, "):
            bubblewrap([folder], SANDBOX)

    @pytest.mark.parametrize("how", ["forges", "its program forges", "its fork forges"])
    def test_an_answer_that_is_forged_is_no_score(self, how):
        with started("runs", sandbox=True, num_workers=1, sample_timeout_seconds=10.0) as pool:
            scores = run_all(pool, sample("", 0.5), attack(how), sample("", 1.5))
        assert scores.values[[0, 2]].tolist() == [0.5, 1.5]
        assert scores.status[1] == STATUS_INTERNAL or scores.values[1] == 1.0

    def test_the_same_without_a_sandbox_is_reached(self, tmp_path):
        """This shows that the test with a sandbox can fail."""
        with started("sees") as pool, socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            process = os.getpid()
            kinds = [f"port {port}", f"process {process}", f"writes {tmp_path}/written"]
            scores = pool.submit("f", [sample(kind) for kind in kinds]).result()
            assert scores.values.tolist() == [1.0] * 3

    def test_scores_and_failures_are_those_without_it(self):
        kinds = ["", "code", "", "exit 7", "segfault", "memory", "KeyboardInterrupt", "host", ""]
        with started("runs", sandbox=True, num_workers=1, sample_timeout_seconds=5.0) as pool:
            scores = run_all(pool, *[attack(kind) if kind else sample("") for kind in kinds])
        assert scores.values[[0, 2, 8]].tolist() == [1.0, 1.0, 1.0]
        assert scores.status[3:7].tolist() == [STATUS_INTERNAL] * 4

    def test_the_provided_functions_work_in_it(self):
        spec = FunctionSpec("reward_function", "reinforce_rl.rewards.functions.gsm8k")
        pool = FunctionPool({"f": spec}, RewardFunctionConfig(sandbox=True))
        pool.start()
        try:
            samples = [
                TextSample("", "the answer is 72", {"answer": text}) for text in ("72", "73")
            ]
            scores = pool.submit("f", samples).result()
            assert scores.values.tolist() == [1.0, 0.0]
        finally:
            pool.close()

    def test_what_samples_started_is_reaped(self):
        with started("runs", sandbox=True) as pool:
            run_all(pool, *[attack("child")] * 8)

            def all_reaped() -> bool:
                """Submit one more sample first: killed processes may take a while to end."""
                pool.submit("f", [sample("")]).result()
                return len(bubblewrap_or_host(pool).children(recursive=True)) == 1

            assert wait_for(all_reaped)

    def test_nothing_is_left_of_it_when_its_owner_is_killed(self):
        code = owner_code(
            "with started('runs', sandbox=True, sample_timeout_seconds=600.0) as pool:",
            "    pending = pool.submit('f', [sample('', code='while True: pass')] * 2)",
            "    print('ready', flush=True)",
            "    pending.result()",
        )
        tests = str(Path(__file__).parents[1])
        owner = subprocess.Popen([sys.executable, "-c", code, tests], stdout=subprocess.PIPE)
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"ready\n"
            running = psutil.Process(owner.pid)
            assert wait_for(lambda: len(running.children(recursive=True)) == 4, 60), (
                "bubblewrap, host, two samples"
            )
            processes = running.children(recursive=True)
        finally:
            owner.kill()
            owner.wait()
        assert wait_for(lambda: not any(map(is_alive, processes)), 20), processes


def test_a_sandbox_that_cannot_be_made_ends_the_start(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    setting = "reward_function.sandbox is true"
    with raises_error("reward_function.sandbox.no_bubblewrap", setting, "'bwrap'"):
        started("sees", sandbox=True).__enter__()
    program = tmp_path / "bwrap"
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "sys.exit('bwrap: No permissions to create new namespace')\n"
    )
    program.chmod(0o755)
    said = "bwrap: No permissions to create"
    with raises_error("reward_function.sandbox.not_working", setting, said):
        started("sees", sandbox=True).__enter__()


@pytest.mark.more
def test_a_host_that_hangs_fails_its_batch_and_the_next_has_another(monkeypatch):
    monkeypatch.setattr(function_pool, "SLACK_SECONDS", 1.0)
    with started("runs", sample_timeout_seconds=1.0) as pool:
        host = bubblewrap_or_host(pool)
        host.suspend()
        with raises_error("reward_function.processes.no_answer"):
            pool.submit("f", [sample("")]).result()
        assert wait_for(lambda: not is_alive(host), 60)
        assert wait_for(lambda: pool._host is not None and pool._host.ended, 60)
        scores = pool.submit("f", [sample("", 3.0)]).result()
        assert scores.values.tolist() == [3.0]


@pytest.mark.parametrize(
    ("how", "key"),
    [
        ("os._exit(9)", "reward_function.processes.not_ready"),
        ("raise KeyboardInterrupt", "reward_function.module.import_failed"),
        ("raise SystemExit(3)", "reward_function.module.import_failed"),
    ],
)
def test_a_module_that_ends_its_import_is_named(how, key, tmp_path, monkeypatch):
    (tmp_path / "ends_when_imported.py").write_text(f"import os\n{how}\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = FunctionSpec("reward_function", "ends_when_imported.reward")
    pool = FunctionPool({"f": spec}, RewardFunctionConfig())
    with raises_error(key, "ends_when_imported"):
        pool.start()


def test_what_functions_print_does_not_count_as_their_files(tmp_path):
    """A log may be longer than the limit on files that a function writes."""
    log = tmp_path / "log"
    with log.open("ab") as file:
        file.truncate((64 << 20) + 1)
        done = run_alone(
            "with started('runs') as pool:",
            "    code = \"print('this must not get between the answers', flush=True)\"",
            "    scores = pool.submit('f', [sample('', 2.0, code=code)]).result()",
            "    assert scores.values.tolist() == [2.0]",
            stdout=file,
            stderr=file,
        )
    assert done.returncode == 0
    with log.open("rb") as file:
        file.seek(64 << 20)
        assert b"this must not get between the answers" in file.read()
