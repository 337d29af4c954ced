"""Train all weights of a tiny reward model on generated data, with its script.

`python tiny_reward_run.py [--die-before SUFFIX] OVERRIDE...` is one run, with torchrun's number of
ranks. With `--die-before` the process kills itself instead of moving the first file or folder whose
destination ends with SUFFIX.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [
        str(Path(__file__).resolve().parents[1]),
        str(Path(__file__).resolve().parents[2]),
    ]

import hydra
from helpers.models import tiny_llama_folder

from reinforce_rl.config.compose import CONF_FOLDER
from reinforce_rl.config.load import load_config
from reinforce_rl.config.reward_model import TrainRewardModelConfig
from reinforce_rl.reward_model.job import train_reward_model
from reinforce_rl.reward_model.train_full import FullTrainer

GOOD = "etaoin"
BAD = "shrdlu"
NAMES = ("vowels", "length")


def tiny_model(folder: Path, **sizes: Any) -> Path:
    if not folder.exists():
        tiny_llama_folder(
            folder, **{"vocab_size": 64, "hidden": 32, "ffn": 48, "max_positions": 64, **sizes}
        )
    return folder


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_pairs(path: Path, count: int, *, noise: float = 0.0, seed: int = 0) -> Path:
    """Write pairs whose chosen answer has more letters of GOOD.

    `noise` is the share of swapped pairs.
    """
    rng = random.Random(seed)

    def answer(good: int) -> str:
        letters = [rng.choice(GOOD) for _ in range(good)] + [
            rng.choice(BAD) for _ in range(8 - good)
        ]
        rng.shuffle(letters)
        return "".join(letters)

    lines = []
    for i in range(count):
        few, many = sorted(rng.sample(range(9), 2))
        texts = [answer(many), answer(few)]
        if rng.random() < noise:
            texts.reverse()
        lines.append({"prompt": f"say {i}", "chosen": texts[0], "rejected": texts[1]})
    return write_lines(path, lines)


def write_ratings(path: Path, count: int, *, seed: int = 0) -> Path:
    """Write two attributes that are linear in letter counts; every third rating is missing."""
    rng = random.Random(seed)
    lines = []
    for i in range(count):
        good = rng.randrange(7)
        bad = rng.randrange(7)
        letters = [rng.choice(GOOD) for _ in range(good)] + [rng.choice(BAD) for _ in range(bad)]
        rng.shuffle(letters)
        attributes: dict[str, float | None] = {
            "vowels": 0.5 * good - 1,
            "length": 0.25 * (good + bad) - 0.5,
        }
        if i % 3 == 0:
            attributes[NAMES[i // 3 % 2]] = None
        lines.append({"prompt": f"say {i}", "response": "".join(letters), "attributes": attributes})
    return write_lines(path, lines)


def tiny_overrides(folder: Path, **sizes: Any) -> list[str]:
    return [
        "mode=full",
        f"model.restore_from_path={tiny_model(folder / 'trunk', **sizes)}",
        f"output_dir={folder / 'out'}",
        "data.max_length=40",
        "data.held_out_fraction=0.25",
        "full.global_batch_size=32",
        "full.val_check_interval=10",
        "full.patience=null",
        "model.optim.lr=3e-3",
        "model.optim.weight_decay=0",
        "model.optim.betas=[0.9,0.95]",
        "micro_batch_size=16",
    ]


def tiny_config(*overrides: str) -> TrainRewardModelConfig:
    with hydra.initialize_config_dir(str(CONF_FOLDER), version_base="1.3"):
        return load_config(
            hydra.compose("train_reward_model", list(overrides)), TrainRewardModelConfig
        )


def run(*overrides: str) -> FullTrainer:
    trainer = train_reward_model(tiny_config(*overrides))
    assert isinstance(trainer, FullTrainer)
    return trainer


def die_before(suffix: str) -> None:
    move = os.replace

    def replace(source, destination):
        if str(destination).endswith(suffix):
            os.kill(os.getpid(), signal.SIGKILL)
        move(source, destination)

    os.replace = replace  # type: ignore[assignment]


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[0] == "--die-before":
        die_before(arguments[1])
        arguments = arguments[2:]
    run(*arguments)
