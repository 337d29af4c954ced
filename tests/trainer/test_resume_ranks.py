"""One rank and two, killed at random moments with all kinds of state, and changes of layout."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.models import tiny_llama_folder
from helpers.tiny_run import largest_difference, metrics_of, rollouts_of, without_times
from helpers.trainer_processes import (
    NUM_PROMPTS,
    SETTINGS,
    STEPS,
    TrainerProcesses,
    assert_equal_runs,
)

pytestmark = pytest.mark.more

SAVING = "exp_manager.checkpoint_callback_params"
STATEFUL = [
    *SETTINGS,
    "trainer.reinforce.advantage_estimator=running_mean",
    "trainer.reinforce.reward_shaping.standardization=running",
    "trainer.reinforce.kl_target=0.05",
    "trainer.reinforce.kl_horizon=50",
    "trainer.reinforce.val_check_interval=2",
    f"{SAVING}.keep_best=1",
]
ASYNC = f"{SAVING}.async_save=true"
FILTERING = (
    "trainer.reinforce.dynamic_filtering=true",
    "trainer.reinforce.max_resampling_rounds=1",
)
MOVING = (
    "trainer.reinforce.advantage_estimator=moving_average",
    "trainer.reinforce.baseline_window=4",
)
EXPONENTIAL = ("trainer.reinforce.advantage_estimator=exponential_moving_average",)
DISTRIBUTED = ("model.optim.distributed=true", "model.optim.overlap_grad_sync=true")


@pytest.fixture(scope="module")
def processes() -> Iterator[TrainerProcesses]:
    processes = TrainerProcesses()
    yield processes
    processes.close()


def finish(processes: TrainerProcesses, folder: Path, *overrides: str, ranks: int = 2) -> None:
    processes.finish(folder, *STATEFUL, *overrides, ranks=ranks)


@pytest.fixture(scope="module")
def uninterrupted(processes, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    finish(processes, folder)
    return folder


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (1, (*FILTERING, *MOVING)), id="one rank, moving average", marks=pytest.mark.slow
        ),
        pytest.param(
            (2, (*FILTERING, *DISTRIBUTED, *EXPONENTIAL)),
            id="two ranks, distributed optimizer, exponential moving average",
        ),
        pytest.param((2, FILTERING), id="two ranks", marks=pytest.mark.slow),
    ],
)
def whole(request, processes, tmp_path_factory) -> tuple[Path, int, tuple[str, ...], float]:
    """A run without interruptions and asynchronous saves.

    Its ranks, its overrides and the seconds of its steps.
    """
    ranks, overrides = request.param
    folder = tmp_path_factory.mktemp("whole")
    finish(processes, folder, *overrides, ranks=ranks)
    lines = metrics_of(folder)
    assert any(line.get("train/groups_with_zero_std") for line in lines)
    assert any(line.get("train/resampling_rounds") for line in lines)
    seconds = lines[-1]["time"] - lines[0]["time"]
    return folder, ranks, overrides, seconds


@pytest.mark.parametrize(
    "kills", [3, *(pytest.param(4, marks=pytest.mark.slow, id=f"4-{i}") for i in range(5))]
)
def test_killed_at_random_moments(kills, whole, processes, tmp_path):
    """Three kills a run; twenty in the slow tier, four each in five runs."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the moments: {seed}")
    draw = random.Random(seed)
    folder, ranks, overrides, seconds = whole
    for _ in range(kills):
        # One kill in each part of the run, so that the last kills still find steps.
        processes.kill_at_random(
            tmp_path, draw, seconds / kills, *STATEFUL, *overrides, ASYNC, ranks=ranks
        )
    finish(processes, tmp_path, *overrides, ASYNC, ranks=ranks)
    assert_equal_runs(tmp_path, folder)


def test_everything_that_carries_state_is_in_the_checkpoint(uninterrupted):
    """The state changes in this run, so a missing part would show in the others."""
    folder = uninterrupted / "run" / "checkpoints"
    newest = folder / (folder / "latest").read_text().strip()
    state = json.loads((newest / "trainer_state.json").read_text())
    assert sorted(state) == [
        "best",
        "data",
        "decayed_rewards",
        "epoch",
        "kl_coefficient",
        "last_rewards",
        "lora",
        "past_rewards",
        "past_scores",
        "step",
        "validation_is_due",
        "version",
        "wandb_run_id",
    ]
    assert state["step"] == STEPS
    assert state["epoch"] == 4
    assert state["data"]["consumed_prompts"] == 4 * NUM_PROMPTS
    assert state["past_scores"]["count"] == 4 * 4 * NUM_PROMPTS
    assert 0 < state["past_scores"]["mean"] < 1
    assert state["past_rewards"]["mean"] != 0
    means = [state["past_rewards"]["mean"], state["decayed_rewards"]["mean"]]
    assert len(state["last_rewards"]) == 10
    assert len({*means, *(of["mean"] for of in state["last_rewards"])}) > 3
    assert state["kl_coefficient"] != 0.1
    values = {
        line["step"]: line["val/rewards"]
        for line in metrics_of(uninterrupted)
        if "val/rewards" in line
    }
    # the first of equal ones
    best = max((step for step in values if step > 0), key=lambda step: values[step])
    assert state["best"] == {
        "metric": "val/rewards",
        "mode": "max",
        "found": [[best, values[best]]],
    }
    assert (folder / f"step_{best:08d}").is_dir()
    for rank in (0, 1):
        rng = torch.load(newest / "rng" / f"rank_{rank:05d}.pt", weights_only=True)
        assert sorted(set(rng) - {"cuda"}) == ["layout", "megatron", "numpy", "python", "torch"]
        assert rng["layout"] == {"world_size": 2, "tensor": 1, "pipeline": 1, "context": 1}
        assert "model-parallel-rng" in rng["megatron"]
    files = json.loads((newest / "manifest.json").read_text())["files"]
    on_disk = {path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file()}
    assert on_disk == {*files, "manifest.json"}


TP2 = (2, ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true"))
PP2 = (2, ("model.pipeline_model_parallel_size=2",))
DP2 = (2, DISTRIBUTED)
ONE = (1, ())


@pytest.mark.parametrize(
    "layouts",
    [
        [ONE, PP2, DP2],
        pytest.param([ONE, ONE, TP2, TP2, DP2, DP2, PP2, PP2, ONE], marks=pytest.mark.slow),
    ],
    ids=["three", "nine"],
)
@pytest.mark.slow
def test_every_prompt_once_an_epoch_through_kills_and_layouts(layouts, processes, tmp_path):
    """Each start is killed within a step, but for the last one, which ends the run."""
    tiny_llama_folder(
        tmp_path / "model", vocab_size=32, layers=2, hidden=16, ffn=32, max_positions=16
    )
    settings = [*STATEFUL, "trainer.reinforce.save_interval=1"]
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the moments: {seed}")
    draw = random.Random(seed)
    killed = sorted(draw.sample(range(2, STEPS), len(layouts) - 1))
    moments = [f"rollouts/step_{step:05d}" for step in killed]
    for (ranks, overrides), moment in zip(layouts, [*moments, ""], strict=True):
        processes.start(tmp_path, *settings, *overrides, die_before=moment, ranks=ranks)
        code = -signal.SIGKILL if moment else 0
        assert processes.wait() == code, (tmp_path / "log").read_text()
    lines = metrics_of(tmp_path)
    steps = [line["step"] for line in lines]
    assert steps == list(range(STEPS + 1))
    assert lines[-1]["train/consumed_prompts"] == 4 * NUM_PROMPTS
    for epoch in range(4):
        rows = [row for step in (1, 2, 3) for row in rollouts_of(tmp_path, 3 * epoch + step)]
        num_responses = Counter(row["prompt_id"] for row in rows)
        assert num_responses == dict.fromkeys(range(NUM_PROMPTS), 4)


def without_padding(line: dict) -> dict:
    return {key: value for key, value in without_times(line).items() if "padding" not in key}


def test_another_number_of_ranks_in_the_middle_of_an_epoch(processes, uninterrupted, tmp_path):
    """One rank, then two: the numbers of two ranks throughout."""
    every_step = "trainer.reinforce.save_interval=1"
    processes.start(tmp_path, *STATEFUL, every_step, die_before="rollouts/step_00006")
    assert processes.wait() == -signal.SIGKILL
    finish(processes, tmp_path, every_step)
    assert "after step 5 of 12" in (tmp_path / "log").read_text()
    pairs = zip(metrics_of(tmp_path), metrics_of(uninterrupted), strict=True)
    for line, other in list(pairs)[:9]:
        pair = [without_padding(line), without_padding(other)]
        assert largest_difference(*pair) < 1e-3, line["step"]
