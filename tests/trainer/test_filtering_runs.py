"""Dynamic filtering in whole runs: prompts that are drawn, prompts that train, and the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.ranks import call_on_ranks
from helpers.rewards import FunctionReward
from helpers.tiny_run import (
    SOME_ALIKE,
    compose,
    however_cut,
    largest_difference,
    metrics_of,
    odd_share_or_alike,
    rollouts_of,
    run,
    three_letters,
    tiny_config,
    tiny_overrides,
    tiny_trainer,
    train_on_ranks,
    weights,
    without_times,
)

from reinforce_rl.config.load import load_config
from reinforce_rl.rewards.base import RewardRequest

RL = "trainer.reinforce"
FILTERING = [f"{RL}.dynamic_filtering=true", f"{RL}.max_epochs=2"]
WANTED = 4  # groups of a step
PROMPTS = three_letters(18)


class Recorder(FunctionReward):
    """Records the prompt's text and the reward of each sample that it scores."""

    def __init__(self, score: Callable[[list[int]], float] = odd_share_or_alike):
        super().__init__(score, 0)
        self.prompts: list[str] = []
        self.rewards: list[float] = []

    def infer_rm(self, request: RewardRequest):
        answer = super().infer_rm(request)
        self.prompts += request.prompts
        self.rewards += answer.rewards.values.tolist()
        return answer

    def steps(self, lines: list[dict]) -> list[dict[str, set[float]]]:
        """Return the distinct rewards of each prompt of a step, in the order of drawing."""
        rewards_of_steps = []
        start = 0
        for line in lines:
            end = 4 * line["train/consumed_prompts"]
            drawn: dict[str, set[float]] = {}
            for row in range(start, end):
                drawn.setdefault(self.prompts[row], set()).add(self.rewards[row])
            rewards_of_steps.append(drawn)
            start = end
        assert start == len(self.prompts)
        return rewards_of_steps


def responses_of(folder: Path, step: int) -> dict[tuple[int, int], str]:
    rows = rollouts_of(folder, step)
    return {(row["prompt_id"], row["sample_id"]): row["response"] for row in rows}


@pytest.mark.parametrize("rounds", [0, 1, 5])
def test_steps_are_filled_with_groups_that_differ(rounds, tmp_path, mesh):
    recorder = Recorder()
    bound = f"{RL}.max_resampling_rounds={rounds}"
    lines = run(tmp_path, mesh, *FILTERING, bound, rm=recorder, prompts=PROMPTS)
    steps = [line["step"] for line in lines]
    assert steps == list(range(1, len(lines) + 1))
    consumed = [0, *(line["train/consumed_prompts"] for line in lines)]
    assert consumed[-1] == 2 * len(PROMPTS)
    assert len(PROMPTS) in consumed, "an epoch's end is a step's end"
    filled = 0
    for step, (line, drawn) in enumerate(zip(lines, recorder.steps(lines), strict=True), 1):
        assert line["train/groups_drawn"] == consumed[step] - consumed[step - 1] == len(drawn)
        differ = [prompt for prompt, rewards in drawn.items() if len(rewards) > 1]
        assert line["train/groups_with_zero_std"] == len(drawn) - len(differ)
        assert line["train/groups_trained"] == min(len(differ), WANTED)
        assert line["train/resampling_rounds"] == -(-len(drawn) // WANTED) - 1 <= rounds
        rows = rollouts_of(tmp_path, step)
        num_responses = Counter(row["prompt"] for row in rows)
        assert num_responses == dict.fromkeys(differ[:WANTED], 4)
        for row in rows:
            assert row["valid"]
        # No batch is drawn once there are enough prompts, and another one as long as there are not.
        before_last = list(drawn)[: WANTED * line["train/resampling_rounds"]]
        num_differ = sum(len(drawn[prompt]) > 1 for prompt in before_last)
        assert num_differ < WANTED or not before_last
        ended = consumed[step] % len(PROMPTS) == 0
        assert len(differ) >= WANTED or ended or line["train/resampling_rounds"] == rounds
        filled += len(differ) >= WANTED
    assert filled, "otherwise this test sees nothing"
    assert any(line["train/groups_with_zero_std"] for line in lines), "nor without such a group"
    for epoch in (0, 1):
        an_epoch = 4 * len(PROMPTS)
        seen = recorder.prompts[epoch * an_epoch : (epoch + 1) * an_epoch]
        assert Counter(seen) == dict.fromkeys(PROMPTS, 4), "every prompt once an epoch"


def test_the_rewards_that_are_logged_are_those_of_all_that_were_drawn(tmp_path, mesh):
    recorder = Recorder()
    lines = run(tmp_path, mesh, *FILTERING, rm=recorder, prompts=PROMPTS)
    start = 0
    for line in lines:
        end = 4 * line["train/consumed_prompts"]
        total = sum(recorder.rewards[start:end])
        assert line["train/rewards"] == pytest.approx(total / (end - start))
        start = end


def test_optimizer_steps_on_what_is_left(tmp_path, mesh):
    options = [
        f"{RL}.importance_ratio=token",
        "model.global_batch_size=8",
        f"{RL}.max_resampling_rounds=0",
    ]
    lines = run(tmp_path, mesh, *FILTERING, *options, rm=SOME_ALIKE, prompts=PROMPTS)
    trained = [line["train/groups_trained"] for line in lines]
    assert len(set(trained)) > 1
    optimizer_steps = [line["train/optimizer_steps"] for line in lines]
    assert optimizer_steps == [max(-(-count // 2), 1) for count in trained]


def test_nothing_to_train_on(tmp_path, mesh):
    """Two steps use up all prompts, long before the planned number of steps."""
    options = [
        f"{RL}.max_resampling_rounds=9",
        f"{RL}.val_check_interval=4",
        "model.optim.weight_decay=0",
    ]
    config = tiny_config(tmp_path, *FILTERING, *options, prompts=PROMPTS)
    with tiny_trainer(config, mesh, lambda ids: 0.25) as trainer:
        before = weights(trainer)
        trainer.fit()
        assert trainer.max_steps == 10
        assert trainer.step == 2
        for a, b in zip(before, weights(trainer), strict=True):
            assert torch.equal(a, b)
    lines = metrics_of(tmp_path)
    validated_steps = [line["step"] for line in lines if "val/rewards" in line]
    assert validated_steps == [0, 2], "validated at the end too"
    for line in lines[1:]:
        counts = [line[f"train/groups_{name}"] for name in ("drawn", "with_zero_std", "trained")]
        assert counts == [18, 18, 0]
        assert line["train/rewards"] == 0.25
        assert line["train/actor_loss"] == 0.0
        assert line["train/grad_norm"] == 0.0
        assert line["train/skipped_step"] == 0
    assert rollouts_of(tmp_path, 1) == []


@pytest.mark.parametrize(
    "options",
    [
        [f"{RL}.advantage_estimator=raft", f"{RL}.initial_policy_kl_penalty=0"],
        [f"{RL}.advantage_whitening=token", f"{RL}.credit_assignment=token"],
        [
            f"{RL}.reward_shaping.standardization=running",
            f"{RL}.kl_target=0.1",
            f"{RL}.kl_placement=loss",
        ],
        [
            f"{RL}.importance_ratio=sequence",
            "model.global_batch_size=8",
            f"{RL}.reinforce_epochs=2",
        ],
    ],
    ids=["raft", "whitened token credit", "running moments", "several optimizer steps"],
)
def test_nothing_to_train_on_with_other_options(options, tmp_path, mesh):
    lines = run(tmp_path, mesh, *FILTERING, *options, rm=lambda ids: 0.25)
    assert len(lines) == 2
    for line in lines:
        assert line["train/groups_trained"] == 0
        assert line["train/actor_loss"] == 0
        assert line["train/skipped_step"] == 0


@pytest.mark.more
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, mesh):
    """Interrupted within the first epoch, in a step that drew several batches."""
    folders = tmp_path / "whole", tmp_path / "parts"
    whole = run(folders[0], mesh, *FILTERING, rm=SOME_ALIKE, prompts=PROMPTS)
    assert whole[1]["train/resampling_rounds"] > 0
    assert whole[1]["train/epoch"] == 0
    for steps in (2, 3, -1):
        parts = run(
            folders[1], mesh, *FILTERING, f"{RL}.max_steps={steps}", rm=SOME_ALIKE, prompts=PROMPTS
        )
    assert list(map(without_times, parts)) == list(map(without_times, whole))
    for step in range(1, len(whole) + 1):
        assert rollouts_of(folders[1], step) == rollouts_of(folders[0], step)


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path, mesh):
    overrides = [
        *tiny_overrides(tmp_path, prompts=PROMPTS[:11]),
        *FILTERING,
        "model.optim.lr=0.001",
    ]
    folders = tmp_path / "one", tmp_path / "two"
    places = [f"exp_manager.explicit_log_dir={folder / 'run'}" for folder in folders]
    with tiny_trainer(load_config(compose(*overrides, places[0])), mesh, SOME_ALIKE) as trainer:
        trainer.fit()
    on_two = [*overrides, places[1], "trainer.devices=2"]
    ranks = call_on_ranks(train_on_ranks, 2, on_two, SOME_ALIKE)
    expected, filtered = (list(map(however_cut, metrics_of(folder))) for folder in folders)
    assert any(line["train/groups_with_zero_std"] for line in expected)
    for step, (line, other) in enumerate(zip(filtered, expected, strict=True), 1):
        assert largest_difference(line, other) < 1e-4
        assert responses_of(folders[0], step) == responses_of(folders[1], step)
    for parameters in ranks:
        for parameter, other in zip(parameters, weights(trainer), strict=True):
            torch.testing.assert_close(parameter, other, rtol=0, atol=1e-4)
