"""Invalid configurations: rejected before a model is loaded, in one message with the fixes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import check_fault, printed_keys
from helpers.fake_reward_server import FakeRewardServer
from helpers.tiny_run import compose, three_letters, write_prompts
from helpers.tiny_tokenizer import write_model_without_weights
from helpers.toy_server import free_port
from omegaconf import OmegaConf

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.base import Section
from reinforce_rl.config.compose import compose as composed
from reinforce_rl.config.describe import PROGRAMS, keys_of
from reinforce_rl.config.load import load_config, read, read_config
from reinforce_rl.errors import ConfigError, key_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_reinforce_actor.py"
# a slow and busy machine may need this long for a message that is immediate elsewhere
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Every file that a configuration names except weights: loading a model from here fails."""
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
            *right(folder),
            "trainer.reinforce.num_rollouts_per_prompt=8",
            "trainer.precision=bf16",
            "model.optim.lr=1",
        )
    )
    assert config.trainer.reinforce.num_rollouts_per_prompt == 8
    assert config.trainer.precision == "bf16"
    assert config.model.optim.lr == 1.0
    assert isinstance(config.model.optim.lr, float)
    assert config.max_prompt_tokens == 48
    assert config.model.data.data_prefix.train == str(folder / "train.jsonl")


PARALLEL = ["trainer.devices=8", "model.tensor_model_parallel_size=2"]


@pytest.mark.parametrize(
    ("gpu", "overrides", "precision", "shared"),
    [
        (False, PARALLEL, "32", (False, False)),
        (True, PARALLEL, "bf16", (True, True)),
        (True, [], "bf16", (False, False)),  # no other process on the device
        (True, ["trainer.devices=2", "model.context_parallel_size=2"], "bf16", (True, True)),
        (
            True,
            [*PARALLEL, "trainer.precision=32", "model.optim.distributed=false"],
            "32",
            (False, True),
        ),
        (
            False,
            [*PARALLEL, "trainer.precision=bf16", "model.optim.distributed=true"],
            "bf16",
            (True, False),
        ),
        (False, [*PARALLEL, "preflight=deep"], "bf16", (True, True)),  # a plan for GPUs
    ],
)
def test_defaults_that_depend_on_a_gpu(folder, monkeypatch, gpu, overrides, precision, shared):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    config = load_config(compose(*right(folder), *overrides))
    assert config.trainer.precision == precision
    assert (config.model.optim.distributed, config.model.optim.overlap_grad_sync) == shared


def test_a_home_folder_is_written_with_a_tilde(folder, tmp_path, monkeypatch):
    """Neither a shell nor YAML expands KEY=~/folder, and Hydra's grammar requires quotes for ~."""
    monkeypatch.setenv("HOME", str(folder))
    home = ["pretrained_checkpoint.restore_from_path=~/model", "exp_manager.explicit_log_dir=~/run"]
    overrides = [
        override for override in right(folder) if override.partition("=")[0] not in str(home)
    ]
    config = load_config(composed("train_reinforce_actor", [*overrides, *home]))
    assert config.pretrained_checkpoint.restore_from_path == str(folder / "model")
    assert config.exp_manager.explicit_log_dir == str(folder / "run")


def _paths(schema: type[Section]) -> list[str]:
    return [
        key.path
        for key in keys_of(schema())
        if key.kind.startswith("path") and "list" not in key.kind
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_path_may_begin_with_a_tilde(name, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    paths = _paths(PROGRAMS[name])
    assert len(paths) >= 2
    config, _ = read(PROGRAMS[name], composed(name, [f"{path}=~/x y" for path in paths]))
    assert {path: attrgetter(path)(config) for path in paths} == dict.fromkeys(
        paths, "/home/me/x y"
    )


def _nullable_texts(section: Section, prefix: str = "") -> Iterator[str]:
    for name, value in section:
        if isinstance(value, Section):
            yield from _nullable_texts(value, f"{prefix}{name}.")
        elif value is None and "string" in str(
            type(section).model_json_schema()["properties"][name]["anyOf"]
        ):
            yield f"{prefix}{name}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_none_is_not_a_string_where_null_is_meant(name):
    """Hydra and YAML read None as a string, which became a system prompt or a project's name."""
    keys = list(_nullable_texts(PROGRAMS[name]()))
    assert len(keys) > 3
    _, faults = read(PROGRAMS[name], composed(name, [f"{key}=None" for key in keys]))
    of_none = [fault for fault in faults if key_of(fault) == "config.value.text_none"]
    assert [fault.split(" ")[0] for fault in of_none] == keys
    for key, fault in zip(keys, of_none, strict=True):
        check_fault([fault], "config.value.text_none", "'None'", f"{key}=null")
    _, faults = read(PROGRAMS[name], composed(name, [f"{key}=null" for key in keys]))
    assert not [fault for fault in faults if fault.split(" ")[0] in keys]


RL = "trainer.reinforce"
ROLLOUT = "model.reinforce"

LORA = "model.peft.peft_scheme=lora"
PENALIZE = f"{RL}.truncated_samples=penalize"
BY_FUNCTION = ["reward=function", "reward_function.name=a.b"]


@dataclass(frozen=True)
class Wrong:
    """Overrides with a single fault, its key, and the values in its message."""

    name: str  # id of the test
    overrides: list[str]
    key: str
    values: list[object]


OF_KEYS = [
    Wrong(
        "unknown key",
        [f"+{RL}.max_stps=5"],
        "config.key.unknown",
        [f"{RL}.max_stps", f"{RL}.max_steps"],
    ),
    Wrong(
        "unknown group",
        ["+model.zzz.a=1"],
        "config.key.unknown",
        ["model.zzz", "micro_batch_size"],
    ),
    Wrong(
        "key of a second server",
        ["+remote_rm.more_reward_models.safety.prt=1"],
        "config.key.unknown",
        [
            "remote_rm.more_reward_models.safety.prt",
            "remote_rm.more_reward_models.safety.port",
        ],
    ),
    Wrong(
        "wrong type",
        ["model.optim.lr=fast"],
        "config.value.wrong_type",
        ["model.optim.lr", "'fast'", "expected a number"],
    ),
    Wrong(
        "bool for a number",
        ["trainer.devices=true"],
        "config.value.wrong_type",
        ["trainer.devices", True, "expected a whole number"],
    ),
    Wrong(
        "fraction for a count",
        [f"{RL}.max_steps=1.5"],
        "config.value.wrong_type",
        [f"{RL}.max_steps", 1.5, "expected a whole number"],
    ),
    Wrong(
        "list of wrong items",
        ["model.optim.betas=[0.9,x]"],
        "config.value.wrong_type",
        ["model.optim.betas", "[0.9, 'x']", "expected a list, each a number"],
    ),
    Wrong(
        "null",
        ["model.seed=null"],
        "config.value.wrong_type",
        ["model.seed", None, "expected a whole number"],
    ),
    Wrong(
        "no folder's name",
        ["pretrained_checkpoint.restore_from_path=[a]"],
        "config.value.wrong_type",
        ["pretrained_checkpoint.restore_from_path", "['a']", "expected a string"],
    ),
    Wrong(
        "overrides",
        ["model.megatron_overrides=3"],
        "config.value.wrong_type",
        [
            "model.megatron_overrides",
            3,
            "expected groups of keys, each under a name of your choice",
        ],
    ),
    Wrong(
        "text for a group",
        ["model.optim=adam"],
        "config.value.not_a_group",
        ["model.optim", "'adam'"],
    ),
    Wrong(
        "text for another group",
        ["pretrained_checkpoint=sft"],
        "config.value.not_a_group",
        ["pretrained_checkpoint", "'sft'"],
    ),
    Wrong(
        "not set",
        ["pretrained_checkpoint.restore_from_path=???"],
        "config.value.not_set",
        ["pretrained_checkpoint.restore_from_path=VALUE"],
    ),
    Wrong(
        "no prompts",
        ["model.data.data_prefix.train=???"],
        "config.value.not_set",
        ["model.data.data_prefix.train=VALUE"],
    ),
    Wrong(
        "no function's name",
        ["+reward_function.more_functions.brief.weight=2"],
        "config.value.not_set",
        ["reward_function.more_functions.brief.name=VALUE"],
    ),
    Wrong(
        "empty",
        ["pretrained_checkpoint.restore_from_path=''"],
        "config.value.empty",
        ["pretrained_checkpoint.restore_from_path=VALUE"],
    ),
    Wrong(
        "dead interpolation",
        ["model.seed=${model.sed}"],
        "config.value.not_resolved",
        ["model.seed", "model.sed'"],
    ),
]

OF_ONE_VALUE = [
    # Invalid choices, with the valid ones.
    Wrong(
        "granularity",
        ["model.activations_checkpoint_granularity=some"],
        "config.value.not_a_choice",
        ["model.activations_checkpoint_granularity", "'some'", "selective", "full"],
    ),
    Wrong(
        "ratio",
        [f"{RL}.importance_ratio=ppo"],
        "config.value.not_a_choice",
        [f"{RL}.importance_ratio", "'ppo'", "none, token, sequence"],
    ),
    Wrong(
        "estimator",
        [f"{RL}.advantage_estimator=ppo"],
        "config.value.not_a_choice",
        [f"{RL}.advantage_estimator", "'ppo'", "rloo"],
    ),
    Wrong(
        "what is sent",
        ["remote_rm.reward_model.input=ids"],
        "config.value.not_a_choice",
        ["remote_rm.reward_model.input", "'ids'", "auto, tokens, text"],
    ),
    Wrong(
        "reward",
        ["reward=model"],
        "config.reward.unknown",
        ["reward", "'model'", "server, function"],
    ),
    Wrong(
        "precision",
        ["trainer.precision=16"],
        "config.value.not_a_choice",
        ["trainer.precision", "'16'", "32, bf16"],
    ),
    Wrong(
        "truncated",
        [f"{RL}.truncated_samples=maybe"],
        "config.value.not_a_choice",
        [f"{RL}.truncated_samples", "'maybe'", "keep, drop, mask, penalize"],
    ),
    Wrong(
        "optimizer",
        ["model.optim.name=lion"],
        "config.value.not_a_choice",
        ["model.optim.name", "'lion'", "adam"],
    ),
    Wrong(
        "schedule",
        ["model.optim.sched.name=cosine"],
        "config.value.not_a_choice",
        ["model.optim.sched.name", "'cosine'", "CosineAnnealing"],
    ),
    Wrong(
        "best by nothing known",
        ["exp_manager.checkpoint_callback_params.best_mode=highest"],
        "config.value.not_a_choice",
        ["exp_manager.checkpoint_callback_params.best_mode", "'highest'", "max, min"],
    ),
    Wrong(
        "peft scheme",
        ["model.peft.peft_scheme=ptuning"],
        "config.value.not_a_choice",
        ["model.peft.peft_scheme", "'ptuning'", "lora", "null"],
    ),
    Wrong(
        "lora target",
        [LORA, "model.peft.lora_tuning.target_modules=[q_proj,lm_head]"],
        "config.value.not_a_choice",
        ["model.peft.lora_tuning.target_modules", "['q_proj', 'lm_head']", "down_proj, all"],
    ),
    Wrong(
        "reference",
        ["model.reference_placement=disk"],
        "config.value.not_a_choice",
        ["model.reference_placement", "'disk'", "host, device"],
    ),
    Wrong(
        "preflight",
        ["preflight=depe"],
        "config.value.not_a_choice",
        ["preflight", "'depe'", "true", "false", "deep"],
    ),
    # Out of range, with the bounds.
    Wrong(
        "no sample",
        [f"{RL}.num_rollouts_per_prompt=0"],
        "config.value.out_of_range",
        [f"{RL}.num_rollouts_per_prompt is 0", "expected at least 1"],
    ),
    Wrong(
        "clip",
        [f"{RL}.ratio_clip_low=2"],
        "config.value.out_of_range",
        [f"{RL}.ratio_clip_low is 2.0", "expected at least 0 and at most 1"],
    ),
    Wrong(
        "window",
        [f"{RL}.baseline_window=0"],
        "config.value.out_of_range",
        [f"{RL}.baseline_window is 0", "expected at least 1"],
    ),
    Wrong(
        "decay",
        [f"{RL}.baseline_decay=1"],
        "config.value.out_of_range",
        [f"{RL}.baseline_decay is 1.0", "expected above 0 and below 1"],
    ),
    Wrong(
        "no decay",
        [f"{RL}.baseline_decay=0"],
        "config.value.out_of_range",
        [f"{RL}.baseline_decay is 0.0", "expected above 0 and below 1"],
    ),
    Wrong(
        "large discount",
        [f"{RL}.credit_assignment=token", f"{RL}.discount_factor=2"],
        "config.value.out_of_range",
        [f"{RL}.discount_factor is 2.0", "expected above 0 and at most 1"],
    ),
    Wrong(
        "negative target",
        [f"{RL}.kl_target=-1"],
        "config.value.out_of_range",
        [f"{RL}.kl_target is -1.0", "expected above 0 and finite, or null"],
    ),
    Wrong(
        "a key that may be null",
        [f"{RL}.kl_target=0"],
        "config.value.out_of_range",
        [f"{RL}.kl_target is 0", "expected above 0 and finite, or null"],
    ),
    Wrong(
        "no scale",
        [f"{RL}.reward_shaping.scale=0"],
        "config.value.out_of_range",
        [f"{RL}.reward_shaping.scale is 0", "expected above 0 and finite"],
    ),
    Wrong(
        "second server",
        ["+remote_rm.more_reward_models.safety.port=0"],
        "config.value.out_of_range",
        ["remote_rm.more_reward_models.safety.port is 0", "expected 1 to 65535"],
    ),
    Wrong(
        "port",
        ["remote_rm.reward_model.port=99999"],
        "config.value.out_of_range",
        ["remote_rm.reward_model.port is 99999", "expected 1 to 65535"],
    ),
    Wrong(
        "no weight",
        ["remote_rm.reward_model.weight=0"],
        "config.value.out_of_range",
        ["remote_rm.reward_model.weight is 0", "expected a number other than 0"],
    ),
    Wrong(
        "function's weight",
        [*BY_FUNCTION, "reward_function.weight=0"],
        "config.value.out_of_range",
        ["reward_function.weight is 0", "expected a number other than 0"],
    ),
    Wrong(
        "no workers",
        ["reward_function.num_workers=0"],
        "config.value.out_of_range",
        ["reward_function.num_workers is 0", "expected at least 1"],
    ),
    Wrong(
        "no memory",
        ["reward_function.sample_memory_mb=0"],
        "config.value.out_of_range",
        ["reward_function.sample_memory_mb is 0", "expected at least 1"],
    ),
    Wrong(
        "no time for it",
        ["reward_function.sample_timeout_seconds=0"],
        "config.value.out_of_range",
        ["reward_function.sample_timeout_seconds is 0", "expected above 0 and finite"],
    ),
    Wrong(
        "temperature",
        [f"{ROLLOUT}.sampling_params.temperature=0"],
        "config.value.out_of_range",
        [
            f"{ROLLOUT}.sampling_params.temperature is 0",
            "use_greedy",
            "expected a finite number above 0",
        ],
    ),
    Wrong(
        "factor",
        ["trainer.straggler_factor=0.5"],
        "config.value.out_of_range",
        ["trainer.straggler_factor is 0.5", "expected at least 1"],
    ),
    Wrong(
        "betas",
        ["model.optim.betas=[0.9,1.0]"],
        "config.value.out_of_range",
        ["model.optim.betas is [0.9, 1.0]", "expected two numbers, each at least 0 and below 1"],
    ),
    Wrong(
        "negative beta",
        [f"{RL}.initial_policy_kl_penalty=-0.1"],
        "config.value.out_of_range",
        [f"{RL}.initial_policy_kl_penalty is -0.1", "expected at least 0"],
    ),
    Wrong(
        "no steps",
        [f"{RL}.max_steps=0"],
        "config.value.out_of_range",
        [f"{RL}.max_steps is 0", "expected at least 1, or -1 for all of max_epochs"],
    ),
    Wrong(
        "share",
        [f"{RL}.max_failed_fraction=5"],
        "config.value.out_of_range",
        [f"{RL}.max_failed_fraction is 5", "expected a share, 0 to 1"],
    ),
    Wrong(
        "no time for the server",
        ["remote_rm.deadline_seconds=0"],
        "config.value.out_of_range",
        ["remote_rm.deadline_seconds is 0", "expected above 0 and finite"],
    ),
    Wrong(
        "no checkpoint kept",
        ["exp_manager.checkpoint_callback_params.keep_last=0"],
        "config.value.out_of_range",
        ["exp_manager.checkpoint_callback_params.keep_last is 0", "expected at least 1"],
    ),
    Wrong(
        "rank",
        [LORA, "model.peft.lora_tuning.adapter_dim=0"],
        "config.value.out_of_range",
        ["model.peft.lora_tuning.adapter_dim is 0", "expected at least 1"],
    ),
    Wrong(
        "alpha",
        [LORA, "model.peft.lora_tuning.alpha=0"],
        "config.value.out_of_range",
        ["model.peft.lora_tuning.alpha is 0", "expected above 0 and finite"],
    ),
    Wrong(
        "mean response",
        ["preflight_response_tokens=0"],
        "config.value.out_of_range",
        ["preflight_response_tokens is 0", "expected at least 1, or null"],
    ),
    Wrong(
        "negative seed",
        ["model.seed=-1"],
        "config.value.out_of_range",
        ["model.seed is -1", "expected at least 0"],
    ),
    Wrong(
        "no lora target",
        [LORA, "model.peft.lora_tuning.target_modules=[]"],
        "config.value.wrong_length",
        [
            "model.peft.lora_tuning.target_modules is []",
            "expected some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, all",
        ],
    ),
    Wrong(
        "one beta",
        ["model.optim.betas=[0.9]"],
        "config.value.wrong_length",
        ["model.optim.betas is [0.9]", "expected two numbers, each at least 0 and below 1"],
    ),
    # Not finite.
    Wrong(
        "not a number",
        [f"{RL}.reward_shaping.standardization=given", f"{RL}.reward_shaping.mean=nan"],
        "config.value.not_finite",
        [f"{RL}.reward_shaping.mean is nan", "expected a number, and finite"],
    ),
    Wrong(
        "infinite penalty",
        [f"{RL}.initial_policy_kl_penalty=inf"],
        "config.value.not_finite",
        [f"{RL}.initial_policy_kl_penalty is inf", "expected at least 0, and finite"],
    ),
    Wrong(
        "nan",
        [f"{RL}.initial_policy_kl_penalty=nan"],
        "config.value.not_finite",
        [f"{RL}.initial_policy_kl_penalty is nan", "expected at least 0, and finite"],
    ),
    Wrong(
        "infinite temperature",
        [f"{ROLLOUT}.sampling_params.temperature=inf"],
        "config.value.not_finite",
        [f"{ROLLOUT}.sampling_params.temperature is inf", "expected a finite number above 0"],
    ),
    Wrong(
        "no time limit of a sample",
        [*BY_FUNCTION, "reward_function.sample_timeout_seconds=inf"],
        "config.value.not_finite",
        ["reward_function.sample_timeout_seconds is inf", "expected above 0 and finite"],
    ),
    # No hosts.
    Wrong(
        "URL as host",
        ["remote_rm.reward_model.ip=http://node7"],
        "config.value.no_host",
        ["remote_rm.reward_model.ip is 'http://node7'", "node7,"],
    ),
    Wrong(
        "host with a port",
        ["remote_rm.reward_model.ip='node7:5555'"],
        "config.value.no_host",
        ["remote_rm.reward_model.ip is 'node7:5555'"],
    ),
    Wrong(
        "host with a space",
        ["remote_rm.reward_model.ip='node 7'"],
        "config.value.no_host",
        ["remote_rm.reward_model.ip is 'node 7'"],
    ),
    # Rules that types do not express.
    Wrong(
        "replica without a port",
        ["remote_rm.reward_model.replicas=[b]"],
        "config.replicas.no_address",
        ["remote_rm.reward_model.replicas[0] is 'b'", "HOST:PORT"],
    ),
    Wrong(
        "replica of a wrong port",
        ["+remote_rm.more_reward_models.safety.replicas=['b:70000']"],
        "config.replicas.no_address",
        ["remote_rm.more_reward_models.safety.replicas[0] is 'b:70000'", 1, 65535],
    ),
    Wrong(
        "duration",
        ["exp_manager.max_time_per_run=4h"],
        "config.max_time_per_run.invalid",
        ["exp_manager.max_time_per_run is '4h'", "DD:HH:MM:SS"],
    ),
    Wrong(
        "no time",
        ["exp_manager.max_time_per_run='00:00'"],
        "config.max_time_per_run.invalid",
        ["exp_manager.max_time_per_run is '00:00'"],
    ),
    Wrong(
        "best of training's numbers",
        ["exp_manager.checkpoint_callback_params.best_metric=train/rewards"],
        "config.best_metric.not_of_validation",
        ["exp_manager.checkpoint_callback_params.best_metric is 'train/rewards'", "val/rewards"],
    ),
    Wrong(
        "greedy",
        [f"{ROLLOUT}.sampling_params.use_greedy=true"],
        "config.use_greedy.in_training",
        [f"{ROLLOUT}.sampling_params.use_greedy is true", "val_sampling_params"],
    ),
    Wrong(
        "top_p",
        [f"{ROLLOUT}.sampling_params.top_p=0.9"],
        "config.sampling_params.biased",
        [ROLLOUT, "sampling_params.top_p=0.9", f"{ROLLOUT}.allow_biased_sampling=true"],
    ),
    Wrong(
        "top_k",
        [f"{ROLLOUT}.sampling_params.top_k=50"],
        "config.sampling_params.biased",
        ["sampling_params.top_k=50"],
    ),
    Wrong(
        "repetition",
        [f"{ROLLOUT}.sampling_params.repetition_penalty=1.1"],
        "config.sampling_params.biased",
        ["sampling_params.repetition_penalty=1.1", f"{ROLLOUT}.allow_biased_sampling=true"],
    ),
]

OF_SEVERAL_SETTINGS = [
    Wrong(
        "batch size",
        ["model.global_batch_size=7"],
        "config.global_batch_size.not_a_divisor_of_step",
        ["model.global_batch_size is 7", "8 x 4 = 32", "a multiple of 4", "null"],
    ),
    Wrong(
        "no mini-batch",
        [f"{RL}.mini_batches=0"],
        "config.value.out_of_range",
        [f"{RL}.mini_batches is 0", "at least 1"],
    ),
    Wrong(
        "two ways to divide a batch",
        [f"{RL}.mini_batches=2", "model.global_batch_size=8", f"{RL}.importance_ratio=token"],
        "config.mini_batches.with_global_batch_size",
        [f"{RL}.mini_batches is 2", "model.global_batch_size is 8"],
    ),
    Wrong(
        "mini-batches",
        [f"{RL}.mini_batches=3", f"{RL}.importance_ratio=token"],
        "config.mini_batches.not_a_divisor_of_prompts",
        [f"{RL}.mini_batches is 3", "model.reinforce.num_rollout_samples is 8"],
    ),
    Wrong(
        "tensor parallel",
        ["model.tensor_model_parallel_size=2"],
        "config.parallel_sizes.not_a_divisor_of_ranks",
        ["model.tensor_model_parallel_size is 2", "1 x 1", "trainer.devices"],
    ),
    Wrong(
        "product",
        [
            "trainer.devices=6",
            "model.tensor_model_parallel_size=2",
            "model.context_parallel_size=2",
        ],
        "config.parallel_sizes.not_a_divisor_of_ranks",
        ["model.tensor_model_parallel_size (2) x model.context_parallel_size (2) is 4", "1 x 6"],
    ),
    Wrong(
        "sequence parallel",
        ["model.sequence_parallel=true"],
        "config.sequence_parallel.without_tensor_parallel",
        ["model.sequence_parallel is true", "model.tensor_model_parallel_size=1"],
    ),
    Wrong(
        "layers",
        ["trainer.devices=2", "model.pipeline_model_parallel_size=2"],
        "config.pipeline_model_parallel_size.not_a_divisor_of_layers",
        [
            "model.pipeline_model_parallel_size is 2",
            "the 1 layers",
            "num_hidden_layers",
            "model/config.json",
            "model.megatron_overrides.num_layers_in_first_pipeline_stage",
        ],
    ),
    Wrong(
        "full without a method",
        [
            "model.activations_checkpoint_granularity=full",
            "model.activations_checkpoint_num_layers=1",
        ],
        "config.activations_checkpoint_method.missing",
        ["model.activations_checkpoint_method is null", "uniform", "block"],
    ),
    Wrong(
        "full without layers",
        [
            "model.activations_checkpoint_granularity=full",
            "model.activations_checkpoint_method=block",
        ],
        "config.activations_checkpoint_num_layers.missing",
        ["model.activations_checkpoint_num_layers is null", 1],
    ),
    Wrong(
        "method without full",
        ["model.activations_checkpoint_method=block"],
        "config.activations_checkpoint_method.without_granularity_full",
        ["model.activations_checkpoint_method is 'block'", "granularity=full"],
    ),
    Wrong(
        "idle ranks",
        ["trainer.devices=16"],
        "config.num_rollout_samples.fewer_than_ranks",
        ["model.reinforce.num_rollout_samples is 8", 16],
    ),
    Wrong(
        "one sample",
        [f"{RL}.num_rollouts_per_prompt=1"],
        "config.num_rollouts_per_prompt.too_small_for_estimator",
        [f"{RL}.num_rollouts_per_prompt is 1", "advantage_estimator=rloo", 2],
    ),
    Wrong(
        "nothing to compare",
        [
            f"{RL}.dynamic_filtering=true",
            f"{RL}.num_rollouts_per_prompt=1",
            f"{RL}.advantage_estimator=none",
        ],
        "config.num_rollouts_per_prompt.too_small_for_dynamic_filtering",
        [f"{RL}.dynamic_filtering is true", "num_rollouts_per_prompt is 1", 2],
    ),
    Wrong(
        "off-policy",
        [f"{RL}.reinforce_epochs=2"],
        "config.importance_ratio.missing_off_policy",
        [f"{RL}.reinforce_epochs is 2", f"{RL}.importance_ratio=token"],
    ),
    Wrong(
        "several updates",
        ["model.global_batch_size=8"],
        "config.importance_ratio.missing_off_policy",
        ["model.global_batch_size is 8", f"{RL}.importance_ratio=token"],
    ),
    Wrong(
        "masks",
        [f"{RL}.generator_correction=token_mask", f"{RL}.generator_ratio_cap=1"],
        "config.generator_ratio_cap.too_small_for_mask",
        [f"{RL}.generator_correction is 'token_mask'", "generator_ratio_cap is 1.0", 1],
    ),
    Wrong(
        "discount",
        [f"{RL}.discount_factor=0.99"],
        "config.discount_factor.without_token_credit",
        [f"{RL}.discount_factor is 0.99", "credit_assignment=token"],
    ),
    Wrong(
        "credit and ratio",
        [f"{RL}.credit_assignment=token", f"{RL}.importance_ratio=sequence"],
        "config.importance_ratio.conflicts_with_token_credit",
        [f"{RL}.importance_ratio is 'sequence'", "credit_assignment is 'token'"],
    ),
    Wrong(
        "credit and mean",
        [f"{RL}.credit_assignment=token", f"{RL}.kl_reduction=mean"],
        "config.kl_reduction.conflicts_with_token_credit",
        [f"{RL}.kl_reduction is 'mean'", "credit_assignment is 'token'"],
    ),
    Wrong(
        "credit and GRPO",
        [f"{RL}.credit_assignment=token", f"{RL}.advantage_estimator=grpo"],
        "config.advantage_estimator.conflicts_with_token_credit",
        [
            f"{RL}.advantage_estimator is 'grpo'",
            "kl_placement is 'reward'",
            "kl_placement=advantage",
        ],
    ),
    Wrong(
        "two names of an estimator",
        [f"{RL}.use_absolute_kl=true", f"{RL}.kl_estimator=k3"],
        "config.use_absolute_kl.conflicts_with_kl_estimator",
        [f"{RL}.use_absolute_kl is true", "kl_estimator is 'k3'"],
    ),
    Wrong(
        "target without beta",
        [f"{RL}.kl_target=6", f"{RL}.initial_policy_kl_penalty=0"],
        "config.kl_target.without_reference",
        [f"{RL}.kl_target is 6.0", "initial_policy_kl_penalty is 0.0"],
    ),
    Wrong(
        "penalty unread",
        [f"{RL}.truncation_penalty=1"],
        "config.truncation_penalty.conflicts_with_truncated_samples",
        [f"{RL}.truncated_samples is 'keep'", "truncation_penalty is 1.0"],
    ),
    Wrong(
        "no penalty",
        [PENALIZE],
        "config.truncation_penalty.conflicts_with_truncated_samples",
        [f"{RL}.truncated_samples is 'penalize'", "truncation_penalty is 0.0"],
    ),
    Wrong(
        "buffer unread",
        [f"{RL}.overlong_buffer=4"],
        "config.overlong_buffer.without_truncated_samples_penalize",
        [f"{RL}.overlong_buffer is 4", "truncated_samples=penalize"],
    ),
    Wrong(
        "buffer too long",
        [PENALIZE, f"{RL}.truncation_penalty=1", f"{RL}.overlong_buffer=17"],
        "config.overlong_buffer.above_max_length",
        [f"{RL}.overlong_buffer is 17", f"{ROLLOUT}.length_params.max_length is 16"],
    ),
    Wrong(
        "moments unread",
        [f"{RL}.reward_shaping.mean=3"],
        "config.reward_shaping.without_standardization_given",
        [f"{RL}.reward_shaping", "mean=3.0", "standardization=given", "'none'"],
    ),
    Wrong(
        "cache too small",
        [f"{ROLLOUT}.generation_cache_tokens=20"],
        "config.generation_cache_tokens.below_encoder_seq_length",
        [f"{ROLLOUT}.generation_cache_tokens is 20", "model.encoder_seq_length is 64"],
    ),
    Wrong(
        "cache of another engine",
        [f"{ROLLOUT}.generation_cache_tokens=9000", "generation=tensorrt_llm"],
        "config.generation_cache_tokens.without_native",
        [f"{ROLLOUT}.generation_cache_tokens is 9000", "generation is 'tensorrt_llm'", "null"],
    ),
    Wrong(
        "static steps of another engine",
        [f"{ROLLOUT}.static_decoding=true", "generation=tensorrt_llm"],
        "config.static_decoding.without_native",
        [f"{ROLLOUT}.static_decoding is true", "generation is 'tensorrt_llm'", "null", "false"],
    ),
    Wrong(
        "static steps of megatron's layers",
        [f"{ROLLOUT}.static_decoding=true", f"{ROLLOUT}.lean_decoding=false"],
        "config.static_decoding.without_lean_decoding",
        [f"{ROLLOUT}.static_decoding is true", "lean_decoding is false"],
    ),
    Wrong(
        "graphs of changing shapes",
        [f"{ROLLOUT}.cuda_graphs=true", f"{ROLLOUT}.static_decoding=false"],
        "config.cuda_graphs.without_static_decoding",
        [f"{ROLLOUT}.cuda_graphs is true", "static_decoding is false"],
    ),
    Wrong(
        "graphs of another engine",
        [f"{ROLLOUT}.cuda_graphs=true", "generation=tensorrt_llm"],
        "config.cuda_graphs.without_native",
        [f"{ROLLOUT}.cuda_graphs is true", "generation is 'tensorrt_llm'", "null", "false"],
    ),
    Wrong(
        "graphs of megatron's layers",
        [f"{ROLLOUT}.cuda_graphs=true", f"{ROLLOUT}.lean_decoding=false"],
        "config.cuda_graphs.without_lean_decoding",
        [f"{ROLLOUT}.cuda_graphs is true", "lean_decoding is false"],
    ),
    Wrong(
        "nothing to take over",
        [
            f"{RL}.generation_work_queue=true",
            "trainer.devices=2",
            f"{ROLLOUT}.num_rollout_samples=15",
        ],
        "config.generation_work_queue.nothing_left",
        [
            f"{RL}.generation_work_queue is true",
            2,
            f"{ROLLOUT}.rollout_micro_batch_size is 8",
            "at most 8",
        ],
    ),
    Wrong(
        "replica named twice",
        ["remote_rm.reward_model.replicas=['b:5555','localhost:5555']"],
        "config.replicas.same_server",
        [
            "remote_rm.reward_model.replicas[1] is localhost:5555",
            "remote_rm.reward_model.ip",
        ],
    ),
    Wrong(
        "ready files and a port",
        ["remote_rm.reward_model.ready_files=[/a/ready.json]", "remote_rm.reward_model.port=5556"],
        "config.ready_files.with_addresses",
        ["remote_rm.reward_model.ready_files", 5556],
    ),
    Wrong(
        "no function",
        ["reward=function"],
        "config.reward_function.name.missing",
        ["reward is 'function'", "reward_function.name", "reinforce_rl.rewards.functions.gsm8k"],
    ),
    Wrong(
        "function unread",
        ["reward_function.name=a.b"],
        "config.reward_function.name.conflicts_with_reward_server",
        [
            "reward_function.name is 'a.b'",
            "reward is 'server'",
            "reward_function.more_functions",
        ],
    ),
    Wrong(
        "two of one name",
        [
            "reward=function",
            "reward_function.name=a.f",
            "+reward_function.more_functions.f.name=b.g",
        ],
        "config.reward_sources.same_name",
        ["f, f", "reward_function.more_functions", "remote_rm.more_reward_models"],
    ),
    Wrong(
        "no room",
        [f"{ROLLOUT}.length_params.max_length=64"],
        "config.max_length.no_room_for_prompt",
        [f"{ROLLOUT}.length_params.max_length is 64", "model.encoder_seq_length is 64"],
    ),
    Wrong(
        "min above max",
        [f"{ROLLOUT}.length_params.min_length=17", f"{ROLLOUT}.allow_biased_sampling=true"],
        "config.min_length.above_max_length",
        [f"{ROLLOUT}.length_params.min_length is 17", "max_length is 16"],
    ),
    Wrong(
        "positions",
        ["model.encoder_seq_length=65"],
        "config.length.above_positions_of_model",
        ["model.encoder_seq_length is 65", 64, "max_position_embeddings", "model/config.json"],
    ),
    Wrong(
        "min_lr",
        ["model.optim.sched.min_lr=1"],
        "config.min_lr.above_lr",
        ["model.optim.sched.min_lr is 1.0", "model.optim.lr"],
    ),
    Wrong(
        "best without validation",
        ["exp_manager.checkpoint_callback_params.keep_best=1", f"{RL}.val_check_interval=0"],
        "config.keep_best.without_validation",
        ["exp_manager.checkpoint_callback_params.keep_best is 1"],
    ),
    Wrong(
        "padding",
        [f"{RL}.rollout_batch_seq_length=65"],
        "config.rollout_batch_seq_length.above_encoder_seq_length",
        [f"{RL}.rollout_batch_seq_length is 65", "model.encoder_seq_length is 64"],
    ),
    Wrong(
        "shared prefix of padded rows",
        ["model.shared_prefix=true", f"{RL}.rollout_batch_seq_length=60"],
        "config.shared_prefix.conflicts_with_rollout_batch_seq_length",
        ["model.shared_prefix is true", f"{RL}.rollout_batch_seq_length is 60", "null"],
    ),
    Wrong(
        "shared prefix of shared rows",
        ["model.shared_prefix=true", "model.context_parallel_size=2", "trainer.devices=2"],
        "config.shared_prefix.conflicts_with_context_parallel_size",
        ["model.shared_prefix is true", "context_parallel_size is 2", "null"],
    ),
    Wrong(
        "few tokens",
        ["model.tokens_per_micro_batch=63"],
        "config.tokens_per_micro_batch.below_encoder_seq_length",
        ["model.tokens_per_micro_batch is 63", "encoder_seq_length is 64"],
    ),
    Wrong(
        "lora unread",
        ["model.peft.lora_tuning.adapter_dim=8"],
        "config.lora_tuning.without_peft_scheme",
        ["model.peft.lora_tuning", "model.peft.peft_scheme=lora"],
    ),
    Wrong(
        "reference and lora",
        [LORA, "model.reference_placement=device"],
        "config.reference_placement.conflicts_with_peft_scheme",
        ["model.reference_placement is 'device'", "model.peft.peft_scheme is 'lora'"],
    ),
]
WRONG = [*OF_KEYS, *OF_ONE_VALUE, *OF_SEVERAL_SETTINGS]


@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.name for wrong in WRONG])
def test_one_fault_gives_one_message(folder, wrong):
    (fault,) = faults_of(folder, *wrong.overrides)
    check_fault([fault], wrong.key, *wrong.values)


def test_graphs_of_stages(folder):
    """A model of one layer cannot have two stages, which is another fault."""
    graphs = [f"{ROLLOUT}.static_decoding=true", f"{ROLLOUT}.cuda_graphs=true"]
    faults = faults_of(folder, *graphs, "model.pipeline_model_parallel_size=2")
    assert len([fault for fault in faults if "cuda_graphs" in fault]) == 1
    check_fault(
        faults,
        "config.cuda_graphs.conflicts_with_pipeline_stages",
        f"{ROLLOUT}.cuda_graphs is true",
        "model.pipeline_model_parallel_size is 2",
        1,
    )


def test_missing_files_and_folders_are_named(folder, tmp_path):
    model = "pretrained_checkpoint.restore_from_path"
    empty = tmp_path / "empty"
    (fault,) = faults_of(folder, f"{model}={tmp_path}/none")
    check_fault([fault], "config.restore_from_path.no_model", model, tmp_path / "none")
    empty.mkdir()
    (fault,) = faults_of(folder, f"{model}={empty}")
    check_fault([fault], "config.restore_from_path.no_model", model, empty, "config.json")
    (empty / "config.json").write_text("{}")
    (fault,) = faults_of(folder, f"{model}={empty}")
    no_tokenizer = "config.restore_from_path.no_tokenizer"
    check_fault([fault], no_tokenizer, model, empty, "tokenizer_config.json")
    prefix = "model.data.data_prefix"
    missing = tmp_path / "none.jsonl"
    (fault,) = faults_of(folder, f"{prefix}.train={missing}")
    check_fault([fault], "data.file.missing", f"{prefix}.train", missing)
    (fault,) = faults_of(folder, f"{prefix}.validation=[{missing}]")
    check_fault([fault], "data.file.missing", f"{prefix}.validation", missing)
    file = tmp_path / "file"
    file.write_text("")
    logs = "exp_manager.explicit_log_dir"
    (fault,) = faults_of(folder, f"{logs}={file}/run")
    check_fault([fault], "folder.not_writable", logs, file / "run", file, "Not a directory")


def test_the_number_of_ranks_must_match_the_configuration(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    (fault,) = faults_of(folder, "trainer.devices=2")
    check_fault([fault], "config.devices.not_the_ranks_started", 4, "WORLD_SIZE", "1 x 2 = 2")


def test_the_times_of_the_allocation_are_looked_at_too(folder, monkeypatch):
    start = "2026-11-21T18:00:00"
    monkeypatch.setenv("SLURM_JOB_START_TIME", start)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "Unknown")
    faults = faults_of(folder, "exp_manager.max_time_per_run=4h")
    assert len(faults) == 3
    check_fault(faults[:1], "config.max_time_per_run.invalid", "'4h'")
    not_seconds = "slurm.job_time.not_unix_seconds"
    check_fault(faults[1:2], not_seconds, "SLURM_JOB_START_TIME", repr(start))
    check_fault(faults[2:], not_seconds, "SLURM_JOB_END_TIME", "'Unknown'")


def test_all_faults_are_in_one_message(folder):
    expected = {
        "+model.optimizer=adam": "config.key.unknown",
        "model.optim.lr=fast": "config.value.wrong_type",
        f"{RL}.num_rollouts_per_prompt=1": "config.num_rollouts_per_prompt.too_small_for_estimator",
        f"{ROLLOUT}.sampling_params.temperature=0": "config.value.out_of_range",
        "exp_manager.max_time_per_run=tomorrow": "config.max_time_per_run.invalid",
    }
    of_data = "model.data.data_prefix.train"
    faults = faults_of(folder, *expected, f"{of_data}=/none.jsonl")
    for override, key in expected.items():
        setting, _, value = override.removeprefix("+").partition("=")
        of_setting = [fault for fault in faults if setting in fault]
        assert len(of_setting) == 1
        shown = "" if key == "config.key.unknown" else value
        check_fault(of_setting, key, shown)
    assert sum(of_data in fault and "/none.jsonl" in fault for fault in faults) == 1
    assert len(faults) == 6
    text = str(ConfigError(faults))
    assert text.startswith("6 faults in the configuration:\n  1. ")


def defaults() -> dict[str, Any]:
    config = TrainConfig()
    config.pretrained_checkpoint.restore_from_path = "???"
    config.model.data.data_prefix.train = "???"
    return config.model_dump()


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix[:-1]: node}
    return {
        key: value
        for name, child in node.items()
        for key, value in flat(child, f"{prefix}{name}.").items()
    }


def test_the_yaml_and_the_dataclasses_have_the_same_keys_and_defaults():
    composed = flat(OmegaConf.to_container(compose(), resolve=True))
    declared = flat(defaults())
    assert sorted(composed) == sorted(declared)
    assert {
        key: (value, declared[key]) for key, value in composed.items() if value != declared[key]
    } == {}
    types = {(type(value), type(declared[key])) for key, value in composed.items()}
    assert {pair for pair in types if pair[0] is not pair[1]} <= {(int, float)}, (
        "a float may be written as 60"
    )


def test_checking_a_configuration_imports_no_heavy_library(folder):
    code = (
        "import sys\n"
        "from omegaconf import OmegaConf\n"
        "from reinforce_rl.config.load import load_config\n"
        "load_config(OmegaConf.load(sys.argv[1]))\n"
        "from reinforce_rl.launch.programs import with_config\n"
        "print(*(m for m in ('torch', 'transformers', 'megatron') if m in sys.modules))"
    )
    (folder / "composed.yaml").write_text(OmegaConf.to_yaml(compose(*right(folder))))
    command = [sys.executable, "-c", code, str(folder / "composed.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.stdout.strip()) == ("", "")


def run_script(*overrides: str, deadline: float = DEADLINE_S) -> str:
    """Run the real script until exit code 1, in time and without a traceback; return its output."""
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


def test_the_script_reports_an_unknown_override(folder):
    said = run_script(*right(folder), f"{RL}.max_stps=5")
    assert said.startswith("error: ")
    assert printed_keys(said) == ["config.key.unknown"]
    assert f"{RL}.max_stps" in said
    assert f"{RL}.max_steps" in said


def test_the_script_finds_a_key_in_another_group(folder):
    said = run_script(*right(folder), "trainer.save_interval=5")
    assert printed_keys(said) == ["config.key.unknown"]
    assert "trainer.save_interval" in said
    assert f"{RL}.save_interval" in said


def test_the_script_says_how_to_fill_a_group_of_free_names(folder):
    said = run_script(*right(folder), "model.megatron_overrides={layernorm_epsilon: 0.5}")
    assert printed_keys(said) == ["config.group.needs_plus"]
    assert "+model.megatron_overrides.NAME=VALUE" in said


def test_the_script_reports_what_must_be_set_and_what_is_missing(folder):
    said = run_script("model.optim.lr=0", "trainer.devices=two")
    assert said.startswith("error: 4 faults"), "required keys that are not set hide no other fault"
    assert sorted(printed_keys(said)) == [
        "config.value.not_set",
        "config.value.not_set",
        "config.value.out_of_range",
        "config.value.wrong_type",
    ]
    assert "pretrained_checkpoint.restore_from_path=VALUE" in said
    assert "model.data.data_prefix.train=VALUE" in said
    assert "model.optim.lr is 0" in said
    assert "trainer.devices is 'two'" in said
    missing = f"model.data.data_prefix.train={folder}/none.jsonl"
    said = run_script(*right(folder), missing, "model.optim.lr=0")
    assert said.startswith("error: 2 faults")
    assert sorted(printed_keys(said)) == ["config.value.out_of_range", "data.file.missing"]
    assert f"{folder}/none.jsonl" in said
    assert "model.optim.lr is 0" in said


@pytest.mark.more
def test_the_script_reports_an_unreachable_server_before_it_loads_a_model(folder):
    port = free_port()
    overrides = [f"remote_rm.reward_model.port={port}", "remote_rm.ready_timeout_seconds=2"]
    said = run_script(
        *right(folder), *overrides, f"exp_manager.explicit_log_dir={folder / 'unreachable'}"
    )
    assert "error: " in said
    assert f"localhost:{port}" in said


@pytest.mark.more
def test_the_script_reports_a_wrong_tokenizer_before_it_loads_a_model(folder):
    with FakeRewardServer() as server:
        overrides = [
            f"remote_rm.reward_model.port={server.port}",
            f"exp_manager.explicit_log_dir={folder / 'wrong'}",
        ]
        said = run_script(*right(folder), *overrides)
    assert "tokenizer" in said
    assert "vocabulary" in said


@pytest.mark.more
def test_the_script_reports_an_unsupported_model_before_it_waits_for_the_server(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    overrides = [
        f"remote_rm.reward_model.port={free_port()}",
        f"exp_manager.explicit_log_dir={tmp_path / 'run'}",
    ]
    said = run_script(
        *right(folder), *overrides, f"pretrained_checkpoint.restore_from_path={tmp_path / 'model'}"
    )
    assert printed_keys(said) == ["model.config.other_model_type"]
    assert "model_type is 'mamba'" in said
    assert "llama" in said


def test_a_generator_gives_prompts_back_one_by_one_only_where_steps_take_what_is_finished():
    cfg = TrainConfig()
    assert (cfg.prompts_under_way, cfg.cache_after_update) == (None, None)
    cfg.rollout_order = "finished"
    cfg.model.reinforce.rollout_micro_batch_size = 3
    cfg.inflight_updates = "keep"
    assert (cfg.prompts_under_way, cfg.cache_after_update) == (3, "keep")


def test_several_updates_are_passes_or_smaller_batches():
    cfg = TrainConfig()
    assert not cfg.takes_several_updates
    assert not cfg.trainer.reinforce.takes_several_updates(None)
    assert cfg.trainer.reinforce.takes_several_updates(2)
    cfg.trainer.reinforce.reinforce_epochs = 2
    assert cfg.takes_several_updates


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 0),
        (["placement=disaggregated"], 1),
        (["placement=disaggregated", "max_staleness=0"], 0),
        (["placement=disaggregated", "max_staleness=3"], 3),
    ],
)
def test_how_old_rollouts_may_be(overrides: list[str], expected: int) -> None:
    cfg, _ = read_config(compose(*overrides))
    assert cfg.staleness == expected
    assert cfg.is_off_policy is (expected > 0)
