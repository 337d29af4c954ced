"""The recipes: their YAML against the schema, their data and rewards, and tiny runs of them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers.environments import needs_peers, peers_environment
from helpers.models import tiny_llama_folder

from reinforce_rl.config.compose import CONF_FOLDER, compose
from reinforce_rl.config.load import read_config

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
SECONDS = 600


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipes_{name}", RECIPES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: object, cwd: Path = ROOT) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GOMP_SPINCOUNT": "0"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=cwd,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_each_recipe_is_in_the_table():
    table = (RECIPES / "README.md").read_text(encoding="utf-8")
    assert NAMES == ["against_trl", "calculator", "gsm8k", "reverse_text"]
    for name in NAMES:
        assert f"[{name}.yaml]({name}.yaml)" in table


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_the_schema(name):
    cfg = compose(name, [f"hydra.searchpath=[file://{CONF_FOLDER}]"], RECIPES)
    config, faults = read_config(cfg)
    # models and generated data are not in the repository
    assert [fault for fault in faults if "does not exist" not in fault] == []
    assert config.exp_manager.explicit_log_dir == f"results/recipes/{name}"
    assert config.reward == ("environment" if name == "calculator" else "function")


def test_trl_gets_the_recipes_own_settings():
    overrides = ["trainer.reinforce.max_steps=7", "model.optim.lr=3e-6", "model.seed=5"]
    settings = module("against_trl").trl_settings(overrides)
    args = settings["args"]
    assert args["max_steps"] == 7
    assert args["learning_rate"] == 3e-6
    assert args["seed"] == 5
    assert args["per_device_train_batch_size"] * args["gradient_accumulation_steps"] == 32
    assert args["num_generations"] == 4
    assert args["beta"] == 0.02
    lines = Path(settings["prompts"]).read_text(encoding="utf-8").splitlines()
    assert {"keys", "min_words", "max_words", "keyword"} < json.loads(lines[0]).keys()


def test_curves_of_seeds_are_drawn(tmp_path):
    recipe = module("against_trl")
    curves = [
        {"rewards": [0.5, 1.0], "rewards_accuracy": [0.0, 0.5]},
        {"rewards": [0.7, 1.2], "rewards_accuracy": [0, 1]},
    ]
    recipe.draw({"reinforce_rl": curves, "TRL": curves[:1]}, tmp_path / "curves.html")
    page = (tmp_path / "curves.html").read_text(encoding="utf-8")
    assert "TRL" in page
    assert "answered exactly as asked" in page


def test_texts_to_reverse_are_in_one_part_alone():
    recipe = module("reverse_text")
    parts = recipe.records(seed=1)
    records = [record for part in parts.values() for record in part]
    texts = [record["messages"][1]["content"] for record in records]
    lengths = {name: len(part) for name, part in parts.items()}
    assert lengths == recipe.SIZES
    assert len(set(texts)) == len(texts)
    for record, text in zip(records, texts, strict=True):
        assert record["answer"] == text[::-1]
    assert parts == recipe.records(seed=1)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<reversed_text>olleh</reversed_text>", 1.0),
        ("Sure! <reversed_text>\nolleh\n</reversed_text> Done.", 1.0),
        ("<reversed_text>hello</reversed_text>", 0.4),  # two letters of five in a row: 2 * 2 / 10
        ("<reversed_text>olleh", 0.0),
        ("olleh", 0.0),
        ("<reversed_text></reversed_text>", 0.0),
    ],
)
def test_similarity_is_of_the_text_between_tags(response, score):
    assert module("reverse_text").similarity("", response, {"answer": "olleh"}) == pytest.approx(
        score
    )


@pytest.fixture
def tiny(tmp_path) -> Path:
    folder = tmp_path / "tiny"
    tiny_llama_folder(folder, layers=1, hidden=16, ffn=32, max_positions=512)
    return folder


TINY = (
    "trainer.reinforce.max_steps=2",
    "trainer.reinforce.val_check_interval=0",
    "model.reinforce.num_rollout_samples=2",
)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_tiny_warm_up_and_two_steps_of_reverse_text(tiny, tmp_path):
    data = tmp_path / "data"
    run(RECIPES / "reverse_text.py", "--steps", 2, "--batch", 2, "--model", tiny, "--out", data)
    recipe = (
        "--config-dir",
        RECIPES,
        "--config-name",
        "reverse_text",
        *TINY,
        "model.encoder_seq_length=400",
    )
    files = [
        f"model.data.data_prefix.{name}={data / name}.jsonl" for name in ("train", "validation")
    ]
    paths = [
        f"pretrained_checkpoint.restore_from_path={data / 'warm'}",
        f"exp_manager.explicit_log_dir={tmp_path / 'run'}",
    ]
    run("-m", "reinforce_rl", "train", *recipe, *files, *paths)
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert 0.0 <= line["train/rewards"] <= 1.0


@needs_peers
@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_two_tiny_steps_against_trl(tiny, tmp_path):
    peers_environment()
    size = ("model.reinforce.length_params.max_length=8", "model.encoder_seq_length=400")
    model = f"pretrained_checkpoint.restore_from_path={tiny}"
    said = run(RECIPES / "against_trl.py", "--seeds", 1, "--out", tmp_path, *TINY, *size, model)
    curves = json.loads((tmp_path / "curves.json").read_text())
    for side in ("reinforce_rl", "TRL"):
        (curve,) = curves[side]
        lengths = {name: len(values) for name, values in curve.items()}
        assert lengths == {"rewards": 2, "rewards_accuracy": 2}
    assert str(tmp_path / "curves.html") in said
