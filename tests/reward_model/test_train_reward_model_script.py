"""`examples/train_reward_model.py` from end to end, with a head on a tiny trunk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.tiny_reward_run import tiny_config, tiny_model, write_lines
from safetensors import safe_open

from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.model.reward_head import RewardHead
from reinforce_rl.reward_model.data import encode_conversation
from reinforce_rl.reward_model.job import train_reward_model
from reinforce_rl.reward_model.scorer import load_reward_model

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trunk(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("trunk") / "tiny-llama", vocab_size=128, max_positions=128)


def run_script(*overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPO / "examples" / "train_reward_model.py"), *overrides],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_script_from_pairs_to_a_head_that_scores(trunk, tmp_path, capsys):
    rows = [
        {"prompt": f"question {i}", "chosen": f"please, {i} is fine", "rejected": f"XX {i} ZZ!!"} for i in range(24)
    ]
    pairs, out = write_lines(tmp_path / "pairs.jsonl", rows), tmp_path / "out"
    overrides = [
        f"model.restore_from_path={trunk}",
        f"data.pairs_path={pairs}",
        f"output_dir={out}",
        f"features_cache={tmp_path / 'features.safetensors'}",
        "head.pooling=auto",
        "head.folds=2",
        "num_threads=1",
        "data.held_out_fraction=0.3",
    ]
    first = run_script(*overrides, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "24 pairs read, 24 used" in first.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["features.safetensors", "out", "pairs.jsonl"]
    head = RewardHead.load(out / "head.safetensors")
    assert head.weight.shape == (32,)
    card = (out / "README.md").read_text()
    assert "pairs.jsonl" in card and "head.pooling=auto" in card
    with safe_open(out / "head.safetensors", framework="pt") as file:
        about = file.metadata()
    assert about["trunk"] == "tiny-llama"
    assert int(about["train_pairs"]) + int(about["held_out_pairs"]) == 24
    assert float(about["held_out_accuracy"].split("±")[0]) > 0.9  # the two kinds of answer share few letters

    train_reward_model(tiny_config(*overrides), command="a test")
    assert "features from" in capsys.readouterr().out
    assert torch.equal(RewardHead.load(out / "head.safetensors").weight, head.weight)

    # The served model orders an unseen pair by the very tokens that `encode_conversation` gives.
    messages = [{"role": "user", "content": "question 99"}]
    texts = ("please, 99 is fine", "XX 99 ZZ!!")
    with parallel_mesh() as mesh:
        model = load_reward_model(trunk, out / "head.safetensors", mesh)
        tokenizer = load_tokenizer(trunk)
        good, bad = model.score([encode_conversation(tokenizer, messages, text) for text in texts])
    assert good > bad


def test_wrong_settings_end_in_one_message(trunk, tmp_path):
    result = run_script(
        f"model.restore_from_path={trunk}",
        f"data.pairs_path={tmp_path / 'none.jsonl'}",
        "head.pooling=max",
        "data.held_out_fraction=1.5",
        "cuts.max_tokens=2",
        cwd=tmp_path,
    )
    assert result.returncode == 1
    for key in ("data.pairs_path", "head.pooling", "data.held_out_fraction", "cuts.max_tokens"):
        assert f"{key} is " in result.stderr
    assert "Traceback" not in result.stderr


def test_missing_keys_are_named():
    with pytest.raises(ConfigError) as caught:
        tiny_config()
    assert "data.pairs_path is not set" in str(caught.value)
    assert "model.restore_from_path is not set" in str(caught.value)


@pytest.mark.slow
def test_an_unknown_key_is_named(tmp_path):
    unknown = run_script("data.max_lenght=3", cwd=tmp_path)
    assert unknown.returncode == 1
    assert "max_lenght" in unknown.stderr
