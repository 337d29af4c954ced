"""The trainer from its configuration to the exported folder on one GPU.

It loads, validates, trains, saves and restores.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from helpers.episode_run import episode_overrides
from helpers.fake_cuda.machine import Machine
from helpers.fake_cuda.mode import Ledger
from helpers.models import tiny_llama_folder
from helpers.rewards import FunctionReward
from helpers.tiny_run import PROMPT_TOKENS, compose, metrics_of, odd_share, tiny_overrides

from reinforce_rl.config.load import load_config
from reinforce_rl.evaluation import evaluate as evaluation
from reinforce_rl.evaluation.chat import chat
from reinforce_rl.generation.native.conversation import ConversingDecoding, Exchange
from reinforce_rl.trainer import run as build

OVERRIDES = (
    "trainer.precision=bf16",
    "trainer.reinforce.save_interval=1",
    "trainer.reinforce.val_check_interval=2",
    "model.reinforce.offload_adam_states=true",
    "exp_manager.checkpoint_callback_params.save_hf_on_train_end=true",
)
LORA = ("model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=2")
DISTRIBUTED = ("model.optim.distributed=true", "model.optim.overlap_grad_sync=true")


@pytest.fixture(autouse=True)
def local_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score in this process: the server is a separate program."""
    for module in (build, evaluation):
        monkeypatch.setattr(
            module,
            "connect_to_reward_servers",
            lambda *args, **options: FunctionReward(odd_share, PROMPT_TOKENS),
        )


def run(machine: Machine, folder: Path, steps: int, *overrides: str) -> Ledger:
    given = (
        *tiny_overrides(folder, num_prompts=12),
        *OVERRIDES,
        f"trainer.reinforce.max_steps={steps}",
        *overrides,
    )
    cfg = load_config(compose(*given))
    with machine.rank() as ledger:
        trainer = build.train(cfg)
        assert trainer.model.mesh.device.type == "cuda"
        assert trainer.step == steps
    return ledger


@pytest.mark.parametrize(
    "setting", [pytest.param("shapes=true", marks=pytest.mark.slow), "memory=true", "tool=nsys"]
)
def test_a_profile_does_not_break_it(machine: Machine, tmp_path: Path, setting: str) -> None:
    run(machine, tmp_path, 1, "trainer.profile.steps=[1]", f"trainer.profile.{setting}")
    assert len(list(tmp_path.glob("run/profile/step_00001/*.trace.json.gz"))) == (
        setting == "shapes=true"
    )


@pytest.mark.parametrize(
    "overrides", [(), LORA, DISTRIBUTED], ids=["all weights", "LoRA", "distributed optimizer"]
)
def test_goes_through_and_on(machine: Machine, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run(machine, tmp_path, 2, *overrides)
    assert (tmp_path / "run" / "checkpoints" / "step_00000002").is_dir()
    run(machine, tmp_path, 3, *overrides)  # restores step 2
    lines = [line for line in metrics_of(tmp_path) if "train/rewards" in line]
    steps = [line["step"] for line in lines]
    assert steps == [1, 2, 3]
    # Values are guesses, but no NaN may decide the control flow.
    for line in lines:
        for key in ("train/init_policy_kl", "train/actor_loss"):
            assert math.isfinite(line[key])
    config_file = tmp_path / "run" / "hf" / "config.json"
    exported = json.loads(config_file.read_text())
    assert "bfloat16" in (exported.get("dtype"), exported.get("torch_dtype"))


@pytest.mark.parametrize("precision", ["bf16", "32"])
def test_episodes_of_several_turns(
    machine: Machine, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 the static decoder plays rounds; in fp32 rows keep their keys and values."""
    converse = ConversingDecoding.converse
    conversations = []

    def counted(decoding: ConversingDecoding, exchange: Exchange) -> None:
        conversations.append(decoding)
        converse(decoding, exchange)

    monkeypatch.setattr(ConversingDecoding, "converse", counted)
    # heads of a size that flash attention takes
    sizes = {"vocab_size": 128, "layers": 1, "hidden": 32, "heads": 2, "groups": 1, "ffn": 32}
    tiny_llama_folder(tmp_path / "model", **sizes)
    # most answers then end by themselves
    longer = "model.reinforce.length_params.max_length=40"
    given = episode_overrides(tmp_path, "TwoTurns", f"trainer.precision={precision}", longer)
    with machine.rank():
        trainer = build.train(load_config(compose(*given)))
        assert trainer.model.mesh.device.type == "cuda"
    lines = [line for line in metrics_of(tmp_path) if "train/turns" in line]
    assert len(lines) == 2
    assert bool(conversations) == (precision == "32")
    for line in lines:
        assert 1.5 < line["train/turns"] <= 2.0
        assert math.isfinite(line["train/actor_loss"])


def test_models_are_evaluated_and_talked_with(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_overrides(tmp_path)
    model = tmp_path / "model"
    keys = ("trainer.precision=bf16", "model.reinforce.length_params.max_length=5")
    with machine.rank():
        evaluated = evaluation.evaluate(
            [model],
            tmp_path / "train.jsonl",
            rewards=("gsm8k",),
            reference=model,
            samples=2,
            out=tmp_path / "out",
            overrides=keys,
        )
    (result,) = evaluated.models
    assert result.numbers["reward"].count == 16
    assert math.isfinite(result.numbers["KL"].mean)
    with machine.rank():
        chat(model, max_tokens=4, overrides=keys[:1], lines=iter(["eta", "oin"]))
    assert len(capsys.readouterr().out.splitlines()) >= 2, "an answer to each question"
