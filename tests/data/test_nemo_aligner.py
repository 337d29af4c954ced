"""NeMo-Aligner's data converted to messages: prompts, pairs and rated answers.

No format is mistaken for another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import printed_keys, raises_error
from helpers.tiny_tokenizer import write_tiny_tokenizer
from typer.testing import CliRunner, Result

from reinforce_rl.config.reward_model import FullConfig, PairsConfig, TrainRewardModelConfig
from reinforce_rl.data.nemo_aligner import STEERLM_ATTRIBUTES, parse_nemo_text
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.launch.main import app
from reinforce_rl.reward_model.data import read_examples

CASES = Path(__file__).parents[3] / "shared" / "cases" / "27-nemo-data"
QUESTION = "<extra_id_0>System\n\n<extra_id_1>User\n{}\n<extra_id_1>Assistant\n"
SYSTEM = {"role": "system", "content": "Be kind."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(*words: object) -> Result:
    return CliRunner().invoke(app, ["prepare", *map(str, words)])


def prepared(
    tmp_path: Path, form: str, *rows: object, words: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Convert rows and return the output rows in order."""
    file = write(tmp_path / "in.jsonl", *rows)
    done = prepare(file, f"--format={form}", f"--output={tmp_path / 'out'}", *words)
    assert done.exit_code == 0, (done.output, done.exception)
    names = (
        [f"{form}.jsonl"] if form in ("pairs", "ratings") else ["train.jsonl", "validation.jsonl"]
    )
    texts = [(tmp_path / "out" / name).read_text() for name in names]
    return [json.loads(line) for line in "".join(texts).splitlines()]


def refused(tmp_path: Path, form: str, *rows: object, words: tuple[str, ...] = ()) -> str:
    file = write(tmp_path / "in.jsonl", *rows)
    done = prepare(file, f"--format={form}", f"--output={tmp_path / 'out'}", *words)
    assert done.exit_code == 1, done.output
    assert "error: " in done.output, done.output
    assert not (tmp_path / "out").exists()
    return done.output


def check_output(output: str, key: str, *values: object) -> None:
    """Check that a command printed one error, with this key and each of the values."""
    assert printed_keys(output) == [key], output
    for value in values:
        assert str(value) in output, (value, output)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (QUESTION.format("Hi"), [user("Hi")]),
        (QUESTION.format("Hi") + "Yes.\n<extra_id_1>", [user("Hi"), assistant("Yes.")]),
        (QUESTION.format("Hi") + "Yes.\n<extra_id_2>", [user("Hi"), assistant("Yes.")]),
        (QUESTION.format("Hi") + "Yes.", [user("Hi"), assistant("Yes.")]),
        (
            "<extra_id_0>System\nBe kind.\n<extra_id_1>User\na\n\nb\n<extra_id_1>Assistant\n"
            "c <extra_id_1> d\n"
            "<extra_id_1>User\ne\n<extra_id_1>Assistant\n",
            [SYSTEM, user("a\n\nb"), assistant("c <extra_id_1> d"), user("e")],
        ),
    ],
)
def test_a_text_becomes_messages(text, messages):
    assert parse_nemo_text(text) == messages


def test_what_a_text_cannot_say_as_messages():
    with raises_error("data.nemo.labels", "<extra_id_2>quality:4"):
        parse_nemo_text(QUESTION.format("Hi") + "<extra_id_2>quality:4,humor:0\n")
    with raises_error("data.nemo.unknown_speaker", "'Bob'", "System, User, Assistant"):
        parse_nemo_text("<extra_id_0>System\n\n<extra_id_1>Bob\nHi\n")


def test_chat_becomes_prompts(tmp_path):
    row = {
        "system": "Be kind.",
        "mask": "User",
        "dataset": "x",
        "type": "TEXT_TO_VALUE",
        "conversations": [
            {"from": "User", "value": "One?", "label": None},
            {"from": "Assistant", "value": "1.", "label": "quality:4"},
        ],
    }
    turns = row["conversations"]
    longer = {
        **row,
        "system": "",
        "conversations": [*turns, {"from": "User", "value": "Two?"}, turns[1]],
    }
    named = {
        **row,
        "mask": "Ann",
        "conversations": [{"from": "Ann", "value": "Three?"}, {"from": "Model", "value": "3."}],
    }
    prompts = prepared(tmp_path, "messages", row, longer, named)
    extra = {"dataset": "x", "type": "TEXT_TO_VALUE"}
    expected = sorted(
        [
            {"messages": [SYSTEM, user("One?")], **extra},
            {"messages": [user("One?"), assistant("1."), user("Two?")], **extra},
            {"messages": [SYSTEM, user("Three?")], **extra},
        ],
        key=str,
    )
    assert sorted(prompts, key=str) == expected
    for change, key, *values in (
        ({"mask": "Bob"}, "data.nemo.unknown_mask", "mask is 'Bob'", "User, Assistant"),
        (
            {"conversations": [*turns, {"from": "Bob", "value": ""}]},
            "data.nemo.too_many_speakers",
            "User, Assistant, Bob",
        ),
        (
            {"conversations": "User: hi"},
            "data.nemo.turns_not_a_list",
            "conversations is a string",
        ),
        (
            {"conversations": [{"from": "User", "value": None}]},
            "data.text.not_a_string",
            "conversations[0].content is null",
        ),
    ):
        other = tmp_path / key
        other.mkdir()
        check_output(refused(other, "messages", {**row, **change}), key, *values)


def test_two_system_messages_are_no_choice_of_ours(tmp_path):
    turns = [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "x"},
    ]
    other = [turns[0], {"from": "human", "value": "Ho"}]
    prompts = prepared(
        tmp_path,
        "messages",
        {"system": "Be kind.", "conversations": turns},
        {"conversations": other},
    )
    expected = sorted(str({"messages": [SYSTEM, user(text)]}) for text in ("Hi", "Ho"))
    assert sorted(map(str, prompts)) == expected
    (tmp_path / "bad").mkdir()
    output = refused(tmp_path / "bad", "messages", {"system": "Be brief.", "conversations": turns})
    check_output(output, "data.system.two", "in.jsonl:1: ")


def test_a_text_of_prompts_or_comparisons_becomes_prompts(tmp_path):
    rows = [{"text": QUESTION.format("a")}, {"text": QUESTION.format("b") + "yes\n<extra_id_1>"}]
    rows.append({"text": QUESTION.format("b") + "no\n<extra_id_1>"})
    expected = [
        {"messages": [user("a")]},
        {"messages": [user("b")]},
    ]
    assert sorted(prepared(tmp_path, "messages", *rows), key=str) == expected


@pytest.mark.parametrize(
    "template",
    [QUESTION + "{}\n<extra_id_1>", "User: {}\nAssistant: {}", "\n\nHuman: {}\n\nAssistant: {}"],
    ids=["extra_id", "user guide", "HH"],
)
def test_comparisons_become_pairs(tmp_path, tokenizer, template):
    rows = [{"text": template.format(q, answer)} for q in ("a", "b") for answer in ("good", "bad")]
    pairs = prepared(tmp_path, "pairs", *rows)
    expected = [{"prompt": [user(q)], "chosen": "good", "rejected": "bad"} for q in ("a", "b")]
    assert pairs == expected
    data = PairsConfig(pairs_path=str(tmp_path / "out" / "pairs.jsonl"), max_length=100)
    used, skipped, count = read_examples(TrainRewardModelConfig(data=data), tokenizer)
    assert len(used) == 2
    assert skipped == {}
    assert count == 2


def test_comparisons_that_do_not_take_turns(tmp_path):
    texts = [
        QUESTION.format(q) + f"{answer}\n<extra_id_1>"
        for q, answer in (("a", "x"), ("a", "y"), ("b", "x"))
    ]
    rows = [{"text": text} for text in texts]
    output = refused(tmp_path, "pairs", *rows)
    check_output(output, "data.pairs.odd_number", "in.jsonl:3: ", "3 lines,")
    output = refused(tmp_path, "pairs", rows[0], rows[2], *rows)
    check_output(output, "data.pairs.different_prompts", "in.jsonl:1: ")
    output = refused(tmp_path, "pairs", {"text": QUESTION.format("a")}, rows[0])
    check_output(output, "data.text.no_answer_at_end", "in.jsonl:1: ")
    output = refused(tmp_path, "pairs", rows[0], {"text": "What is 2?"}, *rows[:2])
    # Lines after an invalid one are not renumbered.
    check_output(output, "data.conversation.no_speaker", "1 line of the data", "in.jsonl:2: ")
    output = refused(tmp_path, "pairs", {"text": "What is 2?"})
    check_output(output, "data.conversation.no_speaker", "text begins with 'What is 2?'")
    output = refused(tmp_path, "pairs", {"question": "x"})
    check_output(output, "data.column.missing", "found question;", "chosen_response")


def test_an_answer_without_a_prompt_is_refused(tmp_path):
    text = "<extra_id_0>System\n\n<extra_id_1>Assistant\nHello.\n<extra_id_1>"
    output = refused(tmp_path, "pairs", {"text": text}, {"text": text})
    check_output(output, "data.text.no_prompt", "in.jsonl:1: ")
    row = {"text": text, "label": [1]}
    output = refused(tmp_path, "ratings", row, words=("--attributes=a",))
    check_output(output, "data.text.no_prompt", "in.jsonl:1: ")


@pytest.mark.parametrize("form", ["pairs", "ratings"])
def test_a_file_is_not_read_and_written_at_once(tmp_path, form):
    file = write(tmp_path / f"{form}.jsonl", {"text": QUESTION.format("a") + "b", "label": [1]})
    before = file.read_text()
    done = prepare(file, f"--format={form}", f"--output={tmp_path}")
    assert done.exit_code == 1
    check_output(done.output, "prepare.output.is_an_input", file)
    assert file.read_text() == before


def test_each_file_of_comparisons_begins_with_a_chosen_one(tmp_path):
    rows = [{"text": QUESTION.format("a") + f"{answer}\n<extra_id_1>"} for answer in "xyz"]
    write(tmp_path / "1.jsonl", *rows)
    write(tmp_path / "2.jsonl", *rows)
    done = prepare(
        tmp_path / "1.jsonl", tmp_path / "2.jsonl", "--format=pairs", f"--output={tmp_path / 'out'}"
    )
    assert "1.jsonl:3" in done.output
    assert "2.jsonl:3" in done.output


def test_dpo_becomes_pairs(tmp_path):
    marked = {
        "prompt": QUESTION.format("a"),
        "chosen_response": "good\n<extra_id_1>",
        "rejected_response": "bad\n<extra_id_1>",
    }
    plain = {"prompt": "a", "chosen_response": "good", "rejected_response": "bad"}
    as_messages = {
        "prompt": [user("a")],
        "chosen_response": assistant("good"),
        "rejected_response": assistant("bad"),
    }
    pair = {"prompt": [user("a")], "chosen": "good", "rejected": "bad"}
    assert prepared(tmp_path, "pairs", marked, plain, as_messages) == [pair] * 3
    (tmp_path / "bad").mkdir()
    row = {**plain, "rejected_response": "\n<extra_id_1>"}
    output = refused(tmp_path / "bad", "pairs", row)
    check_output(output, "data.answer.empty", "rejected_response ")


def test_labels_become_ratings(tmp_path, tokenizer):
    row = {"text": QUESTION.format("a") + "good\n<extra_id_2>", "label": [3, 4.0, -100]}
    names = ("helpfulness", "verbosity", "humor")
    rated = prepared(tmp_path, "ratings", row, words=(f"--attributes={','.join(names)}",))
    ratings = {"helpfulness": 3, "verbosity": 4.0}
    expected = [{"prompt": [user("a")], "response": "good", "attributes": ratings}]
    assert rated == expected
    full = FullConfig(objective="regression", attributes=["helpfulness", "verbosity"])
    data = PairsConfig(ratings_path=str(tmp_path / "out" / "ratings.jsonl"), max_length=100)
    used, _, _ = read_examples(TrainRewardModelConfig(mode="full", full=full, data=data), tokenizer)
    assert [example.ratings for example in used] == [(3.0, 4.0)]


def test_labels_need_a_name_each(tmp_path):
    row = {"text": QUESTION.format("a") + "good\n<extra_id_2>", "label": [3, 4, 4, 1, -100]}
    output = refused(tmp_path, "ratings", row)
    check_output(output, "data.label.wrong_number", "label has 5 numbers", "--attributes ")
    output = refused(tmp_path, "ratings", row, words=("--attributes=a,b",))
    values = ("label has 5 numbers", "--attributes names 2: a,b")
    check_output(output, "data.label.wrong_number", *values)
    output = refused(tmp_path, "ratings", {**row, "label": [-100.0] * 9})
    check_output(output, "data.label.wrong_number", ",".join(STEERLM_ATTRIBUTES))
    output = refused(tmp_path, "ratings", row, words=("--attributes=a,b,a,c,d",))
    check_output(output, "prepare.attributes.named_twice", "--attributes names a ")
    words = ("--attributes=a",)
    for number in (float("nan"), float("inf"), True, "3"):
        output = refused(tmp_path, "ratings", {**row, "label": [number]}, words=words)
        check_output(output, "data.label.not_finite", f"label holds {number!r};")
    output = refused(tmp_path, "ratings", {**row, "label": 3}, words=words)
    check_output(output, "data.label.not_a_list", "label is a number")


def test_labels_of_a_chat_become_ratings(tmp_path):
    turns = [
        {"from": "User", "value": "a", "label": None},
        {"from": "Assistant", "value": "b", "label": "quality:4,toxicity:-100"},
        {"from": "User", "value": "c"},
        {"from": "Assistant", "value": "d", "label": None},
    ]
    row = {"system": "Be kind.", "mask": "User", "conversations": turns}
    expected = {"prompt": [SYSTEM, user("a")], "response": "b", "attributes": {"quality": 4.0}}
    assert prepared(tmp_path, "ratings", row) == [expected]
    (tmp_path / "bad").mkdir()
    for label in ("good", "quality:nan", "quality:4,quality:2", "quality:4,", ":3", "quality:four"):
        turns[1]["label"] = label
        output = refused(tmp_path / "bad", "ratings", row)
        check_output(output, "data.label.invalid", f"conversations[1].label is '{label}'")


def test_options_of_prompts_and_of_ratings(tmp_path):
    for words in (
        ("--format=pairs", "--limit=3"),
        ("--format=ratings", "--validation-fraction=0.2"),
    ):
        done = prepare("x", f"--output={tmp_path}", *words)
        assert done.exit_code == 2
        assert words[1].partition("=")[0] in done.output
        assert "data.held_out_fraction" in done.output
    done = prepare("x", f"--output={tmp_path}", "--attributes=a")
    assert done.exit_code == 2
    assert "--format ratings" in done.output


def test_train_rm_names_the_command_that_converts(tmp_path, tokenizer):
    """Otherwise its markers would be read as the user's text."""
    text = QUESTION.format("a")
    dpo = {
        "prompt": text,
        "chosen_response": "good\n<extra_id_1>",
        "rejected_response": "bad\n<extra_id_1>",
    }
    for row, fields, form in (
        (dpo, {}, "pairs"),
        (dpo, {"chosen": "chosen_response", "rejected": "rejected_response"}, "pairs"),
        ({"prompt": "a", "chosen_response": "good", "rejected_response": "bad"}, {}, "pairs"),
        ({"text": text + "good\n<extra_id_1>"}, {}, "pairs"),
        ({"text": text + "good\n<extra_id_2>", "label": [3]}, {}, "ratings"),
    ):
        file = write(tmp_path / "in.jsonl", row, row)
        data = {f"{form}_path": str(file), "fields": fields, "max_length": 100}
        full = FullConfig(objective="regression" if form == "ratings" else "ranking")
        pairs = PairsConfig(**data)  # type: ignore[arg-type]
        cfg = TrainRewardModelConfig(mode="full", full=full, data=pairs)
        values = ("in.jsonl:1: ", f"reinforce-rl prepare FILE --format {form}")
        with raises_error("reward_model.line.nemo_form", *values) as raised:
            read_examples(cfg, tokenizer)
        assert "in.jsonl:2" not in str(raised.value), "once for a file"


@pytest.mark.parametrize(
    ("name", "form", "count"),
    [
        ("prompts", "messages", 40),
        ("sft_chat", "messages", 12),
        ("rm_comparisons", "messages", 12),
        ("rm_comparisons", "pairs", 12),
        ("dpo", "pairs", 40),
        ("rm_regression", "ratings", 12),
        ("sft_chat", "ratings", 12),
    ],
)
def test_the_reported_files(tmp_path, name, form, count):
    file = CASES / f"{name}.jsonl"
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    words = ("--attributes=a,b,c,d,e",) if form == "ratings" else ()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    records = prepared(tmp_path, form, *rows, words=words)
    assert len(records) == count
    assert "extra_id" not in str(records)
