"""A run that is killed and restarted at any moment equals an uninterrupted run bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.errors import raises_error
from helpers.models import tiny_llama_folder
from helpers.ranks import kill_tree
from helpers.tiny_run import (
    compose,
    however_cut,
    json_lines,
    largest_difference,
    metrics_of,
    rollouts_of,
    run,
    three_letters,
    tiny_config,
    tiny_overrides,
    tiny_trainer,
    write_prompts,
)
from helpers.trainer_processes import (
    DRIVER,
    NUM_PROMPTS,
    RUN_SECONDS,
    SETTINGS,
    STEPS,
    TrainerProcesses,
    assert_equal_runs,
)
from safetensors.torch import load_file

from reinforce_rl.config.load import load_config

pytestmark = pytest.mark.more

SLOW = pytest.mark.slow
RL = "trainer.reinforce"


@pytest.fixture(scope="module")
def processes() -> Iterator[TrainerProcesses]:
    processes = TrainerProcesses()
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def uninterrupted(processes: TrainerProcesses, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    processes.start(folder, *SETTINGS)
    assert processes.wait() == 0, (folder / "log").read_text()
    return folder


def metrics_reach(folder: Path, step: int) -> Callable[[], bool]:
    path = folder / "run" / "metrics.jsonl"
    return lambda: path.exists() and f'{{"step": {step},'.encode() in path.read_bytes()


def appears(folder: Path, name: str) -> Callable[[], bool]:
    return lambda: (folder / "run" / name).exists()


def kill_when(processes: TrainerProcesses, folder: Path, condition: Callable[[], bool]) -> None:
    (process,) = processes.start(folder, *SETTINGS)
    deadline = time.monotonic() + RUN_SECONDS
    while not condition():
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    assert processes.wait() == -signal.SIGKILL, "the run had ended before it could be killed"


def samples_of(folder: Path, step: int) -> list[tuple[int, int, str]]:
    rows = rollouts_of(folder, step)
    return sorted((row["prompt_id"], row["sample_id"], row["response"]) for row in rows)


def finish(processes: TrainerProcesses, folder: Path) -> None:
    processes.start(folder, *SETTINGS)
    assert processes.wait() == 0, (folder / "log").read_text()


def test_the_uninterrupted_run_learns_and_takes_every_prompt_once_an_epoch(uninterrupted):
    """This shows that a comparison with it means something."""
    lines = metrics_of(uninterrupted)
    assert lines[STEPS]["val/rewards"] > lines[0]["val/rewards"] + 0.1
    for line in lines[4:]:
        assert line["train/init_policy_kl"] > 0.01
    kept = sorted(path.name for path in (uninterrupted / "run" / "checkpoints").glob("[!.]*"))
    assert kept == ["latest", "step_00000009", "step_00000012"]
    for epoch in range(4):
        rows = [row for step in (1, 2, 3) for row in rollouts_of(uninterrupted, 3 * epoch + step)]
        num_responses = Counter(row["prompt_id"] for row in rows)
        assert num_responses == dict.fromkeys(range(NUM_PROMPTS), 4)


def test_a_run_goes_on_where_it_was_moved_to(mesh, tmp_path, monkeypatch):
    """No path within a run's folder leaves it.

    The user has no name and no home, as in many containers.
    """

    def no_such_user(*_: object) -> None:
        raise KeyError("getpwuid(): uid not found: 1000")

    for function in ("getpwuid", "getpwnam"):
        monkeypatch.setattr(pwd, function, no_such_user)
    for variable in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    saving = "exp_manager.checkpoint_callback_params"
    settings = [
        f"{RL}.max_epochs=9",
        f"{RL}.save_interval=1",
        f"{RL}.val_check_interval=1",
        f"{saving}.keep_best=1",
    ]
    for folder in ("whole", "first"):
        (tmp_path / folder).mkdir()
        max_steps = 3 if folder == "whole" else 2
        run(tmp_path / folder, mesh, *settings, f"{RL}.max_steps={max_steps}")
    (tmp_path / "first" / "run").rename(tmp_path / "moved to")
    moved = f"exp_manager.explicit_log_dir={tmp_path / 'moved to'}"
    overrides = tiny_overrides(tmp_path / "first")
    config = load_config(compose(*overrides, *settings, f"{RL}.max_steps=3", moved))
    with tiny_trainer(config, mesh) as trainer:
        assert trainer.step == 2
        trainer.fit()
    assert not (tmp_path / "first" / "run").exists()
    lines = json_lines(tmp_path / "moved to" / "metrics.jsonl")
    expected = metrics_of(tmp_path / "whole")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line, other in zip(lines, expected, strict=True):
        rewards = {name: line[name] for name in line if "rewards" in name}
        assert rewards == {name: other[name] for name in other if "rewards" in name}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("run/config.yaml", marks=SLOW),  # nothing is saved yet
        pytest.param("rollouts/step_00001", marks=SLOW),  # within the first step
        "rollouts/step_00005",  # within a step after the first checkpoint
        # the step is done, its metrics are not written
        pytest.param("validation/step_00005", marks=SLOW),
        # the first checkpoint is complete, but not yet named
        pytest.param("checkpoints/step_00000003", marks=SLOW),
        # it is named, but `latest` does not name it
        pytest.param("checkpoints/latest", marks=SLOW),
        "run/hf",  # the last checkpoint is saved, the export is not
    ],
)
def test_killed_at_a_certain_moment(processes, uninterrupted, tmp_path, moment):
    processes.start(tmp_path, *SETTINGS, die_before=moment)
    assert processes.wait() == -signal.SIGKILL, "the run never came to this moment"
    finish(processes, tmp_path)
    assert_equal_runs(tmp_path, uninterrupted)


@pytest.mark.slow
def test_killed_again_and_again_from_outside(processes, uninterrupted, tmp_path):
    """Before the first checkpoint, between checkpoints, while saving, and right after a step."""
    kill_when(processes, tmp_path, metrics_reach(tmp_path, 1))
    kill_when(processes, tmp_path, appears(tmp_path, "checkpoints/step_00000003.part"))
    kill_when(processes, tmp_path, metrics_reach(tmp_path, 5))
    resumed_from = json.loads((latest(tmp_path) / "trainer_state.json").read_text())["step"]
    kill_when(processes, tmp_path, appears(tmp_path, "checkpoints/step_00000006.part"))
    kill_when(processes, tmp_path, metrics_reach(tmp_path, 8))
    finish(processes, tmp_path)
    assert_equal_runs(tmp_path, uninterrupted)
    assert resumed_from == 3
    # With the checkpoint's weights as the reference, there would be no KL right after a resume.
    said = (tmp_path / "log").read_text()
    assert said.count("Resuming from") >= 3


def latest(folder: Path) -> Path:
    checkpoints = folder / "run" / "checkpoints"
    return checkpoints / (checkpoints / "latest").read_text().strip()


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(12))
def test_killed_at_any_time(processes, uninterrupted, tmp_path, attempt):
    """Kills are spread evenly over a run's first seconds; a fast machine may have ended the run."""
    (process,) = processes.start(tmp_path, *SETTINGS)
    time.sleep(0.25 * (attempt + 1))
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    processes.wait()
    finish(processes, tmp_path)
    assert_equal_runs(tmp_path, uninterrupted)


class TestRefused:
    def test_other_prompts(self, tmp_path, mesh):
        config = tiny_config(tmp_path, f"{RL}.max_epochs=2")
        with tiny_trainer(config, mesh) as trainer:
            trainer.fit()
        write_prompts(tmp_path / "train.jsonl", three_letters(9)[1:])
        with raises_error("checkpoint.data.other_prompts"), tiny_trainer(config, mesh):
            pass
        config.resume_with_changes = True
        with raises_error("checkpoint.data.other_prompts"), tiny_trainer(config, mesh):
            pass

    def test_another_seed(self, tmp_path, mesh):
        with tiny_trainer(tiny_config(tmp_path), mesh) as trainer:
            trainer.fit()
        with (
            raises_error("checkpoint.sampler.other_run", "seed was 1234", 7),
            tiny_trainer(tiny_config(tmp_path, "model.seed=7", "resume_with_changes=true"), mesh),
        ):
            pass


@pytest.fixture(scope="module")
def one_process(processes, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    write_model_of_two_layers(folder)
    processes.start(folder, *two_rank_settings(folder))
    assert processes.wait() == 0, (folder / "log").read_text()
    return folder


def write_model_of_two_layers(folder: Path) -> None:
    """One for each stage of a pipeline."""
    tiny_llama_folder(
        folder / "model", vocab_size=32, layers=2, hidden=16, ffn=32, max_positions=16
    )


def two_rank_settings(folder: Path) -> list[str]:
    """Five prompts in steps of two: the third step has one prompt, and one of two ranks none."""
    prompts = write_prompts(folder / "five.jsonl", three_letters(5))
    return [
        f"model.data.data_prefix.train={prompts}",
        "model.reinforce.num_rollout_samples=2",
        f"{RL}.val_check_interval=3",
        "exp_manager.checkpoint_callback_params.save_hf_on_train_end=true",
    ]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param([], marks=SLOW),
        ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"],
        pytest.param(["model.pipeline_model_parallel_size=2"], marks=SLOW),
        pytest.param(["model.context_parallel_size=2"], marks=SLOW),
    ],
    ids=["data parallel", "tensor and sequence parallel", "pipeline", "context parallel"],
)
@pytest.mark.slow
def test_two_ranks_started_by_plain_python_equal_one(one_process, tmp_path, layout):
    write_model_of_two_layers(tmp_path)
    overrides = [
        *tiny_overrides(tmp_path, num_prompts=NUM_PROMPTS),
        *two_rank_settings(tmp_path),
        "trainer.devices=2",
        *layout,
    ]
    command = [sys.executable, str(DRIVER), *overrides]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=2 * RUN_SECONDS)
    finally:
        kill_tree(process.pid)
    assert process.returncode == 0, said
    resumed = [however_cut(line) for line in metrics_of(tmp_path)]
    expected = [however_cut(line) for line in metrics_of(one_process)]
    assert [line["step"] for line in resumed] == [0, 1, 2, 3]
    for line, other, bound in zip(resumed, expected, (1e-6, 1e-5, 1e-4, 1e-3), strict=True):
        assert largest_difference(line, other) < bound
    for step in (1, 2, 3):
        assert samples_of(tmp_path, step) == samples_of(one_process, step)
    weights = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    others = load_file(one_process / "run" / "hf" / "model.safetensors")
    for name in others:
        torch.testing.assert_close(weights[name], others[name], rtol=0, atol=1e-3)
