"""A model loaded for inference: its folder, its configuration, and the trainer's answers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.errors import check_fault, raises_error
from helpers.models import tiny_llama_folder
from helpers.policies import transformers_model
from helpers.tiny_run import tiny_config, tiny_overrides
from omegaconf import OmegaConf

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.prompts import fixed_prompts
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError
from reinforce_rl.evaluation.model import inference_config, load_actor, model_folder
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.policy.build import build_actor
from reinforce_rl.rollout.prompts import build_datasets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inference")
    tiny_overrides(folder)  # writes the model and the prompts
    return folder


NEW_TOKENS = 20
SHORT = ("model.reinforce.length_params.max_length=5",)


def test_a_model_is_a_folder_of_its_own_or_what_a_run_exported(
    folder: Path, tmp_path: Path
) -> None:
    assert model_folder(folder / "model") == folder / "model"
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "latest").write_text("step_00000001")
    (run / "config.yaml").write_text("pretrained_checkpoint: {restore_from_path: /models/sft}")
    command = f"to-hf {run} {run / 'hf'} --model /models/sft"
    with raises_error("model.folder.no_model", command):
        model_folder(run)
    (run / "checkpoints" / "latest").unlink()
    (run / "status.json").write_text("{}")
    with raises_error("model.folder.no_model", run, "checkpoint"):
        model_folder(run)
    tiny_llama_folder(run / "hf")
    with raises_error("config.restore_from_path.no_model", f" {run / 'hf'}?"):
        tiny_config(folder, f"pretrained_checkpoint.restore_from_path={run}")
    assert model_folder(run) == run / "hf"
    (run / "hf").rename(tmp_path / "elsewhere")
    (run / "hf").symlink_to(tmp_path / "elsewhere")
    with raises_error("folder.link.leads_out", run / "hf", tmp_path / "elsewhere"):
        model_folder(run)
    with raises_error("model.folder.no_model", tmp_path / "nowhere", "Hugging Face"):
        model_folder(tmp_path / "nowhere")
    with raises_error("model.folder.no_model", tmp_path, "config.json"):
        model_folder(tmp_path)


def test_its_configuration_is_the_trainers_with_what_only_training_reads_at_its_default(
    folder: Path,
) -> None:
    cfg = inference_config(folder / "model", [*SHORT, "model.tensor_model_parallel_size=1"])
    assert cfg.model.encoder_seq_length == 16
    assert cfg.max_prompt_tokens == 11, "the model's own context"
    assert cfg.trainer.reinforce.initial_policy_kl_penalty == 0, "no reference is kept"
    with_data = inference_config(folder / "model", SHORT, data=folder / "validation.jsonl")
    assert len(build_datasets(with_data, load_tokenizer(folder / "model")).validation or ()) == 3
    with pytest.raises(ConfigError) as raised:
        inference_config(
            folder / "model", [*SHORT, "model.sede=1", "model.seed=-1"], data=folder / "none.jsonl"
        )
    check_fault(raised.value.faults, "config.key.unknown", "model.sede", "model.seed")
    with pytest.raises(ConfigError) as raised:
        inference_config(folder / "model", [*SHORT, "model.seed=-1"], data=folder / "none.jsonl")
    check_fault(raised.value.faults, "data.file.missing", folder / "none.jsonl")
    check_fault(raised.value.faults, "config.value.out_of_range", "model.seed is -1", 0)
    with pytest.raises(ConfigError) as raised:
        function = ["reward=function", "reward_function.name=reinforce_rl.rewards.functions.gsm9k"]
        inference_config(
            folder / "model", [*SHORT, "model.seed=-1", *function], data=folder / "none.jsonl"
        )
    assert len(raised.value.faults) == 3
    meant = "reinforce_rl.rewards.functions.gsm8k"
    check_fault(raised.value.faults[-1:], "reward_function.name.unknown", meant)


SHORT_ON_ONE = ["model.reinforce.num_val_samples=2", "trainer.devices=1"]


def test_a_runs_settings_can_take_the_place_of_the_defaults(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["model.peft.peft_scheme=lora", "trainer.reinforce.kl_target=0.5", "model.seed=7"]
    options += [
        "trainer.devices=3",
        "placement=disaggregated",
        "generation_ranks=2",
        "max_staleness=2",
    ]
    options += ["generation_tensor_parallel_size=2"]
    ran = tiny_config(folder, *options)
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(ran.model_dump())))
    monkeypatch.setattr(sys, "path", [*sys.path])
    cfg = inference_config(folder / "model", SHORT_ON_ONE, like=tmp_path, trust=True)
    assert cfg.placement == "colocated", "this rank generates"
    assert str(tmp_path) in sys.path, "a copied reward function lies there"
    assert cfg.model.seed == 7
    assert cfg.model.reinforce.length_params == ran.model.reinforce.length_params
    assert cfg.model.data.data_prefix.train == [ran.model.data.data_prefix.validation], (
        "and its validation set"
    )
    assert cfg.model.peft.peft_scheme is None, "the exported weights have the updates merged in"
    with raises_error("eval.like.no_run", folder, "config.yaml"):
        inference_config(folder / "model", like=folder)


def test_what_only_a_run_names_is_refused_before_anything_is_asked_or_started(
    folder: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {marker}\n")
    python.chmod(0o755)
    options = [
        "generation=vllm",
        f"engine.python={python}",
        "remote_rm.reward_model.ip=evil.example",
    ]
    values = tiny_config(folder).model_dump() | {
        "hydra": {"searchpath": ["file:///"]},
        "defaults": ["evil"],
    }
    values["generation"] = "vllm"
    values["engine"]["python"] = str(python)
    values["remote_rm"]["reward_model"]["ip"] = "evil.example"
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(values)))
    with pytest.raises(ConfigError) as error:
        inference_config(folder / "model", SHORT_ON_ONE, like=tmp_path)
    keys = {fault.partition(" ")[0] for fault in error.value.faults}
    assert {option.partition("=")[0] for option in options[1:]} <= keys
    values["trainer"]["devices"] = 5000
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(values)))
    named = ("trainer.devices is '5000'", "5000 ranks")
    with raises_error("trust.setting.only_of_folder", *named):
        inference_config(folder / "model", ["model.reinforce.num_val_samples=2"], like=tmp_path)
    values["trainer"]["devices"] = 1
    assert not marker.exists()
    values["model"]["seed"] = "${oc.env:HOME}"
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(values)))
    named = (tmp_path / "config.yaml", "model.seed is '${oc.env:HOME}'")
    with raises_error("run.config.interpolation", *named):
        inference_config(folder / "model", SHORT_ON_ONE, like=tmp_path, trust=True)


def test_it_answers_as_the_trainers_own_actor_without_room_for_gradients(
    folder: Path, mesh: Mesh
) -> None:
    cfg = inference_config(folder / "model", SHORT, data=folder / "train.jsonl")
    trained = tiny_config(folder)
    tokenizer = load_tokenizer(folder / "model")
    (prompts,) = fixed_prompts(build_datasets(trained, tokenizer).train)
    answers = []
    for actor in (load_actor(cfg, mesh), build_actor(trained, mesh, tokenizer)):
        with contextlib.closing(actor.generator), actor.generator.awake():
            answers.append(
                [actor.infer(prompts, 2, 5), actor.infer(prompts, 1, 5, validation=True)]
            )
    for ours, theirs in zip(*answers, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.log_probs, theirs.log_probs)
    with pytest.raises(RuntimeError, match="built without gradients"):
        _ = load_actor(cfg, mesh).ddp


@pytest.mark.parametrize(
    ("exported", "model_step"), [(10, "step 10"), (20, None), (None, "an earlier step")]
)
def test_an_export_older_than_the_newest_checkpoint_is_reported(
    exported, model_step, tmp_path, mesh, caplog
) -> None:
    config = tiny_llama_folder(tmp_path / "hf", vocab_size=32) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "training_step": exported}))
    (tmp_path / "config.yaml").write_text("pretrained_checkpoint: {restore_from_path: /models/sft}")
    newest = tmp_path / "checkpoints" / "step_00000020"
    newest.mkdir(parents=True)
    (newest / "trainer_state.json").write_text('{"step": 20}')
    (newest.parent / "latest").write_text(newest.name)
    load_actor(inference_config(tmp_path), mesh)
    command = f"reinforce-rl convert to-hf {tmp_path} {tmp_path}/hf --model /models/sft"
    said = (
        f"the model of {model_step}, and the run's newest checkpoint is of step 20; "
        "to use that one, export it first: "
    )
    assert (
        bool(model_step) == (said + command in caplog.text) == ("newest checkpoint" in caplog.text)
    )


def test_a_tokenizer_larger_than_the_model_is_refused_before_it_is_loaded(
    tmp_path: Path, mesh: Mesh
) -> None:
    model = tiny_llama_folder(tmp_path / "model", vocab_size=32)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 31}))
    with raises_error("tokenizer.tokens.without_embedding", "32 tokens", "31 embeddings"):
        load_actor(inference_config(model), mesh)


def test_two_end_tokens_of_the_generation_config_end_responses_as_in_transformers(
    tmp_path: Path, mesh: Mesh
) -> None:
    """Like in Qwen2.5, Qwen3 and Llama 3 Instruct.

    config.json names one end token, generation_config.json two.
    """
    model = tiny_llama_folder(tmp_path / "model", logit_scale=2.0)
    prompts = [Prompt(i, "", (1, 5 + i, 9)) for i in range(12)]
    theirs = transformers_model(model, torch.float32)
    unended = [theirs_for(theirs, prompt, eos_token_id=None) for prompt in prompts]
    ends = [unended[0][3], unended[1][6]]
    (model / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [*ends, 2], "pad_token_id": 0})
    )

    theirs = transformers_model(model, torch.float32)
    expected = [theirs_for(theirs, prompt) for prompt in prompts]
    assert {row[-1] for row in expected} >= set(ends), "both end some response"
    assert any(len(row) == NEW_TOKENS for row in expected)
    cfg = inference_config(model, [f"model.reinforce.length_params.max_length={NEW_TOKENS}"])
    actor = load_actor(cfg, mesh)
    with contextlib.closing(actor.generator) as generator:
        params = dataclasses.replace(actor.val_sampling, use_greedy=True)
        completions = generator.generate(prompts, 1, params, seed=0)
    lengths = completions.lengths.tolist()
    assert [
        row[:n] for row, n in zip(completions.tokens.tolist(), lengths, strict=True)
    ] == expected


def theirs_for(model: Any, prompt: Prompt, **options: Any) -> list[int]:
    tokens = torch.tensor([prompt.tokens])
    mask = torch.ones_like(tokens)
    output = model.generate(
        tokens, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, **options
    )
    return output[0, len(prompt.tokens) :].tolist()
