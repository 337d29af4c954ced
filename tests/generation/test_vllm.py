"""Runs with the real vLLM on a CPU: layouts and faults. `make test-engine` runs these."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers.errors import raises_error
from helpers.models import smollm2_folder
from helpers.ranks import call_on_ranks, one_group
from helpers.tiny_run import (
    however_cut,
    largest_difference,
    metrics_of,
    rollouts_of,
    tiny_config,
    tiny_trainer,
    without_times,
)
from helpers.trainer_processes import TrainerProcesses
from helpers.vllm_engine import (
    NUM_SAMPLES,
    OF_RUNS,
    PARAMS,
    PROMPTS,
    SMALL_BUCKET,
    SMOLLM2,
    check_log_probs,
    draw,
    generator_of,
    processes_of,
    vllm_model,
    vllm_overrides,
    wait_for_the_end,
)

from reinforce_rl.generation.engine import process
from reinforce_rl.generation.engine.generator import EngineGenerator
from reinforce_rl.launch.check_engine import TEXTS
from reinforce_rl.megatron.checkpointer import latest_checkpoint
from reinforce_rl.megatron.mesh import parallel_mesh

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
# Tensor and pipeline parallel sizes, and an engine's workers.
LAYOUTS = {
    "tp2_engine1": (2, 1, 1),
    "tp2_engine2": (2, 1, 2),
    "pp2_engine1": (1, 2, 1),
    "pp2_engine2": (1, 2, 2),
    "dp2": (1, 1, 1),
}
ENGINE_SECONDS = 600.0  # for which ranks wait while one starts an engine


def train(
    folder: Path,
    mesh,
    *overrides: str,
    bucket_bytes: int | None = SMALL_BUCKET,
    prompts: Sequence[str] | None = None,
    watch: Callable[[EngineGenerator], object] = lambda _: None,
) -> None:
    """Run three steps with vLLM below `folder`."""
    config = tiny_config(folder, *OF_RUNS, *vllm_overrides(), *overrides, prompts=prompts)
    with tiny_trainer(config, mesh) as trainer:
        generator = trainer.model.generator
        assert isinstance(generator, EngineGenerator)
        generator._bucket_bytes = bucket_bytes or generator._bucket_bytes
        watch(generator)
        try:
            trainer.fit()
        finally:
            generator.close()


def train_at_layouts(folder: Path, *names: str) -> None:
    with one_group(ENGINE_SECONDS):
        for name in names:
            tensor, pipeline, workers = LAYOUTS[name]
            overrides = (
                "trainer.devices=2",
                f"model.tensor_model_parallel_size={tensor}",
                f"model.pipeline_model_parallel_size={pipeline}",
                f"engine.tensor_parallel_size={workers}",
            )
            with parallel_mesh(tensor, pipeline) as mesh:
                train(folder / name, mesh, *overrides)


def train_smollm2(folder: Path) -> None:
    with one_group(ENGINE_SECONDS), parallel_mesh() as mesh:
        train(
            folder,
            mesh,
            *SMOLLM2,
            "trainer.devices=2",
            bucket_bytes=None,
            prompts=TEXTS,
        )


def beside(folder: Path, model: Path) -> Path:
    """Prepare `folder` for a run of this model."""
    folder.mkdir(exist_ok=True)
    (folder / "model").symlink_to(model)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, mesh) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    vllm_model(folder)
    train(folder, mesh)
    check_log_probs(folder)
    return folder


class TestSmolLM2:
    """Three steps of the trainer with the real model.

    The run would end if vLLM did not use an update. The prompts are sentences: after one or two
    tokens that are not text, activations are so large that log-probs differ by 2e-4.
    """

    def test_on_one_rank(self, tmp_path, mesh, monkeypatch):
        folder = beside(tmp_path / "run", smollm2_folder())
        calls = []
        call = process.EngineProcess.call

        def counted(engine, command, *arguments, **options):
            calls.append((command, arguments == (None,)))
            return call(engine, command, *arguments, **options)

        monkeypatch.setattr(process.EngineProcess, "call", counted)
        train(folder, mesh, *SMOLLM2, bucket_bytes=None, prompts=TEXTS)
        check_log_probs(folder)
        assert calls.count(("update_weights", True)) == calls.count(("release", False)) == 3
        assert calls.count(("update_weights", False)) > 3 * 5, "in several buckets"

    def test_on_two_ranks(self, tmp_path):
        folder = beside(tmp_path / "run", smollm2_folder())
        call_on_ranks(train_smollm2, 2, folder, timeout=500)
        check_log_probs(folder)


class Killer:
    """Kills one of an engine's processes in each phase: an update, a generation and a sleep.

    The process is stopped at the start of a command, so that the command is still running when the
    process is killed.
    """

    def __init__(self, monkeypatch, generator: EngineGenerator, names: Sequence[str]):
        self._generator = generator
        self._sleeps = 0
        pairs = zip([(0, "update_weights"), (1, "generate"), (2, "asleep")], names, strict=True)
        self._plan = list(pairs)
        self.seen: set[psutil.Process] = set()
        call = process.EngineProcess.call

        def call_and_kill(engine, command, *arguments, **options):
            self._strike(command)
            result = call(engine, command, *arguments, **options)
            if command == "release":
                self._sleeps += 1
                self._strike("asleep")
            return result

        monkeypatch.setattr(process.EngineProcess, "call", call_and_kill)

    @property
    def has_struck_thrice(self) -> bool:
        return not self._plan

    def _strike(self, phase: str) -> None:
        if not self._plan or self._plan[0][0] != (self._sleeps, phase):
            return
        (_, name) = self._plan.pop(0)
        self._generator._was_restarted = False  # here it may be restarted several times
        processes = processes_of(self._generator)
        self.seen.update(processes.values())
        victim = processes[name]
        if phase == "asleep":
            victim.kill()
            psutil.wait_procs([victim], 30)
        else:
            victim.suspend()
            threading.Timer(0.5, victim.kill).start()


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("EngineCore", "Worker", "host"), id="EngineCore-Worker-host"),
        pytest.param(
            ("Worker", "EngineCore", "Worker"),
            id="Worker-EngineCore-Worker",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_killed_engine_is_restarted_with_the_present_weights(
    tmp_path, mesh, undisturbed, monkeypatch, names
):
    """test_engines.py kills a host while it works."""
    folder = beside(tmp_path / "run", undisturbed / "model")
    killers = []
    train(
        folder, mesh, watch=lambda generator: killers.append(Killer(monkeypatch, generator, names))
    )
    assert killers[0].has_struck_thrice
    for line, other in zip(metrics_of(folder), metrics_of(undisturbed), strict=True):
        assert without_times(line) == without_times(other)
    for step in (1, 2, 3):
        assert rollouts_of(folder, step) == rollouts_of(undisturbed, step)
    wait_for_the_end(killers[0].seen)


def test_nothing_is_left_of_the_engine_of_a_killed_trainer(tmp_path, undisturbed):
    folder = beside(tmp_path / "run", undisturbed / "model")
    processes = TrainerProcesses()
    try:
        act = {"rank": 0, "phase": "generate", "step": 2, "signal": int(signal.SIGKILL)}
        (trainer,) = processes.start(folder, *vllm_overrides(), act=act)
        seen = set()
        deadline = time.monotonic() + 300
        while psutil.pid_exists(trainer) and time.monotonic() < deadline:
            with contextlib.suppress(psutil.NoSuchProcess):
                seen.update(psutil.Process(trainer).children(recursive=True))
            time.sleep(0.1)
        processes.wait()
        assert processes.statuses == [-signal.SIGKILL], (folder / "log").read_text()
    finally:
        processes.close()
    titles = (folder / "run" / "engines" / "dp_00000.log").read_text()
    assert len(seen) >= 3
    assert "EngineCore" in titles
    wait_for_the_end(seen)


class TestHung:
    """Deadlines are short, but longer than the commands take."""

    DEADLINES = ("engine.request_timeout_seconds=20", "engine.update_timeout_seconds=40")

    @pytest.fixture(scope="class")
    def engine(self, tmp_path_factory, mesh):
        folder = tmp_path_factory.mktemp("hung")
        vllm_model(folder)
        _, generator = generator_of(folder, mesh, *vllm_overrides(), *self.DEADLINES)
        yield generator, draw(generator).tokens
        generator.close()

    @pytest.fixture(autouse=True)
    def at_once(self, monkeypatch):
        monkeypatch.setattr(process, "STUCK_SECONDS", 0.1)
        monkeypatch.setattr(process, "ABORT_SECONDS", 5.0)

    @pytest.mark.parametrize(
        ("name", "command", "reason"),
        [
            pytest.param(
                "host", "generate", "no answer to generate within", marks=pytest.mark.slow
            ),
            ("Worker", "generate", "the engine lost all 8 requests: no answer within 20 s"),
            pytest.param(
                "Worker",
                "update_weights",
                "no answer to update_weights within",
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_it_is_restarted(self, engine, caplog, name, command, reason):
        generator, expected = engine
        generator._was_restarted = False
        stopped = processes_of(generator)
        if command == "generate":
            with generator.awake():
                stopped[name].suspend()
                completions = generator.generate(PROMPTS, NUM_SAMPLES, PARAMS, 3)
        else:
            stopped[name].suspend()
            completions = draw(generator)
        assert torch.equal(completions.tokens, expected)
        assert f"event=engine_restarted reason={reason}" in caplog.text
        wait_for_the_end(stopped.values())

    def test_the_second_time_the_run_ends(self, engine):
        generator, _ = engine
        generator._was_restarted = True
        stopped = processes_of(generator)
        stopped["host"].suspend()
        values = ("vLLM", "resume_weights within 40 s", "engine.update_timeout_seconds")
        with raises_error("generation.engine.failed_again", *values):
            draw(generator)
        wait_for_the_end(stopped.values())


def test_without_memory_for_its_cache_the_run_saves_and_says_what_to_lower(
    tmp_path, mesh, undisturbed
):
    """After a successful step."""
    folder = beside(tmp_path / "run", undisturbed / "model")
    config = tiny_config(folder, *OF_RUNS, *vllm_overrides(), "trainer.reinforce.save_interval=100")
    with tiny_trainer(config, mesh) as trainer:
        generator = trainer.model.generator
        step = trainer.run_training
        assert isinstance(generator, EngineGenerator)
        assert generator._engine is not None
        adapter: Any = generator._engine._adapter

        def step_and_lose_the_engine(batch):
            metrics = step(batch)
            generator.close()
            adapter._config = adapter._config.model_copy(update={"cpu_cache_gigabytes": 9999})
            return metrics

        trainer.run_training = step_and_lose_the_engine
        advice = ("; lower ", "vllm.cpu_cache_gigabytes on a CPU")
        with raises_error("generation.engine.not_started", *advice):
            trainer.fit()
    checkpoint = latest_checkpoint(folder / "run" / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.trainer_state["step"] == 1


class TestLayouts:
    """Two tensor-, pipeline- or data-parallel ranks, and engines with one worker or two."""

    @pytest.mark.parametrize(
        "names",
        [
            ("tp2_engine2", "pp2_engine1"),
            pytest.param(("tp2_engine1", "pp2_engine2", "dp2"), marks=pytest.mark.slow),
        ],
        ids=" ".join,
    )
    def test_train_as_one_rank_does(self, tmp_path, undisturbed, names):
        for name in names:
            beside(tmp_path / name, undisturbed / "model")
        call_on_ranks(train_at_layouts, 2, tmp_path, *names, timeout=500)
        for name in names:
            check_log_probs(tmp_path / name)
            for step in (1, 2, 3):
                rows, others = (
                    by_sample(folder, step) for folder in (tmp_path / name, undisturbed)
                )
                assert rows == others, name
            pairs = zip(metrics_of(tmp_path / name), metrics_of(undisturbed), strict=True)
            for line, other in pairs:
                assert largest_difference(however_cut(line), however_cut(other)) < 1e-4, name


def by_sample(folder: Path, step: int) -> dict[Any, str]:
    return {
        (row["prompt_id"], row["sample_id"]): row["response"] for row in rollouts_of(folder, step)
    }
