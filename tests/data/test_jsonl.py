"""JSONL files: other formats are named, with what to do."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import zipfile
from pathlib import Path

import pytest

from reinforce_rl.data.jsonl import (
    LineFaults,
    file_fault,
    read_jsonl,
)
from reinforce_rl.errors import DataError

ROWS = [{"prompt": "What is 1, or 2?", "answer": 2}, {"prompt": "b", "answer": 3}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
BOM = b"\xef\xbb\xbf"

OTHER = {
    "parquet": (b"PAR1\x15\x04\x15\x10", "a Parquet file", "pandas.read_parquet(IN).to_json(OUT,"),
    "arrow file": (b"ARROW1\x00\x00", "an Arrow file", "pandas.read_feather"),
    "arrow stream": (b"\xff\xff\xff\xff\x10\x00", "an Arrow file", "pandas.read_feather"),
    "gzip": (gzip.compress(LINES), "a gzip file", "gunzip"),
    "bzip2": (bz2.compress(LINES), "a compressed file", "unpack it"),
    "xz": (lzma.compress(LINES), "a compressed file", "unpack it"),
    "zstd": (b"\x28\xb5\x2f\xfd\x04", "a compressed file", "unpack it"),
    "utf-16": (LINES.decode().encode("utf-16"), "UTF-16 text", "iconv -f UTF-16 -t UTF-8"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "a Git LFS pointer", "git lfs pull"),
    "html": (b"\n<!DOCTYPE html><html>", "an HTML or XML page", "download"),
    "array": (json.dumps(ROWS).encode(), "a JSON array", "jq -c '.[]' IN > OUT"),
    "array over lines": (BOM + json.dumps(ROWS, indent=2).encode(), "a JSON array", "jq -c '.[]'"),
    "object over lines": (json.dumps(ROWS[0], indent=2).encode(), "JSON over several lines", "jq -c . IN > OUT"),
    "csv": (b'prompt,answer\n"What is 1, or 2?",2\n', "CSV", "pandas.read_csv"),
    "quoted csv": (BOM + b'"prompt","the answer"\r\na,2\r\n', "CSV", "pandas.read_csv"),
    "tsv": (b"prompt\tanswer\na\t2\n", "CSV", "pandas.read_csv"),
}


@pytest.mark.parametrize(("content", "name", "advice"), OTHER.values(), ids=OTHER)
def test_another_format_is_named(tmp_path, content, name, advice):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    fault = file_fault(path)
    assert fault is not None and fault.startswith(f"is {name}") and "not JSONL" in fault and advice in fault
    with pytest.raises(DataError) as raised:
        read_jsonl(path, lambda line: line, LineFaults())
    assert str(raised.value) == f"file {path} {fault}"


@pytest.mark.parametrize(
    "content",
    [
        LINES,
        BOM + LINES,
        b"\n\n" + LINES,
        LINES.replace(b"\n", b"\r\n"),
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
    assert file_fault(path) is None
    assert read_jsonl(path, lambda line: line.value, LineFaults())


def test_what_is_no_file(tmp_path):
    assert file_fault(tmp_path / "none") == "does not exist"
    assert file_fault(tmp_path) == "is not a file"
    os.mkfifo(tmp_path / "pipe")
    assert file_fault(tmp_path / "pipe") == "is not a file", "and nobody waits for its writer"
    (tmp_path / "p").touch()
    assert file_fault(tmp_path / "p") == "is empty"
    assert "cannot be read" in str(file_fault(Path(tmp_path / ("x" * 300))))
    with zipfile.ZipFile(tmp_path / "z", "w") as file:
        file.writestr("p.jsonl", LINES)
    assert "is a compressed file" in str(file_fault(tmp_path / "z"))
