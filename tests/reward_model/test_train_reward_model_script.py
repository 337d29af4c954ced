"""`examples/train_reward_model.py` from end to end on a tiny trunk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.tiny_tokenizer import write_tiny_tokenizer

from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.megatron.model.reward_head import RewardHead

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("trunk") / "tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run_script(*overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPO / "examples" / "train_reward_model.py"), *overrides],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_script_from_pairs_to_a_head_that_scores(tiny_model, tmp_path):
    rows = [
        {"prompt": f"question {i}", "chosen": f"please, {i} is fine", "rejected": f"XX {i} ZZ!!"} for i in range(24)
    ]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, cache = tmp_path / "out", tmp_path / "features.safetensors"
    overrides = [
        f"model.restore_from_path={tiny_model}",
        f"data.pairs_path={pairs}",
        f"output_dir={out}",
        f"features_cache={cache}",
        "head.pooling=auto",
        "head.folds=2",
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

    from safetensors import safe_open

    with safe_open(out / "head.safetensors", framework="pt") as file:
        about = file.metadata()
    assert about["trunk"] == "tiny-llama"
    assert int(about["train_pairs"]) + int(about["held_out_pairs"]) == 24
    assert float(about["held_out_accuracy"].split("±")[0]) > 0.9  # the two kinds of answer share few letters

    again = run_script(*overrides, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "features from" in again.stdout
    assert torch.equal(RewardHead.load(out / "head.safetensors").weight, head.weight)

    check_serving(tiny_model, out / "head.safetensors")


def check_serving(trunk: Path, head_file: Path) -> None:
    """The served model orders an unseen pair by the very tokens that `encode_conversation` gives."""
    from reinforce_rl.megatron.mesh import parallel_mesh
    from reinforce_rl.reward_model.scorer import load_reward_model
    from reinforce_rl.reward_model.template import encode_conversation

    tokenizer = load_tokenizer(trunk)
    messages = [{"role": "user", "content": "question 99"}]
    texts = ("please, 99 is fine", "XX 99 ZZ!!")
    with parallel_mesh() as mesh:
        model = load_reward_model(trunk, head_file, mesh)
        good, bad = model.score([encode_conversation(tokenizer, messages, text) for text in texts])
    assert good > bad


def test_wrong_settings_end_in_one_message(tiny_model, tmp_path):
    result = run_script(
        f"model.restore_from_path={tiny_model}",
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


@pytest.mark.slow
def test_missing_and_unknown_keys_are_named(tmp_path):
    missing = run_script(cwd=tmp_path)
    assert missing.returncode == 1
    assert "data.pairs_path is not set" in missing.stderr and "model.restore_from_path is not set" in missing.stderr
    unknown = run_script("data.max_lenght=3", cwd=tmp_path)
    assert unknown.returncode == 1
    assert "max_lenght" in unknown.stderr
