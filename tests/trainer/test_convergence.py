"""The real trainer on an enumerable policy reaches the optimum that theory gives."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from helpers.models import tiny_llama_folder
from helpers.policies import transformers_logits, transformers_model
from helpers.rewards import FunctionReward
from helpers.tiny_run import compose, write_prompts
from helpers.vllm_engine import SHAPE, vllm_overrides
from torch import Tensor

from reinforce_rl.config.load import load_config
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.monitoring.run import SilentMonitor
from reinforce_rl.rollout.prompts import build_datasets
from reinforce_rl.trainer.reinforce import ReinforceTrainer
from reinforce_rl.trainer.run import build_trainer

VOCABULARY = 8
LENGTH = 2
BETA = 0.5
STEPS = 160
# Prompts and token ids, of different lengths and without repeated tokens: attention over equal
# tokens equals attention over one, so a policy cannot tell the contexts "a" and "aa" apart, and the
# optimum would be out of its reach.
PROMPTS = {"at": (7, 6), "tea": (6, 5, 7)}
RESPONSES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))


def forget_stop_tokens(model: Path) -> None:
    """Without them each response has exactly `LENGTH` tokens of the whole vocabulary."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads((model / name).read_text())
        values.pop("eos_token", None)
        values.pop("eos_token_id", None)
        (model / name).write_text(json.dumps(values))


def log_distribution(model: Path, prompt: tuple[int, ...], temperature: float) -> Tensor:
    """log pi of every response, by transformers: float64 [64]."""
    contexts = torch.tensor([prompt]).expand(len(RESPONSES), -1)
    sequences = torch.cat([contexts, RESPONSES], dim=1)
    logits = transformers_logits(transformers_model(model), sequences).double() / temperature
    response_logits = logits[:, len(prompt) - 1 : -1]
    predicted = response_logits.log_softmax(dim=-1)
    of_tokens = predicted.gather(2, RESPONSES[:, :, None])[..., 0]
    return of_tokens.sum(dim=1)


def kl(left: Tensor, right: Tensor) -> float:
    return float((left.exp() * (left - right)).sum())


@pytest.mark.more
@pytest.mark.parametrize(
    ("generation", "temperature"),
    [
        pytest.param("native", 1.0, marks=pytest.mark.slow),
        ("native", 1.6),
        pytest.param(
            "vllm", 1.6, marks=[pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]
        ),
    ],
)
def test_it_converges_to_the_closed_form(tmp_path, mesh: Mesh, generation, temperature):
    """pi_ref * exp(r / beta) / Z; a wrong sign, beta, temperature or mask would miss it."""
    shape, rate = (SHAPE, 0.003) if generation == "vllm" else ({}, 0.01)
    model = tiny_llama_folder(
        tmp_path / "model",
        vocab_size=VOCABULARY,
        tied=False,
        layers=1,
        max_positions=8,
        logit_scale=0.6,
        **shape,
    )
    forget_stop_tokens(model)
    generator = torch.Generator().manual_seed(1)
    rewards = {}
    for ids in PROMPTS.values():
        rewards[ids] = torch.rand(len(RESPONSES), generator=generator) * 2 - 1

    def score(sequence: list[int]) -> float:
        first, second = sequence[-LENGTH:]
        of_prompt = rewards[tuple(sequence[:-LENGTH])]
        return float(of_prompt[first * VOCABULARY + second])

    prompts = write_prompts(tmp_path / "prompts.jsonl", [*PROMPTS] * 24)
    config = load_config(
        compose(
            f"pretrained_checkpoint.restore_from_path={model}",
            f"model.data.data_prefix.train={prompts}",
            f"exp_manager.explicit_log_dir={tmp_path / 'run'}",
            "model.encoder_seq_length=8",
            *(vllm_overrides() if generation == "vllm" else ()),
            f"model.reinforce.length_params.max_length={LENGTH}",
            "model.reinforce.num_rollout_samples=48",
            "model.reinforce.rollout_micro_batch_size=48",
            "model.micro_batch_size=384",
            f"model.reinforce.sampling_params.temperature={temperature}",
            f"trainer.reinforce.max_epochs={STEPS}",
            "trainer.reinforce.num_rollouts_per_prompt=8",
            "trainer.reinforce.val_check_interval=0",
            f"trainer.reinforce.initial_policy_kl_penalty={BETA}",
            f"model.optim.lr={rate}",
            "model.optim.weight_decay=0",
            "model.optim.sched.name=linear",
        )
    )
    trainer = train(config, mesh, score)
    assert trainer.step == STEPS
    trainer.model.generator.close()
    trained = trainer.model.export(model, tmp_path / "trained")

    for ids, table in rewards.items():
        reference = log_distribution(model, ids, temperature)
        policy = log_distribution(trained, ids, temperature)

        def optimum(sign: float = 1.0, beta: float = BETA, *, at=reference, table=table) -> Tensor:
            return (at + sign * table.double() / beta).log_softmax(dim=0)

        distance = kl(policy, optimum())
        assert distance < 0.01, (
            f"{distance} from the optimum; the reference is {kl(reference, optimum())} from it"
        )
        assert kl(optimum(), policy) < 0.01
        # The check can fail: other optima are farther away than the bound.
        assert kl(reference, optimum()) > 0.1
        assert kl(policy, optimum(-1.0)) > 0.1
        assert kl(policy, optimum(beta=BETA / 1.5)) > 0.015 < kl(policy, optimum(beta=BETA * 1.5))


def train(config, mesh: Mesh, score) -> ReinforceTrainer:
    tokenizer = load_tokenizer(config.pretrained_checkpoint.restore_from_path)
    silent = SilentMonitor(config.exp_manager.explicit_log_dir)
    trainer = build_trainer(
        config, mesh, tokenizer, build_datasets(config, tokenizer), FunctionReward(score, 0), silent
    )
    trainer.fit()
    return trainer
