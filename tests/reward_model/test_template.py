"""The form in which the reward model sees a conversation is that of the actor's own sequences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.models import smollm2_folder
from helpers.tiny_tokenizer import write_tiny_tokenizer

from reinforce_rl.data.batches import FINISH_STOP, Completions, join_prompts_and_responses
from reinforce_rl.data.prompts import PromptDataset
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError, DataError
from reinforce_rl.reward_model.template import encode_answer, encode_conversation, encode_prompt

MESSAGES = [{"role": "user", "content": "hi there"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def actor_sequence(tokenizer, folder: Path, prompt: str, response: list[int]) -> list[int]:
    """What the actor sends to the reward server, made by the actor's own code."""
    file = folder / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": prompt}))
    dataset = PromptDataset.from_jsonl(tokenizer, file, max_prompt_tokens=None, apply_chat_template=True)
    completions = Completions(torch.tensor([response]), torch.tensor([len(response)]), (FINISH_STOP,))
    rows, _ = join_prompts_and_responses([dataset[0]], completions, pad_id=0)
    return rows[0].tolist()


def test_finished_answer_equals_the_actors_sequence(tokenizer, tmp_path):
    response = [*tokenizer("hello.", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert encode_conversation(tokenizer, MESSAGES, "hello.") == actor_sequence(
        tokenizer, tmp_path, "hi there", response
    )


def test_cut_answer_equals_the_actors_sequence_at_max_length(tokenizer, tmp_path):
    response = tokenizer("hello.", add_special_tokens=False)["input_ids"][:4]
    encoded = encode_conversation(tokenizer, MESSAGES, "hello.", max_answer_tokens=4)
    assert encoded == actor_sequence(tokenizer, tmp_path, "hi there", response)
    assert encoded[-1] != tokenizer.eos_token_id


def test_end_of_turn_counts_towards_the_cut(tokenizer):
    assert encode_answer(tokenizer, "abc", 4)[-1] == tokenizer.eos_token_id
    assert encode_answer(tokenizer, "abc", 3) == encode_answer(tokenizer, "abc")[:3]
    assert len(encode_answer(tokenizer, "abc", 3)) == 3


def test_empty_answer_is_the_end_of_turn_alone(tokenizer):
    assert encode_answer(tokenizer, " \n") == [tokenizer.eos_token_id]


def test_no_chat_template_and_refused_messages_are_named(tmp_path):
    plain = load_tokenizer(write_tiny_tokenizer(tmp_path / "plain", chat_template=None))
    with pytest.raises(ConfigError, match="no chat template"):
        encode_prompt(plain, MESSAGES)
    strict = load_tokenizer(write_tiny_tokenizer(tmp_path / "strict", chat_template="{{ raise_exception('no!') }}"))
    with pytest.raises(DataError, match="refuses these messages: no!"):
        encode_prompt(strict, MESSAGES)


def test_smollm2_form():
    tokenizer = load_tokenizer(smollm2_folder())
    text = tokenizer.decode(encode_conversation(tokenizer, MESSAGES, " Hello. "))
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>")
