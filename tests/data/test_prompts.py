"""Prompt data sets: the result of each form of line, all faults, and the batches of each rank."""

from __future__ import annotations

import json
import logging
import math
from itertools import chain
from pathlib import Path

import pytest
from helpers.chat_templates import QWEN25, SANITIZED_OR_NOT, needs_sanitize, write_chat_tokenizer
from helpers.errors import check_error, check_fault, raises_error
from helpers.tiny_tokenizer import write_tiny_tokenizer
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.data_prefix import resolve_data_prefix
from reinforce_rl.data.prepare import PrepareOptions, prepare_prompts
from reinforce_rl.data.prompts import (
    PromptDataset,
    PromptLoader,
    build_train_valid_test_rlhf_datasets,
    fixed_prompts,
)
from reinforce_rl.data.readers import Columns
from reinforce_rl.data.rendering import TemplateOptions
from reinforce_rl.data.sampler import Blend, PromptSampler
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError, DataError

DEMO = Path(__file__).parents[2] / "examples" / "demo"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write(path: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def load(tokenizer, *files: Path, **options) -> PromptDataset:
    return PromptDataset.from_files(tokenizer, files, **{"max_prompt_tokens": 100, **options})


def test_tiny_tokenizer_is_lossless_and_of_the_size_asked_for(tokenizer, tmp_path):
    text = "Hello, world!\n\nA 'line' (2) -> {x}"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert len(tokenizer) == 128
    small = load_tokenizer(write_tiny_tokenizer(tmp_path, vocab_size=16))
    assert len(small) == 16
    assert max(small("Hello")["input_ids"]) < 16
    assert tokenizer.pad_token_id == 0
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id == 2


def test_each_form_of_line(tokenizer, tmp_path):
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    file = write(
        tmp_path / "a.jsonl",
        {"prompt": "one", "answer": 7, "tags": ["x"]},
        b"",
        b"   ",
        {"text": " two\n"},
        {"messages": messages, "source": None},
    )
    dataset = load(tokenizer, file)
    assert [p.text for p in dataset] == ["one", " two\n", "S: be kind<eos>U: hi<eos>A:"]
    expected = [{"answer": 7, "tags": ["x"]}, {}, {"source": None}]
    assert [p.metadata for p in dataset] == expected
    assert [p.messages for p in dataset] == [(), (), tuple(messages)]
    assert [p.id for p in dataset] == [0, 1, 2]
    for prompt in dataset:
        assert tokenizer.decode(prompt.tokens) == prompt.text
    assert tokenizer.bos_token_id not in dataset[0].tokens
    # special tokens of the template are single ids
    assert dataset[2].tokens.count(tokenizer.eos_token_id) == 2


def test_forms_and_columns_as_others_have_them(tokenizer, tmp_path):
    conversation = [{"from": "system", "value": "be kind"}, {"from": "human", "value": "hi"}]
    file = write(
        tmp_path / "a.jsonl",
        {"prompt": [{"role": "user", "content": "hi"}], "answer": 1},
        {"conversations": conversation},
        {"prompt": "hi", "conversations": conversation},
    )
    dataset = load(tokenizer, file)
    assert [p.text for p in dataset] == ["U: hi<eos>A:", "S: be kind<eos>U: hi<eos>A:", "hi"]
    expected = [{"answer": 1}, {}, {"conversations": conversation}]
    assert [p.metadata for p in dataset] == expected
    (tmp_path / "b.csv").write_text("question,system,text\nhi,be brief,x\nho,,y\n")
    columns = Columns({"prompt": "question", "system": "system"})
    dataset = load(
        tokenizer,
        tmp_path / "b.csv",
        columns=columns,
        apply_chat_template=True,
        system_prompt="be kind",
    )
    assert [p.text for p in dataset] == [
        "S: be brief<eos>U: hi<eos>A:",
        "S: be kind<eos>U: ho<eos>A:",
    ]
    assert dataset[0].metadata == {"system": "be brief", "text": "x"}
    assert dataset[0].id == 0
    file = write(file, {"conversations": conversation})
    assert load(tokenizer, file, system_prompt="no")[0].text == "S: be kind<eos>U: hi<eos>A:"
    with raises_error("data.system.plain_prompt", "model.data.apply_chat_template=true") as caught:
        load(tokenizer, tmp_path / "b.csv", columns=columns)
    assert isinstance(caught.value, ConfigError), "no line is to correct"
    (tmp_path / "b.csv").write_text("question,system\n" + "hi,be brief\n" * 20)
    values = ("b.csv:2: ", "question, system;", "model.data.fields.prompt=question")
    with raises_error("data.column.missing", *values):
        load(tokenizer, tmp_path / "b.csv")


def test_a_tokenizer_that_was_saved_with_truncation_cuts_nothing(tokenizer, tmp_path):
    """`tokenizer.json` stores the truncation and padding of the last training with it."""
    folder = write_tiny_tokenizer(tmp_path / "tokenizer")
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.enable_truncation(3)
    core.enable_padding(length=30)
    core.save(str(folder / "tokenizer.json"))
    file = write(
        tmp_path / "a.jsonl",
        {"prompt": "a long prompt"},
        {"messages": [{"role": "user", "content": "hi there"}]},
    )
    saved = load_tokenizer(folder)
    for template in SANITIZED_OR_NOT:
        prompts = load(saved, file, template=template)
        expected = [p.tokens for p in load(tokenizer, file)]
        assert [p.tokens for p in prompts] == expected


def test_null_is_not_a_prompt(tokenizer, tmp_path):
    # `datasets.concatenate_datasets` gives each record all columns, with null.
    messages = [{"role": "user", "content": "hi"}]
    empty = {"prompt": None, "text": None, "messages": None, "conversations": None}
    file = write(
        tmp_path / "a.jsonl",
        {**empty, "prompt": "one", "answer": 1},
        {**empty, "messages": messages, "answer": None},
        {**empty, "text": "two"},
        {**empty, "conversations": [{"from": "human", "value": "ho"}]},
    )
    dataset = load(tokenizer, file)
    assert [p.text for p in dataset] == ["one", "U: hi<eos>A:", "two", "U: ho<eos>A:"]
    expected = [{"answer": 1}, {"answer": None}, {}, {}]
    assert [p.metadata for p in dataset] == expected
    with raises_error("data.prompt.null", "b.jsonl:2: ", "prompt and messages"):
        load(
            tokenizer,
            write(tmp_path / "b.jsonl", {"prompt": "one"}, {"prompt": None, "messages": None}),
        )
    with raises_error("data.text.not_a_string", "a.jsonl:2: prompt is null"):
        load(
            tokenizer,
            write(file, {"q": "one"}, {"q": None, "text": "x"}),
            columns=Columns({"prompt": "q"}),
        )


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_messages_that_a_text_holds_as_json(tokenizer, tmp_path, key):
    said = {
        "messages": {"role": "user", "content": "hi"},
        "conversations": {"from": "human", "value": "hi"},
    }[key]
    as_list = load(tokenizer, write(tmp_path / "a.jsonl", {key: [said]}))
    as_text = load(tokenizer, write(tmp_path / "b.jsonl", {key: json.dumps([said])}))
    assert as_text[0] == as_list[0]
    assert as_text[0].text == "U: hi<eos>A:"
    python = write(tmp_path / "c.jsonl", {key: str([said])})
    with raises_error("data.messages.python_form", f"c.jsonl:1: {key} ", "json.dumps"):
        load(tokenizer, python)
    with raises_error("data.messages.not_a_list", f"d.jsonl:1: {key} is a string"):
        load(tokenizer, write(tmp_path / "d.jsonl", {key: "hi"}))


@pytest.mark.parametrize("form", [json.dumps, str])
def test_a_prompt_that_may_be_a_text_or_messages_needs_a_choice(tokenizer, tmp_path, form):
    text = form([{"role": "user", "content": "hi"}])
    file = write(tmp_path / "a.jsonl", {"prompt": text})
    option = "+model.data.fields.rename"
    settings = (f"{option}.messages=prompt", f"{option}.text=prompt")
    with raises_error("data.text.holds_messages", "a.jsonl:1: prompt ", *settings):
        load(tokenizer, file, apply_chat_template=True)
    assert load(tokenizer, file, columns=Columns({"text": "prompt"}))[0].text == text
    if form is json.dumps:
        assert (
            load(tokenizer, file, columns=Columns({"messages": "prompt"}))[0].text == "U: hi<eos>A:"
        )
    with raises_error("data.text.holds_messages", "rename.messages=chat"):
        load(tokenizer, write(file, {"chat": text}), columns=Columns({"prompt": "chat"}))
    # A prompt may be JSON of any other kind.
    others = ['[{"name": "x"}]', "[1, 2]", "[", "[]", '[{"role": "user"}, 1]']
    dataset = load(tokenizer, write(file, *({"prompt": other} for other in others)))
    assert [prompt.text for prompt in dataset] == others


def test_the_same_prompts_in_another_form_are_the_same_data(tokenizer, tmp_path):
    texts = ["one", "two", 'three, "3"']
    lines = load(tokenizer, write(tmp_path / "a.jsonl", *({"prompt": text} for text in texts)))
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": text} for text in texts]))
    assert load(tokenizer, tmp_path / "a.json").fingerprint == lines.fingerprint
    # Written by runs before other forms were supported.
    assert lines.fingerprint == "c2ea54045663945ab5e0e06546eb0331301af5978d4795d24215779f65e5706a"


def test_a_folder_is_one_entry_of_a_blend(tokenizer, tmp_path):
    (tmp_path / "many").mkdir()
    for name in ("b", "a"):
        write(tmp_path / "many" / f"{name}.jsonl", {"prompt": name}, {"prompt": name * 2})
    (tmp_path / "c.csv").write_text("prompt\nc\n")
    prefix = {"train": [1, str(tmp_path / "many"), 2, str(tmp_path / "c.csv")]}
    train = build_train_valid_test_rlhf_datasets(tokenizer, prefix, max_prompt_tokens=9).train
    assert [p.text for p in train] == ["a", "aa", "b", "bb", "c"]
    assert train.blend == Blend((4, 1), (1.0, 2.0))


def test_chat_template_for_plain_prompts(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": "hi"}, {"text": "ho"})
    texts = [p.text for p in load(tokenizer, file, apply_chat_template=True)]
    assert texts == [
        "U: hi<eos>A:",
        "U: ho<eos>A:",
    ]


NEMO = "<extra_id_0>System\n\n<extra_id_1>User\nhi\n<extra_id_1>Assistant\n"


def test_a_text_with_nemo_aligners_markers_is_not_rendered_once_more(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", {"text": NEMO}, {"text": NEMO.replace("hi", "ho")})
    expected = [NEMO, NEMO.replace("hi", "ho")]
    texts = [prompt.text for prompt in load(tokenizer, file)]
    assert texts == expected
    setting = "model.data.apply_chat_template=true"
    values = ("a.jsonl", "<extra_id_0>", setting, "reinforce-rl prepare")
    with raises_error("data.prompt.nemo_markers", *values):
        load(tokenizer, file, apply_chat_template=True)
    counts = prepare_prompts([file], tmp_path / "out", PrepareOptions(num_validation=1))
    assert counts.skipped == {}
    train_file = tmp_path / "out" / "train.jsonl"
    prompts = load(tokenizer, train_file, tmp_path / "out" / "validation.jsonl")
    assert sorted(prompt.text for prompt in prompts) == ["U: hi<eos>A:", "U: ho<eos>A:"]


def test_bos_only_where_asked_for_and_no_template_was_used(tokenizer, tmp_path):
    file = write(
        tmp_path / "a.jsonl", {"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}
    )
    plain = load(tokenizer, file)
    with_bos = load(tokenizer, file, add_bos=True)
    expected = (tokenizer.bos_token_id, *plain[0].tokens)
    assert with_bos[0].tokens == expected
    assert with_bos[1].tokens == plain[1].tokens
    assert with_bos[0].text == "hi"


def test_a_plain_prompt_has_the_bos_that_its_tokenizer_adds_by_itself(tmp_path):
    adding = load_tokenizer(write_tiny_tokenizer(tmp_path / "t"))
    adding.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    rows = [
        {"prompt": "hi"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt": "<bos>ho"},
    ]
    file = write(tmp_path / "a.jsonl", *rows)
    # Like transformers, TRL and vLLM do with a string.
    assert [*load(adding, file)[0].tokens] == adding("hi")["input_ids"]
    assert [p.tokens.count(1) for p in load(adding, file)] == [1, 0, 1]
    assert [p.tokens.count(1) for p in load(adding, file, add_bos=True)] == [1, 0, 1]
    assert [p.tokens.count(1) for p in load(adding, file, add_bos=False)] == [0, 0, 1]


def test_tools_and_template_arguments_of_a_record_reach_the_template(tmp_path, caplog):
    tokenizer = write_chat_tokenizer(tmp_path / "t", QWEN25 + "{{ mood }}")
    messages = [{"role": "user", "content": [{"type": "text", "text": "Weather in Rome?"}]}]
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    file = write(
        tmp_path / "a.jsonl",
        {"messages": messages, "tools": [tool]},
        {
            "messages": messages,
            "tools": json.dumps([tool]),
            "chat_template_kwargs": {"mood": "merry", "other": 1},
        },
        {"prompt": "plain", "tools": "of another meaning"},
    )
    template = TemplateOptions(kwargs={"mood": "sad"})
    dataset = load(tokenizer, file, max_prompt_tokens=None, template=template)
    text = [{"role": "user", "content": "Weather in Rome?"}]
    for prompt, mood in zip(dataset, ("sad", "merry"), strict=False):
        ids = tokenizer.apply_chat_template(
            text, tools=[tool], mood=mood, add_generation_prompt=True, return_dict=False
        )
        assert [*prompt.tokens] == ids
        assert prompt.messages == tuple(messages), "as the data has them"
    assert dataset[0].metadata == {"tools": [tool]}, "a reward function gets them too"
    assert dataset[2].text == "plain"
    assert dataset[2].metadata == {"tools": "of another meaning"}
    assert "chat_template_kwargs.other of 1 records has no effect" in caplog.text


def test_tools_of_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    tokenizer = write_chat_tokenizer(tmp_path / "t", QWEN25)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

    def messages(arguments: object) -> list[dict]:
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "weather", "arguments": arguments},
        }
        return [
            {"role": "user", "content": "Weather?", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "sunny", "tool_calls": None},
        ]

    row = {
        "messages": messages('{"city": "Rome"}'),
        "tools": json.dumps([tool]),
        "chat_template_kwargs": None,
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    (prompt,) = load(tokenizer, tmp_path / "a.parquet", max_prompt_tokens=None)
    expected = tokenizer.apply_chat_template(
        messages({"city": "Rome"}), tools=[tool], add_generation_prompt=True, return_dict=False
    )
    assert [*prompt.tokens] == expected


@pytest.mark.parametrize("case", ["tools", "calls", "parts"])
def test_the_public_cases_with_tools(tmp_path, case):
    file = Path(__file__).parents[3] / "shared" / "cases" / "15-tools" / f"{case}.jsonl"
    if not file.is_file():
        pytest.skip("the public cases are not beside this checkout")
    tokenizer = write_chat_tokenizer(tmp_path / "t", QWEN25)
    record = json.loads(file.read_text("utf-8"))
    messages = []
    for message in record["messages"]:
        content = message["content"]
        if isinstance(content, list):
            content = content[0]["text"]
        messages.append({**message, "content": content})
    expected = tokenizer.apply_chat_template(
        messages, tools=record.get("tools"), add_generation_prompt=True, return_dict=False
    )
    (prompt,) = load(tokenizer, file, max_prompt_tokens=None)
    assert [*prompt.tokens] == expected


@needs_sanitize
def test_control_tokens_of_a_message_may_be_text(tmp_path):
    tokenizer = write_chat_tokenizer(tmp_path / "t", QWEN25)
    messages = [{"role": "user", "content": "hi<|im_end|>"}]
    file = write(tmp_path / "a.jsonl", {"messages": messages}, {"prompt": "hi<|im_end|>"})
    dataset = load(tokenizer, file, template=TemplateOptions(sanitize_control_tokens=True))
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, sanitize_control_tokens=True
    )
    assert [*dataset[0].tokens] == expected
    assert dataset[0].text == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert [*dataset[1].tokens] == tokenizer("hi<|im_end|>", add_special_tokens=False)["input_ids"]


def test_ids_run_over_files_and_skipped_prompts(tokenizer, tmp_path, caplog):
    first = write(
        tmp_path / "a.jsonl", {"prompt": "one"}, {"prompt": "x" * 11}, {"prompt": "x" * 10}
    )
    second = write(tmp_path / "b.jsonl", {"prompt": "y" * 30}, {"prompt": "two"})
    with caplog.at_level(logging.WARNING):
        dataset = load(tokenizer, first, second, max_prompt_tokens=10, too_long="skip")
    expected = [(0, "one"), (1, "x" * 10), (2, "two")]
    assert [(p.id, p.text) for p in dataset] == expected
    assert dataset.skipped == 2
    assert len(caplog.records) == 1
    assert (
        f"skipped 2 of 5 prompts, longer than 10 tokens; the first is {first}:2 with 11"
        in caplog.text
    )


def test_too_long_is_refused_by_default(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": "fine"}, {"prompt": "x" * 11})
    with raises_error("data.prompt.too_long", f"{file}:2: ", "11 tokens", 10, "too_long=skip"):
        load(tokenizer, file, max_prompt_tokens=10)
    assert len(load(tokenizer, file, max_prompt_tokens=None)) == 2


def line_with(content: object, role: str = "user", **fields: object) -> dict:
    return {"messages": [{"role": role, "content": content, **fields}]}


def line_calling(arguments: object) -> dict:
    return line_with("", "assistant", tool_calls=[{"name": "f", "arguments": arguments}])


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        (b'{"prompt": "x"', "data.line.not_json", ""),
        (b'{"prompt": "\xff"}', "data.text.not_utf8", "byte 13 "),
        (b'{"prompt": "\\ud800"}', "data.text.half_a_character", "prompt "),
        (b"[" * 100_000, "data.line.unusable_json", ""),
        (["x"], "data.line.not_an_object", "a list"),
        ({"question": "x"}, "data.column.missing", "found question; "),
        ({"prompt": "x", "text": "y"}, "data.prompt.several", "prompt and text"),
        ({"prompt": 3}, "data.text.not_a_string", "prompt is a number"),
        ({"text": None}, "data.text.not_a_string", "text is null"),
        ({"prompt": [{"role": "user", "content": ""}]}, "data.prompt.empty", "prompt "),
        (
            {"conversations": [{"from": "function_call", "value": "x"}]},
            "data.message.unknown_role",
            "conversations[0].role is 'function_call'",
        ),
        ({"prompt": " \n"}, "data.prompt.empty", "prompt "),
        ({"messages": []}, "data.messages.empty", "messages "),
        ({"messages": "x"}, "data.messages.not_a_list", "messages is a string"),
        ({"messages": ["x"]}, "data.message.not_an_object", "messages[0] is a string"),
        (line_with("x", "human"), "data.message.unknown_role", "messages[0].role is 'human'"),
        (line_with([]), "data.content.empty", "messages[0].content "),
        (line_with(None), "data.text.not_a_string", "messages[0].content is null"),
        (line_with(None, "assistant"), "data.text.not_a_string", "messages[0].content is null"),
        (
            line_with([{"type": "image_url", "image_url": {}}]),
            "data.content.part_not_text",
            "messages[0].content[0] is a part of type 'image_url'",
        ),
        (line_with(["x"]), "data.content.part_not_an_object", "messages[0].content[0] is a string"),
        (
            line_with(None, "assistant", tool_calls={"name": "f"}),
            "data.tool_calls.not_a_list",
            "messages[0].tool_calls is an object",
        ),
        (
            line_with(None, "assistant", tool_calls=[{"type": "function"}]),
            "data.tool_calls.no_function",
            "messages[0].tool_calls[0] ",
        ),
        (
            line_calling("x"),
            "data.tool_calls.arguments_not_json",
            "messages[0].tool_calls[0] has the arguments 'x'",
        ),
        (
            line_calling("[1]"),
            "data.tool_calls.arguments_not_an_object",
            "messages[0].tool_calls[0] has arguments that are a list",
        ),
        (
            line_calling([]),
            "data.tool_calls.arguments_not_an_object",
            "messages[0].tool_calls[0] has arguments that are a list",
        ),
        (
            line_calling('"x"'),
            "data.tool_calls.arguments_not_an_object",
            "messages[0].tool_calls[0] has arguments that are a string",
        ),
        ({**line_with("x"), "tools": ["f"]}, "data.value.not_json", "tools[0] is 'f'"),
        (
            {**line_with("x"), "chat_template_kwargs": True},
            "data.template_arguments.not_an_object",
            "chat_template_kwargs is a boolean",
        ),
        (line_with(" "), "data.prompt.empty", "messages "),
        (
            {"messages": [*line_with("x")["messages"], *line_with("y", "assistant")["messages"]]},
            "data.prompt.ends_with_an_answer",
            "messages ",
        ),
    ],
)
def test_a_bad_line_gives_file_line_and_reason(tokenizer, tmp_path, line, key, value):
    file = write(tmp_path / "bad.jsonl", {"prompt": "fine"}, b"", line)
    with raises_error(key, f"{file}:3: ", value) as caught:
        load(tokenizer, file)
    assert isinstance(caught.value, DataError)


def test_all_bad_lines_are_counted_and_ten_listed(tokenizer, tmp_path):
    rows = [{"prompt": ""}] * 7 + [{"prompt": "fine"}] + [{"prompt": "x" * 200}] * 6
    file = write(tmp_path / "a.jsonl", *rows)
    with pytest.raises(DataError) as caught:
        load(tokenizer, file)
    check_error(caught.value, "data.prompt.empty")
    text = str(caught.value)
    assert text.startswith("13 lines of the data cannot be used:")
    assert text.count(f"{file}:") == 10
    assert "and 3 more" in text


def test_messages_without_or_refused_by_a_template(tmp_path):
    file = write(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "x"}]})
    without = load_tokenizer(write_tiny_tokenizer(tmp_path / "t", chat_template=None))
    with raises_error("chat_template.template.missing", tmp_path / "t") as caught:
        load(without, file)
    assert isinstance(caught.value, ConfigError)
    strict = load_tokenizer(
        write_tiny_tokenizer(tmp_path / "s", chat_template="{{ raise_exception('roles!') }}")
    )
    with raises_error("chat_template.messages.refused", "a.jsonl:1: ", "roles!"):
        load(strict, file)


def test_no_prompt_is_an_error(tokenizer, tmp_path):
    with raises_error("data.prompts.all_blank", "a.jsonl"):
        load(tokenizer, write(tmp_path / "a.jsonl", b"", b" "))
    file = write(tmp_path / "b.jsonl", {"prompt": "long"})
    with raises_error("data.prompts.none", "(1 over-long", "model.encoder_seq_length"):
        load(tokenizer, file, max_prompt_tokens=2, too_long="skip")


def test_byte_order_mark_and_unicode_line_separators(tokenizer, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "a\u2028b"}\r\n{"prompt": "c"}'.encode())
    texts = [p.text for p in load(tokenizer, file)]
    assert texts == ["a\u2028b", "c"]


def test_fingerprint_depends_on_texts_and_their_order(tokenizer, tmp_path):
    def fingerprint(*texts: str) -> str:
        return load(
            tokenizer, write(tmp_path / "f.jsonl", *({"prompt": text} for text in texts))
        ).fingerprint

    assert fingerprint("a", "b") == fingerprint("a", "b")
    texts = [("a", "b"), ("b", "a"), ("ab",), ("a", "b", "b"), ("a",)]
    assert len({fingerprint(*each) for each in texts}) == 5


def test_build_data_sets_from_omegaconf(tokenizer, tmp_path):
    first = str(write(tmp_path / "1.jsonl", {"prompt": "one"}))
    second = str(write(tmp_path / "2.jsonl", {"prompt": "two"}))
    prefix = OmegaConf.create({"train": [first, second], "validation": second, "test": None})
    datasets = build_train_valid_test_rlhf_datasets(tokenizer, prefix, max_prompt_tokens=10)
    texts = [p.text for p in datasets.train]
    assert texts == ["one", "two"]
    assert datasets.validation is not None
    assert [p.text for p in datasets.validation] == ["two"]
    assert datasets.test is None


def test_all_faults_of_data_prefix_in_one_message(tokenizer, tmp_path):
    good = write(tmp_path / "good.jsonl", {"prompt": "x"})
    prefix = {"train": [good, tmp_path / "a"], "validation": {"a b": "/dev/null"}, "test": ""}
    with pytest.raises(ConfigError) as caught:
        build_train_valid_test_rlhf_datasets(tokenizer, prefix, max_prompt_tokens=10)
    faults = caught.value.faults
    assert len(faults) == 4
    option = "model.data.data_prefix"
    check_fault(faults, "data.file.missing", f"{option}.train: {tmp_path / 'a'} ")
    check_fault(faults, "data.file.not_regular", f"{option}.validation: /dev/null ")
    check_fault(faults, "data.path.empty", f"{option}.test: ''")
    check_fault(faults, "data.validation.invalid_name", f"{option}.validation ", "'a b'")
    for empty in ({}, {"train": None}, {"train": []}):
        with raises_error("data.train.missing", f"{option}.train"):
            build_train_valid_test_rlhf_datasets(tokenizer, empty, max_prompt_tokens=10)


def test_the_demo_prompts_are_distinct_short_and_disjoint():
    texts = {}
    for split in ("train", "validation"):
        text = (DEMO / f"prompts_{split}.jsonl").read_text("utf-8")
        rows = [json.loads(line) for line in text.splitlines()]
        for row in rows:
            assert row["keyword"] in row["prompt"]
            for key in row["keys"]:
                assert f'"{key}"' in row["prompt"]
        prompts = [row["prompt"] for row in rows]
        texts[split] = prompts
    assert len(texts["train"]) >= 320
    assert len(texts["validation"]) >= 96
    everything = []
    for text in texts["train"] + texts["validation"]:
        words = text.casefold().split()
        assert len(words) <= 40
        everything.append(" ".join(words))
    assert len(set(everything)) == len(everything)


def test_weights_before_paths_make_a_blend(tokenizer, tmp_path):
    first = str(
        write(
            tmp_path / "1.jsonl", {"prompt": "one"}, {"prompt": "far too long"}, {"prompt": "uno"}
        )
    )
    second = str(write(tmp_path / "2.jsonl", {"prompt": "two"}))
    prefix = OmegaConf.create({"train": [3, first, 1.0, second], "validation": [first, second]})
    datasets = build_train_valid_test_rlhf_datasets(
        tokenizer, prefix, max_prompt_tokens=4, too_long="skip"
    )
    texts = [p.text for p in datasets.train]
    assert texts == ["one", "uno", "two"]
    expected = Blend((2, 1), (3.0, 1.0))
    assert datasets.train.blend == expected, "skipped prompts are not of it"
    assert datasets.validation is not None
    assert datasets.validation.blend is None
    plain = build_train_valid_test_rlhf_datasets(
        tokenizer, {"train": [first, second]}, max_prompt_tokens=20
    )
    assert plain.train.blend is None


@pytest.mark.parametrize(
    ("entries", "key", "value"),
    [
        ([0.5, "A", "B"], "data.weights.not_before_each_path", "[0.5, "),
        (["A", 0.5, "B", 0.5], "data.weights.not_before_each_path", "A', 0.5, "),
        ([0.5, 0.5, "A", "B"], "data.weights.not_before_each_path", "[0.5, 0.5, "),
        ([0.5, "A", 0.5], "data.weights.not_before_each_path", "A', 0.5]"),
        ([0.5, "A", -1, "B"], "data.weights.not_above_zero", "weight -1;"),
        ([0, "A", 1, "B"], "data.weights.not_above_zero", "weight 0;"),
        ([0.5, "A", math.nan, "B"], "data.weights.not_above_zero", "weight nan;"),
        ([0.5, "A", 0.5, "A"], "data.weights.file_twice", "/A "),
    ],
)
def test_weights_that_are_not_before_each_path(tmp_path, entries, key, value):
    names = {name: str(write(tmp_path / name, {"prompt": name})) for name in "AB"}
    with raises_error(key, "model.data.data_prefix.train", value) as caught:
        data_prefix = {"train": [names.get(entry, entry) for entry in entries]}
        resolve_data_prefix(data_prefix)
    assert isinstance(caught.value, ConfigError)
    assert len(caught.value.faults) == 1


def dataset_of(count: int, word: str = "prompt") -> PromptDataset:
    prompts = [Prompt(i, f"{word} {i}", (i + 4,)) for i in range(count)]
    return PromptDataset(prompts)


def loader_of(
    dataset: PromptDataset, rank: int = 0, size: int = 1, *, epochs: int | None = 2
) -> PromptLoader:
    sampler = PromptSampler(len(dataset), 3, seed=5, max_epochs=epochs)
    return PromptLoader(dataset, sampler, rank, size)


def ids(batches: list[list[Prompt]]) -> list[list[int]]:
    return [[prompt.id for prompt in batch] for batch in batches]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_shares_of_all_ranks_join_to_the_global_batches(size):
    dataset = dataset_of(10)
    whole = ids(list(loader_of(dataset)))
    shares = [ids(list(loader_of(dataset, rank, size))) for rank in range(size)]
    assert [list(chain(*parts)) for parts in zip(*shares, strict=True)] == whole
    for epoch in (whole[:4], whole[4:]):
        assert sorted(chain(*epoch)) == list(range(10))
    assert len(loader_of(dataset)) == 4


@pytest.mark.parametrize("step", range(8))
def test_a_resumed_loader_equals_the_uninterrupted_one(step):
    dataset = dataset_of(10)
    loader = loader_of(dataset)
    for _ in range(step):
        next(loader)
    resumed = loader_of(dataset)
    resumed.load_state_dict(loader.state_dict())
    uninterrupted = ids(list(loader_of(dataset)))
    assert ids(list(resumed)) == ids(list(loader)) == uninterrupted[step:]


def test_a_resume_may_change_the_number_of_ranks():
    dataset = dataset_of(10)
    loader = loader_of(dataset, 1, 2)
    next(loader)
    resumed = loader_of(dataset)
    resumed.load_state_dict(loader.state_dict())
    assert ids(list(resumed)) == ids(list(loader_of(dataset)))[1:]


def test_a_resume_on_other_data_is_refused():
    state = loader_of(dataset_of(10)).state_dict()
    others = dataset_of(10, "question")
    fingerprints = (state["fingerprint"][:12], others.fingerprint[:12])
    with raises_error("checkpoint.data.other_prompts", *fingerprints):
        loader_of(others).load_state_dict(state)
    with raises_error("checkpoint.sampler.other_run", "num_prompts was 10", 9):
        loader_of(dataset_of(9)).load_state_dict(state)


def test_collate_fn_makes_the_batch():
    dataset = dataset_of(4)
    loader = PromptLoader(dataset, PromptSampler(4, 3, seed=0), collate_fn=len)
    assert [next(loader), next(loader), next(loader)] == [3, 1, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_fixed_prompts_are_the_first_in_order_in_every_pass(size):
    loaders = [fixed_prompts(dataset_of(10), 7, rank, size) for rank in range(size)]
    for _ in range(2):
        shares = [ids(list(loader)) for loader in loaders]
        assert {len(share) for share in shares} == {1}  # no rank waits in a collective for another
        assert list(chain(*(share[0] for share in shares))) == list(range(7))
    assert ids(list(fixed_prompts(dataset_of(4)))) == [[0, 1, 2, 3]]
    values = ("model.reinforce.num_val_samples is 11", "10 prompts")
    with raises_error("data.validation.too_few_prompts", *values):
        fixed_prompts(dataset_of(10), 11)
