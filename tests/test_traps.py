"""Folders full of traps, opened by every command that takes a folder, by this and another user."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import traps
from helpers.other_user import NOBODY
from helpers.tiny_run import tiny_config, tiny_overrides

from reinforce_rl.trainer.run import train
from reinforce_rl.utils.process import PACKAGE_PARENT

DRIVER = Path(__file__).parent / "helpers" / "open_folders.py"
REWARD = "helpers.reward_functions.counted"
SECONDS = 60.0  # for a command on a busy machine
MEBIBYTES = 2500.0
SLOW = pytest.mark.slow
SHORT = ["model.encoder_seq_length=16", "model.reinforce.length_params.max_length=5"]


class Listener:
    """Counts the connections to a port of this machine."""

    def __init__(self) -> None:
        self.connections = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            self.connections += 1
            connection.close()


@dataclass(frozen=True)
class Trapped:
    root: Path
    folders: dict[str, Path]
    bait: traps.Bait
    listener: Listener
    overrides: list[str]  # a run of the reader


@pytest.fixture(scope="module")
def trapped() -> Iterator[Trapped]:
    # pytest's own folders are closed to other users.
    root = Path(tempfile.mkdtemp(prefix="traps-"))
    try:
        root.chmod(0o755)
        listener = Listener()
        source = root / "source"
        source.mkdir()
        settings = [
            "trainer.reinforce.save_interval=2",
            "trainer.reinforce.val_check_interval=4",
            "exp_manager.checkpoint_callback_params.save_hf_on_train_end=true",
        ]
        reward = ["reward=function", f"reward_function.name={REWARD}"]
        train(tiny_config(source, *settings, *reward))
        secret_file = root / "secret"
        secret_file.write_text(traps.SECRET)
        bait = traps.Bait(root / "marker", listener.port, secret_file)
        bait.marker.write_text("")
        bait.marker.chmod(0o666)
        (root / "out").mkdir()
        (root / "out").chmod(0o777)
        folders = traps.make_traps(root / "made", source / "run", source / "model", bait)
        overrides = [*tiny_overrides(source), *settings, *reward]
        yield Trapped(root, folders, bait, listener, overrides)
    finally:
        shutil.rmtree(root)


def open_all(
    trapped: Trapped, requests: list[dict[str, Any]], prefix: Sequence[str]
) -> list[dict[str, Any]]:
    """Run the commands in a program that `prefix` starts."""
    command = [*prefix, sys.executable, str(DRIVER)]
    asked = {"marker": str(trapped.bait.marker), "requests": requests}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([PACKAGE_PARENT, str(DRIVER.parents[1])]),
        "READERS_SECRET": traps.SECRET,
        "REINFORCE_REWARD_TOKEN": traps.SECRET,
        "OMP_NUM_THREADS": "1",
        "HOME": str(trapped.root / "out"),
        "COLUMNS": "300",
    }
    options = {"env": environment, "capture_output": True, "text": True, "cwd": "/"}
    limit = 60 + sum(request["deadline"] for request in requests)
    done = subprocess.run(command, input=json.dumps(asked), timeout=limit, check=False, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def request(folder: Path, *arguments: object, start: Path | None = None) -> dict[str, Any]:
    """Return a command that starts in the folder that it opens, unless `start` is given."""
    words = [str(argument) for argument in arguments]
    shown = " ".join(word for word in words if "=" not in word)
    name = f"{folder.name}: {shown}"
    return {"name": name, "arguments": words, "folder": str(start or folder), "deadline": SECONDS}


def commands_of_run(trapped: Trapped, name: str) -> list[dict[str, Any]]:
    run = trapped.folders[name]
    good = trapped.folders["good"]
    model = trapped.folders["good_model"]
    prompts = trapped.root / "source" / "validation.jsonl"
    out = trapped.root / "out"
    mine = ["reward=function", f"reward_function.name={REWARD}"]
    return [
        request(run, "records", run),
        request(run, "diff", run, good),
        request(run, "diff", good, run),
        request(run, "compare", trapped.root / "source" / "run", run),
        request(run, "report", run),
        request(run, "replay", run, "--step", "1:"),
        request(run, "replay", run, "trainer.reinforce.advantage_estimator=none"),
        request(run, "replay", run),
        request(run, "replay", run, *mine),
        request(run, "eval", model, "--like", run, "--data", prompts),
        request(run, "eval", run, "--data", prompts, "--reward", REWARD, *SHORT),
        request(run, "chat", run),
        request(run, "convert", "to-hf", run, out / f"hf-{name}", "--model", model),
        # A user who starts a run in a folder has functions there.
        request(
            run, "preflight", *trapped.overrides, f"exp_manager.explicit_log_dir={run}", start=out
        ),
        request(run, "train", *trapped.overrides, f"exp_manager.explicit_log_dir={run}", start=out),
    ]


def commands_of_model(trapped: Trapped, name: str) -> list[dict[str, Any]]:
    model = trapped.folders[name]
    prompts = trapped.root / "source" / "validation.jsonl"
    out = trapped.root / "out"
    of_model = [*trapped.overrides, f"pretrained_checkpoint.restore_from_path={model}"]
    chats = [
        *of_model,
        "model.data.apply_chat_template=true",
        f"exp_manager.explicit_log_dir={out / name}",
    ]
    return [
        request(model, "chat", model),
        request(model, "eval", model, "--data", prompts, "--reward", REWARD, *SHORT),
        request(model, "convert", "to-megatron", model, out / f"megatron-{name}"),
        request(model, "preflight", *chats, start=out),
        request(model, "train", *chats, start=out),
    ]


def faults(trapped: Trapped, answer: dict[str, Any]) -> list[str]:
    """Return the effects of a command that a folder must not cause."""
    output = answer["output"]
    wrong = []
    if answer["marker"]:
        wrong.append(f"ran {answer['marker'].split()}")
    if answer["code"] is None:
        wrong.append(f"did not end in {SECONDS:g} s")
    elif answer["code"] < 0:
        wrong.append(f"died of signal {-answer['code']}")
    if "Traceback" in output:
        wrong.append(f"a traceback: {output[-600:]}")
    if traps.SECRET in output:
        wrong.append("showed the secret")
    if controls := {character for character in output if _is_control(character)}:
        wrong.append(f"wrote {sorted(controls)} to the terminal")
    if answer["peak_mib"] > MEBIBYTES:
        wrong.append(f"took {answer['peak_mib']:.0f} MiB")
    return wrong


def _is_control(character: str) -> bool:
    if character in "\n\t\r":
        return False
    return (
        ord(character) < 0x20
        or 0x7F <= ord(character) < 0xA0
        or character in "\u202a\u202b\u202d\u202e\u2066\u2067"
    )


def check(
    trapped: Trapped, requests: list[dict[str, Any]], prefix: Sequence[str] = ()
) -> list[dict[str, Any]]:
    before = trapped.listener.connections
    answers = open_all(trapped, requests, prefix)
    wrong = {answer["name"]: faults(trapped, answer) for answer in answers}
    assert {name: sentences for name, sentences in wrong.items() if sentences} == {}
    assert trapped.listener.connections == before, "nothing is sent to an address of the folder"
    return answers


def kinds_of(answer: dict[str, Any], trapped: Trapped) -> list[str]:
    return [fault.split(" [")[0].split(":")[0] for fault in faults(trapped, answer)]


def test_each_fault_is_seen(trapped):
    """This shows that the other tests can fail."""
    good = {
        "name": "a",
        "code": 1,
        "output": "a\tb\r\n",
        "seconds": 1.0,
        "peak_mib": 100.0,
        "marker": "",
    }
    assert faults(trapped, good) == []
    assert kinds_of({**good, "marker": "called\n"}, trapped) == ["ran"]
    assert kinds_of({**good, "code": None}, trapped) == ["did not end in 60 s"]
    assert kinds_of({**good, "code": -9}, trapped) == ["died of signal 9"]
    assert kinds_of({**good, "output": "Traceback (most"}, trapped) == ["a traceback"]
    shows_secret = {**good, "output": f"a {traps.SECRET}"}
    assert kinds_of(shows_secret, trapped) == ["showed the secret"]
    assert kinds_of({**good, "output": "\x1b[2J"}, trapped) == ["wrote"]
    assert kinds_of({**good, "output": "\x9b"}, trapped) == ["wrote"]
    assert kinds_of({**good, "output": "\u202e"}, trapped) == ["wrote"]
    assert kinds_of({**good, "peak_mib": 2501.0}, trapped) == ["took 2501 MiB"]


@pytest.mark.more
def test_what_the_reader_names_runs_and_is_asked(trapped):
    """The bait's code writes its marker and the listener counts if the command line names them."""
    run = trapped.folders["code_beside_it"]
    model = trapped.folders["good_model"]
    prompts = trapped.root / "source" / "validation.jsonl"
    server = [
        "remote_rm.reward_model.ip=127.0.0.1",
        f"remote_rm.reward_model.port={trapped.listener.port}",
    ]
    asked = [value for value in trapped.overrides if not value.startswith("reward")]
    asked += ["reward=server", *server, "remote_rm.ready_timeout_seconds=2"]
    out = trapped.root / "out"
    named = [
        request(run, "eval", model, "--data", prompts, "--reward", "trap.run", *SHORT),
        request(run, "train", *asked, f"exp_manager.explicit_log_dir={out / 'asks'}", start=out),
    ]
    before = trapped.listener.connections
    function, server_run = open_all(trapped, named, ())
    assert "called" in function["marker"], function["output"]
    assert trapped.listener.connections > before, server_run["output"]


@pytest.mark.more
def test_a_new_process_takes_no_module_from_the_folder(trapped):
    """The other tests fork a process that has already imported much."""
    script = Path(sys.executable).with_name("reinforce-rl")
    if not script.exists():
        pytest.skip("reinforce-rl is not installed beside this Python")
    trapped.bait.marker.write_text("")
    for name in ("code_beside_it", "good"):
        run = trapped.folders[name]
        done = subprocess.run(
            [str(script), "records", str(run)],
            cwd=run,
            env={
                **os.environ,
                "PYTHONPATH": PACKAGE_PARENT,
                "OMP_NUM_THREADS": "1",
                "COLUMNS": "300",
            },
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert trapped.bait.marker.read_text() == ""


def slow_but_for(names: Iterable[str], fast: Collection[str]) -> list[Any]:
    return [name if name in fast else pytest.param(name, marks=SLOW) for name in names]


@pytest.mark.more
@pytest.mark.parametrize("trap", slow_but_for(traps.RUN_TRAPS, {"code_beside_it", "pickles"}))
def test_runs(trap, trapped):
    check(trapped, commands_of_run(trapped, trap))


@pytest.mark.more
@pytest.mark.parametrize("trap", slow_but_for(traps.MODEL_TRAPS, {"model_code_alone"}))
def test_models(trap, trapped):
    check(trapped, commands_of_model(trapped, trap))


@pytest.mark.more
def test_good_folders_are_opened(trapped):
    """This shows that the other tests can fail: the same commands, on the folders without traps."""
    commands = [*commands_of_run(trapped, "good"), *commands_of_model(trapped, "good_model")]
    answers = check(trapped, commands)
    failed = []
    for answer in answers:
        if answer["code"]:
            failed.append((answer["name"], answer["code"], answer["output"][-400:]))
    # The run names its reward function, which neither scores again nor serves `eval`.
    assert [code for _, code, _ in failed] == [2, 1], failed
    assert failed[0][2].rstrip().endswith("not replayed: score.")
    assert REWARD in failed[1][2]


def another_user() -> list[str]:
    """Return the prefix that runs a command as another user who can start this Python."""
    if os.geteuid() != 0:
        pytest.skip("only root can run programs as another user")
    # Python may lie in root's home, which is closed to others.
    homes = sorted(
        {str(Path(sys.base_prefix).resolve()), str(Path(sys.prefix).resolve()), PACKAGE_PARENT}
    )
    bound: list[str] = []
    for home in map(Path, homes):
        if home.is_relative_to("/root"):
            # bwrap would create them for root alone.
            for parent in reversed([home, *home.parents][:-2]):
                bound += ["--perms", "0755", "--dir", str(parent)]
            bound += ["--ro-bind", str(home), str(home)]
    prefix = [
        "bwrap",
        "--bind",
        "/",
        "/",
        "--dev-bind",
        "/dev",
        "/dev",
        "--tmpfs",
        "/root",
        *bound,
        "--",
    ]
    prefix += ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    try:
        done = subprocess.run(
            [*prefix, sys.executable, "-c", "import torch"],
            capture_output=True,
            timeout=100,
            cwd="/",
        )
    except FileNotFoundError as error:
        pytest.skip(f"{error.filename} is not installed")
    if done.returncode:
        pytest.skip(f"another user cannot run this Python: {done.stderr.decode()[-300:]}")
    return prefix


@SLOW
def test_as_another_user(trapped):
    """The folders belong to root, and this user may not write there."""
    requests = []
    for trap in traps.RUN_TRAPS:
        of_trap = commands_of_run(trapped, trap)
        requests += [
            command for command in of_trap if command["arguments"][0] not in ("preflight", "train")
        ]
    for trap in traps.MODEL_TRAPS:
        requests += commands_of_model(trapped, trap)[:2]
    check(trapped, requests, another_user())
