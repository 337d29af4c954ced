"""Checkpoints: a run that goes on from one equals a run that never stopped, and a failed save harms nothing."""

from __future__ import annotations

import os
import random
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.accumulate import accumulate_gradients
from helpers.models import tiny_llama_folder
from helpers.policies import megatron_model

from reinforce_rl.errors import CheckpointError
from reinforce_rl.megatron import checkpoint as subject
from reinforce_rl.megatron.checkpoint import Checkpoint, Checkpointer, latest_checkpoint
from reinforce_rl.megatron.log_probs import response_log_probs
from reinforce_rl.megatron.optimizer import (
    ActorOptimizer,
    OptimizerSettings,
    build_optimizer,
    wrap_data_parallel,
)

SETTINGS = OptimizerSettings(
    lr=1e-2,
    min_lr=1e-4,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    eps=1e-8,
    schedule="linear",
    warmup_steps=2,
    constant_steps=0,
    total_steps=10,
    clip_grad=1.0,
)


class Run:
    """What a run has to save, on a random model."""

    def __init__(self, mesh, model_folder: Path, folder: Path, settings: OptimizerSettings = SETTINGS, **options):
        self.lm = megatron_model(model_folder, mesh)
        self.ddp = wrap_data_parallel(self.lm)
        parts = build_optimizer(self.ddp, settings)
        self.optimizer = ActorOptimizer(*parts)
        self.checkpointer = Checkpointer(folder, mesh, self.ddp, *parts, **options)

    def train(self, steps: int) -> list[float]:
        """Draws its data from torch's generator, so that random state matters; the gradient norms."""
        norms = []
        for _ in range(steps):
            sequences = torch.randint(4, 64, (2, 12))
            lengths = torch.tensor([5, 3]), torch.tensor([7, 6])

            def loss_of(model, batch):
                scores = response_log_probs(model, self.lm, *batch, temperature=1.0, width=7, chunk_tokens=4)
                return -scores.log_probs.sum()

            accumulate_gradients(self.ddp, [(sequences, *lengths)], loss_of)
            norms.append(self.optimizer.step().grad_norm)
        return norms

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.lm.named_parameters()}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of one shape and one of another."""
    root = tmp_path_factory.mktemp("models")
    folders = [tiny_llama_folder(root / str(seed), seed=seed) for seed in (0, 1)]
    return [*folders, tiny_llama_folder(root / "wide", hidden=48)]


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_goes_on_bit_for_bit(mesh, models, tmp_path):
    """Three steps after it: a restored step counter or moment that is wrong shows at the third at the latest."""
    torch.manual_seed(7)
    random.seed(8)
    np.random.seed(9)
    run = Run(mesh, models[0], tmp_path)
    run.train(3)
    written = run.checkpointer.save(3, {"step": 3, "data_position": {"epoch": 0}})
    norms, weights = run.train(3), run.weights()
    draws = random.random(), np.random.rand()

    other = Run(mesh, models[1], tmp_path)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    other.train(1)
    found = latest_checkpoint(tmp_path)
    assert found == Checkpoint(written, {"step": 3, "data_position": {"epoch": 0}})
    other.checkpointer.restore(found)
    assert other.train(3) == norms
    assert_equal(other.weights(), weights)
    assert (random.random(), np.random.rand()) == draws


def test_uninterrupted_run_is_not_disturbed_by_a_save(mesh, models, tmp_path):
    results = []
    for save in (True, False):
        torch.manual_seed(7)
        run = Run(mesh, models[0], tmp_path)
        run.train(2)
        if save:
            run.checkpointer.save(2, {})
        results.append(run.train(2))
    assert results[0] == results[1]


def test_changed_settings_have_an_effect(mesh, models, tmp_path):
    """As in a run that goes on with more steps at another rate: the configuration wins, the step counts on."""
    run = Run(mesh, models[0], tmp_path)
    run.train(3)
    run.checkpointer.save(3, {})
    changed = replace(SETTINGS, lr=5e-3, min_lr=0.0, total_steps=20, weight_decay=0.3, betas=(0.8, 0.9))
    other = Run(mesh, models[0], tmp_path, changed)
    other.checkpointer.restore(latest_checkpoint(tmp_path))
    other.train(1)
    group = other.optimizer._optimizer.param_groups[0]
    assert group["lr"] == pytest.approx(5e-3 * (20 - 4) / (20 - 2))  # linear, after 2 steps of warm-up
    assert group["betas"] == (0.8, 0.9)
    assert sorted({g["weight_decay"] for g in other.optimizer._optimizer.param_groups}) == [0.0, 0.3]


def test_no_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert latest_checkpoint(tmp_path) is None


def test_keep_last_and_leftovers(mesh, models, tmp_path):
    run = Run(mesh, models[0], tmp_path, keep_last=2)
    (tmp_path / "step_00000001.part" / "model").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    for step in (1, 2, 3):
        run.checkpointer.save(step, {"step": step})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "notes", "step_00000002", "step_00000003"]
    assert latest_checkpoint(tmp_path).trainer_state == {"step": 3}


def test_going_on_from_an_older_one_never_removes_what_was_just_written(mesh, models, tmp_path):
    """The error texts say to write an older name into `latest`; the newer checkpoints then are another branch."""
    run = Run(mesh, models[0], tmp_path, keep_last=2)
    for step in (10, 20, 30):
        run.checkpointer.save(step, {"step": step})
    (tmp_path / "latest").write_text("step_00000020")
    run.checkpointer.save(25, {"step": 25})
    assert latest_checkpoint(tmp_path).trainer_state == {"step": 25}
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_00000020", "step_00000025"]


def test_saving_a_step_again_replaces_it(mesh, models, tmp_path):
    run = Run(mesh, models[0], tmp_path)
    run.checkpointer.save(1, {"step": 1, "attempt": 1})
    run.train(1)
    run.checkpointer.save(1, {"step": 1, "attempt": 2})
    weights = run.weights()
    run.train(1)
    run.checkpointer.restore(latest_checkpoint(tmp_path))
    assert latest_checkpoint(tmp_path).trainer_state["attempt"] == 2
    assert_equal(run.weights(), weights)


class TestFailedSave:
    """The previous checkpoint can be restored, `latest` still names it, and the error says so."""

    @pytest.fixture
    def run(self, mesh, models, tmp_path):
        run = Run(mesh, models[0], tmp_path)
        run.train(1)
        run.checkpointer.save(1, {"step": 1})
        run.saved = run.weights()
        run.train(1)
        return run

    def assert_previous_is_whole(self, run, tmp_path):
        found = latest_checkpoint(tmp_path)
        assert found.trainer_state == {"step": 1}
        run.checkpointer.restore(found)
        assert_equal(run.weights(), run.saved)
        # And a later save works, and clears up.
        run.checkpointer.save(3, {"step": 3})
        assert latest_checkpoint(tmp_path).trainer_state == {"step": 3}
        assert not list(tmp_path.glob("*.part"))

    @pytest.mark.parametrize("limit", [0, 20_000])
    def test_full_disk(self, limit, run, tmp_path):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=r"rank 0 cannot write the checkpoint .*step_00000002\.part"):
                run.checkpointer.save(2, {"step": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        self.assert_previous_is_whole(run, tmp_path)

    @pytest.mark.parametrize("calls_before", [0, 1, 2])
    def test_failure_at_each_rename(self, calls_before, run, tmp_path, monkeypatch):
        """Of the state file, of the folder, of `latest`."""
        replace_, calls = os.replace, []

        def failing(source, target):
            if Path(target).is_relative_to(tmp_path):
                calls.append(target)
                if len(calls) > calls_before:
                    raise OSError(28, "No space left on device")
            return replace_(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing)
            with pytest.raises(CheckpointError, match="No space left on device"):
                run.checkpointer.save(2, {"step": 2})
        self.assert_previous_is_whole(run, tmp_path)

    def test_folder_that_cannot_be_made(self, run, tmp_path):
        (tmp_path / "step_00000002.part").write_text("a file where a folder should be")
        with pytest.raises(CheckpointError, match=r"step_00000002\.part"):
            run.checkpointer.save(2, {"step": 2})
        assert latest_checkpoint(tmp_path).trainer_state == {"step": 1}


class TestDamagedCheckpoint:
    @pytest.fixture
    def run(self, mesh, models, tmp_path):
        run = Run(mesh, models[0], tmp_path)
        run.checkpointer.save(1, {"step": 1})
        return run

    def test_truncated_weights(self, run, tmp_path):
        for file in (tmp_path / "step_00000001" / "model").glob("*.distcp"):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        with pytest.raises(
            CheckpointError, match=r"step_00000001 cannot be loaded: .*write its name into .*latest"
        ) as e:
            run.checkpointer.restore(latest_checkpoint(tmp_path))
        assert "Traceback" not in str(e.value)

    @pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt"])
    def test_missing_or_truncated_index(self, name, run, tmp_path):
        path = tmp_path / "step_00000001" / "model" / name
        whole = path.read_bytes()
        for damage in (lambda: path.write_bytes(whole[: len(whole) // 2]), path.unlink):
            damage()
            with pytest.raises(CheckpointError, match="step_00000001 cannot be loaded"):
                run.checkpointer.restore(latest_checkpoint(tmp_path))

    def test_truncated_random_state(self, run, tmp_path):
        path = tmp_path / "step_00000001" / "rng" / "rank_00000.pt"
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(CheckpointError, match="step_00000001 cannot be loaded"):
            run.checkpointer.restore(latest_checkpoint(tmp_path))

    @pytest.mark.parametrize("text", ["", "{"])
    def test_damaged_trainer_state(self, text, run, tmp_path):
        (tmp_path / "step_00000001" / subject.STATE_FILE).write_text(text)
        with pytest.raises(CheckpointError, match=r"latest names step_00000001, whose trainer_state\.json cannot be"):
            latest_checkpoint(tmp_path)

    def test_latest_names_nothing_that_is_there(self, run, tmp_path):
        (tmp_path / "latest").write_text("step_00000077\n")
        with pytest.raises(CheckpointError, match=r"latest names step_00000077, .*write its name into"):
            latest_checkpoint(tmp_path)

    def test_checkpoint_of_another_shape(self, run, mesh, models, tmp_path):
        other = Run(mesh, models[2], tmp_path)
        with pytest.raises(CheckpointError, match=r"step_00000001 cannot be loaded: .*shape mismatch"):
            other.checkpointer.restore(latest_checkpoint(tmp_path))
