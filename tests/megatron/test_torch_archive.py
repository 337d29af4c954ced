"""Archives that torch would unpack to many times their size are rejected before loading."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.archives import doubled, pickle_of_key
from helpers.errors import raises_error

from reinforce_rl.megatron.torch_archive import check_torch_archive, check_torch_file
from reinforce_rl.utils.untrusted_files import UnreadableFileError

END = struct.Struct("<4s4H2IH")
# A call that allocates two gigabytes.
BYTEARRAY = b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R."
STATE: dict[str, Any] = {"tensor": torch.arange(1000), "numbers": [1, 2.5, None], "text": "a"}


def saved(value: Any = STATE, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def repacked(
    change: Callable[[zipfile.ZipFile, zipfile.ZipInfo, bytes], None],
    kind: int = zipfile.ZIP_STORED,
) -> bytes:
    """Write a saved state to another archive, with each entry passed through `change`."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved())) as old, zipfile.ZipFile(target, "w", kind) as new:
        for entry in old.infolist():
            change(new, entry, old.read(entry))
    return target.getvalue()


def packed(kind: int) -> bytes:
    return repacked(lambda archive, entry, data: archive.writestr(entry.filename, data), kind)


def with_pickle(pickled: bytes) -> bytes:
    def change(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, data: bytes) -> None:
        archive.writestr(entry.filename, pickled if entry.filename.endswith("data.pkl") else data)

    return repacked(change)


def in_capitals() -> bytes:
    """torch also accepts this name for data.pkl."""

    def change(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, data: bytes) -> None:
        if entry.filename.endswith("data.pkl"):
            archive.writestr(entry.filename.upper(), pickle_of_key(60))
        else:
            archive.writestr(entry.filename, data)

    return repacked(change)


def twice_named() -> bytes:
    def change(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, data: bytes) -> None:
        archive.writestr(entry.filename, data)
        if entry.filename.endswith("data.pkl"):
            archive.writestr(entry.filename.upper(), data)

    return repacked(change)


def two_directories() -> bytes:
    """Return an archive with two directories.

    The end record names the directory of the first archive, whose entries are compressed. Python
    reads the second.
    """
    first = packed(zipfile.ZIP_DEFLATED)
    second = repacked(lambda archive, entry, data: archive.writestr(entry.filename, b""))
    fields = list(END.unpack(second[-END.size :]))
    first_fields = END.unpack(first[-END.size :])
    fields[-2] = first_fields[-2]
    return first[: -END.size] + second[: -END.size] + END.pack(*fields)


def with_comment() -> bytes:
    """Its comment ends like an archive."""
    content = bytearray(packed(zipfile.ZIP_STORED))
    comment = packed(zipfile.ZIP_STORED)[-END.size :]
    content[-2:] = len(comment).to_bytes(2, "little")
    return bytes(content) + comment[:-2] + b"\1\0"


def shared_bytes() -> bytes:
    """A hundred entries all name the same kilobyte of the file."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("archive/data/0", b"x" * 100_000)
        first = archive.infolist()[0]
        for number in range(1, 100):
            entry = zipfile.ZipInfo(f"archive/data/{number}")
            entry.header_offset = first.header_offset
            entry.CRC = first.CRC
            entry.file_size = first.file_size
            entry.compress_size = first.file_size
            archive.filelist.append(entry)
    return target.getvalue()


def old_format_in_front() -> bytes:
    """torch reads a stream of its old format, Python the archive behind it."""
    target = io.BytesIO(saved({"other": 1}, _use_new_zipfile_serialization=False))
    with zipfile.ZipFile(io.BytesIO(saved())) as old, zipfile.ZipFile(target, "a") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return target.getvalue()


def with_a_gap() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("archive/first", b"x")
        archive.start_dir += 100
        archive.writestr("archive/second", b"x")
    return target.getvalue()


def directory_behind_a_gap() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("archive/first", b"x")
        archive.start_dir += 100
    return target.getvalue()


def entry_without_header() -> bytes:
    content = bytearray(packed(zipfile.ZIP_STORED))
    second = content.index(b"PK\3\4", 4)
    content[second] = 0
    return bytes(content)


def two_places() -> bytes:
    """Of two size fields, Python uses one and torch the other."""
    sizes = struct.pack("<2HQ", 1, 8, 0xFFFFFFFF)
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("archive/first", b"x")
        archive.infolist()[0].extra = sizes + sizes
    return target.getvalue()


def name_of_a_tuple() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("archive/data/(1, 2)", b"x")
    return target.getvalue()


# By fault: the bytes, the key of the error and values in its message.
HOSTILE: dict[str, tuple[bytes, str, list[Any]]] = {
    "deflated": (packed(zipfile.ZIP_DEFLATED), "compressed", []),
    "lzma": (packed(zipfile.ZIP_LZMA), "compressed", []),
    "shared bytes": (shared_bytes(), "entry_elsewhere", ["byte 0;", 100044]),
    "the old format in front": (old_format_in_front(), "entry_elsewhere", ["byte 0"]),
    "a gap": (with_a_gap(), "entry_elsewhere", ["'archive/second'", 144, "byte 44"]),
    "a gap at its end": (directory_behind_a_gap(), "directory_elsewhere", [144, "byte 44"]),
    "no header": (entry_without_header(), "not_readable", ["header"]),
    "two places": (two_places(), "two_sizes", ["'archive/first'"]),
    "a name of a tuple": (name_of_a_tuple(), "other_name", ["'archive/data/(1, 2)'"]),
    "a key of itself": (with_pickle(pickle_of_key(60)), "endless", []),
    "capitals": (in_capitals(), "endless", []),
    "a name twice": (twice_named(), "same_name", []),
    "two directories": (two_directories(), "not_readable", ["directory is elsewhere"]),
    "a prefix": (b"x" * 100 + saved(), "not_readable", ["zip64"]),
    "a prefix without zip64": (
        b"x" * 100 + packed(zipfile.ZIP_STORED),
        "not_readable",
        ["directory is elsewhere"],
    ),
    "something behind it": (saved() + b"x", "not_readable", ["behind its directory"]),
    "a comment": (with_comment(), "not_readable", ["behind its directory"]),
    "memory": (with_pickle(BYTEARRAY), "other_class", ["'__builtin__ bytearray'"]),
    "a function by the stack": (
        with_pickle(pickle.dumps(bytearray, 4)),
        "other_instruction",
        ["STACK_GLOBAL"],
    ),
    "an instance": (with_pickle(b"(ibuiltins\nobject\n."), "other_instruction", ["INST"]),
    "a damaged pickle": (with_pickle(b"\x80\x02h\x05."), "damaged", []),
    "torch's old format": (saved(_use_new_zipfile_serialization=False), "not_readable", []),
    "a pickle": (pickle.dumps(STATE["numbers"]), "not_readable", []),
    "nothing": (b"", "not_readable", []),
    "cut": (saved()[:-10], "not_readable", []),
}
OF_PICKLES = ("endless", "damaged")


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_is_refused(tmp_path: Path, kind: str) -> None:
    content, fault, values = HOSTILE[kind]
    area = "checkpoint.pickle" if fault in OF_PICKLES else "checkpoint.archive"
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    with raises_error(f"{area}.{fault}", path.name, *values):
        check_torch_file(path)


@pytest.mark.parametrize("name", ["deflated", "two directories"])
def test_torch_would_unpack_it(name: str) -> None:
    content = HOSTILE[name][0]
    assert torch.equal(
        torch.load(io.BytesIO(content), weights_only=True)["tensor"], STATE["tensor"]
    )


def test_torch_would_read_what_is_in_front() -> None:
    content = HOSTILE["the old format in front"][0]
    assert torch.load(io.BytesIO(content), weights_only=True) == {"other": 1}


@pytest.mark.parametrize("value", ["1", "TRUE", "yes", "y"])
def test_nothing_is_read_where_torch_would_execute_code(
    value: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """megatron calls `torch.load` without `weights_only`."""
    content = saved()
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", value)
    variable = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    with raises_error("checkpoint.environment.runs_code", variable, repr(value)):
        check_torch_archive(io.BytesIO(content), 0, len(content))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0")
    check_torch_archive(io.BytesIO(content), 0, len(content))


def test_torch_would_hash_the_key() -> None:
    content = with_pickle(pickle_of_key(3))
    assert torch.load(io.BytesIO(content), weights_only=True) == {doubled(1, 3): 1}


def test_what_torch_saves_passes(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for value in (
        STATE,
        STATE["tensor"].bfloat16(),
        [torch.Size([2]), torch.ones(2, dtype=torch.bool)],
        {},
    ):
        path.write_bytes(saved(value))
        check_torch_file(path, within=tmp_path)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "link.pt").symlink_to(path)
    with pytest.raises(UnreadableFileError):
        check_torch_file(tmp_path / "inner" / "link.pt", within=tmp_path / "inner")


def test_a_part_of_a_file_is_checked_by_itself() -> None:
    """For instance a checkpoint, whose files contain many archives in sequence."""
    good = saved()
    bad = packed(zipfile.ZIP_DEFLATED)
    file = io.BytesIO(good + bad + good)
    check_torch_archive(file, 0, len(good))
    check_torch_archive(file, len(good) + len(bad), len(good))
    with raises_error("checkpoint.archive.compressed"):
        check_torch_archive(file, len(good), len(bad))
    with raises_error("checkpoint.archive.not_readable"):
        check_torch_archive(file, 5, 100)
    with raises_error("checkpoint.archive.not_readable"):
        check_torch_archive(file, -5, 100)
