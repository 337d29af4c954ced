"""Checkpoints: resuming equals an uninterrupted run, and a failed save does no harm."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.archives import compressed
from helpers.checkpoint_run import OPTIM, Run
from helpers.errors import raises_error
from helpers.models import tiny_llama_folder

from reinforce_rl.config.model import OptimConfig, ScheduleConfig
from reinforce_rl.megatron import checkpointer as subject
from reinforce_rl.megatron.checkpoint_files import ShardedWriter
from reinforce_rl.megatron.checkpointer import (
    Checkpoint,
    checkpoint_up_to,
    latest_checkpoint,
    state_bytes,
)
from reinforce_rl.megatron.convert import _checkpoint_in, load_weights
from reinforce_rl.megatron.optimizer import large_states


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of one shape and a model of another shape."""
    root = tmp_path_factory.mktemp("models")
    folders = [tiny_llama_folder(root / str(seed), seed=seed) for seed in (0, 1)]
    return [*folders, tiny_llama_folder(root / "wide", hidden=48)]


def assert_equal(weights: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == other.keys()
    for name in weights:
        assert torch.equal(weights[name], other[name])


SHARED = {"optim": OPTIM.model_copy(update={"distributed": True})}
BF16 = {"dtype": torch.bfloat16}
# Forms of Adam's states; the first two have the same files.
FORMS = {"plain": {}, "shared": SHARED, "bf16": BF16, "bf16 shared": BF16 | SHARED}


@pytest.mark.parametrize("form", FORMS)
def test_resumes_bit_for_bit(form, mesh, models, tmp_path):
    """Three steps are compared with the uninterrupted run.

    A step counter or moment that is restored wrongly shows at the third step at the latest.
    """
    torch.manual_seed(7)
    random.seed(8)
    np.random.seed(9)
    run = Run(mesh, models[0], tmp_path, **FORMS[form])
    run.train(3)
    written = run.checkpointer.save(3, {"step": 3, "data_position": {"epoch": 0}})
    norms = run.train(3)
    weights = run.weights()
    draws = random.random(), np.random.rand()

    other = Run(mesh, models[1], tmp_path, **FORMS[form])
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    other.train(1)
    checkpoint = latest_checkpoint(tmp_path)
    expected = Checkpoint(written, {"step": 3, "data_position": {"epoch": 0}})
    assert checkpoint == expected
    other.checkpointer.restore(checkpoint)
    assert other.train(3) == norms
    assert_equal(other.weights(), weights)
    assert (random.random(), np.random.rand()) == draws


@pytest.mark.more
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_seconds_of_a_save_are_reported_once_it_is_complete(
    mesh, models, tmp_path, asynchronous, monkeypatch
):
    """For a save in the background, count its own time, not the training before it is checked."""
    save_seconds: list[float] = []
    run = Run(mesh, models[0], tmp_path, asynchronous=asynchronous, on_saved=save_seconds.append)
    write = ShardedWriter.write

    def slow_write(writer):
        time.sleep(0.3)
        return write(writer)

    monkeypatch.setattr(ShardedWriter, "write", slow_write)
    began = time.monotonic()
    run.checkpointer.save(1, {}, waited=100.0)
    assert run.checkpointer.is_writing == asynchronous
    assert len(save_seconds) == (not asynchronous)
    if asynchronous:
        time.sleep(3.0)
        run.checkpointer.finish()
    took = time.monotonic() - began - (3.0 if asynchronous else 0.0)
    assert not run.checkpointer.is_writing
    assert len(save_seconds) == 1
    assert 0.3 < save_seconds[0] - 100.0 < (2.5 if asynchronous else took), (
        "with what training had waited before"
    )


def test_the_size_of_a_checkpoint_is_about_as_estimated(mesh, models, tmp_path):
    run = Run(mesh, models[0], tmp_path)
    run.train(1)
    folder = run.checkpointer.save(1, {})
    written = sum(path.stat().st_size for path in (folder / "model").glob("*.distcp"))
    headers = 0.4  # of small tensors
    assert 1.0 <= written / state_bytes(run.ddp, mesh) < 1.0 + headers


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
    """Resume a run with more steps and another rate.

    The configuration takes precedence, and the step count continues.
    """
    run = Run(mesh, models[0], tmp_path)
    run.train(3)
    run.checkpointer.save(3, {})
    schedule = ScheduleConfig(name="linear", warmup_steps=2)
    changed = OptimConfig(lr=5e-3, weight_decay=0.3, betas=[0.8, 0.9], sched=schedule)
    other = Run(mesh, models[0], tmp_path, changed, total_steps=20)
    other.checkpointer.restore(latest_checkpoint(tmp_path))
    other.train(1)
    group = other.optimizer.megatron.param_groups[0]
    # linear, after 2 steps of warm-up
    expected = 5e-3 * (20 - 4) / (20 - 2)
    assert group["lr"] == pytest.approx(expected)
    assert group["betas"] == (0.8, 0.9)
    assert sorted({g["weight_decay"] for g in other.optimizer.megatron.param_groups}) == [
        0.0,
        0.3,
    ]


@pytest.mark.parametrize(
    "forms", [("plain", "shared"), ("shared", "plain"), ("bf16", "bf16 shared")]
)
def test_the_optimizer_may_become_a_shared_one_and_back(forms, mesh, models, tmp_path):
    def restored(folder: Path, form: str, into: Path) -> Run:
        run = Run(mesh, models[1], into, **FORMS[form])
        run.train_on(7, 1)
        run.checkpointer.restore(latest_checkpoint(folder))
        return run

    first = Run(mesh, models[0], tmp_path, **FORMS[forms[0]])
    first.train_on(0, 2)
    first.checkpointer.save(2, {"step": 2})
    second = restored(tmp_path, forms[1], tmp_path / "second")
    second.checkpointer.save(2, {"step": 2})
    back = restored(tmp_path / "second", forms[0], tmp_path / "back")
    losses = []
    weights = []
    for run in (first, back, second):
        losses.append(run.train_on(2, 3))
        weights.append(dict(run.lm.named_parameters()))
    assert losses[0] == losses[1]
    assert_equal(weights[0], weights[1])
    # Adam's loop ends elsewhere in a shared buffer, and some CPUs round the last elements of a loop
    # differently.
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)
    torch.testing.assert_close(weights[2], weights[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
def test_states_that_were_moved_are_saved(form, mesh, models, tmp_path, monkeypatch):
    """Like on a GPU, moments and fp32 weights are offloaded for each generation and restored."""
    runs = []
    for moved in (True, False):
        folder = tmp_path / str(moved)
        run = Run(mesh, models[0], folder, **FORMS[form])
        for step in range(2):
            run.train_on(step, 1)
            if moved:
                run.optimizer._on_gpu = True
                with run.optimizer.offloaded():
                    for state in large_states(run.optimizer.megatron):
                        assert not state.untyped_storage().nbytes()
                run.optimizer._on_gpu = False
        run.checkpointer.save(2, {"step": 2})
        again = Run(mesh, models[1], folder, **FORMS[form])
        again.checkpointer.restore(latest_checkpoint(folder))
        runs += [again.train_on(2, 3), run.train_on(2, 3)]
    for losses in runs:
        assert losses == runs[0]


def test_another_precision_is_refused(mesh, models, tmp_path):
    run = Run(mesh, models[0], tmp_path)
    run.checkpointer.save(1, {"step": 1})
    values = ("torch.float32", "torch.bfloat16", "trainer.precision")
    with raises_error("checkpoint.weights.another_model", *values):
        Run(mesh, models[0], tmp_path, **BF16).checkpointer.restore(latest_checkpoint(tmp_path))


def test_weights_alone_of_a_shared_optimizer(mesh, models, tmp_path):
    run = Run(mesh, models[0], tmp_path, **SHARED)
    run.train(1)
    saved = run.checkpointer.save(1, {"step": 1})
    other = Run(mesh, models[1], tmp_path)
    load_weights(other.lm, saved)
    assert_equal(dict(other.lm.named_parameters()), dict(run.lm.named_parameters()))


def test_no_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert latest_checkpoint(tmp_path) is None


@pytest.fixture
def linked(tmp_path):
    """A run without checkpoints in its own folder, and another run's checkpoint elsewhere."""
    elsewhere = tmp_path / "elsewhere" / "step_00000010"
    elsewhere.mkdir(parents=True)
    (elsewhere / subject.STATE_FILE).write_text('{"step": 10}')
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return tmp_path / "run" / "checkpoints"


NAMES = [
    "../../elsewhere/step_00000010",
    "/etc",
    "..",
    ".",
    "step_00000010/model",
    "step_1",
    "step_0000001\N{ARABIC-INDIC DIGIT ONE}",
]


@pytest.mark.parametrize("name", NAMES)
def test_latest_names_a_checkpoint_beside_it(linked, name):
    (linked / "latest").write_text(name)
    with raises_error("checkpoint.latest.no_name", linked / "latest", repr(name)):
        latest_checkpoint(linked)


def test_latest_may_be_no_link_to_a_folder_or_to_nothing(linked):
    (linked / "latest").symlink_to("step_00000010")
    with raises_error("checkpoint.latest.not_readable", linked / "latest"):
        latest_checkpoint(linked)
    (linked / "step_00000010").mkdir()
    with raises_error("file.not_regular", linked / "latest"):
        latest_checkpoint(linked)


def test_a_checkpoint_that_leads_elsewhere_is_refused(linked):
    other = linked.parents[1] / "elsewhere" / "step_00000010"
    (linked / "step_00000010").symlink_to(other)
    (linked / "latest").write_text("step_00000010")
    for look in (latest_checkpoint, lambda folder: checkpoint_up_to(folder, 10)):
        with raises_error("folder.link.leads_out", linked / "step_00000010", other):
            look(linked)
    (linked / "step_00000010").unlink()
    shutil.copytree(other, linked / "step_00000010")
    assert latest_checkpoint(linked).trainer_state == {"step": 10}
    assert checkpoint_up_to(linked, 10).trainer_state == {"step": 10}


@pytest.mark.parametrize("name", ["checkpoints", "saves"])
def test_checkpoints_that_lead_out_of_the_run_are_refused(linked, name):
    linked.rmdir()
    linked = linked.with_name(name)
    linked.symlink_to("../elsewhere")
    (linked / "latest").write_text("step_00000010")
    for look in (latest_checkpoint, lambda folder: checkpoint_up_to(folder, 10)):
        with raises_error("folder.link.leads_out", linked, linked.parents[1] / "elsewhere"):
            look(linked)
    # Naming the other folder is intentional.
    assert latest_checkpoint(linked.resolve()).trainer_state == {"step": 10}


def test_keep_last_and_leftovers(mesh, models, tmp_path):
    run = Run(mesh, models[0], tmp_path, keep_last=2)
    (tmp_path / "step_00000001.part" / "model").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    for step in (1, 2, 3):
        run.checkpointer.save(step, {"step": step})
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [
        "latest",
        "notes",
        "step_00000002",
        "step_00000003",
    ]
    assert latest_checkpoint(tmp_path).trainer_state == {"step": 3}


def test_resuming_from_an_older_checkpoint_never_removes_the_one_just_written(
    mesh, models, tmp_path
):
    """Error messages say to write an older name to `latest`.

    The newer checkpoints are another branch then.
    """
    run = Run(mesh, models[0], tmp_path, keep_last=2)
    for step in (10, 20, 30):
        run.checkpointer.save(step, {"step": step})
    (tmp_path / "latest").write_text("step_00000020")
    run.checkpointer.save(25, {"step": 25})
    assert latest_checkpoint(tmp_path).trainer_state == {"step": 25}
    names = sorted(p.name for p in tmp_path.glob("step_*"))
    assert names == ["step_00000020", "step_00000025"]


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
        checkpoint = latest_checkpoint(tmp_path)
        assert checkpoint.trainer_state == {"step": 1}
        run.checkpointer.restore(checkpoint)
        assert_equal(run.weights(), run.saved)
        # A later save succeeds and cleans up.
        run.checkpointer.save(3, {"step": 3})
        assert latest_checkpoint(tmp_path).trainer_state == {"step": 3}
        assert not list(tmp_path.glob("*.part"))

    @pytest.mark.parametrize("limit", [0, 20_000])
    def test_full_disk(self, limit, run, tmp_path):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            part = tmp_path / "step_00000002.part"
            with raises_error("checkpoint.disk.full", "rank 0", part):
                run.checkpointer.save(2, {"step": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        self.assert_previous_is_whole(run, tmp_path)

    @pytest.mark.parametrize("calls_before", [0, 1, 2])
    def test_failure_at_each_rename(self, calls_before, run, tmp_path, monkeypatch):
        """Rename the state file, the folder, or `latest`."""
        replace_ = os.replace
        calls = []

        def failing(source, target):
            if Path(target).is_relative_to(tmp_path):
                calls.append(target)
                if len(calls) > calls_before:
                    raise OSError(28, "No space left on device")
            return replace_(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing)
            with raises_error("checkpoint.disk.full", "No space left on device"):
                run.checkpointer.save(2, {"step": 2})
        self.assert_previous_is_whole(run, tmp_path)

    def test_folder_that_cannot_be_made(self, run, tmp_path):
        (tmp_path / "step_00000002.part").write_text("a file where a folder should be")
        with raises_error("checkpoint.folder.not_written", tmp_path / "step_00000002.part"):
            run.checkpointer.save(2, {"step": 2})
        assert latest_checkpoint(tmp_path).trainer_state == {"step": 1}


class TestDamagedCheckpoint:
    @pytest.fixture
    def run(self, mesh, models, tmp_path):
        run = Run(mesh, models[0], tmp_path)
        run.checkpointer.save(1, {"step": 1})
        return run

    def test_truncated_weights(self, run, tmp_path):
        files = sorted((tmp_path / "step_00000001" / "model").glob("*.distcp"))
        whole = files[0].stat().st_size
        for file in files:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        values = (files[0], whole // 2, whole)
        with raises_error("checkpoint.file.other_size", *values) as caught:
            run.checkpointer.restore(latest_checkpoint(tmp_path))
        assert "Traceback" not in str(caught.value)

    @pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt"])
    def test_missing_or_truncated_index(self, name, run, tmp_path):
        path = tmp_path / "step_00000001" / "model" / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with raises_error("checkpoint.file.other_size", path, len(whole)):
            run.checkpointer.restore(latest_checkpoint(tmp_path))
        path.unlink()
        with raises_error("checkpoint.file.not_readable", path):
            run.checkpointer.restore(latest_checkpoint(tmp_path))

    def test_truncated_random_state(self, run, tmp_path):
        path = tmp_path / "step_00000001" / "rng" / "rank_00000.pt"
        path.write_bytes(path.read_bytes()[:100])
        with raises_error("checkpoint.file.other_size", path, 100):
            run.checkpointer.restore(latest_checkpoint(tmp_path))

    def test_random_state_that_torch_would_unpack(self, run, tmp_path):
        path = tmp_path / "step_00000001" / "rng" / "rank_00000.pt"
        packed = compressed(path.read_bytes())
        path.write_bytes(packed)
        manifest = path.parents[1] / "manifest.json"
        entries = json.loads(manifest.read_text())
        entries["files"]["rng/rank_00000.pt"] = {
            "bytes": len(packed),
            "crc32": f"{zlib.crc32(packed):08x}",
        }
        manifest.write_text(json.dumps(entries))
        with raises_error("checkpoint.archive.compressed", "step_00000001", "rank_00000.pt"):
            run.checkpointer.restore(latest_checkpoint(tmp_path))

    def test_altered_bytes_are_found_by_their_checksum(self, run, tmp_path):
        run.train(1)
        run.checkpointer.save(2, {"step": 2})
        weights = run.weights()
        model_folder = tmp_path / "step_00000002" / "model"
        path = sorted(model_folder.glob("*.distcp"))[-1]
        data = bytearray(path.read_bytes())
        expected = f"{zlib.crc32(data):08x}"
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        checksum = f"{zlib.crc32(data):08x}"
        command = f"echo step_00000001 > {tmp_path / 'latest'}"
        with raises_error("checkpoint.file.damaged", path, checksum, expected, command):
            run.checkpointer.restore(latest_checkpoint(tmp_path))
        assert_equal(run.weights(), weights)  # nothing was loaded
        (tmp_path / "latest").write_text("step_00000001\n")  # the fix that the message suggests
        run.checkpointer.restore(latest_checkpoint(tmp_path))

    @pytest.mark.parametrize(
        "damage", [Path.unlink, lambda path: path.write_text('{"files": {"a": 1}}')]
    )
    def test_damaged_manifest(self, damage, run, tmp_path):
        manifest = tmp_path / "step_00000001" / "manifest.json"
        damage(manifest)
        with raises_error("checkpoint.file.not_readable", manifest, tmp_path / "latest"):
            run.checkpointer.restore(latest_checkpoint(tmp_path))

    @pytest.mark.parametrize("text", ["", "{"])
    def test_damaged_trainer_state(self, text, run, tmp_path):
        (tmp_path / "step_00000001" / subject.STATE_FILE).write_text(text)
        values = (tmp_path / "latest", "step_00000001", "trainer_state.json")
        with raises_error("checkpoint.state.not_readable", *values):
            latest_checkpoint(tmp_path)

    def test_latest_names_nothing_that_is_there(self, run, tmp_path):
        (tmp_path / "latest").write_text("step_00000077\n")
        pointer = tmp_path / "latest"
        values = (pointer, "step_00000077", f"echo step_00000001 > {pointer}")
        with raises_error("checkpoint.state.not_readable", *values):
            latest_checkpoint(tmp_path)

    def test_checkpoint_of_another_shape(self, run, mesh, models, tmp_path):
        other = Run(mesh, models[2], tmp_path)
        values = ("embedding.word_embeddings.weight", "(64, 32)", "(64, 48)")
        with raises_error("checkpoint.weights.another_model", *values):
            other.checkpointer.restore(latest_checkpoint(tmp_path))


@pytest.mark.parametrize("form", FORMS)
def test_a_run_whose_steps_were_all_skipped(form, mesh, models, tmp_path):
    """Adam has no state yet."""
    run = Run(mesh, models[0], tmp_path, **FORMS[form])
    run.checkpointer.save(1, {"step": 1})
    other = Run(mesh, models[1], tmp_path, **FORMS[form])
    other.checkpointer.restore(latest_checkpoint(tmp_path))
    fresh = Run(mesh, models[0], tmp_path, **FORMS[form])
    assert other.train_on(0, 3) == fresh.train_on(0, 3) == run.train_on(0, 3)


def test_keep(mesh, models, tmp_path):
    """The best checkpoints remain besides the newest; the others are removed."""
    run = Run(mesh, models[0], tmp_path, keep_last=2)
    for step, best in (
        (1, [1]),
        (2, [1]),
        (3, [1]),
        (4, [1, 4]),
        (5, [1, 4]),
        (6, [4, 6]),
        (7, [4, 6]),
    ):
        run.checkpointer.save(step, {"step": step}, keep=best)
    assert sorted(p.name[-1] for p in tmp_path.glob("step_*")) == ["4", "6", "7"]
    assert run.checkpointer.holds(4)
    assert not run.checkpointer.holds(1)


class TestAsynchronous:
    @pytest.fixture
    def gate(self, monkeypatch):
        """Return an event; writing waits until it is set."""
        gate = threading.Event()
        write = ShardedWriter.write

        def wait_and_write(self):
            assert gate.wait(60)
            return write(self)

        monkeypatch.setattr(ShardedWriter, "write", wait_and_write)
        yield gate
        gate.set()

    @pytest.fixture
    def run(self, mesh, models, tmp_path):
        torch.manual_seed(7)
        return Run(mesh, models[0], tmp_path, asynchronous=True)

    def test_content_is_the_state_at_the_save(self, run, gate, mesh, models, tmp_path):
        run.train(2)
        run.checkpointer.save(2, {"step": 2})
        norms = run.train(3)
        weights = run.weights()
        run.checkpointer.poll()
        assert latest_checkpoint(tmp_path) is None, "not written yet"
        gate.set()
        run.checkpointer.finish()
        other = Run(mesh, models[1], tmp_path)
        other.checkpointer.restore(latest_checkpoint(tmp_path))
        assert other.train(3) == norms
        assert_equal(other.weights(), weights)

    def test_one_at_a_time(self, run, gate, tmp_path):
        gate.set()
        run.train(1)
        run.checkpointer.save(1, {"step": 1})
        run.checkpointer.save(2, {"step": 2})
        assert latest_checkpoint(tmp_path).trainer_state == {"step": 1}
        deadline = time.monotonic() + 30
        while latest_checkpoint(tmp_path).trainer_state == {"step": 1}:
            assert time.monotonic() < deadline
            run.checkpointer.poll()

    @pytest.mark.parametrize("surfaces_at", ["poll", "finish", "save"])
    def test_an_error_surfaces_with_the_file(self, surfaces_at, run, gate, tmp_path):
        run.train(1)
        gate.set()
        run.checkpointer.save(1, {"step": 1})
        run.checkpointer.finish()
        gate.clear()
        run.checkpointer.save(2, {"step": 2})
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, limits[1]))
        try:
            gate.set()
            run.checkpointer._running.thread.join()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        arguments = (3, {}) if surfaces_at == "save" else ()
        # torch's zip writer raises its own error if the limit falls into its last bytes.
        words = r"(File too large|unexpected pos)"
        with raises_error("checkpoint.disk.full", "step_00000002.part") as caught:
            getattr(run.checkpointer, surfaces_at)(*arguments)
        assert re.search(rf"\.(distcp|pt).*{words}", str(caught.value)), caught.value
        assert latest_checkpoint(tmp_path).trainer_state == {"step": 1}
        run.checkpointer.save(3, {"step": 3})
        run.checkpointer.finish()
        assert latest_checkpoint(tmp_path).trainer_state == {"step": 3}


def test_the_folder_of_a_run_may_be_given_to_convert_by_a_link(linked, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "step_00000010"
    shutil.copytree(elsewhere, linked / "step_00000010")
    (linked / "latest").write_text("step_00000010")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run").symlink_to(linked.parent)
    given = tmp_path / "mine" / "run"
    assert _checkpoint_in(given) == given / "checkpoints" / "step_00000010"
    (tmp_path / "mine" / "linked").symlink_to(linked)
    with raises_error("folder.link.leads_out", tmp_path / "mine" / "linked", linked):
        _checkpoint_in(tmp_path / "mine" / "linked")
