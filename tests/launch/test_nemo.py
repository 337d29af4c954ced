"""Conversion of NeMo-Aligner's configurations: the result runs here, and nothing is lost."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from helpers.errors import raises_error
from helpers.tiny_run import three_letters, write_prompts
from helpers.tiny_tokenizer import write_model_without_weights

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.compose import CONF_FOLDER
from reinforce_rl.config.load import load_config
from reinforce_rl.launch.nemo import convert_file, converted
from reinforce_rl.launch.nemo_file import read_nemo_file

THEIRS = """
defaults:
  - optional tp_overlap@model.ub_tp_comm_overlap_cfg:
trainer:
  num_nodes: 1
  devices: 4
  accelerator: gpu
  precision: bf16
  reinforce:
    max_epochs: 2
    max_steps: 30
    val_check_interval: 5
    save_interval: ${.val_check_interval}
    initial_policy_kl_penalty: 0.02
    use_absolute_kl: True
    num_rollouts_per_prompt: 8
    trt_llm: {enable: True, max_input_len: "${subtract:${model.encoder_seq_length}, 10}"}
    batch_iterator: {use_flask: False, port: 5557}
    model_gbs: ${model.global_batch_size}
  max_time: "00:03:45:00"
  max_epochs: ${.reinforce.max_epochs}
remote_rm:
  pad_to_length: ${model.encoder_seq_length}
  reward_model: {name: reward_model, ip: node7, port: 5567}
exp_manager:
  explicit_log_dir: LOGS
  exp_dir: elsewhere
  checkpoint_callback_params:
    monitor: val_rewards
    save_top_k: 3
    mode: max
    filename: 'gpt-{step}'
    model_parallel_size: ${multiply:${model.tensor_model_parallel_size}, 1}
pretrained_checkpoint:
  restore_from_path: /models/sft.nemo
model:
  encoder_seq_length: 64
  global_batch_size: 64
  micro_batch_size: 1
  hidden_dropout: 0.1
  reinforce:
    num_rollout_samples: 64
    forward_micro_batch_size: ${.num_rollout_samples}
    num_val_samples: ${.num_rollout_samples}
    sampling_params: {top_k: 0, top_p: 0.9, add_BOS: False, end_strings: ["<|endoftext|>"]}
    length_params: {max_length: "${int_div:${model.encoder_seq_length}, 2}", min_length: 1}
  peft:
    peft_scheme: lora
    lora_tuning: {target_modules: [attention_qkv, mlp_fc2], adapter_dim: 16, adapter_dropout: 0.0}
  optim:
    name: distributed_fused_adam
    lr: 9e-7
    sched: {name: CosineAnnealing, warmup_steps: 10, constant_steps: 5, min_lr: 9e-8}
  data:
    data_impl: jsonl
    seq_length: ${model.encoder_seq_length}
    data_prefix: {train: [TRAIN], validation: [TRAIN], test: null}
"""


@pytest.fixture
def theirs(tmp_path) -> Path:
    prompts = write_prompts(tmp_path / "train.jsonl", three_letters(80))
    text = THEIRS.replace("TRAIN", str(prompts)).replace("LOGS", str(tmp_path / "logs"))
    (tmp_path / "theirs.yaml").write_text(text)
    return tmp_path / "theirs.yaml"


def composed(folder: Path, name: str, *overrides: str) -> TrainConfig:
    """Compose like `--config-dir FOLDER --config-name NAME`."""
    search = f"hydra.searchpath=[{CONF_FOLDER}]"
    with hydra.initialize_config_dir(str(folder), version_base="1.3"):
        return load_config(hydra.compose(name, overrides=[search, *overrides]))


def leaves(node: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {path[1:]: node}
    return {
        key: value
        for name, child in node.items()
        for key, value in leaves(child, f"{path}.{name}").items()
    }


def test_a_file_composes_and_means_the_same(theirs, tmp_path, capsys):
    write_model_without_weights(tmp_path / "model")
    convert_file(theirs, tmp_path / "mine.yaml")
    assert "--config-name mine" in capsys.readouterr().out
    cfg = composed(
        tmp_path, "mine", f"pretrained_checkpoint.restore_from_path={tmp_path / 'model'}"
    )
    rl = cfg.trainer.reinforce
    rollout = cfg.model.reinforce
    saving = cfg.exp_manager.checkpoint_callback_params
    assert (cfg.trainer.devices, cfg.trainer.precision, rl.max_epochs, rl.max_steps) == (
        4,
        "bf16",
        2,
        30,
    )
    assert (rl.save_interval, rl.num_rollouts_per_prompt, rl.generation_work_queue) == (5, 8, False)
    # NeMo-Aligner's formula: |k1|, averaged over tokens, so that beta keeps its meaning.
    assert (rl.initial_policy_kl_penalty, rl.use_absolute_kl, rl.kl_reduction) == (
        0.02,
        True,
        "mean",
    )
    assert (rl.truncated_samples, rl.loss_aggregation) == ("drop", "sequence_mean")
    assert (
        rollout.num_rollout_samples,
        rollout.forward_micro_batch_size,
        rollout.num_val_samples,
    ) == (64, 64, None)
    assert (rollout.length_params.max_length, rollout.length_params.min_length) == (32, 0)
    assert (rollout.sampling_params.top_p, rollout.allow_biased_sampling) == (0.9, True)
    assert (cfg.model.peft.peft_scheme, cfg.model.peft.lora_tuning.adapter_dim) == ("lora", 16)
    assert cfg.model.peft.lora_tuning.target_modules == ["q_proj", "k_proj", "v_proj", "down_proj"]
    assert (cfg.model.optim.name, cfg.model.optim.lr, cfg.model.optim.sched.min_lr) == (
        "adam",
        9e-7,
        9e-8,
    )
    assert (saving.keep_best, saving.best_metric, saving.best_mode) == (3, "val/rewards", "max")
    assert (cfg.exp_manager.max_time_per_run, cfg.exp_manager.explicit_log_dir) == (
        "00:03:45:00",
        str(tmp_path / "logs"),
    )
    assert (cfg.remote_rm.reward_model.ip, cfg.remote_rm.reward_model.port) == ("node7", 5567)
    assert cfg.remote_rm.pad_to_length is None
    assert cfg.model.global_batch_size is None


def test_every_key_is_carried_over_or_named_with_its_reason(theirs):
    text = converted(theirs)
    head = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    new = leaves(yaml.safe_load(text))
    given = leaves({k: v for k, v in yaml.safe_load(theirs.read_text()).items() if k != "defaults"})
    said = head.replace(",", " ").replace(":", " ").split()
    lost = [
        key
        for key, value in given.items()
        if value is not None and key not in new and key not in said
    ]
    # Keys with another name here, and one that `explicit_log_dir` overrides.
    assert sorted(lost) == [
        "exp_manager.checkpoint_callback_params.mode",
        "exp_manager.checkpoint_callback_params.monitor",
        "exp_manager.checkpoint_callback_params.save_top_k",
        "exp_manager.exp_dir",
        "model.reinforce.sampling_params.add_BOS",
        "trainer.max_time",
        "trainer.reinforce.batch_iterator.use_flask",
    ]
    assert "pretrained_checkpoint.restore_from_path=VALUE" in head
    assert "model.hidden_dropout: no such key here" in head
    assert "+model.megatron_overrides.NAME" in head
    assert "trainer.reinforce.trt_llm.enable: set generation=tensorrt_llm" in head
    assert "trainer.reinforce.trt_llm.max_input_len: model.encoder_seq_length bounds" in head


def test_an_engine_that_was_switched_off_is_not_advised(theirs):
    theirs.write_text(theirs.read_text().replace("enable: True", "enable: False"))
    head = " ".join(
        line.lstrip("# ") for line in converted(theirs).splitlines() if line.startswith("#")
    )
    assert "trainer.reinforce.trt_llm.enable: generation=native" in head
    assert "set generation=tensorrt_llm" not in head


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (
            "peft_scheme: lora",
            "peft_scheme: ptuning",
            "peft_scheme: there is no ptuning here; known: lora, none",
        ),
        ("CosineAnnealing", "NoamAnnealing", "sched.name: there is no NoamAnnealing here"),
        ("precision: bf16", "precision: 16", "trainer.precision: there is no 16 here"),
        ("lr: 9e-7", "lr: -1", "model.optim.lr is -1.0"),
        (
            "lr: 9e-7",
            "lr: ${model.learning_rate}",
            "model.optim.lr: ${model.learning_rate} cannot be resolved",
        ),
    ],
)
def test_a_value_without_counterpart_is_reported(theirs, old, new, word):
    theirs.write_text(theirs.read_text().replace(old, new))
    head = " ".join(
        line.lstrip("# ") for line in converted(theirs).splitlines() if line.startswith("#")
    )
    assert word in head


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (None, "nemo.file.unreadable", "a.yaml"),
        ("trainer: {ppo: {max_steps: 3}}", "nemo.file.other_program", "a.yaml"),
        ("", "nemo.file.other_program", "a.yaml"),
        ("- a\n- b\n", "nemo.file.other_program", "a.yaml"),
        ("trainer: [1\nmodel: {", "nemo.file.not_yaml", "line 2"),
        ("trainer: {reinforce: &a {max_steps: 1}}\nmodel: *a", "nemo.file.not_yaml", "line 2"),
        (
            "trainer: {reinforce: {max_steps: 1" + ":1" * 200_000 + "}}",
            "nemo.file.not_yaml",
            "line 1",
        ),
        ("trainer: {~: 1}", "nemo.file.not_yaml", "a.yaml"),
    ],
)
def test_another_file_is_refused(tmp_path, text, key, value):
    if text is not None:
        (tmp_path / "a.yaml").write_text(text)
    with raises_error(key, value):
        converted(tmp_path / "a.yaml")


def test_no_file_is_written_over(theirs):
    before = theirs.read_text()
    with raises_error("nemo.output.exists", theirs):
        convert_file(theirs, theirs)
    assert theirs.read_text() == before


SECRET = "value-of-the-environment"
BEYOND_THE_FILE = {
    "the environment": "${oc.env:SECRET}",
    "the environment in an argument": "${multiply:${oc.env:SECRET},1}",
    "the environment in quotes": "${multiply:'${oc.env:SECRET}',1}",
    "a resolver by another value": "${${model.optim.name}:SECRET}",
    "a text that becomes an interpolation": "$${model.part}",
    "an escaped interpolation": "\\${oc.env:SECRET}",
    "a decoded text": "${oc.decode:'[1]'}",
    "spaces": "${ oc.env : SECRET }",
    "no end": "${",
    "a group": "${model.optim}",
    "no value": "${model.missing}",
    "a text times a number": "${multiply:x,99999999999}",
    "many interpolations": "${model.optim.name}" * 9,
    "a long text": "x" * 1000 + "${model.optim.name}",
}


@pytest.mark.parametrize("text", BEYOND_THE_FILE.values(), ids=BEYOND_THE_FILE)
def test_only_values_of_the_file_itself_come_into_the_new_one(text, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    tree = {
        "trainer": {"reinforce": {"max_steps": 5, "save_interval": text, "val_check_interval": 4}},
        "model": {
            "optim": {"name": "adam", "lr": "${model.rate}"},
            "rate": 2e-6,
            "missing": "???",
            "part": "{oc.env:SECRET}",
            "data": {"data_prefix": {"train": ["a", text]}},
        },
    }
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    new = converted(file)
    assert SECRET not in new
    head = " ".join(line.lstrip("# ") for line in new.splitlines() if line.startswith("#"))
    assert "trainer.reinforce.save_interval, model.data.data_prefix.train: " in head
    assert leaves(yaml.safe_load(new)) == {
        "defaults": ["train_reinforce_actor", {"override algorithm": "nemo_aligner"}, "_self_"],
        "trainer.reinforce.max_steps": 5,
        "trainer.reinforce.val_check_interval": 4,
        "model.optim.name": "adam",
        "model.optim.lr": 2e-6,
    }


def test_a_key_that_is_a_number_is_not_an_index_into_a_list(tmp_path):
    """Only the value of such a key is omitted, like for any other key."""
    tree = {
        "trainer": {"reinforce": {"max_steps": 5}},
        "model": {"optim": {"name": "adam", 2: "${oc.env:HOME}"}},
        1: "${oc.env:HOME}",
    }
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(tree))
    cfg, reasons = read_nemo_file(file)
    assert set(reasons) == {"1", "model.optim.2"}
    assert cfg.model.optim.name == "adam"
    assert leaves(yaml.safe_load(converted(file)))["model.optim.name"] == "adam"


@pytest.mark.timeout(30)
def test_values_that_double_each_other_or_lead_in_a_circle_end(tmp_path):
    names = "abcdefghijkl"
    doubled = [f"  {a}: ${{model.{b}}}${{model.{b}}}" for a, b in itertools.pairwise(names)]
    chain = [f"  k{index}: ${{model.k{index + 1}}}" for index in range(150)]
    text = ["trainer: {reinforce: {max_steps: 5}}", "model:", *doubled, "  l: xx", *chain]
    file = tmp_path / "theirs.yaml"
    file.write_text("\n".join([*text, "  x: ${model.y}", "  y: ${model.x}"]))
    head = " ".join(line.lstrip("# ") for line in converted(file).splitlines())
    assert "model.x: ${model.y} leads to no value" in head
    assert "model.a: ${model.b}${model.b} " in head
    file.write_text(
        file.read_text() + "".join(f"\n  m{index}: ${{model.l}}" for index in range(100))
    )
    assert "the file has 263 values with ${...}; expected at most 200" in converted(file)


def test_a_key_cannot_end_the_comment_that_names_it(tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text('trainer: {reinforce: {max_steps: 5, "x\\Ltrainer: {devices: 99}\\Ny": 1}}\n')
    assert leaves(yaml.safe_load(converted(file)))["trainer.reinforce.max_steps"] == 5
    assert "trainer.devices" not in leaves(yaml.safe_load(converted(file)))
