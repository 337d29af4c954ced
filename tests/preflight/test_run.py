"""`preflight=true` prints the plan, reports all faults in one message, and starts nothing."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from helpers.errors import check_fault
from helpers.fake_reward_server import FakeRewardServer, describe
from helpers.models import tiny_llama_folder
from helpers.public_configs import LLAMA_3_1_70B
from helpers.tiny_run import compose, three_letters, write_prompts
from helpers.tiny_tokenizer import write_tiny_tokenizer
from rich.console import Console

from reinforce_rl.config.load import load_config
from reinforce_rl.errors import ConfigError
from reinforce_rl.preflight.run import preflight
from reinforce_rl.trainer import disk
from reinforce_rl.trainer.inputs import read_inputs

ROOT = Path(__file__).parents[2]
ON_1024 = (
    "trainer.devices=8",
    "trainer.num_nodes=128",
    "model.tensor_model_parallel_size=8",
    "model.sequence_parallel=true",
    "model.pipeline_model_parallel_size=4",
    "model.optim.distributed=true",
    "trainer.precision=bf16",
    "model.reinforce.num_rollout_samples=64",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    tiny_llama_folder(
        folder / "model", vocab_size=32, layers=1, hidden=16, ffn=32, max_positions=64
    )
    write_tiny_tokenizer(folder / "large", vocab_size=32)
    (folder / "large" / "config.json").write_text(json.dumps(LLAMA_3_1_70B))
    write_prompts(folder / "train.jsonl", three_letters(8))
    return folder


def right(files: Path) -> list[str]:
    return [
        f"pretrained_checkpoint.restore_from_path={files / 'model'}",
        f"model.data.data_prefix.train={files / 'train.jsonl'}",
        f"exp_manager.explicit_log_dir={files / 'run'}",
        "model.encoder_seq_length=64",
        "model.reinforce.length_params.max_length=16",
        "preflight=true",
    ]


def printed(*overrides: str) -> str:
    out = io.StringIO()
    preflight(compose(*overrides), Console(file=out, width=200))
    return out.getvalue()


def faults_of(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        printed(*overrides)
    return raised.value.faults


def test_the_plan_of_a_right_configuration(files):
    with FakeRewardServer() as server:
        text = printed(*right(files), f"remote_rm.reward_model.port={server.port}")
    for words in (
        "8 prompts x 4 samples = 32 sequences",
        "1 step, the last of 8",
        "KV cache",
        "peak:",
        "No fault",
    ):
        assert words in text
    assert f"server reward_model at localhost:{server.port}" in text
    assert "rloo" in text
    assert "warning" not in text
    assert not (files / "run").exists()


def test_a_server_that_is_not_there_is_a_warning(files):
    assert "warning: the reward server at localhost:1 " in printed(
        *right(files), "remote_rm.reward_model.port=1"
    )


def test_replicas_that_are_away_or_unlike_are_warnings(files):
    with FakeRewardServer() as first, FakeRewardServer() as second:
        second.info = describe(max_batch_size=4)
        replicas = f"remote_rm.reward_model.replicas=['127.0.0.1:{second.port}','127.0.0.1:1']"
        text = printed(*right(files), f"remote_rm.reward_model.port={first.port}", replicas)
    assert f"localhost:{first.port} and 127.0.0.1:{second.port} do not serve the same model" in text
    assert "warning: the reward server at 127.0.0.1:1 is not ready now" in text


@pytest.fixture
def large_disk(monkeypatch):
    free = namedtuple("usage", "free")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: free(10**14))


def test_a_large_model_from_its_config_alone(files, large_disk):
    text = printed(
        *right(files), f"pretrained_checkpoint.restore_from_path={files / 'large'}", *ON_1024
    )
    assert "1024 ranks: 32 data x 4 pipeline x 1 context x 8 tensor parallel" in text
    assert "70,553,706,496 parameters" in text
    assert "holds no safetensors" in text
    assert "4.54 GB" in text  # of weights: a last stage's 20 layers and head over 8 ranks, in bf16


def test_the_plan_of_bf16_shares_the_optimizer_on_a_machine_without_a_gpu(files, large_disk):
    folder = f"pretrained_checkpoint.restore_from_path={files / 'large'}"
    by_default = [text for text in ON_1024 if not text.startswith("model.optim.distributed")]
    plans = [
        printed(*right(files), folder, *by_default, *added)
        for added in ((), ("model.optim.distributed=true",), ("model.optim.distributed=false",))
    ]
    assert plans[0] == plans[1] != plans[2]


def test_every_fault_is_in_one_message(files, tmp_path, monkeypatch):
    """Faults of the configuration, and of model, tokenizer, prompts and disk."""
    model = shutil.copytree(files / "model", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "vocab_size": 20, "intermediate_size": 33})
    )
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\nnot json\n')
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "e" * 60}) + "\n")
    overrides = [
        f"pretrained_checkpoint.restore_from_path={model}",
        "trainer.devices=2",
        "model.tensor_model_parallel_size=2",
        "model.global_batch_size=7",
        f"model.data.data_prefix.train={tmp_path / 'bad.jsonl'}",
        f"model.data.data_prefix.validation={tmp_path / 'long.jsonl'}",
    ]
    faults = faults_of(*right(files), *overrides)
    of_step = "config.global_batch_size.not_a_divisor_of_step"
    check_fault(faults, of_step, "model.global_batch_size is 7")
    of_feed_forward = "config.tensor_model_parallel_size.not_a_divisor_of_feed_forward"
    check_fault(faults, of_feed_forward, "model.tensor_model_parallel_size is 2", 33)
    for value in ("model.global_batch_size is 7", "32 tokens", "bad.jsonl:2", "long.jsonl:1"):
        num_faults = sum(value in fault for fault in faults)
        assert num_faults == 1, (value, faults)
    check_fault(faults, "model.weights.not_of_config", model)


def test_what_follows_from_prompts_that_cannot_be_read_is_not_known(files, tmp_path):
    (tmp_path / "bad.jsonl").write_text("not json\n")
    train = f"model.data.data_prefix.train={tmp_path / 'bad.jsonl'}"
    both = (train, f"model.data.data_prefix.validation={files / 'train.jsonl'}")
    for overrides, rows in (((train,), 2), (both, 3)):
        out = io.StringIO()
        with pytest.raises(ConfigError):
            cfg = compose(*right(files), *overrides)
            preflight(cfg, Console(file=out, width=200))
        assert out.getvalue().count("not known: the prompts cannot be read") == rows


def test_a_disk_that_is_too_small(files, monkeypatch):
    free = namedtuple("usage", "free")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: free(1000))
    faults = faults_of(*right(files))
    assert len(faults) == 1
    values = (files / "run", "1.00 kB", "checkpoints", "keep_last", "record_tokens_every=0")
    check_fault(faults, "preflight.disk.too_little_space", *values)


def test_the_disk_holds_the_records_of_the_samples_too(files, monkeypatch):
    """100 steps of 8 x 4 responses of at most 32 tokens.

    A token takes 18 bytes, without records 2. A file takes 20 kB.
    """
    sizes = ("trainer.reinforce.max_steps=100", "trainer.reinforce.max_epochs=1000")
    sizes += (
        "model.reinforce.num_rollout_samples=8",
        "model.reinforce.length_params.max_length=32",
    )
    for every, mega in ((1, "3.84 MB"), (2, "3.02 MB"), (0, "2.20 MB")):
        text = printed(*right(files), *sizes, f"exp_manager.record_tokens_every={every}")
        assert f"at most {mega} for the samples" in text


def test_the_real_start_tells_the_same_faults_together(files, tmp_path):
    (tmp_path / "bad.jsonl").write_text("not json\n")
    config_file = files / "model" / "config.json"
    config = {**json.loads(config_file.read_text()), "model_type": "mamba"}
    model = shutil.copytree(files / "model", tmp_path / "model")
    (model / "config.json").write_text(json.dumps(config))
    overrides = [
        f"pretrained_checkpoint.restore_from_path={model}",
        f"model.data.data_prefix.train={tmp_path / 'bad.jsonl'}",
    ]
    with pytest.raises(ConfigError) as raised:
        cfg = load_config(compose(*right(files), *overrides))
        read_inputs(cfg).checked()
    assert ["mamba" in raised.value.faults[0], "bad.jsonl:1" in raised.value.faults[1]] == [
        True,
        True,
    ]


@pytest.mark.more
@pytest.mark.parametrize(
    ("extra", "code"), [([], 0), (["trainer.devices=0"], 1)], ids=["right", "wrong"]
)
def test_the_script_starts_nothing(files, extra, code):
    """Two ranks are requested, and none starts; the exit status says whether there is a fault."""
    script = ROOT / "examples" / "train_reinforce_actor.py"
    command = [sys.executable, str(script), *right(files), "trainer.devices=2", *extra]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stderr
    assert ("Nothing was started" in done.stdout) == (code == 0)
    assert not (files / "run").exists()


def test_ranks_that_only_generate_are_no_part_of_the_layout(files):
    apart = (
        "trainer.devices=4",
        "placement=disaggregated",
        "generation_ranks=2",
        "generation_tensor_parallel_size=2",
    )
    text = printed(*right(files), *apart)
    assert "2 ranks: 2 data x 1 pipeline x 1 context x 1 tensor parallel" in text
    assert (
        "2 more ranks generate, 2 with each copy of the model; their memory is not in this plan"
        in text
    )
