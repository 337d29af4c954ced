"""Policies, rewards or responses that cannot be trained on: messages, exit codes and saves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.errors import check_error, printed_keys, raises_error
from helpers.tiny_run import metrics_of, odd_share, run, tiny_config, tiny_trainer, weights
from helpers.trainer_processes import TrainerProcesses
from safetensors.torch import load_file

from reinforce_rl.data.batches import Completions
from reinforce_rl.data.finish_reasons import FINISH_STOP
from reinforce_rl.errors import EXIT_DIVERGED, DivergedError, RewardServerError
from reinforce_rl.megatron.checkpointer import latest_checkpoint
from reinforce_rl.rewards.base import STATUS_INTERNAL, STATUS_TEXT
from reinforce_rl.runtime.status import read_status

RL = "trainer.reinforce"
TOO_MANY = "rewards.samples.too_many_failed"
NO_KL = f"{RL}.initial_policy_kl_penalty=0"


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "run" / "checkpoints").glob("step_*"))


class Score:
    """The task's reward, except for the calls (from 1) that `is_odd` names."""

    def __init__(self, is_odd: Callable[[int], bool], value: float = math.nan):
        self.calls = 0
        self._is_odd = is_odd
        self._value = value

    def __call__(self, ids: list[int]) -> float:
        self.calls += 1
        return self._value if self._is_odd(self.calls) else odd_share(ids)


def spoil(at_step: int, value: float) -> Callable[..., None]:
    """Set all weights to this value after so many steps, as an overflow or a bad device would."""

    def install(trainer) -> None:
        train = trainer.run_training

        def train_and_spoil(batch):
            metrics = train(batch)
            if trainer.step + 1 == at_step:
                for parameter in trainer.model.lm.parameters():
                    parameter.data.fill_(value)
            return metrics

        trainer.run_training = train_and_spoil

    return install


class TestAPolicyThatIsNotANumber:
    @pytest.mark.parametrize("beta", ["0", "0.1"])
    def test_a_learning_rate_far_too_high_ends_the_run_and_is_never_saved(
        self, tmp_path, mesh, beta
    ):
        options = [
            f"{RL}.initial_policy_kl_penalty={beta}",
            f"{RL}.max_epochs=5",
            f"{RL}.save_interval=1",
        ]
        config = tiny_config(tmp_path, "model.optim.lr=1e38", *options)
        with pytest.raises(DivergedError) as raised, tiny_trainer(config, mesh) as trainer:
            trainer.fit()
        assert raised.value.key.endswith(".not_finite")
        assert "model.optim.lr" in str(raised.value)
        assert "reward" not in str(raised.value)
        assert saved_steps(tmp_path) == []

    @pytest.mark.more
    @pytest.mark.parametrize("value", [math.nan, math.inf, 1e15])
    def test_the_last_good_checkpoint_stays(self, tmp_path, mesh, value):
        """1e15 and its square are finite in float32, but no forward pass is."""
        config = tiny_config(tmp_path, NO_KL, f"{RL}.max_epochs=6", f"{RL}.save_interval=2")
        good = []
        with pytest.raises(DivergedError), tiny_trainer(config, mesh) as trainer:
            spoil(5, value)(trainer)
            save = trainer.ckpt_callback.save
            trainer.ckpt_callback.save = lambda *args, **kwargs: (
                good.append(weights(trainer)),
                save(*args, **kwargs),
            )
            trainer.fit()
        assert saved_steps(tmp_path) == [2, 4]
        with tiny_trainer(config, mesh) as trainer:
            assert trainer.step == 4
            assert all(map(torch.equal, weights(trainer), good[-1]))

    @pytest.mark.parametrize("value", [math.nan, 1e15])
    def test_found_at_the_very_end(self, tmp_path, mesh, value):
        """The step before the last one spoils the weights: a skipped step is no success either."""
        config = tiny_config(tmp_path, NO_KL, f"{RL}.max_epochs=2", f"{RL}.save_interval=0")
        with pytest.raises(DivergedError), tiny_trainer(config, mesh) as trainer:
            spoil(3, value)(trainer)
            trainer.fit()
        assert saved_steps(tmp_path) == []

    def test_spoilt_by_the_last_step(self, tmp_path, mesh):
        config = tiny_config(tmp_path, NO_KL)
        with pytest.raises(DivergedError) as raised, tiny_trainer(config, mesh) as trainer:
            spoil(2, math.inf)(trainer)
            trainer.fit()
        check_error(raised.value, "checkpoint.weights.not_finite", "step_00000002")
        assert saved_steps(tmp_path) == []

    def test_a_stop_does_not_save_it(self, tmp_path, mesh):
        config = tiny_config(tmp_path, NO_KL, f"{RL}.max_epochs=6", f"{RL}.save_interval=2")
        score = Score(lambda call: call > 4 * 16)  # the server fails in the fifth step

        with pytest.raises(RewardServerError), tiny_trainer(config, mesh, score) as trainer:
            spoil(3, 1e15)(trainer)
            trainer.fit()
        assert saved_steps(tmp_path) == [2]

    @pytest.mark.more
    @pytest.mark.parametrize("most", [2, 4])
    def test_gradients_that_are_not_finite_end_the_run_after_so_many_in_a_row(
        self, tmp_path, mesh, most, capfd
    ):
        config = tiny_config(
            tmp_path, NO_KL, f"{RL}.max_epochs=8", f"{RL}.max_skipped_steps={most}"
        )
        bad = [2, 4, 5, *range(7, 20)] if most > 2 else [2, *range(4, 20)]
        with pytest.raises(DivergedError) as raised, tiny_trainer(config, mesh) as t:
            get = t.model.get_loss_and_metrics
            steps = []

            def spoilt(*args, **kwargs):
                share = get(*args, **kwargs)
                steps.append(t.step + 1)
                if steps[-1] in bad:
                    next(iter(t.model.lm.parameters())).main_grad.fill_(math.inf)
                return share

            t.model.get_loss_and_metrics = spoilt
            t.fit()
        check_error(raised.value, "trainer.gradient.not_finite", f"{most} optimizer steps")
        assert steps[-1] == (10 if most > 2 else 5)
        lines = metrics_of(tmp_path)
        skipped_steps = [line["step"] for line in lines if line["train/skipped_step"]]
        assert skipped_steps == [s for s in bad if s < steps[-1]]
        said = capfd.readouterr().out
        assert f"1 of at most {most} in a row" in said
        assert "1 steps skipped" in said
        num_skipped = len([s for s in bad if s < steps[-1]])
        assert f"{num_skipped} steps skipped" in said

    def test_a_single_skipped_step_is_no_end(self, tmp_path, mesh):
        with tiny_trainer(tiny_config(tmp_path, NO_KL), mesh) as trainer:
            get = trainer.model.get_loss_and_metrics

            def spoilt(*args, **kwargs):
                share = get(*args, **kwargs)
                if trainer.step == 1:
                    next(iter(trainer.model.lm.parameters())).main_grad.fill_(math.inf)
                return share

            trainer.model.get_loss_and_metrics = spoilt
            trainer.fit()
        assert saved_steps(tmp_path) == [2]

    def test_weights_that_come_as_nan(self, tmp_path, mesh):
        config = tiny_config(tmp_path, NO_KL)
        path = tmp_path / "model" / "model.safetensors"
        from safetensors.torch import save_file

        tensors = load_file(path)
        next(iter(tensors.values()))[0] = math.nan
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(DivergedError) as raised, tiny_trainer(config, mesh) as trainer:
            trainer.fit()
        check_error(raised.value, "trainer.weights.not_finite", "step 1")

    @pytest.mark.more
    @pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
    def test_exit_code_and_status(self, tmp_path, ranks):
        processes = TrainerProcesses()
        try:
            layout = ["model.tensor_model_parallel_size=2"] if ranks > 1 else []
            processes.start(
                tmp_path, "model.optim.lr=1e38", NO_KL, *layout, ranks=ranks, patience=30
            )
            code = processes.wait()
        finally:
            processes.close()
        said = (tmp_path / "log").read_text()
        assert (code, processes.statuses) == (EXIT_DIVERGED, [EXIT_DIVERGED] * ranks), said
        assert "Traceback" not in said
        status = read_status(tmp_path / "run")
        assert status is not None
        assert status.state == "failed"
        assert status.exit_code == EXIT_DIVERGED
        keys = printed_keys(said)
        assert keys
        for key in keys:
            assert key.endswith(".not_finite")
        assert not (tmp_path / "run" / "hf").exists()


class TestRewardsOutOfRange:
    def check_that_it_fails(
        self, folder: Path, mesh, score, *overrides: str, values: list[str]
    ) -> None:
        config = tiny_config(folder, f"{RL}.max_epochs=3", f"{RL}.save_interval=0", *overrides)
        with (
            raises_error("algorithm.reward.out_of_range", *values) as raised,
            tiny_trainer(config, mesh, score) as trainer,
        ):
            trainer.fit()
        assert isinstance(raised.value, RewardServerError), "after which the run saves"

    def test_a_reward_above_the_bound_saves_and_says_what_to_do(self, tmp_path, mesh):
        score = Score(lambda call: call == 40, 3e6)

        values = ["1 of 16", "step 3", "1e+06", "3e+06", "trainer.reinforce.reward_shaping"]
        self.check_that_it_fails(tmp_path, mesh, score, values=values)
        assert saved_steps(tmp_path) == [2]
        assert latest_checkpoint(tmp_path / "run" / "checkpoints").trainer_state["step"] == 2

    def test_shaping_that_makes_it_too_large(self, tmp_path, mesh):
        scale = f"{RL}.reward_shaping.scale=1e9"
        self.check_that_it_fails(tmp_path, mesh, odd_share, scale, values=["reward_shaping"])

    def test_shaping_that_brings_it_back(self, tmp_path, mesh):
        shaping = [f"{RL}.reward_shaping.scale=1e-7"]
        lines = run(tmp_path, mesh, *shaping, rm=lambda ids: 1e7 * odd_share(ids))
        assert [line["step"] for line in lines] == [1, 2]

    def test_a_kl_that_makes_it_too_large_is_not_the_rewards_fault(self, tmp_path, mesh):
        penalty = f"{RL}.initial_policy_kl_penalty=1e12"
        values = ["1e+12", "KL", "initial_policy_kl_penalty"]
        self.check_that_it_fails(tmp_path, mesh, odd_share, penalty, values=values)


class EmptyResponses:
    """Gives some prompts empty responses."""

    def __init__(self, generator, empty: Callable[[int], bool]):
        self._generator = generator
        self._empty = empty

    def __getattr__(self, name: str):
        return getattr(self._generator, name)

    def generate(self, prompts, num_samples, params, seed) -> Completions:
        completions = self._generator.generate(prompts, num_samples, params, seed)
        empty = [self._empty(prompt.id) for prompt in prompts for _ in range(num_samples)]
        none = torch.tensor(empty)
        lengths = torch.where(none, 0, completions.lengths)
        width = int(lengths.max())
        log_probs = completions.log_probs
        if log_probs is not None:
            log_probs = torch.where(none[:, None], 0.0, log_probs)[:, :width]
        finish_reasons = list(completions.finish_reasons)
        for row, is_empty in enumerate(empty):
            if is_empty:
                finish_reasons[row] = FINISH_STOP
        tokens = torch.where(none[:, None], 0, completions.tokens)[:, :width]
        return Completions(
            tokens,
            lengths,
            tuple(finish_reasons),
            log_probs,
        )


class TestEmptyResponses:
    @pytest.mark.more
    @pytest.mark.parametrize(
        "options", [[], [NO_KL], [f"{RL}.dynamic_filtering=true"], ["model.shared_prefix=true"]]
    )
    def test_all_of_them(self, tmp_path, mesh, options):
        config = tiny_config(
            tmp_path, f"{RL}.val_check_interval=1", "model.optim.weight_decay=0", *options
        )
        with tiny_trainer(config, mesh) as trainer:
            trainer.model.generator = EmptyResponses(trainer.model.generator, lambda prompt: True)
            before = weights(trainer)
            trainer.fit()
            assert all(map(torch.equal, weights(trainer), before)), (
                "nothing was learnt from nothing"
            )
        lines = metrics_of(tmp_path)
        # so that the first step draws all prompts
        assert len(lines) == (2 if "dynamic" in str(options) else 3)
        assert lines[1]["train/response_lengths"] == 0
        assert lines[1]["train/fraction_of_samples_valid"] == 0
        assert not any(line.get("train/skipped_step") for line in lines)

    @pytest.mark.parametrize("options", [[], ["model.shared_prefix=true"]])
    def test_those_of_some_micro_batches(self, tmp_path, mesh, options):
        config = tiny_config(tmp_path, *options)
        with tiny_trainer(config, mesh) as trainer:
            trainer.model.generator = EmptyResponses(
                trainer.model.generator, lambda prompt: prompt != 5
            )
            trainer.fit()
        valid = [line["train/fraction_of_samples_valid"] for line in metrics_of(tmp_path)]
        assert sorted(valid) == [0.0, 0.25]


class TestAnEvaluationThatFails:
    def test_no_step_is_begun_after_a_validation_that_failed_altogether(self, tmp_path, mesh):
        score = Score(lambda call: call <= 3)  # three validation prompts
        config = tiny_config(tmp_path, f"{RL}.val_check_interval=1")
        reason = STATUS_TEXT[STATUS_INTERNAL]
        with (
            raises_error(TOO_MANY, "100.0%", "validation", f"{reason} (3)"),
            tiny_trainer(config, mesh, score) as trainer,
        ):
            trainer.fit()
        assert score.calls == 3
        assert not (tmp_path / "run" / "metrics.jsonl").exists() or "val/rewards" not in json.dumps(
            metrics_of(tmp_path)
        )
        lines = run(tmp_path, mesh, f"{RL}.val_check_interval=1")  # made up for
        validated_steps = [line["step"] for line in lines if "val/rewards" in line]
        assert validated_steps == [0, 1, 2]

    def test_a_later_one_saves_its_step(self, tmp_path, mesh):
        score = Score(lambda call: call > 3 + 16)
        config = tiny_config(tmp_path, f"{RL}.val_check_interval=1")
        with (
            raises_error(TOO_MANY, "validation"),
            tiny_trainer(config, mesh, score) as trainer,
        ):
            trainer.fit()
        assert saved_steps(tmp_path) == [1]

    def test_the_test_set_too(self, tmp_path, mesh):
        score = Score(lambda call: call > 2 * 16)
        config = tiny_config(
            tmp_path, f"model.data.data_prefix.test={tmp_path / 'validation.jsonl'}"
        )
        with (
            raises_error(TOO_MANY, "test after step 2"),
            tiny_trainer(config, mesh, score) as trainer,
        ):
            trainer.fit()
        assert saved_steps(tmp_path) == [2]

    def test_as_much_as_a_step_may_lack_is_left_out(self, tmp_path, mesh):
        score = Score(lambda call: call == 2)
        lines = run(
            tmp_path, mesh, f"{RL}.val_check_interval=2", f"{RL}.max_failed_fraction=0.5", rm=score
        )
        assert lines[0]["val/fraction_of_samples_scored"] == pytest.approx(2 / 3)
