"""Only torch's own classes may describe a foreign checkpoint; otherwise it is not loaded."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.archives import compressed, equal_hashes, pickle_of_key
from helpers.errors import raises_error
from helpers.models import tiny_llama_folder
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from reinforce_rl.megatron.convert import to_hf, to_megatron
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.stored_metadata import FORMAT_FILE, METADATA_FILE, check_stored_metadata


def plain_tensors(checkpoint: Path) -> dict[str, Any]:
    """Check a checkpoint, then return the tensors of its model by name."""
    folder = checkpoint / "model"
    check_stored_metadata(folder)
    return dist_checkpointing.load_plain_tensors(str(folder))


class Bomb:
    """Creates a folder `bomb` when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("bomb",)


@pytest.fixture(scope="module")
def checkpoint(mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    return to_megatron(tiny_llama_folder(folder / "hf", vocab_size=32), folder / "checkpoint", mesh)


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to corrupt; the test runs in an empty folder, in which nothing may be created."""
    shutil.copytree(checkpoint, tmp_path / "copy")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "copy"


def read(model: Path) -> Metadata:
    return pickle.loads((model / METADATA_FILE).read_bytes())


def write(model: Path, value: object) -> None:
    (model / METADATA_FILE).write_bytes(pickle.dumps(value))


def test_a_checkpoint_of_this_program_is_read(copy: Path) -> None:
    check_stored_metadata(copy / "model")
    assert plain_tensors(copy)["embedding.word_embeddings.weight"].dtype == torch.float32


def test_no_checkpoint_is_read_where_torch_would_execute_code(
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variable = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    monkeypatch.setenv(variable, "1")
    with raises_error("checkpoint.environment.runs_code", variable, "'1'") as caught:
        plain_tensors(copy)
    assert str(copy) not in str(caught.value), "the checkpoint is not to blame"


def spoil_metadata(model: Path) -> None:
    write(model, Bomb())


def spoil_a_field(model: Path) -> None:
    metadata = read(model)
    metadata.planner_data = Bomb()
    write(model, metadata)


def spoil_by_torch(model: Path) -> None:
    """Name a function of a module some of whose names are allowed."""

    class Saves:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch.save, ({}, "bomb")

    write(model, Saves())


def add_bytes(model: Path) -> None:
    """torch unpickles the bytes of such an entry."""
    metadata = read(model)
    metadata.state_dict_metadata["embedding.word_embeddings.weight"] = BytesStorageMetadata()
    write(model, metadata)


def lead_outside(model: Path) -> None:
    metadata = read(model)
    for info in metadata.storage_data.values():
        info.relative_path = "../../here/file"
    (model.parents[1] / "here" / "file").write_bytes(b"x" * 10_000_000)
    write(model, metadata)


def lead_to_a_link(model: Path) -> None:
    (file,) = model.glob("*_0.distcp")
    file.rename(model.parent / "moved")
    file.symlink_to(model.parent / "moved")


def lead_to_a_pipe(model: Path) -> None:
    (file,) = model.glob("*_0.distcp")
    file.unlink()
    os.mkfifo(file)


def describe_more(model: Path) -> None:
    metadata = read(model)
    tensor = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    tensor.size = torch.Size((1 << 40, 1 << 10))
    write(model, metadata)


def describe_less(model: Path) -> None:
    """A negative size would cancel a huge one."""
    metadata = read(model)
    names = list(metadata.state_dict_metadata)
    metadata.state_dict_metadata[names[0]].size = torch.Size((-(10**9),))
    metadata.state_dict_metadata[names[1]].size = torch.Size((10**9,))
    write(model, metadata)


def describe_no_tensor(model: Path) -> None:
    metadata = read(model)
    chunk = ChunkStorageMetadata(torch.Size([1]), torch.Size([1]))
    tensor = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    vars(chunk).update(size=tensor.size, properties=tensor.properties)
    metadata.state_dict_metadata["a"] = chunk
    write(model, metadata)


def store_no_files(model: Path) -> None:
    metadata = read(model)
    metadata.storage_data = [1]
    write(model, metadata)


def name_a_list(model: Path) -> None:
    metadata = read(model)
    next(iter(metadata.storage_data.values())).relative_path = ["a"]
    write(model, metadata)


def another_format(model: Path) -> None:
    path = model / FORMAT_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "sharded_backend": "zarr"}))


def a_deep_format(model: Path) -> None:
    (model / FORMAT_FILE).write_text("[" * 60_000)


def a_pipe_as_format(model: Path) -> None:
    (model / FORMAT_FILE).unlink()
    os.mkfifo(model / FORMAT_FILE)


def a_pipe_as_metadata(model: Path) -> None:
    (model / METADATA_FILE).unlink()
    os.mkfifo(model / METADATA_FILE)


def cut(model: Path) -> None:
    path = model / METADATA_FILE
    path.write_bytes(path.read_bytes()[:-20])


def a_key_of_itself(model: Path) -> None:
    (model / METADATA_FILE).write_bytes(pickle_of_key(60))


def compressed_values(model: Path) -> None:
    (model / "common.pt").write_bytes(compressed((model / "common.pt").read_bytes()))


def compressed_tensor(model: Path) -> None:
    metadata = read(model)
    part = list(metadata.storage_data.values())[1]
    path = model / part.relative_path
    content = path.read_bytes()
    packed = compressed(content[part.offset : part.offset + part.length])
    part.offset = len(content)
    part.length = len(packed)
    path.write_bytes(content + packed)
    write(model, metadata)


def transformed_tensor(model: Path) -> None:
    metadata = read(model)
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]
    write(model, metadata)


def overlapping_parts(model: Path) -> None:
    metadata = read(model)
    first, second = list(metadata.storage_data.values())[:2]
    second.offset = first.offset
    second.length = first.length
    write(model, metadata)


def a_text_as_type(model: Path) -> None:
    """This text would be repeated 150,000,000 times."""
    metadata = read(model)
    tensor = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    chunk = ChunkStorageMetadata(torch.Size([1]), torch.Size([1]))
    vars(chunk).update(itemsize="x")
    # TensorProperties has its own pickle form, whose types are checked.
    properties = ChunkStorageMetadata(torch.Size([1]), torch.Size([1]))
    vars(properties).update(dtype=chunk)
    tensor.properties = properties
    tensor.size = torch.Size([150_000_000])
    write(model, metadata)


def many_dimensions(model: Path) -> None:
    metadata = read(model)
    metadata.state_dict_metadata["embedding.word_embeddings.weight"].size = torch.Size([1] * 17)
    write(model, metadata)


def a_list_as_shape(model: Path) -> None:
    metadata = read(model)
    tensor = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    tensor.size = list(tensor.size)
    write(model, metadata)


def linked_values(model: Path) -> None:
    (model / "common.pt").rename(model.parents[1] / "here" / "file")
    (model / "common.pt").symlink_to(model.parents[1] / "here" / "file")


def equal_keys(model: Path) -> None:
    metadata = read(model)
    part = next(iter(metadata.storage_data.values()))
    for pair in equal_hashes(2):
        metadata.storage_data[MetadataIndex("a", torch.Size(pair))] = part
    write(model, metadata)


def a_number_as_name(model: Path) -> None:
    """The hash of a string is random."""
    metadata = read(model)
    part = next(iter(metadata.storage_data.values()))
    metadata.storage_data[MetadataIndex(1, torch.Size([2]))] = part  # type: ignore[arg-type]
    write(model, metadata)


def tuples_as_files(model: Path) -> None:
    metadata = read(model)
    next(iter(metadata.storage_data.values())).relative_path = (1, 2)
    write(model, metadata)


def linked_model(model: Path) -> None:
    model.rename(model.parents[1] / "here" / "model")
    model.symlink_to(model.parents[1] / "here" / "model")


def name_a_function_of_torch(model: Path) -> None:
    """Write a pickle that names a function of torch.

    Pickle names the module that defines a function; torch also exports some under its own name.
    """
    (model / METADATA_FILE).write_bytes(b"ctorch\nload\n(tR.")


def another_object(model: Path) -> None:
    write(model, {"state_dict_metadata": {}})


# Each with the key of its error and a value in the message.
SPOILT: list[tuple[Callable[[Path], None], str, object]] = [
    (spoil_metadata, "checkpoint.description.other_class", f"{os.mkdir.__module__}.mkdir"),
    (spoil_a_field, "checkpoint.description.other_class", f"{os.mkdir.__module__}.mkdir"),
    (spoil_by_torch, "checkpoint.description.other_class", "torch.serialization.save"),
    (add_bytes, "checkpoint.description.other_class", BytesStorageMetadata.__name__),
    (lead_outside, "checkpoint.description.file_elsewhere", "'../../here/file'"),
    (lead_to_a_link, "checkpoint.description.file_elsewhere", "_0.distcp"),
    (lead_to_a_pipe, "checkpoint.description.file_elsewhere", "_0.distcp"),
    (describe_more, "checkpoint.description.too_large", "bytes"),
    (describe_less, "checkpoint.description.tensor_shape", -(10**9)),
    (describe_no_tensor, "checkpoint.description.no_tensor", "'a'"),
    (store_no_files, "checkpoint.description.not_readable", "list"),
    (name_a_list, "checkpoint.description.file_no_text", ["a"]),
    (another_format, "checkpoint.format.another", "'zarr'"),
    (a_deep_format, "checkpoint.format.not_readable", FORMAT_FILE),
    (a_pipe_as_format, "checkpoint.file.not_regular", FORMAT_FILE),
    (a_pipe_as_metadata, "checkpoint.file.not_regular", METADATA_FILE),
    (cut, "checkpoint.pickle.damaged", ""),
    (a_key_of_itself, "checkpoint.pickle.endless", ""),
    (compressed_values, "checkpoint.archive.compressed", "common.pt"),
    (compressed_tensor, "checkpoint.archive.compressed", ".distcp"),
    (transformed_tensor, "checkpoint.part.compressed", ".distcp"),
    (linked_values, "file.link.leads_out", "here/file"),
    (overlapping_parts, "checkpoint.part.overlaps", ".distcp"),
    (a_text_as_type, "checkpoint.description.tensor_no_type", "embedding.word_embeddings.weight"),
    (many_dimensions, "checkpoint.description.tensor_shape", 17),
    (a_list_as_shape, "checkpoint.description.tensor_no_type", "embedding.word_embeddings.weight"),
    (linked_model, "folder.link.leads_out", "here/model"),
    (another_object, "checkpoint.description.another_object", METADATA_FILE),
    (name_a_function_of_torch, "checkpoint.description.other_class", "torch.load"),
]


IDS = [spoil.__name__ for spoil, _, _ in SPOILT]


@pytest.mark.parametrize(("spoil", "key", "value"), SPOILT, ids=IDS)
def test_another_one_is_refused_and_runs_nothing(
    spoil: Callable[[Path], None],
    key: str,
    value: object,
    copy: Path,
    mesh: Mesh,
) -> None:
    spoil(copy / "model")
    there = sorted(Path.cwd().iterdir())
    with raises_error(key, copy / "model", value):
        plain_tensors(copy)
    # A folder only counts as a checkpoint if it has a regular file of this name.
    key_of_to_hf = "convert.folder.no_checkpoint" if spoil is a_pipe_as_format else key
    with raises_error(key_of_to_hf, value):
        to_hf(copy, copy.parent / "out", mesh, source=copy)
    assert sorted(Path.cwd().iterdir()) == there


@pytest.mark.parametrize(
    ("spoil", "key", "value"),
    [
        (equal_keys, "checkpoint.description.same_hash", ""),
        (a_number_as_name, "checkpoint.description.name_no_text", int.__name__),
        (tuples_as_files, "checkpoint.description.file_no_text", "'(1, 2)'"),
    ],
)
def test_values_of_equal_hashes_are_refused_before_they_are_compared(
    spoil: Callable[[Path], None],
    key: str,
    value: str,
    copy: Path,
) -> None:
    spoil(copy / "model")
    with raises_error(key, value):
        check_stored_metadata(copy / "model")


def test_the_bomb_goes_off_without_the_check(copy: Path) -> None:
    """Proves that the other tests can fail."""
    spoil_metadata(copy / "model")
    read(copy / "model")
    assert Path("bomb").is_dir()
