"""Preference pairs and rated answers: files, faults, split, and the policy's token format."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chat_templates import TEMPLATES, write_chat_tokenizer
from helpers.errors import raises_error
from helpers.models import smollm2_folder
from helpers.tiny_tokenizer import write_tiny_tokenizer

from reinforce_rl.config.reward_model import (
    FullConfig,
    PairFieldsConfig,
    PairsConfig,
    TrainRewardModelConfig,
)
from reinforce_rl.data.batches import Completions, join_prompts_and_responses
from reinforce_rl.data.conversation import Conversation
from reinforce_rl.data.finish_reasons import FINISH_STOP
from reinforce_rl.data.prompts import PromptDataset
from reinforce_rl.data.rendering import ChatRenderer
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError, DataError
from reinforce_rl.reward_model.data import (
    SKIP_LIMIT,
    SKIP_MULTI_TURN,
    SKIP_SAME,
    SKIP_UNRATED,
    Examples,
    encode_conversation,
    encode_sample,
    end_of_turn_ids,
    read_examples,
    split_by_prompt,
)
from reinforce_rl.rewards.base import TextSample

NAMES = ("helpfulness", "verbosity")
MESSAGES = [{"role": "user", "content": "hi there"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def pairs_of(path: Path, tokenizer, **data: Any):
    """Return what `read_examples` reads from a file of pairs."""
    data = {"max_length": 1000, **data}
    return read_examples(
        TrainRewardModelConfig(data=PairsConfig(pairs_path=str(path), **data)), tokenizer
    )


def ratings_of(path: Path, tokenizer, **data: Any):
    full = FullConfig(objective="regression", attributes=list(NAMES))
    data = {"max_length": 1000, **data}
    cfg = TrainRewardModelConfig(
        mode="full", full=full, data=PairsConfig(ratings_path=str(path), **data), seed=1
    )
    return read_examples(cfg, tokenizer)


def write_lines(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


def test_no_prompt_is_on_both_sides():
    keys = [f"prompt {i % 60}" for i in range(200)]
    train, held_out = split_by_prompt(keys, 0.25, seed=3)
    assert sorted(train + held_out) == list(range(200))
    train_keys = {keys[i] for i in train}
    assert not train_keys & {keys[i] for i in held_out}
    assert 0.1 < len(held_out) / 200 < 0.45
    assert split_by_prompt(keys, 0.25, seed=4) != (train, held_out)


def test_a_held_out_prompt_stays_held_out_when_pairs_are_added():
    keys = [f"prompt {i}" for i in range(50)]
    before = {keys[i] for i in split_by_prompt(keys, 0.3, 0)[1]}
    longer = ["new 1", *keys, "new 2"]
    after = {longer[i] for i in split_by_prompt(longer, 0.3, 0)[1]}
    assert before == after - {"new 1", "new 2"}


def test_prompts_that_differ_in_case_and_space_are_one(tmp_path, tokenizer):
    rows = [
        {"prompt": "\n\nHuman: How  are you?\n\nAssistant:", "chosen": "a", "rejected": "b"},
        {"prompt": "how are YOU?", "chosen": "c", "rejected": "d"},
        {"messages": [{"role": "user", "content": "How are you?"}], "chosen": "e", "rejected": "f"},
    ]
    path = write_lines(tmp_path / "pairs.jsonl", *rows)
    pairs, skipped, count = pairs_of(path, tokenizer)
    assert len({pair.prompt_key for pair in pairs}) == 1
    assert skipped == {}
    assert count == len(pairs) == 3


def test_bad_lines_are_named_and_counted(tmp_path, tokenizer):
    good = {"prompt": "p", "chosen": "a", "rejected": "b"}
    bad = [
        "{broken",
        {"prompt": "p", "chosen": "a"},
        {"prompt": 3, "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": ["a"], "rejected": "b"},
        {"prompt": " ", "chosen": "a", "rejected": "b"},
        {"prompt": "\n\nHuman: a\n\nAssistant: b", "chosen": "a", "rejected": "b"},
        {"prompt": [{"role": "robot", "content": "x"}], "chosen": "a", "rejected": "b"},
        {"chosen": "a", "rejected": "b"},
        {"prompt": "\ud800", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": {"text": "a"}, "rejected": "b"},
        *[{}] * 5,
    ]
    path = write_lines(tmp_path / "pairs.jsonl", good, *bad)
    with raises_error("data.line.not_json") as caught:
        pairs_of(path, tokenizer)
    assert isinstance(caught.value, DataError)
    text = str(caught.value)
    assert text.startswith("15 lines")
    assert "... and 5 more" in text
    expected = [
        ("data.line.not_json", "column"),
        ("data.column.missing", "data.fields.rejected=COLUMN"),
        ("data.messages.not_a_list", "prompt is a number"),
        ("data.message.not_an_object", "chosen[0] is a string"),
        ("data.prompt.empty", "prompt "),
        ("data.prompt.ends_with_an_answer", "prompt "),
        (
            "data.message.unknown_role",
            "prompt[0].role is 'robot'; expected one of system, developer, user, assistant, tool",
        ),
        ("data.column.missing", "data.fields.prompt=COLUMN"),
        ("data.text.half_a_character", "prompt "),
        ("data.text.not_a_string", "chosen[0].content is null"),
    ]
    for number, (key, value) in enumerate(expected, 2):
        line = next(row for row in text.splitlines() if f"{path}:{number}:" in row)
        assert value in line
        single = write_lines(tmp_path / "single.jsonl", good, bad[number - 2])
        with raises_error(key, f"{single}:2: ", value):
            pairs_of(single, tokenizer)


@pytest.mark.parametrize(
    ("answer", "key", "value"),
    [
        (
            {"role": "user", "content": "a"},
            "data.message.unknown_role",
            "chosen[0].role is 'user'; expected one of assistant",
        ),
        ({"content": 3}, "data.text.not_a_string", "chosen[0].content is a number"),
        (
            {"content": [{"type": "image"}]},
            "data.content.part_not_text",
            "chosen[0].content[0] is a part of type 'image'",
        ),
        (
            {"content": None, "tool_calls": "f"},
            "data.tool_calls.not_a_list",
            "chosen[0].tool_calls is a string",
        ),
    ],
)
def test_an_answer_that_is_a_message_is_checked(tmp_path, tokenizer, answer, key, value):
    line = {"prompt": "p", "chosen": answer, "rejected": "b"}
    with raises_error(key, value):
        pairs_of(write_lines(tmp_path / "pairs.jsonl", line), tokenizer)


def test_conversations_as_answers_are_the_same_pairs(tmp_path, tokenizer):
    prompt = "What?"
    turns = [{"role": "user", "content": "What?"}]
    row = {"prompt": prompt, "chosen": "a", "rejected": "b"}
    texts = write_lines(tmp_path / "texts.jsonl", *[row] * 3)
    answers = {
        "chosen": [{"role": "assistant", "content": "a"}],
        "rejected": [{"role": "assistant", "content": "b"}],
    }
    whole = {key: turns + answer for key, answer in answers.items()}
    lines = [{"prompt": prompt, **whole}, {"prompt": turns, **answers}, whole]
    pairs = pairs_of(write_lines(tmp_path / "lists.jsonl", *lines), tokenizer)
    assert pairs[0] == pairs_of(texts, tokenizer)[0]
    other_turns = [{"role": "user", "content": "Who?"}, *answers["rejected"]]
    other = {**whole, "rejected": other_turns}
    unanswered = {**whole, "chosen": turns}
    bad = tmp_path / "bad.jsonl"
    values = ("2 lines", "bad.jsonl:1: chosen and rejected ", "bad.jsonl:2: chosen ")
    with raises_error("reward_model.line.different_prompts", *values):
        pairs_of(write_lines(bad, other, unanswered), tokenizer)
    with raises_error("reward_model.line.no_answer_at_end", "bad.jsonl:1: chosen "):
        pairs_of(write_lines(bad, unanswered), tokenizer)


def test_answers_that_a_cut_makes_the_same_are_no_pair(tmp_path, tokenizer):
    same = {"prompt": "hi", "chosen": "abcdefgh good", "rejected": "abcdefgh bad"}
    other = {"prompt": "ho", "chosen": "abcd", "rejected": "bcde"}
    path = write_lines(tmp_path / "a.jsonl", same, other)
    assert pairs_of(path, tokenizer)[1] == {}
    pairs, skipped, _ = pairs_of(path, tokenizer, max_answer_tokens=6)
    assert len(pairs) == 1
    assert skipped == {SKIP_SAME: 1}


def test_null_columns_and_messages_as_json(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    path = tmp_path / "a.jsonl"
    answers = {"chosen": "ab", "rejected": "cd"}
    expected = pairs_of(write_lines(path, {"prompt": messages, **answers}), tokenizer)
    for form in (messages, json.dumps(messages)):
        write_lines(path, {"prompt": None, "messages": form, **answers})
        assert pairs_of(path, tokenizer) == expected
    as_text = json.dumps(messages)
    for line in ({"prompt": as_text, **answers}, {"prompt": "hi", **answers, "chosen": as_text}):
        column = "chosen" if line["prompt"] == "hi" else "prompt"
        with raises_error("data.text.holds_messages", f"a.jsonl:1: {column} "):
            pairs_of(write_lines(path, line), tokenizer)


def test_columns_of_csv_by_other_names(tmp_path, tokenizer):
    (tmp_path / "p.csv").write_text("question,good,bad\nWhat?,a,b\n")
    names = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    pairs, _, _ = pairs_of(tmp_path / "p.csv", tokenizer, fields=PairFieldsConfig(**names))
    lines = write_lines(tmp_path / "p.jsonl", {"prompt": "What?", "chosen": "a", "rejected": "b"})
    assert pairs == pairs_of(lines, tokenizer)[0]
    (tmp_path / "r.csv").write_text("prompt,response,helpfulness,verbosity\na,b,4,0.5\na,c,,1\n")
    ratings, _, _ = ratings_of(tmp_path / "r.csv", tokenizer)
    assert ratings[0].ratings == (4.0, 0.5)
    assert math.isnan(ratings[1].ratings[0])


@pytest.mark.parametrize("read", [pairs_of, ratings_of])
def test_an_empty_or_missing_file_is_named(tmp_path, tokenizer, read):
    with raises_error("reward_model.data.empty", tmp_path / "empty.jsonl"):
        read(write_lines(tmp_path / "empty.jsonl", ""), tokenizer)
    with raises_error("data.file.missing", tmp_path / "none.jsonl"):
        read(tmp_path / "none.jsonl", tokenizer)


def test_pairs_that_do_not_fit_are_counted(tmp_path, tokenizer):
    two_turns = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    path = write_lines(
        tmp_path / "pairs.jsonl",
        {"prompt": "one", "chosen": "yes", "rejected": "no"},
        {"prompt": "two", "chosen": "same ", "rejected": "same"},
        {"prompt": "three", "chosen": "x" * 50, "rejected": "no"},
        {"prompt": two_turns, "chosen": "yes", "rejected": "no"},
        {"prompt": "four", "chosen": "yes", "rejected": "no"},
        {"prompt": "five", "chosen": "yes", "rejected": "no"},
    )
    pairs, skipped, count = pairs_of(
        path, tokenizer, max_pairs=2, single_turn_only=True, max_length=30
    )
    assert len(pairs) == 2
    assert count == 6
    too_long = "63 to 63 tokens, above data.max_length=30; data.max_length=63 keeps all"
    assert skipped == {SKIP_SAME: 1, too_long: 1, SKIP_MULTI_TURN: 1, SKIP_LIMIT: 1}
    expected = [
        f"WARNING: 1 of 6 (17%) left out: {SKIP_SAME}",
        f"  1 of 6 (17%) left out: {SKIP_MULTI_TURN}",
        f"WARNING: 1 of 6 (17%) left out: {too_long}",
        f"  1 of 6 (17%) left out: {SKIP_LIMIT}",
    ]
    assert Examples(pairs, [], [], 6, skipped).skipped_lines == expected
    few = Examples(pairs, [], [], 10, {too_long: 1}).skipped_lines
    assert few == [f"  1 of 10 (10%) left out: {too_long}"], "no more than a tenth"
    assert len(pairs_of(path, tokenizer, max_length=63)[0]) == 5, "the remedy is one"
    assert too_long not in pairs_of(path, tokenizer, max_answer_tokens=10, max_length=30)[1]
    with raises_error("reward_model.data.nothing_left", "6 pairs"):
        pairs_of(path, tokenizer, max_length=3)


def test_attributes_in_an_object_or_as_keys_and_missing_ones(tmp_path, tokenizer):
    path = write_lines(
        tmp_path / "r.jsonl",
        {
            "prompt": "a",
            "response": "b",
            "attributes": {"helpfulness": 4, "verbosity": 1.5, "other": "x"},
        },
        {"prompt": "a", "response": "c", "helpfulness": 0, "verbosity": None, "complexity": 2},
        {"prompt": "a", "response": "d", "attributes": {}},
    )
    answers, skipped, _ = ratings_of(path, tokenizer)
    first, second = (answer.ratings for answer in answers)
    assert first == (4.0, 1.5)
    assert second[0] == 0.0
    assert math.isnan(second[1])
    assert skipped == {SKIP_UNRATED: 1}


def test_faulty_ratings_are_all_named(tmp_path, tokenizer):
    good = {"prompt": "a", "response": "b", "helpfulness": 1, "verbosity": 1}
    path = write_lines(
        tmp_path / "r.jsonl",
        good,
        {**good, "helpfulness": "four"},
        {**good, "verbosity": True},
        {**good, "attributes": [1]},
        {"prompt": "a", "helpfulness": 1},
        {**good, "helpfulness": float("inf")},
        {**good, "helpfulness": 10**400},  # no float holds it
    )
    with pytest.raises(DataError) as caught:
        ratings_of(path, tokenizer)
    text = str(caught.value)
    assert "helpfulness is 'four', expected a finite number" in text
    assert "verbosity is True" in text
    assert "attributes is a list" in text
    assert "expected response" in text
    assert "helpfulness is inf" in text
    assert "line 1:" not in text
    assert f"{path}:7: the attribute helpfulness is 1000" in text


def test_a_name_that_no_line_has(tmp_path, tokenizer):
    path = write_lines(tmp_path / "r.jsonl", {"prompt": "a", "response": "b", "helpfulness": 1})
    values = (path, "verbosity", "full.attributes")
    with raises_error("reward_model.data.attribute_not_rated", *values):
        ratings_of(path, tokenizer)


def test_ratings_that_are_left_out_are_counted(tmp_path, tokenizer):
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    rated = {"helpfulness": 1, "verbosity": 2}
    path = write_lines(
        tmp_path / "r.jsonl",
        *({"prompt": f"p{i}", "response": "fine", **rated} for i in range(4)),
        {"prompt": "p", "response": "unrated"},
        {"prompt": "p", "response": "long" * 30, **rated},
        {"messages": turns, "response": "fine", **rated},
    )
    ratings, skipped, _ = ratings_of(
        path, tokenizer, max_pairs=3, single_turn_only=True, max_length=40
    )
    too_long = "129 to 129 tokens, above data.max_length=40; data.max_length=129 keeps all"
    assert skipped == {SKIP_UNRATED: 1, too_long: 1, SKIP_MULTI_TURN: 1, SKIP_LIMIT: 1}
    assert len(ratings) == 3
    prompt = json.loads(ratings[0].prompt_key)[0][1]
    expected = conversation(tokenizer, [{"role": "user", "content": prompt}], "fine")
    assert list(ratings[0].tokens) == expected
    with raises_error("reward_model.data.nothing_left", "7 rated answers"):
        ratings_of(path, tokenizer, max_length=2)


def conversation(tokenizer, messages, answer: str, max_tokens: int | None = None) -> list[int]:
    message = {"role": "assistant", "content": answer.strip()}
    return encode_conversation(
        ChatRenderer(tokenizer), Conversation(tuple(messages)), message, max_tokens
    )


@pytest.fixture(scope="module")
def chat_tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    return {
        name: write_chat_tokenizer(folder / name, template) for name, template in TEMPLATES.items()
    }


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("form", ["prompt apart", "whole conversations"])
def test_pairs_are_what_transformers_makes_of_the_conversations(
    tmp_path, chat_tokenizers, name, form
):
    # TRL's RewardTrainer calls `apply_chat_template(prompt + chosen)` too
    # (`trl/trainer/reward_trainer.py`).
    tokenizer = chat_tokenizers[name]
    prompt = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    answers = {
        "chosen": {"role": "assistant", "content": "Hello. "},
        "rejected": {"role": "assistant", "content": "No"},
    }
    line: dict[str, Any] = {key: [answer] for key, answer in answers.items()}
    if form == "prompt apart":
        line["prompt"] = prompt
    else:
        line = {key: [*prompt, *messages] for key, messages in line.items()}
    path = write_lines(tmp_path / "pairs.jsonl", line)
    (pair,), _, _ = pairs_of(path, tokenizer)
    for key, answer in answers.items():
        expected = tokenizer.apply_chat_template([*prompt, answer], return_dict=False)
        assert [*pair.prompt, *getattr(pair, key)] == expected
    # The answers' tokens start after everything that the template writes before them.
    assert tokenizer.decode(pair.rejected).startswith("No")


@pytest.mark.parametrize("form", ["prompt apart", "whole conversations"])
@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_pairs_have_the_roles_of_prompts(tmp_path, chat_tokenizers, role, form):
    tokenizer = chat_tokenizers["qwen2.5"]
    prompt = [{"role": role, "content": "be kind"}, {"role": "user", "content": "hi"}]
    chosen = {"role": "assistant", "content": "Hello."}
    rejected = {"role": "assistant", "content": "No"}
    line: dict[str, Any] = {"prompt": prompt, "chosen": "Hello.", "rejected": "No"}
    if form == "whole conversations":
        line = {"chosen": [*prompt, chosen], "rejected": [*prompt, rejected]}
    path = write_lines(tmp_path / "pairs.jsonl", line)
    (pair,), _, _ = pairs_of(path, tokenizer)
    expected = tokenizer.apply_chat_template([*prompt, chosen], return_dict=False)
    assert [*pair.prompt, *pair.chosen] == expected
    critic = {**prompt[0], "role": "critic"}
    line = {"prompt": [critic, prompt[1]], "chosen": "a", "rejected": "b"}
    values = ("bad.jsonl:1: prompt[0].role is 'critic'", "developer")
    with raises_error("data.message.unknown_role", *values):
        pairs_of(write_lines(tmp_path / "bad.jsonl", line), tokenizer)


def test_the_rest_of_a_conversation_follows_a_prompt_of_messages(tmp_path, chat_tokenizers):
    tokenizer = chat_tokenizers["qwen2.5"]
    prompt = [{"role": "user", "content": "Weather in Rome?"}]
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    asked = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": function}],
    }
    rest = [asked, {"role": "tool", "content": "sunny"}]
    chosen = {"role": "assistant", "content": "Sunny."}
    rejected = {"role": "assistant", "content": "Rain."}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    line = {
        "prompt": prompt,
        "chosen": [*rest, chosen],
        "rejected": [*rest, rejected],
        "tools": json.dumps([tool]),
    }
    path = write_lines(tmp_path / "pairs.jsonl", line)
    (pair,), _, _ = pairs_of(path, tokenizer)
    function["arguments"] = {"city": "Rome"}  # type: ignore[assignment]
    expected = tokenizer.apply_chat_template(
        [*prompt, *rest, chosen], tools=[tool], return_dict=False
    )
    assert [*pair.prompt, *pair.chosen] == expected
    called = {"prompt": prompt, "chosen": [asked], "rejected": [rejected], "tools": [tool]}
    path = write_lines(tmp_path / "pairs.jsonl", called)
    (pair,), _, _ = pairs_of(path, tokenizer)
    expected = tokenizer.apply_chat_template([*prompt, asked], tools=[tool], return_dict=False)
    assert [*pair.prompt, *pair.chosen] == expected


def test_template_arguments_of_the_data_and_of_a_line(tmp_path, tokenizer):
    template = "{{ mood | default('calm') }}{% for m in messages %}|{{ m.content }}{% endfor %}"
    tokenizer = write_chat_tokenizer(tmp_path / "t", template)
    line = {"prompt": "p", "chosen": "a", "rejected": "b"}
    with_mood = {**line, "chat_template_kwargs": {"mood": "merry"}}
    path = write_lines(tmp_path / "pairs.jsonl", line, with_mood)
    pairs, _, _ = pairs_of(path, tokenizer, chat_template_kwargs={"mood": "sad"})
    texts = [tokenizer.decode([*pair.prompt, *pair.chosen]) for pair in pairs]
    assert texts == ["sad|p|a", "merry|p|a"]
    with raises_error("chat_template.argument.not_read", "data.chat_template_kwargs.moody "):
        pairs_of(path, tokenizer, chat_template_kwargs={"moody": "sad"})
    bad = write_lines(tmp_path / "bad.jsonl", {**line, "chat_template_kwargs": [1]})
    value = "bad.jsonl:1: chat_template_kwargs is a list"
    with raises_error("data.template_arguments.not_an_object", value):
        pairs_of(bad, tokenizer)


@pytest.mark.parametrize("name", ["llama3", "qwen2.5", "qwen3", "deepseek"])
def test_the_reward_server_reads_what_training_reads(tmp_path, chat_tokenizers, name):
    renderer = ChatRenderer(chat_tokenizers[name])
    sample = TextSample("unused", "hello.", {}, tuple(MESSAGES))
    line = {"prompt": MESSAGES, "chosen": "hello.", "rejected": "no"}
    path = write_lines(tmp_path / "pairs.jsonl", line)
    (pair,), _, _ = pairs_of(path, renderer.tokenizer)
    assert encode_sample(renderer, sample) == [*pair.prompt, *pair.chosen]
    end = end_of_turn_ids(renderer)
    cut = encode_sample(renderer, dataclasses.replace(sample, finished=False))
    assert [*cut, *end] == encode_sample(renderer, sample)
    plain = TextSample("hi there", " hello.\n", {"tools": "not for the template"})
    assert encode_sample(renderer, plain) == encode_sample(renderer, sample), "one user message"


def test_the_reward_server_gives_the_template_a_records_tools_and_arguments(chat_tokenizers):
    tokenizer = chat_tokenizers["qwen2.5"]
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    record = {"tools": [tool], "chat_template_kwargs": {"x": 1}}
    sample = TextSample("", "Sunny.", record, tuple(MESSAGES))
    answer = {"role": "assistant", "content": "Sunny."}
    expected = tokenizer.apply_chat_template([*MESSAGES, answer], tools=[tool], return_dict=False)
    assert encode_sample(ChatRenderer(tokenizer), sample) == expected


def actor_sequence(tokenizer, folder: Path, prompt: str, response: list[int]) -> list[int]:
    """Return the tokens that the policy reads and writes, by the policy's own code."""
    file = folder / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": prompt}))
    dataset = PromptDataset.from_files(
        tokenizer, file, max_prompt_tokens=None, apply_chat_template=True
    )
    tokens = torch.tensor([response])
    lengths = torch.tensor([len(response)])
    completions = Completions(tokens, lengths, (FINISH_STOP,))
    rows, _ = join_prompts_and_responses([dataset[0]], completions, pad_id=0)
    return rows[0].tolist()


@pytest.mark.parametrize(("name", "end"), [("llama3", "<|eot_id|>"), ("qwen2.5", "<|im_end|>")])
def test_an_answer_begins_with_the_actors_sequence(chat_tokenizers, tmp_path, name, end):
    tokenizer = chat_tokenizers[name]
    response = tokenizer(f"hello.{end}", add_special_tokens=False)["input_ids"]
    whole = conversation(tokenizer, MESSAGES, "hello.")
    actors = actor_sequence(tokenizer, tmp_path, "hi there", response)
    assert whole[: len(actors)] == actors
    assert tokenizer.decode(whole[len(actors) :]) == ("\n" if name == "qwen2.5" else "")
    cut = conversation(tokenizer, MESSAGES, "hello.", 4)
    assert cut == actor_sequence(tokenizer, tmp_path, "hi there", response[:4])


def test_the_end_of_a_turn_counts_as_one_token_of_a_cut(chat_tokenizers):
    tokenizer = chat_tokenizers["qwen2.5"]
    whole = conversation(tokenizer, MESSAGES, "abc")
    assert conversation(tokenizer, MESSAGES, "abc", 4) == whole
    assert tokenizer.decode(whole).endswith("abc<|im_end|>\n")
    assert tokenizer.decode(conversation(tokenizer, MESSAGES, "abc", 3)).endswith("assistant\nabc")
    assert tokenizer.decode(conversation(tokenizer, MESSAGES, "abc", 2)).endswith("assistant\nab")


def test_an_empty_answer_is_the_end_of_the_turn_alone(chat_tokenizers):
    tokenizer = chat_tokenizers["qwen2.5"]
    assert tokenizer.decode(conversation(tokenizer, MESSAGES, " \n")).endswith(
        "assistant\n<|im_end|>\n"
    )


def test_no_chat_template_and_refused_messages_are_named(tmp_path):
    plain = load_tokenizer(write_tiny_tokenizer(tmp_path / "plain", chat_template=None))
    with raises_error("chat_template.template.missing", tmp_path / "plain") as caught:
        conversation(plain, MESSAGES, "a")
    assert isinstance(caught.value, ConfigError)
    strict = load_tokenizer(
        write_tiny_tokenizer(tmp_path / "strict", chat_template="{{ raise_exception('no!') }}")
    )
    with raises_error("chat_template.messages.refused", "no!"):
        conversation(strict, MESSAGES, "a")


def test_smollm2_form():
    tokenizer = load_tokenizer(smollm2_folder())
    ids = conversation(tokenizer, MESSAGES, " Hello. ")
    expected = tokenizer.apply_chat_template(
        [*MESSAGES, {"role": "assistant", "content": "Hello."}], return_dict=False
    )
    assert ids == expected
    assert tokenizer.decode(ids).endswith(
        "user\nhi there<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    )
