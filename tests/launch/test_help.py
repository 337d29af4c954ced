"""--help lists all keys of the schema, without truncation if the output is not a terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.errors import raises_error
from rich.text import Text

from reinforce_rl.config.describe import PROGRAMS
from reinforce_rl.launch.help import show_help
from reinforce_rl.utils.console import Console

ROOT = Path(__file__).parents[2]


def shown(name: str, *words: str, terminal: bool = False, width: int = 80) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, highlight=False)
    show_help(name, words, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_key_of_the_yaml_has_its_line(name: str) -> None:
    """Keys are read from conf/, not from the schema that generates the help."""
    from omegaconf import OmegaConf

    def leaves(node: object, prefix: str = "") -> set[str]:
        if not isinstance(node, dict) or not node:
            return {prefix[:-1]}
        return {key for child, value in node.items() for key in leaves(value, f"{prefix}{child}.")}

    plain = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / f"{name}.yaml"))
    assert isinstance(plain, dict)
    expected = leaves(
        {key: value for key, value in plain.items() if key not in ("defaults", "hydra")}
    )
    lines = [
        line.split("  (")[0]
        for line in shown(name).splitlines()
        if "; default " in line or "; required" in line
    ]
    assert set(lines) == expected
    assert len(lines) == len(expected)


def test_a_line_has_sentence_type_unit_bound_and_default_and_is_not_cut() -> None:
    line = next(
        line
        for line in shown("train_reinforce_actor").splitlines()
        if "rollouts_per_prompt" in line
    )
    assert line == (
        "trainer.reinforce.num_rollouts_per_prompt  (int, samples, at least 1; default 4)  "
        "samples of each prompt (G); at least 2 for estimators that compare samples"
    )
    assert "(path; required)" in shown("train_reinforce_actor", "pretrained_checkpoint")
    assert "one of prompts, finished; default prompts)" in shown(
        "train_reinforce_actor", "rollout_order"
    )


def test_a_group_and_a_word() -> None:
    group = shown("train_reinforce_actor", "model.optim.sched").splitlines()
    assert len(group) == 4
    assert {tuple(line.split(".")[:3]) for line in group} == {("model", "optim", "sched")}
    assert shown("train_reinforce_actor", "model.optim.lr").count("\n") == 1
    lines = shown("train_reinforce_actor", "TEMPERATURE").splitlines()
    assert len(lines) >= 2
    assert all("temperature" in line.lower() for line in lines)


def test_an_unknown_word_gets_near_ones() -> None:
    with raises_error("help.word.unknown", "temprature", "did you mean temperature"):
        shown("train_reinforce_actor", "temprature")


def test_a_terminal_gets_tables_of_its_width() -> None:
    text = shown("train_reinforce_actor", "model.optim", terminal=True)
    assert "\x1b[" in text
    assert "in_place_gradients" in text
    assert max(len(Text.from_ansi(line).plain) for line in text.splitlines()) <= 80
    assert "fields" in shown("serve_reward_model", terminal=True, width=200)


def test_the_script_and_the_command_say_the_same_but_for_their_name(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = str(ROOT / "examples" / "serve_reward_model.py")
    said = [
        subprocess.run(
            [sys.executable, *program, "--help"],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
        ).stdout
        for program in ([script], ["-m", "reinforce_rl", "serve"])
    ]
    first, second = (text.split("\n", 1) for text in said)
    assert first[1] == second[1]
    assert "reward_model.head_path" in first[1]
    assert first[0] == f"Usage: python {script} [OPTION ...] KEY=VALUE ..."
    assert second[0] == "Usage: reinforce-rl serve [OPTION ...] KEY=VALUE ..."
