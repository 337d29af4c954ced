"""The command in an ASCII locale: files, file names and output are UTF-8 nevertheless."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from helpers.errors import printed_keys
from helpers.rows import write_rows
from helpers.tiny_run import tiny_overrides
from pyarrow import parquet

from reinforce_rl.config.compose import compose, with_quotes
from reinforce_rl.monitoring.records import RolloutRow, read_rows

ROOT = Path(__file__).parents[2]
ASCII = {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "LC_ALL": "C"}
ANSWER = "K\u00e4se f\u00fcr \u65e5\u672c \u2013 5\u00a0\u20ac"


def run(folder: Path, *words: object, variables: dict[str, str] | None = None) -> str:
    """Run `python WORDS` in this locale, assert success and return its output."""
    environment = {
        **os.environ,
        **ASCII,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "160",
        **(variables or {}),
    }
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        timeout=240,
        cwd=folder,
        env=environment,
    )
    said = (done.stdout + done.stderr).decode("utf-8")
    assert done.returncode == 0, said
    return said


def command(folder: Path, *words: object) -> str:
    return run(folder, "-m", "reinforce_rl", *words)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "L\u00e4ufe \u65e5"
    folder.mkdir()
    return folder


def a_run(folder: Path) -> Path:
    path = folder / "l\u00e4uft"
    row = RolloutRow(
        step=1,
        prompt_id=0,
        sample_id=0,
        prompt=ANSWER,
        response=ANSWER,
        response_length=3,
        finish_reason="stop",
        reward=1.0,
    )
    write_rows(path, 1, [row])
    (path / "metrics.jsonl").write_text(
        '{"step": 1, "time": 1.0, "train/rewards": 1.0}\n', encoding="utf-8"
    )
    return path


def test_the_locale_is_really_ascii(tmp_path):
    code = "import sys, locale; print(sys.getfilesystemencoding(), locale.getpreferredencoding())"
    assert run(tmp_path, "-c", code).split() == ["ascii", "ANSI_X3.4-1968"]


def test_records_are_printed(folder):
    path = a_run(folder)
    record = json.loads(command(folder, "records", path, "--step", 1).splitlines()[0])
    assert record["response"] == ANSWER


def test_a_report_is_written(folder):
    path = a_run(folder)
    assert "l\u00e4uft" in command(folder, "report", path)
    assert (path / "report.html").is_file()


def test_data_is_prepared(folder):
    pairs = [
        {"prompt": f"{ANSWER} {i}", "chosen": "\u00e4", "rejected": "\u00fc"} for i in range(8)
    ]
    parquet.write_table(pa.Table.from_pylist(pairs), folder / "p\u00e4\u00e4re.parquet")
    command(folder, "prepare", "p\u00e4\u00e4re.parquet", "--output", "d\u00e4ten")
    lines = [
        line
        for path in sorted(folder.rglob("*.jsonl"))
        for line in path.read_text("utf-8").splitlines()
    ]
    assert len(lines) == 8
    assert all(ANSWER in line for line in lines)


def test_a_fault_is_printed_with_its_name(tmp_path):
    environment = {**os.environ, **ASCII, "PYTHONPATH": str(ROOT)}
    words = ["-m", "reinforce_rl", "train", "pretrained_checkpoint.restore_from_path=/n\u00f6"]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, timeout=120, cwd=tmp_path, env=environment
    )
    assert done.returncode == 1
    said = done.stderr.decode("utf-8")
    assert "config.restore_from_path.no_model" in printed_keys(said)
    assert "restore_from_path is /n\u00f6, " in said


def test_the_library_reads_records_in_a_program_of_its_own(folder):
    """The program does not restart in Python's UTF-8 mode."""
    path = a_run(folder)
    code = "import sys; from reinforce_rl.monitoring.records import read_rows; "
    code += "print(ascii(read_rows(sys.argv[1])[0]))"
    assert ascii(ANSWER) in run(folder, "-c", code, path / "rollouts" / "step_00001.parquet")
    assert read_rows(path / "rollouts" / "step_00001.parquet")[0].response == ANSWER


@pytest.mark.slow
def test_a_run_from_the_first_step_to_its_evaluation(folder):
    data = folder / "pr\u00f6mpts.parquet"
    parquet.write_table(pa.table({"prompt": ["eta", "tao", "\u00e4"] * 3}), data)
    (folder / "bel\u00f6hnung.py").write_text(
        "def f(prompt, response, record):\n    return len(response)\n", "utf-8"
    )
    settings = [
        *tiny_overrides(folder),
        f"model.data.data_prefix.train={data}",
        "trainer.reinforce.max_steps=1",
    ]
    rewards = ["reward=function", "reward_function.name=bel\u00f6hnung.f"]
    command(folder, "train", *settings, *rewards)
    path = folder / "run"
    assert len(command(folder, "records", path, "--step", 1).splitlines()) > 0
    command(folder, "diff", path, path)
    command(folder, "replay", path, "--reward", "restart", "--trust")
    command(folder, "replay", path, "trainer.reinforce.initial_policy_kl_penalty=0.2")
    short = "model.reinforce.length_params.max_length=5"
    command(folder, "eval", folder / "model", "--data", data, "--reward", "bel\u00f6hnung.f", short)
    command(
        folder, "convert", "to-hf", path / "checkpoints", "hf-\u00f6", "--model", folder / "model"
    )
    assert (folder / "hf-\u00f6" / "config.json").is_file()


@pytest.mark.parametrize(
    ("override", "quoted"),
    [
        ("a.b=/K\u00e4se/x", "a.b='/K\u00e4se/x'"),
        ("a.b=/plain/x", "a.b=/plain/x"),
        ("a.b='/K\u00e4se'", "a.b='/K\u00e4se'"),
        ("a.b=[\u00e4,b]", "a.b=[\u00e4,b]"),
        ("+a.b=\u65e5 \u672c", "+a.b='\u65e5 \u672c'"),
        ("~a.b", "~a.b"),
        ("a.b=~/runs/x", "a.b='~/runs/x'"),
        ("a.b=/runs/lr=1e-6 #2", "a.b='/runs/lr=1e-6 #2'"),
        ("a.b=1e-6", "a.b=1e-6"),
        ("a.b=", "a.b="),
        ("a.b=${oc.env:HOME}/x", "a.b=${oc.env:HOME}/x"),
    ],
)
def test_values_that_hydra_cannot_read_are_quoted(override, quoted):
    assert with_quotes(override) == quoted


def test_a_folder_beyond_ascii_needs_no_quotes():
    cfg = compose("train_reinforce_actor", ["exp_manager.explicit_log_dir=/K\u00e4se \u65e5/x"])
    assert cfg.exp_manager.explicit_log_dir == "/K\u00e4se \u65e5/x"
