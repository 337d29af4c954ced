"""What an actor is made with where the configuration leaves it open."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.errors import check_error, raises_error
from helpers.tiny_run import tiny_config

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError
from reinforce_rl.policy.build import (
    build_actor,
    check_vocabulary,
    stop_token_ids,
)
from reinforce_rl.trainer.inputs import read_inputs


def actor_of(cfg: TrainConfig, mesh):
    return build_actor(cfg, mesh, load_tokenizer(cfg.pretrained_checkpoint.restore_from_path))


def test_the_logits_of_fewer_tokens_at_a_time_on_a_cpu(tmp_path):
    model = tiny_config(tmp_path).model
    assert model.logits_chunk_tokens is None, "as shipped"
    assert (model.chunk_tokens(gpu=False), model.chunk_tokens(gpu=True)) == (
        128,
        1024,
    )
    changed = model.model_copy(update={"logits_chunk_tokens": 7})
    assert {changed.chunk_tokens(gpu=gpu) for gpu in (False, True)} == {7}


def test_the_actor_has_them(tmp_path, mesh):
    assert actor_of(tiny_config(tmp_path), mesh).chunk_tokens == 128
    assert actor_of(tiny_config(tmp_path, "model.logits_chunk_tokens=7"), mesh).chunk_tokens == 7


def test_a_model_that_its_weights_do_not_bear_out_is_not_built(tmp_path, mesh):
    """Its embedding alone would take terabytes."""
    cfg = tiny_config(tmp_path)
    file = Path(cfg.pretrained_checkpoint.restore_from_path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 10**13}))
    named = ("embed_tokens.weight", f"({10**13}, ")
    with raises_error("model.weights.not_of_config", *named):
        actor_of(cfg, mesh)


def test_transformer_engine_wants_a_gpu(tmp_path, mesh):
    key = "model.transformer_engine.needs_gpu"
    with raises_error(key, "model.transformer_engine"):
        actor_of(tiny_config(tmp_path, "model.transformer_engine=true"), mesh)


@pytest.mark.parametrize(
    ("overrides", "shared"),
    [
        ([], True),
        (["model.shared_prefix=false"], False),
        (["trainer.reinforce.rollout_batch_seq_length=12"], False),
    ],
)
def test_groups_share_their_prompt_unless_rows_are_padded(tmp_path, mesh, overrides, shared):
    assert actor_of(tiny_config(tmp_path, *overrides), mesh).shares_prefix is shared


@pytest.mark.parametrize(("beta", "has_reference"), [(0.0, False), (0.05, True)])
def test_a_reference_only_where_a_penalty_asks_for_it(tmp_path, mesh, beta, has_reference):
    actor = actor_of(
        tiny_config(tmp_path, f"trainer.reinforce.initial_policy_kl_penalty={beta}"), mesh
    )
    row = (torch.tensor([[5, 6, 7, 8]]), torch.tensor([2]), torch.tensor([2]))
    with (
        contextlib.nullcontext()
        if has_reference
        else pytest.raises(RuntimeError, match="without a reference")
    ):
        assert actor.get_init_policy_logprobs(*row).shape == (1, 2)


def test_every_end_of_the_folder_ends_a_response_and_a_difference_is_said_once(
    tmp_path, mesh, caplog
):
    cfg = tiny_config(tmp_path)
    folder = tmp_path / "model"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 9}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [11, 12]}))
    with caplog.at_level(logging.WARNING):
        actor = actor_of(cfg, mesh)
        assert stop_token_ids(folder, load_tokenizer(folder)) == (2, 9, 11, 12)
    assert actor.sampling.stop_token_ids == (2, 9, 11, 12)
    assert actor.val_sampling.stop_token_ids == (2, 9, 11, 12)
    assert [str(folder) in record.getMessage() for record in caplog.records] == [True]


def test_sampling_is_the_configurations_whatever_the_folder_says(tmp_path, mesh):
    """transformers and vLLM fill in unset keys from the folder.

    Qwen2.5's folder has a repetition penalty of 1.05.
    """
    cfg = tiny_config(tmp_path)
    plain = actor_of(cfg, mesh)
    prompts = [Prompt(0, "tea", (5, 6, 7))]
    expected = plain.infer(prompts, 4, seed=0)
    of_folder = {
        "do_sample": False,
        "temperature": 0.1,
        "top_k": 1,
        "top_p": 0.1,
        "repetition_penalty": 9.0,
    }
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps({**of_folder, "eos_token_id": 2}))
    actor = actor_of(cfg, mesh)
    assert actor.settings == plain.settings
    assert torch.equal(actor.infer(prompts, 4, seed=0).tokens, expected.tokens)


def test_end_tokens_that_cannot_be_read_are_said_with_the_other_faults_of_the_start(tmp_path):
    cfg = tiny_config(tmp_path)
    path = tmp_path / "model" / "generation_config.json"
    path.write_text("{")
    with raises_error("model.generation_config.not_json", path):
        read_inputs(cfg).checked()


@pytest.mark.parametrize("added", [["<new>"], ["<new>", "<newer>"]])
def test_tokens_without_an_embedding_are_refused_with_the_first_of_them(added, tmp_path):
    cfg = tiny_config(tmp_path)
    folder = tmp_path / "model"
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer) == 32
    tokenizer.add_tokens(added)
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError) as caught:
        read_inputs(cfg).checked()
    sizes = (f"{32 + len(added)} tokens", "32 embeddings")
    named = ("'<new>', id 32", "resize_token_embeddings")
    check_error(caught.value, "tokenizer.tokens.without_embedding", *sizes, *named)
    arch = SimpleNamespace(vocab_size=32 + len(added))
    check_vocabulary(tokenizer, arch, folder)  # type: ignore[arg-type]


def test_a_tokenizer_with_gaps_in_its_ids_is_measured_by_its_largest(tmp_path):
    tokenizer = type(
        "Gaps", (), {"get_vocab": lambda self: {"a": 0, "b": 40}, "__len__": lambda self: 2}
    )()
    with raises_error("tokenizer.tokens.without_embedding", "'b', id 40"):
        check_vocabulary(tokenizer, SimpleNamespace(vocab_size=32), tmp_path)
