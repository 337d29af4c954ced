"""Files are whole or absent, and JSON is valid for every reader."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import resource
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.errors import check_fault, raises_error
from helpers.full_disk import files_of_at_most
from safetensors.torch import load_file, save_file

from reinforce_rl.errors import DataError
from reinforce_rl.megatron.hf_weights import save_tensors
from reinforce_rl.utils import files
from reinforce_rl.utils.files import (
    append,
    bounded_lines,
    json_line,
    naming,
    output_faults,
    plain_number,
    read_json_lines,
    replace_folder,
    write_atomically,
    write_fault,
    write_json_lines,
)


def test_a_file_without_space_is_named_and_leaves_no_part(tmp_path):
    path = tmp_path / "deeper" / "big.json"
    write_atomically(path, "old")
    with files_of_at_most(1000), pytest.raises(OSError) as caught:
        write_atomically(path, "x" * 2000)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
    assert list(path.parent.iterdir()) == [path]
    assert path.read_text() == "old"
    with files_of_at_most(1000):
        text = write_fault(caught.value)
    assert f"{path} cannot be written" in text
    assert "1000 bytes" in text
    assert "ulimit -f" in text


def test_a_failed_rename_names_the_file_alone(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(OSError) as caught, naming(path):
        os.replace(tmp_path / "absent", tmp_path / "other")
    assert str(caught.value) == f"[Errno {errno.ENOENT}] {os.strerror(errno.ENOENT)}: {str(path)!r}"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_what_is_said_of_a_disk(tmp_path, number):
    """Also for a file in a folder that does not exist yet."""
    path = tmp_path / "gone" / "file"
    text = write_fault(OSError(number, os.strerror(number), str(path)))
    assert text.startswith(f"{path} cannot be written: {os.strerror(number)} (")
    mount = next(str(folder) for folder in path.parents if os.path.ismount(folder))
    assert re.search(rf"{re.escape(mount)}\b|on {re.escape(mount)}", text)
    assert ("quota" in text.lower()) == (number == errno.EDQUOT)
    assert ("free" in text) == (number != errno.EROFS)


def test_a_fault_of_safetensors_becomes_the_systems(tmp_path):
    path = tmp_path / "weights.safetensors"
    with files_of_at_most(1000), pytest.raises(OSError) as caught, naming(path):
        save_file({"a": torch.zeros(1000)}, path)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
    with pytest.raises(ValueError, match="else"), naming(path):
        raise ValueError("something else (os error of no number)")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (3, 3),
        (True, 1),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (torch.tensor([2.0]), 2.0),
        (math.nan, None),
        (-math.inf, None),
    ],
)
def test_numbers_of_any_kind(value, plain):
    assert plain_number(value) == plain
    assert type(plain_number(value)) is type(plain)


def test_a_line_is_strict_json_and_keeps_floats_exactly():
    line = json_line({"a": 0.1 + 0.2, "b": math.nan, "c": "é\u2028"})
    assert line.endswith("\n")
    assert "NaN" not in line
    assert json.loads(line) == {"a": 0.1 + 0.2, "b": None, "c": "é\u2028"}


def test_lines_read_back_and_a_torn_last_one_is_left_out(tmp_path):
    path = tmp_path / "deep" / "lines.jsonl"
    records = [{"text": "a\u2028b\x85c"}, {"text": "line\nend"}]
    write_json_lines(path, records)
    assert read_json_lines(path) == records
    with path.open("ab") as file:
        file.write(b'{"text": "to')
    assert read_json_lines(path) == records


def test_a_file_system_without_modes_takes_files(tmp_path, monkeypatch):
    """On gcsfuse, Mountpoint for S3 and some shares every chmod fails."""

    def refuse(path: object, mode: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)

    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr(os, "fchmod", refuse)
    path = tmp_path / "a.json"
    write_atomically(path, "{}")
    assert path.read_text() == "{}"
    save_tensors({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors")["a"].item() == 1.0


@pytest.mark.parametrize(
    ("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664), (0o027, 0o640)]
)
def test_new_files_follow_the_umask(umask, mode, tmp_path):
    """docs/security.md: `umask 077` restricts them to their owner."""
    before = os.umask(umask)
    try:
        (tmp_path / "run").mkdir(mode=0o777)
        path = tmp_path / "run" / "a.json"
        write_atomically(path, "{}")
        assert stat.S_IMODE(path.stat().st_mode) == mode
        write_atomically(path, "{}", mode=0o600)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        write_atomically(path, "[]")
        assert stat.S_IMODE(path.stat().st_mode) == mode, "as a new file"
        save_tensors({"a": torch.ones(1)}, tmp_path / "model.safetensors")
        assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == mode
        assert os.umask(umask) == umask, "it is as it was"
    finally:
        os.umask(before)


def test_one_line_larger_than_the_memory_is_not_read(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n')
    os.truncate(path, 3 << 30)  # sparse: no disk is used
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with raises_error("json_lines.line.too_long", path, "line 2", 67108864):
        read_json_lines(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024, "KiB"
    os.truncate(path, 5 << 30)
    with raises_error("file.too_large", path, 5368709120, 4294967296):
        read_json_lines(path)


def test_a_long_line_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 10)
    file = io.BytesIO(b"0123456789\n" + b"x" * 1000)
    assert next(bounded_lines(file)) == b"0123456789\n"
    assert next(bounded_lines(file)) == b"x" * 11
    assert file.tell() == 22


@pytest.mark.parametrize(
    ("line", "key"),
    [("{broken", "json_lines.line.not_json"), ("[1]", "json_lines.line.no_object")],
)
def test_a_bad_line_is_named(tmp_path, line, key):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n' + line + "\n")
    with raises_error(key, f"{path}, line 2: ") as error:
        read_json_lines(path)
    assert isinstance(error.value, DataError)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, "old")
    assert path.stat().st_mode & 0o777 == 0o644

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_what_could_not_be_appended_whole_is_taken_away(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"one\n")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            append(path, b"two\n")
    assert path.read_bytes() == b"one\n"
    append(path, b"three\n")
    assert path.read_bytes() == b"one\nthree\n"


def test_nothing_is_appended_through_a_link(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        append(tmp_path / "metrics.jsonl", b"{}\n")
    assert not (tmp_path / "outside").exists()
    append(tmp_path / "new", b"a")
    append(tmp_path / "new", b"b")
    assert (tmp_path / "new").read_bytes() == b"ab"


def test_a_lone_surrogate_can_be_written(tmp_path):
    write_atomically(tmp_path / "file", "a\ud800b")
    assert (tmp_path / "file").read_text() == "a?b"


def test_a_folder_is_replaced_whole(tmp_path):
    folder = tmp_path / "folder"
    new = tmp_path / "new"
    for text in ("first", "second"):
        new.mkdir()
        (new / text).write_text(text)
        replace_folder(new, folder)
        assert [file.name for file in folder.iterdir()] == [text]
        assert list(tmp_path.iterdir()) == [folder]


def test_the_old_folder_stays_where_the_new_one_is_missing(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "nowhere", folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_an_output_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert list(output_faults("--json", tmp_path / "new" / "found.json")) == []
    assert list(output_faults("--json", tmp_path / "file")) == []
    assert not (tmp_path / "new").exists()
    (fault,) = output_faults("--json", tmp_path)
    check_fault([fault], "file.is_folder", "--json", tmp_path)
    (fault,) = output_faults("--json", tmp_path / "file" / "found.json")
    check_fault([fault], "folder.not_writable", "--json", tmp_path / "file")
