"""Parquet of a few kilobytes that would fill the memory is refused.

Other files read as pyarrow reads them.
"""

from __future__ import annotations

import io
import re
import resource
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.errors import raises_error
from helpers.rows import write_rows

from reinforce_rl.monitoring import parquet_bounds
from reinforce_rl.monitoring.parquet_bounds import MAX_ROWS, read_bounded_table
from reinforce_rl.monitoring.records import RolloutRow, read_rows

TEXTS = pa.list_(pa.string())
REWARDS = pa.map_(pa.string(), pa.float64())


def stored(table: pa.Table, **options: Any) -> pa.PythonFile:
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd", **options)
    assert file.tell() < 1 << 20
    return pa.BufferReader(file.getvalue())


def repeated(text: str, count: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), [text])


def in_lists(values: pa.Array, count: int) -> pa.ListArray:
    offsets = pa.array(range(0, len(values) + 1, count), pa.int32())
    return pa.ListArray.from_arrays(offsets, values)


def test_values_and_types_are_those_of_pyarrow() -> None:
    table = pa.table(
        {
            "text": ["a", None, "", "ü" * 1000],
            "texts": pa.array([["a", "b"], [], None, ["a", None]], TEXTS),
            "numbers": pa.array([[1, 2], [3], None, []], pa.list_(pa.int32())),
            "rewards": pa.array([[("a", 1.0)], [], [("b", None), ("c", 2.0)], None], REWARDS),
            "valid": [True, False, None, True],
        }
    ).replace_schema_metadata({"reinforce_rl.records": "1"})
    for is_dictionary in (True, False):
        file = stored(table, use_dictionary=is_dictionary)
        read = read_bounded_table(file, None, None)
        assert read.equals(pq.read_table(file), check_metadata=True)
        assert read.equals(table)
        some = read_bounded_table(file, ["texts", "valid"], [("text", "==", "a")])
        expected = [{"texts": ["a", "b"], "valid": True}]
        assert some.to_pylist() == expected


@pytest.mark.parametrize(
    "values",
    [
        repeated("x" * 1_000_000, 1000),
        in_lists(repeated("x" * 1000, 1_000_000), 1000),
        pa.MapArray.from_arrays(
            pa.array([0, 1000], pa.int32()), repeated("x" * 1_000_000, 1000), [1.0] * 1000
        ),
        pa.StructArray.from_arrays([repeated("x" * 1_000_000, 1000)], ["a"]),
    ],
    ids=["text", "list", "map", "struct"],
)
def test_a_small_file_of_much_text_is_refused(values: pa.Array) -> None:
    file = stored(pa.table({"column": values}), store_schema=False)
    assert not pa.types.is_dictionary(pq.read_schema(file).field(0).type), (
        "pyarrow would read each text"
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with raises_error("parquet.values.too_large", 268435456) as caught:
        read_bounded_table(file, None, None)
    assert re.search(r"\b1[0-9]{9}\b", str(caught.value)), "the size of the values"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024, "KiB"


@pytest.mark.parametrize(
    ("values", "size"),
    [
        (in_lists(pa.array([1] * 1000, pa.int32()), 100), 4000),
        (in_lists(pa.array([True] * 1000), 100), 1000),
        (pa.array([b"x" * 40] * 100, pa.binary(40)), 4000),
        (pa.array([1.5] * 100), 800),
    ],
    ids=["integers", "booleans", "fixed length", "floats"],
)
def test_the_size_of_values_without_text(
    monkeypatch: pytest.MonkeyPatch, values: pa.Array, size: int
) -> None:
    monkeypatch.setattr(parquet_bounds, "BYTES_RATIO", 0)
    monkeypatch.setattr(parquet_bounds, "MIN_BYTES", size)
    table = pa.table({"column": values})
    assert read_bounded_table(stored(table), None, None).equals(table)
    monkeypatch.setattr(parquet_bounds, "MIN_BYTES", size - 1)
    with raises_error("parquet.values.too_large", size, size - 1):
        read_bounded_table(stored(table), None, None)


def test_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_bounds, "MIN_BYTES", 10_000)
    monkeypatch.setattr(parquet_bounds, "BYTES_RATIO", 0)
    exact = pa.table({"a": ["x" * 100] * 100})  # 10,000 bytes of text
    assert read_bounded_table(stored(exact), None, None).equals(exact)
    with raises_error("parquet.values.too_large", 10_001, 10_000):
        texts = ["x" * 100] * 99 + ["x" * 101]
        table = pa.table({"a": texts})
        read_bounded_table(stored(table), None, None)
    file = stored(pa.table({"a": ["x" * 100] * 1000}))
    monkeypatch.setattr(parquet_bounds, "BYTES_RATIO", 100_000 / file.size())
    assert len(read_bounded_table(file, None, None)) == 1000
    monkeypatch.setattr(parquet_bounds, "BYTES_RATIO", 99_000 / file.size())
    with raises_error("parquet.values.too_large", 100_000):
        read_bounded_table(file, None, None)


def test_columns_that_are_not_read_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_bounds, "MIN_BYTES", 1000)
    monkeypatch.setattr(parquet_bounds, "BYTES_RATIO", 0)
    tokens = in_lists(pa.array([1] * 1000, pa.int32()), 100)
    table = pa.table({"text": ["a"] * 10, "tokens": tokens})
    file = stored(table)
    assert read_bounded_table(file, ["text"], None).to_pylist() == [{"text": "a"}] * 10
    with raises_error("parquet.values.too_large"):
        read_bounded_table(file, ["tokens"], None)


def test_rows_and_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"a": pa.nulls(MAX_ROWS, pa.bool_())})
    assert len(read_bounded_table(stored(table), None, None)) == MAX_ROWS
    with raises_error("parquet.rows.too_many", 262_145, 262_144):
        nulls = pa.nulls(MAX_ROWS + 1, pa.bool_())
        read_bounded_table(stored(pa.table({"a": nulls})), None, None)
    file = stored(pa.table({"a": range(1001)}), row_group_size=1)
    with raises_error("parquet.footer.too_large", 65_536) as caught:
        read_bounded_table(file, None, None)
    assert re.search(r"\b[0-9]{6}\b", str(caught.value)), "the size of the footer"
    monkeypatch.setattr(parquet_bounds, "_MAX_FOOTER_BYTES", 1 << 20)
    assert len(read_bounded_table(file, None, None)) == 1001


def test_different_texts_are_not_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """zstd compresses them to a few kilobytes."""
    monkeypatch.setattr(parquet_bounds, "MIN_BYTES", 1_000_000)
    texts = pa.table({"a": [str(number) * 300_000 for number in range(8)]})
    monkeypatch.setattr(pq, "read_table", None)
    with raises_error("parquet.values.too_large", 1_000_000) as caught:
        read_bounded_table(stored(texts, use_dictionary=False), None, None)
    assert re.search(r"\b24[0-9]{5}\b", str(caught.value)), "the size of the values"


def test_texts_of_an_extension_type_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_bounds, "MIN_BYTES", 1_000_000)
    storage = pa.array(['"' + "x" * 10_000 + '"'] * 200)
    texts = pa.ExtensionArray.from_storage(pa.json_(pa.string()), storage)
    with raises_error("parquet.values.too_large", 1_000_000) as caught:
        file = stored(pa.table({"a": texts}))
        read_bounded_table(file, None, None)
    assert re.search(r"\b20[0-9]{5}\b", str(caught.value)), "the size of the values"


def test_a_schema_that_would_end_the_process(tmp_path: Path) -> None:
    kind: pa.DataType = pa.int32()
    for _ in range(400):
        kind = pa.struct([("a" * 200, kind)])
    path = tmp_path / "rollouts" / "step_00001.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"a": pa.nulls(1, kind)}), path, store_schema=False)
    with raises_error("parquet.footer.too_large", 65_536):
        read_bounded_table(pa.OSFile(str(path)), None, None)
    with raises_error("parquet.footer.too_large", path):
        read_rows(path)


def test_the_records_of_a_step_are_read_so(tmp_path: Path) -> None:
    row = RolloutRow(1, 0, 0, "x" * 1_000_000, "a", 1.0, "stop", 1)
    path = write_rows(tmp_path, 1, [row] * 300)
    assert path.stat().st_size < 100_000
    with raises_error("parquet.values.too_large", path) as caught:
        read_rows(path)
    assert re.search(r"\b3000[0-9]{5}\b", str(caught.value)), "the size of the values"
