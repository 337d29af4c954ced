"""Generation by TensorRT-LLM: a fake has its signatures, and computes with this model."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import vllm_engine
from helpers.engine_fake import PACKAGE, forget_fake, in_small_buckets, install_fake
from helpers.errors import raises_error
from helpers.models import tiny_llama_folder
from helpers.ranks import call_on_ranks, one_group
from helpers.tiny_run import (
    compose,
    however_cut,
    largest_difference,
    metrics_of,
    rollouts_of,
    run,
    tiny_config,
    tiny_overrides,
    tiny_trainer,
)
from helpers.tiny_tokenizer import write_tiny_tokenizer
from safetensors.torch import load_file

from reinforce_rl.config.load import load_config
from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.finish_reasons import FINISH_LENGTH, FINISH_OUTSIDE, FINISH_STOP
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.engine import Answer
from reinforce_rl.generation.engine.generator import requests_of
from reinforce_rl.megatron.checkpointer import latest_checkpoint
from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.mesh import parallel_mesh

ENGINE = ("generation=tensorrt_llm", "engine.weight_bucket_megabytes=1")
OF_RUNS = (
    "trainer.reinforce.val_check_interval=2",
    "trainer.reinforce.initial_policy_kl_penalty=0",
)
LAYOUTS = {
    "tp2": ("tensor_model_parallel_size", (2, 1, 1)),
    "pp2": ("pipeline_model_parallel_size", (1, 2, 1)),
    "cp2": ("context_parallel_size", (1, 1, 2)),
}
PROMPTS = [Prompt(7, "tea", (6, 7, 8)), Prompt(9, "to", (6, 9))]
PARAMS = SamplingParams(max_length=5, stop_token_ids=(2, 5))


def generator_of(folder: Path, mesh, *overrides: str):
    """Return the configured generator on the tiny model of a run's folder."""
    _, generator = vllm_engine.generator_of(folder, mesh, *ENGINE, *overrides)
    return generator


def train_with_engine(folder: Path, mesh, *overrides: str) -> None:
    """Train the model of a folder and export it to the folder `exported`."""
    with tiny_trainer(tiny_config(folder, *OF_RUNS, *overrides), mesh) as trainer:
        in_small_buckets(trainer.model.generator)
        trainer.fit()
        trainer.model.export(folder / "model", folder / "exported")
        trainer.model.generator.close()


def train_at_layouts(folder: Path) -> None:
    with one_group():
        for name, (key, layout) in LAYOUTS.items():
            install_fake(folder / name / "engine", rank=torch.distributed.get_rank())
            overrides = ("generation=tensorrt_llm", "trainer.devices=2", f"model.{key}=2")
            with parallel_mesh(*layout) as mesh:
                train_with_engine(folder / name, mesh, *overrides)


def calls_of(folder: Path) -> list[str]:
    return [line.split(" ")[0] for line in (folder / "calls.txt").read_text().splitlines()]


def draw(engine):
    """Draw two samples of each prompt."""
    with engine.awake():
        return engine.generate(PROMPTS, 2, PARAMS, seed=3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, mesh):
    """A folder for runs of one model; it contains a run with the native engine."""
    folder = tmp_path_factory.mktemp("runs")
    model = folder / "model"
    tiny_llama_folder(
        model, vocab_size=32, layers=2, hidden=16, ffn=32, max_positions=16, tied=False
    )
    for name in ("native", "tp1", "dies", "tp2", "pp2", "cp2"):
        (folder / name).mkdir()
        (folder / name / "model").symlink_to(model)
    run(folder / "native", mesh, *OF_RUNS)
    return folder


@pytest.mark.more
class TestRun:
    """The trainer with the fake engine against the trainer with the native engine."""

    def check(self, folder: Path, name: str) -> None:
        """Compare metrics and responses with the native engine's.

        The engine must have received the trained weights.
        """
        metrics = metrics_of(folder / name)
        expected = metrics_of(folder / "native")
        assert len(metrics) == len(expected) > 2
        for line, other in zip(metrics, expected, strict=True):
            assert largest_difference(however_cut(line), however_cut(other)) < 1e-4
        for step in (1, 2):
            rows = rollouts_of(folder / name, step)
            others = rollouts_of(folder / "native", step)
            responses = [row["response"] for row in rows]
            assert responses == [row["response"] for row in others]

        given = folder / name / "engine"
        names = json.loads((given / "names_0.json").read_text())
        assert names == list(dict.fromkeys(names))
        expected = HFFolder(folder / "model")._entries.keys()
        assert set(names) == expected
        updates = len(list(given.glob("names_*")))
        first = load_file(given / "weights_0.safetensors")
        last = load_file(given / f"weights_{updates - 1}.safetensors")
        start, end = (
            load_file(path / "model.safetensors")
            for path in (folder / "model", folder / name / "exported")
        )
        for received, held in ((first, start), (last, end)):
            assert received.keys() == held.keys()
            for key in held:
                assert torch.equal(received[key], held[key])
        assert not torch.equal(first[names[0]], last[names[0]])

    def test_on_one_rank(self, runs, mesh, fake_engine):
        calls = self.run(runs, "tp1", mesh, fake_engine)
        # It releases its memory each time that it sleeps, and its weights come in several buckets.
        assert calls.count("AsyncLLM.release") == calls.count("AsyncLLM.resume") // 2 + 1
        assert calls.count("WorkerExtension.update_weights") > 3 * calls.count("AsyncLLM.release")
        assert "BaseLLM.shutdown" in calls

    @pytest.mark.slow
    def test_an_engine_that_dies_is_restarted_with_the_present_weights(
        self, runs, mesh, fake_engine
    ):
        """After the first step; its validation and prompts were 3 + 16 requests."""
        calls = self.run(
            runs,
            "dies",
            mesh,
            fake_engine,
            fault="die",
            after=25,
        )
        assert calls.count("AsyncLLM.setup_async") == 2

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_on_two_ranks(self, runs):
        """With TP=2 the engine has a worker on each device; it uses neither PP=2 nor CP=2."""
        call_on_ranks(train_at_layouts, 2, runs, timeout=600)
        for name in LAYOUTS:
            self.check(runs, name)

    def run(self, folder: Path, name: str, mesh, fake_engine, **options: object) -> list[str]:
        """Return the calls of a successful run on one rank."""
        given = fake_engine(folder=folder / name / "engine", **options)
        train_with_engine(folder / name, mesh, *ENGINE)
        self.check(folder, name)
        return calls_of(given)


@pytest.mark.more
class TestContract:
    def test_a_call_that_drifts_is_refused(self, tmp_path, mesh, fake_engine):
        record = Path(__file__).with_name("tensorrt_llm_signatures.json")
        signatures = json.loads(record.read_text())
        for parameter in signatures["signatures"]["SamplingParams"]["parameters"]:
            if parameter["name"] == "seed":
                parameter["name"] = "random_seed"
        drifted = tmp_path / "drifted.json"
        drifted.write_text(json.dumps(signatures))
        fake_engine(model="scripted", signatures=str(drifted))
        engine = generator_of(tmp_path, mesh)
        unexpected = ("SamplingParams: got an unexpected keyword argument 'seed'",)
        with raises_error("generation.engine.failed_again", *unexpected):
            draw(engine)
        engine.close()

    def test_every_recorded_call_is_made_or_read(self, tmp_path, mesh, fake_engine):
        given = fake_engine(model="scripted", fault="lost")
        engine = generator_of(tmp_path, mesh, "engine.request_timeout_seconds=8")
        for _ in range(2):
            draw(engine)
        engine.close()
        recorded = json.loads(Path(__file__).with_name("tensorrt_llm_signatures.json").read_text())[
            "signatures"
        ]
        # Called indirectly: collective_rpc and the engine's own await.
        behind = {
            "RayGPUWorker.sleep",
            "RayGPUWorker.wakeup",
            "RayWorkerWrapper.report_device_id",
            "GenerationResult.aresult",
        }
        assert set(calls_of(given)) == recorded.keys() - behind

    def test_nothing_of_it_is_imported_in_the_trainer(self, tmp_path, mesh, fake_engine):
        fake_engine(model="scripted")
        forget_fake()
        engine = generator_of(tmp_path, mesh)
        with engine.awake():
            engine.generate(PROMPTS, 1, PARAMS, seed=3)
        engine.close()
        assert "tensorrt_llm" not in sys.modules


@pytest.mark.more
class TestStart:
    """Arguments of the engine, checked against each version's signatures."""

    def arguments_of(
        self, folder: Path, mesh, fake_engine, version: str, *overrides: str
    ) -> dict[str, dict[str, str]]:
        given = fake_engine(model="scripted", version=version)
        engine = generator_of(folder, mesh, *overrides)
        for _ in range(2):
            assert draw(engine).lengths.tolist() == [3] * 4
        engine.close()
        return json.loads((given / "arguments.json").read_text())

    @pytest.mark.parametrize("version", ["1.2", "1.3"])
    def test_graphs_cache_and_scheduler_are_for_the_whole_batch(
        self, tmp_path, mesh, fake_engine, version
    ):
        arguments = self.arguments_of(
            tmp_path, mesh, fake_engine, version, "engine.max_batch_size=48"
        )
        # Without padded sizes they would be 1 to 31, 32, 64 and 128 (llm_args.py, CudaGraphConfig).
        assert arguments["cuda_graph_config"] == {"enable_padding": "True", "max_batch_size": "48"}
        assert arguments["scheduler_config"]["capacity_scheduler_policy"].endswith(
            "MAX_UTILIZATION"
        )
        # 16 positions fit in a block of 32 tokens; a sequence gets one more block.
        assert arguments["kv_cache_config"]["max_tokens"] == str(48 * 64)
        assert arguments["kv_cache_config"]["free_gpu_memory_fraction"] == "0.5"

    def test_1_2_keeps_all_memory_but_the_cache_while_it_sleeps(self, tmp_path, mesh, fake_engine):
        arguments = self.arguments_of(tmp_path, mesh, fake_engine, "1.2")
        assert arguments["enable_sleep"] == "True"
        assert "sleep_config" not in arguments

    def test_1_3_drops_the_weights_as_each_waking_brings_them(self, tmp_path, mesh, fake_engine):
        arguments = self.arguments_of(tmp_path, mesh, fake_engine, "1.3")
        assert "enable_sleep" not in arguments
        modes = arguments["sleep_config"]["restore_modes"]
        assert modes.count("'NONE'") == 2
        assert "MODEL_WEIGHTS_MAIN" in modes
        assert "KV_CACHE" in modes

    @pytest.mark.parametrize("version", ["1.1.0", "1.4.0rc1", "2.0"])
    def test_another_version_is_refused(self, tmp_path, mesh, fake_engine, version):
        fake_engine(model="scripted", version=version)
        engine = generator_of(tmp_path, mesh)
        values = (f"tensorrt_llm is {version}", "1.2 or 1.3")
        with raises_error("generation.engine.not_started", *values):
            draw(engine)
        engine.close()

    @pytest.mark.parametrize("checks", [True, False])
    def test_weights_that_a_module_did_not_take_end_the_run_unless_told_not_to(
        self, tmp_path, mesh, fake_engine, checks
    ):
        fake_engine(model="scripted", fault="unmatched", times=999)
        engine = generator_of(tmp_path, mesh, f"tensorrt_llm.check_weights={checks}")
        if checks:
            stale = "old or wrong: model.layers.0.mlp.gate_up_proj.weight"
            with raises_error("generation.engine.failed_again", stale):
                draw(engine)
        else:
            assert draw(engine).lengths.tolist() == [3] * 4
        engine.close()


class TestSamples:
    @pytest.fixture
    def engine(self, tmp_path, mesh, fake_engine):
        fake_engine(model="scripted")
        engine = generator_of(tmp_path, mesh)
        with engine.awake():
            yield engine
        engine.close()

    def test_what_a_request_asks_for(self):
        params = SamplingParams(
            max_length=5, temperature=0.7, top_k=4, top_p=0.9, stop_token_ids=(2, 5)
        )
        requests = requests_of(PROMPTS, 2, params, 3, pad_id=1)
        expected = [PROMPTS[0].tokens] * 2 + [PROMPTS[1].tokens] * 2
        assert [request.tokens for request in requests] == expected
        seeds = {request.sampling.seed for request in requests}
        assert len(seeds) == 4
        asked = requests[0].sampling
        assert asked.temperature == 0.7
        assert asked.top_k == 4
        assert asked.top_p == 0.9
        assert asked.repetition_penalty is None
        assert asked.max_tokens == 5
        assert asked.stop_token_ids == [2, 5]
        assert asked.pad_id == 1
        greedy = requests_of(
            PROMPTS, 1, replace(params, use_greedy=True, repetition_penalty=1.5), 3, pad_id=1
        )
        asked = greedy[0].sampling
        assert asked.temperature is None
        assert asked.top_k is None
        assert asked.top_p is None
        assert asked.repetition_penalty == 1.5

    @pytest.mark.more
    def test_an_end_string_cuts_wherever_its_text_appears(self, engine):
        tokens = (6, 7, 8, 9)
        text = engine._tokenizer.decode([6, 7, 8])
        log_probs = (-1.0, -2.0, -3.0, -4.0)
        cut = engine._cut_at_end_string(Answer(tokens, log_probs), ("nowhere", text[1:]))
        assert cut.tokens == (6, 7, 8)
        assert cut.log_probs == (-1.0, -2.0, -3.0)
        assert cut.stopped is True
        assert engine._cut_at_end_string(Answer(tokens), ("nowhere",)) == Answer(tokens)

    @pytest.mark.more
    def test_an_end_string_cuts_beside_an_id_that_the_tokenizer_lacks(self, engine, tmp_path):
        # Like Qwen2.5: the model has 152064 ids, the tokenizer 151665.
        engine._tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path / "small", 20))
        beyond = engine._lm.architecture.vocab_size - 1
        assert beyond >= len(engine._tokenizer)
        end = engine._tokenizer.decode([7, 8])
        answer = Answer((beyond, 6, 7, 8, 9))
        cut = engine._cut_at_end_string(answer, (end,))
        assert cut.tokens == (beyond, 6, 7, 8)
        assert cut.stopped is True
        outside = Answer((6, 7, 8, beyond + 1))  # ids of an invalid response
        assert engine._cut_at_end_string(outside, (end,)) == outside

    @pytest.mark.more
    def test_rows_of_unequal_length_are_padded(self, engine):
        answers = [Answer((5, 6), (-1.0, -2.0), stopped=True), Answer((), ()), Answer((4,), None)]
        completions = engine._completions(answers[:2], PARAMS)
        expected = [[5, 6], [0, 0]]
        assert completions.tokens.tolist() == expected
        assert completions.lengths.tolist() == [2, 0]
        assert completions.finish_reasons == (FINISH_STOP, FINISH_LENGTH)
        assert completions.log_probs is not None
        expected = [
            [-1.0, -2.0],
            [0.0, 0.0],
        ]
        assert completions.log_probs.tolist() == expected
        assert engine._completions(answers, PARAMS).log_probs is None


@pytest.mark.more
class TestFaults:
    """A fault is survived, or gives an error that says what happened and what to do."""

    def test_out_of_memory_at_start(self, tmp_path, mesh, fake_engine):
        fake_engine(model="scripted", fault="out_of_memory", times=9)
        engine = generator_of(tmp_path, mesh)
        advice = "lower tensorrt_llm.free_gpu_memory_fraction"
        with raises_error("generation.engine.not_started", "out of memory", advice):
            draw(engine)
        engine.close()

    def test_a_lost_request_is_made_again(self, tmp_path, mesh, fake_engine):
        fake_engine(model="scripted")
        engine = generator_of(tmp_path, mesh)
        expected = draw(engine)
        engine.close()
        given = fake_engine(model="scripted", fault="lost")
        engine = generator_of(tmp_path, mesh, "engine.request_timeout_seconds=8")
        assert torch.equal(draw(engine).tokens, expected.tokens)
        engine.close()
        assert "GenerationResult.abort" in calls_of(given)

    def test_a_request_lost_twice(self, tmp_path, mesh, fake_engine):
        fake_engine(model="scripted", fault="lost", times=99, after=1)
        engine = generator_of(tmp_path, mesh, "engine.request_timeout_seconds=0.5")
        values = ("3 of 4 requests", "[7, 9]", "no answer within", "engine.request_timeout_seconds")
        with raises_error("generation.engine.lost_requests_twice", *values):
            draw(engine)
        engine.close()

    def test_an_engine_that_loses_all_requests_is_restarted(self, tmp_path, mesh, fake_engine):
        given = fake_engine(model="scripted", fault="lost", times=4)
        engine = generator_of(tmp_path, mesh, "engine.request_timeout_seconds=2")
        assert draw(engine).lengths.tolist() == [3] * 4
        engine.close()
        assert calls_of(given).count("AsyncLLM.setup_async") == 2

    def test_a_signal_to_every_process_of_the_job_does_not_end_the_engine(
        self, tmp_path, mesh, fake_engine
    ):
        given = fake_engine(model="scripted")
        engine = generator_of(tmp_path, mesh)
        expected = draw(engine)
        for number in (signal.SIGUSR1, signal.SIGHUP):
            os.killpg(engine._engine._child.pid, number)
        assert torch.equal(draw(engine).tokens, expected.tokens)
        engine.close()
        assert calls_of(given).count("AsyncLLM.setup_async") == 1

    def test_a_slow_request_is_waited_for(self, tmp_path, mesh, fake_engine):
        given = fake_engine(model="scripted", fault="slow")
        engine = generator_of(tmp_path, mesh)
        assert draw(engine).lengths.tolist() == [3] * 4
        engine.close()
        assert "GenerationResult.abort" not in calls_of(given)

    def test_a_token_outside_the_vocabulary_does_not_count(self, tmp_path, mesh, fake_engine):
        fake_engine(model="scripted", fault="outside")
        engine = generator_of(tmp_path, mesh)
        completions = draw(engine).within_vocabulary(32, 0)
        engine.close()
        assert completions.finish_reasons.count(FINISH_OUTSIDE) == 1
        assert int(completions.tokens.max()) < 32

    def test_an_engine_that_dies_is_restarted(self, tmp_path, mesh, fake_engine):
        given = fake_engine(model="scripted", fault="die")
        with tiny_trainer(tiny_config(tmp_path, *ENGINE), mesh) as trainer:
            trainer.fit()
            trainer.model.generator.close()
        steps = [line["step"] for line in metrics_of(tmp_path)]
        assert steps == [1, 2]
        assert calls_of(given).count("AsyncLLM.setup_async") == 2

    def test_when_it_dies_again_the_run_saves_and_stops(self, tmp_path, mesh, fake_engine):
        fake_engine(model="scripted")
        options = [*ENGINE, "trainer.reinforce.save_interval=100"]
        with tiny_trainer(tiny_config(tmp_path, *options), mesh) as trainer:
            step = trainer.run_training

            def step_and_break(batch):
                metrics = step(batch)
                trainer.model.generator.close()  # like a death between two steps
                fake_engine(model="scripted", fault="die", times=99)
                return metrics

            trainer.run_training = step_and_break
            with raises_error("generation.engine.failed_again", "the engine ended"):
                trainer.fit()
            trainer.model.generator.close()
        checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
        assert checkpoint is not None
        assert checkpoint.trainer_state["step"] == 1


class TestConfiguration:
    @pytest.mark.parametrize(
        ("override", "key", "values"),
        [
            (
                "generation=sglang",
                "config.generation.unknown",
                ["generation is 'sglang'", "native, vllm, tensorrt_llm"],
            ),
            (
                "tensorrt_llm.mode=separate",
                "config.value.not_a_choice",
                ["tensorrt_llm.mode is 'separate'", "colocated", "CUDA IPC"],
            ),
            (
                "engine.python=tests",
                "config.engine.python.no_interpreter",
                ["engine.python is 'tests'", ".venv-engine/bin/python"],
            ),
            (
                "engine.tensor_parallel_size=2",
                "config.engine.tensor_parallel_size.out_of_range",
                ["engine.tensor_parallel_size is 2", "1 to 1"],
            ),
            (
                "tensorrt_llm.free_gpu_memory_fraction=1.5",
                "config.value.out_of_range",
                ["tensorrt_llm.free_gpu_memory_fraction is 1.5", 0, 1],
            ),
            (
                "engine.weight_bucket_megabytes=0",
                "config.value.out_of_range",
                ["engine.weight_bucket_megabytes is 0", 1],
            ),
            (
                "engine.request_timeout_seconds=9999",
                "config.engine.timeouts.above_collective_timeout",
                ["trainer.collective_timeout_seconds", 1800],
            ),
            (
                "model.reinforce.length_params.min_length=1",
                "config.min_length.conflicts_with_tensorrt_llm",
                ["model.reinforce.length_params.min_length is 1", "TensorRT-LLM"],
            ),
        ],
    )
    def test_what_cannot_work_is_refused(self, tmp_path, override, key, values):
        allowed = "model.reinforce.allow_biased_sampling=true"
        with raises_error(key, *values):
            cfg = compose(*tiny_overrides(tmp_path), *ENGINE, allowed, override)
            load_config(cfg)

    def test_another_temperature_is_refused_where_log_probs_are_corrected(self, tmp_path):
        corrected = "trainer.reinforce.generator_correction=token"
        overrides = [
            *tiny_overrides(tmp_path),
            *ENGINE,
            "model.reinforce.sampling_params.temperature=0.7",
        ]
        values = ("generator_correction is 'token'", "sampling_params.temperature is 0.7", 1.0)
        with raises_error("config.temperature.conflicts_with_generator_correction", *values):
            load_config(compose(*overrides, corrected))

    def test_no_gpu(self, tmp_path, mesh):
        with raises_error("generation.engine.needs_cuda", "tensorrt_llm", "cpu"):
            generator_of(tmp_path, mesh)

    def test_no_package(self, tmp_path, mesh, fake_engine):
        fake_engine(model="scripted")
        sys.path.remove(str(PACKAGE))
        forget_fake()
        values = ("generation is tensorrt_llm", "package tensorrt_llm", "engine.python")
        with raises_error("generation.package.missing", *values):
            generator_of(tmp_path, mesh)
