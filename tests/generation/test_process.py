"""Engines of a machine are isolated, none acts as a rank, and weights arrive in buckets.

test_tensorrt_llm.py tests updates in whole runs.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import raises_error
from helpers.lora import EVERY, lora_model
from helpers.models import tiny_llama_folder
from helpers.policies import megatron_model
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from reinforce_rl.config.engines import EngineConfig, TensorRTLLMConfig, VLLMConfig
from reinforce_rl.errors import EngineLostError, GenerationError
from reinforce_rl.generation.engine import (
    EngineArguments,
    EngineSampling,
    Request,
    buckets,
    host,
    process,
)
from reinforce_rl.generation.engine.process import (
    MAX_FOLDER_CHARACTERS,
    EngineProcess,
    engine_environment,
    private_folder,
)
from reinforce_rl.generation.engine.weights import elements_of, plan_buckets, send_weights, views_of
from reinforce_rl.generation.trtllm import adapter
from reinforce_rl.generation.trtllm import host as trtllm_host
from reinforce_rl.generation.trtllm.adapter import TensorRTLLM
from reinforce_rl.generation.vllm.adapter import VLLM
from reinforce_rl.megatron.hf_weights import export_hf_folder
from reinforce_rl.megatron.lora import MergedWeights
from reinforce_rl.megatron.weight_map import Row
from reinforce_rl.utils.process import ModuleChild


def process_of(tmp_path: Path, **deadlines: float) -> EngineProcess:
    (tmp_path / "config.json").write_text("{}")
    arguments = EngineArguments(str(tmp_path), "bfloat16", 1, 8, 64, 64)
    seconds = {
        f"{call}_timeout_seconds": deadlines.get(call, 60.0)
        for call in ("start", "update", "request")
    }
    adapter = TensorRTLLM(TensorRTLLMConfig())
    adapter.package = "json"  # type: ignore[misc]
    return EngineProcess(
        adapter, arguments, EngineConfig(**seconds), tmp_path / "engine.log", 0, None
    )


def made_below(folder: Path) -> Path:
    (folder / "engine").mkdir()
    return folder / "engine"


@pytest.fixture
def made():
    """Return created folders, and remove them after the test."""
    folders: list[Path] = []
    yield folders
    for folder in folders:
        folder.rmdir()


def test_a_folder_is_new_and_closed_to_others(made, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    slurm = {"SLURM_JOB_ID": "12345678", "SLURM_RESTART_COUNT": "2"}
    for environment, rank in ((slurm, 127), (slurm, 127), ({}, 5), ({}, 5)):
        made.append(private_folder(environment, rank))
    assert len(set(made)) == 4
    expected = ["rrl-12345678.2-127-"] * 2 + ["rrl-5-"] * 2
    assert [folder.name[:-8] for folder in made] == expected
    assert {folder.stat().st_mode & 0o777 for folder in made} == {0o700}
    assert max(len(str(folder)) for folder in made) <= MAX_FOLDER_CHARACTERS


def test_a_folder_that_another_user_has_made_is_not_used(made, monkeypatch, tmp_path):
    """The test guesses the next name, which nobody else can, and takes it."""
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    names = iter(["guessed1", "guessed1", "another2"])
    monkeypatch.setattr("tempfile._get_candidate_names", lambda: names)
    planted = Path("/tmp/rrl-7-guessed1")
    planted.symlink_to(tmp_path)
    try:
        made.append(private_folder({}, 7))
    finally:
        planted.unlink()
    assert made[0] == Path("/tmp/rrl-7-another2")
    assert not list(tmp_path.iterdir())


def test_a_long_temporary_folder_is_not_used(made, monkeypatch):
    """The names of its sockets would be too long."""
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 60)
    made.append(private_folder({}, 5))
    assert made[0].parent == Path("/tmp")


def test_the_launchers_variables_stay_outside():
    given = {
        "PATH": "/bin",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x",
        "PMIX_RANK": "3",
        "SLURM_PROCID": "3",
        "RAY_ADDRESS": "elsewhere:6379",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "HF_HUB_OFFLINE": "1",
        "REINFORCE_REWARD_TOKEN": "secret",
    }
    environment = engine_environment(given, Path("/tmp/rrl-5-1"), ["2", "3"], "/here")
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment["PATH"] == "/bin"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["PYTHONPATH"] == "/here"
    assert environment["TMPDIR"] == "/tmp/rrl-5-1"
    gone = {
        "RANK",
        "LOCAL_RANK",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "PMIX_RANK",
        "SLURM_PROCID",
        "RAY_ADDRESS",
    }
    gone |= {"CUDA_DEVICE_MAX_CONNECTIONS", "REINFORCE_REWARD_TOKEN"}
    assert not gone & environment.keys()
    assert (
        engine_environment(given, Path("/tmp/rrl-5-1"), None, "")["CUDA_VISIBLE_DEVICES"]
        == "0,1,2,3"
    )


EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (EXPANDABLE, None),
        (f" {EXPANDABLE} ,max_split_size_mb:512", "max_split_size_mb:512"),
        (f"roundup_power2_divisions:[256:1,512:2,>:8],{EXPANDABLE},max_split_size_mb:64", None),
        (
            "expandable_segments:False,max_split_size_mb:512",
            "expandable_segments:False,max_split_size_mb:512",
        ),
        ("backend:native", "backend:native"),
        ("", None),
    ],
)
def test_memory_pools_do_not_support_expandable_segments(name, given, expected):
    if "[" in given:
        expected = "roundup_power2_divisions:[256:1,512:2,>:8],max_split_size_mb:64"
    environment = engine_environment({name: given, "PATH": "/bin"}, Path("/tmp/rrl-5-1"), None, "")
    assert environment.get(name) == expected
    assert environment["PATH"] == "/bin"


def test_what_is_left_out_of_the_allocators_options_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"{EXPANDABLE},max_split_size_mb:512")
    with raises_error("generation.engine.not_started"):
        process_of(tmp_path).start()
    (line,) = [
        record.getMessage() for record in caplog.records if "engine_variable" in record.getMessage()
    ]
    assert "PYTORCH_CUDA_ALLOC_CONF" in line
    assert line.endswith("engine=max_split_size_mb:512")


@pytest.mark.parametrize(
    ("adapter_class", "config", "given", "expected"),
    [
        (VLLM, VLLMConfig(), {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}, "0-1"),
        (VLLM, VLLMConfig(), {"VLLM_NO_USAGE_STATS": "0"}, "0"),
        (VLLM, VLLMConfig(), {"VLLM_LOGGING_LEVEL": "DEBUG"}, "DEBUG"),
        # this variable has a key of its own
        (VLLM, VLLMConfig(cpu_cache_gigabytes=3), {"VLLM_CPU_KVCACHE_SPACE": "40"}, "3"),
        (VLLM, VLLMConfig(), {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}, "spawn"),  # would hang
        (VLLM, VLLMConfig(), {"VLLM_CPU_OMP_THREADS_BIND": ""}, "nobind"),
        (TensorRTLLM, TensorRTLLMConfig(), {"RAY_USAGE_STATS_ENABLED": "1"}, "1"),
        (TensorRTLLM, TensorRTLLMConfig(), {"TLLM_DISABLE_MPI": "0"}, "1"),
    ],
)
def test_variables_of_an_engine_count_unless_a_key_or_correctness_says_otherwise(
    adapter_class, config, given, expected, tmp_path, monkeypatch, caplog
):
    environments = []

    class NoChild(ModuleChild):
        def __init__(self, module: str, **options: Any):
            environments.append(options["env"])
            raise GenerationError("not started", key="test.not_started")

    monkeypatch.setattr(process, "ModuleChild", NoChild)
    ((name, value),) = given.items()
    monkeypatch.setenv(name, value)
    engine = process_of(tmp_path)
    engine._adapter = adapter_class(config)
    with raises_error("test.not_started"):
        engine.start()
    assert environments[0][name] == expected
    warnings = [
        record.getMessage() for record in caplog.records if "engine_variable" in record.getMessage()
    ]
    assert len(warnings) == (1 if expected != value else 0)
    for line in warnings:
        assert f"variable={name}" in line


def test_an_engine_has_longer_to_stop_than_its_own_workers():
    """TensorRT-LLM's executor waits 30 s for its workers (`RayExecutor.shutdown`)."""
    assert 30 < trtllm_host.SHUTDOWN_SECONDS < process.STOP_SECONDS


def test_an_engines_config_is_one_that_transformers_4_reads_too(tmp_path):
    rope = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"rope_parameters": rope, "dtype": "bfloat16"}))
    TensorRTLLM(TensorRTLLMConfig()).write_config(tmp_path)
    written = json.loads(config.read_text())
    expected = {
        "rope_parameters": rope,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    assert written == expected
    config.write_text(json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}))
    TensorRTLLM(TensorRTLLMConfig()).write_config(tmp_path)
    written = json.loads(config.read_text())
    assert written["rope_theta"] == 1e5
    assert written["rope_scaling"] is None


def test_without_the_package_it_says_so_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "private_folder", lambda *_: made_below(tmp_path))
    engine = process_of(tmp_path)
    values = ("TensorRT-LLM", "No module named 'tensorrt_llm'")
    with raises_error("generation.engine.not_started", *values) as raised:
        engine.start()
    assert isinstance(raised.value, GenerationError)
    assert not isinstance(raised.value, EngineLostError), "another try would not help"
    assert not (tmp_path / "engine").exists()
    assert engine._child is None


def vllm_of(tmp_path: Path, python: Path | str) -> EngineProcess:
    (tmp_path / "config.json").write_text("{}")
    arguments = EngineArguments(str(tmp_path), "bfloat16", 1, 8, 64, 64)
    config = EngineConfig(python=str(python), start_timeout_seconds=60)
    return EngineProcess(VLLM(VLLMConfig()), arguments, config, tmp_path / "engine.log", 0, None)


def test_an_environment_with_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "private_folder", lambda *_: made_below(tmp_path))
    package = tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.30.1+cpu"')
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{package.parent}:$PYTHONPATH" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    engine = vllm_of(tmp_path, python)
    values = ("vLLM", "vllm is 0.30.1", "expected 0.32", "; see its log")
    with raises_error("generation.engine.not_started", *values):
        engine.start()
    assert not (tmp_path / "engine").exists()
    assert engine._child is None


def test_an_environment_without_the_package_or_without_python_is_refused(tmp_path):
    values = ("generation is vllm", sys.executable, "package vllm", "engine.python")
    with raises_error("generation.package.missing", *values):
        vllm_of(tmp_path, sys.executable)
    absent = f"engine.python is {tmp_path / 'absent'}"
    with raises_error("generation.python.does_not_run", absent, "No such file"):
        vllm_of(tmp_path, tmp_path / "absent")
    (tmp_path / "text").write_text("not a program")
    text = f"engine.python is {tmp_path / 'text'}"
    with raises_error("generation.python.does_not_run", text, "Permission denied"):
        vllm_of(tmp_path, tmp_path / "text")


def test_nothing_of_the_current_folder_is_imported_to_look_for_the_package(tmp_path, monkeypatch):
    for name in ("contextlib", "types", "warnings"):
        (tmp_path / f"{name}.py").write_text(
            "import sys\nopen('ran', 'a').write(__name__)\nsys.exit(0)\n"
        )
    monkeypatch.chdir(tmp_path)
    with raises_error("generation.package.missing", "package vllm"):
        vllm_of(tmp_path, sys.executable)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        (
            "ValueError: Free memory on device cuda:0 (27/80 GiB) on startup is less than desired",
            "lower tensorrt_llm.f",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB",
            "lower tensorrt_llm.f",
        ),
        ("ValueError: No available memory for the cache blocks.", "raise tensorrt_llm.f"),
        ("ValueError: 9 heads cannot be divided by 2", "see its log"),
    ],
)
def test_what_an_engines_log_says_of_memory_becomes_advice(tmp_path, monkeypatch, log, advice):
    monkeypatch.setenv("FAILING_HOST", log)
    (tmp_path / "engine.log").write_text("of an earlier start: out of memory\n")
    engine = process_of(tmp_path)
    engine._adapter.host = "helpers.failing_host"
    values = ("initialization failed", f"engine.log; {advice}")
    with raises_error("generation.engine.not_started", *values):
        engine.start()


def test_a_start_that_takes_too_long_is_ended(tmp_path):
    engine = process_of(tmp_path, start=0.001)
    values = ("start within 0.001 s", "engine.start_timeout_seconds", tmp_path / "engine.log")
    with raises_error("generation.engine.not_started", *values):
        engine.start()
    assert engine._child is None


def test_a_stopped_engine_does_not_hold_up_a_long_request(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "STUCK_SECONDS", 0.1)
    monkeypatch.setattr(process, "ABORT_SECONDS", 0.0)
    engine = process_of(tmp_path, request=1.0)
    engine._child = ModuleChild("timeit", prefix=["sh", "-c", "exec sleep 60", "sh"])
    # much more than the connection buffers
    sampling = EngineSampling(8, 0, 0, None, None, None, None, "")
    prompts = [Request(tuple(range(100_000)), sampling)] * 20
    values = ("generate within 1 s", "engine.request_timeout_seconds")
    with raises_error("generation.engine.no_answer", *values) as raised:
        engine.generate(prompts)
    assert isinstance(raised.value, EngineLostError), "another engine may answer"
    assert engine._child is None


def test_the_host_does_not_outlive_a_trainer_that_is_not_its_parent():
    command = [sys.executable, "-m", "reinforce_rl.generation.trtllm.host", "0", "1"]
    done = subprocess.run(
        command,
        timeout=60,
        capture_output=True,
    )
    assert done.returncode == 1


def test_the_host_imports_neither_torch_nor_megatron():
    code = (
        "import sys, reinforce_rl.generation.trtllm.host; "
        "print({'torch', 'megatron', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_a_command_that_is_never_answered_fails_once_the_engines_processes_have_ended(monkeypatch):
    class Host:
        is_alive = True

        async def generate(self) -> None:
            self.is_alive = False
            await asyncio.sleep(3600)

        async def stop(self) -> None:
            pass

    monkeypatch.setattr(host, "WATCH_SECONDS", 0.05)
    ours, theirs = Pipe()
    for command in ("generate", "stop"):
        ours.send((command, ()))
    asyncio.run(asyncio.wait_for(host.serve(Host(), theirs), 60))  # type: ignore[arg-type]
    assert ours.recv() == ("RuntimeError: the engine's own processes ended", None)
    assert ours.recv() == (None, None)


def rows_of(*sizes: tuple[str, int]) -> list[Row]:
    rows = []
    for i, (parameter, size) in enumerate(sizes):
        rows.append(Row(f"{parameter}.{i}", parameter, (size,), 1, None))
    return rows


def test_buckets_are_full_but_keep_what_an_engine_fuses():
    rows = rows_of(
        ("a", 64), ("qkv", 64), ("qkv", 64), ("qkv", 64), ("b", 64), ("c", 640), ("d", 1)
    )
    planned = plan_buckets(rows, 256)
    expected = [
        ["a", "qkv", "qkv", "qkv"],
        ["b"],
        ["c"],
        ["d"],
    ]
    assert [[row.megatron for row in bucket] for bucket in planned] == expected
    assert [row for bucket in planned for row in bucket] == rows
    assert [elements_of(bucket) for bucket in planned] == [256, 64, 640, 64]


@pytest.mark.parametrize("limit", [1, 100, 10_000])
def test_views_do_not_overlap(limit):
    rows = rows_of(("a", 3), ("b", 65), ("c", 64), ("d", 1))
    for bucket in plan_buckets(rows, limit):
        buffer = torch.zeros(elements_of(bucket))
        for view in views_of(buffer, bucket).values():
            view += 1
        expected = sum(math.prod(row.shape) for row in bucket)
        assert int(buffer.sum()) == expected
        assert int(buffer.max()) == 1


def test_a_device_without_cuda_is_refused():
    with raises_error("generation.engine.needs_cuda", "tensorrt_llm", "cpu", "native or vllm"):
        adapter.device_uuid(torch.device("cpu"))


def test_the_place_of_the_device_among_the_arguments_of_torchs_handle():
    """`buckets.received` replaces it by the receiver's number, like TensorRT-LLM's worker."""
    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[6] == "storage_device"


@pytest.mark.parametrize(
    ("dtype", "lora"),
    [
        pytest.param(torch.float32, False, id="fp32"),
        pytest.param(torch.bfloat16, False, id="bf16"),
        pytest.param(torch.float32, True, id="lora"),
    ],
)
def test_buckets_hold_the_exported_weights_and_share_one_bounded_buffer(
    dtype, lora, tmp_path, mesh, monkeypatch
):
    folder = tiny_llama_folder(tmp_path / "model")
    lm = lora_model(folder, mesh, EVERY, dtype) if lora else megatron_model(folder, mesh, dtype)
    values = MergedWeights(lm) if lora else None
    export_hf_folder(lm, folder, tmp_path / "exported", values=values)

    received: list[tuple[str, Tensor]] = []
    memory = set()

    def deliver(offers: list[dict[str, Any]]) -> None:
        bucket = engine_adapter.bucket_of(offers)
        (path,) = bucket["places"].values()
        memory.add((path, bucket["elements"] * dtype.itemsize))
        tensors = list(buckets.received(bucket, "here", torch.device("cpu")))
        received.extend(tensors)
        sizes.append(sum(tensor.numel() for _, tensor in tensors) * dtype.itemsize)

    sizes: list[int] = []
    monkeypatch.setattr(adapter, "device_uuid", lambda _: "here")
    limit = 20_000
    engine_adapter = TensorRTLLM(TensorRTLLMConfig())
    send_weights(
        lm,
        deliver,
        max_bytes=limit,
        make_buffer=lambda elements, kind: engine_adapter.make_buffer(elements, kind, mesh.device),
        hosts_worker=True,
        is_spread=False,
        values=values,
    )

    expected = load_file(tmp_path / "exported" / "model.safetensors")
    assert len(received) == len(dict(received))
    assert dict(received).keys() == expected.keys()
    for name, tensor in received:
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected[name])
    ((_, nbytes),) = memory
    assert nbytes <= limit
    assert max(sizes) <= limit
    assert len(sizes) > sum(sizes) / limit > 2
