"""The weight files that transformers would load are loaded, or none."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from helpers.errors import raises_error
from helpers.models import tiny_llama_folder
from helpers.policies import (
    all_logits,
    megatron_model,
    random_tokens,
    transformers_logits,
    transformers_model,
)
from safetensors.torch import load_file, save_file

from reinforce_rl.config.model_folder import no_model
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.hf_weights import export_hf_folder
from reinforce_rl.megatron.weight_files import find_weight_files
from reinforce_rl.megatron.weight_map import EMBEDDING
from reinforce_rl.reward_model.head import sha256_of_trunk

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


def assert_read_as_by_transformers(folder: Path, mesh) -> None:
    tokens = random_tokens(64, 2, 20)
    expected = transformers_logits(transformers_model(folder), tokens)
    torch.testing.assert_close(
        all_logits(megatron_model(folder, mesh), tokens), expected, atol=1e-5, rtol=0
    )


@pytest.fixture
def saved_twice(tmp_path) -> Path:
    """Return a folder with the shards of one model and the single file of a later model."""
    folder = tiny_llama_folder(tmp_path / "model", max_shard_size="20KB")
    index = (folder / INDEX).read_bytes()
    shards = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    later = tiny_llama_folder(tmp_path / "later", seed=1)
    shutil.copyfile(later / "model.safetensors", folder / "model.safetensors")
    for name, content in shards.items():
        (folder / name).write_bytes(content)
    (folder / INDEX).write_bytes(index)
    return folder


def test_saved_twice_is_read_as_by_transformers_and_reported(saved_twice, mesh, caplog):
    with caplog.at_level(logging.WARNING):
        assert_read_as_by_transformers(saved_twice, mesh)
        HFFolder(saved_twice)
    warnings = [
        record.getMessage() for record in caplog.records if str(saved_twice) in record.getMessage()
    ]
    assert len(warnings) == 1, "once, however often the folder is opened"
    assert INDEX in warnings[0]
    assert "model.safetensors, which is read" in warnings[0]


def test_an_old_index_whose_shards_are_gone_does_not_matter(saved_twice, mesh):
    for shard in saved_twice.glob("model-*.safetensors"):
        shard.unlink()
    assert_read_as_by_transformers(saved_twice, mesh)


def test_the_fingerprint_of_a_trunk_covers_the_loaded_weights(saved_twice):
    before = sha256_of_trunk(saved_twice)
    for shard in saved_twice.glob("model-*.safetensors"):
        shard.unlink()
    assert sha256_of_trunk(saved_twice) == before


def test_shards_that_the_index_does_not_name_are_left_alone(mesh, tmp_path):
    folder = tiny_llama_folder(tmp_path / "model", max_shard_size="20KB")
    other = tiny_llama_folder(tmp_path / "other", seed=1)
    shutil.copyfile(other / "model.safetensors", folder / "model-00009-of-00009.safetensors")
    shutil.copyfile(other / "model.safetensors", folder / "consolidated.safetensors")
    assert_read_as_by_transformers(folder, mesh)


def test_two_indexes_and_a_pickled_file_beside_the_weights(mesh, tmp_path):
    folder = tiny_llama_folder(tmp_path / "model", max_shard_size="20KB")
    index = {"metadata": {}, "weight_map": {NORM: "pytorch_model-00001-of-00001.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    torch.save({NORM: torch.zeros(32)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors.index.fp16.json").write_text(json.dumps(index))
    assert_read_as_by_transformers(folder, mesh)


def test_a_snapshot_of_the_hub_cache_whose_files_are_links(mesh, tmp_path):
    source = tiny_llama_folder(tmp_path / "source", max_shard_size="20KB")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copyfile(file, blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    assert_read_as_by_transformers(snapshot, mesh)


def test_the_file_that_the_config_names_comes_first(mesh, tmp_path):
    folder = tiny_llama_folder(tmp_path / "model")
    other = tiny_llama_folder(tmp_path / "other", seed=1)
    shutil.copyfile(other / "model.safetensors", folder / "step2.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "transformers_weights": "step2.safetensors"})
    )
    assert_read_as_by_transformers(folder, mesh)
    exported = export_hf_folder(megatron_model(folder, mesh), folder, tmp_path / "exported")
    assert_read_as_by_transformers(exported, mesh)
    for named in ("gone.safetensors", "../other/model.safetensors", "tokenizer.json", 5):
        (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": named}))
        with raises_error("model.config.other_weights", "transformers_weights", repr(named)):
            HFFolder(folder)


class TestTensorsInTwoShards:
    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        return tiny_llama_folder(tmp_path / "model", max_shard_size="20KB")

    @staticmethod
    def add_copy(folder: Path, change: float) -> tuple[str, str]:
        """Copy the norm, plus `change`, to a second shard; return both file names."""
        holder = json.loads((folder / INDEX).read_text())["weight_map"][NORM]
        other = next(path for path in sorted(folder.glob("*.safetensors")) if path.name != holder)
        tensors = load_file(other)
        tensors[NORM] = load_file(folder / holder)[NORM] + change
        save_file(tensors, other, metadata={"format": "pt"})
        return holder, other.name

    def test_equal_duplicates_are_read(self, folder, mesh):
        self.add_copy(folder, 0.0)
        assert_read_as_by_transformers(folder, mesh)

    def test_different_duplicates_are_refused_with_both_files(self, folder, mesh):
        holder, other = self.add_copy(folder, 1.0)
        with raises_error("model.weights.not_of_config", NORM, holder, other):
            megatron_model(folder, mesh)

    def test_different_duplicates_that_the_index_omits(self, folder, mesh):
        self.add_copy(folder, 1.0)
        index = json.loads((folder / INDEX).read_text())
        del index["weight_map"][NORM]
        (folder / INDEX).write_text(json.dumps(index))
        with raises_error("model.weights.not_of_config", NORM):
            megatron_model(folder, mesh)


@pytest.mark.parametrize(
    ("file", "advice"),
    [
        ("pytorch_model.bin", "save_pretrained"),
        ("pytorch_model-00001-of-00002.bin", "save_pretrained"),
        ("consolidated.safetensors", "model.safetensors"),
        ("consolidated.00.pth", "model.safetensors"),
        ("model-q4.gguf", "llama.cpp"),
        ("model.fp16.safetensors", f"its index to {INDEX}"),
    ],
)
def test_weights_in_another_form_are_named(file, advice, tmp_path):
    folder = tiny_llama_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / file)
    (folder / "training_args.bin").write_bytes(b"no weights")
    with raises_error("model.weights.missing", f"{file} ", advice) as caught:
        find_weight_files(folder)
    assert "training_args" not in str(caught.value)


def test_an_index_without_tensors(tmp_path):
    folder = tiny_llama_folder(tmp_path, max_shard_size="20KB")
    (folder / INDEX).write_text('{"weight_map": {}}')
    with raises_error("model.index.empty", folder / INDEX, "weight_map"):
        HFFolder(folder)


class TestAdapters:
    @pytest.fixture
    def with_adapter(self, tmp_path) -> Path:
        """Return a model with a PEFT adapter in its folder.

        The adapter changes transformers' results.
        """
        from peft import LoraConfig, get_peft_model

        folder = tiny_llama_folder(tmp_path / "model")
        model = get_peft_model(
            transformers_model(folder), LoraConfig(r=2, target_modules=["q_proj"])
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.ones_(parameter)
        model.save_pretrained(tmp_path / "adapter")
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copyfile(tmp_path / "adapter" / name, folder / name)
        return folder

    def test_beside_the_weights_both_readings_are_named(self, with_adapter, tmp_path):
        tokens = random_tokens(64, 1, 10)
        together = transformers_logits(transformers_model(with_adapter), tokens)
        (with_adapter / "adapter_config.json").rename(tmp_path / "away.json")
        assert not torch.equal(
            transformers_logits(transformers_model(with_adapter), tokens), together
        )
        (tmp_path / "away.json").rename(with_adapter / "adapter_config.json")
        values = (with_adapter, "adapter_config.json", "merge_and_unload")
        with raises_error("model.folder.adapter", *values):
            HFFolder(with_adapter)

    def test_alone_it_is_no_model(self, with_adapter, tmp_path):
        model = with_adapter  # the adapter's base model
        with raises_error("model.folder.no_model", "merge_and_unload", model):
            Architecture.from_folder(tmp_path / "adapter")
        with raises_error("model.folder.no_model", no_model(tmp_path / "adapter")):
            HFFolder(tmp_path / "adapter")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_a_folder_of_the_bare_decoder_has_other_names(tied, max_shard_size, mesh, tmp_path):
    """Weights as `LlamaModel.save_pretrained` writes them.

    The output layer is stored beside them if it is not tied.
    """
    folder = tiny_llama_folder(tmp_path, tied=tied, max_shard_size=max_shard_size)
    for path in folder.glob("*.safetensors"):
        tensors = {name.removeprefix("model."): value for name, value in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] = {
            name.removeprefix("model."): file for name, file in index["weight_map"].items()
        }
        (folder / INDEX).write_text(json.dumps(index))
    assert_read_as_by_transformers(folder, mesh)


@pytest.mark.parametrize(
    "prefix",
    ["_orig_mod.model.", "module.model.", "base_model.model.model.", "model.language_model."],
)
def test_other_prefixes_are_refused_in_one_sentence(prefix, mesh, tmp_path):
    """transformers would ignore such tensors and initialise the weights randomly."""
    folder = tiny_llama_folder(tmp_path)
    tensors = {
        name.replace("model.", prefix, 1): value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = (folder, f" {prefix}embed_tokens.weight ", EMBEDDING, "save_pretrained")
    with raises_error("model.weights.wrapped", *values) as caught:
        megatron_model(folder, mesh)
    assert "\n" not in str(caught.value)


def test_an_index_whose_files_are_gone(tmp_path):
    folder = tiny_llama_folder(tmp_path, max_shard_size="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    shards[1].unlink()
    with raises_error("model.index.file_missing", shards[1].name):
        find_weight_files(folder)


def test_a_pointer_of_git_lfs(tmp_path):
    folder = tiny_llama_folder(tmp_path)
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 12345678\n"
    (folder / "model.safetensors").write_text(text)
    with raises_error("model.weights.lfs_pointer", folder / "model.safetensors", "git lfs pull"):
        HFFolder(folder)
