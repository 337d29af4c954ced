"""Each preset and option that names a peer's formula, against the peer's code."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.environments import needs_peers, peers_environment
from helpers.models import tiny_llama_folder
from helpers.tiny_run import compose, write_prompts
from peers.our_side import Trained, train
from peers.random_groups import SHAPES, Batch, random_batch, write_batches
from torch import Tensor

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.load import load_config

HERE = Path(__file__).parent
TOLERANCE = 1e-6
BATCHES = [random_batch(seed) for seed in range(len(SHAPES))]

# The first run installs half a gigabyte from PyPI.
pytestmark = [
    pytest.mark.more,
    pytest.mark.timeout(1500),
    needs_peers,
]

Ours = Callable[..., Trained]
PeerNumbers = dict[str, Tensor]

# Beta, the cap of generator weights, max_length, gamma and the entropy bonus are set in
# verl_side.py and trl_side.py.
NO_KL = {"initial_policy_kl_penalty": 0}
KL = {"initial_policy_kl_penalty": 0.05}
KL_IN_LOSS = {**KL, "kl_placement": "loss", "kl_loss_weights": "none"}
OFF_POLICY = {"reinforce_epochs": 2}  # the second pass has a ratio
PPO = {**OFF_POLICY, "importance_ratio": "token"}


def settings(preset: str, *parts: dict[str, Any], **keys: Any) -> tuple[str, ...]:
    """Return a preset and further settings as overrides."""
    chosen = {key: value for part in (*parts, keys) for key, value in part.items()}
    return (
        f"algorithm={preset}",
        *(f"trainer.reinforce.{key}={value}" for key, value in chosen.items()),
    )


def run(command: list[str], seconds: int) -> None:
    # Spinning idle threads are expensive on a busy machine, and no model hub is used.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "0",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, timeout=seconds, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="session")
def peers_python() -> Path:
    return peers_environment() / "bin" / "python"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, prompts, and the random batches as both sides read them."""
    folder = tmp_path_factory.mktemp("peers")
    tiny_llama_folder(
        folder / "model", vocab_size=32, layers=2, hidden=16, ffn=32, max_positions=16
    )
    write_prompts(folder / "prompts.jsonl", ["a"])
    write_batches(folder / "inputs.npz", BATCHES)
    return folder


def numbers_of(peer: str, python: Path, folder: Path, *arguments: Path) -> PeerNumbers:
    outputs = folder / f"{peer}.npz"
    command = [
        str(python),
        "-W",
        "ignore",
        str(HERE / f"{peer}_side.py"),
        *map(str, arguments),
        str(outputs),
    ]
    run(
        command,
        seconds=480,
    )
    with np.load(outputs) as archive:
        return {key: torch.from_numpy(archive[key]) for key in archive.files}


@pytest.fixture(scope="session")
def verl(peers_python: Path, folder: Path) -> PeerNumbers:
    return numbers_of("verl", peers_python, folder, folder / "inputs.npz")


@pytest.fixture(scope="session")
def trl(peers_python: Path, folder: Path) -> PeerNumbers:
    return numbers_of("trl", peers_python, folder, folder / "inputs.npz", folder / "model")


@pytest.fixture(scope="session")
def ours(folder: Path) -> Ours:
    """Return a function that trains on a batch with overrides of the shipped configuration."""

    @cache
    def config_of(*overrides: str) -> TrainConfig:
        paths = (
            f"pretrained_checkpoint.restore_from_path={folder / 'model'}",
            f"model.data.data_prefix.train={folder / 'prompts.jsonl'}",
        )
        sizes = ("model.encoder_seq_length=16", "model.reinforce.length_params.max_length=12")
        return load_config(compose(*paths, *sizes, *overrides))

    def train_with(batch: Batch, *overrides: str, **options: object) -> Trained:
        return train(config_of(*overrides), batch, **options)  # type: ignore[arg-type]

    return train_with


def assert_close(values: Tensor, theirs: Tensor, quantity: str) -> None:
    assert values.dtype == theirs.dtype == torch.float64
    assert values.shape == theirs.shape
    difference = float((values - theirs).abs().max())
    assert difference < TOLERANCE, (
        f"{quantity}: {difference:.2e} apart, expected less than {TOLERANCE:g}"
    )


VERL_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "fixed_length",
}
VERL_KL = {"kl": "k1", "abs": "absolute_k1", "mse": "k2", "low_var_kl": "k3"}
VERL_ADVANTAGES = {
    "rloo": settings("rloo", NO_KL),
    "rloo_vectorized": settings("rloo", NO_KL),
    **{
        f"rloo_with_kl/{theirs}": settings("rloo", KL, kl_estimator=ours)
        for theirs, ours in VERL_KL.items()
    },
    "grpo": settings("grpo"),
    "dr_grpo": settings("dr_grpo"),
    "returns_to_go/1.0": settings("reinforce_plus_plus", KL, advantage_whitening="none"),
    "returns_to_go/0.9": settings(
        "reinforce_plus_plus", KL, advantage_whitening="none", discount_factor=0.9
    ),
    "reinforce_plus_plus/1.0": settings("reinforce_plus_plus", KL),
    "reinforce_plus_plus/0.9": settings("reinforce_plus_plus", KL, discount_factor=0.9),
    "reinforce_plus_plus_baseline": settings(
        "reinforce_plus_plus",
        NO_KL,
        advantage_estimator="prompt_mean",
        credit_assignment="sequence",
        num_rollouts_per_prompt=4,
    ),
}
VERL_LOSSES = {
    **{
        f"reinforce/{theirs}": settings("rloo", NO_KL, loss_aggregation=ours)
        for theirs, ours in VERL_AGGREGATIONS.items()
    },
    **{
        f"clip/{theirs}": settings("rloo", NO_KL, PPO, loss_aggregation=ours)
        for theirs, ours in VERL_AGGREGATIONS.items()
    },
    "gspo": settings(
        "rloo",
        NO_KL,
        OFF_POLICY,
        importance_ratio="sequence_geometric",
        loss_aggregation="sequence_mean",
    ),
    **{
        f"generator/{level}": settings(
            "rloo",
            NO_KL,
            PPO,
            loss_aggregation="token_mean",
            generator_correction=level,
            generator_ratio_cap=1.3,
        )
        for level in ("token", "sequence")
    },
    **{
        f"whole/{kl}/{theirs}": settings(
            "rloo",
            KL_IN_LOSS,
            PPO,
            kl_estimator=estimator,
            loss_aggregation=ours,
            entropy_bonus=0.01,
        )
        for kl, estimator in VERL_KL.items()
        for theirs, ours in VERL_AGGREGATIONS.items()
    },
}


class TestVerl:
    @pytest.mark.parametrize("name", VERL_ADVANTAGES)
    def test_advantages(self, name: str, verl: PeerNumbers, ours: Ours):
        for i, batch in enumerate(BATCHES):
            trained = ours(batch, *VERL_ADVANTAGES[name])
            expected = verl[f"{i}/{name}"]
            assert_close(trained.advantages, expected, f"batch {i}")

    @pytest.mark.parametrize("name", VERL_LOSSES)
    def test_losses_and_gradients(self, name: str, verl: PeerNumbers, ours: Ours):
        for i, batch in enumerate(BATCHES):
            trained = ours(batch, *VERL_LOSSES[name])
            expected = verl[f"{i}/loss/{name}"]
            assert_close(trained.loss, expected, f"loss of batch {i}")
            theirs = verl[f"{i}/gradient/{name}"]
            assert_close(trained.gradient, theirs, f"gradient of batch {i}")

    def test_its_steered_kl_coefficient(self, verl: PeerNumbers, ours: Ours):
        # verl adapts by the mean per token, however the KL enters the reward.
        steered = settings("rloo", KL, kl_reduction="mean", kl_target=0.1, kl_horizon=1000)
        for i, batch in enumerate(BATCHES):
            coefficient = torch.tensor(ours(batch, *steered).kl_coefficient, dtype=torch.float64)
            assert_close(coefficient, verl[f"{i}/kl_coefficient"], f"batch {i}")
            assert abs(float(coefficient) - 0.05) > 10 * TOLERANCE


TRL_LOSSES = {
    "rloo": settings("trl", OFF_POLICY),
    "rloo/no_kl": settings("trl", NO_KL, OFF_POLICY),
    "grpo": settings("grpo", NO_KL, PPO),
    "grpo/on_policy": settings("grpo", NO_KL),
    "grpo/kl": settings("grpo", KL, PPO),
    "grpo/weighted_kl": settings("grpo", KL, kl_loss_weights="token"),
    "grpo/sequence": settings("grpo", NO_KL, OFF_POLICY, importance_ratio="sequence_geometric"),
    "bnpo": settings("grpo", NO_KL, PPO, loss_aggregation="token_mean"),
    "dapo": settings("grpo", NO_KL, PPO, loss_aggregation="token_mean"),
    "dapo/asymmetric": settings(
        "grpo", NO_KL, PPO, loss_aggregation="token_mean", ratio_clip_high=0.28
    ),
    "dapo/entropy": settings("grpo", NO_KL, PPO, loss_aggregation="token_mean", entropy_bonus=0.01),
    "dr_grpo": settings("grpo", NO_KL, PPO, loss_aggregation="fixed_length"),
    "dr_grpo/no_scale": settings("dr_grpo", OFF_POLICY),
    **{
        f"dapo/{level}_truncate": settings(
            "grpo",
            KL,
            PPO,
            loss_aggregation="token_mean",
            generator_correction=level,
            generator_ratio_cap=1.3,
        )
        for level in ("token", "sequence")
    },
}


class TestTrl:
    @pytest.mark.parametrize("name", TRL_LOSSES)
    def test_advantages_losses_and_gradients(self, name: str, trl: PeerNumbers, ours: Ours):
        for i, batch in enumerate(BATCHES):
            trained = ours(batch, *TRL_LOSSES[name])
            advantages = trl[f"{i}/{name}/advantages"]
            expected = torch.where(batch.mask, advantages[:, None], 0.0)
            assert_close(trained.advantages, expected, f"advantages of batch {i}")
            theirs = trl[f"{i}/{name}/loss"]
            assert_close(trained.loss, theirs, f"loss of batch {i}")
            gradient = trl[f"{i}/{name}/gradient"]
            assert_close(trained.gradient, gradient, f"gradient of batch {i}")

    @pytest.mark.parametrize("name", ["rloo", "grpo"])
    def test_samples_without_a_score(self, name: str, trl: PeerNumbers, ours: Ours):
        for i, batch in enumerate(BATCHES):
            trained = ours(batch, *TRL_LOSSES[name], scored=batch.scored)
            theirs = {
                key: trl[f"{i}/{name}/unscored/{key}"] for key in ("advantages", "loss", "gradient")
            }
            expected = torch.where(batch.mask, theirs["advantages"][:, None], 0.0)
            assert_close(trained.advantages, expected, f"advantages of batch {i}")
            # TRL's loss is a mean that includes samples without a score; this project's is over
            # the samples that count.
            share = float(batch.scored.double().mean())
            assert_close(trained.loss * share, theirs["loss"], f"loss of batch {i}")
            assert_close(trained.gradient * share, theirs["gradient"], f"gradient of batch {i}")


def test_nemo_aligner_by_hand(ours: Ours):
    """NeMo-Aligner's formula by hand, since no wheel of it runs here.

    The formula is that of `trainer/reinforce.py` and of the actor's loss. Per response
    r' = r - beta mean_t |l_t - l_ref,t|, baseline = mean of r' over the other ended responses of
    the prompt, loss = mean over responses of -(r' - baseline) mean_t l_t. It averages over the
    tokens of a micro-batch, whose size has to be 1, and Megatron averages micro-batches.
    """
    #          l - l_ref a token       mean | |   r      r' = r - 0.01 mean
    # a1       0.2  -0.4               0.3        1.0    0.997
    # a2       0.1                     0.1        0.0    -0.001
    # a3       -0.3  0.6  0.0          0.3        2.0    1.997
    # b1       0.4   0.4               0.4        0.5    0.496
    # b2       -0.2                    0.2        -0.5   -0.502
    # b3       0.5  -0.5  0.1          cut at the length limit: out of loss and baseline
    differences = torch.tensor(
        [
            [0.2, -0.4, 0],
            [0.1, 0, 0],
            [-0.3, 0.6, 0],
            [0.4, 0.4, 0],
            [-0.2, 0, 0],
            [0.5, -0.5, 0.1],
        ],
        dtype=torch.float64,
    )
    lengths = torch.tensor([2, 1, 3, 2, 1, 3])
    by_response = torch.tensor([-1.5, -2.5, -1.5, -1.0, -1.5, -0.5], dtype=torch.float64)
    log_probs = by_response[:, None].expand(6, 3)
    rewards = torch.tensor([1.0, 0.0, 2.0, 0.5, -0.5, 1.5], dtype=torch.float64)
    group_ids = torch.tensor([0, 0, 0, 1, 1, 1])
    mask = torch.arange(3) < lengths[:, None]
    batch = Batch(
        rewards=rewards,
        group_ids=group_ids,
        mask=mask,
        log_probs=log_probs,
        old_log_probs=log_probs,
        generator_log_probs=log_probs,
        reference_log_probs=log_probs - differences,
        entropy=torch.zeros_like(log_probs),
        scored=torch.ones(6, dtype=torch.bool),
    )
    trained = ours(batch, "algorithm=nemo_aligner", truncated=[5])
    # a1: 0.997 - (-0.001 + 1.997) / 2 and so on; b1: 0.496 - -0.502.
    advantages = torch.tensor([-0.001, -1.498, 1.499, 0.998, -0.998, 0.0], dtype=torch.float64)
    expected = torch.where(batch.mask, advantages[:, None], 0.0)
    assert_close(trained.advantages, expected, "advantages")
    # -A / (tokens of the response) / (6 responses), where the one that was cut counts. Here the
    # mean is over five.
    shares = [0.001 / 2, 1.498, -1.499 / 3, -0.998 / 2, 0.998, 0.0]
    per_token = torch.tensor(shares, dtype=torch.float64) / 6
    expected = torch.where(batch.mask, per_token[:, None], 0.0)
    assert_close(trained.gradient * 5 / 6, expected, "gradient")
    # -(A of a response) (l of each of its tokens): (-0.0015 - 3.745 + 2.2485 + 0.998 - 1.497) / 6.
    expected = torch.tensor(-1.997 / 6, dtype=torch.float64)
    assert_close(trained.loss * 5 / 6, expected, "loss")
