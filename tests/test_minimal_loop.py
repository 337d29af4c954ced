"""examples/minimal_loop.py: the reward rises, and its steps are the trainer's."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.errors import raises_error
from helpers.models import ROOT
from helpers.tiny_run import compose, tiny_trainer, write_prompts

import reinforce_rl
from reinforce_rl.config.load import load_config
from reinforce_rl.errors import GenerationError, ReinforceError
from reinforce_rl.monitoring.loggers import read_metrics
from reinforce_rl.policy.build import configured_mesh
from reinforce_rl.rewards.base import STATUS_OK, CompletedRewards, RewardRequest, Rewards


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal_loop", ROOT / "examples/minimal_loop.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return example.make_tiny_model(tmp_path_factory.mktemp("tiny"))


def open_and_close(model: Path, settings: dict[str, Any]) -> None:
    with reinforce_rl.open_policy(model, ["a:"], **settings):
        pass


class ExampleReward:
    """The example's reward as a source for the trainer."""

    def __init__(self, example: ModuleType):
        self._example = example

    def infer_rm(self, request: RewardRequest) -> CompletedRewards:
        pairs = zip(request.prompts, request.responses, strict=True)
        values = [self._example.reward(prompt, response) for prompt, response in pairs]
        status = torch.full((len(values),), STATUS_OK, dtype=torch.int32)
        return CompletedRewards(Rewards(torch.tensor(values), status))

    def close(self) -> None:
        pass


def trainer_metrics(folder: Path, model: Path, example: ModuleType, steps: int) -> list[dict]:
    """Return what the trainer logs with the example's settings."""
    prompts = write_prompts(folder / "prompts.jsonl", example.PROMPTS)
    settings: dict[str, Any] = {
        **example.SETTINGS,
        "pretrained_checkpoint.restore_from_path": model,
        "model.data.data_prefix.train": prompts,
        "model.data.shuffle": "false",
        "exp_manager.explicit_log_dir": folder / "run",
        "model.reinforce.num_rollout_samples": len(example.PROMPTS),
        "trainer.reinforce.num_rollouts_per_prompt": example.SAMPLES,
        "trainer.reinforce.advantage_estimator": "rloo",
        "trainer.reinforce.generator_log_probs": "false",
        "trainer.reinforce.max_epochs": steps,
        "trainer.reinforce.val_check_interval": 0,
    }
    config = load_config(compose(*(f"{key}={value}" for key, value in settings.items())))
    source = ExampleReward(example)
    with configured_mesh(config) as mesh, tiny_trainer(config, mesh, source) as trainer:
        trainer.fit()
    return read_metrics(folder / "run" / "metrics.jsonl")


@pytest.mark.more
def test_reward_rises_and_the_model_is_exported(example, model, capsys):
    history = example.main(model, steps=30)
    assert history[0]["reward"] < 0.1
    assert sum(step["reward"] for step in history[-5:]) / 5 > 0.4
    assert history[0]["kl"] == 0.0
    assert history[-1]["kl"] > 1.0
    assert capsys.readouterr().out.count("\n") == 30


@pytest.mark.more
def test_each_step_is_that_of_the_trainer(example, model, tmp_path):
    history = example.main(model, steps=3)
    metrics = trainer_metrics(tmp_path, model, example, steps=3)
    names = {
        "reward": "train/rewards",
        "kl": "train/init_policy_kl",
        "loss": "train/actor_loss",
        "grad_norm": "train/grad_norm",
    }
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for numbers, line in zip(history, metrics, strict=True):
        expected = {name: line[metric] for name, metric in names.items()}
        assert numbers == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert len({step["grad_norm"] for step in history}) == 3


def test_an_advantage_for_each_token_equal_within_responses_is_that_of_the_response(
    example, model, tmp_path
):
    updates = []
    for by_token in (False, True):
        with reinforce_rl.open_policy(model, example.PROMPTS, **example.SETTINGS) as policy:
            batch, request = policy.generate(policy.prompts, 2, step=1)
            assert request.prompts[:3] == ("a:", "a:", "e:")
            assert batch.valid.tolist() == [length > 0 for length in batch.response_lengths]
            advantages = torch.arange(16.0)
            if by_token:
                advantages = advantages[:, None].expand(16, batch.width)
            updates.append(policy.update(batch, advantages))
            exported = policy.export(tmp_path / f"export{by_token}")
            assert (exported / "model.safetensors").is_file()
    assert updates[0] == updates[1]
    assert updates[0].lr == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("key", "setting", "value"),
    [
        ("api.loop.not_colocated", "placement", "disaggregated"),
        ("api.loop.kl_in_loss", "algorithm", "grpo"),
        ("api.loop.schedule_without_steps", "model.optim.sched.name", "linear"),
        ("api.loop.no_effect", "trainer.reinforce.reinforce_epochs", 2),
        ("api.loop.no_effect", "trainer.reinforce.mini_batches", 2),
        ("api.loop.no_effect", "trainer.reinforce.max_epochs", 2),
        ("api.loop.no_effect", "model.global_batch_size", 8),
        ("api.loop.no_effect", "model.data.data_prefix.validation", None),
        ("api.loop.no_effect", "exp_manager.loggers", ["wandb"]),
        ("api.loop.no_effect", "preflight", True),
        ("api.loop.no_effect", "reward", "function"),
        ("config.key.unknown", "trainer.reinforce.max_step", 1),
        ("config.value.out_of_range", "model.optim.lr", -1.0),
    ],
)
def test_wrong_settings_are_refused(example, model, key, setting, value):
    settings = {**example.SETTINGS, setting: value}
    with pytest.raises(ReinforceError) as caught:
        open_and_close(model, settings)
    assert caught.value.key == key


def test_data_parallel_ranks_are_refused(example, model, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    settings = {**example.SETTINGS, "trainer.devices": 2}
    with raises_error("api.loop.data_parallel", 2, 1):
        open_and_close(model, settings)


def test_a_schedule_is_over_max_steps(example, model):
    settings = {
        **example.SETTINGS,
        "model.optim.sched.name": "linear",
        "trainer.reinforce.max_steps": 4,
    }
    with reinforce_rl.open_policy(model, example.PROMPTS, **settings) as policy:
        batch, _ = policy.generate(policy.prompts, 1, step=1)
        advantages = torch.ones(8)
        first = policy.update(batch, advantages)
        second = policy.update(batch, advantages)
    assert first.lr == pytest.approx(0.0075)
    assert second.lr == pytest.approx(0.005)


def test_misuse_of_a_policy_is_refused(example, model):
    settings = {**example.SETTINGS, "trainer.reinforce.initial_policy_kl_penalty": 0.0}
    with reinforce_rl.open_policy(model, example.PROMPTS, **settings) as policy:
        with raises_error("api.loop.already_open"):
            open_and_close(model, settings)
        first, second, *_ = policy.prompts
        repeated = [first, second, first]
        with raises_error("api.loop.repeated_prompt", first.id, 2):
            policy.generate(repeated, 2, step=1)
        batch, _ = policy.generate([first], 2, step=1)
        assert policy.log_probs(batch).shape == (2, batch.width)
        with raises_error("api.loop.no_reference"):
            policy.reference_log_probs(batch)
    with raises_error("api.loop.closed"):
        policy.generate([first], 2, step=1)
    with raises_error("api.loop.closed"):
        policy.log_probs(batch)
    advantages = torch.ones(2)
    with raises_error("api.loop.closed"):
        policy.update(batch, advantages)


def test_lost_weights_end_the_loop(example, model):
    with reinforce_rl.open_policy(model, example.PROMPTS, **example.SETTINGS) as policy:
        batch, _ = policy.generate(policy.prompts, 1, step=1)
        for weights in policy.actor.lm.parameters():
            weights.data.fill_(torch.nan)
        advantages = torch.ones(8)
        with raises_error("trainer.weights.not_finite"):
            policy.update(batch, advantages)


@pytest.mark.parametrize(("error", "is_kept"), [(GenerationError, True), (ValueError, False)])
def test_the_folder_of_logs_is_kept_after_an_error_of_the_engine(
    example, model, tmp_path, monkeypatch, error, is_kept
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened = reinforce_rl.open_policy(model, ["a:"], **example.SETTINGS)
    with pytest.raises(error), opened as policy:
        folder = Path(policy.cfg.exp_manager.explicit_log_dir)
        assert folder.parent == tmp_path
        raise error
    assert folder.is_dir() == is_kept
