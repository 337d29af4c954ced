"""NeMo-Aligner's features, each through its config key: algorithm, model, generation.

Whole runs on the tiny model; the tests of each part compare in depth.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.models import tiny_llama_folder
from helpers.tiny_run import (
    MAX_LENGTH,
    however_cut,
    largest_difference,
    metrics_of,
    rollouts_of,
    run,
    tiny_config,
    tiny_trainer,
    weights,
    without_times,
)
from helpers.trainer_processes import TrainerProcesses

import reinforce_rl.policy.model as actor_model
from reinforce_rl.data.finish_reasons import FINISH_OUTSIDE
from reinforce_rl.megatron.optimizer import ActorOptimizer

RL = "trainer.reinforce"
ROLLOUT = "model.reinforce"
SAMPLING = f"{ROLLOUT}.sampling_params"
VAL_SAMPLING = f"{ROLLOUT}.val_sampling_params"
BIASED = f"{ROLLOUT}.allow_biased_sampling=true"
ONE_STEP = f"{RL}.max_steps=1"
SAME = 2e-5  # numbers that may differ by rounding


def of_prompts(rows: list[dict]) -> dict[int, list[dict]]:
    groups: dict[int, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["prompt_id"], []).append(row)
    return groups


def changed(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    """Return the norm of the difference of all weights."""
    return math.sqrt(
        sum(
            float((b.double() - a.double()).square().sum())
            for a, b in zip(before, after, strict=True)
        )
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory, mesh) -> Path:
    """Two epochs of two steps each, with the keys unchanged."""
    folder = tmp_path_factory.mktemp("plain")
    run(folder, mesh, f"{RL}.max_epochs=2")
    return folder


def same_as(plain: Path, lines: list[dict]) -> bool:
    """Return whether a run's steps have the numbers of the plain run's steps."""
    pairs = zip(map(however_cut, metrics_of(plain)), map(however_cut, lines), strict=False)
    return max(largest_difference(*pair) for pair in pairs) < SAME


class TestAlgorithm:
    def test_feature_rloo_over_g_rollouts_a_prompt(self, tmp_path, mesh):
        run(tmp_path, mesh, f"{RL}.num_rollouts_per_prompt=3", ONE_STEP)
        groups = of_prompts(rollouts_of(tmp_path, 1))
        lengths = [len(rows) for rows in groups.values()]
        assert lengths == [3] * 4
        for rows in groups.values():
            total = sum(row["reward_with_kl"] for row in rows)
            for row in rows:
                expected = row["reward_with_kl"] - (total - row["reward_with_kl"]) / 2
                assert row["advantage"] == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize("absolute", [False, True])
    def test_feature_kl_in_the_reward_signed_or_absolute(self, tmp_path, mesh, absolute):
        keys = f"{RL}.use_absolute_kl={absolute}", f"{RL}.initial_policy_kl_penalty=0.3"
        run(tmp_path, mesh, *keys)
        rows = rollouts_of(tmp_path, 2)
        for r in rows:
            expected = r["reward"] - 0.3 * r["kl"]
            assert r["reward_with_kl"] == pytest.approx(expected, abs=1e-6)
        assert any(row["kl"] < 0 for row in rows) != absolute
        assert any(row["kl"] > 0 for row in rows)

    def test_feature_responses_that_did_not_terminate_are_dropped(self, tmp_path, mesh):
        run(tmp_path, mesh, f"{RL}.truncated_samples=drop", ONE_STEP)
        rows = rollouts_of(tmp_path, 1)
        finish_reasons = {row["finish_reason"] for row in rows}
        assert finish_reasons == {"stop", "length"}
        assert all(row["valid"] == (row["finish_reason"] == "stop") for row in rows)
        for group in of_prompts(rows).values():
            counted = [row["reward_with_kl"] for row in group if row["valid"]]
            for row in group:
                others = (sum(counted) - row["reward_with_kl"]) / max(len(counted) - 1, 1)
                alone = len(counted) == 1
                expected = row["reward_with_kl"] - others if row["valid"] and not alone else 0.0
                assert row["advantage"] == pytest.approx(expected, abs=1e-6)

    def test_feature_responses_that_left_the_vocabulary_are_dropped(self, tmp_path, mesh):
        """An engine with a padded vocabulary draws 32; the model has the tokens 0 to 31."""

        class Outside:
            is_exact = False

            def __init__(self, inner):
                self.inner = inner
                self.refit = inner.refit
                self.awake = inner.awake

            def generate(self, *args):
                completions = self.inner.generate(*args)
                tokens = completions.tokens.clone()
                tokens[::4, 0] = 32
                return replace(completions, tokens=tokens)

        with tiny_trainer(tiny_config(tmp_path, ONE_STEP), mesh) as trainer:
            trainer.model.generator = Outside(trainer.model.generator)
            trainer.fit()
        rows = rollouts_of(tmp_path, 1)
        (line,) = metrics_of(tmp_path)
        for row in rows:
            outside = row["sample_id"] == 0
            assert (row["finish_reason"] == FINISH_OUTSIDE) == outside
            assert row["valid"] != outside
            assert row["advantage"] == 0.0 or not outside
        assert line["train/fraction_of_samples_valid"] == 0.75
        assert line["train/grad_norm"] > 0

    def test_feature_end_strings(self, tmp_path, mesh):
        run(
            tmp_path,
            mesh,
            f"{SAMPLING}.end_strings=[e,t]",
            ONE_STEP,
            f"{ROLLOUT}.length_params.max_length=9",
        )
        ended = [row for row in rollouts_of(tmp_path, 1) if set(row["response"]) & set("et")]
        assert ended
        for row in ended:
            assert row["finish_reason"] == "stop"
            assert row["response"][-1] in "et"
            assert not set(row["response"][:-1]) & set("et")

    def test_feature_gradient_clipping(self, tmp_path, mesh):
        """The first step is the clipped gradient times lr / eps, which is 1 here.

        Adam's eps is far above the gradient.
        """
        keys = [ONE_STEP, "model.optim.weight_decay=0", "model.optim.eps=1e3", "model.optim.lr=1e3"]
        moved = []
        for clip in (0, 1e-3):
            (tmp_path / str(clip)).mkdir()
            config = tiny_config(tmp_path / str(clip), *keys, f"{RL}.gradient_clip_val={clip}")
            with tiny_trainer(config, mesh) as run_:
                before = weights(run_)
                run_.fit()
                moved.append(changed(before, weights(run_)))
            (line,) = metrics_of(tmp_path / str(clip))
            assert line["train/grad_norm"] > 1e-3, "what is logged is the norm before"
        assert moved[0] == pytest.approx(line["train/grad_norm"], rel=0.02)
        assert moved[1] == pytest.approx(1e-3, rel=0.02)

    def test_feature_gradient_accumulation_to_a_global_batch(self, tmp_path, mesh, plain):
        """16 sequences a step: one optimizer step of 16 in passes of 2, or two of 8."""
        whole = run(tmp_path, mesh, "model.global_batch_size=16", "model.micro_batch_size=2")
        assert same_as(plain, whole)
        assert [line["train/optimizer_steps"] for line in whole] == [1, 1]
        (tmp_path / "two").mkdir()
        halves = run(
            tmp_path / "two",
            mesh,
            "model.global_batch_size=8",
            f"{RL}.importance_ratio=token",
            ONE_STEP,
        )
        assert halves[0]["train/optimizer_steps"] == 2

    def test_feature_several_epochs_with_shuffling(self, tmp_path, mesh, plain):
        def order(folder: Path, steps: tuple[int, ...]) -> list[int]:
            return [prompt for step in steps for prompt in of_prompts(rollouts_of(folder, step))]

        first = order(plain, (1, 2))
        second = order(plain, (3, 4))
        assert sorted(first) == sorted(second) == list(range(8))
        assert first != second
        run(tmp_path, mesh, "model.data.shuffle=false", f"{RL}.max_epochs=2")
        expected = list(range(8)) * 2
        assert order(tmp_path, (1, 2, 3, 4)) == expected

    def test_feature_max_steps(self, tmp_path, mesh):
        lines = run(tmp_path, mesh, f"{RL}.max_epochs=9", f"{RL}.max_steps=3")
        steps = [line["step"] for line in lines]
        assert steps == [1, 2, 3]


class TestModel:
    def test_feature_any_megatron_gpt_with_overrides(self, tmp_path, mesh, plain):
        override = "+model.megatron_overrides.layernorm_epsilon=0.5"
        with tiny_trainer(tiny_config(tmp_path, override, ONE_STEP), mesh) as trainer:
            assert trainer.model.lm.config.layernorm_epsilon == 0.5
            trainer.fit()
        assert not same_as(plain, metrics_of(tmp_path))

    @pytest.mark.slow
    def test_feature_tp_pp_sp_dp(self, tmp_path):
        """One process against four: TP with SP and DP, then PP with DP."""
        layouts = {
            "one": (1, []),
            "tp": (4, ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"]),
            "pp": (4, ["model.pipeline_model_parallel_size=2"]),
        }
        processes = TrainerProcesses()
        try:
            for name, (ranks, sizes) in layouts.items():
                size = {"vocab_size": 32, "hidden": 16, "ffn": 32, "max_positions": 16}
                tiny_llama_folder(tmp_path / name / "model", layers=2, **size)
                processes.start(tmp_path / name, ONE_STEP, *sizes, ranks=ranks)
                assert processes.wait() == 0, (tmp_path / name / "log").read_text()
        finally:
            processes.close()
        single, *others = (
            [however_cut(line) for line in metrics_of(tmp_path / name)] for name in layouts
        )
        for other in others:
            assert max(map(largest_difference, single, other)) < SAME

    @pytest.mark.slow
    def test_feature_work_queue_over_data_parallel_ranks(self, tmp_path):
        """Rank 0 is slow and takes one of its two prompts; the step equals the fixed split's."""
        processes = TrainerProcesses()
        lines = []
        try:
            for name in ("false", "true"):
                keys = [
                    f"{RL}.generation_work_queue={name}",
                    f"{ROLLOUT}.rollout_micro_batch_size=1",
                ]
                processes.start(tmp_path / name, ONE_STEP, *keys, ranks=2, slow_rank=0)
                assert processes.wait() == 0, (tmp_path / name / "log").read_text()
                lines.append([without_times(line) for line in metrics_of(tmp_path / name)])
        finally:
            processes.close()
        assert lines[0] == lines[1]
        assert re.search(
            r"rank 1 took [34] of 4, its own 2", (tmp_path / "true" / "log").read_text()
        )

    def test_feature_bf16(self, tmp_path, mesh):
        with tiny_trainer(tiny_config(tmp_path, "trainer.precision=bf16"), mesh) as trainer:
            dtypes = {parameter.dtype for parameter in trainer.model.lm.parameters()}
            assert dtypes == {torch.bfloat16}
            trainer.fit()
            states = trainer.optimizer.megatron.state_dict()
        lines = metrics_of(tmp_path)
        for line in lines:
            assert math.isfinite(line["train/actor_loss"])
            assert line["train/grad_norm"] > 0
        assert {main.dtype for group in states["fp32_from_fp16_params"] for main in group} == {
            torch.float32
        }

    def test_feature_activation_checkpointing(self, tmp_path, mesh, plain):
        full = ["granularity=full", "method=uniform", "num_layers=1"]
        config = tiny_config(tmp_path, *(f"model.activations_checkpoint_{key}" for key in full))
        with tiny_trainer(config, mesh) as trainer:
            assert trainer.model.lm.config.recompute_granularity == "full"
            trainer.fit()
        assert same_as(plain, metrics_of(tmp_path))

    def test_feature_lora_with_the_adapter_off_reference(self, tmp_path, mesh):
        config = tiny_config(
            tmp_path, "model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4"
        )
        with tiny_trainer(config, mesh) as trainer:
            named = dict(trainer.model.lm.named_parameters())
            frozen = {
                name: value.detach().clone()
                for name, value in named.items()
                if not value.requires_grad
            }
            trainer.fit()
            assert frozen
            for name, value in frozen.items():
                assert torch.equal(named[name], value)
        first, second = metrics_of(tmp_path)
        assert abs(first["train/init_policy_kl"]) < 1e-6 < abs(second["train/init_policy_kl"])

    def test_feature_reference_on_the_host_is_swapped_in(self, tmp_path, mesh, plain):
        """The other placement has the same numbers.

        The KL shows that neither reads the policy's weights.
        """
        lines = run(tmp_path, mesh, "model.reference_placement=device")
        assert same_as(plain, lines)
        assert lines[1]["train/init_policy_kl"] != 0.0

    def test_feature_adam_states_are_away_while_responses_are_generated(
        self, tmp_path, mesh, plain, monkeypatch
    ):
        log: list[str] = []

        @contextlib.contextmanager
        def offloaded(self):
            log.append("away")
            yield
            log.append("back")

        monkeypatch.setattr(ActorOptimizer, "offloaded", offloaded)
        with tiny_trainer(
            tiny_config(tmp_path, f"{ROLLOUT}.offload_adam_states=true"), mesh
        ) as trainer:
            generate = trainer.model.generator.generate
            trainer.model.generator.generate = lambda *args: (
                log.append("generate") or generate(*args)
            )
            trainer.fit()
        assert log == ["away", "generate", "generate", "back"] * 2
        assert same_as(plain, metrics_of(tmp_path))


class TestOptimizer:
    def test_feature_distributed_adam(self, tmp_path, mesh, plain):
        lines = run(
            tmp_path, mesh, "model.optim.distributed=true", "model.optim.overlap_grad_sync=true"
        )
        assert same_as(plain, lines)

    @pytest.mark.parametrize("name", ["CosineAnnealing", "constant"])
    def test_feature_schedules(self, tmp_path, mesh, name):
        sched = [f"name={name}", "warmup_steps=2", "constant_steps=2", "min_lr=0.001"]
        lines = run(
            tmp_path, mesh, f"{RL}.max_epochs=4", *(f"model.optim.sched.{key}" for key in sched)
        )
        falling = [0.001 + 0.009 * (1 + math.cos(math.pi * i / 4)) / 2 for i in (1, 2, 3, 4)]
        expected = [
            0.005,
            0.01,
            *(falling + [0.001] * 2 if name == "CosineAnnealing" else [0.01] * 6),
        ]
        assert [line["train/lr"] for line in lines] == pytest.approx(expected)


class TestGeneration:
    def test_feature_native_fallback_with_a_seed(self, tmp_path, mesh, plain):
        run(tmp_path, mesh, ONE_STEP, "model.seed=7", "model.data.shuffle=false")
        (tmp_path / "again").mkdir()
        run(tmp_path / "again", mesh, ONE_STEP, "model.seed=7", "model.data.shuffle=false")
        assert rollouts_of(tmp_path, 1) == rollouts_of(tmp_path / "again", 1)
        responses = {
            (r["prompt_id"], r["sample_id"]): r["response"] for r in rollouts_of(tmp_path, 1)
        }
        other = {
            (r["prompt_id"], r["sample_id"]): r["response"]
            for r in rollouts_of(plain, 1) + rollouts_of(plain, 2)
        }
        assert sum(responses[key] != other[key] for key in responses) > len(responses) / 2

    @pytest.mark.parametrize("key", ["top_k=1", "top_p=1e-6", "temperature=1e-4"])
    def test_feature_top_k_top_p_temperature_and_greedy(self, tmp_path, mesh, key):
        """Each setting at its extreme takes the likeliest token, as greedy validation does."""
        data = f"model.data.data_prefix.validation={tmp_path / 'train.jsonl'}"
        keys = [f"{SAMPLING}.{key}", BIASED, f"{VAL_SAMPLING}.use_greedy=true"]
        run(tmp_path, mesh, data, *keys, ONE_STEP, f"{RL}.val_check_interval=1")
        greedy = rollouts_of(tmp_path, 0, "validation")
        likeliest = {row["prompt"]: row["response"] for row in greedy}
        assert len(set(likeliest.values())) > 1
        for row in rollouts_of(tmp_path, 1):
            assert row["response"] == likeliest[row["prompt"]]

    def test_feature_repetition_penalty(self, tmp_path, mesh):
        """A strong penalty takes every token with a negative logit at most once.

        So fewer tokens come twice.
        """
        shares = []
        for penalty in (1, 100):
            (tmp_path / str(penalty)).mkdir()
            keys = [
                f"{SAMPLING}.repetition_penalty={penalty}",
                f"{ROLLOUT}.length_params.max_length=10",
                BIASED,
            ]
            run(tmp_path / str(penalty), mesh, *keys, ONE_STEP)
            texts = [
                row["prompt"] + row["response"] for row in rollouts_of(tmp_path / str(penalty), 1)
            ]
            shares.append(sum(len(text) - len(set(text)) for text in texts) / sum(map(len, texts)))
        assert shares[1] < 0.8 * shares[0]

    def test_feature_max_length(self, tmp_path, mesh):
        run(tmp_path, mesh, f"{ROLLOUT}.length_params.max_length=2", ONE_STEP)
        lengths = Counter(row["response_length"] for row in rollouts_of(tmp_path, 1))
        assert max(lengths) == 2 < MAX_LENGTH

    def test_feature_micro_batches_of_rollout_forward_and_validation(
        self, tmp_path, mesh, plain, monkeypatch
    ):
        sizes: dict[str, list[int]] = {"rollout": [], "validation": [], "passes": []}
        cut = actor_model.packed_micro_batches

        def spy_cut(ids, prompts, responses, size, *rest):
            sizes["passes"].append(size)
            return cut(ids, prompts, responses, size, *rest)

        monkeypatch.setattr(actor_model, "packed_micro_batches", spy_cut)
        keys = [
            "rollout_micro_batch_size=3",
            "forward_micro_batch_size=7",
            "val_rollout_micro_batch_size=2",
        ]
        config = tiny_config(
            tmp_path,
            *(f"{ROLLOUT}.{key}" for key in keys),
            "model.micro_batch_size=6",
            f"{RL}.val_check_interval=9",
        )
        with tiny_trainer(config, mesh) as trainer:
            infer = trainer.model.infer

            def spy(prompts, *args, validation=False):
                sizes["validation" if validation else "rollout"].append(len(prompts))
                return infer(prompts, *args, validation=validation)

            trainer.model.infer = spy  # type: ignore[method-assign]
            trainer.fit()
        assert sizes["rollout"] == [3, 1] * 2
        assert sizes["validation"] == [2, 1] * 2
        assert sizes["passes"] == [7, 6] * 2, "reference, update: the generator knows the policy's"
        losses = [line["train/actor_loss"] for line in metrics_of(tmp_path)[1:]]
        expected = [line["train/actor_loss"] for line in metrics_of(plain)[:2]]
        assert losses == pytest.approx(expected, abs=SAME)


class TestLoad:
    def test_feature_padding_to_a_fixed_length(self, tmp_path, mesh, plain):
        """Every pass without a cache has one shape, and results do not change."""
        with tiny_trainer(
            tiny_config(tmp_path, f"{RL}.rollout_batch_seq_length=15"), mesh
        ) as trainer:
            widths: set[int] = set()
            forward = trainer.model.lm.forward

            def spy(input_ids, position_ids=None, cache=None):
                if cache is None:
                    widths.add(input_ids.shape[1])
                return forward(input_ids, position_ids, cache)

            trainer.model.lm.forward = spy
            trainer.fit()
        assert widths == {14}, "the last token predicts nothing"
        lines = metrics_of(tmp_path)
        assert same_as(plain, lines)
        used = sum(3 + row["response_length"] for row in rollouts_of(tmp_path, 1))
        expected = 1 - used / (16 * 15)
        assert lines[0]["train/padding_fraction"] == pytest.approx(expected)

    @pytest.mark.slow
    def test_feature_padding_to_a_fixed_length_on_context_parallel_ranks(self, tmp_path, plain):
        """The positions of a rank depend on the padded length."""
        processes = TrainerProcesses()
        try:
            keys = [
                "model.context_parallel_size=2",
                f"{RL}.rollout_batch_seq_length=15",
                f"{RL}.max_epochs=2",
            ]
            processes.start(
                tmp_path,
                "trainer.devices=2",
                "model.data.data_prefix.train=" + str(plain / "train.jsonl"),
                *keys,
                ranks=2,
            )
            assert processes.wait() == 0, (tmp_path / "log").read_text()
        finally:
            processes.close()
        assert same_as(plain, metrics_of(tmp_path))
