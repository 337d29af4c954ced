"""LoRA runs learn, and their checkpoints only contain the updates.

They resume bit for bit, and only on their base.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch
from helpers.errors import raises_error
from helpers.models import tiny_llama_folder
from helpers.policies import megatron_model
from helpers.ranks import run_ranks
from helpers.tiny_run import (
    largest_difference,
    metrics_of,
    tiny_config,
    tiny_overrides,
    tiny_trainer,
    without_times,
)
from megatron.core import dist_checkpointing
from safetensors.torch import load_file

from reinforce_rl.megatron.checkpointer import latest_checkpoint
from reinforce_rl.megatron.convert import to_hf
from reinforce_rl.megatron.hf_folder import HFFolder

DRIVER = Path(__file__).parents[1] / "helpers" / "train_tiny.py"
RECOMPUTED = (
    "model.activations_checkpoint_granularity=full",
    "model.activations_checkpoint_method=uniform",
    "model.activations_checkpoint_num_layers=1",
)
LORA = (
    "model.peft.peft_scheme=lora",
    "model.peft.lora_tuning.adapter_dim=4",
    "model.peft.lora_tuning.alpha=8",
)
CHANGED = "resume_with_changes=true"  # does not help here
LONG = (
    *LORA,
    "trainer.reinforce.max_epochs=12",
    "trainer.reinforce.max_steps=24",
    "trainer.reinforce.save_interval=12",
    "trainer.reinforce.num_rollouts_per_prompt=8",
    "trainer.reinforce.initial_policy_kl_penalty=0.01",
    "model.optim.lr=0.02",
)


def run(folder: Path, mesh, *overrides: str):
    with tiny_trainer(tiny_config(folder, *overrides), mesh) as trainer:
        trainer.fit()
    return trainer


def parameters(trainer, trained: bool) -> dict[str, torch.Tensor]:
    named = trainer.model.lm.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad == trained}


@pytest.fixture(scope="module")
def whole_run(mesh, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, mesh, *LONG)


@pytest.mark.more
def test_learns_and_leaves_the_base(whole_run, mesh):
    folder, trainer = whole_run
    lines = [line for line in metrics_of(folder) if "train/rewards" in line]
    rewards = [line["train/rewards"] for line in lines]
    assert statistics.fmean(rewards[-6:]) > statistics.fmean(rewards[:6]) + 0.15
    # The reference is the base, so the KL starts at zero.
    assert abs(lines[0]["train/init_policy_kl"]) < 1e-6
    assert lines[-1]["train/init_policy_kl"] > 0.05
    base = dict(megatron_model(folder / "model", mesh).named_parameters())
    frozen = parameters(trainer, trained=False)
    assert frozen.keys() == base.keys()
    for name in base:
        assert torch.equal(frozen[name], base[name])


@pytest.mark.more
def test_checkpoint_holds_the_updates_alone(whole_run):
    folder, trainer = whole_run
    checkpoint = latest_checkpoint(folder / "run" / "checkpoints")
    stored = dist_checkpointing.load_tensors_metadata(str(checkpoint.folder / "model"))
    for name in stored:
        assert "lora_A" in name or "lora_B" in name
    updates = sum(p.numel() for p in parameters(trainer, trained=True).values())
    # The updates and Adam's two moments.
    assert (
        sum(tensor.local_shape[0] * tensor.local_shape[1] for tensor in stored.values())
        == 3 * updates
    )


@pytest.mark.more
def test_resumes_bit_for_bit(whole_run, mesh, tmp_path):
    run(tmp_path, mesh, *LONG, "trainer.reinforce.max_steps=12")
    again = run(tmp_path, mesh, *LONG)
    metrics = metrics_of(tmp_path)
    expected = metrics_of(whole_run[0])
    assert [without_times(line) for line in metrics] == [without_times(line) for line in expected]
    mine = parameters(again, trained=True)
    others = parameters(whole_run[1], trained=True)
    for name in others:
        assert torch.equal(mine[name], others[name])


@pytest.fixture(scope="module")
def short_run(mesh, tmp_path_factory):
    folder = tmp_path_factory.mktemp("short")
    run(folder, mesh, *LORA, "trainer.reinforce.max_steps=1")
    return folder


@pytest.mark.parametrize(
    ("overrides", "kind", "values"),
    [
        (
            [],
            "another_scheme",
            ["holds LoRA updates only", "has all weights", "model.peft.peft_scheme"],
        ),
        (
            [*LORA, "model.peft.lora_tuning.alpha=9"],
            "other_updates",
            ["model.peft.lora_tuning.alpha: 8.0 ", " 9.0 "],
        ),
        (
            [*LORA, "model.peft.lora_tuning.adapter_dim=5"],
            "other_updates",
            ["model.peft.lora_tuning.adapter_dim: 4 ", " 5 "],
        ),
        (
            [*LORA, "model.peft.lora_tuning.target_modules=[q_proj]"],
            "other_updates",
            ["model.peft.lora_tuning.target_modules", " ['q_proj'] "],
        ),
    ],
)
def test_another_shape_is_refused(short_run, mesh, overrides, kind, values):
    config = tiny_config(short_run, *overrides, CHANGED)
    with (
        raises_error(f"lora.checkpoint.{kind}", *values, "exp_manager.explicit_log_dir"),
        tiny_trainer(config, mesh),
    ):
        pass


def test_another_base_is_refused(short_run, mesh, tmp_path):
    other = tiny_llama_folder(
        tmp_path / "other", vocab_size=32, layers=1, hidden=16, ffn=32, max_positions=16, seed=1
    )
    config = tiny_config(
        short_run, *LORA, f"pretrained_checkpoint.restore_from_path={other}", CHANGED
    )
    key = "pretrained_checkpoint.restore_from_path"
    with raises_error("lora.checkpoint.other_updates", key), tiny_trainer(config, mesh):
        pass


def test_a_checkpoint_of_all_weights_is_refused(mesh, tmp_path):
    run(tmp_path, mesh, "trainer.reinforce.max_steps=1")
    with (
        raises_error(
            "lora.checkpoint.another_scheme", "holds all weights", "has LoRA updates only"
        ),
        tiny_trainer(tiny_config(tmp_path, *LORA, CHANGED), mesh),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        [],
        ["model.tensor_model_parallel_size=2"],
        ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"],
        ["model.pipeline_model_parallel_size=2"],
        ["model.context_parallel_size=2"],
        ["model.tensor_model_parallel_size=2", *RECOMPUTED],
    ],
    ids=["data", "tensor", "sequence", "pipeline", "context", "recomputed"],
)
def test_two_ranks_equal_one(layout, mesh, tmp_path):
    short = [*LORA, "trainer.reinforce.max_steps=3", "trainer.reinforce.max_epochs=2"]
    two_ranks = [
        "trainer.devices=2",
        *layout,
        "exp_manager.checkpoint_callback_params.save_hf_on_train_end=true",
    ]
    single = tmp_path / "one"
    double = tmp_path / "two"
    for folder in (single, double):
        tiny_llama_folder(
            folder / "model", vocab_size=32, layers=2, hidden=16, ffn=32, max_positions=16
        )
    run_ranks(DRIVER, 2, *tiny_overrides(double), *short, *two_ranks, timeout=240)
    trainer = run(single, mesh, *short)
    for lines in zip(metrics_of(double), metrics_of(single), strict=True):
        metrics, expected = map(without_times, lines)
        # Micro-batches of half the size have different padding.
        assert metrics.pop("train/padding_fraction") >= 0 <= expected.pop("train/padding_fraction")
        assert largest_difference(metrics, expected) < 1e-3
    trainer.model.export(single / "model", single / "run" / "hf")
    adapter_folder = single / "run" / "adapter"
    trainer.model.export_adapter(single / "model", adapter_folder)
    for file in ("hf/model.safetensors", "adapter/adapter_model.safetensors"):
        tensors = load_file(double / "run" / file)
        expected = load_file(single / "run" / file)
        assert tensors.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(tensors[name], value, atol=1e-3, rtol=0)


def test_fingerprint(tmp_path):
    """It is equal for other files of the same weights, and differs for other weights."""
    single = HFFolder(tiny_llama_folder(tmp_path / "one"))
    many = HFFolder(tiny_llama_folder(tmp_path / "many", max_shard_size="20KB"))
    names = {entry.name for entry in many.folder.glob("*.safetensors")}
    assert len(names) > 1
    assert single.fingerprint() == many.fingerprint()
    others = [
        tiny_llama_folder(tmp_path / "seed", seed=1),
        tiny_llama_folder(tmp_path / "wide", ffn=96),
    ]
    assert len({single.fingerprint(), *(HFFolder(folder).fingerprint() for folder in others)}) == 3


@pytest.mark.more
def test_exports_at_the_end(whole_run, tmp_path):
    folder, trainer = whole_run
    merged = load_file(
        trainer.model.export(folder / "model", tmp_path / "hf") / "model.safetensors"
    )
    adapter = trainer.model.export_adapter(folder / "model", tmp_path / "adapter")
    values = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    base = load_file(folder / "model" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    a, b = (values[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    update = config["lora_alpha"] / config["r"] * b @ a
    expected = base[f"{name}.weight"] + update
    torch.testing.assert_close(merged[f"{name}.weight"], expected, atol=1e-6, rtol=0)
    assert update.abs().max() > 1e-2
    assert config["base_model_name_or_path"] == str(folder / "model")


@pytest.mark.more
def test_a_checkpoint_as_a_hugging_face_folder(whole_run, mesh, tmp_path):
    """`convert_checkpoint.py to-hf` merges like the run itself."""
    folder, trainer = whole_run
    expected = load_file(
        trainer.model.export(folder / "model", tmp_path / "hf") / "model.safetensors"
    )
    tensors = load_file(
        to_hf(folder / "run", tmp_path / "again", mesh, model=folder / "model")
        / "model.safetensors"
    )
    assert tensors.keys() == expected.keys()
    for name in expected:
        assert torch.equal(tensors[name], expected[name])
    other = tiny_llama_folder(
        tmp_path / "other", vocab_size=32, layers=1, hidden=16, ffn=32, max_positions=16, seed=1
    )
    key = "pretrained_checkpoint.restore_from_path"
    with raises_error("lora.checkpoint.other_updates", key):
        to_hf(folder / "run", tmp_path / "wrong", mesh, model=other)
