"""What keeps two engines of a machine apart, and an engine from taking itself for a rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reinforce_rl.config.actor import TensorRTLLMConfig
from reinforce_rl.errors import EngineLostError, GenerationError
from reinforce_rl.generation.trtllm import process as engine_process
from reinforce_rl.generation.trtllm.engine import EngineArguments, EngineSampling, Request
from reinforce_rl.generation.trtllm.process import (
    MAX_FOLDER_CHARACTERS,
    EngineProcess,
    engine_environment,
    private_folder,
    write_engine_model,
)
from reinforce_rl.utils.process import ModuleChild


def process_of(tmp_path: Path, **deadlines: float) -> EngineProcess:
    (tmp_path / "config.json").write_text("{}")
    arguments = EngineArguments(str(tmp_path), "bfloat16", 1, 8, 64, 64, 0.5)
    seconds = {f"{call}_timeout_seconds": deadlines.get(call, 60.0) for call in ("start", "update", "request")}
    return EngineProcess(arguments, TensorRTLLMConfig(**seconds), tmp_path / "engine.log", 0, None)


def test_folders_differ_by_job_restart_process_and_rank(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/tmp")
    slurm = {"SLURM_JOB_ID": "12345678", "SLURM_RESTART_COUNT": "2"}
    found = [
        private_folder(slurm, 4_194_303, 127),
        private_folder({"SLURM_JOB_ID": "12345678"}, 4_194_303, 127),
        private_folder(slurm, 5, 127),
        private_folder(slurm, 4_194_303, 1),
        private_folder({}, 5, 1),
    ]
    assert len(set(found)) == len(found)
    assert found[0].name == "rrl-12345678.2-4194303-127"
    assert max(len(str(folder)) for folder in found) <= MAX_FOLDER_CHARACTERS


def test_a_long_temporary_folder_is_not_used(monkeypatch):
    """Its sockets' names would be too long."""
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 60)
    assert private_folder({}, 5, 1) == Path("/tmp/rrl-5-1")


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
    }
    found = engine_environment(given, Path("/tmp/rrl-5-1"), ["2", "3"])
    assert found["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert (found["PATH"], found["HF_HUB_OFFLINE"]) == ("/bin", "1")
    assert found["TLLM_RAY_FORCE_LOCAL_CLUSTER"] == "1" and found["RAY_TMPDIR"] == "/tmp/rrl-5-1"
    gone = {"RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PMIX_RANK", "SLURM_PROCID", "RAY_ADDRESS"}
    gone.add("CUDA_DEVICE_MAX_CONNECTIONS")
    assert not gone & found.keys()
    assert engine_environment(given, Path("/tmp/rrl-5-1"), None)["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_an_engines_config_is_one_that_transformers_4_reads_too(tmp_path):
    rope = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0}
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "model.safetensors").touch()
    (source / "config.json").write_text(json.dumps({"rope_parameters": rope, "dtype": "bfloat16"}))
    found = json.loads((write_engine_model(source, out) / "config.json").read_text())
    assert found == {
        "rope_parameters": rope,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    assert [path.name for path in out.iterdir()] == ["config.json"]
    (source / "config.json").write_text(json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}))
    found = json.loads((write_engine_model(source, out) / "config.json").read_text())
    assert (found["rope_theta"], found["rope_scaling"]) == (1e5, None)


def test_without_the_package_it_says_so_and_leaves_nothing_behind(tmp_path):
    process = process_of(tmp_path)
    with pytest.raises(GenerationError, match=r"did not start: .*No module named 'tensorrt_llm'") as raised:
        process.start()
    assert not isinstance(raised.value, EngineLostError), "another try would not help"
    assert not process._folder.exists() and process._child is None


def test_a_start_that_takes_too_long_is_ended(tmp_path):
    process = process_of(tmp_path, start=0.001)
    with pytest.raises(GenerationError, match=r"no answer to start within 0.001 s \(tensorrt_llm.start_timeout_sec"):
        process.start()
    assert process._child is None


def test_a_stopped_engine_does_not_hold_up_a_long_request(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_process, "STUCK_SECONDS", 0.1)
    monkeypatch.setattr(engine_process, "ABORT_SECONDS", 0.0)
    process = process_of(tmp_path, request=1.0)
    process._child = ModuleChild("timeit", prefix=["sh", "-c", "exec sleep 60", "sh"])
    prompts = [
        Request(tuple(range(100_000)), EngineSampling(8, 0, None, None, None, None, []))
    ] * 20  # far more than the connection holds
    with pytest.raises(EngineLostError, match=r"no answer to generate within 1 s \(tensorrt_llm.request_timeout"):
        process.generate(prompts)
    assert process._child is None


def test_the_host_does_not_outlive_a_trainer_that_is_not_its_parent():
    done = subprocess.run(
        [sys.executable, "-m", "reinforce_rl.generation.trtllm.host", "0", "1"], timeout=60, capture_output=True
    )
    assert done.returncode == 1


def test_the_host_imports_neither_torch_nor_megatron():
    code = "import sys, reinforce_rl.generation.trtllm.host; print({'torch', 'megatron', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
