"""The trainer on a tiny model: its files, samples that it leaves out, and failing rewards."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises_error
from helpers.rewards import FunctionReward, ReadyRewards
from helpers.tiny_run import (
    MAX_LENGTH,
    PROMPT_TOKENS,
    however_cut,
    largest_difference,
    metrics_of,
    odd_share,
    rollouts_of,
    run,
    three_letters,
    tiny_config,
    tiny_trainer,
    weights,
    without_times,
)

from reinforce_rl.data.batches import Completions, Prompt, ReinforceBatch
from reinforce_rl.data.finish_reasons import FINISH_STOP
from reinforce_rl.data.sampler import step_seed
from reinforce_rl.errors import GenerationError, RewardServerError, StoppedEarly
from reinforce_rl.megatron.checkpointer import latest_checkpoint
from reinforce_rl.rewards.base import (
    STATUS_INTERNAL,
    STATUS_NOT_FINITE,
    STATUS_TEXT,
    RewardRequest,
    Rewards,
)
from reinforce_rl.rollout.local import LocalRollouts
from reinforce_rl.runtime.stop import RunTimer, TimeBudget
from reinforce_rl.trainer.reinforce import ReinforceTrainer
from reinforce_rl.trainer.updates import mini_batches
from reinforce_rl.utils.job_time import JobTimes

RL = "trainer.reinforce"
TOO_MANY = "rewards.samples.too_many_failed"
EVERY_FAILURE = f"{RL}.max_failed_fraction=1"


def saved_step(folder: Path) -> int | None:
    checkpoint = latest_checkpoint(folder / "run" / "checkpoints")
    return checkpoint.trainer_state["step"] if checkpoint else None


class TestAStep:
    def test_what_it_returns_and_leaves(self, tmp_path, mesh):
        config = tiny_config(tmp_path, "model.reinforce.sampling_params.temperature=0.7")
        with tiny_trainer(config, mesh) as trainer:
            batch, metrics, timings = trainer.generate_rollouts()
            assert batch.sequences.shape[0] == 16
            assert batch.log_probs.shape == batch.response_mask.shape
            assert batch.sample_ids.tolist() == [0, 1, 2, 3] * 4
            assert list(Counter(batch.group_ids.tolist()).values()) == [4] * 4
            assert set(timings) == {"generate", "logprobs", "init_logprobs", "reward_wait"}
            assert metrics["rewards"] == pytest.approx(float(batch.rewards.mean()))
            # The policy still equals the reference, at the same temperature: the KL is rounding.
            assert batch.init_log_probs is not None
            torch.testing.assert_close(batch.log_probs, batch.init_log_probs, rtol=0, atol=1e-5)

            data, metrics = trainer.generate_reinforce_data(batch)
            assert abs(metrics["init_policy_kl"]) < 1e-6
            assert not data.advantages.requires_grad
            before = weights(trainer)
            update = trainer.run_training(data)
            assert math.isfinite(update["actor_loss"])
            assert update["grad_norm"] > 0
            pairs = zip(before, weights(trainer), strict=True)
            assert any(not torch.equal(a, b) for a, b in pairs)

    def test_log_probs_are_those_that_the_generator_sampled_with(self, tmp_path, mesh):
        """An offset of one token, another temperature or padding taken for text would show here."""
        overrides = (
            "model.reinforce.sampling_params.temperature=1.4",
            "model.reinforce.length_params.min_length=0",
        )
        with tiny_trainer(tiny_config(tmp_path, *overrides), mesh) as trainer:
            prompts = [Prompt(i, "", (4,) * (i + 1)) for i in range(4)]
            seed = step_seed(trainer.model.settings.seed, 3)
            completions = trainer.model.infer(prompts, 4, seed=seed)
            batch = trainer.rollouts.sample(prompts, 4, step=3).batch
            log_probs = trainer.model.get_inference_log_probs(
                batch.sequences, batch.prompt_lengths, batch.response_lengths
            )
            assert completions.log_probs is not None
            assert len(set(completions.lengths.tolist())) > 1
            torch.testing.assert_close(log_probs, completions.log_probs, rtol=0, atol=1e-5)

    @pytest.mark.more
    def test_the_generators_own_log_probs_save_a_pass(self, tmp_path, mesh):
        """With and without, the run is equal but for rounding.

        A second update on a batch needs the trainer's own log-probs.
        """
        passes = {}
        lines = {}
        for name, keys in {
            "generator": [],
            "policy": [f"{RL}.generator_log_probs=false"],
            "updates": [f"{RL}.reinforce_epochs=2", f"{RL}.importance_ratio=token"],
        }.items():
            (tmp_path / name).mkdir()
            with tiny_trainer(tiny_config(tmp_path / name, *keys), mesh) as trainer:
                asked = []
                call = trainer.model.get_inference_log_probs
                trainer.model.get_inference_log_probs = lambda *where, asked=asked, call=call: (
                    asked.append(len(where[0])) or call(*where)
                )
                trainer.fit()
            passes[name] = len(asked) / trainer.step
            lines[name] = [
                line
                for line in metrics_of(tmp_path / name)
                if "train/loss" in line or "train/rewards" in line
            ]
        assert passes == {"generator": 1, "policy": 2, "updates": 2}, "one is the reference's"
        for line, other in zip(lines["generator"], lines["policy"], strict=True):
            for key in (
                "train/init_policy_kl",
                "train/rewards_with_kl",
                "train/grad_norm",
                "train/actor_loss",
            ):
                assert line[key] == pytest.approx(other[key], abs=1e-5), key

    @pytest.mark.more
    def test_the_update_does_not_depend_on_how_the_batch_is_cut(self, tmp_path, mesh):
        lines = []
        for i, (micro, forward, generated, validated) in enumerate(
            [(16, 16, 4, 3), (1, 3, 1, 1), (5, 2, 3, 2)]
        ):
            sizes = [
                f"{RL}.val_check_interval=1",
                f"model.reinforce.val_rollout_micro_batch_size={validated}",
                f"model.micro_batch_size={micro}",
                f"model.reinforce.forward_micro_batch_size={forward}",
                f"model.reinforce.rollout_micro_batch_size={generated}",
            ]
            (tmp_path / str(i)).mkdir()
            run_lines = run(tmp_path / str(i), mesh, *sizes)
            lines.append(list(map(however_cut, run_lines)))
        is_validated = ["val/rewards" in line for line in lines[0]]
        assert is_validated == [True] * 3
        for other in lines[1:]:
            assert max(map(largest_difference, lines[0], other)) < 2e-5

    @pytest.mark.more
    def test_schedules_count_optimizer_steps(self, tmp_path, mesh):
        lines = run(
            tmp_path,
            mesh,
            f"{RL}.max_epochs=5",
            "model.micro_batch_size=2",
            "model.optim.lr=0.01",
            "model.optim.sched.name=linear",
            "model.optim.sched.warmup_steps=4",
            "model.optim.sched.constant_steps=2",
            "model.optim.sched.min_lr=0.002",
        )
        expected = [0.0025, 0.005, 0.0075, 0.01, 0.008, 0.006, 0.004, 0.002, 0.002, 0.002]
        assert [line["train/lr"] for line in lines] == pytest.approx(expected)


class TestWhatAStepLeaves:
    """The version of the weights, the terms of the loss, and the state for the next step."""

    def test_weights_are_numbered_by_the_steps_that_have_trained_them(
        self, tmp_path, mesh, monkeypatch
    ):
        """The oldest weights of a resumed run are the ones that it starts with."""
        trained = []
        given = []
        update = ReinforceTrainer.run_training

        def count(trainer: ReinforceTrainer, batch: ReinforceBatch) -> dict[str, float]:
            trained.append(trainer.step + 1)
            return update(trainer, batch)

        publish = LocalRollouts.publish_weights
        load = LocalRollouts.load_state_dict

        def record(source: LocalRollouts, version: int) -> None:
            given.append((version, False, len(trained)))
            publish(source, version)

        def record_loaded(source: LocalRollouts, state: dict[str, Any]) -> None:
            given.append((state["step"], True, len(trained)))
            load(source, state)

        monkeypatch.setattr(ReinforceTrainer, "run_training", count)
        monkeypatch.setattr(LocalRollouts, "publish_weights", record)
        monkeypatch.setattr(LocalRollouts, "load_state_dict", record_loaded)
        run(tmp_path, mesh, f"{RL}.max_steps=2", f"{RL}.max_epochs=2")
        assert given == [(1, False, 1), (2, False, 2)]
        trained.clear()
        given.clear()
        run(tmp_path, mesh, f"{RL}.max_steps=3", f"{RL}.max_epochs=2")
        assert given == [(2, True, 0), (3, False, 1)]

    def test_a_step_whose_weights_no_generator_takes_is_saved_with_them(
        self, tmp_path, mesh, monkeypatch
    ):
        """The resumed run makes the next step, with the numbers of a run without the failure."""
        settings = [f"{RL}.max_steps=3", f"{RL}.max_epochs=2"]
        uninterrupted = run(tmp_path / "uninterrupted", mesh, *settings)

        def fail(source: LocalRollouts, version: int) -> None:
            if version == 2:
                raise GenerationError("the generator is gone", key="generation.test")

        folder = tmp_path / "failed"
        with monkeypatch.context() as patched:
            patched.setattr(LocalRollouts, "publish_weights", fail)
            with raises_error("generation.test"):
                run(folder, mesh, *settings)
        assert metrics_of(folder)[-1]["step"] == 2
        resumed = run(folder, mesh, *settings)
        numbers = [without_times(line) for line in resumed]
        assert numbers == [without_times(line) for line in uninterrupted]

    def test_the_age_of_a_token_is_counted_from_the_weights_that_it_trains(self, tmp_path, mesh):
        """At step 3, weights of version 1 are a step old: two updates came before this step."""
        with tiny_trainer(tiny_config(tmp_path), mesh) as trainer:
            rollouts, _, _ = trainer.generate_rollouts()
            assert rollouts.generator_log_probs is not None
            trainer.step = 2
            trainer.rollout_context = replace(trainer.rollout_context, staleness=2)
            versions = torch.ones_like(rollouts.sequences[:, : rollouts.width])
            data, _ = trainer.generate_reinforce_data(replace(rollouts, weight_versions=versions))
            metrics = trainer.run_training(data)
        ages = [name for name in metrics if name.startswith("generator_logprob_diff_age_")]
        assert ages == ["generator_logprob_diff_age_1"]

    @pytest.mark.parametrize(
        ("placement", "in_loss"), [("loss", 0.1), ("reward", None), ("advantage", None)]
    )
    def test_the_kl_is_in_the_loss_where_it_is_placed_there(
        self, placement, in_loss, tmp_path, mesh
    ):
        with tiny_trainer(tiny_config(tmp_path, f"{RL}.kl_placement={placement}"), mesh) as trainer:
            calls = recorded_calls(trainer)
            rollouts, _, _ = trainer.generate_rollouts()
            trainer.run_training(trainer.generate_reinforce_data(rollouts)[0])
        assert [call["kl_coefficient"] for call in calls] == [in_loss]

    def test_the_first_optimizer_step_of_a_batch_is_on_policy_and_the_others_are_not(
        self, tmp_path, mesh
    ):
        keys = (f"{RL}.reinforce_epochs=3", f"{RL}.importance_ratio=token")
        with tiny_trainer(tiny_config(tmp_path, *keys), mesh) as trainer:
            calls = recorded_calls(trainer)
            for _ in range(2):
                rollouts, _, _ = trainer.generate_rollouts()
                trainer.run_training(trainer.generate_reinforce_data(rollouts)[0])
        on_policy = [call["on_policy"] for call in calls]
        assert on_policy == [True, False, False] * 2

    def test_mini_batches_are_cut_anew_each_step(self, tmp_path, mesh, monkeypatch):
        seeds = []

        def record(
            ids: object, rank: int, size: int | None, epochs: int, seed: int
        ) -> Iterator[torch.Tensor]:
            seeds.append(seed)
            return mini_batches(ids, rank, size, epochs, seed)  # type: ignore[arg-type]

        monkeypatch.setattr("reinforce_rl.trainer.reinforce.mini_batches", record)
        run(tmp_path, mesh, f"{RL}.max_epochs=2")
        assert len(seeds) == len(set(seeds)) == 4

    def test_a_state_is_of_the_last_whole_step(self, tmp_path, mesh):
        """A resumed run draws the next step's prompts again."""
        keys = (
            f"{RL}.kl_target=0.5",
            f"{RL}.kl_horizon=50",
            f"{RL}.advantage_estimator=running_mean",
        )
        with tiny_trainer(tiny_config(tmp_path, *keys, f"{RL}.max_steps=1"), mesh) as trainer:
            trainer.fit()
            whole = trainer.state_dict()
        assert whole["step"] == 1
        assert whole["data"]["consumed_prompts"] == 4
        assert whole["past_rewards"]["count"] == 16, "the rewards of a step count once it is over"
        with tiny_trainer(tiny_config(tmp_path, *keys), mesh) as resumed:
            assert resumed.state_dict() == whole
            next_prompts = resumed.generate_rollouts()[0].group_ids
            assert resumed.state_dict() == whole
        trained_on = {row["prompt_id"] for row in rollouts_of(tmp_path, 1)}
        assert trained_on.isdisjoint(next_prompts.tolist())

    def test_weights_whose_loss_is_not_finite_are_not_saved(self, tmp_path, mesh):
        with tiny_trainer(tiny_config(tmp_path), mesh) as trainer:
            trainer.step = 1
            trainer.logger.report = lambda: None  # type: ignore[method-assign, assignment]
            trainer.non_finite_guard.is_sound = False
            trainer.save(wait=True)
            assert saved_step(tmp_path) is None
            trainer.non_finite_guard.is_sound = True
            trainer.save(wait=True)
        assert saved_step(tmp_path) == 1


def recorded_calls(trainer: ReinforceTrainer) -> list[dict[str, Any]]:
    """Return the list of keyword arguments of the loss, which grows with each call."""
    calls: list[dict[str, Any]] = []
    compute = trainer.model.get_loss_and_metrics

    def record(*inputs: Any, **options: Any) -> Any:
        calls.append(options)
        return compute(*inputs, **options)

    trainer.model.get_loss_and_metrics = record  # type: ignore[method-assign]
    return calls


class TestFiles:
    def test_metrics_have_the_names_that_people_look_for(self, tmp_path, mesh):
        lines = run(tmp_path, mesh, f"{RL}.val_check_interval=1")
        assert [line["step"] for line in lines] == [0, 1, 2]
        rollouts = [
            "rewards",
            "response_lengths",
            "prompt_lengths",
            "fraction_of_samples_properly_ended",
        ]
        algorithm = [
            "rewards_with_kl",
            "init_policy_kl",
            "baseline",
            "actor_loss",
            "grad_norm",
            "lr",
            "epoch",
            "consumed_prompts",
        ]
        timers = ["generate", "logprobs", "init_logprobs", "reward_wait", "train_time", "step_time"]
        rollout_metrics = {f"val/{name}" for name in rollouts}
        assert rollout_metrics <= lines[0].keys()
        names = [f"train/{name}" for name in rollouts + algorithm] + [
            f"timers/{name}" for name in timers
        ]
        for line in lines[1:]:
            not_finite = [name for name in names if not math.isfinite(line[name])]
            assert not_finite == []
            assert line["val/prompt_lengths"] == line["train/prompt_lengths"] == PROMPT_TOKENS
        assert lines[2]["train/consumed_prompts"] == 8
        first_kl = abs(lines[1]["train/init_policy_kl"])
        second_kl = abs(lines[2]["train/init_policy_kl"])
        assert first_kl < 1e-6 < second_kl

    def test_rows_hold_the_algorithm(self, tmp_path, mesh):
        """Rewards, KL, baselines and advantages of every row, recomputed from the files alone."""
        lines = run(tmp_path, mesh, f"{RL}.max_epochs=2")
        for step in range(1, 5):
            rows = rollouts_of(tmp_path, step)
            assert len(rows) == 16
            for row in rows:
                of_prompt = row["prompt_id"]
                others = [r for r in rows if r["prompt_id"] == of_prompt and r is not row]
                assert len(others) == 3
                baseline = sum(r["reward_with_kl"] for r in others) / 3
                with_kl = row["reward"] - 0.1 * row["kl"]
                assert row["reward_with_kl"] == pytest.approx(with_kl, abs=1e-6)
                assert row["baseline"] == pytest.approx(baseline, abs=1e-6)
                assert row["advantage"] == pytest.approx(row["reward_with_kl"] - baseline, abs=1e-6)
                if row["response_length"] != MAX_LENGTH:
                    assert row["finish_reason"] == "stop"
                assert len(row["prompt"]) == PROMPT_TOKENS
            for name, key in [
                ("rewards", "reward"),
                ("init_policy_kl", "kl"),
                ("baseline", "baseline"),
            ]:
                mean = sum(r[key] for r in rows) / 16
                assert lines[step - 1][f"train/{name}"] == pytest.approx(mean, abs=1e-6)
        assert any(row["kl"] != 0 for row in rollouts_of(tmp_path, 4))

    def test_every_prompt_comes_once_an_epoch(self, tmp_path, mesh):
        """Ten prompts in steps of four; two of them equal, which stay two groups."""
        prompts = [*three_letters(9), three_letters(1)[0]]
        run(tmp_path, mesh, f"{RL}.max_epochs=2", prompts=prompts)
        expected = Counter((prompt, sample) for prompt in range(10) for sample in range(4))
        epochs = [rows_of_steps(tmp_path, 1, 2, 3), rows_of_steps(tmp_path, 4, 5, 6)]
        for rows in epochs:
            samples = Counter((row["prompt_id"], row["sample_id"]) for row in rows)
            assert samples == expected
            recorded_prompts = {row["prompt_id"]: row["prompt"] for row in rows}
            assert recorded_prompts == dict(enumerate(prompts))
        orders = [[row["prompt_id"] for row in rows] for rows in epochs]
        assert orders[0] != orders[1]

    def test_samples_of_one_prompt_differ_and_so_do_epochs(self, tmp_path, mesh):
        run(tmp_path, mesh, f"{RL}.max_epochs=2", "model.optim.lr=1e-9")
        first = responses_of(rows_of_steps(tmp_path, 1, 2))
        second = responses_of(rows_of_steps(tmp_path, 3, 4))
        assert first.keys() == second.keys()
        assert first != second
        assert len(set(first.values())) > len(first) / 2

    def test_wandb_gets_the_same_numbers(self, tmp_path, mesh, monkeypatch):
        pytest.importorskip("wandb")
        from helpers.wandb_files import history, offline_files

        for name in ("DATA", "CACHE", "CONFIG"):
            monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
        monkeypatch.setenv("WANDB_SILENT", "true")
        switch = (
            "exp_manager.create_wandb_logger=true",
            "exp_manager.wandb_logger_kwargs.mode=offline",
        )
        lines = run(tmp_path, mesh, *switch, f"{RL}.val_check_interval=2")
        (path,) = offline_files(tmp_path / "run")
        logged = history(path)
        for line in lines:
            names = [name for name in line if name.startswith(("train/", "val/", "timers/"))]
            expected = {name: line[name] for name in names}
            logged_numbers = {key: logged[line["step"]][key] for key in expected}
            assert logged_numbers == pytest.approx(expected)
        checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
        assert checkpoint is not None
        assert checkpoint.trainer_state["wandb_run_id"] in path.name


def rows_of_steps(folder: Path, *steps: int) -> list[dict]:
    return [row for step in steps for row in rollouts_of(folder, step)]


def responses_of(rows: list[dict]) -> dict[tuple[int, int], str]:
    return {(row["prompt_id"], row["sample_id"]): row["response"] for row in rows}


class TestWithoutAReference:
    def test_beta_zero_makes_no_reference_pass(self, tmp_path, mesh):
        config = tiny_config(tmp_path, f"{RL}.initial_policy_kl_penalty=0")
        with tiny_trainer(config, mesh) as trainer:
            with pytest.raises(RuntimeError, match="without a reference policy"):
                trainer.model.get_init_policy_logprobs(*[torch.ones(1, 1, dtype=torch.long)] * 3)
            trainer.fit()
        lines = metrics_of(tmp_path)
        assert len(lines) == 2
        for line in lines:
            assert "timers/init_logprobs" not in line
            assert line["train/init_policy_kl"] == 0.0
            assert line["train/rewards_with_kl"] == line["train/rewards"]
            assert line["train/grad_norm"] > 0


class EmptyEverySecond:
    """A generator whose odd samples end at once with no token at all."""

    is_exact = False

    def __init__(self, inner, which):
        self._inner = inner
        self._which = which

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, params, seed: int
    ) -> Completions:
        full = self._inner.generate(prompts, num_samples, params, seed)
        rows = [row for row in range(len(full.lengths)) if self._which(row % num_samples)]
        lengths = full.lengths.clone()
        lengths[rows] = 0
        tokens = full.tokens.clone()
        tokens[rows] = 0
        reasons = list(full.finish_reasons)
        for row in rows:
            reasons[row] = FINISH_STOP
        return replace(full, tokens=tokens, lengths=lengths, finish_reasons=tuple(reasons))

    def awake(self):
        return self._inner.awake()

    def refit(self) -> None:
        self._inner.refit()

    def close(self) -> None:
        self._inner.close()


class TestWhatDoesNotCount:
    def test_empty_responses_take_no_part(self, tmp_path, mesh):
        with tiny_trainer(tiny_config(tmp_path), mesh) as trainer:
            trainer.model.generator = EmptyEverySecond(
                trainer.model.generator, lambda sample: sample % 2
            )
            trainer.fit()
        for line in metrics_of(tmp_path):
            assert line["train/fraction_of_samples_valid"] == 0.5
            missing = [name for name, value in line.items() if value is None]
            assert missing == []
            assert line["train/grad_norm"] > 0
        rows = rollouts_of(tmp_path, 2)
        for row in rows:
            if row["sample_id"] % 2:
                assert row["response"] == ""
                assert row["valid"] is False
                assert row["advantage"] == 0.0
                assert row["kl"] == 0.0
            else:
                place = (row["prompt_id"], 2 - row["sample_id"])
                (other,) = [r for r in rows if (r["prompt_id"], r["sample_id"]) == place]
                assert row["baseline"] == pytest.approx(other["reward_with_kl"], abs=1e-6)

    def test_a_batch_of_empty_responses_only(self, tmp_path, mesh):
        with tiny_trainer(tiny_config(tmp_path, "model.optim.weight_decay=0"), mesh) as trainer:
            before = weights(trainer)
            trainer.model.generator = EmptyEverySecond(trainer.model.generator, lambda sample: True)
            trainer.fit()
            for a, b in zip(before, weights(trainer), strict=True):
                assert torch.equal(a, b)
        line = metrics_of(tmp_path)[-1]
        assert line["train/response_lengths"] == 0.0
        assert line["train/grad_norm"] == 0.0
        assert line["train/actor_loss"] == 0.0
        assert line["train/rewards"] == 0.5
        assert line["train/rewards_with_kl"] is None

    def test_a_group_without_a_valid_sample(self, tmp_path, mesh):
        """All samples of one prompt fail, and one sample of each other prompt."""
        score = FailingReward(
            lambda row: math.nan if row[0] == 6 else odd_share(row[PROMPT_TOKENS:])
        )
        prompts = ["eta", "tea", "ate", "ten"]  # 6 is a t
        first = {prompt: i for i, prompt in enumerate(prompts)}
        lines = run(tmp_path, mesh, EVERY_FAILURE, rm=score, prompts=prompts)
        rows = rollouts_of(tmp_path, 1)
        failed = [row for row in rows if row["reward"] is None]
        failed_prompts = {row["prompt_id"] for row in failed}
        assert failed_prompts == {i for prompt, i in first.items() if prompt[0] == "t"}
        assert len(failed) == 8
        for row in rows:
            assert row["valid"] is (row not in failed)
        for row in failed:
            assert row["advantage"] == 0.0
            assert row["baseline"] == 0.0
        missing = [name for name, value in lines[0].items() if value is None]
        assert missing == []
        good = [row["reward"] for row in rows if row["reward"] is not None]
        assert lines[0]["train/rewards"] == pytest.approx(sum(good) / 8)
        assert lines[0]["train/fraction_of_samples_scored"] == 0.5
        assert lines[0]["train/grad_norm"] > 0

    def test_a_step_in_which_nothing_was_scored(self, tmp_path, mesh):
        config = tiny_config(tmp_path, EVERY_FAILURE, "model.optim.weight_decay=0")
        with tiny_trainer(config, mesh, lambda ids: math.nan) as trainer:
            before = weights(trainer)
            trainer.fit()
            for a, b in zip(before, weights(trainer), strict=True):
                assert torch.equal(a, b)
        line = metrics_of(tmp_path)[0]
        assert line["train/rewards"] is None
        assert line["train/grad_norm"] == 0.0
        for row in rollouts_of(tmp_path, 1):
            assert row["reward"] is None

    @pytest.mark.parametrize("option", ["keep", "drop"])
    def test_truncated_samples(self, tmp_path, mesh, option):
        lines = run(tmp_path, mesh, f"{RL}.truncated_samples={option}", "model.optim.lr=1e-9")
        rows = rollouts_of(tmp_path, 1) + rollouts_of(tmp_path, 2)
        truncated = [row for row in rows if row["finish_reason"] == "length"]
        assert 0 < len(truncated) < len(rows)
        assert {row["valid"] for row in truncated} == {option == "keep"}
        if option == "drop":
            assert all(row["advantage"] == 0 for row in truncated)
            shares = [line["train/fraction_of_samples_valid"] for line in lines]
            assert sum(shares) / 2 == 1 - len(truncated) / len(rows)
        for row in rows:
            of_prompt = [other for other in rows if other["prompt_id"] == row["prompt_id"]]
            others = [other for other in of_prompt if other is not row and other["valid"]]
            if row["valid"] and others:
                mean = sum(r["reward_with_kl"] for r in others) / len(others)
                assert row["baseline"] == pytest.approx(mean, abs=1e-6)
            if row["valid"] and not others:
                assert row["advantage"] == 0


class FailingReward(FunctionReward):
    """Scores whole sequences, and can raise at its n-th request (from 1), as past a deadline."""

    def __init__(self, score, fail_at: int | None = None):
        super().__init__(score, 0)
        self.fail_at = fail_at
        self.requests = 0

    def infer_rm(self, request: RewardRequest):
        self.requests += 1
        if self.requests == self.fail_at:
            return NoAnswer()
        return super().infer_rm(request)


class OwnSource:
    """A reward source that returns these values and statuses for its number of samples."""

    def __init__(self, values, status):
        self.values = values
        self.status = status

    def infer_rm(self, request: RewardRequest):
        count = len(request.lengths)
        return ReadyRewards(Rewards(self.values(count), torch.tensor(self.status(count))))

    def close(self) -> None:
        pass


class NoAnswer:
    def result(self) -> Rewards:
        raise RewardServerError("reward server localhost:1: no answer within 600 s")


def share_of_response(row: list[int]) -> float:
    return odd_share(row[PROMPT_TOKENS:])


class TestWhenRewardsFail:
    def test_too_many_failed_samples_save_and_end(self, tmp_path, mesh):
        calls = []

        def score(ids: list[int]) -> float:
            calls.append(ids)
            # Two of the third step's sixteen samples fail: more than a tenth.
            return math.nan if len(calls) in (33, 48) else odd_share(ids)

        config = tiny_config(tmp_path, f"{RL}.max_epochs=3")
        bound = "trainer.reinforce.max_failed_fraction = 0.1"
        reason = STATUS_TEXT[STATUS_INTERNAL]
        with (
            raises_error(TOO_MANY, "12.5%", "step 3", bound, f"{reason} (2)"),
            tiny_trainer(config, mesh, score) as trainer,
        ):
            trainer.fit()
        assert saved_step(tmp_path) == 2
        assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2]

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e300])
    def test_a_source_of_ones_own_that_calls_no_number_a_score_has_failed(
        self, tmp_path, mesh, bad
    ):

        def values(count: int) -> torch.Tensor:
            return torch.tensor([bad, bad] + [1.0] * (count - 2), dtype=torch.float64)

        source = OwnSource(values, lambda n: [0] * n)
        reason = STATUS_TEXT[STATUS_NOT_FINITE]
        with (
            raises_error(TOO_MANY, "step 1", f"{reason} (4)"),
            tiny_trainer(tiny_config(tmp_path), mesh, source) as trainer,
        ):
            trainer.fit()

    def test_a_failed_sample_of_ones_own_source_is_never_a_reward_of_0(self, tmp_path, mesh):
        source = OwnSource(torch.zeros, lambda n: [STATUS_INTERNAL] + [0] * (n - 1))
        run(tmp_path, mesh, EVERY_FAILURE, rm=source)
        rows = rollouts_of(tmp_path, 1)
        rewards = [row["reward"] for row in rows]
        assert rewards.count(None) == 2
        valid = [row["valid"] for row in rows]
        assert valid.count(False) == 2

    @pytest.mark.parametrize("shape", ["short", "column"])
    def test_a_source_of_ones_own_that_misses_a_sample_is_named(self, tmp_path, mesh, shape):
        shapes = {"short": lambda n: torch.ones(n - 1), "column": lambda n: torch.ones(n, 1)}
        source = OwnSource(shapes[shape], lambda n: [0] * n)
        with (
            raises_error("rewards.answer.wrong_shape", "ReadyRewards", "values") as error,
            tiny_trainer(tiny_config(tmp_path), mesh, source) as trainer,
        ):
            trainer.fit()
        assert re.search(r"\[\d.*\].* \[\d+\]$", str(error.value))

    def test_few_failed_samples_are_left_out_and_never_become_a_reward(self, tmp_path, mesh):
        calls = []

        def score(ids: list[int]) -> float:
            calls.append(ids)
            return math.nan if len(calls) == 7 else 5.0

        lines = run(tmp_path, mesh, rm=score)
        rows = rollouts_of(tmp_path, 1)
        unscored = [i for i, row in enumerate(rows) if row["reward"] is None]
        assert unscored == [6]
        assert rows[6]["valid"] is False
        assert rows[6]["advantage"] == 0.0
        for row in rows:
            if row["valid"]:
                assert row["baseline"] == pytest.approx(5.0) and abs(row["advantage"]) < 1e-6
        assert lines[0]["train/rewards"] == 5.0

    @pytest.mark.more
    def test_a_server_that_is_gone_saves_the_last_whole_step_and_the_run_goes_on_from_there(
        self, tmp_path, mesh
    ):
        """Three prompts a batch, so each step sends two requests; the fifth belongs to step 3."""
        (tmp_path / "whole").mkdir()
        whole = run(tmp_path / "whole", mesh, f"{RL}.max_epochs=3")
        config = tiny_config(tmp_path, f"{RL}.max_epochs=3")
        with (
            pytest.raises(RewardServerError, match="localhost:1"),
            tiny_trainer(config, mesh, FailingReward(share_of_response, fail_at=6)) as trainer,
        ):
            trainer.fit()
        assert saved_step(tmp_path) == 2
        lines = run(tmp_path, mesh, f"{RL}.max_epochs=3", rm=FailingReward(share_of_response))
        numbers = [without_times(line) for line in lines]
        assert numbers == [without_times(line) for line in whole]
        steps = [line["step"] for line in lines]
        assert steps == [1, 2, 3, 4, 5, 6]

    @pytest.mark.more
    def test_a_server_that_is_gone_at_a_later_validation(self, tmp_path, mesh):
        """Its step is done and saved; the validation is made up for."""
        options = [f"{RL}.val_check_interval=1", f"{RL}.max_epochs=2"]
        (tmp_path / "whole").mkdir()
        whole = run(tmp_path / "whole", mesh, *options, rm=FailingReward(share_of_response))
        config = tiny_config(tmp_path, *options)
        with (
            pytest.raises(RewardServerError),
            tiny_trainer(config, mesh, FailingReward(share_of_response, fail_at=4)) as trainer,
        ):
            trainer.fit()  # validation, two requests of step 1, its validation
        assert saved_step(tmp_path) == 1
        lines = run(tmp_path, mesh, *options, rm=FailingReward(share_of_response))
        assert list(map(without_times, lines)) == list(map(without_times, whole))

    def test_a_server_that_is_gone_at_the_first_validation(self, tmp_path, mesh):
        config = tiny_config(tmp_path, f"{RL}.val_check_interval=1")
        with (
            pytest.raises(RewardServerError),
            tiny_trainer(config, mesh, FailingReward(share_of_response, fail_at=1)) as trainer,
        ):
            trainer.fit()
        assert saved_step(tmp_path) is None
        steps = [line["step"] for line in run(tmp_path, mesh, f"{RL}.val_check_interval=1")]
        assert steps == [0, 1, 2]


class StopsAfter(RunTimer):
    """Is asked around the validation before a new run's first step, and once after each step."""

    def __init__(self, questions: int):
        super().__init__(None, JobTimes())
        self._left = questions

    def time_budget(self, **due: bool) -> TimeBudget:
        self._left -= 1
        return TimeBudget("the time of this run is used up" if self._left < 0 else None)


class TestTheEnd:
    def test_when_the_time_is_up_it_saves_and_goes_on_later(self, tmp_path, mesh):
        overrides = [f"{RL}.max_epochs=3", f"{RL}.save_interval=4"]
        with (
            raises_error("run.time.used_up", "step 3 of 6") as error,
            tiny_trainer(tiny_config(tmp_path, *overrides), mesh) as trainer,
        ):
            trainer.run_timer = StopsAfter(4)
            trainer.fit()
        assert isinstance(error.value, StoppedEarly)
        assert trainer.step == saved_step(tmp_path) == 3
        steps = [line["step"] for line in run(tmp_path, mesh, *overrides)]
        assert steps == [1, 2, 3, 4, 5, 6]
        assert saved_step(tmp_path) == 6

    @pytest.mark.more
    def test_when_the_time_is_up_it_validates_too(self, tmp_path, mesh):
        """Across an epoch; with two checks at the start, the fifth one is after step 3."""
        overrides = [f"{RL}.max_epochs=3", f"{RL}.val_check_interval=5"]
        with (
            pytest.raises(StoppedEarly),
            tiny_trainer(tiny_config(tmp_path, *overrides), mesh) as trainer,
        ):
            trainer.run_timer = StopsAfter(4)
            trainer.fit()
        validated_steps = [line["step"] for line in metrics_of(tmp_path) if "val/rewards" in line]
        assert validated_steps == [0, 3]
        lines = run(tmp_path, mesh, *overrides)
        assert [line["step"] for line in lines] == list(range(7))
        validated_steps = [line["step"] for line in lines if "val/rewards" in line]
        assert validated_steps == [0, 3, 5, 6]

    def test_time_that_is_up_with_the_last_step_is_no_reason_to_stop(self, tmp_path, mesh):
        with tiny_trainer(tiny_config(tmp_path), mesh) as trainer:
            trainer.run_timer = StopsAfter(3)
            trainer.fit()
        assert trainer.step == saved_step(tmp_path) == 2

    def test_no_time_at_all_trains_nothing(self, tmp_path, mesh):
        """The time counts from the start of the process, which was seconds ago."""
        config = tiny_config(tmp_path, "exp_manager.max_time_per_run='0:1'")
        with raises_error("run.time.used_up", "step 0"), tiny_trainer(config, mesh) as trainer:
            trainer.fit()
        assert trainer.step == 0
        assert saved_step(tmp_path) is None
        steps = [line["step"] for line in run(tmp_path, mesh)]
        assert steps == [1, 2]

    def test_max_steps_ends_within_an_epoch_and_a_higher_one_goes_on(self, tmp_path, mesh):
        run_lines = run(tmp_path, mesh, f"{RL}.max_epochs=3", f"{RL}.max_steps=3")
        steps = [line["step"] for line in run_lines]
        assert steps == [1, 2, 3]
        assert saved_step(tmp_path) == 3
        lines = run(
            tmp_path, mesh, f"{RL}.max_epochs=3", f"{RL}.max_steps=5", "model.optim.lr=0.003"
        )
        steps = [line["step"] for line in lines]
        assert steps == [1, 2, 3, 4, 5]
        learning_rates = [line["train/lr"] for line in lines]
        assert learning_rates == [0.01] * 3 + [0.003] * 2, "the configuration's, not the old run's"

    @pytest.mark.parametrize(
        ("estimator", "weights"),
        [
            ("running_mean", [1, 1, 1]),
            ("moving_average", [1, 1, 0]),
            ("exponential_moving_average", [1, 0.25, 0.0625]),
        ],
    )
    def test_the_baseline_is_a_mean_of_past_rewards(self, estimator, weights, tmp_path, mesh):
        """Weights by age of the step; each step has the same number of samples."""
        options = [
            f"{RL}.advantage_estimator={estimator}",
            f"{RL}.baseline_window=2",
            f"{RL}.baseline_decay=0.25",
        ]
        lines = run(tmp_path, mesh, f"{RL}.max_epochs=2", *options)
        baselines = [line["train/baseline"] for line in lines]
        rewards = [line["train/rewards_with_kl"] for line in lines]
        expected = [0.0]
        for step in range(1, 4):
            weighted = list(zip(weights, reversed(rewards[:step]), strict=False))
            total_weight = sum(w for w, _ in weighted)
            expected.append(sum(w * reward for w, reward in weighted) / total_weight)
        assert baselines == pytest.approx(expected, abs=1e-6)

    @pytest.mark.more
    @pytest.mark.parametrize(
        "options",
        [
            [f"{RL}.advantage_estimator=running_mean"],
            [f"{RL}.advantage_estimator=moving_average", f"{RL}.baseline_window=2"],
            [f"{RL}.advantage_estimator=exponential_moving_average"],
            [f"{RL}.reward_shaping.standardization=running"],
            [f"{RL}.kl_target=0.5", f"{RL}.kl_horizon=50"],
            [f"{RL}.kl_target=0.5", f"{RL}.kl_horizon=50", f"{RL}.kl_placement=loss"],
        ],
        ids=[
            "running_mean",
            "moving_average",
            "exponential_moving_average",
            "running standardization",
            "kl_target",
            "kl_target in the loss",
        ],
    )
    def test_what_depends_on_past_steps_is_in_the_checkpoint(self, tmp_path, mesh, options):
        options = [*options, f"{RL}.max_epochs=2"]
        whole = run(tmp_path / "whole", mesh, *options)
        run(tmp_path / "parts", mesh, *options, f"{RL}.max_steps=2")
        parts = run(tmp_path / "parts", mesh, *options)
        assert list(map(without_times, parts)) == list(map(without_times, whole))
        for step in range(1, 5):
            assert rollouts_of(tmp_path / "parts", step) == rollouts_of(tmp_path / "whole", step)

    def test_intervals(self, tmp_path, mesh):
        lines = run(
            tmp_path,
            mesh,
            f"{RL}.max_epochs=3",
            f"{RL}.val_check_interval=4",
            f"{RL}.save_interval=2",
        )
        validated_steps = [line["step"] for line in lines if "val/rewards" in line]
        assert validated_steps == [0, 4, 6]
        kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
        assert kept == ["step_00000004", "step_00000006"]

    def test_an_interval_of_0_never_validates(self, tmp_path, mesh):
        lines = run(tmp_path, mesh, f"{RL}.max_epochs=1", f"{RL}.val_check_interval=0")
        assert [line["step"] for line in lines] == [1, 2]
        assert [key for line in lines for key in line if key.startswith("val/")] == []

    def test_validation_is_the_same_at_every_step_for_the_same_weights(self, tmp_path, mesh):
        sampled = "model.reinforce.val_sampling_params.use_greedy=false"
        lines = run(tmp_path, mesh, f"{RL}.val_check_interval=1", "model.optim.lr=1e-12", sampled)
        values = [
            {key: value for key, value in line.items() if key.startswith("val/")} for line in lines
        ]
        assert values[0] == values[1] == values[2]
