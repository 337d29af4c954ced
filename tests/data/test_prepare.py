"""Prompt files from pairs and conversations."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.chat_templates import write_chat_tokenizer
from helpers.errors import printed_keys, raises_error
from helpers.tiny_tokenizer import write_tiny_tokenizer
from typer.testing import CliRunner, Result

from reinforce_rl.data import jsonl
from reinforce_rl.data.jsonl import parse_hh_conversation, render_hh_prompt
from reinforce_rl.data.prepare import PrepareOptions, prepare_prompts
from reinforce_rl.data.prompts import PromptDataset
from reinforce_rl.data.readers import Columns
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.launch.main import app
from reinforce_rl.utils.files import write_atomically

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def rows_of(*paths: Path) -> list[dict]:
    rows = []
    for path in paths:
        with path.open(encoding="utf-8") as lines:  # `splitlines` would also split at U+2028
            rows += [json.loads(line) for line in lines]
    return rows


def targets_of(folder: Path) -> list[Path]:
    return [folder / "train.jsonl", folder / "validation.jsonl"]


def prepare(*words: object) -> Result:
    return CliRunner().invoke(app, ["prepare", *map(str, words)])


def hh(text: str) -> str:
    return f"\n\nHuman: {text}\n\nAssistant:"


def test_null_is_not_a_prompt_and_messages_may_be_json(tmp_path):
    whole = [user("a"), assistant("b")]
    empty = {"prompt": None, "text": None, "messages": None, "conversations": None, "chosen": None}
    file = write(
        tmp_path / "a.jsonl",
        {**empty, "prompt": "one"},
        {**empty, "messages": json.dumps([user("two"), assistant("x")])},
        {**empty, "conversations": [{"from": "human", "value": "three"}], "system": "be kind"},
        {**empty, "chosen": json.dumps(whole), "rejected": json.dumps([user("a"), assistant("c")])},
    )
    prepare_prompts([file], tmp_path, PrepareOptions(num_validation=1))
    rows = rows_of(tmp_path / "train.jsonl") + rows_of(tmp_path / "validation.jsonl")
    expected = [[user("one")], [user("two")], [user("a")]]
    expected.append([{"role": "system", "content": "be kind"}, user("three")])
    assert sorted(rows, key=str) == sorted(
        ({"messages": messages} for messages in expected), key=str
    )
    write(file, empty)
    with raises_error("data.prompt.null", "a.jsonl:1: ", "prompt and text and messages"):
        prepare_prompts([file], tmp_path, PrepareOptions())
    write(file, {"prompt": json.dumps(whole)})
    options = ("--field messages=prompt", "--field text=prompt")
    with raises_error("data.text.holds_messages", *options):
        prepare_prompts([file], tmp_path, PrepareOptions())
    texts = [json.dumps([user(text)]) for text in ("one", "two")]
    write(file, *({"prompt": text} for text in texts))
    for name, expected in (("messages", "one"), ("text", texts[0])):
        prepare_prompts(
            [file],
            tmp_path / name,
            PrepareOptions(num_validation=1),
            Columns({name: "prompt"}, "--field "),
        )
        train_file = tmp_path / name / "train.jsonl"
        validation_file = tmp_path / name / "validation.jsonl"
        rows = rows_of(train_file) + rows_of(validation_file)
        assert {"messages": [user(expected)]} in rows


def test_parse_hh_conversation():
    text = (
        "\n\nHuman: Hi.\n\nTell me:\nAssistant: is that a marker?\n\nAssistant: No \n\n"
        "Human: ok\n\nAssistant:"
    )
    messages = [user("Hi.\n\nTell me:\nAssistant: is that a marker?"), assistant("No"), user("ok")]
    assert parse_hh_conversation(text) == messages
    assert parse_hh_conversation(render_hh_prompt(messages)) == messages
    assert parse_hh_conversation("Human: a\n\nAssistant: b") == [user("a"), assistant("b")]
    assert parse_hh_conversation("\n\nHuman:\n\nHuman: a") == [user(""), user("a")]
    for bad in ("", "hello", "hello\n\nHuman: a"):
        with raises_error("data.conversation.no_speaker", repr(bad)):
            parse_hh_conversation(bad)


def test_every_accepted_form_gives_the_prompt_alone(tmp_path):
    file = write(
        tmp_path / "in.jsonl",
        {"prompt": hh("one"), "chosen": "a", "rejected": "b"},
        {"chosen": hh("two") + " a", "rejected": hh("two") + " b"},
        {"messages": [user("three"), assistant("a")]},
        {"messages": [user("four")]},
        {"chosen": [user("five"), assistant("a")], "rejected": [user("five"), assistant("b")]},
        {"prompt": hh("six\n\nAssistant: a\n\nHuman: b")},
    )
    counts = prepare_prompts([file], tmp_path / "out", PrepareOptions(num_validation=1))
    train_file = tmp_path / "out" / "train.jsonl"
    validation_file = tmp_path / "out" / "validation.jsonl"
    rows = rows_of(train_file) + rows_of(validation_file)
    expected = [[user(word)] for word in ("one", "two", "three", "four", "five")]
    expected.append([user("six"), assistant("a"), user("b")])
    assert sorted(map(str, (row["messages"] for row in rows))) == sorted(map(str, expected))
    assert counts.read == 6
    assert counts.train == 5
    assert counts.validation == 1
    assert counts.skipped == {}


def test_a_plain_prompt_is_a_user_message_and_other_fields_stay(tmp_path):
    file = write(
        tmp_path / "in.jsonl",
        {"prompt": " What is 6 x 7? ", "answer": 42, "solution": {"steps": ["6 x 7"]}},
        {"text": "Human: is no marker inside.\n\nHuman: a line of HH"},
        {"prompt": "Say\n\nHuman: hi", "kwargs": [None], "chosen": "a", "rejected": "b"},
        {"prompt": [user("as messages")], "answer": None},
    )
    rows = {}
    for form in ("messages", "prompt"):
        prepare_prompts(
            [file], tmp_path / form, PrepareOptions(form=form, num_validation=1, seed=3)
        )
        train_file = tmp_path / form / "train.jsonl"
        validation_file = tmp_path / form / "validation.jsonl"
        written = rows_of(train_file) + rows_of(validation_file)
        rows[form] = sorted(written, key=lambda row: str(row.get("answer", "?")))
    expected = [
        {"messages": [user("What is 6 x 7?")], "answer": 42, "solution": {"steps": ["6 x 7"]}},
        {"messages": [user("Say\n\nHuman: hi")], "kwargs": [None]},
        {"messages": [user("as messages")], "answer": None},
    ]
    assert rows["messages"] == expected
    expected = {
        "prompt": hh("What is 6 x 7?"),
        "answer": 42,
        "solution": {"steps": ["6 x 7"]},
    }
    assert rows["prompt"][0] == expected
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path / "tokenizer"))
    dataset = PromptDataset.from_files(
        tokenizer, tmp_path / "messages" / "train.jsonl", max_prompt_tokens=None
    )
    assert {"answer": 42, "solution": {"steps": ["6 x 7"]}} in [
        prompt.metadata for prompt in dataset
    ]


def test_what_is_skipped_is_counted_by_reason(tmp_path):
    file = write(
        tmp_path / "in.jsonl",
        {"prompt": hh("one")},
        {"prompt": hh("  ONE ")},
        {"chosen": hh("x") + " a", "rejected": hh("y") + " b"},
        {"prompt": "\n\nHuman: a\n\nHuman: b\n\nAssistant:"},
        {"prompt": "\n\nHuman: a\n\nAssistant:\n\nHuman: b\n\nAssistant:"},
        {"prompt": hh("a") + " answered"},
        {"prompt": hh("a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d\n\nHuman: e")},
        {"prompt": hh("x" * 101)},
        *({"prompt": hh(f"number {i}")} for i in range(9)),
    )
    options = PrepareOptions(num_validation=2, max_turns=2, max_characters=100, limit=8)
    counts = prepare_prompts([file], tmp_path / "out", options)
    expected = [1, 1, 1, 1, 1, 1, 1, 2]
    assert sorted(counts.skipped.values()) == expected
    assert counts.skipped["over --limit"] == 2
    assert counts.skipped["duplicate of an earlier prompt"] == 1
    assert counts.read == 17
    assert counts.train == 6
    assert counts.validation == 2
    expected = counts.train + counts.validation + sum(counts.skipped.values())
    assert counts.read == expected
    assert "skipped 1: more than --max-turns user turns" in str(counts)


SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
}
TOOL = {"role": "tool", "content": "2", "name": "f"}
OF_ROLES = {
    "a system turn": [SYSTEM, user("a")],
    "a developer's turn": [{"role": "developer", "content": "Be brief."}, user("a")],
    "two users": [user("a"), user("b")],
    "a system turn at the end": [user("a"), {"role": "system", "content": "Answer now."}],
    "an empty system turn": [{"role": "system", "content": ""}, user("a")],
    "a tool's answer": [SYSTEM, user("a"), CALL, TOOL],
    "several turns": [SYSTEM, user("a"), assistant("b"), user("c")],
}


@pytest.mark.parametrize("messages", OF_ROLES.values(), ids=OF_ROLES)
def test_what_comes_before_the_last_answer_is_kept_and_train_reads_it(tmp_path, messages):
    """Rows with an answer and without one.

    `train` reads the output of `prepare`, and rejects the answer.
    """
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path / "tokenizer"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}\n{% endfor %}"
    )
    answered = write(
        tmp_path / "in.jsonl",
        {"messages": [*messages, assistant("z")]},
        {"messages": [user("other")]},
    )
    values = ("in.jsonl:1: messages ", "reinforce-rl prepare")
    with raises_error("data.prompt.ends_with_an_answer", *values):
        PromptDataset.from_files(tokenizer, answered, max_prompt_tokens=None)
    bare = write(tmp_path / "bare.jsonl", {"messages": messages}, {"messages": [user("other")]})
    for file in (answered, bare):
        counts = prepare_prompts([file], tmp_path / "out", PrepareOptions(num_validation=1))
        assert counts.skipped == {}
        targets = targets_of(tmp_path / "out")
        assert {"messages": messages} in rows_of(*targets)
        prompts = PromptDataset.from_files(tokenizer, targets, max_prompt_tokens=None)
        expected = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert expected in list(prompts.texts)


def text_parts(*texts: str) -> list[dict]:
    return [{"type": "text", "text": text} for text in texts]


NULL_CALL = {**CALL, "content": None}
OPENAI = {
    "null beside calls": [user("a"), NULL_CALL, TOOL],
    "no content beside calls": [
        user("a"),
        {"role": "assistant", "tool_calls": CALL["tool_calls"]},
        TOOL,
    ],
    "parts": [
        {"role": "system", "content": text_parts("Be brief.")},
        {"role": "user", "content": text_parts("a", "b")},
    ],
    "a tool that returns nothing": [user("a"), NULL_CALL, {**TOOL, "content": ""}],
    "parts of a tool": [user("a"), NULL_CALL, {**TOOL, "content": text_parts("2")}],
}


@pytest.mark.parametrize("messages", OPENAI.values(), ids=OPENAI)
def test_openais_forms_are_kept_as_they_are_and_train_reads_them(tmp_path, messages):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }} {{ m.tool_calls }}\n{% endfor %}"
    )
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", template)
    lines = [{"messages": [*messages, assistant("z")], "tools": []}, {"messages": [user("other")]}]
    inputs = [write(tmp_path / "in.jsonl", *lines)]
    counts = prepare_prompts(inputs, tmp_path / "out", PrepareOptions())
    assert counts.skipped == {}
    targets = targets_of(tmp_path / "out")
    assert {"messages": messages, "tools": []} in rows_of(*targets)
    read = PromptDataset.from_files(tokenizer, targets, max_prompt_tokens=None)
    given = write(tmp_path / "given.jsonl", {"messages": messages, "tools": []})
    (expected,) = PromptDataset.from_files(tokenizer, given, max_prompt_tokens=None)
    assert expected.text in [prompt.text for prompt in read]


def test_what_is_said_in_parts_is_counted_and_written_as_text(tmp_path):
    asked = {"role": "user", "content": text_parts("one", "two")}
    lines = [
        {"messages": [asked, assistant("z")]},
        {"messages": [user("one\ntwo")]},
        {"messages": [user("b" * 8)]},
        {"messages": [{"role": "user", "content": text_parts(" ")}]},
        {"messages": [user("cc")]},
    ]
    options = PrepareOptions(form="prompt", max_characters=7, num_validation=1)
    inputs = [write(tmp_path / "in.jsonl", *lines)]
    counts = prepare_prompts(inputs, tmp_path / "out", options)
    assert counts.skipped == {
        "duplicate of an earlier prompt": 1,
        "more than --max-characters characters": 1,
        "a turn is empty": 1,
    }
    rows = rows_of(*targets_of(tmp_path / "out"))
    expected = [hh("cc"), hh("one\ntwo")]
    prompts = sorted(row["prompt"] for row in rows)
    assert prompts == expected


def test_parts_of_another_type_are_named(tmp_path):
    image = {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
    file = write(tmp_path / "in.jsonl", {"messages": [image]})
    values = ("in.jsonl:1: messages[0].content[0] ", "'image_url'")
    with raises_error("data.content.part_not_text", *values):
        prepare_prompts([file], tmp_path / "out", PrepareOptions())


def test_calls_make_prompts_different(tmp_path):
    other = {
        **CALL,
        "tool_calls": [{"type": "function", "function": {"name": "g", "arguments": {}}}],
    }
    rows = [{"messages": [user("a"), call, TOOL, assistant("z")]} for call in (CALL, other, CALL)]
    inputs = [write(tmp_path / "in.jsonl", *rows)]
    counts = prepare_prompts(inputs, tmp_path / "out", PrepareOptions())
    assert counts.skipped == {"duplicate of an earlier prompt": 1}


def test_calls_without_content_and_texts_in_parts_are_kept_as_train_reads_them(tmp_path):
    call = {**CALL, "content": None}
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    asked = {"role": "user", "content": parts}
    rows = [
        {"messages": [user("a"), call, TOOL, assistant("z")]},
        {"messages": [asked, assistant("z")]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": " "}]}]},
    ]
    file = write(tmp_path / "in.jsonl", *rows)
    counts = prepare_prompts([file], tmp_path / "out", PrepareOptions(num_validation=1))
    assert counts.skipped == {"a turn is empty": 1}
    written = [row["messages"] for row in rows_of(*targets_of(tmp_path / "out"))]
    assert [user("a"), call, TOOL] in written
    assert [asked] in written
    file = write(tmp_path / "hh.jsonl", {"messages": [asked]}, {"messages": [user("b")]})
    prepare_prompts([file], tmp_path / "hh", PrepareOptions(form="prompt", num_validation=1))
    prompts = [row["prompt"] for row in rows_of(*targets_of(tmp_path / "hh"))]
    assert "\n\nHuman: one \ntwo\n\nAssistant:" in prompts
    for content, key, value in (
        (3, "data.text.not_a_string", "content is a number"),
        ([{"type": "image"}], "data.content.part_not_text", "'image'"),
    ):
        bad = write(tmp_path / "bad.jsonl", {"messages": [{"role": "user", "content": content}]})
        with raises_error(key, value):
            prepare_prompts([bad], tmp_path / "out", PrepareOptions())


def test_tools_and_template_arguments_make_prompts_different(tmp_path):
    columns = [
        {},
        {"tools": [{"name": "f"}]},
        {"tools": [{"name": "g"}]},
        {"tools": [{"name": "g"}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ]
    file = write(
        tmp_path / "in.jsonl", *({"messages": [user("a")], **column} for column in columns)
    )
    counts = prepare_prompts([file], tmp_path / "out", PrepareOptions())
    assert counts.skipped == {"duplicate of an earlier prompt": 1}


def test_unknown_roles_and_misplaced_turns(tmp_path):
    bad = write(
        tmp_path / "bad.jsonl", {"messages": [{"role": "critic", "content": "x"}, user("a")]}
    )
    values = ("role is 'critic'", "system, developer, user, assistant, tool")
    with raises_error("data.message.unknown_role", *values):
        prepare_prompts([bad], tmp_path / "out", PrepareOptions())
    rows = [{"messages": messages} for messages in OF_ROLES.values()]
    file = write(
        tmp_path / "in.jsonl", *rows, {"messages": [user("x")]}, {"messages": [assistant("x")]}
    )
    counts = prepare_prompts([file], tmp_path / "out", PrepareOptions(form="prompt"))
    assert counts.skipped == {
        "turns other than Human and Assistant, which --format messages keeps": 6,
        "nothing to answer at the end": 1,
    }


def test_a_system_column_by_its_name(tmp_path):
    rows = [{"prompt": text, "rules": "Be brief."} for text in "ab"]
    columns = Columns({"system": "rules"}, "--field ")
    inputs = [write(tmp_path / "in.jsonl", *rows)]
    prepare_prompts(inputs, tmp_path / "out", PrepareOptions(), columns)
    train_file = tmp_path / "out" / "train.jsonl"
    assert rows_of(train_file)[0]["messages"][0] == SYSTEM


def test_a_folder_of_several_splits_needs_a_choice(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "test"):
        rows = [{"prompt": f"{name} {i}"} for i in range(3)]
        write(folder / f"{name}.jsonl", *rows)
    with raises_error("data.split.several", f"{folder} ", "test, train;", f"{folder}:test"):
        prepare_prompts([folder], tmp_path / "out", PrepareOptions())
    assert prepare_prompts([f"{folder}:test"], tmp_path / "out", PrepareOptions()).read == 3


def test_the_split_is_by_prompt_and_by_seed(tmp_path):
    # Every prompt occurs twice, so splitting by line would put some into both files.
    rows = [{"prompt": hh(f"number {i % 40}")} for i in range(80)]
    file = write(tmp_path / "in.jsonl", *rows)

    def split(name: str, seed: int) -> tuple[list[str], list[str]]:
        prepare_prompts(
            [file],
            tmp_path / name,
            PrepareOptions(form="prompt", validation_fraction=0.25, seed=seed),
        )
        train, validation = map(rows_of, targets_of(tmp_path / name))
        prompts = [row["prompt"] for row in train]
        return prompts, [row["prompt"] for row in validation]

    train, validation = split("a", 1)
    assert len(train) == 30
    assert len(validation) == 10
    assert not set(train) & set(validation)
    expected = {hh(f"number {i}") for i in range(40)}
    assert set(train) | set(validation) == expected
    assert split("b", 1) == (train, validation)
    assert split("c", 2)[1] != validation


def test_bad_lines_are_reported_and_nothing_is_written(tmp_path):
    bad: tuple[tuple[object, str, str], ...] = (
        (b"{", "data.line.not_json", "column"),
        (
            {"chosen": "no marker", "rejected": "no marker"},
            "data.conversation.no_speaker",
            "chosen: found 'no marker'",
        ),
        ({"question": "x"}, "data.column.missing", "found question;"),
        ({"prompt": 3}, "data.messages.not_a_list", "prompt is a number"),
        ({"messages": [{"role": "user"}]}, "data.text.not_a_string", "messages[0].content is null"),
        ({"messages": [user("\ud800")]}, "data.text.half_a_character", "'\\ud800'"),
    )
    rows = [row for row, _, _ in bad]
    file = write(tmp_path / "in.jsonl", {"prompt": hh("fine")}, *rows)
    with raises_error("data.line.not_json") as caught:
        prepare_prompts([file], tmp_path / "out", PrepareOptions())
    lines = str(caught.value).splitlines()
    for number, (row, key, value) in enumerate(bad, 2):
        place = f"{file}:{number}: "
        assert any(place in line and value in line for line in lines), (number, lines)
        single = write(tmp_path / "single.jsonl", {"prompt": hh("fine")}, row)
        with raises_error(key, f"{single}:2: ", value):
            prepare_prompts([single], tmp_path / "out", PrepareOptions())
    assert not (tmp_path / "out").exists()


def test_wrong_options_and_files(tmp_path):
    for option in ("--num-validation=0", "--max-turns=0", "--limit=1"):
        done = prepare("x", f"--output={tmp_path}", option)
        assert done.exit_code == 2
        assert f"Invalid value for '{option.partition('=')[0]}'" in done.output
    for share in ("0", "1", "nan"):
        done = prepare("x", f"--output={tmp_path}", f"--validation-fraction={share}")
        assert done.exit_code == 2
        assert "expected above 0 and below 1" in done.output
    with raises_error("data.file.missing", tmp_path / "none.jsonl"):
        prepare_prompts([tmp_path / "none.jsonl"], tmp_path, PrepareOptions())
    file = write(tmp_path / "q.jsonl", {"q": "one", "a": 1})
    with raises_error("data.column.missing", "found q, a;", "--field prompt=COLUMN"):
        prepare_prompts([file], tmp_path / "out", PrepareOptions())
    file = write(tmp_path / "train.jsonl", {"prompt": hh("one")})
    with raises_error("prepare.output.is_an_input", file):
        prepare_prompts([file], tmp_path, PrepareOptions())
    with raises_error("prepare.prompts.too_few", "1 prompts ", "--num-validation"):
        prepare_prompts([file], tmp_path / "out", PrepareOptions())


def test_a_file_that_cannot_be_written_leaves_both_as_they_were(tmp_path, monkeypatch):
    """Otherwise training prompts would be stored beside validation prompts of an earlier split."""
    file = write(tmp_path / "in.jsonl", *({"prompt": f"question {i}"} for i in range(8)))
    out = tmp_path / "out"
    prepare_prompts([file], out, PrepareOptions(seed=0))
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(path: Path, text: str) -> None:
        if "validation" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(path, text)

    monkeypatch.setattr(jsonl, "write_atomically", full)
    values = (out / "validation.jsonl", "No space left on device", " GB ")
    with raises_error("data.file.not_written", *values):
        prepare_prompts([file], out, PrepareOptions(seed=1))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_the_command_takes_csv_and_names_of_columns(tmp_path):
    (tmp_path / "in.csv").write_text("question,solution\nhi,007\nho,8\n")
    fields = ["--field=prompt=question", "--field=answer=solution", f"--output={tmp_path / 'out'}"]
    assert prepare(tmp_path / "in.csv", *fields).exit_code == 0
    train_file = tmp_path / "out" / "train.jsonl"
    validation_file = tmp_path / "out" / "validation.jsonl"
    rows = rows_of(train_file) + rows_of(validation_file)
    expected = [
        {"messages": [user("hi")], "answer": "007"},
        {"messages": [user("ho")], "answer": "8"},
    ]
    assert sorted(rows, key=str) == expected
    done = prepare(tmp_path / "in.csv", *fields, "--field=prompt")
    assert done.exit_code == 2
    assert "expected NAME=COLUMN" in done.output


def test_gsm8k_keeps_every_prompt_with_its_answer(tmp_path):
    source = SHARED / "gsm8k_train.jsonl"
    if not source.is_file():
        pytest.skip(f"{source} is not there")
    counts = prepare_prompts([source], tmp_path, PrepareOptions(num_validation=64))
    assert counts.read == 7473
    assert counts.train + counts.validation == 7473
    answers = {row["prompt"].strip(): row["answer"] for row in rows_of(source)}
    for row in rows_of(tmp_path / "train.jsonl") + rows_of(tmp_path / "validation.jsonl"):
        expected = answers[row["messages"][0]["content"]]
        assert row["answer"] == expected


@pytest.mark.parametrize("name", ["hh_harmless_prompts.jsonl", "hh_harmless_pairs.jsonl"])
def test_real_data_through_the_command_into_a_data_set(tmp_path, name):
    source = SHARED / name
    if not source.is_file():
        pytest.skip(f"{source} is not there")
    done = prepare(source, f"--output={tmp_path}", "--max-turns=1", "--num-validation=64")
    lines = sum(1 for line in source.open(encoding="utf-8") if line.strip())
    assert f"read {lines}, kept " in done.output
    train = rows_of(tmp_path / "train.jsonl")
    validation = rows_of(tmp_path / "validation.jsonl")
    assert len(validation) == 64
    assert len(train) > 500
    assert not {str(row) for row in train} & {str(row) for row in validation}
    assert not list(tmp_path.glob(".*.tmp"))
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path / "tokenizer"))
    dataset = PromptDataset.from_files(
        tokenizer, tmp_path / "validation.jsonl", max_prompt_tokens=None
    )
    assert len(dataset) == 64
    for prompt in dataset:
        assert prompt.text.startswith("U: ")
        assert prompt.text.endswith("<eos>A:")


def test_the_script_ends_with_the_error_alone(tmp_path):
    file = write(tmp_path / "in.jsonl", b"{")
    script = ROOT / "examples" / "prepare_prompts.py"
    command = [
        sys.executable,
        str(script),
        str(file),
        "--output",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert printed_keys(done.stderr) == ["data.line.not_json"]
    assert f"{file}:1: " in done.stderr
    assert "Traceback" not in done.stderr
