"""Parquet files that crash or stall their reader give an error."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.errors import raises_error
from helpers.rows import write_rows

from reinforce_rl.monitoring import parquet_process, records
from reinforce_rl.monitoring.parquet_process import read_in_child
from reinforce_rl.monitoring.records import (
    RolloutRow,
    Samples,
    TokenColumns,
    read_rows,
    write_samples,
)

# Reads a file with each named byte changed, and prints the counts of successes and failures.
FLIPS = """
import sys
from pathlib import Path
from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.records import read_rows, read_tokens

path = Path(sys.argv[1])
whole = path.read_bytes()
counts = {"read": 0, "refused": 0}
for word in sys.argv[2:]:
    place, bit = map(int, word.split(":"))
    changed = bytearray(whole)
    changed[place] ^= 1 << bit
    path.write_bytes(changed)
    for read in (read_rows, read_tokens):
        try:
            read(path)
            counts["read"] += 1
        except DataError as error:
            assert str(error).startswith(str(path))
            assert error.key
            counts["refused"] += 1
print(counts["read"], counts["refused"])
"""


def row(number: int = 0) -> RolloutRow:
    return RolloutRow(
        1, number, 0, f"prompt {number}", "a response", 1.0, "stop", 3, source_rewards={"a": 1.0}
    )


def write_with_tokens(folder: Path) -> Path:
    values = {
        "prompt_tokens": np.arange(8, dtype=np.int32),
        "response_tokens": np.arange(12, dtype=np.int32) % 3,
        "policy_log_probs": np.linspace(-1, 0, 12).astype(np.float32),
        "generator_log_probs": np.linspace(-1, 0, 12).astype(np.float32),
    }
    lengths = {"prompt": np.full(4, 2), "response": np.full(4, 3)}
    texts = {0: "a", 1: "b", 2: "c"}
    rows = [row(i) for i in range(4)]
    samples = Samples(rows, TokenColumns(lengths, values, texts))
    write_samples(folder, 1, samples)
    return folder / "rollouts" / "step_00001.parquet"


@pytest.mark.more
def test_no_changed_byte_ends_the_process(tmp_path: Path) -> None:
    """Arrow ends its process for some of them: with pyarrow 25 for the first three."""
    path = write_with_tokens(tmp_path)
    size = path.stat().st_size
    drawn = np.random.default_rng(0)
    anywhere = drawn.integers(0, size, 60)
    places = [*anywhere, *drawn.integers(size // 3, size, 140)]
    changes = (f"{place}:{drawn.integers(8)}" for place in places)
    words = ["2927:0", "2886:5", "4312:6", *changes]
    command = [sys.executable, "-c", FLIPS, str(path), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stderr == ""
    read, refused = map(int, done.stdout.split())
    assert read + refused == 2 * len(words)
    assert read > 100
    assert refused > 100


def test_a_file_is_read_as_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_with_tokens(tmp_path)
    table = records.read_table(path)
    here = records.read_table(path, is_own=True)
    assert table.equals(here)
    assert table.schema.metadata == here.schema.metadata
    expected = [[0, 1, 2]] * 4
    assert table["response_tokens"].to_pylist() == expected
    some = records.read_table(path, ["prompt_id"], [("prompt_id", "in", [2])])
    assert some.to_pylist() == [{"prompt_id": 2}]
    monkeypatch.setattr(records, "read_in_child", None)
    assert read_rows(path, is_own=True) == read_rows(path, is_own=True)
    with pytest.raises(TypeError):
        read_rows(path)


@pytest.fixture
def stuck(tmp_path: Path) -> Path:
    """A file whose opening does not end."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def test_a_file_that_takes_too_long(
    stuck: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_process, "READ_SECONDS", 1)
    with raises_error("parquet.file.takes_too_long", "1 s"):
        read_in_child(stuck, None, None)
    monkeypatch.undo()
    assert read_rows(write_rows(tmp_path, 1, [row()])) == [row()], (
        "the next file has another reader"
    )


def test_a_reader_that_is_killed(stuck: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    waiting = {reader.pid for reader in parquet_process._waiting}

    def kill() -> None:
        while not (new := {child.pid for child in psutil.Process().children()} - before):
            time.sleep(0.01)
        os.kill(new.pop(), signal.SIGKILL)

    parquet_process._waiting.clear()
    thread = threading.Thread(target=kill)
    thread.start()
    with raises_error("parquet.file.ended_its_reader", "SIGKILL"):
        read_in_child(stuck, None, None)
    thread.join()
    assert waiting <= before


def test_readers_are_used_again_and_limited(tmp_path: Path) -> None:
    path = write_rows(tmp_path, 1, [row()])
    read_rows(path)
    reader = parquet_process._waiting[-1]
    read_rows(path)
    assert parquet_process._waiting[-1] is reader
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < resource.prlimit(reader.pid, resource.RLIMIT_DATA)[0] <= machine // 4
    assert resource.prlimit(reader.pid, resource.RLIMIT_CORE) == (0, 0)
    reader.kill()
    assert read_rows(path) == [row()], "a reader that ended meanwhile is not asked"
    assert reader not in parquet_process._waiting


def test_a_relative_path_is_of_the_folder_of_whoever_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook may change its folder while a reader lives on."""
    path = write_rows(tmp_path, 1, [row()])
    read_rows(path)
    assert parquet_process._waiting, "the reader that began in another folder is kept"
    monkeypatch.chdir(tmp_path)
    relative = path.relative_to(tmp_path)
    assert read_in_child(relative, ["prompt_id"], None).num_rows == 1
    with raises_error("parquet.file.not_readable", "'absent.parquet'"):
        read_in_child("absent.parquet", None, None)


def test_threads_have_readers_of_their_own(tmp_path: Path) -> None:
    rows = [row(i) for i in range(100)]
    path = write_rows(tmp_path, 1, rows)
    counts: list[int] = []

    def read() -> None:
        counts.append(len(read_rows(path)))

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [100] * 6
    assert len(parquet_process._waiting) <= 4


FLOATS = pa.list_(pa.float32())
MAPS = pa.map_(pa.string(), pa.float64())
TYPE = "samples.column.wrong_type"
VALUE = "samples.column.wrong_value"
LENGTHS = "samples.tokens.lengths_differ"
# A column, its contents, the key of the error, and the values that it names.
TYPES = {
    "text for a number": ("reward", pa.array(["high"]), TYPE, ["string", "double"]),
    "number for a text": ("prompt", pa.array([1.0]), TYPE, ["double", "string"]),
    "list for a number": ("step", pa.array([[1]]), TYPE, ["list", "expected int64"]),
    "another width": ("response_tokens", pa.array([[1]]), TYPE, ["int64", "int32"]),
    "null": ("response_length", pa.array([None], pa.int64()), VALUE, ["null"]),
    "null rewards": ("source_rewards", pa.nulls(1, MAPS), VALUE, ["null"]),
    "negative": ("prompt_id", pa.array([-1]), VALUE, ["-1 to -1", "0 to"]),
    "large": ("step", pa.array([1 << 53]), VALUE, [9007199254740992]),
    "null token": ("token_texts", pa.array([["a", None, "b"]]), VALUE, ["null within"]),
    "lengths": ("policy_log_probs", pa.array([[1.0]], FLOATS), LENGTHS, []),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_column_that_is_not_what_is_written(tmp_path: Path, name: str) -> None:
    column, values, key, named = TYPES[name]
    path = write_with_tokens(tmp_path)
    table = pq.read_table(path).slice(0, 1)
    table = table.set_column(table.column_names.index(column), column, values)
    pq.write_table(table, path)
    with raises_error(key, path, column, *named):
        records.read_table(path)


def test_tokens_of_some_samples_only(tmp_path: Path) -> None:
    path = write_with_tokens(tmp_path)
    table = pq.read_table(path)
    lists = [[0], None, [1], [2]]
    index = table.column_names.index("response_tokens")
    kept = table.set_column(index, "response_tokens", pa.array(lists, pa.list_(pa.int32())))
    for name in set(records.TOKEN_COLUMNS) - {"response_tokens", "prompt_tokens"}:
        nulls = pa.nulls(4, kept.schema.field(name).type)
        kept = kept.set_column(kept.column_names.index(name), name, nulls)
    pq.write_table(kept, path)
    with raises_error("samples.tokens.of_some", path, "3 of 4"):
        records.read_tokens(path)


ODD_VERSIONS = ["[]", "1", "null", '{"version": []}', '{"version": {"a": 1}}', "{", "[" * 9000]


@pytest.mark.parametrize("metadata", ODD_VERSIONS)
def test_a_version_of_an_odd_type(tmp_path: Path, metadata: str) -> None:
    path = write_with_tokens(tmp_path)
    table = pq.read_table(path).replace_schema_metadata({records.FORMAT: metadata})
    pq.write_table(table, path)
    with raises_error("samples.file.other_version", path):
        read_rows(path)
