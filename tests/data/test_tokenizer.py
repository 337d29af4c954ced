"""Folders without a tokenizer, and comparisons of two tokenizers."""

from __future__ import annotations

import dataclasses
import json
import socket
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.errors import raises_error
from helpers.tiny_tokenizer import write_model_without_weights, write_tiny_tokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from reinforce_rl.data.conversation import Conversation
from reinforce_rl.data.rendering import ChatRenderer
from reinforce_rl.data.tokenizer import TokenizerInfo, _config_class, decode_all, load_tokenizer
from reinforce_rl.data.tokenizer_bounds import _CLASS_NAME, _COMPOSED
from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.architecture import Architecture


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_name_of_the_hub_is_not_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: asked.append(address))
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    with raises_error("tokenizer.folder.missing", name):
        load_tokenizer(name)
    with raises_error("model.folder.no_model", name, f"hf download {name} --local-dir"):
        Architecture.from_folder(name)
    (tmp_path / name).mkdir(parents=True)
    with raises_error("tokenizer.folder.not_loadable", name):
        load_tokenizer(name)
    assert asked == []


def test_a_config_that_is_not_an_object_is_one_message(tmp_path: Path) -> None:
    write_model_without_weights(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    for text in ("[]", "{"):
        file.write_text(text)
        with raises_error("tokenizer.file.invalid", tmp_path / "m"):
            load_tokenizer(tmp_path / "m")


def test_a_folder_that_may_not_be_opened_is_a_message() -> None:
    with raises_error("tokenizer.folder.missing", "a" * 5000):
        load_tokenizer("a" * 5000)


@pytest.mark.parametrize(
    ("key", "number"), [("num_labels", 10**6), ("num_hidden_layers", 2 * 10**7)]
)
def test_numbers_of_config_json_take_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, number: int
) -> None:
    """transformers allocates a list of this many names, or of this many layer types."""
    write_model_without_weights(tmp_path)
    file = tmp_path / "config.json"
    values = {**json.loads(file.read_text()), "model_type": "qwen2", key: number}
    file.write_text(json.dumps(values))
    monkeypatch.setattr("reinforce_rl.data.tokenizer_bounds._MAX_BYTES", 1 << 20)
    tracemalloc.start()
    load_tokenizer(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20


FOLDERS_WITH_CODE: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "a tokenizer": (
        {"model_type": "odd"},
        {"tokenizer_class": "OddTokenizer", "auto_map": {"AutoTokenizer": ["code.T", "code.T"]}},
        "tokenizer.folder.needs_code",
        "auto_map",
    ),
    "a model in place of a tokenizer": (
        {
            "model_type": "odd",
            "auto_map": {"AutoModelForCausalLM": "code.M", "AutoConfig": "code.C"},
        },
        {"tokenizer_class": "AutoModelForCausalLM"},
        "tokenizer.class.unknown",
        "tokenizer_class is 'AutoModelForCausalLM'",
    ),
    "a model by another spelling": (
        {
            "model_type": "odd",
            "auto_map": {"AutoModelForCausalLM": "code.M", "AutoConfig": "code.C"},
        },
        {"tokenizer_class": "AutoModelForCausalLMFast"},
        "tokenizer.class.unknown",
        "tokenizer_class is 'AutoModelForCausalLMFast'",
    ),
    "a model in config.json": (
        {"tokenizer_class": "AutoModelForCausalLM", "auto_map": {"AutoModelForCausalLM": "code.M"}},
        {"tokenizer_class": None},
        "tokenizer.class.unknown",
        "tokenizer_class is 'AutoModelForCausalLM'",
    ),
    "a tokenizer of tokenizers": (
        {"model_type": "rag", "question_encoder": {"model_type": "llama"}},
        {"tokenizer_class": None},
        "tokenizer.model.several_tokenizers",
        "model_type is 'rag'",
    ),
}


@pytest.mark.parametrize("kind", FOLDERS_WITH_CODE)
def test_code_of_a_folder_is_not_run_whoever_answers_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    config, tokenizer_config, key, value = FOLDERS_WITH_CODE[kind]
    folder = tmp_path / "model"
    write_model_without_weights(folder)
    code = "raise SystemExit('the code of the folder ran')"
    for part in (folder, folder / "question_encoder_tokenizer"):
        part.mkdir(exist_ok=True)
        (part / "code.py").write_text(code)
    inner = {**FOLDERS_WITH_CODE["a tokenizer"][1]}
    (folder / "question_encoder_tokenizer" / "tokenizer_config.json").write_text(json.dumps(inner))
    for name, values in (("config.json", config), ("tokenizer_config.json", tokenizer_config)):
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": questions.append(text) or "y")
    with raises_error(key, value) as caught:
        load_tokenizer(folder)
    assert isinstance(caught.value, ConfigError)
    assert len(caught.value.faults) == 1
    assert questions == []


def test_code_beside_a_tokenizer_that_needs_none_is_left_alone(tmp_path: Path) -> None:
    write_model_without_weights(tmp_path)
    file = tmp_path / "config.json"
    values = {**json.loads(file.read_text()), "auto_map": {"AutoConfig": "code.C"}}
    file.write_text(json.dumps(values))
    assert len(load_tokenizer(tmp_path)) == 32


def test_a_name_of_a_tokenizers_class_is_of_a_tokenizer() -> None:
    """Each transformers class with an accepted name is a tokenizer, or asks for a package."""
    names = [name for name in dir(transformers) if _CLASS_NAME.fullmatch(name)]
    assert {"LlamaTokenizer", "PreTrainedTokenizerFast"} <= set(names)
    for name in names:
        class_of_name = getattr(transformers, name)
        if hasattr(class_of_name, "_backends"):  # a placeholder for a missing package
            continue
        is_tokenizer = issubclass(class_of_name, transformers.PreTrainedTokenizerBase)
        assert is_tokenizer or not hasattr(class_of_name, "from_pretrained"), name


def test_only_one_kind_of_model_has_a_tokenizer_of_another_class() -> None:
    for kind, names in TOKENIZER_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names or ():
            is_refused_later = kind == _COMPOSED or name == "MistralCommonBackend"
            assert name is None or is_refused_later or _CLASS_NAME.fullmatch(name), kind


@pytest.mark.parametrize("name", ["MistralCommonBackend", "SentencePieceBackend"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_backend_whose_rules_cannot_be_checked_is_refused_before_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str
) -> None:
    loads: list[object] = []
    load = "reinforce_rl.data.tokenizer._from_pretrained"
    monkeypatch.setattr(load, lambda *args: loads.append(args))
    write_model_without_weights(tmp_path)
    change(tmp_path / file, tokenizer_class=name)
    with raises_error("tokenizer.class.unknown", f"tokenizer_class is '{name}'"):
        load_tokenizer(tmp_path)
    assert loads == []


@pytest.mark.parametrize("name", [None, "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox", "phi3", "mistral", "odd"])
def test_the_class_of_a_tokenizer_is_the_one_that_transformers_takes(
    tmp_path: Path, kind: str, file: str, name: str | None
) -> None:
    """The model's type counts too, since transformers corrects some class names of folders."""
    write_model_without_weights(tmp_path)
    change(tmp_path / "tokenizer_config.json", tokenizer_class=None)
    change(tmp_path / "config.json", model_type=kind)
    change(tmp_path / file, tokenizer_class=name)
    try:
        expected = transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    except ValueError:  # raised in version 4 if it knows neither the model nor a class
        with raises_error("tokenizer.folder.not_loadable", tmp_path):
            load_tokenizer(tmp_path)
        return
    tokenizer = load_tokenizer(tmp_path)
    assert type(tokenizer) is type(expected)
    text = "the rain in the sea"
    assert tokenizer(text)["input_ids"] == expected(text)["input_ids"]


def test_a_models_type_that_is_not_a_name_is_ignored(tmp_path: Path) -> None:
    write_model_without_weights(tmp_path)
    for kind in ([], {}, 3, None):
        change(tmp_path / "config.json", model_type=kind)
        assert len(load_tokenizer(tmp_path)) == 32


def test_no_configuration_of_a_model_without_a_tokenizer_is_built() -> None:
    """transformers 4's configuration of edgetam accesses the hub."""
    assert _config_class("edgetam") is transformers.PretrainedConfig
    assert _config_class("qwen2") is transformers.Qwen2Config


def test_rules_of_a_loaded_tokenizer_that_cannot_be_read_are_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model_without_weights(tmp_path)

    def fail(_: object) -> None:
        raise ValueError("nested too deep")

    monkeypatch.setattr("reinforce_rl.data.tokenizer.loaded_fault", fail)
    with raises_error("tokenizer.rules.unreadable", tmp_path, "nested too deep"):
        load_tokenizer(tmp_path)


def test_decoding_keeps_every_space_and_leaves_out_unknown_ids(tmp_path: Path) -> None:
    """Llama 3's folders ask transformers to clean up spaces, which corrupts code and quotes."""
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path))
    tokenizer.clean_up_tokenization_spaces = True
    text = "x != y , 'social' n't ."
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) != text
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    beyond = len(tokenizer) + 7  # a model whose embedding is padded
    rows = [ids, [], [*ids[:6], tokenizer.eos_token_id, beyond]]
    expected = [text, "", f"{text[:6]}<eos>"]
    assert decode_all(tokenizer, rows) == expected
    expected = [text, "", text[:6]]
    assert decode_all(tokenizer, rows, skip_special_tokens=True) == expected
    assert decode_all(tokenizer, []) == []


def test_vocabulary_hashes_are_compared_whole_and_shown_in_part() -> None:
    info = TokenizerInfo(vocab_size=4, vocab_sha256="a" * 64, eos_id=2, chat_template_sha256=None)
    other = dataclasses.replace(info, vocab_sha256="a" * 63 + "b")
    expected = [f"vocabulary hash {'a' * 12} here, {'a' * 12} there"]
    assert info.differences(other) == expected
    assert info.differences(info) == []


def test_a_template_that_leaves_out_a_turn_is_a_fault(tmp_path: Path) -> None:
    """Qwen2.5's template drops a developer's turn; transformers gives a prompt without it."""
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.role }}: "
        "{{ m.content | trim }}\n"
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
        with raises_error("chat_template.message.left_out", "developer message"):
            renderer.prompt_text(Conversation(tuple(messages)))
    empty = Conversation(({"role": "system", "content": ""}, question))
    assert renderer.prompt_text(empty) == "system: \nuser: Hi\n"


def test_a_link_out_of_the_folder_is_not_a_fault_of_the_tokenizer(tmp_path):
    folder = write_tiny_tokenizer(tmp_path / "model")
    weights = tmp_path / "weights"
    weights.touch()
    (folder / "model.safetensors").symlink_to(weights)
    link = folder / "model.safetensors"
    with raises_error("file.link.leads_out", weights) as caught:
        load_tokenizer(folder)
    assert isinstance(caught.value, ConfigError)
    (fault,) = caught.value.faults
    assert fault.startswith(f"{link} "), "and not the tokenizer"
