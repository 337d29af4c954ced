"""Folders that hold no tokenizer, and the comparison of two."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path

import pytest
from helpers.tiny_tokenizer import write_model_without_weights, write_tiny_tokenizer

from reinforce_rl.data.conversation import Conversation
from reinforce_rl.data.rendering import ChatRenderer
from reinforce_rl.data.tokenizer import TokenizerInfo, decode_all, load_tokenizer
from reinforce_rl.errors import ConfigError, DataError
from reinforce_rl.megatron.architecture import Architecture


def test_a_name_of_the_hub_is_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: asked.append(address))
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    with pytest.raises(ConfigError, match=f"{name} does not exist; expected a Hugging Face model folder"):
        load_tokenizer(name)
    with pytest.raises(ConfigError, match=f"{name}.*hf download {name} --local-dir"):
        Architecture.from_folder(name)
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"{name} holds no tokenizer"):
        load_tokenizer(name)
    assert asked == []


@pytest.mark.parametrize("change", ["list", "text for a number"])
def test_a_config_of_the_wrong_shape_is_a_message(tmp_path: Path, change: str) -> None:
    write_model_without_weights(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    values = [] if change == "list" else {**json.loads(file.read_text()), "num_hidden_layers": "one"}
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="holds no tokenizer that transformers can load"):
        load_tokenizer(tmp_path / "m")


def test_decoding_keeps_every_space_and_leaves_out_unknown_ids(tmp_path: Path) -> None:
    """Llama 3's folders ask transformers to clean up spaces, which breaks code and quotes."""
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path))
    tokenizer.clean_up_tokenization_spaces = True
    text = "x != y , 'social' n't ."
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) != text
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    beyond = len(tokenizer) + 7  # of a model whose embedding is padded
    rows = [ids, [], [*ids[:6], tokenizer.eos_token_id, beyond]]
    assert decode_all(tokenizer, rows) == [text, "", f"{text[:6]}<eos>"]
    assert decode_all(tokenizer, rows, skip_special_tokens=True) == [text, "", text[:6]]
    assert decode_all(tokenizer, []) == []


def test_vocabulary_hashes_are_compared_whole_and_shown_in_part() -> None:
    own = TokenizerInfo(vocab_size=4, vocab_sha256="a" * 64, eos_id=2, chat_template_sha256=None)
    other = dataclasses.replace(own, vocab_sha256="a" * 63 + "b")
    assert own.differences(other) == [f"vocabulary hash {'a' * 12} here, {'a' * 12} there"]
    assert own.differences(own) == []


def test_a_template_that_leaves_out_a_turn_is_a_fault(tmp_path: Path) -> None:
    """Qwen2.5's template passes over a developer's turn; transformers gives a prompt without it."""
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.role }}: {{ m.content | trim }}\n"
        "{% endif %}{% endfor %}"
    )
    renderer = ChatRenderer(tokenizer)
    question = {"role": "user", "content": "Hi"}
    for role in ("system", "developer"):
        messages = [{"role": role, "content": " Be brief.\n"}, question]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert ("Be brief." in text) == (role == "system")
        if role == "system":
            assert renderer.prompt_text(Conversation(tuple(messages))) == text
            continue
        with pytest.raises(DataError, match="the chat template leaves out the developer message"):
            renderer.prompt_text(Conversation(tuple(messages)))
    empty = Conversation(({"role": "system", "content": ""}, question))
    assert renderer.prompt_text(empty) == "system: \nuser: Hi\n"


def test_a_link_out_of_the_folder_is_no_fault_of_the_tokenizer(tmp_path):
    folder = write_tiny_tokenizer(tmp_path / "model")
    weights = tmp_path / "weights"
    weights.touch()
    (folder / "model.safetensors").symlink_to(weights)
    with pytest.raises(ConfigError) as error:
        load_tokenizer(folder)
    (fault,) = error.value.faults
    assert fault.startswith(f"{folder / 'model.safetensors'} is a link to {weights}, outside of {folder}")
