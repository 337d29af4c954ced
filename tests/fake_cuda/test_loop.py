"""A training loop on `open_policy` on one GPU, and on the ranks of a model that two GPUs share."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers.fake_cuda.machine import Machine

from reinforce_rl import open_policy
from reinforce_rl.algorithm.advantages import rloo
from reinforce_rl.algorithm.kl import sequence_kl

PROMPTS = ["abc", "de"]
SAMPLES = 3
SETTINGS = {
    "trainer.precision": "bf16",
    "trainer.reinforce.initial_policy_kl_penalty": 0.1,
    "model.encoder_seq_length": 32,
    "model.reinforce.length_params.max_length": 5,
    "model.reinforce.offload_adam_states": True,
}


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_a_step_of_a_loop(
    machine: Machine, folders: dict[int, Path], tmp_path: Path, rank: int, ranks: int
) -> None:
    layout = {"model.tensor_model_parallel_size": ranks, "trainer.devices": ranks}
    with (
        machine.rank(rank, ranks),
        open_policy(folders[2], PROMPTS, **SETTINGS, **layout) as policy,
    ):
        assert policy.actor.mesh.device.type == "cuda"
        batch, texts = policy.generate(policy.prompts, SAMPLES, 1)
        assert len(texts.responses) == len(PROMPTS) * SAMPLES
        log_probs = policy.log_probs(batch)
        reference = policy.reference_log_probs(batch)
        for values in (log_probs, reference):
            assert values.device.type == "cpu"
            assert values.shape == batch.response_mask.shape
        kl = sequence_kl(log_probs, reference, batch.response_mask)
        rewards = torch.arange(len(batch.valid), dtype=torch.float32) - kl
        update = policy.update(batch, rloo(rewards, batch.group_ids, batch.valid))
        # Values are guesses, but no NaN may decide the control flow.
        assert math.isfinite(update.loss)
        assert not update.skipped
        if ranks == 1:
            policy.export(tmp_path / "hf")
            assert (tmp_path / "hf" / "config.json").is_file()
