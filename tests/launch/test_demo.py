"""The demo as a user runs it, shortened, and the values of DEMO_STEPS."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.errors import printed_keys, raises_error
from helpers.models import smollm2_folder
from helpers.rows import write_rows
from helpers.tiny_run import compose, json_lines

from reinforce_rl.launch.demo import print_answers, steps_override
from reinforce_rl.monitoring.records import RolloutRow, read_rows
from reinforce_rl.rewards.functions import instructions

SCRIPT = Path(__file__).parents[2] / "examples" / "demo" / "run_demo.py"


def run_demo(
    out: Path, steps: str, *overrides: str, seconds: float
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DEMO_STEPS": steps}
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        timeout=seconds,
    )


def test_without_demo_steps_the_configuration_is_unchanged():
    assert steps_override("") == []


def test_demo_steps_validates_and_saves_after_its_last_step():
    cfg = compose(*steps_override("7"), name="demo_actor")
    reinforce = cfg.trainer.reinforce
    assert (reinforce.max_steps, reinforce.val_check_interval, reinforce.save_interval) == (7, 7, 7)


@pytest.mark.parametrize("text", ["0", "00", "-3", "1.5", "ten", " 4", "²"])
def test_demo_steps_must_be_a_whole_number_above_zero(text):
    with raises_error("demo.steps.invalid", "DEMO_STEPS", repr(text)):
        steps_override(text)


def test_a_wrong_demo_steps_ends_before_anything_is_made(tmp_path):
    done = run_demo(tmp_path / "out", "many", seconds=100)
    assert done.returncode == 1
    assert printed_keys(done.stdout) == ["demo.steps.invalid"]
    assert "DEMO_STEPS is 'many'" in done.stdout
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "out").exists()


RECORD = {"prompt": "Why tea?", "keys": ["tip"], "max_words": 3, "keyword": "tea"}


def write_validation(out: Path, step: int, responses: list[str]) -> None:
    rows = [
        RolloutRow(step, i, 0, f"<user>Why tea? {i}<end>", text, 0.0, "stop", len(text))
        for i, text in enumerate(responses)
    ]
    write_rows(out, step, rows, "validation")


def test_answers_before_and_after_stand_side_by_side_with_what_the_check_says(tmp_path, capsys):
    asked = tmp_path / "asked.jsonl"
    asked.write_text(
        "".join(json.dumps({**RECORD, "prompt": f"Why tea? {i}"}) + "\n" for i in range(4))
    )
    good = '{"tip": "Hot [bold]tea"}'  # not rich's markup
    write_validation(tmp_path, 0, ["Tea is", good, "", "{"])
    write_validation(tmp_path, 9, [good, good, "no", good])
    print_answers(tmp_path, asked)
    said = capsys.readouterr().out
    comparison = "+50.0% ± 28.9% on the same 4 prompts (p = 0.182): indistinguishable"
    assert f"exactly as asked: 25.0% -> 75.0%: {comparison}" in said
    assert (said.count("✓"), said.count("✗"), said.count("[bold]")) == (3, 3, 3)
    assert [said.count(f"Why tea? {i}") for i in range(4)] == [1, 1, 1, 0]


def test_answers_to_other_prompts_are_not_checked(tmp_path, capsys):
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps(RECORD | {"prompt": "another"}) + "\n")
    for step in (0, 9):
        write_validation(tmp_path, step, ["Tea"])
    print_answers(tmp_path, asked)
    assert capsys.readouterr().out == ""


def test_the_demos_prompts_are_what_their_script_writes(tmp_path):
    folder = SCRIPT.parent
    subprocess.run(
        [sys.executable, str(folder / "make_prompts.py"), str(tmp_path)], check=True, timeout=60
    )
    keywords = []
    for name in ("train", "validation"):
        file = f"prompts_{name}.jsonl"
        assert (tmp_path / file).read_bytes() == (folder / file).read_bytes()
        records = json_lines(folder / file)
        keywords.append({record["keyword"] for record in records})
        for record in records:
            answer = {
                key: f"{record['keyword']} {word} it"
                for key, word in zip(record["keys"], "ab", strict=False)
            }
            long = json.dumps(
                {**answer, record["keys"][0]: f"{record['keyword']} one two three four"}
            )
            assert instructions("", long, record, partial=False) == 1.0, record
    assert not keywords[0] & keywords[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_steps_of_the_real_demo(tmp_path):
    pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")
    smollm2_folder()
    out = tmp_path / "demo"
    few = [
        "model.reinforce.num_val_samples=4",
        "model.reinforce.num_rollout_samples=2",
        "model.seed=3",
    ]
    try:
        done = run_demo(out, "2", *few, seconds=850)
        assert done.returncode == 0, done.stdout
        assert "Traceback" not in done.stdout
        assert [line["step"] for line in json_lines(out / "metrics.jsonl")] == [0, 1, 2]
        assert "val/rewards" in json_lines(out / "metrics.jsonl")[-1]
        assert [len(read_rows(path)) for path in sorted((out / "validation").iterdir())] == [4, 4]
        assert (out / "report.html").stat().st_size > 10_000
        assert (out / "hf" / "config.json").is_file()
        assert (out / "hf" / "tokenizer_config.json").is_file()
        assert list((out / "checkpoints").iterdir())
        assert (out / "logs" / "server.log").is_file()
        held_out = re.search(
            r"answered exactly as asked: .* -> .* on the same 4 prompts", done.stdout
        )
        assert held_out, done.stdout
        server = json_lines(out / "metrics.jsonl")[-1]
        names = ("reward_model", "instructions", "accuracy")
        assert all(
            f"{part}/rewards_{name}" in server for part in ("train", "val") for name in names
        )
        total = 0.1 * server["val/rewards_reward_model"] + server["val/rewards_instructions"]
        assert server["val/rewards"] == pytest.approx(
            total + server["val/rewards_accuracy"], abs=1e-5
        )
        last_lines = (
            done.stdout[done.stdout.index("\nValidation reward, first and last") :]
            .strip()
            .splitlines()
        )
        for name in ("report.html", "rollouts", "checkpoints", "hf"):
            assert any(line.endswith(str(out / name)) for line in last_lines), done.stdout
        assert "minutes" in last_lines[-1]
    finally:
        # gigabytes, which pytest would otherwise keep for three sessions
        shutil.rmtree(out, ignore_errors=True)
