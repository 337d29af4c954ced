"""Several optimizer steps on one rollout batch: the sequences of each, and its old policy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import (
    TEMPERATURE,
    VOCAB_SIZE,
    actor_of,
    flat,
    gradient_of,
    relative_difference,
    sequences,
    whole_batch,
)
from helpers.errors import raises_error
from helpers.models import tiny_llama_folder
from helpers.policies import brute_force_scores, named_gradients, transformers_model
from helpers.ranks import call_on_ranks
from helpers.tiny_run import (
    compose,
    however_cut,
    largest_difference,
    metrics_of,
    run,
    three_letters,
    tiny_config,
    tiny_overrides,
    tiny_trainer,
    train_on_ranks,
    weights,
    without_times,
)
from torch import Tensor

from reinforce_rl.algorithm.loss import LossSettings
from reinforce_rl.config.load import load_config
from reinforce_rl.data.batches import ReinforceBatch
from reinforce_rl.trainer.reinforce import ReinforceTrainer
from reinforce_rl.trainer.updates import mini_batches

RL = "trainer.reinforce"
# Ten prompts in steps of four with four samples each: 16, 16 and 8 sequences, in optimizer steps of
# 8.
HALVES = [f"{RL}.importance_ratio=token", "model.global_batch_size=8"]
TWICE = [*HALVES, f"{RL}.reinforce_epochs=2"]


class Updates:
    """Looks on while a trainer makes its optimizer steps.

    Attributes:
        rows: of each optimizer step, the (prompt, sample) of its sequences.
        sums: of each optimizer step, the numbers of the loss.
    """

    def __init__(self, trainer: ReinforceTrainer, monkeypatch: pytest.MonkeyPatch):
        self.rows: list[list[tuple[int, int]]] = []
        self.sums: list[dict[str, float]] = []
        original = trainer.model.get_loss_and_metrics

        def look_on(batch: ReinforceBatch, *args: Any, rows: Tensor, **kwargs: Any):
            prompts = batch.rollouts.group_ids[rows].tolist()
            samples = batch.rollouts.sample_ids[rows].tolist()
            self.rows.append(list(zip(prompts, samples, strict=True)))
            share = original(batch, *args, rows=rows, **kwargs)
            self.sums.append(share.sums)
            return share

        monkeypatch.setattr(trainer.model, "get_loss_and_metrics", look_on)

    def clip_fraction(self, step: int) -> float:
        return self.sums[step]["clipped"] / self.sums[step]["tokens"]

    def effective_sample_size(self, step: int) -> float:
        sums = self.sums[step]
        return sums["weights"] ** 2 / (sums["tokens"] * sums["squares"])


class TestOptimizerSteps:
    def test_every_sequence_once_an_epoch_in_whole_groups(self, tmp_path, mesh, monkeypatch):
        config = tiny_config(tmp_path, *TWICE, prompts=three_letters(10))
        with tiny_trainer(config, mesh) as trainer:
            seen = Updates(trainer, monkeypatch)
            trainer.fit()
        lines = metrics_of(tmp_path)
        assert [line["train/optimizer_steps"] for line in lines] == [4, 4, 2]
        assert [len(rows) for rows in seen.rows] == [8] * 10
        for rows in seen.rows:
            groups = Counter(group for group, _ in rows)
            assert list(groups.values()) == [4, 4]
        epochs = [seen.rows[i] + seen.rows[i + 1] for i in (0, 2, 4, 6)]
        epochs += [seen.rows[8], seen.rows[9]]
        for first, second in zip(epochs[::2], epochs[1::2], strict=True):
            assert len(set(first)) == len(first)
            assert sorted(first) == sorted(second)
        groups_seen = {group for rows in seen.rows for group, _ in rows}
        assert groups_seen == set(range(10))
        assert any(seen.rows[i] != seen.rows[i + 2] for i in (0, 4)), "another order every epoch"

    def test_the_schedule_ends_with_the_last_optimizer_step(self, tmp_path, mesh):
        """Nine prompts in steps of 2, 2 and 1 mini-batches, each twice, for two epochs.

        The last mini-batch has a single prompt.
        """
        schedule = ["name=linear", "warmup_steps=5", "constant_steps=1", "min_lr=0.001"]
        options = [f"model.optim.sched.{item}" for item in schedule]
        lines = run(
            tmp_path, mesh, *TWICE, *options, f"{RL}.max_epochs=2", prompts=three_letters(9)
        )
        assert sum(line["train/optimizer_steps"] for line in lines) == 20
        taken = []
        for line in lines:
            taken.append(line["train/optimizer_steps"] + (taken[-1] if taken else 0))
        assert taken == [4, 8, 10, 14, 18, 20]
        # Up to 0.01 by step 5, then straight down to 0.001 at step 19.
        expected = []
        for step in taken:
            warm_up = 0.01 * step / 5
            decay = max(0.01 - 0.009 * (step - 5) / 14, 0.001)
            expected.append(warm_up if step <= 5 else decay)
        assert [line["train/lr"] for line in lines] == pytest.approx(expected)

    def test_only_the_first_step_on_a_batch_is_on_policy(self, tmp_path, mesh, monkeypatch):
        config = tiny_config(
            tmp_path, *TWICE, f"{RL}.ratio_clip_low=0.01", f"{RL}.ratio_clip_high=0.01"
        )
        with tiny_trainer(config, mesh) as trainer:
            seen = Updates(trainer, monkeypatch)
            trainer.fit()
        assert len(seen.sums) == 8
        for first in (0, 4):
            assert seen.clip_fraction(first) == 0.0
            assert seen.effective_sample_size(first) == 1.0
            for later in range(first + 1, first + 4):
                assert seen.clip_fraction(later) > 0
                assert seen.effective_sample_size(later) < 1 - 1e-5
        for line in metrics_of(tmp_path):
            assert 0 < line["train/clip_fraction"] < 1
            assert 0 < line["train/effective_sample_size"] < 1

    @pytest.mark.more
    def test_one_step_on_the_whole_batch_has_a_ratio_of_one(self, tmp_path, mesh):
        """The run with a ratio equals the run without."""
        lines = []
        for ratio in ("none", "token", "sequence", "sequence_geometric"):
            overrides = [f"{RL}.importance_ratio={ratio}", "model.global_batch_size=16"]
            run_lines = run(tmp_path / ratio, mesh, *overrides)
            lines.append(list(map(without_times, run_lines)))
        for lines_of_run in lines:
            assert [line["train/optimizer_steps"] for line in lines_of_run] == [1, 1]
            for line in lines_of_run:
                assert line["train/clip_fraction"] == 0
                assert line["train/effective_sample_size"] == 1
            # The loss differs, since a ratio is 1 where a log-prob is not; the gradient
            # is the same.
            for line, other in zip(lines_of_run, lines[0], strict=True):
                assert largest_difference(without_loss(line), without_loss(other)) < 1e-5

    @pytest.mark.more
    def test_independent_of_the_micro_batch_size(self, tmp_path, mesh):
        results = []
        for size in (16, 3, 1):
            with tiny_trainer(
                tiny_config(tmp_path / str(size), *TWICE, f"model.micro_batch_size={size}"), mesh
            ) as it:
                it.fit()
            metrics = list(map(however_cut, metrics_of(tmp_path / str(size))))
            results.append((metrics, weights(it)))
        for lines, parameters in results[1:]:
            assert max(map(largest_difference, lines, results[0][0])) < 1e-4
            for parameter, other in zip(parameters, results[0][1], strict=True):
                torch.testing.assert_close(parameter, other, rtol=0, atol=1e-4)

    @pytest.mark.more
    def test_mini_batches_are_the_global_batch_size_of_the_same_share(self, tmp_path, mesh):
        ratio = f"{RL}.importance_ratio=token"
        lines = []
        for number, halves in enumerate((f"{RL}.mini_batches=2", "model.global_batch_size=8")):
            metrics = run(tmp_path / str(number), mesh, ratio, halves, f"{RL}.max_steps=2")
            lines.append([without_times(line) for line in metrics])
        assert lines[0] == lines[1]
        assert [line["train/optimizer_steps"] for line in lines[0]] == [2, 2]
        assert lines[0][0]["train/clip_fraction"] > 0

    @pytest.mark.parametrize(
        "change",
        [f"{RL}.reinforce_epochs=2", f"{RL}.mini_batches=2", "model.global_batch_size=8"],
    )
    def test_refused_without_a_ratio(self, tmp_path, change):
        overrides = [*tiny_overrides(tmp_path), change]
        advised = "trainer.reinforce.importance_ratio=token"
        with raises_error("config.importance_ratio.missing_off_policy", advised):
            load_config(compose(*overrides))
        load_config(compose(*overrides, f"{RL}.importance_ratio=sequence"))

    @pytest.mark.parametrize("size", [6, 32, 12])
    def test_refused_where_groups_would_not_stay_whole(self, tmp_path, size):
        named = (f"model.global_batch_size is {size},", "multiple of 4")
        with raises_error("config.global_batch_size.not_a_divisor_of_step", *named):
            tiny_config(tmp_path, f"{RL}.importance_ratio=token", f"model.global_batch_size={size}")


class TestMiniBatches:
    def test_the_same_groups_however_many_ranks_hold_them(self):
        groups = torch.tensor([7, 7, 3, 3, 9, 9, 1, 1, 4, 4])
        alone = [groups[rows].tolist() for rows in mini_batches([groups], 0, 2, 2, seed=5)]
        sizes = [len(ids) for ids in alone]
        assert sizes == [4, 4, 2, 4, 4, 2]
        parts = [groups[:4], groups[4:4], groups[4:]]
        for spread in zip(
            *(list(mini_batches(parts, rank, 2, 2, seed=5)) for rank in range(3)), strict=True
        ):
            pairs = zip(parts, spread, strict=True)
            joined = torch.cat([part[rows] for part, rows in pairs])
            assert joined.tolist() == alone.pop(0)
        assert not alone

    def test_another_order_for_another_seed(self):
        groups = torch.arange(50)
        orders = []
        for seed in (1, 1, 2):
            batches = list(mini_batches([groups], 0, 5, 1, seed))
            orders.append(torch.cat(batches).tolist())
        assert orders[0] == orders[1]
        assert orders[1] != orders[2]

    def test_no_group_at_all_still_makes_as_many_steps_on_every_rank(self):
        nothing = torch.zeros(0, dtype=torch.long)
        for prompts_per_update in (None, 2):
            steps = list(mini_batches([nothing, nothing], 1, prompts_per_update, 2, seed=1))
            assert [len(rows) for rows in steps] == [0, 0]


def brute_force_ratio_gradient(
    model: Any,
    batch: ReinforceBatch,
    rows: Tensor,
    old: Tensor,
    ratio: str,
    low: float,
    high: float,
) -> Tensor:
    """PPO's clipped term of these rows, by autograd on transformers' model, one by one."""
    rollouts = batch.rollouts.select(rows)
    log_probs = brute_force_scores(
        model,
        rollouts.sequences,
        rollouts.prompt_lengths,
        rollouts.response_lengths,
        temperature=TEMPERATURE,
        width=rollouts.width,
    )[0]
    total = torch.zeros(())
    for i, length in enumerate(rollouts.response_lengths.tolist()):
        advantage = float(batch.advantages[rows[i], 0])
        difference = log_probs[i, :length] - old[rows[i], :length]
        if ratio == "sequence":
            difference = difference.sum()[None]
        elif ratio == "sequence_geometric":
            difference = difference.mean().expand(length)
        rho = difference.exp()
        clipped = rho.clamp(1 - low, 1 + high)
        total = total - torch.minimum(rho * advantage, clipped * advantage).sum()
    model.zero_grad()
    (total / len(rows)).backward()
    return flat(named_gradients(model))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_llama_folder(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE)


class TestAgainstBruteForce:
    """After one step, the next step's gradient against the policy before the first step."""

    @pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_geometric"])
    def test_second_step(self, ratio, folder, mesh, tmp_path):
        low = 0.1
        high = 0.3
        actor = actor_of(folder, mesh, with_reference=False, micro_batch_size=2)
        loss = LossSettings(importance_ratio=ratio, ratio_clip_low=low, ratio_clip_high=high)
        actor.loss = loss
        batch = whole_batch()
        where = (
            batch.rollouts.sequences,
            batch.rollouts.prompt_lengths,
            batch.rollouts.response_lengths,
        )
        old = actor.get_inference_log_probs(*where)
        batch = replace(batch, rollouts=replace(batch.rollouts, log_probs=old))
        rows = (batch.trains & (batch.rollouts.response_lengths > 0)).nonzero()[:, 0]
        first = rows[:5]
        second = rows[5:]

        actor.get_loss_and_metrics(batch, sequences(len(first)), rows=first)
        before = transformers_model(folder)
        expected = brute_force_ratio_gradient(before, batch, first, old, ratio, low, high)
        assert relative_difference(gradient_of(actor), expected) < 1e-4
        with torch.no_grad():
            for parameter in actor.lm.parameters():
                parameter -= 0.06 * parameter.main_grad  # type: ignore[attr-defined]

        after = transformers_model(actor.export(folder, tmp_path / "after"))
        for part in (first, second):
            share = actor.get_loss_and_metrics(
                batch, sequences(len(part)), rows=part, on_policy=False
            )
            expected = brute_force_ratio_gradient(after, batch, part, old, ratio, low, high)
            assert relative_difference(gradient_of(actor), expected) < 1e-4
            # The test would see nothing if the policy had not moved or if everything were clipped.
            assert 0 < share.sums["clipped"] < share.sums["tokens"]
        actor.get_loss_and_metrics(batch, sequences(len(second)), rows=second, on_policy=True)
        assert relative_difference(gradient_of(actor), expected) > 0.01

    def test_the_trainer_takes_the_log_probs_before_the_first_step(self, tmp_path, mesh):
        with tiny_trainer(
            tiny_config(tmp_path, *TWICE, f"{RL}.initial_policy_kl_penalty=0"), mesh
        ) as trainer:
            rollouts, _, _ = trainer.generate_rollouts()
            where = (rollouts.sequences, rollouts.prompt_lengths, rollouts.response_lengths)
            before = trainer.model.get_inference_log_probs(*where)
            assert rollouts.log_probs is not None
            assert torch.equal(rollouts.log_probs, before)
            batch, _ = trainer.generate_reinforce_data(rollouts)
            trainer.run_training(batch)
            assert torch.equal(rollouts.log_probs, before)
            assert not torch.allclose(
                trainer.model.get_inference_log_probs(*where), before, atol=1e-3
            )


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path, mesh):
    """Five prompts, steps of three, optimizer steps of one: in each a rank has nothing to do."""
    overrides = [
        *tiny_overrides(tmp_path, prompts=three_letters(5)),
        "model.reinforce.num_rollout_samples=3",
        "model.global_batch_size=4",
        f"{RL}.importance_ratio=token",
        f"{RL}.reinforce_epochs=2",
        "model.optim.lr=0.001",
    ]
    folders = tmp_path / "one", tmp_path / "two"
    with tiny_trainer(load_config(compose(*overrides, log_dir(folders[0]))), mesh) as trainer:
        trainer.fit()
    on_two = [*overrides, log_dir(folders[1]), "trainer.devices=2"]
    ranks = call_on_ranks(train_on_ranks, 2, on_two)
    expected = [however_cut(line) for line in metrics_of(folders[0])]
    two_ranks = [however_cut(line) for line in metrics_of(folders[1])]
    assert [line["train/optimizer_steps"] for line in expected] == [6, 4]
    for line, other in zip(two_ranks, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-5, abs=1e-6)
    for parameters in ranks:
        for parameter, other in zip(parameters, weights(trainer), strict=True):
            assert relative_difference(parameter, other) < 1e-5


def without_loss(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "train/actor_loss"}


def log_dir(folder: Path) -> str:
    """Return the override of the folder that `metrics_of` reads."""
    return f"exp_manager.explicit_log_dir={folder / 'run'}"
