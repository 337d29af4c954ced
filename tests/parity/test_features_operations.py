"""NeMo-Aligner's features, each through its config key: reward client, data, operations, names."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import sys
import threading
import time
from collections import Counter
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from helpers.errors import raises_error
from helpers.fake_reward_server import FakeRewardServer, answer, describe
from helpers.rewards import FunctionReward, ReadyRewards
from helpers.tiny_run import (
    PROMPT_TOKENS,
    compose,
    metrics_of,
    odd_share,
    rollouts_of,
    run,
    three_letters,
    tiny_config,
    tiny_overrides,
    tiny_trainer,
    without_times,
    write_prompts,
)
from helpers.toy_server import free_port

from reinforce_rl.config.actor import ReinforceConfig
from reinforce_rl.config.load import load_config
from reinforce_rl.data.tokenizer import TokenizerInfo, load_tokenizer
from reinforce_rl.errors import StoppedEarly
from reinforce_rl.megatron.checkpointer import latest_checkpoint
from reinforce_rl.monitoring.run import SilentMonitor
from reinforce_rl.rewards.base import RewardRequest
from reinforce_rl.rewards.sources import connect_to_reward_servers
from reinforce_rl.rollout.local import LocalRollouts
from reinforce_rl.rollout.prompts import build_datasets
from reinforce_rl.runtime.stop import RunTimer, TimeBudget
from reinforce_rl.utils.job_time import JobTimes

RL = "trainer.reinforce"
ONE_STEP = f"{RL}.max_steps=1"
ODD = FunctionReward(odd_share, PROMPT_TOKENS)


def checkpoints(folder: Path) -> list[int]:
    return sorted(
        int(path.name.split("_")[1]) for path in (folder / "run" / "checkpoints").glob("step_*")
    )


class TestRewardClient:
    @pytest.fixture
    def server(self, tmp_path):
        tiny_overrides(tmp_path)
        answers = [answer([1.0, 2.0], [0, 0])]
        with FakeRewardServer(answers) as server:
            tokenizer = TokenizerInfo.from_tokenizer(load_tokenizer(tmp_path / "model"))
            server.info = describe(tokenizer=tokenizer, vocab_size=32)
            yield server

    def connect(self, folder: Path, mesh, *overrides: str):
        pytest.importorskip("tritonclient.http")
        config = tiny_config(folder, *(f"remote_rm.{key}" for key in overrides))
        tokenizer = load_tokenizer(config.pretrained_checkpoint.restore_from_path)
        return connect_to_reward_servers(config, mesh, tokenizer, SilentMonitor(folder))

    def test_feature_scoring_overlaps_with_generation_and_log_probs(self, tmp_path, mesh):
        """The first batch is scored while the second is generated, and both during log-probs."""
        log: list[str] = []

        class Source:
            close = ODD.close

            def infer_rm(self, request: RewardRequest):
                log.append("ask")
                ready = ODD.infer_rm(request)
                return SimpleNamespace(result=lambda: log.append("wait") or ready.result())

        with tiny_trainer(tiny_config(tmp_path, ONE_STEP), mesh, Source()) as trainer:
            model = trainer.model
            for name in ("infer", "get_inference_log_probs", "get_init_policy_logprobs"):
                call = getattr(model, name)

                def spy(*args, name=name, call=call, **options):
                    log.append(name)
                    return call(*args, **options)

                setattr(model, name, spy)
            trainer.fit()
        # the latter serves the reference too
        passes = ["get_init_policy_logprobs", "get_inference_log_probs"]
        assert log == ["infer", "ask", "infer", "ask", *passes, "wait", "wait"]

    def test_feature_server_on_another_host(self, tmp_path, mesh, server):
        """The address and port are the configuration's.

        Nobody listens on the loopback's second address.
        """
        here = f"reward_model.port={server.port}"
        rm = self.connect(tmp_path, mesh, here, "reward_model.ip=127.0.0.1")
        request = RewardRequest(*request_of_two(), ("", ""), ("", ""))
        assert rm.infer_rm(request).result().values.tolist() == [1.0, 2.0]
        rm.close()
        with raises_error("reward_server.server.no_answer", "127.0.0.2"):
            self.connect(
                tmp_path, mesh, here, "reward_model.ip=127.0.0.2", "ready_timeout_seconds=0.2"
            )

    def test_feature_waits_until_the_server_is_ready(self, tmp_path, mesh, server):
        port = free_port()
        started: list[FakeRewardServer] = []

        def start() -> None:
            time.sleep(0.5)
            started.append(FakeRewardServer([answer([1.0], [0])], port=port))
            started[0].info = server.info

        thread = threading.Thread(target=start)
        thread.start()
        try:
            self.connect(
                tmp_path, mesh, f"reward_model.port={port}", "ready_timeout_seconds=60"
            ).close()
        finally:
            thread.join()
            started[0].close()

    def test_feature_requests_padded_to_a_fixed_length(self, tmp_path, mesh, server, monkeypatch):
        triton = pytest.importorskip("tritonclient.http")
        shapes: list[tuple[int, ...]] = []
        send = triton.InferInput.set_data_from_numpy
        monkeypatch.setattr(
            triton.InferInput,
            "set_data_from_numpy",
            lambda self, data: shapes.append(data.shape) or send(self, data),
        )
        for options, width in (([], 3), (["pad_to_length=16"], 16)):
            shapes.clear()
            rm = self.connect(tmp_path, mesh, f"reward_model.port={server.port}", *options)
            request = RewardRequest(*request_of_two(), ("", ""), ("", ""))
            rm.infer_rm(request).result()
            rm.close()
            assert (2, width) in shapes


def request_of_two():
    import torch

    return torch.full((2, 3), 5), torch.tensor([3, 2])


class TestData:
    def test_feature_jsonl_of_text(self, tmp_path, mesh):
        path = tmp_path / "nemo.jsonl"
        path.write_text('{"text": "eta"}\n{"text": "tea"}\n')
        run(tmp_path, mesh, f"model.data.data_prefix.train=[{path}]")
        prompts = {row["prompt"] for row in rollouts_of(tmp_path, 1)}
        assert prompts == {"eta", "tea"}

    def test_feature_train_validation_and_test(self, tmp_path, mesh):
        """The test set is evaluated once, after the last step.

        It affects neither training nor checkpoints.
        """
        test = write_prompts(tmp_path / "test.jsonl", ["sin", "tan"])
        keys = [f"model.data.data_prefix.test={test}", f"{RL}.val_check_interval=1"]
        run(tmp_path, mesh, *keys, ONE_STEP)
        lines = run(tmp_path, mesh, *keys)
        assert [
            name for line in lines for name in ("val/rewards", "test/rewards") if name in line
        ] == (["val/rewards", "val/rewards", "test/rewards", "val/rewards", "test/rewards"])
        steps = [line["step"] for line in lines]
        assert steps == [0, 1, 2]
        rows = rollouts_of(tmp_path, 2, "test")
        prompts = [row["prompt"] for row in rows]
        assert prompts == ["sin", "tan"]
        expected = sum(row["reward"] for row in rows) / 2
        assert lines[2]["test/rewards"] == pytest.approx(expected)

    def test_feature_blending_of_files_by_weight(self, tmp_path, mesh):
        """Six of eight draws use a file with two prompts; a stop in between changes nothing."""
        few = write_prompts(tmp_path / "few.jsonl", ["sin", "tan"])
        many = write_prompts(tmp_path / "many.jsonl", three_letters(6))
        keys = [f"model.data.data_prefix.train=[3,{few},1,{many}]", f"{RL}.max_epochs=3"]
        (tmp_path / "whole").mkdir()
        whole = run(tmp_path / "whole", mesh, *keys)
        run(tmp_path, mesh, *keys, f"{RL}.max_steps=3")
        lines = run(tmp_path, mesh, *keys)
        assert [without_times(line) for line in lines] == [without_times(line) for line in whole]
        draws: list[str] = []
        for step in range(1, 7):
            prompts = {row["prompt_id"]: row["prompt"] for row in rollouts_of(tmp_path, step)}
            assert len(prompts) == 4, "a prompt that comes twice in a step is two groups"
            draws += prompts.values()
        counts = Counter(draws)
        assert counts["sin"] == counts["tan"] == 9, "three quarters of 24 draws"
        expected = [1] * 6 + [9] * 2
        assert sorted(counts.values()) == expected, "one pass over the other file, in three epochs"

    @pytest.mark.parametrize("too_long", ["refuse", "skip"])
    def test_feature_limit_on_prompt_length(self, tmp_path, mesh, too_long):
        """16 tokens less 5 for the response."""
        config = tiny_config(
            tmp_path, f"model.data.too_long={too_long}", prompts=["a" * 11, "a" * 12]
        )
        tokenizer = load_tokenizer(config.pretrained_checkpoint.restore_from_path)
        if too_long == "refuse":
            values = ("train.jsonl:2: ", "12 tokens", "11, ")
            with raises_error("data.prompt.too_long", *values):
                build_datasets(config, tokenizer)
        else:
            texts = [prompt.text for prompt in build_datasets(config, tokenizer).train]
            assert texts == ["a" * 11]


class FakeWandb(ModuleType):
    """The part of wandb that the logger calls."""

    Error = RuntimeError

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.started: dict = {}
        self.logged: dict[int, dict] = {}
        self.ended: list[int] = []

    def init(self, **options):
        self.started = options
        log = lambda values, step: self.logged.setdefault(step, {}).update(values)  # noqa: E731
        return SimpleNamespace(
            id="abc", log=log, finish=lambda exit_code: self.ended.append(exit_code)
        )

    Settings = staticmethod(lambda **options: options)
    Table = staticmethod(lambda columns, data, allow_mixed_types: (columns, data))


class TestOperations:
    def test_feature_hydra_overrides(self, tmp_path):
        config = load_config(
            compose(*tiny_overrides(tmp_path), "model.micro_batch_size=6", "algorithm=nemo_aligner")
        )
        assert config.model.micro_batch_size == config.model.reinforce.forward_micro_batch_size == 6
        assert config.trainer.reinforce.use_absolute_kl
        assert config.trainer.reinforce.kl_reduction == "mean"

    def test_feature_wandb_with_sample_tables(self, tmp_path, mesh, monkeypatch):
        wandb = FakeWandb()
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        kwargs = [
            f"exp_manager.wandb_logger_kwargs.{key}" for key in ("project=aligning", "mode=offline")
        ]
        keys = [
            "exp_manager.create_wandb_logger=true",
            "exp_manager.name=first",
            *kwargs,
            f"{RL}.val_check_interval=1",
        ]
        lines = run(tmp_path, mesh, *keys)
        assert [wandb.started[key] for key in ("project", "name", "mode")] == [
            "aligning",
            "first",
            "offline",
        ]
        assert wandb.ended == [0]
        assert sorted(wandb.logged) == [0, 1, 2]
        assert wandb.logged[2]["train/rewards"] == lines[2]["train/rewards"]
        columns, data = wandb.logged[2]["validation"]
        assert [row[columns.index("prompt")] for row in data] == three_letters(3)

    def test_feature_tensorboard_without_doubled_steps(self, tmp_path, mesh):
        """A run ends with a checkpoint of step 2 and step 3 in its files.

        The steps are as TensorBoard shows them.
        """
        reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        keys = [
            "exp_manager.create_tensorboard_logger=true",
            f"{RL}.max_epochs=2",
            f"{RL}.val_check_interval=2",
        ]
        run(tmp_path, mesh, *keys, f"{RL}.max_steps=2")
        with tiny_trainer(tiny_config(tmp_path, *keys), mesh) as trainer:
            trainer.save = lambda **_: None  # type: ignore[method-assign]
            trainer.run_timer = StopsAfter(1)
            with pytest.raises(StoppedEarly):
                trainer.fit()
        assert metrics_of(tmp_path)[-1]["step"] == 3
        lines = run(tmp_path, mesh, *keys)
        events = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
        events.Reload()
        scalars = {
            tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]
        }
        steps = [e.step for e in events.Scalars("train/rewards")]
        assert steps == [1, 2, 3, 4]
        assert [e.step for e in events.Scalars("val/rewards")] == [0, 2, 4]
        names = [
            name
            for name in lines[-1]
            if name not in ("step", "time") and lines[-1][name] is not None
        ]
        expected = {name: lines[-1][name] for name in names}
        assert {name: scalars[name][4] for name in names} == pytest.approx(expected)

    def test_feature_sample_tables_phase_timers_and_metrics_with_their_names(self, tmp_path, mesh):
        lines = run(tmp_path, mesh, f"{RL}.val_check_interval=2")
        metrics = (
            "rewards rewards_with_kl init_policy_kl baseline actor_loss response_lengths "
            "prompt_lengths "
            "fraction_of_samples_properly_ended grad_norm lr"
        )
        timers = "generate logprobs init_logprobs reward_wait train_time"
        names = [f"train/{name}" for name in metrics.split()] + [
            f"timers/{name}" for name in timers.split()
        ]
        for line in lines[1:]:
            assert [name for name in names if not math.isfinite(line[name])] == []
        rows = rollouts_of(tmp_path, 2)
        answered = rollouts_of(tmp_path, 2, "validation")
        assert len(rows) == 16
        assert len(answered) == 3
        for row in rows + answered:
            assert {"prompt", "response", "reward", "finish_reason"} <= row.keys()
        # The names that a reward source must not have are listed where torch is not imported.
        from reinforce_rl.config.rules import REWARD_METRICS

        assert {name[6:] for name in lines[1] if name.startswith("train/rewards_")} == set(
            REWARD_METRICS
        )

    def test_feature_interval_top_k_last_and_final_checkpoints(self, tmp_path, mesh):
        """Ten steps; the validation of step 4 is the best."""
        values = {2: 1.0, 4: 9.0, 6: 3.0, 8: 2.0, 10: 1.0}
        saving = "exp_manager.checkpoint_callback_params"
        keys = [f"{RL}.max_epochs=5", f"{RL}.val_check_interval=2", f"{RL}.save_interval=3"]
        config = tiny_config(tmp_path, *keys, f"{saving}.keep_best=1", f"{saving}.keep_last=2")
        source = FunctionReward(odd_share, PROMPT_TOKENS)
        with tiny_trainer(config, mesh, source) as trainer:
            evaluate = trainer.val_dataloader

            class Validation:
                """Sets the score of a validation; training scores are unchanged."""

                def infer_rm(self, request: RewardRequest) -> ReadyRewards:
                    rewards = source.infer_rm(request).rewards
                    known = values.get(trainer.step) if len(request.lengths) == 3 else None
                    return ReadyRewards(
                        rewards
                        if known is None
                        else dataclasses.replace(rewards, values=rewards.values * 0 + known)
                    )

            assert evaluate is not None
            context = dataclasses.replace(trainer.rollout_context, rm=Validation())
            trainer.rollouts = LocalRollouts(context)
            trainer.fit()
        assert [
            line["val/rewards"] for line in metrics_of(tmp_path) if line["step"] in values
        ] == list(values.values())
        assert checkpoints(tmp_path) == [4, 9, 10], (
            "the best, the last of the interval, the final one"
        )

    def test_feature_auto_resume(self, tmp_path, mesh):
        run(tmp_path, mesh, f"{RL}.max_epochs=2", f"{RL}.max_steps=3")
        steps = [line["step"] for line in run(tmp_path, mesh, f"{RL}.max_epochs=2")]
        assert steps == [1, 2, 3, 4]
        with raises_error("metrics.file.of_another_run", "step 4"):
            run(tmp_path, mesh, "exp_manager.resume_if_exists=false")

    def test_feature_timed_exit_with_validation_and_save(self, tmp_path, mesh):
        keys = [f"{RL}.max_epochs=4", f"{RL}.val_check_interval=4", f"{RL}.save_interval=0"]
        with tiny_trainer(tiny_config(tmp_path, *keys), mesh) as trainer:
            trainer.run_timer = StopsAfter(3)
            with pytest.raises(StoppedEarly):
                trainer.fit()
        checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
        assert checkpoint is not None
        assert checkpoint.trainer_state["step"] == 2
        steps = [line["step"] for line in metrics_of(tmp_path) if "val/rewards" in line]
        assert steps == [0, 2]
        lines = run(tmp_path, mesh, *keys)
        assert [line["step"] for line in lines] == list(range(9))
        assert [line["step"] for line in lines if "val/rewards" in line] == [0, 2, 4, 8]


class StopsAfter(RunTimer):
    """Has time for this many steps."""

    def __init__(self, steps: int):
        super().__init__(None, JobTimes())
        self._left = steps

    def time_budget(self, **due: bool) -> TimeBudget:
        self._left -= 1
        return TimeBudget("the time of this run is used up" if self._left < 0 else None)


NAMES = {
    "trainer.reinforce.ReinforceTrainer": ["fit", "generate_rollouts", "generate_reinforce_data"],
    "policy.model.MegatronGPTReinforceActorModel": [
        "infer",
        "get_inference_log_probs",
        "get_init_policy_logprobs",
        "get_loss_and_metrics",
    ],
    "rewards.client.RemoteGPTRMClient": ["infer_rm"],
    "data.prompts.build_train_valid_test_rlhf_datasets": [],
    "data.prompts.DefaultBatchIterator": [],
}


@pytest.mark.parametrize("path", NAMES)
def test_feature_names_of_classes_and_functions(path):
    module, name = path.rsplit(".", 1)
    named = getattr(importlib.import_module(f"reinforce_rl.{module}"), name)
    assert [method for method in NAMES[path] if not callable(getattr(named, method))] == []
    if name == "ReinforceTrainer":
        arguments = (
            "cfg model optimizer scheduler train_dataloader_builder val_dataloader_builder "
            "collate_fn rm "
            "batch_iterator_cls logger ckpt_callback run_timer"
        )
        *of_nemo_aligner, services = inspect.signature(named).parameters.values()
        assert [parameter.name for parameter in of_nemo_aligner] == arguments.split()
        for parameter in of_nemo_aligner:
            assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            assert parameter.default is inspect.Parameter.empty
        assert services.name == "services"
        assert services.kind is inspect.Parameter.KEYWORD_ONLY
        assert services.default is None


def test_feature_names_of_configuration_keys():
    keys = (
        "max_epochs max_steps val_check_interval save_interval gradient_clip_val "
        "initial_policy_kl_penalty "
        "use_absolute_kl num_rollouts_per_prompt reinforce_epochs discount_factor"
    )
    assert set(keys.split()) <= ReinforceConfig.model_fields.keys()
