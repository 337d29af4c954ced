"""Commands of README, tutorial, concepts and debugging run on a tiny model or have a plan.

Other commands exist, and their keys are accepted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import pytest
from helpers.models import tiny_llama_folder
from helpers.warm_commands import WarmCommands
from hydra.errors import HydraException
from typer.main import get_command

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.base import Section
from reinforce_rl.config.compose import CONF_FOLDER
from reinforce_rl.config.load import read_config
from reinforce_rl.config.reward_model import TrainRewardModelConfig
from reinforce_rl.config.rewards import ServeRewardModelConfig
from reinforce_rl.errors import key_of
from reinforce_rl.launch.main import app

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CLI = ROOT / "docs" / "cli.md"
CONCEPTS = ROOT / "docs" / "concepts.md"
DEBUGGING = ROOT / "docs" / "debugging.md"
MIGRATION = ROOT / "docs" / "migration.md"
FIRST_RUN, *NEXT_PAGES = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
PAGES = [README, CLI, DEBUGGING, MIGRATION, FIRST_RUN, *NEXT_PAGES]
COMMANDS: Any = get_command(app)
PROGRAMS: dict[str, tuple[str, type[Section]]] = {
    "train": ("train_reinforce_actor", TrainConfig),
    "preflight": ("train_reinforce_actor", TrainConfig),
    "serve": ("serve_reward_model", ServeRewardModelConfig),
    "train-rm": ("train_reward_model", TrainRewardModelConfig),
}
# The environment and the model have their own tests and take minutes.
ELSEWHERE = re.compile(r"^(make |export MODEL=).*\n", re.MULTILINE)
FENCE = re.compile(r"(<!-- not run: [^>]*-->\s*)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Kinds of faults of paths that stand for the reader's paths.
OF_A_NAME = {
    "config.value.not_set",
    "config.restore_from_path.no_model",
    "config.head_path.no_file",
    "data.file.missing",
}


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    is_run: bool


def blocks(page: Path) -> list[Block]:
    fences = FENCE.findall(page.read_text(encoding="utf-8"))
    return [
        Block(language, ELSEWHERE.sub("", text), not skipped) for skipped, language, text in fences
    ]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command of a page that runs this project."""
    for block in blocks(page):
        if block.language != "bash":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(re.sub(r"(^|\s)\.\.\.(?=\s|$)", " ", line), comments=True)
            if words[:1] == ["torchrun"]:
                words = words[words.index("reinforce_rl") :]
            if words[:1] in (["reinforce-rl"], ["reinforce_rl"]):
                yield words[1:]


def write_files(page: Path, folder: Path) -> None:
    """Write the page's files: blocks whose first line is a comment with a name."""
    for block in blocks(page):
        if block.language in ("python", "yaml") and (
            name := re.match(r"# (\w+\.\w+)\n", block.text)
        ):
            (folder / name[1]).write_text(block.text)


def parts(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Return the programs that a command starts, and their arguments."""
    name = words[0]
    rest = words[1:]
    if name == "launch":
        server = rest.index("--server-args")
        actor = rest.index("--actor-args")
        yield "serve", rest[server + 1 : actor]
        yield "train", rest[actor + 1 :]
    elif name == "submit":
        split = rest.index("--")
        yield "train", [word for word in rest[:split] if "=" in word]
        yield "serve", rest[split + 1 :]
    elif name in PROGRAMS:
        yield name, rest


# Their commands have placeholders, so they are not run.
EXPLAINED = [
    ROOT / "docs" / f"{name}.md"
    for name in (
        *("algorithms", "checkpoints", "data", "environments", "evaluation"),
        *("reward-models", "rewards"),
    )
]


@pytest.mark.parametrize("page", [*PAGES, *EXPLAINED], ids=lambda path: path.stem)
def test_commands_exist_and_their_keys_are_accepted(page, tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL", "MODEL")
    write_files(FIRST_RUN, tmp_path)
    write_files(page, tmp_path)
    lines = list(commands(page))
    assert lines
    for words in lines:
        assert words[0] in (*COMMANDS.commands, "--help")
        for program, args in parts(words):
            name, schema = PROGRAMS[program]
            overrides = [word for word in args if "=" in word or word.startswith("~")]
            folder = CONF_FOLDER
            if "-m" in args:
                continue  # Hydra composes a sweep's runs one by one
            if "--config-name" in args:
                name = args[args.index("--config-name") + 1]
                folder = tmp_path
                if not (tmp_path / f"{name}.yaml").is_file():
                    continue  # a file that the page only names
            with hydra.initialize_config_dir(str(folder), version_base="1.3"):
                try:
                    cfg = hydra.compose(
                        name, overrides=[f"hydra.searchpath=[{CONF_FOLDER}]", *overrides]
                    )
                except HydraException as error:
                    pytest.fail(f"{shlex.join(words)}: {error}")
            faults = read_config(cfg, schema)[1]
            assert [fault for fault in faults if key_of(fault) not in OF_A_NAME] == [], words


class Place:
    """A folder in which a page is followed from top to bottom, with a tiny model for SmolLM2."""

    def __init__(self, folder: Path):
        self.folder = folder
        model = tiny_llama_folder(folder / "model", max_positions=128, layers=1)
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MODEL": str(model),
        }
        self.command = f'reinforce-rl() {{ {sys.executable} -m reinforce_rl "$@"; }}\n'

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """Let commands start from a process that has imported the package."""
        before = self.command
        with WarmCommands(self.environment) as commands:
            self.command = commands.shell_function
            try:
                yield
            finally:
                self.command = before

    def bash(self, script: str) -> str:
        ours = f'{self.command}python() {{ {sys.executable} "$@"; }}\n'
        done = subprocess.run(
            # children too
            ["timeout", "-k", "10", "240", "bash", "-euo", "pipefail", "-c", ours + script],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def follow(self, page: Path, part: slice = slice(None)) -> None:
        write_files(page, self.folder)
        scripts = [
            block.text for block in blocks(page) if block.language == "bash" and block.is_run
        ]
        for script in [script for script in scripts if script.strip()][part]:
            self.bash(script)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("start"))


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.more
def test_the_first_run_ends_with_a_trained_model(place):
    place.follow(FIRST_RUN, slice(2))  # prompts, and the first training
    run = place.folder / "results" / "first"
    assert steps(run) == [0, 1, 2, 3, 4]  # 0: the validation before
    assert (run / "report.html").is_file()
    assert (run / "hf" / "config.json").is_file()


@pytest.mark.more
@pytest.mark.timeout(600)
def test_debugging_says_what_would_have_been(place):
    results = place.folder / "results"
    if not (results / "first").exists():
        place.follow(FIRST_RUN, slice(2))
    with place.forking():
        place.follow(DEBUGGING)
    changes = json.loads((place.folder / "changes.json").read_text())
    steps = [step["step"] for step in changes["steps"]]
    assert steps == [1, 2, 3, 4]
    for step in changes["steps"]:
        assert 0 < step["cosine"] < 1
    assert changes["largest_difference"] < 1e-6
    assert (place.folder / "changes.html").stat().st_size > 1e5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tutorial_from_beginning_to_end(place):
    results = place.folder / "results"
    place.follow(FIRST_RUN, slice(2, None) if (results / "first").exists() else slice(None))
    assert steps(results / "first") == [0, 1, 2, 3, 4, 5]
    for page in (*NEXT_PAGES, CONCEPTS):
        place.follow(page)
    for run in ("plain", "python", "sums", "hello", "two"):
        assert (results / run / "hf" / "config.json").is_file()
    assert (results / "head" / "head.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_readmes_commands_run(place):
    """Commands that end by themselves; the others are planned below."""
    model = tiny_llama_folder(place.folder / "long", max_positions=2048, layers=1)
    lines = [
        {
            "prompt": f"Say hello to guest {i}.",
            "chosen": f"Hello, guest {i}!",
            "rejected": f"Go away, {i}.",
        }
        for i in range(140)
    ]
    (place.folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = []
    for words in commands(README):
        if words[0] in ("prepare", "train-rm", "launch"):
            place.bash(
                re.sub(r"\b(TRUNK|SFT_MODEL)\b", str(model), shlex.join(["reinforce-rl", *words]))
            )
            run.append(words[0])
    assert run == ["prepare", "train-rm", "launch"]
    assert (place.folder / "results" / "mine" / "hf" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("page", [README, *NEXT_PAGES[1:]], ids=lambda path: path.stem)
def test_commands_for_clusters_have_a_plan(place, page):
    """The trainer of commands that are not run, with a model and prompts of this machine."""
    machine = {
        "pretrained_checkpoint.restore_from_path": place.environment["MODEL"],
        "model.data.data_prefix.train": "prompts.jsonl",
        "model.data.data_prefix.validation": "null",
        "exp_manager.explicit_log_dir": "results/planned",
        "model.encoder_seq_length": "128",
        "model.reinforce.length_params.max_length": "48",
        "remote_rm.reward_model.token_file": "null",
    }
    (place.folder / "prompts.jsonl").write_text('{"prompt": "Explain rain to a child."}\n' * 64)
    write_files(FIRST_RUN, place.folder)  # the reward function of the README
    planned = 0
    for words in commands(page):
        args = [
            args
            for program, args in parts(words)
            if program == "train" and "--config-name" not in args
        ]
        for kept in args:
            given = dict(word.split("=", 1) for word in kept if "=" in word) | machine
            said = place.bash(
                shlex.join(["reinforce-rl", "preflight", *(f"{k}={v}" for k, v in given.items())])
            )
            assert "ranks" in said
            planned += 1
    assert planned
