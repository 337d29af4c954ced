"""Hugging Face folder to checkpoint and back at any tensor-parallel size, bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.errors import raises_error
from helpers.families import family_folder
from helpers.models import tiny_family_folder
from helpers.policies import megatron_model
from safetensors.torch import load_file, save_file

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.megatron.checkpointer import Checkpointer
from reinforce_rl.megatron.convert import to_hf, to_megatron
from reinforce_rl.megatron.optimizer import build_optimizer, wrap_data_parallel

ROOT = Path(__file__).parents[2]
MODELS = ("qwen2_padded", "qwen3_padded")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("convert")


@pytest.fixture(scope="module")
def folders(root):
    """Models that need padding at TP=2, in groups and vocabulary."""
    return {name: family_folder(root, name) for name in MODELS}


@pytest.fixture(scope="module")
def checkpoints(folders, mesh, root):
    """Checkpoints of these folders, written by one rank."""
    return {
        name: to_megatron(folder, root / f"{name}.megatron", mesh)
        for name, folder in folders.items()
    }


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    script = ROOT / "examples/convert_checkpoint.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def assert_same_weights(folder: Path, other: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    others = load_file(other / "model.safetensors")
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert weight.dtype == others[name].dtype
        assert torch.equal(weight, others[name]), name


def test_tensors_of_several_dtypes_lose_nothing(mesh, tmp_path):
    """transformers' `auto` would round the fp32 norms to the embedding's bf16."""
    folder = tiny_family_folder(tmp_path / "model", "llama")
    tensors = load_file(folder / "model.safetensors")
    mixed = {name: value if "norm" in name else value.bfloat16() for name, value in tensors.items()}
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    back = to_hf(to_megatron(folder, tmp_path / "megatron", mesh), tmp_path / "hf", mesh)
    for name, value in load_file(back / "model.safetensors").items():
        assert torch.equal(value, mixed[name].float()), name


@pytest.mark.parametrize("name", MODELS)
def test_one_rank(name, folders, checkpoints, mesh, tmp_path):
    back = to_hf(checkpoints[name], tmp_path / "hf", mesh)
    assert_same_weights(back, folders[name])
    for file in ("tokenizer.json", "generation_config.json"):
        assert (back / file).read_bytes() == (folders[name] / file).read_bytes()
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (folders[name] / "config.json").read_text()
    )


@pytest.mark.more
def test_the_script_on_two_ranks_to_one(folders, mesh, tmp_path):
    written = convert("to-megatron", folders["qwen2_padded"], tmp_path / "two", "--tp", 2)
    assert written.returncode == 0, written.stderr
    assert f"written to {tmp_path / 'two'}" in written.stdout
    folder = to_hf(tmp_path / "two", tmp_path / "one", mesh)
    assert_same_weights(folder, folders["qwen2_padded"])


@pytest.mark.slow
def test_the_script_on_two_ranks_from_one(folders, checkpoints, tmp_path):
    written = convert("to-hf", checkpoints["qwen3_padded"], tmp_path / "back", "--tp", 2)
    assert written.returncode == 0, written.stderr
    assert_same_weights(tmp_path / "back", folders["qwen3_padded"])


@pytest.mark.more
def test_the_script_prints_an_error_in_one_line(tmp_path):
    failed = convert("to-hf", tmp_path / "nothing", tmp_path / "out")
    assert failed.returncode == 1
    assert "nothing is not a checkpoint; expected" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_dtype(folders, mesh, tmp_path):
    bf16 = to_megatron(folders["qwen2_padded"], tmp_path / "bf16", mesh, dtype=torch.bfloat16)
    kept = to_hf(bf16, tmp_path / "kept", mesh)
    assert json.loads((kept / "config.json").read_text())["dtype"] == "bfloat16"
    wider = to_hf(bf16, tmp_path / "wider", mesh, dtype=torch.float32)
    for name, weight in load_file(folders["qwen2_padded"] / "model.safetensors").items():
        rounded = weight.bfloat16()
        assert torch.equal(load_file(kept / "model.safetensors")[name], rounded)
        assert torch.equal(load_file(wider / "model.safetensors")[name], rounded.float())


@pytest.mark.parametrize("given", ["run", "run/checkpoints", "run/checkpoints/step_00000003"])
def test_checkpoint_of_a_run(given, folders, mesh, tmp_path):
    lm = megatron_model(folders["qwen3_padded"], mesh)
    ddp = wrap_data_parallel(lm)
    optim = OptimConfig(lr=1e-3, weight_decay=0.0, betas=[0.9, 0.95])
    Checkpointer(
        tmp_path / "run/checkpoints",
        mesh,
        ddp,
        *build_optimizer(ddp, optim, clip_grad=0.0, total_steps=10),
    ).save(3, {"step": 3})
    with raises_error("convert.model.not_given", "step_00000003", "config.json", "--model"):
        to_hf(tmp_path / given, tmp_path / "out", mesh)
    out = to_hf(tmp_path / given, tmp_path / "out", mesh, model=folders["qwen3_padded"])
    assert_same_weights(out, folders["qwen3_padded"])
    assert json.loads((out / "config.json").read_text())["training_step"] == 3


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"num_hidden_layers": 3}, ["decoder.layers"]),
        ({"vocab_size": 62}, ["embedding.word_embeddings.weight", "(61, 36)", "(62, 36)"]),
        ({"num_key_value_heads": 9}, ["linear_qkv.weight has shape"]),
        ({"intermediate_size": 128}, ["linear_fc"]),
    ],
)
def test_weights_of_another_model(keys, named, checkpoints, mesh, tmp_path):
    values = {
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 36,
        "vocab_size": 61,
        **keys,
    }
    other = tiny_family_folder(tmp_path / "other", "qwen2", tie_word_embeddings=False, **values)
    with raises_error("checkpoint.weights.another_model", *named):
        to_hf(checkpoints["qwen2_padded"], tmp_path / "out", mesh, model=other)
    assert not (tmp_path / "out").exists()


def test_a_model_far_larger_than_the_checkpoint_is_not_built(checkpoints, folders, mesh, tmp_path):
    """The embedding alone would take terabytes."""
    shutil.copytree(folders["qwen2_padded"], tmp_path / "model")
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 10**13}))
    checkpoint = checkpoints["qwen2_padded"]
    first_digits = " 72000000"  # of the number of parameters
    with raises_error("convert.model.too_large", file, first_digits, checkpoint) as caught:
        to_hf(checkpoint, tmp_path / "out", mesh, model=tmp_path / "model")
    assert re.search(r"72\d+ parameters, .* have \d+ numbers", str(caught.value)), caught.value
    with raises_error("model.weights.not_of_config", "embed_tokens.weight", "(61, 36)"):
        to_megatron(tmp_path / "model", tmp_path / "out", mesh)


def test_damaged_checkpoint(checkpoints, mesh, folders, tmp_path):
    copy = to_megatron(folders["qwen2_padded"], tmp_path / "copy", mesh)
    for file in (copy / "model").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:1000])
    with raises_error("checkpoint.description.too_large", copy / "model"):
        to_hf(copy, tmp_path / "out", mesh)


def test_a_folder_that_cannot_be_written(folders, mesh, tmp_path):
    (tmp_path / "file").write_text("")
    with raises_error("convert.folder.not_written", tmp_path / "file/out"):
        to_megatron(folders["qwen2_padded"], tmp_path / "file/out", mesh)
