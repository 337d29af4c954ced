"""Readers give equal rows for every format, compressed or in a folder, and renamed columns.

Unreadable files are rejected.
"""

from __future__ import annotations

import bz2
import csv
import datetime
import decimal
import gzip
import io
import json
import lzma
import os
import zipfile
from pathlib import Path

import pytest
from helpers.errors import check_error, check_fault
from pyarrow import ArrowInvalid
from pyarrow import json as arrow_json

from reinforce_rl.data import readers
from reinforce_rl.data.jsonl import LineFaults
from reinforce_rl.data.readers import Columns, files_of, is_hub_name, read_records, source_fault
from reinforce_rl.errors import DataError, Fault

ROWS = [
    {"prompt": "What is 1,\nor 2?", "answer": "002", "note": 'say "yes"'},
    {"prompt": "  ünïcode \u2028", "answer": "", "note": "NaN"},
    {"prompt": "c", "answer": "None", "note": "1e3"},
]
TYPED = [
    {**row, "number": number, "tags": ["x", "y"][:number], "in": {"deep": number}}
    for number, row in enumerate(ROWS)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
BOM = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 67108864
PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def pyarrow_here():
    """Import pyarrow, or skip the test.

    Version 26 cannot be imported with NumPy 1.26. In CI, where no test may be skipped, this fails.
    """
    kind = ModuleNotFoundError if os.environ.get("CI") else ImportError
    pytest.importorskip("pyarrow.parquet", exc_type=kind)
    return pytest.importorskip("pyarrow")


def separated(separator: str, rows: list[dict] = ROWS, **options) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=separator, **options)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def read(
    source: Path | str, *, columns: dict[str, str] | None = None, split: str = "train"
) -> list[dict]:
    faults = LineFaults()
    records = list(
        read_records(source, lambda record: record.value, faults, Columns(columns or {}), split)
    )
    faults.raise_if_any("advice")
    return records


def refused(source: Path | str, **options) -> DataError:
    with pytest.raises(DataError) as raised:
        read(source, **options)
    return raised.value


def fault_of(source: Path | str) -> Fault:
    fault = source_fault(source)
    assert fault is not None
    return fault


FORMS = {
    "a.jsonl": LINES,
    "bom.jsonl": BOM + LINES.replace(b"\n", b"\r\n\r\n"),
    "a.ndjson": LINES,
    "without a name": LINES,
    "list.json": json.dumps(ROWS).encode(),
    "list-over-lines.json": BOM + json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
    "list.jsonl": json.dumps(ROWS).encode(),
    "a.csv": separated(","),
    "excel.csv": BOM + separated(";", quoting=csv.QUOTE_ALL),
    "unix.csv": separated(",", lineterminator="\n"),
    "a.tsv": separated("\t"),
    "table": separated(","),
}


@pytest.mark.parametrize(("name", "content"), FORMS.items(), ids=FORMS)
def test_every_form_gives_the_same_rows(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert source_fault(tmp_path / name) is None
    assert read(tmp_path / name) == ROWS
    for suffix, pack in PACKED.items():
        (tmp_path / (name + suffix)).write_bytes(pack(content))
        assert source_fault(tmp_path / (name + suffix)) is None
        assert read(tmp_path / (name + suffix)) == ROWS


def test_a_csv_of_one_column_and_by_pandas(tmp_path):
    (tmp_path / "one.csv").write_text('prompt\nhello; you\n\n"there, you"\n')
    expected = [{"prompt": "hello; you"}, {"prompt": "there, you"}]
    assert read(tmp_path / "one.csv") == expected
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS)
    frame.to_csv(tmp_path / "p.csv.gz", index=False)
    frame.to_json(tmp_path / "p.jsonl.xz", orient="records", lines=True)
    frame.to_json(tmp_path / "p.json", orient="records")
    for name in ("p.csv.gz", "p.jsonl.xz", "p.json"):
        assert read(tmp_path / name) == ROWS


def test_parquet_with_its_types(tmp_path):
    pyarrow = pyarrow_here()
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(TYPED), tmp_path / "a.parquet", row_group_size=2
    )
    assert source_fault(tmp_path / "a.parquet") is None
    assert read(tmp_path / "a.parquet") == TYPED
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    assert read(tmp_path / "b.parquet.gz") == TYPED
    with pyarrow.CompressedOutputStream(str(tmp_path / "c.jsonl.zst"), "zstd") as file:
        file.write(LINES)
    assert read(tmp_path / "c.jsonl.zst") == ROWS
    odd = {
        "day": [datetime.date(2026, 1, 2)],
        "price": [decimal.Decimal("1.10")],
        "text": [b"text"],
        "image": [b"\xff\xd8"],
        "none": [None],
        "messages": [
            [
                {"role": "user", "content": "x", "name": None},
                {"role": "user", "content": "y", "name": "z"},
            ]
        ],
    }
    pyarrow.parquet.write_table(pyarrow.table(odd), tmp_path / "odd.parquet")
    (row,) = read(tmp_path / "odd.parquet")
    assert [row[key] for key in ("day", "price", "text", "image", "none")] == [
        "2026-01-02",
        "1.10",
        "text",
        None,
        None,
    ]
    expected = [
        {"role": "user", "content": "x"},
        {"role": "user", "content": "y", "name": "z"},
    ]
    assert row["messages"] == expected
    assert json.loads(json.dumps(row)) == row, "as it goes to a reward function"
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:200])
    error = refused(tmp_path / "cut.parquet")
    check_error(error, "data.parquet.unreadable", tmp_path / "cut.parquet")


def test_data_sets_of_hugging_face(tmp_path, monkeypatch):
    pyarrow_here()
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(TYPED)
    data.select([2, 0]).save_to_disk(tmp_path / "one")
    assert source_fault(tmp_path / "one") is None
    expected = [TYPED[2], TYPED[0]]
    assert read(tmp_path / "one") == expected
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path / "both")
    assert read(tmp_path / "both", split="test") == [TYPED[1]]
    assert read(tmp_path / "both" / "train") == TYPED
    error = refused(tmp_path / "both", split="validation")
    check_error(error, "data.split.several", "none of them validation, test, train;")
    request = {}

    def load_dataset(*args, **options):
        request.update(args=args, **options)
        return data

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("hf:openai/gsm8k/main", split="test") == TYPED
    assert request == {"args": ("openai/gsm8k", "main"), "split": None}
    assert read("hf:some/where:train[:10%]", split="test") == TYPED
    assert request == {"args": ("some/where", None), "split": "train[:10%]"}
    monkeypatch.undo()
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    values = ("hf:no/such-data ", "HF_HUB_OFFLINE", "save_to_disk")
    check_error(refused("hf:no/such-data"), "data.datasets.not_loaded", *values)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf:some/where", True),
        ("hf:some/where/part:train[:10%]", True),
        ("hf:", True),
        ("./hf:some/where", False),
        (" hf:some/where", False),
        ("HF:some/where", False),
        ("/data/hf:some/where", False),
        (0.5, False),
    ],
)
def test_a_name_of_the_hub_has_one_spelling(source, expected):
    assert is_hub_name(source) is expected


@pytest.mark.parametrize(
    "source",
    ["./hf:a/x.jsonl", "./hf:a", ".//hf:a:train", "*/x.jsonl", "*.jsonl", "hf*.jsonl", "*:a", "."],
)
def test_files_that_look_like_a_name_of_the_hub_are_read_here(tmp_path, monkeypatch, source):
    """Path("./hf:a") is Path("hf:a"); there is no network access."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: pytest.fail(args[0]))
    monkeypatch.chdir(tmp_path)
    is_plain = source.endswith("*.jsonl") or source == "."
    path = Path("./hf:f.jsonl" if is_plain else "./hf:a/x.jsonl")
    path.parent.mkdir(exist_ok=True)
    if source.endswith(":train"):
        path = path.with_name("train.jsonl")
    path.write_text('{"prompt": "a"}\n')
    assert read(source) == [{"prompt": "a"}]
    assert source_fault(source) is None
    error = refused(f"./hf:{'b/' * 2}none")
    check_error(error, "data.file.missing")
    assert str(error).startswith(str(tmp_path / "hf:b/b/none"))


def test_a_saved_data_set_that_looks_like_a_name_of_the_hub_is_read_here(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    datasets.Dataset.from_list(TYPED).save_to_disk(tmp_path / "hf:one")
    assert read("./hf:one") == TYPED


def test_a_folder_gives_its_files_by_name_and_split(tmp_path):
    def write(folder: str, *names: str) -> Path:
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(json.dumps({"prompt": name}) + "\n")
        return tmp_path / folder

    plain = write(
        "plain",
        "b.jsonl",
        "a.jsonl",
        "README.md",
        ".a.jsonl.tmp",
        "_SUCCESS",
        "dataset_info.json",
        "c.txt",
    )
    prompts = [row["prompt"] for row in read(plain)]
    assert prompts == ["a.jsonl", "b.jsonl"]
    assert [path.name for path in files_of(tmp_path / "plain" / "[b]*.jsonl")] == ["b.jsonl"]
    splits = write(
        "splits",
        "train-1-of-2.jsonl",
        "train-0-of-2.jsonl",
        "my_valid.jsonl",
        "eval.jsonl",
        "latest.md",
    )
    assert [row["prompt"] for row in read(splits)] == ["train-0-of-2.jsonl", "train-1-of-2.jsonl"]
    assert read(splits, split="validation") == [{"prompt": "my_valid.jsonl"}]
    assert read(splits, split="test") == [{"prompt": "eval.jsonl"}]
    (splits / "more.jsonl").write_text("{}")
    # `more` may or may not be training data.
    check_error(refused(splits), "data.split.files_of_none", "more.jsonl")
    only = write("only", "train.jsonl")
    assert read(only, split="test") == [{"prompt": "train.jsonl"}], "which was given on purpose"
    nothing = write("nothing", "a.txt")
    check_error(refused(nothing), "data.folder.no_known_file", nothing)
    (only / "train.jsonl").write_text("")
    check_fault([fault_of(only)], "data.file.empty", f"{only}/train.jsonl ")


def test_columns_by_other_names(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer,prompt\nhi,1,old\n")
    names = {"prompt": "question"}
    assert read(tmp_path / "a.csv", columns=names) == [{"answer": "1", "prompt": "hi"}]
    row = {"data": {"user": "hi", "truth": [1]}, "a.b": 2}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    records = read(
        tmp_path / "a.jsonl", columns={"prompt": "data.user", "answer": "data.truth", "n": "a.b"}
    )
    expected = [{"data": row["data"], "prompt": "hi", "answer": [1], "n": 2}]
    assert records == expected
    error = refused(tmp_path / "a.csv", columns={"prompt": "questoin"})
    place = f"{tmp_path}/a.csv:2: "
    columns = ("question, answer, prompt;", "questoin", "model.data.fields.prompt")
    check_error(error, "data.column.missing", place, *columns)
    (tmp_path / "b.csv").write_text("question,answer\n" + "hi,1\n" * 5)
    error = refused(tmp_path / "b.csv", columns={"prompt": "q"})
    check_error(error, "data.column.missing", "expected q, ", "model.data.fields.prompt")
    said = str(error)
    assert said.startswith("1 line "), "what all lines lack is said once"
    assert len(said.splitlines()) == 2
    assert "advice" not in said, "and no line is to correct"


def test_faults_of_several_kinds_keep_their_keys(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "x"}\n[1]\n{\n{"a": 1, "a": 2}\n\xff\n[2]\n')
    faults = LineFaults()
    assert list(read_records(path, lambda record: record.value, faults)) == [{"prompt": "x"}]
    keys = [
        "data.line.not_an_object",
        "data.line.not_json",
        "data.json.repeated_key",
        "data.text.not_utf8",
        "data.line.not_an_object",
    ]
    assert [fault.key for fault in faults] == keys
    for number, (fault, key) in enumerate(zip(faults, keys, strict=True), 2):
        check_fault([fault], key, f"{path}:{number}: ")
    with pytest.raises(DataError) as raised:
        faults.raise_if_any("advice")
    check_error(raised.value, keys[0], *faults)


OTHER_FORM = "data.file.other_form"
OTHER = {
    "arrow": (b"ARROW1\x00\x00", OTHER_FORM, "pandas.read_feather(IN).to_parquet(OUT)"),
    "utf-16": (LINES.decode().encode("utf-16"), OTHER_FORM, "iconv -f UTF-16 -t UTF-8"),
    "git lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n",
        OTHER_FORM,
        "Git LFS",
    ),
    "html": (b"\n<!DOCTYPE html><html>", OTHER_FORM, "HTML"),
    "object over lines": (json.dumps(ROWS[0], indent=2).encode(), OTHER_FORM, "jq -c . IN > OUT"),
    "csv": (b'prompt,answer\n"What is 1, or 2?",2\n', "data.csv.other_suffix", ".jsonl;"),
    "tsv": (b"prompt\tanswer\na\t2\n", "data.csv.other_suffix", ".jsonl;"),
    "packed": (gzip.compress(b"<html>"), OTHER_FORM, "HTML"),
    "cut": (b"\x1f\x8b", "data.file.unreadable", ""),
}


def test_a_key_that_occurs_twice_is_refused_as_by_arrow():
    with pytest.raises(ArrowInvalid, match=r"Column\(/answer\) was specified twice in row 0"):
        arrow_json.read_json(io.BytesIO(b'{"answer": 1, "answer": 3}\n'))


@pytest.mark.parametrize(("content", "key", "value"), OTHER.values(), ids=OTHER)
def test_what_cannot_be_read_is_named_with_what_to_do(tmp_path, content, key, value):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    check_fault([fault_of(path)], key, value)
    check_error(refused(path), key, value)
    for sentence in (fault_of(path), str(refused(path))):
        assert sentence.startswith(f"{path} ")


@pytest.mark.parametrize(
    ("name", "content", "key", "place", "value"),
    [
        (
            "a.json",
            b'[{"prompt": "x"}, {"prompt": y}]',
            "data.file.not_json",
            " ",
            "line 1 column 30",
        ),
        ("a.json", b'[{"prompt": "x"}, 3]', "data.line.not_an_object", ", row 2: ", "a number"),
        (
            "a.csv",
            b"prompt,answer\nx,1\ny\n",
            "data.csv.wrong_number_of_values",
            ":3: ",
            "1 values; expected 2, of prompt, answer",
        ),
        (
            "a.csv",
            b'prompt,answer\nx,1\n\n"y\nz",1,2\ny,1\n',
            "data.csv.wrong_number_of_values",
            ":4: ",
            "3 values; expected 2,",
        ),
        ("a.csv", b'prompt,answer\n"x\nx",1\n"y,2\nz,3\nz,4\n', "data.csv.open_quote", ":4: ", ""),
        (
            "a.csv",
            b'prompt,answer\nx,1\n"y,2\nz,3\n"z",4\n',
            "data.csv.text_after_quote",
            ":3: ",
            "line 5;",
        ),
        ("a.csv", b'"prompt,answer\nx,1\n', "data.csv.open_quote", ":1: ", ""),
        (
            "a.csv",
            b"prompt,answer, answer,,\nx,1,2,,\n",
            "data.csv.repeated_column",
            ":1: ",
            " answer;",
        ),
        (
            "a.csv",
            b"prompt,answer\nx,1\n\xe9,2\n",
            "data.text.not_utf8",
            ":3: ",
            "byte 1 of the line",
        ),
        (
            "a.csv",
            b"prompt,r\xe9sum\xe9\nx,1\n",
            "data.text.not_utf8",
            ":1: ",
            "byte 9 of the line",
        ),
        (
            "a.jsonl",
            b'{"prompt": "x"}\n{"prompt": "\xe9"}',
            "data.text.not_utf8",
            ":2: ",
            "byte 13 of the line",
        ),
        ("a.json", b'[{"prompt": "\xe9"}]', "data.text.not_utf8", " ", "byte 14 of the file"),
        (
            "a.jsonl",
            b'{"prompt": "x"}\n{"prompt": "y", "answer": 1, "in": 2, "answer": 3}\n',
            "data.json.repeated_key",
            ":2: ",
            "'answer'",
        ),
        ("a.jsonl", b'{"in": {"a": 1, "a": 1}}', "data.json.repeated_key", ":1: ", "'a'"),
        ("a.json", b'[{"a": 1, "a": 2}]', "data.json.repeated_key", " ", "'a'"),
        ("a.parquet", b"prompt,answer\n", "data.parquet.other_form", " ", ""),
        (
            "a.jsonl.xz",
            lzma.compress(LINES * 9)[:-20],
            "data.file.unreadable",
            " ",
            "Compressed file ended before",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(LINES * 9)[:-20] + b"0" * 20,
            "data.file.unreadable",
            " ",
            "",
        ),
    ],
)
def test_a_broken_file_is_named_with_the_place(tmp_path, name, content, key, place, value):
    (tmp_path / name).write_bytes(content)
    check_error(refused(tmp_path / name), key, f"{tmp_path / name}{place}", value)


@pytest.mark.parametrize(
    ("name", "start", "filling", "place"),
    [
        ("a.jsonl.gz", LINES, b"x", ":4: "),
        ("a.csv.gz", b"prompt,answer\n", b"x", ":2: "),
        ("a.csv.gz", b'prompt,answer\n"', b"x" * 99 + b"\n", ":"),
        ("a.csv.gz", b"prompt,answer\nx", b',"' + b"x" * 99 + b'\n"', ":"),
    ],
)
def test_a_small_file_that_unpacks_to_a_huge_line(tmp_path, name, start, filling, place):
    content = start + filling * (300_000_000 // len(filling))
    (tmp_path / name).write_bytes(gzip.compress(content, compresslevel=1))
    values = (f"{tmp_path / name}{place}", MAX_LINE_BYTES)
    check_error(refused(tmp_path / name), "data.line.too_long", *values)


def test_a_small_file_that_unpacks_to_a_huge_list(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_MAX_WHOLE_BYTES", 1000)
    whole = json.dumps([{"prompt": "x" * 984}]).encode()
    assert len(whole) == 1000
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(whole))
    assert read(tmp_path / "a.json.gz")
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(whole + b" "))
    values = (tmp_path / "a.json.gz", "1000 bytes", ".jsonl")
    check_error(refused(tmp_path / "a.json.gz"), "data.file.too_large", *values)


@pytest.mark.parametrize(
    "content",
    [
        b"{\n" + LINES,
        b"[1, 2]\n" + LINES,
        b'"a, b"\n' + LINES,
        b"nonsense\n" + LINES,
        b'{"prompt": "' + b"x" * 100_000 + b'"}\n',
    ],
)
def test_lines_are_taken_for_lines_also_where_one_is_broken(tmp_path, content):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    assert source_fault(path) is None
    assert list(read_records(path, lambda record: record.value, LineFaults()))


def test_paths_that_are_not_files(tmp_path):
    check_fault([fault_of(tmp_path / "none")], "data.file.missing", f"{tmp_path}/none ")
    os.mkfifo(tmp_path / "pipe")
    # The reader does not wait for its writer.
    check_fault([fault_of(tmp_path / "pipe")], "data.file.not_regular", f"{tmp_path}/pipe ")
    faults = [fault_of(tmp_path / ("x" * 300))]
    check_fault(faults, "data.file.unreadable", "x" * 300)
    with zipfile.ZipFile(tmp_path / "z", "w") as file:
        file.writestr("p.jsonl", LINES)
    check_fault([fault_of(tmp_path / "z")], OTHER_FORM, tmp_path / "z", "zip")
