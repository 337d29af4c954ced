"""Every model family: loaded, generated with, trained and exported, alone and on two tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.batches import sequences
from helpers.fake_cuda import check_collectives
from helpers.families import MODELS, family_folder
from helpers.layouts import SETTINGS
from helpers.policies import megatron_model, random_tokens
from torch import bfloat16, long, ones, tensor

from reinforce_rl.actor.policy import ActorSettings, MegatronGPTReinforceActorModel
from reinforce_rl.data.batches import FINISH_LENGTH, Prompt, ReinforceBatch, RolloutBatch
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer
from reinforce_rl.preflight.fake_cuda.machine import Machine

WINDOW = 7  # of the families that have one: prompt and response are longer


def update(folder: Path, mesh: Mesh, out: Path) -> None:
    lm = megatron_model(folder, mesh, bfloat16)
    tokenizer = load_tokenizer(folder)
    sampling = SamplingParams(max_length=2)
    generator = NativeGenerator(lm, tokenizer)
    prompt = Prompt(0, "", tuple(range(3, 3 + WINDOW + 2)))
    assert generator.generate([prompt], 2, sampling, seed=0).tokens.shape == (2, 2)
    settings = ActorSettings(sampling, sampling, 2, 2, seed=0)
    actor = MegatronGPTReinforceActorModel(lm, tokenizer, generator, settings, with_reference=False)
    tokens = random_tokens(61, 2, WINDOW + 8)
    zero = 0.0 * ones(2)
    rollouts = RolloutBatch(
        sequences=tokens,
        prompt_lengths=tensor([WINDOW + 2] * 2, dtype=long),
        response_lengths=tensor([6, 3], dtype=long),
        group_ids=tensor([0, 1]),
        sample_ids=tensor([0, 0]),
        finish_reasons=(FINISH_LENGTH,) * 2,
        rewards=zero,
        valid=zero == 0,
    )
    batch = ReinforceBatch(rollouts, zero, zero, zero, ones(2, 6), rollouts.valid)
    optimizer = ActorOptimizer(*build_optimizer(actor.ddp, **SETTINGS))
    actor.get_loss_and_metrics(batch, sequences(2))
    optimizer.step()
    actor.export(folder, out)


@pytest.mark.parametrize("name", MODELS)
def test_runs(machine: Machine, tmp_path: Path, name: str) -> None:
    folder = family_folder(tmp_path, name)
    with machine.rank(), parallel_mesh() as mesh:
        update(folder, mesh, tmp_path / "alone")
    assert (tmp_path / "alone" / "model.safetensors").is_file()

    def turn(rank: int) -> None:
        with parallel_mesh(2, sequence_parallel=True) as mesh:
            update(folder, mesh, tmp_path / "shared")

    assert check_collectives(machine.ranks(2, turn)) > 0
