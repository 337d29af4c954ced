"""What torch would unpack to many times its size is refused before."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reinforce_rl.errors import CheckpointError
from reinforce_rl.megatron.torch_archive import check_torch_archive, check_torch_file
from reinforce_rl.utils.untrusted_files import UnreadableFileError

STATE = {"tensor": torch.arange(1000), "numbers": [1, 2.5, None], "text": "a"}


def saved(value: Any = STATE, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def repacked(
    change: Callable[[zipfile.ZipFile, zipfile.ZipInfo, bytes], None], kind: int = zipfile.ZIP_STORED
) -> bytes:
    """A saved state, each entry of which `change` writes into another archive."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved())) as old, zipfile.ZipFile(target, "w", kind) as new:
        for entry in old.infolist():
            change(new, entry, old.read(entry))
    return target.getvalue()


def compressed(kind: int) -> bytes:
    return repacked(lambda archive, entry, data: archive.writestr(entry.filename, data), kind)


def with_pickle(pickled: bytes) -> bytes:
    def change(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, data: bytes) -> None:
        archive.writestr(entry.filename, pickled if entry.filename.endswith("data.pkl") else data)

    return repacked(change)


def endless_pickle() -> bytes:
    key: Any = 1
    for _ in range(60):
        key = (key, key)
    return pickle.dumps(key, 2)


def shared_bytes() -> bytes:
    """Each of a hundred entries is the same kilobyte of the file."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("archive/data/0", b"x" * 100_000)
        first = archive.infolist()[0]
        for number in range(1, 100):
            entry = zipfile.ZipInfo(f"archive/data/{number}")
            entry.header_offset, entry.CRC = first.header_offset, first.CRC
            entry.file_size = entry.compress_size = first.file_size
            archive.filelist.append(entry)
    return target.getvalue()


HOSTILE = {
    "deflated": (compressed(zipfile.ZIP_DEFLATED), "compressed"),
    "lzma": (compressed(zipfile.ZIP_LZMA), "compressed"),
    "shared bytes": (shared_bytes(), "its entries have 10000000 bytes"),
    "a key of itself": (with_pickle(endless_pickle()), "would not end"),
    "a damaged pickle": (with_pickle(b"\x80\x02h\x05."), "damaged"),
    "torch's old format": (saved(_use_new_zipfile_serialization=False), "no archive"),
    "a pickle": (pickle.dumps(STATE["numbers"]), "no archive"),
    "nothing": (b"", "no archive"),
    "cut": (saved()[:-10], "no archive"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_is_refused(tmp_path: Path, kind: str) -> None:
    content, said = HOSTILE[kind]
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"a\.pt is not read: .*{said}"):
        check_torch_file(path)


@pytest.mark.parametrize("name", ["deflated", "a key of itself"])
def test_torch_would_read_it(name: str) -> None:
    """So that the test above is of what can happen."""
    content = HOSTILE[name][0]
    if name == "deflated":
        assert torch.equal(torch.load(io.BytesIO(content), weights_only=True)["tensor"], STATE["tensor"])
    else:
        assert len(torch.load(io.BytesIO(content), weights_only=True)) == 2


def test_what_torch_saves_passes(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(saved())
    check_torch_file(path, within=tmp_path)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "link.pt").symlink_to(path)
    with pytest.raises(UnreadableFileError):
        check_torch_file(tmp_path / "inner" / "link.pt", within=tmp_path / "inner")


def test_a_part_of_a_file_is_checked_by_itself() -> None:
    """As of a checkpoint, whose files hold many of them one after the other."""
    good = saved()
    bad = compressed(zipfile.ZIP_DEFLATED)
    file = io.BytesIO(good + bad + good)
    check_torch_archive(file, 0, len(good))
    check_torch_archive(file, len(good) + len(bad), len(good))
    with pytest.raises(CheckpointError, match="compressed"):
        check_torch_archive(file, len(good), len(bad))
    with pytest.raises(CheckpointError, match="no archive"):
        check_torch_archive(file, 5, 100)
    with pytest.raises(CheckpointError):
        check_torch_archive(file, -5, 100)
