"""Wrong configurations: found before a model is loaded, all in one message that says what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_reward_server import FakeRewardServer
from helpers.tiny_run import compose, three_letters, write_prompts
from helpers.tiny_tokenizer import write_model_without_weights
from helpers.toy_server import free_port
from omegaconf import OmegaConf

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.base import Section
from reinforce_rl.config.compose import compose as composed
from reinforce_rl.config.describe import PROGRAMS, keys_of
from reinforce_rl.config.load import load_config, read
from reinforce_rl.errors import ConfigError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_reinforce_actor.py"
DEADLINE_S = 120.0  # what a slow and busy machine may take for a message that comes at once elsewhere


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Everything that a configuration names, but for the weights: whoever loads a model from here fails."""
    folder = tmp_path_factory.mktemp("config")
    write_model_without_weights(folder / "model")
    write_prompts(folder / "train.jsonl", three_letters(8))
    return folder


def right(folder: Path) -> list[str]:
    return [
        f"pretrained_checkpoint.restore_from_path={folder / 'model'}",
        f"model.data.data_prefix.train={folder / 'train.jsonl'}",
        f"exp_manager.explicit_log_dir={folder / 'run'}",
        "model.encoder_seq_length=64",
        "model.reinforce.length_params.max_length=16",
    ]


def faults_of(folder: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_config(compose(*right(folder), *overrides))
    assert str(raised.value).count("\n") == len(raised.value.faults), "one line a fault"
    return raised.value.faults


def test_a_right_configuration_loads(folder):
    config = load_config(
        compose(
            *right(folder), "trainer.reinforce.num_rollouts_per_prompt=8", "trainer.precision=bf16", "model.optim.lr=1"
        )
    )
    assert config.trainer.reinforce.num_rollouts_per_prompt == 8
    assert config.trainer.precision == "bf16"
    assert config.model.optim.lr == 1.0 and isinstance(config.model.optim.lr, float)
    assert config.model.max_prompt_tokens == 48
    assert config.model.data.data_prefix.train == str(folder / "train.jsonl")


PARALLEL = ["trainer.devices=8", "model.tensor_model_parallel_size=2"]


@pytest.mark.parametrize(
    ("gpu", "overrides", "precision", "shared"),
    [
        (False, PARALLEL, "32", (False, False)),
        (True, PARALLEL, "bf16", (True, True)),
        (True, [], "bf16", (False, False)),  # nobody to share with
        (True, ["trainer.devices=2", "model.context_parallel_size=2"], "bf16", (True, True)),
        (True, [*PARALLEL, "trainer.precision=32", "model.optim.distributed=false"], "32", (False, True)),
        (False, [*PARALLEL, "trainer.precision=bf16", "model.optim.distributed=true"], "bf16", (True, False)),
        (False, [*PARALLEL, "preflight=deep"], "bf16", (True, True)),  # of a run on GPUs
    ],
)
def test_defaults_that_depend_on_a_gpu(folder, monkeypatch, gpu, overrides, precision, shared):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    config = load_config(compose(*right(folder), *overrides))
    assert config.trainer.precision == precision
    assert (config.model.optim.distributed, config.model.optim.overlap_grad_sync) == shared


def test_a_home_folder_is_written_with_a_tilde(folder, tmp_path, monkeypatch):
    """No shell expands KEY=~/folder, and no YAML; Hydra's grammar has no ~ without quotes."""
    monkeypatch.setenv("HOME", str(folder))
    home = ["pretrained_checkpoint.restore_from_path=~/model", "exp_manager.explicit_log_dir=~/run"]
    own = [override for override in right(folder) if override.partition("=")[0] not in str(home)]
    config = load_config(composed("train_reinforce_actor", [*own, *home]))
    assert config.pretrained_checkpoint.restore_from_path == str(folder / "model")
    assert config.exp_manager.explicit_log_dir == str(folder / "run")


def _paths(schema: type[Section]) -> list[str]:
    return [key.path for key in keys_of(schema()) if key.kind.startswith("path") and "list" not in key.kind]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_path_may_begin_with_a_tilde(name, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    paths = _paths(PROGRAMS[name])
    assert len(paths) >= 2
    config, _ = read(PROGRAMS[name], composed(name, [f"{path}=~/x y" for path in paths]))
    assert {path: attrgetter(path)(config) for path in paths} == dict.fromkeys(paths, "/home/me/x y")


def _nullable_texts(section: Section, prefix: str = "") -> Iterator[str]:
    for name, value in section:
        if isinstance(value, Section):
            yield from _nullable_texts(value, f"{prefix}{name}.")
        elif value is None and "string" in str(type(section).model_json_schema()["properties"][name]["anyOf"]):
            yield f"{prefix}{name}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_none_is_no_text_where_null_is_meant(name):
    """Hydra and YAML read None as a text; it became a system prompt, or the name of a project."""
    keys = list(_nullable_texts(PROGRAMS[name]()))
    assert len(keys) > 3
    _, faults = read(PROGRAMS[name], composed(name, [f"{key}=None" for key in keys]))
    assert [fault.split(" ")[0] for fault in faults if "'None'" in fault] == keys
    assert all(f"{key}=null" in fault for key, fault in zip(keys, faults, strict=False))
    _, faults = read(PROGRAMS[name], composed(name, [f"{key}=null" for key in keys]))
    assert not [fault for fault in faults if fault.split(" ")[0] in keys]


RL, ROLLOUT = "trainer.reinforce", "model.reinforce"

LORA = "model.peft.peft_scheme=lora"

WRONG: list[tuple[str, list[str], list[str]]] = [
    ("unknown key", ["+trainer.reinforce.max_stps=5"], ["trainer.reinforce.max_stps", "did you mean", "max_steps"]),
    ("unknown group", ["+model.zzz.a=1"], ["model.zzz", "known here", "micro_batch_size"]),
    ("wrong type", ["model.optim.lr=fast"], ["model.optim.lr", "'fast'", "a number"]),
    ("bool for a number", ["trainer.devices=true"], ["trainer.devices is True", "a whole number"]),
    ("fraction for a count", [f"{RL}.max_steps=1.5"], [f"{RL}.max_steps", "1.5", "a whole number"]),
    ("text for a group", ["model.optim=adam"], ["model.optim is 'adam'", "a group of keys"]),
    ("list of wrong items", ["model.optim.betas=[0.9,x]"], ["betas is [0.9, 'x']", "a list, each a number"]),
    ("null", ["model.seed=null"], ["model.seed", "None", "a whole number"]),
    ("not set", ["pretrained_checkpoint.restore_from_path=???"], ["restore_from_path is not set", "=VALUE"]),
    ("empty", ["pretrained_checkpoint.restore_from_path=''"], ["restore_from_path is empty", "=VALUE"]),
    ("no folder's name", ["pretrained_checkpoint.restore_from_path=[a]"], ["is ['a']; expected a text"]),
    ("no text", ["pretrained_checkpoint=sft"], ["pretrained_checkpoint is 'sft'; expected a group of keys"]),
    ("no prompts", ["model.data.data_prefix.train=???"], ["data_prefix.train is not set; give it as"]),
    ("dead interpolation", ["model.seed=${model.sed}"], ["model.seed", "cannot be resolved", "model.sed"]),
    ("batch size", ["model.global_batch_size=7"], ["global_batch_size is 7", "8 x 4 = 32", "a multiple of 4", "null"]),
    ("tensor parallel", ["model.tensor_model_parallel_size=2"], ["is 2", "does not divide the 1 ranks", "devices"]),
    (
        "product",
        ["trainer.devices=6", "model.tensor_model_parallel_size=2", "model.context_parallel_size=2"],
        ["tensor_model_parallel_size (2) x", "is 4", "the 6 ranks"],
    ),
    (
        "sequence parallel",
        ["model.sequence_parallel=true"],
        ["sequence_parallel is true", "tensor_model_parallel_size=1"],
    ),
    (
        "layers",
        ["trainer.devices=2", "model.pipeline_model_parallel_size=2"],
        ["pipeline_model_parallel_size is 2", "the 1 layers", "num_layers_in_first_pipeline_stage"],
    ),
    ("granularity", ["model.activations_checkpoint_granularity=some"], ["granularity is 'some'", "selective or full"]),
    (
        "full without a method",
        ["model.activations_checkpoint_granularity=full", "model.activations_checkpoint_num_layers=1"],
        ["checkpoint_method is null", "uniform or block"],
    ),
    (
        "full without layers",
        ["model.activations_checkpoint_granularity=full", "model.activations_checkpoint_method=block"],
        ["checkpoint_num_layers is null", "such as 1"],
    ),
    (
        "method without full",
        ["model.activations_checkpoint_method=block"],
        ["method is 'block'", "only granularity=full reads"],
    ),
    ("overrides", ["model.megatron_overrides=3"], ["megatron_overrides is 3", "groups of keys"]),
    ("idle ranks", ["trainer.devices=16"], ["num_rollout_samples is 8", "16 data-parallel ranks"]),
    ("one sample", [f"{RL}.num_rollouts_per_prompt=1"], ["num_rollouts_per_prompt is 1", "=rloo", "at least 2"]),
    ("no sample", [f"{RL}.num_rollouts_per_prompt=0"], ["num_rollouts_per_prompt is 0", "at least 1"]),
    ("off-policy", [f"{RL}.reinforce_epochs=2"], ["reinforce_epochs is 2", "off-policy", "importance_ratio=token"]),
    ("several updates", ["model.global_batch_size=8"], ["global_batch_size is 8", "off-policy", "importance_ratio"]),
    ("ratio", [f"{RL}.importance_ratio=ppo"], ["importance_ratio is 'ppo'", "none, token, sequence"]),
    (
        "masks",
        [f"{RL}.generator_correction=token_mask", f"{RL}.generator_ratio_cap=1"],
        ["generator_ratio_cap is 1.0", "expected above 1"],
    ),
    ("clip", [f"{RL}.ratio_clip_low=2"], ["ratio_clip_low is 2.0", "at most 1"]),
    ("window", [f"{RL}.baseline_window=0"], ["baseline_window is 0", "at least 1"]),
    ("decay", [f"{RL}.baseline_decay=1"], ["baseline_decay is 1.0", "below 1"]),
    ("no decay", [f"{RL}.baseline_decay=0"], ["baseline_decay is 0.0", "above 0"]),
    ("discount", [f"{RL}.discount_factor=0.99"], ["discount_factor is 0.99", "credit_assignment=token"]),
    ("large discount", [f"{RL}.credit_assignment=token", f"{RL}.discount_factor=2"], ["is 2.0", "at most 1"]),
    (
        "credit and ratio",
        [f"{RL}.credit_assignment=token", f"{RL}.importance_ratio=sequence"],
        ["importance_ratio is"],
    ),
    ("credit and mean", [f"{RL}.credit_assignment=token", f"{RL}.kl_reduction=mean"], ["kl_reduction is 'mean'"]),
    (
        "credit and GRPO",
        [f"{RL}.credit_assignment=token", f"{RL}.advantage_estimator=grpo"],
        ["advantage_estimator is 'grpo'", "kl_placement=advantage"],
    ),
    (
        "target without beta",
        [f"{RL}.kl_target=6", f"{RL}.initial_policy_kl_penalty=0"],
        ["kl_target is 6.0", "starts from"],
    ),
    ("negative target", [f"{RL}.kl_target=-1"], ["kl_target is -1.0", "above 0"]),
    ("penalty unread", [f"{RL}.truncation_penalty=1"], ["truncated_samples is 'keep'", "truncation_penalty is 1.0"]),
    ("no penalty", [f"{RL}.truncated_samples=penalise"], ["'penalise'", "truncation_penalty is 0.0"]),
    ("buffer unread", [f"{RL}.overlong_buffer=4"], ["overlong_buffer is 4", "truncated_samples=penalise"]),
    (
        "buffer too long",
        [f"{RL}.truncated_samples=penalise", f"{RL}.truncation_penalty=1", f"{RL}.overlong_buffer=17"],
        ["overlong_buffer is 17 and", "length_params.max_length is 16"],
    ),
    ("moments unread", [f"{RL}.reward_shaping.mean=3"], ["mean=3.0", "standardisation=given", "'none'"]),
    ("no scale", [f"{RL}.reward_shaping.scale=0"], ["reward_shaping.scale is 0", "above 0"]),
    (
        "nothing to compare",
        [f"{RL}.dynamic_filtering=true", f"{RL}.num_rollouts_per_prompt=1", f"{RL}.advantage_estimator=none"],
        ["dynamic_filtering is true", "at least 2"],
    ),
    (
        "cache too small",
        ["model.reinforce.generation_cache_tokens=20"],
        ["generation_cache_tokens is 20 and model.encoder_seq_length is 64", "the longest sequence must fit"],
    ),
    (
        "cache of another engine",
        ["model.reinforce.generation_cache_tokens=9000", "generation=tensorrt_llm"],
        ["generation_cache_tokens is 9000", "generation is 'tensorrt_llm'", "expected null"],
    ),
    (
        "static steps of another engine",
        ["model.reinforce.static_decoding=true", "generation=tensorrt_llm"],
        ["static_decoding is true", "generation is 'tensorrt_llm'", "expected null or false"],
    ),
    (
        "graphs of changing shapes",
        ["model.reinforce.cuda_graphs=true", "model.reinforce.static_decoding=false"],
        ["cuda_graphs is true", "static_decoding is false", "expected true"],
    ),
    (
        "static steps of megatron's layers",
        ["model.reinforce.static_decoding=true", "model.reinforce.lean_decoding=false"],
        ["static_decoding is true", "lean_decoding is false", "expected true"],
    ),
    (
        "graphs of another engine",
        ["model.reinforce.cuda_graphs=true", "generation=tensorrt_llm"],
        ["cuda_graphs is true", "generation is 'tensorrt_llm'", "expected null or false"],
    ),
    (
        "graphs of megatron's layers",
        ["model.reinforce.cuda_graphs=true", "model.reinforce.lean_decoding=false"],
        ["cuda_graphs is true", "lean_decoding is false", "expected true"],
    ),
    (
        "nothing to take over",
        [f"{RL}.generation_work_queue=true", "trainer.devices=2", "model.reinforce.num_rollout_samples=15"],
        ["each of 2 data-parallel ranks has at most 8", "rollout_micro_batch_size is 8", "expected a size below 8"],
    ),
    (
        "second server",
        ["+remote_rm.more_reward_models.safety.port=0"],
        ["remote_rm.more_reward_models.safety.port is 0", "1 to 65535"],
    ),
    (
        "URL as host",
        ["remote_rm.reward_model.ip=http://node7"],
        ["reward_model.ip is 'http://node7'", "such as node7"],
    ),
    (
        "host with a port",
        ["remote_rm.reward_model.ip='node7:5555'"],
        ["reward_model.ip is 'node7:5555'", "without port"],
    ),
    ("host with a space", ["remote_rm.reward_model.ip='node 7'"], ["reward_model.ip is 'node 7'"]),
    ("replica without a port", ["remote_rm.reward_model.replicas=[b]"], ["replicas[0] is 'b'", "expected HOST:PORT"]),
    (
        "replica of a wrong port",
        ["+remote_rm.more_reward_models.safety.replicas=['b:70000']"],
        ["more_reward_models.safety.replicas[0] is 'b:70000'", "1 to 65535"],
    ),
    (
        "replica named twice",
        ["remote_rm.reward_model.replicas=['b:5555','localhost:5555']"],
        ["replicas[1] is localhost:5555, the same server as remote_rm.reward_model.ip and port", "once"],
    ),
    ("its key", ["+remote_rm.more_reward_models.safety.prt=1"], ["more_reward_models.safety.prt", "did you mean"]),
    ("no weight", ["remote_rm.reward_model.weight=0"], ["reward_model.weight is 0", "other than 0"]),
    ("what is sent", ["remote_rm.reward_model.input=ids"], ["reward_model.input is 'ids'", "auto, tokens, text"]),
    ("reward", ["reward=model"], ["reward is 'model'", "server, function"]),
    ("no function", ["reward=function"], ["reward_function.name is not set", "rewards.functions.gsm8k"]),
    ("function unread", ["reward_function.name=a.b"], ["is 'a.b', but reward is 'server'", "more_functions"]),
    (
        "no function's name",
        ["+reward_function.more_functions.brief.weight=2"],
        ["reward_function.more_functions.brief.name is not set"],
    ),
    (
        "function's weight",
        ["reward=function", "reward_function.name=a.b", "reward_function.weight=0"],
        ["reward_function.weight is 0", "other than 0"],
    ),
    (
        "two of one name",
        ["reward=function", "reward_function.name=a.f", "+reward_function.more_functions.f.name=b.g"],
        ["reward sources are named f, f", "a name of its own"],
    ),
    ("no workers", ["reward_function.num_workers=0"], ["num_workers is 0", "at least 1"]),
    ("no memory", ["reward_function.sample_memory_mb=0"], ["sample_memory_mb is 0", "at least 1"]),
    ("no time for it", ["reward_function.sample_timeout_seconds=0"], ["sample_timeout_seconds is 0", "above 0"]),
    ("temperature", [f"{ROLLOUT}.sampling_params.temperature=0"], ["temperature is 0", "above 0", "use_greedy"]),
    (
        "not a number",
        ["trainer.reinforce.reward_shaping.standardisation=given", "trainer.reinforce.reward_shaping.mean=nan"],
        ["reward_shaping.mean is nan", "a number", "finite"],
    ),
    (
        "infinite penalty",
        ["trainer.reinforce.initial_policy_kl_penalty=inf"],
        ["initial_policy_kl_penalty is inf", "at least 0, and finite"],
    ),
    ("a key that may be null", ["trainer.reinforce.kl_target=0"], ["kl_target is 0", "above 0 and finite, or null"]),
    ("infinite temperature", [f"{ROLLOUT}.sampling_params.temperature=inf"], ["temperature is inf", "finite number"]),
    (
        "no time limit of a sample",
        ["reward=function", "reward_function.name=a.b", "reward_function.sample_timeout_seconds=inf"],
        ["sample_timeout_seconds is inf", "finite"],
    ),
    ("top_p", [f"{ROLLOUT}.sampling_params.top_p=0.9"], ["top_p=0.9", "biases the gradient", "allow_biased_sampling"]),
    ("top_k", [f"{ROLLOUT}.sampling_params.top_k=50"], ["top_k=50", "biases the gradient"]),
    (
        "repetition",
        [f"{ROLLOUT}.sampling_params.repetition_penalty=1.1"],
        ["repetition_penalty=1.1", "biases the gradient", "allow_biased_sampling"],
    ),
    ("greedy", [f"{ROLLOUT}.sampling_params.use_greedy=true"], ["use_greedy is true", "nothing to learn"]),
    ("no room", [f"{ROLLOUT}.length_params.max_length=64"], ["max_length is 64", "no room", "encoder_seq_length"]),
    (
        "min above max",
        [f"{ROLLOUT}.length_params.min_length=17", f"{ROLLOUT}.allow_biased_sampling=true"],
        ["min_length is 17", "max_length is 16", "above the latter"],
    ),
    ("positions", ["model.encoder_seq_length=65"], ["encoder_seq_length is 65", "64 positions", "config.json"]),
    ("duration", ["exp_manager.max_time_per_run=4h"], ["max_time_per_run is '4h'", "DD:HH:MM:SS"]),
    ("factor", ["trainer.straggler_factor=0.5"], ["straggler_factor is 0.5", "at least 1"]),
    ("no time", ["exp_manager.max_time_per_run='00:00'"], ["max_time_per_run", "more than no time"]),
    ("precision", ["trainer.precision=16"], ["trainer.precision is '16'", "32, bf16"]),
    ("truncated", [f"{RL}.truncated_samples=maybe"], ["truncated_samples is 'maybe'", "keep, drop, mask, penalise"]),
    ("optimizer", ["model.optim.name=lion"], ["model.optim.name is 'lion'", "adam"]),
    ("schedule", ["model.optim.sched.name=cosine"], ["sched.name is 'cosine'", "CosineAnnealing"]),
    ("min_lr", ["model.optim.sched.min_lr=1"], ["min_lr is 1.0", "above model.optim.lr"]),
    ("betas", ["model.optim.betas=[0.9,1.0]"], ["model.optim.betas", "two numbers", "below 1"]),
    ("port", ["remote_rm.reward_model.port=99999"], ["port is 99999", "1 to 65535"]),
    ("negative beta", [f"{RL}.initial_policy_kl_penalty=-0.1"], ["initial_policy_kl_penalty is -0.1", "at least 0"]),
    ("nan", [f"{RL}.initial_policy_kl_penalty=nan"], ["initial_policy_kl_penalty is nan", "at least 0"]),
    ("no steps", [f"{RL}.max_steps=0"], ["max_steps is 0", "-1 for all"]),
    ("share", [f"{RL}.max_failed_fraction=5"], ["max_failed_fraction is 5", "0 to 1"]),
    ("no time for the server", ["remote_rm.deadline_seconds=0"], ["remote_rm.deadline_seconds is 0", "above 0"]),
    ("no checkpoint kept", ["exp_manager.checkpoint_callback_params.keep_last=0"], ["keep_last is 0", "at least 1"]),
    (
        "best of training's numbers",
        ["exp_manager.checkpoint_callback_params.best_metric=train/rewards"],
        ["best_metric is 'train/rewards'", "such as val/rewards"],
    ),
    (
        "best without validation",
        ["exp_manager.checkpoint_callback_params.keep_best=1", "trainer.reinforce.val_check_interval=0"],
        ["keep_best is 1", "no validation"],
    ),
    (
        "best by nothing known",
        ["exp_manager.checkpoint_callback_params.best_mode=highest"],
        ["best_mode is 'highest'", "max, min"],
    ),
    ("padding", [f"{RL}.rollout_batch_seq_length=65"], ["rollout_batch_seq_length is 65", "encoder_seq_length", "64"]),
    (
        "shared prefix of padded rows",
        ["model.shared_prefix=true", f"{RL}.rollout_batch_seq_length=60"],
        ["shared_prefix is true", "rollout_batch_seq_length is 60", "null"],
    ),
    (
        "shared prefix of shared rows",
        ["model.shared_prefix=true", "model.context_parallel_size=2", "trainer.devices=2"],
        ["shared_prefix is true", "context_parallel_size is 2", "null"],
    ),
    ("few tokens", ["model.tokens_per_micro_batch=63"], ["tokens_per_micro_batch is 63", "encoder_seq_length", "64"]),
    ("peft scheme", ["model.peft.peft_scheme=ptuning"], ["peft_scheme is 'ptuning'", "lora", "null"]),
    ("rank", [LORA, "model.peft.lora_tuning.adapter_dim=0"], ["adapter_dim is 0", "at least 1"]),
    ("alpha", [LORA, "model.peft.lora_tuning.alpha=0"], ["alpha is 0", "above 0"]),
    (
        "lora target",
        [LORA, "model.peft.lora_tuning.target_modules=[q_proj,lm_head]"],
        ["target_modules is ['q_proj', 'lm_head']", "down_proj, all"],
    ),
    (
        "no lora target",
        [LORA, "model.peft.lora_tuning.target_modules=[]"],
        ["target_modules is []", "expected some of"],
    ),
    ("lora unread", ["model.peft.lora_tuning.adapter_dim=8"], ["lora_tuning is given", "peft_scheme=lora"]),
    ("reference", ["model.reference_placement=disk"], ["reference_placement is 'disk'", "host, device"]),
    ("reference and lora", [LORA, "model.reference_placement=device"], ["reference_placement is 'device'", "no copy"]),
    ("preflight", ["preflight=depe"], ["preflight is 'depe'", "true, false or deep"]),
    ("mean response", ["preflight_response_tokens=0"], ["preflight_response_tokens is 0", "at least 1"]),
    ("negative seed", ["model.seed=-1"], ["model.seed is -1", "at least 0"]),
]


@pytest.mark.parametrize(("overrides", "words"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_one_fault_is_told_in_one_sentence(folder, overrides, words):
    (fault,) = faults_of(folder, *overrides)
    assert [word for word in words if word not in fault] == [], fault


def test_graphs_of_stages(folder):
    """This model of one layer cannot have two, which is another fault."""
    graphs = ["model.reinforce.static_decoding=true", "model.reinforce.cuda_graphs=true"]
    (found,) = [f for f in faults_of(folder, *graphs, "model.pipeline_model_parallel_size=2") if "cuda_graphs" in f]
    assert "pipeline_model_parallel_size is 2" in found and "expected 1" in found


def test_missing_files_and_folders_are_named(folder, tmp_path):
    (fault,) = faults_of(folder, f"pretrained_checkpoint.restore_from_path={tmp_path}/none")
    assert "restore_from_path" in fault and "none, which does not exist" in fault
    (tmp_path / "empty").mkdir()
    faults = faults_of(folder, f"pretrained_checkpoint.restore_from_path={tmp_path}/empty")
    assert ["has no config.json" in faults[0], len(faults)] == [True, 1]
    (tmp_path / "empty" / "config.json").write_text("{}")
    (fault,) = faults_of(folder, f"pretrained_checkpoint.restore_from_path={tmp_path}/empty")
    assert "has no tokenizer_config.json" in fault
    (fault,) = faults_of(folder, f"model.data.data_prefix.train={tmp_path}/none.jsonl")
    assert "none.jsonl" in fault and "train" in fault
    (fault,) = faults_of(folder, f"model.data.data_prefix.validation=[{tmp_path}/none.jsonl]")
    assert "none.jsonl" in fault and "validation" in fault
    (tmp_path / "file").write_text("")
    (fault,) = faults_of(folder, f"exp_manager.explicit_log_dir={tmp_path}/file/run")
    assert "explicit_log_dir" in fault and f"no folder can be made in {tmp_path}/file: Not a directory" in fault


def test_the_ranks_that_were_started_must_be_those_of_the_configuration(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    (fault,) = faults_of(folder, "trainer.devices=2")
    assert "4 ranks were started (WORLD_SIZE)" in fault and "1 x 2 = 2" in fault


def test_the_times_of_the_allocation_are_looked_at_too(folder, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_START_TIME", "2026-11-21T18:00:00")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "Unknown")
    faults = faults_of(folder, "exp_manager.max_time_per_run=4h")
    assert ["SLURM_JOB_START_TIME" in fault for fault in faults] == [False, True, False]
    assert "'4h'" in faults[0] and "SLURM_JOB_END_TIME is 'Unknown'; expected unix seconds" in faults[2]


def test_all_faults_are_in_one_message(folder):
    overrides = [
        "+model.optimizer=adam",
        "model.optim.lr=fast",
        f"{RL}.num_rollouts_per_prompt=1",
        f"{ROLLOUT}.sampling_params.temperature=0",
        "model.data.data_prefix.train=/none.jsonl",
        "exp_manager.max_time_per_run=tomorrow",
    ]
    faults = faults_of(folder, *overrides)
    keys = ["model.optimizer", "model.optim.lr", "num_rollouts_per_prompt", "temperature", "none.jsonl", "tomorrow"]
    assert [sum(key in fault for fault in faults) for key in keys] == [1] * 6
    assert len(faults) == 6
    text = str(ConfigError(faults))
    assert text.startswith("6 faults in the configuration:\n  1. ")


def defaults() -> dict[str, Any]:
    config = TrainConfig()
    config.pretrained_checkpoint.restore_from_path = config.model.data.data_prefix.train = "???"
    return config.model_dump()


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix[:-1]: node}
    return {key: value for name, child in node.items() for key, value in flat(child, f"{prefix}{name}.").items()}


def test_the_yaml_and_the_dataclasses_have_the_same_keys_and_defaults():
    composed = flat(OmegaConf.to_container(compose(), resolve=True))
    own = flat(defaults())
    assert sorted(composed) == sorted(own)
    assert {key: (value, own[key]) for key, value in composed.items() if value != own[key]} == {}
    types = {(type(value), type(own[key])) for key, value in composed.items()}
    assert {pair for pair in types if pair[0] is not pair[1]} <= {(int, float)}, "a float may be written as 60"


def test_checking_a_configuration_imports_no_heavy_library(folder):
    code = (
        "import sys; from omegaconf import OmegaConf; from reinforce_rl.config.load import load_config\n"
        "load_config(OmegaConf.load(sys.argv[1])); from reinforce_rl.launch.programs import with_config\n"
        "print(*(m for m in ('torch', 'transformers', 'megatron') if m in sys.modules))"
    )
    (folder / "composed.yaml").write_text(OmegaConf.to_yaml(compose(*right(folder))))
    command = [sys.executable, "-c", code, str(folder / "composed.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.stdout.strip()) == ("", "")


def run_script(*overrides: str, deadline: float = DEADLINE_S) -> str:
    """What the real script says before it ends with exit code 1 within the deadline, without a traceback."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *overrides],
        capture_output=True,
        text=True,
        timeout=4 * deadline,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seconds = time.monotonic() - started
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert seconds < deadline
    return done.stderr


def test_the_script_says_an_unknown_override(folder):
    said = run_script(*right(folder), "trainer.reinforce.max_stps=5")
    assert said.startswith("error: ")
    assert "trainer.reinforce.max_stps is not a key" in said and "did you mean trainer.reinforce.max_steps" in said


def test_the_script_finds_a_key_in_another_group(folder):
    said = run_script(*right(folder), "trainer.save_interval=5")
    assert "trainer.save_interval is not a key" in said and "trainer.reinforce.save_interval" in said


def test_the_script_says_how_to_fill_a_group_of_free_names(folder):
    said = run_script(*right(folder), "model.megatron_overrides={layernorm_epsilon: 0.5}")
    assert "give each as +model.megatron_overrides.NAME=VALUE" in said


def test_the_script_says_what_must_be_set_and_what_is_missing(folder):
    said = run_script("model.optim.lr=0", "trainer.devices=two")
    assert said.startswith("error: 4 faults"), "required keys that are not set hide no other fault"
    assert "pretrained_checkpoint.restore_from_path is not set" in said
    assert "model.data.data_prefix.train is not set" in said
    assert "model.optim.lr is 0" in said and "trainer.devices is 'two'" in said
    said = run_script(*right(folder), f"model.data.data_prefix.train={folder}/none.jsonl", "model.optim.lr=0")
    assert said.startswith("error: 2 faults")
    assert "none.jsonl" in said and "model.optim.lr is 0" in said


def test_the_script_says_an_unreachable_server_before_it_loads_a_model(folder):
    port = free_port()
    overrides = [f"remote_rm.reward_model.port={port}", "remote_rm.ready_timeout_seconds=2"]
    said = run_script(*right(folder), *overrides, f"exp_manager.explicit_log_dir={folder / 'unreachable'}")
    assert "error: " in said and f"localhost:{port}" in said


def test_the_script_says_a_wrong_tokenizer_before_it_loads_a_model(folder):
    with FakeRewardServer() as server:
        overrides = [f"remote_rm.reward_model.port={server.port}", f"exp_manager.explicit_log_dir={folder / 'wrong'}"]
        said = run_script(*right(folder), *overrides)
    assert "tokenizer" in said and "vocabulary" in said


def test_the_script_says_an_unsupported_model_before_it_waits_for_the_server(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    overrides = [f"remote_rm.reward_model.port={free_port()}", f"exp_manager.explicit_log_dir={tmp_path / 'run'}"]
    said = run_script(*right(folder), *overrides, f"pretrained_checkpoint.restore_from_path={tmp_path / 'model'}")
    assert "model_type is 'mamba'" in said and "llama" in said
