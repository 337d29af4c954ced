"""The command `reinforce-rl`, as a user types it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import printed_keys
from typer.main import get_command

from reinforce_rl import __version__
from reinforce_rl.launch import main
from reinforce_rl.launch.main import _prepare, app
from reinforce_rl.launch.terminal import plain_errors

ROOT = Path(__file__).parents[2]
COMMANDS: Any = get_command(app)


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m reinforce_rl WORDS` in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "reinforce_rl", *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env=environment,
    )


@pytest.mark.more
@pytest.mark.parametrize("words", [["records"], ["report"], ["diff", "."], ["compare"], ["chat"]])
def test_a_command_that_opens_a_folder_imports_nothing_from_it(tmp_path, words):
    """Libraries look for optional modules; the folder may contain modules of the same names."""
    for name in ("pickle5", "pytz", "bottleneck", "apex", "einops", "flash_attn", "gmpy2", "lz4"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'a').write(__name__ + ' ')\n")
    command(tmp_path, *words, ".")
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def process_as_before(monkeypatch):
    """Restore the process state that a command changes."""
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "--config-dir", "."], True),
        (["submit", "--config-dir", "."], True),
        (["eval", "model", "--reward", "mine.f"], True),
        (["replay", "run", "+reward_function.name=mine.f"], True),
        (["replay", "run", "model.optim.lr=1"], False),
        (["records", "run"], False),
        ([], False),
    ],
)
@pytest.mark.usefixtures("process_as_before")
def test_the_current_folder_is_searched_for_user_code(tmp_path, monkeypatch, words, expected):
    monkeypatch.setattr(main, "limit_memory", lambda fraction: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    os.environ.pop("PYTHONSAFEPATH", None)
    _prepare(words)
    assert (str(tmp_path) in sys.path) is expected
    assert ("PYTHONSAFEPATH" in os.environ) is not expected
    sys.path.insert(0, "")  # as `python -c` does
    _prepare(words)
    assert (sys.path[0] == "") is expected
    sys.path.insert(0, str(tmp_path))  # as `python -m cProfile` does
    _prepare(words)
    assert (sys.path[0] == str(tmp_path)) is expected


@pytest.mark.usefixtures("process_as_before")
def test_commands_that_only_read_runs_take_at_most_half_of_the_memory(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    fractions = []
    monkeypatch.setattr(main, "limit_memory", fractions.append)
    limited = set()
    for name in COMMANDS.commands:
        _prepare([name, "run"])
        if fractions:
            limited.add(name)
            assert fractions == [0.5]
            fractions.clear()
    assert limited == {"records", "report", "compare", "dashboard"}


def test_a_command_that_runs_out_of_memory_says_so(capsys):
    with pytest.raises(SystemExit) as ended, plain_errors():
        bytearray(1 << 60)
    assert ended.value.code == 1
    assert printed_keys(capsys.readouterr().err) == ["memory.used_up"]


def test_help_names_every_command_and_loads_no_heavy_library(tmp_path: Path) -> None:
    done = command(tmp_path, "--help")
    assert done.returncode == 0, done.stderr
    assert set(COMMANDS.commands) <= set(re.findall(r"[\w-]+", done.stdout))
    code = "import sys, reinforce_rl.launch.main; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert {"typer", "reinforce_rl"} <= set(loaded.stdout.split())
    assert {"torch", "transformers", "megatron", "hydra", "aiohttp"} & set(
        loaded.stdout.split()
    ) == set()


def test_the_version(tmp_path: Path) -> None:
    assert command(tmp_path, "--version").stdout == f"{__version__}\n"


def test_the_page_names_every_command() -> None:
    rows = [
        line.split("|")[1]
        for line in (ROOT / "docs" / "cli.md").read_text("utf-8").splitlines()
        if "|" in line
    ]
    assert set(COMMANDS.commands) <= {
        name for row in rows for name in re.findall(r"`([\w-]+)`", row)
    }


@pytest.mark.parametrize("name", sorted(set(COMMANDS.commands)))
def test_every_command_says_what_it_does(name: str) -> None:
    assert len(COMMANDS.commands[name].get_short_help_str(200)) > 20


@pytest.mark.more
def test_an_error_is_not_taken_for_a_difference(tmp_path: Path) -> None:
    for words in (["diff", ".", "."], ["diff", "absent", ".", "--json", "."], ["replay", "."]):
        done = command(tmp_path, *words)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert done.stderr.startswith("error: "), done


def test_a_wrong_key_is_one_message_and_a_wrong_command_gets_a_hint(tmp_path: Path) -> None:
    wrong = command(tmp_path, "train", "trainer.devces=2")
    assert wrong.returncode == 1
    assert "config.key.unknown" in printed_keys(wrong.stderr)
    assert "trainer.devces" in wrong.stderr
    assert "trainer.devices" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    typo = command(tmp_path, "trian")
    assert typo.returncode == 2
    assert "Did you mean 'train'" in typo.stderr


def test_a_mistake_of_an_own_command_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{")
    done = command(tmp_path, "prepare", "in.jsonl", "--output", "out")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert "in.jsonl:1: " in done.stderr
    assert printed_keys(done.stderr) == ["data.line.not_json"]
    both = command(
        tmp_path,
        "prepare",
        "in.jsonl",
        "--output",
        "o",
        "--num-validation=1",
        "--validation-fraction=.5",
    )
    assert both.returncode == 2
    assert "not allowed with" in both.stderr


def test_hydras_options_and_a_users_yaml(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "long.yaml").write_text(
        "defaults: [train_reinforce_actor]\nmodel: {optim: {lr: 3.0e-5}}\n"
    )
    words = [
        "train",
        "--config-dir",
        "mine",
        "--config-name",
        "long",
        "--cfg",
        "job",
        "--package",
        "model.optim",
    ]
    done = command(tmp_path, *words, "model.optim.weight_decay=0.5")
    assert done.returncode == 0, done.stderr
    assert "lr: 3.0e-05" in done.stdout
    assert "weight_decay: 0.5" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["mine"], "nothing was started"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config-dir=mine", "--config-name=lnog"], ["lnog.yaml", "--config-dir"]),
        (
            ["--config-dir=mine", "--config-name=alone"],
            ["[config_file.no_defaults]", "`defaults: [train_reinforce_actor, _self_]`"],
        ),
        (
            ["--config-dir=mine", "--config-name=broken"],
            ["[config_file.not_yaml]", 'broken.yaml", line 2'],
        ),
        (
            ["--config-path=mine", "--config-name=alone"],
            ["[config_file.config_path]", "--config-dir"],
        ),
        (["--config-dir=mine", "--config-name=wrong"], ["model.optim.lrr"]),
    ],
)
def test_mistakes_with_a_users_yaml(tmp_path: Path, words: list[str], said: list[str]) -> None:
    (tmp_path / "mine").mkdir()
    head = "defaults: [train_reinforce_actor]\n"
    texts = {
        "alone": "model: {optim: {lr: 1.0}}",
        "broken": f"{head}model: {{",
        "wrong": f"{head}model: {{optim: {{lrr: 1}}}}",
    }
    for name, text in texts.items():
        (tmp_path / "mine" / f"{name}.yaml").write_text(text)
    done = command(tmp_path, "train", *words)
    assert done.returncode == 1, done.stderr
    assert all(part in done.stderr for part in said), done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


def test_a_shell_completes_commands_options_and_keys() -> None:
    def complete(line: str) -> list[str]:
        environment = {
            **os.environ,
            "_REINFORCE_RL_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
        }
        code = "from reinforce_rl.launch.main import app; app(prog_name='reinforce-rl')"
        words = [sys.executable, "-c", code]
        return subprocess.run(
            words, capture_output=True, text=True, timeout=60, env=environment, cwd=ROOT
        ).stdout.split()

    assert complete("reinforce-rl tr") == ["train", "train-rm"]
    assert complete("reinforce-rl prepare --num") == ["--num-validation"]
    keys = complete("reinforce-rl train trainer.devices=2 model.optim.s")
    assert "model.optim.sched.min_lr=" in keys
    assert all(key.startswith("model.optim.s") for key in keys)
    assert "reward_model.head_path=" in complete("reinforce-rl serve reward_model.h")


@pytest.mark.slow
def test_preflight_is_train_without_a_run(tmp_path: Path) -> None:
    done = command(tmp_path, "preflight", "pretrained_checkpoint.restore_from_path=nothing")
    assert done.returncode == 1
    assert "pretrained_checkpoint.restore_from_path" in done.stderr + done.stdout
    assert "model.data.data_prefix.train is not set" in done.stderr + done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--help"], ["--help", "model.optim"], ["--deep", "--help"]])
def test_help_of_preflight_is_the_help_of_train(tmp_path: Path, words: list[str]) -> None:
    done = command(tmp_path, "preflight", *words)
    assert done.returncode == 0, done.stderr
    assert "model.optim.lr" in done.stdout


def test_a_reader_that_closes_the_pipe_is_not_an_error(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "reinforce_rl", "train", "--cfg", "job"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        assert (process.wait(60), said) == (141, b"")
