"""Readers: the same rows from every form, compressed or in a folder; columns by other names; what cannot be read."""

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
from pyarrow import ArrowInvalid
from pyarrow import json as arrow_json

from reinforce_rl.data import readers
from reinforce_rl.data.jsonl import LineFaults
from reinforce_rl.data.readers import Columns, files_of, is_hub_name, read_records, source_fault
from reinforce_rl.errors import DataError

ROWS = [
    {"prompt": "What is 1,\nor 2?", "answer": "002", "note": 'say "yes"'},
    {"prompt": "  ünïcode \u2028", "answer": "", "note": "NaN"},
    {"prompt": "c", "answer": "None", "note": "1e3"},
]
TYPED = [
    {**row, "number": number, "tags": ["x", "y"][:number], "in": {"deep": number}} for number, row in enumerate(ROWS)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
BOM = b"\xef\xbb\xbf"
TOO_LONG = "expected at most 67108864 bytes in a line or row"
PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def pyarrow_here():
    """pyarrow; version 26 cannot be imported beside NumPy 1.26, which is a failure where tests must not be skipped."""
    kind = ModuleNotFoundError if os.environ.get("CI") else ImportError
    pytest.importorskip("pyarrow.parquet", exc_type=kind)
    return pytest.importorskip("pyarrow")


def separated(separator: str, rows: list[dict] = ROWS, **options) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=separator, **options)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def read(source: Path | str, *, columns: dict[str, str] | None = None, split: str = "train") -> list[dict]:
    faults = LineFaults()
    found = list(read_records(source, lambda record: record.value, faults, Columns(columns or {}), split))
    faults.raise_if_any("advice")
    return found


def refused(source: Path | str, **options) -> str:
    with pytest.raises(DataError) as raised:
        read(source, **options)
    return str(raised.value)


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
    assert read(tmp_path / "one.csv") == [{"prompt": "hello; you"}, {"prompt": "there, you"}]
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS)
    frame.to_csv(tmp_path / "p.csv.gz", index=False)
    frame.to_json(tmp_path / "p.jsonl.xz", orient="records", lines=True)
    frame.to_json(tmp_path / "p.json", orient="records")
    for name in ("p.csv.gz", "p.jsonl.xz", "p.json"):
        assert read(tmp_path / name) == ROWS


def test_parquet_with_its_types(tmp_path):
    pyarrow = pyarrow_here()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TYPED), tmp_path / "a.parquet", row_group_size=2)
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
        "messages": [[{"role": "user", "content": "x", "name": None}, {"role": "user", "content": "y", "name": "z"}]],
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
    assert row["messages"] == [{"role": "user", "content": "x"}, {"role": "user", "content": "y", "name": "z"}]
    assert json.loads(json.dumps(row)) == row, "as it goes to a reward function"
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:200])
    assert "cut.parquet cannot be read: " in refused(tmp_path / "cut.parquet")


def test_data_sets_of_hugging_face(tmp_path, monkeypatch):
    pyarrow_here()
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(TYPED)
    data.select([2, 0]).save_to_disk(tmp_path / "one")
    assert source_fault(tmp_path / "one") is None
    assert read(tmp_path / "one") == [TYPED[2], TYPED[0]]
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path / "both")
    assert read(tmp_path / "both", split="test") == [TYPED[1]]
    assert read(tmp_path / "both" / "train") == TYPED
    assert "none of them validation, test, train; choose one" in refused(tmp_path / "both", split="validation")
    found = {}

    def load_dataset(*args, **options):
        found.update(args=args, **options)
        return data

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("hf:openai/gsm8k/main", split="test") == TYPED
    assert found == {"args": ("openai/gsm8k", "main"), "split": None}
    assert read("hf:some/where:train[:10%]", split="test") == TYPED
    assert found == {"args": ("some/where", None), "split": "train[:10%]"}
    monkeypatch.undo()
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    said = refused("hf:no/such-data")
    assert "hf:no/such-data cannot be loaded by datasets: " in said and "HF_HUB_OFFLINE is set: unset it" in said
    assert "save_to_disk" in said


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
    """Path("./hf:a") is Path("hf:a"); nothing is asked for over the network."""
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
    assert refused(f"./hf:{'b/' * 2}none").startswith(str(tmp_path / "hf:b/b/none"))


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

    plain = write("plain", "b.jsonl", "a.jsonl", "README.md", ".a.jsonl.tmp", "_SUCCESS", "dataset_info.json", "c.txt")
    assert [row["prompt"] for row in read(plain)] == ["a.jsonl", "b.jsonl"]
    assert [path.name for path in files_of(tmp_path / "plain" / "[b]*.jsonl")] == ["b.jsonl"]
    splits = write("splits", "train-1-of-2.jsonl", "train-0-of-2.jsonl", "my_valid.jsonl", "eval.jsonl", "latest.md")
    assert [row["prompt"] for row in read(splits)] == ["train-0-of-2.jsonl", "train-1-of-2.jsonl"]
    assert read(splits, split="validation") == [{"prompt": "my_valid.jsonl"}]
    assert read(splits, split="test") == [{"prompt": "eval.jsonl"}]
    (splits / "more.jsonl").write_text("{}")
    assert "whose names tell no split, such as more.jsonl" in refused(splits), (
        "whether `more` is for training is not for us to say"
    )
    only = write("only", "train.jsonl")
    assert read(only, split="test") == [{"prompt": "train.jsonl"}], "which was given on purpose"
    assert "is a folder of no file of a known form" in refused(write("nothing", "a.txt"))
    (only / "train.jsonl").write_text("")
    assert source_fault(only) == f"{only}/train.jsonl is empty", "the fault is in the file"


def test_columns_by_other_names(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer,prompt\nhi,1,old\n")
    names = {"prompt": "question"}
    assert read(tmp_path / "a.csv", columns=names) == [{"answer": "1", "prompt": "hi"}]
    row = {"data": {"user": "hi", "truth": [1]}, "a.b": 2}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    found = read(tmp_path / "a.jsonl", columns={"prompt": "data.user", "answer": "data.truth", "n": "a.b"})
    assert found == [{"data": row["data"], "prompt": "hi", "answer": [1], "n": 2}]
    said = refused(tmp_path / "a.csv", columns={"prompt": "questoin"})
    assert (
        f"{tmp_path}/a.csv:2: found question, answer, prompt; expected questoin, as model.data.fields.prompt" in said
    )
    (tmp_path / "b.csv").write_text("question,answer\n" + "hi,1\n" * 5)
    said = refused(tmp_path / "b.csv", columns={"prompt": "q"})
    assert said.startswith("1 line "), "what all lines lack is said once"
    assert said.endswith("expected q, as model.data.fields.prompt says; correct that"), "and no line is to correct"


OTHER = {
    "arrow": (b"ARROW1\x00\x00", "is an Arrow file; convert it: pandas.read_feather(IN).to_parquet(OUT)"),
    "utf-16": (LINES.decode().encode("utf-16"), "is UTF-16 text; convert it with iconv -f UTF-16 -t UTF-8"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "is a Git LFS pointer"),
    "html": (b"\n<!DOCTYPE html><html>", "is an HTML or XML page; see whether its download failed"),
    "object over lines": (
        json.dumps(ROWS[0], indent=2).encode(),
        "is JSON over several lines; write an object a line",
    ),
    "csv": (b'prompt,answer\n"What is 1, or 2?",2\n', "is CSV, but its name ends in .jsonl; rename it"),
    "tsv": (b"prompt\tanswer\na\t2\n", "is CSV"),
    "packed": (gzip.compress(b"<html>"), "is an HTML or XML page"),
    "cut": (b"\x1f\x8b", "cannot be read: "),
}


def test_a_key_that_occurs_twice_is_refused_as_by_arrow():
    with pytest.raises(ArrowInvalid, match=r"Column\(/answer\) was specified twice in row 0"):
        arrow_json.read_json(io.BytesIO(b'{"answer": 1, "answer": 3}\n'))


@pytest.mark.parametrize(("content", "fault"), OTHER.values(), ids=OTHER)
def test_what_cannot_be_read_is_named_with_what_to_do(tmp_path, content, fault):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    assert str(source_fault(path)).startswith(f"{path} {fault}")
    assert refused(path).startswith(f"{path} {fault}")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b'[{"prompt": "x"}, {"prompt": y}]', "is not valid JSON: Expecting value: line 1 column 30"),
        ("a.json", b'[{"prompt": "x"}, 3]', ", row 2: expected a JSON object, found a number"),
        ("a.csv", b"prompt,answer\nx,1\ny\n", ":3: 1 values, expected 2, of prompt, answer"),
        ("a.csv", b'prompt,answer\nx,1\n\n"y\nz",1,2\ny,1\n', ":4: 3 values, expected 2"),
        ("a.csv", b'prompt,answer\n"x\nx",1\n"y,2\nz,3\nz,4\n', ":4: a quote opens here and is never closed"),
        (
            "a.csv",
            b'prompt,answer\nx,1\n"y,2\nz,3\n"z",4\n',
            ":3: a quote opens here and closes before other text in line 5",
        ),
        ("a.csv", b'"prompt,answer\nx,1\n', ":1: a quote opens here and is never closed"),
        ("a.csv", b"prompt,answer, answer,,\nx,1,2,,\n", ":1: several columns are named answer; rename all but one"),
        (
            "a.csv",
            b"prompt,answer\nx,1\n\xe9,2\n",
            ":3: not valid UTF-8 (byte 1 of the line); save it as UTF-8, or, if",
        ),
        ("a.csv", b"prompt,r\xe9sum\xe9\nx,1\n", ":1: not valid UTF-8 (byte 9 of the line); save it as UTF-8"),
        (
            "a.jsonl",
            b'{"prompt": "x"}\n{"prompt": "\xe9"}',
            ":2: not valid UTF-8 (byte 13 of the line); save it as UTF-8",
        ),
        ("a.json", b'[{"prompt": "\xe9"}]', "is not valid UTF-8 (byte 14 of the file); save it as UTF-8"),
        (
            "a.jsonl",
            b'{"prompt": "x"}\n{"prompt": "y", "answer": 1, "in": 2, "answer": 3}\n',
            ":2: not usable JSON (an object has 'answer' more than once; keep one of them)",
        ),
        ("a.jsonl", b'{"in": {"a": 1, "a": 1}}', ":1: not usable JSON (an object has 'a' more than once"),
        ("a.json", b'[{"a": 1, "a": 2}]', "is not usable JSON (an object has 'a' more than once"),
        ("a.parquet", b"prompt,answer\n", "does not begin as a Parquet file does"),
        ("a.jsonl.xz", lzma.compress(LINES * 9)[:-20], "cannot be read: Compressed file ended before"),
        ("a.jsonl.gz", gzip.compress(LINES * 9)[:-20] + b"0" * 20, "cannot be read: "),
    ],
)
def test_a_broken_file_is_named_with_the_place(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    assert f"{tmp_path / name}{'' if said[0] in ',:' else ' '}{said}" in refused(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "start", "filling", "said"),
    [
        ("a.jsonl.gz", LINES, b"x", ":4: " + TOO_LONG),
        ("a.csv.gz", b"prompt,answer\n", b"x", ":2: " + TOO_LONG),
        ("a.csv.gz", b'prompt,answer\n"', b"x" * 99 + b"\n", TOO_LONG),
        (
            "a.csv.gz",
            b"prompt,answer\nx",
            b',"' + b"x" * 99 + b'\n"',
            "expected at most 67108864 bytes in a line or row",
        ),
    ],
)
def test_a_small_file_that_unpacks_to_a_huge_line(tmp_path, name, start, filling, said):
    content = start + filling * (300_000_000 // len(filling))
    (tmp_path / name).write_bytes(gzip.compress(content, compresslevel=1))
    fault = refused(tmp_path / name)
    assert str(tmp_path / name) in fault and said in fault


def test_a_small_file_that_unpacks_to_a_huge_list(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_MAX_WHOLE_BYTES", 1000)
    whole = json.dumps([{"prompt": "x" * 984}]).encode()
    assert len(whole) == 1000
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(whole))
    assert read(tmp_path / "a.json.gz")
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(whole + b" "))
    assert "a.json.gz holds more than 1000 bytes; write one record a line" in refused(tmp_path / "a.json.gz")


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


def test_what_is_no_file(tmp_path):
    assert source_fault(tmp_path / "none") == f"{tmp_path}/none does not exist"
    os.mkfifo(tmp_path / "pipe")
    assert source_fault(tmp_path / "pipe") == f"{tmp_path}/pipe is not a file", "and nobody waits for its writer"
    assert "cannot be read" in str(source_fault(tmp_path / ("x" * 300)))
    with zipfile.ZipFile(tmp_path / "z", "w") as file:
        file.writestr("p.jsonl", LINES)
    assert "is a zip archive; unpack it" in str(source_fault(tmp_path / "z"))
