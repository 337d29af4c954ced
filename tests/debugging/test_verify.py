"""Nothing differs on a sound set-up; a planted fault is found, with its key, phase and tensor."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.errors import printed_keys
from helpers.models import tiny_llama_folder
from helpers.tiny_run import tiny_config
from rich.console import Console

from reinforce_rl.actor import policy
from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.debugging.verify import Verification, _variations, verify
from reinforce_rl.debugging.verify_step import DRAWN, GRADIENT, LOG_PROBS, SAMPLES, UPDATE, WEIGHTS, Check, check
from reinforce_rl.megatron.checkpointer import Checkpointer

ROOT = Path(__file__).parents[2]
REWARD = (
    "reward=function",
    "reward_function.name=reinforce_rl.rewards.functions.length",
    "+reward_function.kwargs.target=3",
    "+reward_function.kwargs.tolerance=5",
    "+reward_function.kwargs.unit=characters",
)


def config(folder: Path, *overrides: str) -> TrainConfig:
    if not (folder / "model").exists():
        tiny_llama_folder(folder / "model", vocab_size=32, layers=2, hidden=16, ffn=32, max_positions=16)
    return tiny_config(folder, *REWARD, *overrides)


def shown(found: Verification) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(found.table())
    return console.export_text()


def settings(found: Verification, verdict: str) -> list[str]:
    return list(dict.fromkeys(one.setting for one in found.checks if one.verdict == verdict))


def test_a_sound_set_up_is_the_same_in_every_way(tmp_path: Path) -> None:
    said: list[str] = []
    found = verify(config(tmp_path), say=said.append)
    assert {one.verdict for one in found.checks} == {"ok"}, shown(found)
    assert found.is_same and found.verdict() == ["The step is the same in all 19 ways that were tried"]
    assert {one.compared for one in found.checks} > {SAMPLES, DRAWN, LOG_PROBS, UPDATE, GRADIENT, WEIGHTS}
    tried = {word.partition("=")[0] for setting in settings(found, "ok") for word in setting.split() if "=" in word}
    assert tried == {
        "model.micro_batch_size",
        "model.reinforce.forward_micro_batch_size",
        "model.shared_prefix",
        "trainer.reinforce.rollout_batch_seq_length",
        "model.tokens_per_micro_batch",
        "model.logits_chunk_tokens",
        "model.reinforce.rollout_micro_batch_size",
        "model.reinforce.lean_decoding",
        "model.reinforce.generation_cache_tokens",
        "model.activations_checkpoint_granularity",
        "model.activations_checkpoint_method",
        "model.activations_checkpoint_num_layers",
        "model.optim.in_place_gradients",
    }
    of_resume = {one.compared: one for one in found.checks if one.setting == "killed after step 1 and resumed"}
    assert [one.bound for one in of_resume.values()] == [0.0] * 3, "bit for bit"
    assert any(0 < one.difference < one.bound for one in found.checks), "or the ways are not different ones"
    assert not (tmp_path / "run").exists(), "nothing is written into the run's folder"
    assert said[0].startswith("3 prompts x 4 samples of at most 5 tokens")


def test_a_loss_that_depends_on_the_micro_batches_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = policy.policy_loss

    def by_micro_batch(log_probs: torch.Tensor, entropy: Any, inputs: Any, denominators: Any, *rest: Any) -> Any:
        wrong = replace(denominators, sequences=denominators.sequences * len(log_probs) / 12)
        return whole(log_probs, entropy, inputs, wrong, *rest)

    monkeypatch.setattr(policy, "policy_loss", by_micro_batch)
    found = verify(config(tmp_path), resumes=False)
    differs = settings(found, "DIFFERS")
    assert "model.micro_batch_size=1" in differs and not found.is_same
    assert not any("rollout_micro" in one or "recompute" in one or "forward" in one for one in differs)
    (line,) = (one for one in found.verdict() if one.startswith("model.micro_batch_size=1 "))
    assert "changes the gradient by" in line and "first in model.embed_tokens.weight, in" in line
    assert found.verdict()[-1] == f"The step DIFFERS in {len(differs)} of 18 ways that were tried"
    assert "DIFFERS" in shown(found)


def test_samples_that_depend_on_the_batch_are_named(tmp_path: Path) -> None:
    cfg = config(tmp_path, "generation=helpers.faulty_generators.DependsOnBatch")
    found = verify(cfg, resumes=False)
    assert settings(found, "DIFFERS") == [f"model.reinforce.rollout_micro_batch_size={size}" for size in (1, 2)]
    assert all("changes the samples by" in one and "first in prompt" in one for one in found.verdict()[:2])


def test_equal_rewards_have_random_advantages(tmp_path: Path) -> None:
    cfg = config(tmp_path, "reward_function.name=helpers.reward_functions.always_666", "~reward_function.kwargs")
    found = verify(cfg, resumes=False, prompts=1, max_length=2)
    assert found.is_same and "1 prompts x 4 samples of at most 2 tokens" in found.head
    assert "the advantages are random numbers" in found.head


@pytest.mark.slow
def test_a_resume_that_loses_the_moments_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpointer, "_load", Checkpointer._load)  # takes the fault, which is planted here too, away
    found = verify(config(tmp_path, "generation=helpers.faulty_generators.ForgetsMoments"))
    assert settings(found, "DIFFERS") == ["killed after step 1 and resumed"]
    by_phase = {one.compared: one for one in found.checks if one.setting == "killed after step 1 and resumed"}
    assert [one.verdict for one in by_phase.values()] == ["ok", "DIFFERS", "DIFFERS"]
    assert "first in optimizer.state.exp_avg" in by_phase["Adam's moments after step 2"].detail


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("model.peft.peft_scheme=lora",)], ids=["whole", "lora"])
def test_every_layout_of_two_ranks(tmp_path: Path, more: tuple[str, ...]) -> None:
    found = verify(config(tmp_path, *more), ranks=2, resumes=False)
    assert {one.verdict for one in found.checks} == {"ok"}, shown(found)
    layouts = [one for one in settings(found, "ok") if one.startswith("trainer.devices=2")]
    assert len(layouts) == 6 and any("pipeline" in one for one in layouts)
    # A layout that cannot be built does not end the others.
    (tmp_path / "broken").mkdir()
    broken = config(tmp_path, *more, "+model.megatron_overrides.num_layers_in_first_pipeline_stage=2")
    found = verify(broken, ranks=2, resumes=False)
    assert settings(found, "FAILED") == ["trainer.devices=2 model.pipeline_model_parallel_size=2"]
    assert len([one for one in settings(found, "ok") if one.startswith("trainer.devices=2")]) == 5


@pytest.mark.parametrize(
    ("phase", "found", "difference", "is_same"),
    [
        (GRADIENT, [2.0, 1.0], 0.0, True),
        (GRADIENT, [2.0, 1.001], 0.001 / math.sqrt(5), False),
        (GRADIENT, [2.0, math.nan], math.inf, False),
        (LOG_PROBS, [2.0, 1.5], 0.5, False),
        (LOG_PROBS, [2.0], math.inf, False),
        (SAMPLES, [2.0], 0.5, False),
        (WEIGHTS, [2.0, 2.0], 1 / math.sqrt(5), False),
    ],
)
def test_differences(phase: str, found: list[float], difference: float, is_same: bool) -> None:
    base = {"zero": torch.zeros(1), "other": torch.tensor([2.0, 1.0])}
    one = check("setting", phase, base, {"zero": torch.zeros(1), "other": torch.tensor(found)}, 1e-5)
    assert one.difference == pytest.approx(difference, rel=1e-3)
    assert (one.verdict, one.detail) == (("ok", "") if is_same else ("DIFFERS", one.detail))
    assert is_same or one.detail == "first in other, in 1 of 2, most in other"


def test_a_setting_that_was_not_tried_does_not_count() -> None:
    found = Verification("", [Check("a", SAMPLES, 0.0, 0.0), Check("b=1", "layout", detail="why")])
    assert found.is_same and found.verdict() == [
        "not tried: b=1: why",
        "The step is the same in all 1 ways that were tried",
    ]
    found.checks.append(Check("c", "layout", detail="it died", failed=True))
    assert not found.is_same and "c cannot be computed: it died" in found.verdict()


def test_all_faults_of_the_configuration_are_one_message(tmp_path: Path) -> None:
    words = ["model.micro_batch_size=0", "trainer.reinforce.max_epochs=0", "--no-resume", "--ranks", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "reinforce_rl", "verify", *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert printed_keys(done.stderr).count("config.value.out_of_range") == 2
    assert "model.micro_batch_size is 0" in done.stderr
    assert "trainer.reinforce.max_epochs is 0" in done.stderr


@pytest.mark.parametrize(("device", "graphs"), [("cpu", []), ("cuda", [(False, None), (False, False)])])
def test_on_a_gpu_decoding_is_tried_without_graphs_and_without_static_steps(tmp_path, device, graphs):
    lengths = torch.tensor([4])
    rollouts = SimpleNamespace(prompt_lengths=lengths, response_lengths=lengths, rewards=lengths)
    step: Any = SimpleNamespace(data=SimpleNamespace(rollouts=rollouts), prompts=[None])
    mesh = SimpleNamespace(device=torch.device(device))
    settings = SimpleNamespace(shared_prefix=False)
    actor: Any = SimpleNamespace(lm=SimpleNamespace(mesh=mesh), settings=settings)
    prefix = "model.reinforce."
    tried = [
        (values[f"{prefix}cuda_graphs"], values.get(f"{prefix}static_decoding"))
        for values, _ in _variations(config(tmp_path), step, actor)
        if f"{prefix}cuda_graphs" in values
    ]
    assert tried == graphs
