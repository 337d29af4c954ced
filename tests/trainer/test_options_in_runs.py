"""Options of KL, credit, rewards and truncation in whole runs: files hold what the page says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.choices import GENERATOR_CORRECTIONS
from helpers.models import tiny_llama_folder
from helpers.ranks import call_on_ranks
from helpers.rewards import FunctionReward
from helpers.tiny_run import (
    MAX_LENGTH,
    PROMPT_TOKENS,
    largest_difference,
    metrics_of,
    odd_share,
    rollouts_of,
    run,
    tiny_config,
    tiny_overrides,
    tiny_trainer,
    train_on_ranks,
    without_times,
)

from reinforce_rl.algorithm.kl import token_kl
from reinforce_rl.megatron.checkpointer import latest_checkpoint
from reinforce_rl.monitoring.metrics import GAP_SHARES
from reinforce_rl.monitoring.report import overview
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel
from reinforce_rl.rewards.base import STATUS_BAD_TEXT, RewardRequest, Rewards, WeightedSource
from reinforce_rl.rewards.sources import CombinedRewards

RL = "trainer.reinforce"
BETA = 0.1  # of `tiny_overrides`


def train_with_noisy_log_probs(overrides: list[str]) -> None:
    """Add noise, a function of the token, to the log-probs that the generator reports."""
    infer = MegatronGPTReinforceActorModel.infer

    def disturbed(self, *args, **kwargs):
        completions = infer(self, *args, **kwargs)
        noise = (37 * completions.tokens % 101) / 1000
        return replace(completions, log_probs=completions.log_probs + noise)

    MegatronGPTReinforceActorModel.infer = disturbed  # type: ignore[method-assign]
    train_on_ranks(overrides)


def of_others(rows: list[dict], row: dict, key: str) -> float:
    """Return the mean over the other valid samples of the row's prompt."""
    of_prompt = [other for other in rows if other["prompt_id"] == row["prompt_id"]]
    others = [other[key] for other in of_prompt if other is not row and other["valid"]]
    return sum(others) / len(others)


class TestAdaptiveKL:
    @pytest.mark.parametrize("target, direction", [(1e-4, 1), (1e4, -1)])
    def test_beta_moves_against_the_error(self, target, direction, tmp_path, mesh):
        """It moves by the largest step, 20 % a horizon, since the KL is far off."""
        lines = run(
            tmp_path, mesh, f"{RL}.max_epochs=2", f"{RL}.kl_target={target}", f"{RL}.kl_horizon=64"
        )
        coefficients = [line["train/kl_coefficient"] for line in lines]
        # The first step's KL is exactly 0, below any target.
        factors = [1 - 0.2 * 16 / 64] + [1 + direction * 0.2 * 16 / 64] * 2
        expected = [
            BETA,
            BETA * factors[0],
            BETA * factors[0] * factors[1],
            BETA * math.prod(factors),
        ]
        for line in lines[1:]:
            assert line["train/init_policy_kl"] > 0
        assert coefficients == pytest.approx(expected)
        checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
        assert checkpoint is not None
        last = 1 + direction * 0.2 * 16 / 64
        assert checkpoint.trainer_state["kl_coefficient"] == pytest.approx(expected[-1] * last)
        for step, beta in enumerate(coefficients, 1):
            for row in rollouts_of(tmp_path, step):
                assert row["reward_with_kl"] == pytest.approx(
                    row["reward"] - beta * row["kl"], abs=1e-6
                )

    def test_without_a_target_a_resumed_run_has_the_beta_of_its_configuration(self, tmp_path, mesh):
        kl_coefficients = [line["train/kl_coefficient"] for line in run(tmp_path, mesh)]
        assert kl_coefficients == [BETA] * 2
        changed = [f"{RL}.initial_policy_kl_penalty=0.3", "resume_with_changes=true"]
        lines = run(tmp_path, mesh, f"{RL}.max_epochs=2", *changed)
        kl_coefficients = [line["train/kl_coefficient"] for line in lines]
        assert kl_coefficients == [BETA] * 2 + [0.3] * 2


class TestPlacementOfTheKL:
    @pytest.mark.parametrize("placement", ["reward", "advantage", "loss"])
    def test_rows(self, placement, tmp_path, mesh):
        lines = run(tmp_path, mesh, f"{RL}.kl_placement={placement}")
        rows = rollouts_of(tmp_path, 2)
        assert any(abs(row["kl"]) > 0.01 for row in rows)
        in_reward, in_advantage = (BETA * (placement == name) for name in ("reward", "advantage"))
        for row in rows:
            assert row["reward_with_kl"] == pytest.approx(
                row["reward"] - in_reward * row["kl"], abs=1e-6
            )
            assert row["baseline"] == pytest.approx(
                of_others(rows, row, "reward_with_kl"), abs=1e-6
            )
            expected = row["reward_with_kl"] - row["baseline"] - in_advantage * row["kl"]
            assert row["advantage"] == pytest.approx(expected, abs=1e-6)
        for line in lines:
            assert line["train/kl_coefficient"] == BETA
            assert line["train/grad_norm"] > 0

    @pytest.mark.more
    def test_in_the_loss_it_pulls_back_to_the_reference(self, tmp_path, mesh):
        """The policy moves away from the reference; then the KL acts alone, without rewards."""
        options = [f"{RL}.kl_placement=loss", f"{RL}.num_rollouts_per_prompt=8"]
        away = run(tmp_path, mesh, *options, f"{RL}.max_epochs=4", "model.optim.lr=0.02")
        lines = run(tmp_path, mesh, *options, f"{RL}.max_epochs=12", rm=lambda ids: 0.5)
        assert away == lines[:8]
        divergences = [line["train/kl_k3"] for line in lines[8:]]
        assert sum(divergences[8:]) / 8 < 0.75 * sum(divergences[:3]) / 3


class TestTokenCredit:
    @pytest.mark.parametrize("discount", [1.0, 0.9])
    def test_each_token_has_what_is_still_to_come(self, discount, tmp_path, mesh):
        options = [f"{RL}.credit_assignment=token", f"{RL}.discount_factor={discount}"]
        with tiny_trainer(tiny_config(tmp_path, *options), mesh) as trainer:
            rollouts, _, _ = trainer.generate_rollouts()
            trainer.run_training(trainer.generate_reinforce_data(rollouts)[0])
            rollouts, _, _ = trainer.generate_rollouts()
            data, _ = trainer.generate_reinforce_data(rollouts)
            assert rollouts.log_probs is not None
            assert rollouts.init_log_probs is not None
            kl = token_kl(rollouts.log_probs, rollouts.init_log_probs, rollouts.response_mask)
            assert kl.abs().max() > 0.01
            for i, length in enumerate(rollouts.response_lengths.tolist()):
                for t in range(length):
                    discounts = [discount ** (s - t) for s in range(t, length)]
                    expected = float(rollouts.rewards[i]) * discounts[-1]
                    expected -= float(data.baseline[i])
                    for s in range(t, length):
                        expected -= BETA * discounts[s - t] * float(kl[i, s])
                    assert float(data.advantages[i, t]) == pytest.approx(expected, abs=1e-5)
                assert not data.advantages[i, length:].any()

    @pytest.mark.more
    def test_a_run(self, tmp_path, mesh):
        """At step 1 the KL is 0: credit by token equals credit by sequence; later they differ."""
        lines = run(tmp_path / "token", mesh, f"{RL}.credit_assignment=token")
        other = run(tmp_path / "sequence", mesh, f"{RL}.credit_assignment=sequence")
        assert largest_difference(without_times(lines[0]), without_times(other[0])) < 1e-5
        assert lines[1]["train/grad_norm"] != pytest.approx(other[1]["train/grad_norm"], rel=1e-3)


@pytest.mark.more
def test_an_entropy_bonus_is_all_that_acts_where_no_reward_differs(tmp_path, mesh):
    options = [
        f"{RL}.initial_policy_kl_penalty=0",
        f"{RL}.max_epochs=4",
        "model.optim.weight_decay=0",
    ]
    entropies = {}
    for bonus in (0.0, 1.0):
        lines = run(
            tmp_path / str(bonus), mesh, *options, f"{RL}.entropy_bonus={bonus}", rm=lambda ids: 0.5
        )
        entropies[bonus] = [line["train/entropy"] for line in lines]
        for line in lines:
            assert (line["train/grad_norm"] > 0) == (bonus > 0)
    assert 0 < entropies[0.0][0] == pytest.approx(entropies[1.0][0], rel=1e-5)
    assert entropies[1.0][-1] > entropies[0.0][-1] + 0.1
    assert entropies[1.0][-1] < math.log(32)


class TestTruncatedSamples:
    def test_mask(self, tmp_path, mesh):
        """Masked samples are out of the loss, but in the baseline of the others."""
        lines = run(tmp_path, mesh, f"{RL}.truncated_samples=mask")
        for step, line in enumerate(lines, 1):
            rows = rollouts_of(tmp_path, step)
            cut = [row for row in rows if row["finish_reason"] == "length"]
            assert 0 < len(cut) < len(rows)
            assert line["train/fraction_of_samples_valid"] == 1.0
            assert line["train/fraction_of_samples_trained"] == 1 - len(cut) / len(rows)
            for row in rows:
                assert row["valid"]
                baseline = of_others(rows, row, "reward_with_kl")
                assert row["baseline"] == pytest.approx(baseline, abs=1e-6)
                expected = 0.0 if row in cut else row["reward_with_kl"] - baseline
                assert row["advantage"] == pytest.approx(expected, abs=1e-6)

    def test_masked_samples_are_not_in_the_denominator(self, tmp_path, mesh):
        with tiny_trainer(tiny_config(tmp_path, f"{RL}.truncated_samples=mask"), mesh) as trainer:
            rollouts, _, _ = trainer.generate_rollouts()
            data, _ = trainer.generate_reinforce_data(rollouts)
            assert torch.equal(data.trains, rollouts.is_end)
            assert rollouts.log_probs is not None
            terms = (data.sequence_advantages * rollouts.log_probs.sum(dim=1))[rollouts.is_end]
            metrics = trainer.run_training(data)
            assert metrics["actor_loss"] == pytest.approx(-float(terms.mean()), rel=1e-4)

    @pytest.mark.parametrize("buffer", [0, 3])
    def test_penalise(self, buffer, tmp_path, mesh):
        options = [
            f"{RL}.truncated_samples=penalize",
            f"{RL}.truncation_penalty=0.8",
            f"{RL}.overlong_buffer={buffer}",
        ]
        lines = run(tmp_path, mesh, *options)
        partly = 0
        for step, line in enumerate(lines, 1):
            rows = rollouts_of(tmp_path, step)
            for row in rows:
                cut = row["finish_reason"] == "length"
                into = 0.0
                if buffer:
                    too_long = max(row["response_length"] - (MAX_LENGTH - buffer), 0)
                    into = min(too_long / buffer, 1.0)
                penalty = 0.8 * (1.0 if cut else into)
                partly += 0 < penalty < 0.8
                assert row["valid"]
                expected = row["reward"] - penalty - BETA * row["kl"]
                assert row["reward_with_kl"] == pytest.approx(expected, abs=1e-6)
                baseline = of_others(rows, row, "reward_with_kl")
                assert row["baseline"] == pytest.approx(baseline, abs=1e-6)
                assert row["advantage"] == pytest.approx(row["reward_with_kl"] - baseline, abs=1e-6)
            mean = sum(row["reward"] for row in rows) / len(rows)
            assert line["train/rewards"] == pytest.approx(mean, abs=1e-6)
        assert (partly > 0) == (buffer > 0)


class TestRewardShaping:
    def test_running_standardisation_is_that_of_past_steps(self, tmp_path, mesh):
        """The first step has its own moments."""
        run(tmp_path, mesh, f"{RL}.max_epochs=2", f"{RL}.reward_shaping.standardization=running")
        past: list[float] = []
        for step in range(1, 5):
            rows = rollouts_of(tmp_path, step)
            scores = [row["reward"] for row in rows]
            known = torch.tensor(past or scores, dtype=torch.float64)
            for row in rows:
                shaped = (row["reward"] - float(known.mean())) / float(known.std())
                assert row["reward_with_kl"] == pytest.approx(shaped - BETA * row["kl"], abs=1e-5)
            past += scores


class TestGeneratorCorrection:
    @pytest.mark.parametrize("correction", GENERATOR_CORRECTIONS)
    def test_the_native_generator_needs_none(self, correction, tmp_path, mesh):
        temperature = "model.reinforce.sampling_params.temperature=1.3"
        lines = run(tmp_path, mesh, f"{RL}.generator_correction={correction}", temperature)
        for line in lines:
            assert 0 <= line["train/generator_logprob_diff"] < 1e-4
            assert abs(line["train/generator_kl"]) < 1e-4
            assert line["train/generator_capped"] == 0
            assert line.get("train/generator_masked", 0) == 0
            assert (
                line["train/generator_logprob_diff_median"]
                <= line["train/generator_logprob_diff_p99"]
            )
            assert (
                line["train/generator_logprob_diff_p99"]
                <= line["train/generator_logprob_diff_max"]
                < 1e-4
            )
            assert line["train/effective_sample_size"] == pytest.approx(1.0, abs=1e-4)

    def test_another_generator_is_corrected_and_seen(self, tmp_path, mesh):
        """It halves the likelihood of each of its tokens: every weight is 2, or at the cap."""
        gradients = {}
        masked = [("token_mask", 2.5), ("token_mask", 1.5), ("sequence_mask", 1.5)]
        for correction, cap in (("none", 2.5), ("token", 2.5), ("token", 1.5), *masked):
            options = [f"{RL}.generator_correction={correction}", f"{RL}.generator_ratio_cap={cap}"]
            with tiny_trainer(
                tiny_config(tmp_path / f"{correction}{cap}", *options), mesh
            ) as trainer:
                rollouts, _, _ = trainer.generate_rollouts()
                assert rollouts.generator_log_probs is not None
                rollouts.generator_log_probs[rollouts.response_mask] -= math.log(2)
                data, _ = trainer.generate_reinforce_data(rollouts)
                metrics = trainer.run_training(data)
            gradients[correction, cap] = metrics["grad_norm"]
            assert metrics["generator_logprob_diff"] == pytest.approx(math.log(2), abs=1e-4)
            expected_kl = 2 - 1 - math.log(2)
            assert metrics["generator_kl"] == pytest.approx(expected_kl, abs=1e-4)
            assert metrics["generator_capped"] == (cap < 2)
            for name in GAP_SHARES:
                assert metrics[name] == pytest.approx(math.log(2), abs=1e-4)
            if correction.endswith("_mask"):
                assert metrics["generator_masked"] == (cap < 2)
        uncorrected = gradients["none", 2.5]
        assert gradients["token", 2.5] == pytest.approx(2 * uncorrected, rel=1e-4)
        assert gradients["token", 1.5] == pytest.approx(1.5 * gradients["none", 2.5], rel=1e-4)
        assert gradients["token_mask", 2.5] == pytest.approx(gradients["token", 2.5], rel=1e-6)
        assert gradients["token_mask", 1.5] == gradients["sequence_mask", 1.5] == 0

    @pytest.mark.parametrize(
        "cut",
        [[], pytest.param(["model.pipeline_model_parallel_size=2"], marks=pytest.mark.slow)],
        ids=["data", "pipeline"],
    )
    @pytest.mark.slow
    def test_the_quantiles_are_those_of_all_ranks(self, cut, tmp_path):
        """Two ranks share the prompts or the layers; one of two optimizer steps has ratios."""
        options = [f"{RL}.importance_ratio=token", "model.global_batch_size=8", f"{RL}.max_steps=1"]
        quantiles = []
        for ranks, layout in ((1, []), (2, cut)):
            folder = tmp_path / str(ranks)
            tiny_llama_folder(
                folder / "model", vocab_size=32, layers=2, hidden=16, ffn=32, max_positions=16
            )
            overrides = [
                *tiny_overrides(folder),
                *options,
                *layout,
                f"trainer.devices={ranks}",
            ]
            call_on_ranks(train_with_noisy_log_probs, ranks, overrides)
            (line,) = metrics_of(folder)
            quantiles.append(
                [line[f"train/{name}"] for name in ("generator_logprob_diff", *GAP_SHARES)]
            )
        assert quantiles[1] == pytest.approx(quantiles[0], abs=1e-5)
        _, median, p99, largest = quantiles[0]
        assert 0.01 < median < p99 <= largest < 0.11

    def test_one_token_that_the_engine_sees_differently_is_named(
        self, tmp_path, mesh, monkeypatch, capsys
    ):
        """The log and an alert name it; the report also shows the text before it."""
        infer = MegatronGPTReinforceActorModel.infer

        def disturbed(self, prompts, *args, **kwargs):
            completions = infer(self, prompts, *args, **kwargs)
            for i, prompt in enumerate(completions.repeat_to_samples(prompts)):
                if prompt.id == 5 and i % 4 == 2:
                    completions.log_probs[i, 1] -= 6.0
            return completions

        monkeypatch.setattr(MegatronGPTReinforceActorModel, "infer", disturbed)
        # prompt 5 and others
        lines = run(tmp_path, mesh, f"{RL}.initial_policy_kl_penalty=0", f"{RL}.max_steps=1")
        (step,) = [line["step"] for line in lines if line["train/generator_logprob_diff_max"] > 1]
        (row,) = [
            r for r in rollouts_of(tmp_path, step) if (r["prompt_id"], r["sample_id"]) == (5, 2)
        ]
        (said,) = [
            line
            for line in capsys.readouterr().out.splitlines()
            if "trainer and generator differ" in line
        ]
        assert said.startswith(f"warning: step {step}: ")
        assert "; prompt 5 sample 2 token 1 " in said
        assert "generator_logprob_diff_max is 6" in said
        run_folder = RunFolder(tmp_path / "run")
        texts = run_folder.tokens(step, [5])[5, 2].token_texts or []
        assert f"token 1 {texts[1]!r} after {row['prompt'] + texts[0]!r}: " in said
        assert ("generator_logprob_diff", step) in [
            (alert.kind, alert.first) for alert in run_folder.alerts()
        ]
        tables = [
            table for table in overview(run_folder)["tables"] if "largest gap" in table["title"]
        ]
        places = [table["rows"][0][:3] for table in tables]
        assert places == [["5", "2", "1"]]

    @pytest.mark.parametrize(
        "options",
        [
            ("model.micro_batch_size=1",),
            ("model.micro_batch_size=5",),
            ("model.tokens_per_micro_batch=40",),
            ("model.shared_prefix=true",),
            (f"{RL}.rollout_batch_seq_length=16",),
            (
                f"{RL}.importance_ratio=token",
                "model.global_batch_size=8",
                f"{RL}.reinforce_epochs=2",
            ),
        ],
        ids=lambda options: options[0].split(".")[-1],
    )
    def test_the_quantiles_do_not_depend_on_the_layout(self, options, tmp_path, mesh):
        """The recorded gaps are sorted here; the generator's numbers have known noise."""
        fixed = f"{RL}.initial_policy_kl_penalty=0"
        with tiny_trainer(tiny_config(tmp_path, *options, fixed), mesh) as trainer:
            rollouts, _, _ = trainer.generate_rollouts()
            known = rollouts.generator_log_probs
            mask = rollouts.response_mask
            assert known is not None
            generator = torch.Generator().manual_seed(3)
            noise = 0.3 * torch.randn(1000, generator=generator)[: int(mask.sum())]
            known[mask] += noise
            data, _ = trainer.generate_reinforce_data(rollouts)
            trains = torch.arange(len(data.trains)) % 5 != 0
            data = replace(data, trains=trains)
            metrics = trainer.run_training(data)
            tokens = trainer.step_samples(data).tokens
            assert tokens is not None
        kept = trains[:, None].expand_as(mask)[mask]
        gaps = noise[kept].abs().sort().values
        metric_quantiles = {name: metrics[name] for name in GAP_SHARES}
        assert metric_quantiles == pytest.approx(
            {name: float(gaps[math.ceil(q * len(gaps)) - 1]) for name, q in GAP_SHARES.items()},
            abs=2e-5,
        )
        recorded = torch.from_numpy(
            tokens.values["policy_log_probs"] - tokens.values["generator_log_probs"]
        )
        torch.testing.assert_close(recorded[kept], -noise[kept], atol=2e-5, rtol=0)


class FailsOnFirst(FunctionReward):
    """Cannot score the first sample of each request."""

    def infer_rm(self, request: RewardRequest):
        answer = super().infer_rm(request)
        values = answer.rewards.values.clone()
        status = answer.rewards.status.clone()
        values[0] = math.nan
        status[0] = STATUS_BAD_TEXT
        return type(answer)(Rewards(values, status))


class TestSeveralSources:
    @staticmethod
    def both(first: FunctionReward) -> CombinedRewards:
        length = FunctionReward(lambda ids: float(len(ids)), PROMPT_TOKENS)
        return CombinedRewards(
            [WeightedSource("odd", first, 2.0), WeightedSource("length", length, -0.25)]
        )

    def test_the_reward_is_the_weighted_sum(self, tmp_path, mesh):
        lines = run(tmp_path, mesh, rm=self.both(FunctionReward(odd_share, PROMPT_TOKENS)))
        for step, line in enumerate(lines, 1):
            rows = rollouts_of(tmp_path, step)
            lengths = [row["response_length"] for row in rows]
            assert line["train/rewards_length"] == pytest.approx(sum(lengths) / len(rows))
            expected = 2.0 * line["train/rewards_odd"] - 0.25 * line["train/rewards_length"]
            assert line["train/rewards"] == pytest.approx(expected, abs=1e-6)
            odd = [(row["reward"] + 0.25 * row["response_length"]) / 2.0 for row in rows]
            for share in odd:
                assert 0 <= share <= 1 + 1e-6
            assert len(set(odd)) > 2
            assert line["train/rewards_odd"] == pytest.approx(sum(odd) / len(rows), abs=1e-6)

    def test_a_sample_that_one_of_them_cannot_score_has_failed(self, tmp_path, mesh):
        """The first sample of each of two requests; the mean of the other source includes it."""
        rm = self.both(FailsOnFirst(odd_share, PROMPT_TOKENS))
        lines = run(tmp_path, mesh, f"{RL}.max_failed_fraction=0.2", rm=rm)
        for step, line in enumerate(lines, 1):
            rows = rollouts_of(tmp_path, step)
            unscored = [i for i, row in enumerate(rows) if row["reward"] is None]
            assert unscored == [0, 12]
            valid = [row["valid"] for row in rows]
            assert valid == [row["reward"] is not None for row in rows]
            assert line["train/fraction_of_samples_scored"] == 14 / 16
            lengths = [row["response_length"] for row in rows]
            assert line["train/rewards_length"] == pytest.approx(sum(lengths) / 16)
            scored = [row for row in rows if row["valid"]]
            odd = [(row["reward"] + 0.25 * row["response_length"]) / 2.0 for row in scored]
            assert line["train/rewards_odd"] == pytest.approx(sum(odd) / 14, abs=1e-6)

    def test_with_dynamic_filtering_and_in_validation(self, tmp_path: Path, mesh):
        rm = self.both(FunctionReward(odd_share, PROMPT_TOKENS))
        run(tmp_path, mesh, f"{RL}.dynamic_filtering=true", f"{RL}.val_check_interval=1", rm=rm)
        for line in metrics_of(tmp_path):
            for kind in ("val", "train") if line["step"] else ("val",):
                expected = 2.0 * line[f"{kind}/rewards_odd"] - 0.25 * line[f"{kind}/rewards_length"]
                assert line[f"{kind}/rewards"] == pytest.approx(expected, abs=1e-6)
