"""NeMo-Aligner's defects, one test each: what this project does instead.

The numbers are those of docs.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import psutil
import pytest
import torch
from helpers.batches import (
    VOCAB_SIZE,
    actor_of,
    gradient_of,
    relative_difference,
    rows_of,
    sequences,
    whole_batch,
)
from helpers.errors import check_fault, raises_error
from helpers.models import tiny_llama_folder
from helpers.serve_toy_scorer import toy_score
from helpers.tiny_run import (
    compose,
    metrics_of,
    odd_share,
    rollouts_of,
    run,
    three_letters,
    tiny_config,
    tiny_overrides,
    tiny_trainer,
    weights,
    without_times,
)
from helpers.tiny_tokenizer import write_tiny_tokenizer
from helpers.toy_server import ToyServer, wait_for

from reinforce_rl.config.load import load_config
from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.finish_reasons import FINISH_STOP
from reinforce_rl.data.prompts import PromptDataset, PromptLoader
from reinforce_rl.data.sampler import PromptSampler
from reinforce_rl.data.tokenizer import TokenizerInfo, load_tokenizer
from reinforce_rl.errors import ConfigError, StoppedEarly
from reinforce_rl.rewards.base import STATUS_BAD_TOKEN, STATUS_OK, RewardRequest
from reinforce_rl.rewards.client import RemoteGPTRMClient
from reinforce_rl.rollout.local import LocalRollouts
from reinforce_rl.rollout.scoring import RolloutScorer
from reinforce_rl.runtime import stop as run_timer
from reinforce_rl.runtime.stop import RunTimer
from reinforce_rl.utils.job_time import JobTimes

RL = "trainer.reinforce"
ROLLOUT = "model.reinforce"
ONE_STEP = f"{RL}.max_steps=1"


def of_prompts(rows: list[dict]) -> dict[int, list[dict]]:
    groups: dict[int, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["prompt_id"], []).append(row)
    return groups


def loaders(num_prompts: int, step: int, ranks: int) -> list[PromptLoader]:
    prompts = [Prompt(i, f"prompt {i}", (i + 4,)) for i in range(num_prompts)]
    dataset = PromptDataset(prompts)
    samplers = [PromptSampler(num_prompts, step, seed=2, max_epochs=1) for _ in range(ranks)]
    return [PromptLoader(dataset, sampler, rank, ranks) for rank, sampler in enumerate(samplers)]


def test_defect_01_a_data_parallel_rank_computes_its_share_only(tmp_path, mesh):
    """Four prompts of three samples on two ranks.

    The shares are whole groups, and their gradients add up.
    """
    shares = [[prompt.id for prompt in next(loader)] for loader in loaders(4, 4, 2)]
    lengths = [len(share) for share in shares]
    assert lengths == [2, 2]
    assert set(shares[0]).isdisjoint(shares[1])
    folder = tiny_llama_folder(tmp_path / "model", vocab_size=VOCAB_SIZE)
    batch = whole_batch()
    total = sequences(10)

    def gradient(rows: list[int]) -> torch.Tensor:
        actor = actor_of(folder, mesh, with_reference=False)
        actor.get_loss_and_metrics(rows_of(batch, rows), total)
        return gradient_of(actor)

    of_ranks = [gradient([3 * group + i for group in share for i in range(3)]) for share in shares]
    assert relative_difference(of_ranks[0] + of_ranks[1], gradient(list(range(12)))) < 1e-5
    assert relative_difference(of_ranks[0], of_ranks[1]) > 0.1


def test_defect_02_every_prompt_once_an_epoch_through_resumes(tmp_path, mesh):
    """Ten prompts of four samples, four prompts a step, stopped after steps 1, 2 and 4."""
    for last in (1, 2, 4, -1):
        run(
            tmp_path,
            mesh,
            f"{RL}.max_epochs=2",
            f"{RL}.max_steps={last}",
            prompts=three_letters(10),
        )
    for steps in ((1, 2, 3), (4, 5, 6)):
        seen = Counter(row["prompt"] for step in steps for row in rollouts_of(tmp_path, step))
        assert seen == dict.fromkeys(three_letters(10), 4)


@pytest.mark.more
def test_defect_03_the_update_does_not_depend_on_micro_batches_and_padding(tmp_path, mesh):
    norms_and_weights = []
    for name, keys in {
        "one": ["model.micro_batch_size=1"],
        "all": ["model.micro_batch_size=16"],
        "tokens": ["model.tokens_per_micro_batch=30"],
        "padded": [f"{RL}.rollout_batch_seq_length=16"],
    }.items():
        (tmp_path / name).mkdir()
        config = tiny_config(tmp_path / name, *keys, ONE_STEP, "model.optim.eps=1e-3")
        with tiny_trainer(config, mesh) as trainer:
            trainer.fit()
            norms_and_weights.append(
                (metrics_of(tmp_path / name)[0]["train/grad_norm"], weights(trainer))
            )
    for norm, values in norms_and_weights[1:]:
        assert norm == pytest.approx(norms_and_weights[0][0], rel=1e-5)
        for a, b in zip(values, norms_and_weights[0][1], strict=True):
            assert torch.allclose(a, b, atol=1e-5)


def test_defect_04_no_beta_no_second_sample_and_empty_responses(tmp_path, mesh):
    (tmp_path / "no beta").mkdir()
    lines = run(tmp_path / "no beta", mesh, f"{RL}.initial_policy_kl_penalty=0")
    for line in lines:
        assert line["train/grad_norm"] > 0
        assert abs(line["train/init_policy_kl"]) < 1e-6

    too_small = "config.num_rollouts_per_prompt.too_small_for_estimator"
    with raises_error(too_small, f"{RL}.num_rollouts_per_prompt is 1", 2):
        tiny_config(tmp_path, f"{RL}.num_rollouts_per_prompt=1")
    alone = run(
        tmp_path,
        mesh,
        f"{RL}.num_rollouts_per_prompt=1",
        f"{RL}.advantage_estimator=none",
        ONE_STEP,
    )
    assert alone[0]["train/grad_norm"] > 0, (
        "an estimator that needs no second sample trains on something"
    )

    class FirstIsEmpty:
        is_exact = False

        def __init__(self, inner):
            self.inner = inner
            self.refit = inner.refit
            self.awake = inner.awake

        def generate(self, *args):
            completions = self.inner.generate(*args)
            lengths = completions.lengths.clone()
            tokens = completions.tokens.clone()
            lengths[0] = 0
            tokens[0] = 0
            finish_reasons = (FINISH_STOP, *completions.finish_reasons[1:])
            return replace(
                completions,
                lengths=lengths,
                tokens=tokens,
                finish_reasons=finish_reasons,
            )

    (tmp_path / "empty").mkdir()
    with tiny_trainer(tiny_config(tmp_path / "empty"), mesh) as trainer:
        trainer.model.generator = FirstIsEmpty(trainer.model.generator)
        trainer.fit()
        for parameter in weights(trainer):
            assert bool(parameter.isfinite().all())
    for line in metrics_of(tmp_path / "empty"):
        for value in line.values():
            assert value is not None


def test_defect_05_leave_one_out_counts_valid_samples_only(tmp_path, mesh):
    """No score for one sample of the first prompt, and for three of the second."""
    scores = iter([1.0, 2.0, 6.0, math.nan, math.nan, 5.0, math.nan, math.nan, *[1.0] * 100])
    run(tmp_path, mesh, f"{RL}.max_failed_fraction=1", ONE_STEP, rm=lambda ids: next(scores))
    first, second = list(of_prompts(rollouts_of(tmp_path, 1)).values())[:2]
    expected = [1 - 8 / 2, 2 - 7 / 2, 6 - 3 / 2, 0.0]
    advantages = [row["advantage"] for row in first]
    assert advantages == pytest.approx(expected, abs=1e-6)
    assert [row["advantage"] for row in second] == [0.0] * 4


def test_defect_06_equal_prompts_are_two_groups(tmp_path, mesh):
    run(tmp_path, mesh, ONE_STEP, prompts=["eta", "eta", "tea", "ate"])
    groups = of_prompts(rollouts_of(tmp_path, 1))
    equal = [rows for rows in groups.values() if rows[0]["prompt"] == "eta"]
    assert len(equal) == 2
    lengths = [len(rows) for rows in groups.values()]
    assert lengths == [4] * 4
    responses = [row["response"] for row in equal[0]]
    assert responses != [row["response"] for row in equal[1]], "each with its own noise"
    for rows in equal:
        for row in rows:
            others = sum(other["reward_with_kl"] for other in rows if other is not row) / 3
            assert row["baseline"] == pytest.approx(others, abs=1e-6)


def test_defect_07_never_silently_off_policy(tmp_path, mesh):
    (line,) = run(tmp_path, mesh, ONE_STEP)
    assert line["train/optimizer_steps"] == 1
    for keys in ([f"{RL}.reinforce_epochs=2"], ["model.global_batch_size=8"]):
        with raises_error("config.importance_ratio.missing_off_policy", f"{RL}.importance_ratio"):
            tiny_config(tmp_path, *keys)
    (tmp_path / "ratio").mkdir()
    (line,) = run(
        tmp_path / "ratio",
        mesh,
        ONE_STEP,
        f"{RL}.reinforce_epochs=2",
        f"{RL}.importance_ratio=sequence",
    )
    assert line["train/optimizer_steps"] == 2
    assert line["train/effective_sample_size"] < 1


def test_defect_08_log_probs_are_of_the_distribution_that_was_sampled_from(tmp_path, mesh):
    # Otherwise the trainer reuses the generator's log-probs, which equal themselves.
    recomputed = f"{RL}.generator_log_probs=false"
    config = tiny_config(tmp_path, f"{ROLLOUT}.sampling_params.temperature=0.5", recomputed)
    with tiny_trainer(config, mesh) as trainer:
        batch, _, _ = trainer.generate_rollouts()
    assert batch.log_probs is not None
    assert batch.generator_log_probs is not None
    assert batch.log_probs is not batch.generator_log_probs
    torch.testing.assert_close(batch.log_probs, batch.generator_log_probs, rtol=0, atol=1e-5)
    assert batch.init_log_probs is not None
    torch.testing.assert_close(batch.init_log_probs, batch.log_probs, rtol=0, atol=1e-5)
    for key in ("top_k=5", "top_p=0.9"):
        with raises_error("config.sampling_params.biased", f"sampling_params.{key}"):
            tiny_config(tmp_path, f"{ROLLOUT}.sampling_params.{key}")


def test_defect_09_state_is_in_a_file_and_a_resume_is_bit_exact(tmp_path, mesh):
    """The checkpoint's name has another step."""
    keys = [f"{RL}.max_epochs=2", f"{RL}.advantage_estimator=running_mean"]
    (tmp_path / "whole").mkdir()
    whole = run(tmp_path / "whole", mesh, *keys)
    run(tmp_path, mesh, *keys, f"{RL}.max_steps=2")
    folder = tmp_path / "run" / "checkpoints"
    trainer_state_file = folder / "step_00000002" / "trainer_state.json"
    assert json.loads(trainer_state_file.read_text())["step"] == 2
    (folder / "step_00000002").rename(folder / "step_00000000")
    (folder / "latest").write_text("step_00000000")
    parts = run(tmp_path, mesh, *keys)
    assert [without_times(line) for line in parts] == [without_times(line) for line in whole]
    for step in (1, 2, 3, 4):
        assert rollouts_of(tmp_path, step) == rollouts_of(tmp_path / "whole", step)


def test_defect_10_validation_has_its_own_set_and_sampling(tmp_path, mesh):
    """Greedy, on the three prompts of its file, for any sampling in training."""
    answers = []
    for name, keys in {
        "one": [f"{ROLLOUT}.num_rollout_samples=2", "model.seed=5"],
        "two": [f"{ROLLOUT}.sampling_params.temperature=3", f"{RL}.num_rollouts_per_prompt=6"],
    }.items():
        (tmp_path / name).mkdir()
        run(
            tmp_path / name,
            mesh,
            *keys,
            ONE_STEP,
            f"{RL}.val_check_interval=1",
            "model.optim.lr=1e-12",
        )
        rows_of_steps = [rollouts_of(tmp_path / name, step, "validation") for step in (0, 1)]
        answers += [[(row["prompt"], row["response"]) for row in rows] for rows in rows_of_steps]
    assert [prompt for prompt, _ in answers[0]] == three_letters(3)
    assert answers[0] == answers[1] == answers[2] == answers[3]


def test_defect_11_optional_back_ends_are_optional(tmp_path, mesh, monkeypatch):
    for name in (
        "tensorrt_llm",
        "pytriton",
        "tritonclient",
        "wandb",
        "tensorboard",
        "flask",
        "apex",
    ):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    assert len(run(tmp_path, mesh)) == 2


def test_defect_12_misconfigurations_are_reported_at_the_start_and_together(tmp_path):
    """There is no model yet, and nothing is written."""
    overrides = [
        *tiny_overrides(tmp_path),
        f"pretrained_checkpoint.restore_from_path={tmp_path / 'absent'}",
        "trainer.devices=3",
        "model.tensor_model_parallel_size=2",
        "model.global_batch_size=7",
        "model.optim.sched.name=WarmupHoldPolicy",
        f"exp_manager.explicit_log_dir={tmp_path / 'nothing'}",
    ]
    with pytest.raises(ConfigError) as raised:
        load_config(compose(*overrides))
    faults = raised.value.faults
    assert len(faults) == 4
    check_fault(faults, "config.restore_from_path.no_model", tmp_path / "absent")
    of_ranks = "config.parallel_sizes.not_a_divisor_of_ranks"
    check_fault(faults, of_ranks, "model.tensor_model_parallel_size is 2", "1 x 3")
    of_step = "config.global_batch_size.not_a_divisor_of_step"
    check_fault(faults, of_step, "model.global_batch_size is 7")
    check_fault(faults, "config.value.not_a_choice", "'WarmupHoldPolicy'")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.more
def test_defect_13_the_reward_server_outlives_bad_requests_and_ends_when_told(tmp_path):
    """Readiness, bad samples that fail alone, tokenizers, clean stops, and deadlines."""
    pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")
    server = ToyServer(tmp_path).start()
    client = RemoteGPTRMClient(port=server.port, deadline_seconds=20, first_backoff_seconds=0.02)
    try:
        assert client.wait_until_ready(60).name == "reward_model"
        other = TokenizerInfo.from_tokenizer(
            load_tokenizer(write_tiny_tokenizer(tmp_path / "other", vocab_size=64))
        )
        with pytest.raises(ConfigError, match="vocabulary size 64 here, 128 there"):
            client.check_compatible(other, 64, "tokens")
        tokens = torch.tensor([[5, 6, 7], [5, 999, 7], [8, 9, 0]])
        for _ in range(2):  # the bad request stalls nothing
            request = RewardRequest(tokens, torch.tensor([3, 3, 2]), ("",) * 3, ("",) * 3)
            rewards = client.infer_rm(request).result()
            assert rewards.status.tolist() == [STATUS_OK, STATUS_BAD_TOKEN, STATUS_OK]
            expected = [toy_score([5, 6, 7]), toy_score([8, 9])]
            assert rewards.values.tolist()[::2] == pytest.approx(expected)
            assert math.isnan(rewards.values[1])
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert wait_for(lambda: not server.left_behind())
        late = RemoteGPTRMClient(port=server.port, deadline_seconds=1, first_backoff_seconds=0.02)
        with raises_error("reward_server.server.no_answer", "1 s"):
            late.infer_rm(
                RewardRequest(tokens, torch.tensor([3, 3, 2]), ("",) * 3, ("",) * 3)
            ).result()
        late.close()
    finally:
        client.close()
        server.close()


def test_defect_14_shares_are_fixed_and_ranks_may_be_idle(tmp_path, mesh):
    """Ten prompts in steps of four on four ranks: the last step has two, and two ranks get none."""
    shares = [list(map(list, zip(*loaders(10, 4, 4), strict=True))) for _ in range(2)]
    assert shares[0] == shares[1]
    lengths = [len(step) for step in shares[0]]
    assert lengths == [4, 4, 4]
    assert sorted(len(share) for share in shares[0][-1]) == [0, 0, 1, 1]
    ids = sorted(prompt.id for step in shares[0] for prompt in chain(*step))
    assert ids == list(range(10))

    with tiny_trainer(tiny_config(tmp_path, "model.optim.weight_decay=0"), mesh) as trainer:
        # a whole idle step
        before = weights(trainer)
        pending = LocalRollouts(trainer.rollout_context).sample([], 4, step=1)
        batch = RolloutScorer(trainer.rollout_context).score(pending, "nothing")
        where = (batch.sequences, batch.prompt_lengths, batch.response_lengths)
        log_probs = trainer.model.get_inference_log_probs(*where)
        batch = replace(
            batch,
            log_probs=log_probs,
            init_log_probs=trainer.model.get_init_policy_logprobs(*where),
        )
        data, _ = trainer.generate_reinforce_data(batch)
        assert trainer.run_training(data)["grad_norm"] == 0.0
        for a, b in zip(before, weights(trainer), strict=True):
            assert torch.equal(a, b)


def test_defect_15_the_schedule_is_as_long_as_the_run(tmp_path, mesh):
    """Ten prompts, two an optimizer step, two epochs, and no max_steps.

    An epoch has 2 + 2 + 1 optimizer steps.
    """
    keys = ["model.global_batch_size=8", f"{RL}.importance_ratio=token", f"{RL}.max_epochs=2"]
    sched = ["model.optim.sched.name=CosineAnnealing", "model.optim.sched.min_lr=0.001"]
    lines = run(tmp_path, mesh, *keys, *sched, prompts=three_letters(10))
    updates = [2, 4, 5, 7, 9, 10]  # done at the end of each step
    expected = [0.001 + 0.009 * (1 + math.cos(math.pi * done / 10)) / 2 for done in updates]
    assert [line["train/lr"] for line in lines] == pytest.approx(expected)
    assert lines[-1]["train/lr"] == pytest.approx(0.001)
    assert lines[-2]["train/lr"] > 0.001


def test_defect_16_the_time_counts_from_the_start_of_the_process_and_across_epochs(
    tmp_path, mesh, monkeypatch
):
    """12 s of imports and loading, 10 s a step.

    A fifth step does not fit: with a save and the margin it is 26.5 s.
    """
    started = psutil.Process().create_time()
    assert RunTimer(3600.0, JobTimes()).seconds_left() == pytest.approx(
        started + 3600 - time.time(), abs=5
    )
    config = tiny_config(tmp_path, f"{RL}.max_epochs=9", "exp_manager.max_time_per_run='1:15'")
    with tiny_trainer(config, mesh) as trainer:
        monkeypatch.setattr(
            run_timer, "time", SimpleNamespace(time=lambda: started + 12 + 10 * trainer.step)
        )
        with raises_error("run.time.used_up") as error:
            trainer.fit()
    assert isinstance(error.value, StoppedEarly)
    assert trainer.step == 4


def test_defect_17_all_samples_of_a_prompt_are_one_call_and_one_prefill(tmp_path, mesh):
    prefills = []
    calls = []
    config = tiny_config(tmp_path, ONE_STEP, f"{RL}.num_rollouts_per_prompt=5")
    with tiny_trainer(config, mesh, odd_share) as trainer:
        lm = trainer.model.lm
        engine = trainer.model.generator
        forward = lm.forward
        generate = engine.generate

        def spy_forward(input_ids, position_ids=None, cache=None, **rest):
            if cache is not None and input_ids.shape[1] > 1:
                prefills.append(tuple(input_ids.shape))
            return forward(input_ids, position_ids, cache, **rest)

        def spy_generate(prompts, num_samples, *rest):
            calls.append((len(prompts), num_samples))
            return generate(prompts, num_samples, *rest)

        lm.forward = spy_forward
        engine.generate = spy_generate
        trainer.fit()
    assert calls == [(3, 5), (1, 5)]
    assert prefills == [(3, 3), (1, 3)]


@pytest.mark.parametrize("option", ["keep", "drop", "mask"])
def test_defect_18_truncated_samples_are_in_or_out_by_an_option(tmp_path, mesh, option):
    (line,) = run(tmp_path, mesh, f"{RL}.truncated_samples={option}", ONE_STEP)
    rows = rollouts_of(tmp_path, 1)
    cut = [row for row in rows if row["finish_reason"] == "length"]
    assert 0 < len(cut) < len(rows)
    assert any(row["advantage"] != 0 for row in cut) == (option == "keep")
    valid = {row["valid"] for row in cut}
    assert valid == {option != "drop"}
    share = 1.0 if option == "keep" else 1 - len(cut) / len(rows)
    assert line["train/fraction_of_samples_trained"] == pytest.approx(share, abs=1e-6)


def test_there_is_a_test_of_each_of_the_eighteen():
    names = [name for name in globals() if name.startswith("test_defect_")]
    assert sorted(int(name.split("_")[2]) for name in names) == list(range(1, 19))
