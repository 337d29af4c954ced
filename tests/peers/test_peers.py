"""Each preset and option that names a peer's formula, against that peer's own code from its wheel, in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.models import tiny_llama_folder
from helpers.tiny_run import compose, write_prompts
from peers.our_side import Trained, train
from peers.random_groups import SHAPES, Batch, random_batch, write_batches
from torch import Tensor

from reinforce_rl.config import TrainConfig, load_config

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TOLERANCE = 1e-6
BATCHES = [random_batch(seed) for seed in range(len(SHAPES))]

# The first run installs a gigabyte's third from PyPI.
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL 1.16 needs Python 3.11"),
]

Ours = Callable[..., Trained]
PeerNumbers = dict[str, Tensor]

# The sides' constants: beta, the largest generator weight, max_length and gamma are those of *_side.py.
NO_KL = "trainer.reinforce.initial_policy_kl_penalty=0"
BETA = "trainer.reinforce.initial_policy_kl_penalty=0.05"
TWO_PASSES = "trainer.reinforce.reinforce_epochs=2"  # the second of which is off-policy
CAP = "trainer.reinforce.generator_ratio_cap=1.3"


def option(**values: object) -> tuple[str, ...]:
    return tuple(f"trainer.reinforce.{key}={value}" for key, value in values.items())


def run(command: list[str], seconds: int) -> None:
    # Idle threads that spin cost a busy machine dearly, and no model hub is asked.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, timeout=seconds, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="session")
def peers_python() -> Path:
    """The Python of the peers' environment, which is made once and kept."""
    folder = ROOT / ".venv-peers"
    command = [sys.executable, str(ROOT / "tools" / "make_peers_env.py"), str(folder)]
    try:
        run(command, seconds=600)
    except AssertionError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no environment of the peers, and none could be made (fails where CI is set): {error}")
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, prompts, and the random batches as both sides read them."""
    folder = tmp_path_factory.mktemp("peers")
    tiny_llama_folder(folder / "model", vocab_size=32, layers=2, hidden=16, ffn=32, max_positions=16)
    write_prompts(folder / "prompts.jsonl", ["a"])
    write_batches(folder / "inputs.npz", BATCHES)
    return folder


def numbers_of(peer: str, python: Path, folder: Path, *arguments: Path) -> PeerNumbers:
    outputs = folder / f"{peer}.npz"
    run([str(python), "-W", "ignore", str(HERE / f"{peer}_side.py"), *map(str, arguments), str(outputs)], seconds=240)
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
    """Called with a batch and overrides of the shipped configuration: what this project's trainer makes of them."""

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


def assert_close(own: Tensor, theirs: Tensor, what: str) -> None:
    assert own.dtype == theirs.dtype == torch.float64
    assert own.shape == theirs.shape
    difference = float((own - theirs).abs().max())
    assert difference < TOLERANCE, f"{what}: {difference:.2e} apart, expected less than {TOLERANCE:g}"


VERL_ADVANTAGES = {
    "rloo": ("algorithm=rloo", NO_KL),
    "rloo_vectorized": ("algorithm=rloo", NO_KL),
    "rloo_with_kl/kl": ("algorithm=rloo", BETA),
    "rloo_with_kl/abs": ("algorithm=rloo", BETA, *option(kl_estimator="absolute_k1")),
    "rloo_with_kl/mse": ("algorithm=rloo", BETA, *option(kl_estimator="k2")),
    "rloo_with_kl/low_var_kl": ("algorithm=rloo", BETA, *option(kl_estimator="k3")),
    "grpo": ("algorithm=grpo",),
    "dr_grpo": ("algorithm=dr_grpo",),
    "returns_to_go/1.0": ("algorithm=reinforce_plus_plus", BETA, *option(advantage_whitening="none")),
    "returns_to_go/0.9": (
        "algorithm=reinforce_plus_plus",
        BETA,
        *option(advantage_whitening="none", discount_factor=0.9),
    ),
    "reinforce_plus_plus/1.0": ("algorithm=reinforce_plus_plus", BETA),
    "reinforce_plus_plus/0.9": ("algorithm=reinforce_plus_plus", BETA, *option(discount_factor=0.9)),
    "reinforce_plus_plus_baseline": (
        "algorithm=reinforce_plus_plus",
        NO_KL,
        *option(advantage_estimator="prompt_mean", credit_assignment="sequence", num_rollouts_per_prompt=4),
    ),
}

AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "fixed_length",
}
ESTIMATORS = {"kl": "k1", "abs": "absolute_k1", "mse": "k2", "low_var_kl": "k3"}
VERL_LOSSES = {
    "gspo": ("algorithm=rloo", NO_KL, TWO_PASSES)
    + option(importance_ratio="sequence_geometric", loss_aggregation="sequence_mean"),
    **{
        f"generator/{level}": ("algorithm=rloo", NO_KL, TWO_PASSES, CAP)
        + option(importance_ratio="token", loss_aggregation="token_mean", generator_correction=level)
        for level in ("token", "sequence")
    },
    **{
        f"clip/{theirs}": ("algorithm=rloo", NO_KL, TWO_PASSES)
        + option(importance_ratio="token", loss_aggregation=aggregation)
        for theirs, aggregation in AGGREGATIONS.items()
    },
    **{
        f"reinforce/{theirs}": ("algorithm=rloo", NO_KL) + option(loss_aggregation=aggregation)
        for theirs, aggregation in AGGREGATIONS.items()
    },
    **{
        f"whole/{their_estimator}/{theirs}": ("algorithm=rloo", BETA, TWO_PASSES)
        + option(importance_ratio="token", loss_aggregation=aggregation, entropy_bonus=0.01)
        + option(kl_placement="loss", kl_loss_weights="none", kl_estimator=estimator)
        for their_estimator, estimator in ESTIMATORS.items()
        for theirs, aggregation in AGGREGATIONS.items()
    },
}


class TestVerl:
    @pytest.mark.parametrize("name", VERL_ADVANTAGES)
    def test_advantages(self, name: str, verl: PeerNumbers, ours: Ours):
        for i, batch in enumerate(BATCHES):
            own = ours(batch, *VERL_ADVANTAGES[name])
            assert_close(own.advantages, verl[f"{i}/{name}"], f"batch {i}")

    @pytest.mark.parametrize("name", VERL_LOSSES)
    def test_losses_and_gradients(self, name: str, verl: PeerNumbers, ours: Ours):
        for i, batch in enumerate(BATCHES):
            own = ours(batch, *VERL_LOSSES[name])
            assert_close(own.loss, verl[f"{i}/loss/{name}"], f"loss of batch {i}")
            assert_close(own.gradient, verl[f"{i}/gradient/{name}"], f"gradient of batch {i}")

    def test_its_steered_kl_coefficient(self, verl: PeerNumbers, ours: Ours):
        # verl steers by the mean of a token, whichever way the KL enters the reward.
        steered = ("algorithm=rloo", BETA, *option(kl_reduction="mean", kl_target=0.1, kl_horizon=1000))
        for i, batch in enumerate(BATCHES):
            own = torch.tensor([0.05, ours(batch, *steered).kl_coefficient], dtype=torch.float64)
            assert_close(own, verl[f"{i}/kl_coefficients/kl"], f"batch {i}")
            assert own[1] != own[0]


TRL_LOSSES = {
    "rloo": ("algorithm=trl", TWO_PASSES),
    "rloo/no_kl": ("algorithm=trl", NO_KL, TWO_PASSES),
    "grpo": ("algorithm=grpo", NO_KL, TWO_PASSES),
    "grpo/on_policy": ("algorithm=grpo", NO_KL),
    "grpo/kl": ("algorithm=grpo", BETA, TWO_PASSES),
    "grpo/sequence": ("algorithm=grpo", NO_KL, TWO_PASSES, *option(importance_ratio="sequence_geometric")),
    "bnpo": ("algorithm=grpo", NO_KL, TWO_PASSES, *option(loss_aggregation="token_mean")),
    "dapo": ("algorithm=grpo", NO_KL, TWO_PASSES, *option(loss_aggregation="token_mean")),
    "dapo/asymmetric": ("algorithm=grpo", NO_KL, TWO_PASSES)
    + option(loss_aggregation="token_mean", ratio_clip_high=0.28),
    "dapo/entropy": ("algorithm=grpo", NO_KL, TWO_PASSES, *option(loss_aggregation="token_mean", entropy_bonus=0.01)),
    "dr_grpo": ("algorithm=grpo", NO_KL, TWO_PASSES, *option(loss_aggregation="fixed_length")),
    "dr_grpo/no_scale": ("algorithm=dr_grpo", TWO_PASSES),
    **{
        f"dapo/{level}_truncate": ("algorithm=grpo", BETA, TWO_PASSES, CAP)
        + option(loss_aggregation="token_mean", generator_correction=level)
        for level in ("token", "sequence")
    },
}


class TestTrl:
    @pytest.mark.parametrize("name", TRL_LOSSES)
    def test_advantages_losses_and_gradients(self, name: str, trl: PeerNumbers, ours: Ours):
        for i, batch in enumerate(BATCHES):
            own = ours(batch, *TRL_LOSSES[name])
            expected = torch.where(batch.mask, trl[f"{i}/{name}/advantages"][:, None], 0.0)
            assert_close(own.advantages, expected, f"advantages of batch {i}")
            assert_close(own.loss, trl[f"{i}/{name}/loss"], f"loss of batch {i}")
            assert_close(own.gradient, trl[f"{i}/{name}/gradient"], f"gradient of batch {i}")
