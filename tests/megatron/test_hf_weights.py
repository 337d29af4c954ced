"""Weights from a Hugging Face folder and back, on one rank and two.

Logits equal those of transformers. Errors are clear.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
from pathlib import Path

import pytest
import torch
from helpers.errors import check_error, raises_error
from helpers.models import smollm2_folder, tiny_llama_folder
from helpers.policies import (
    all_logits,
    megatron_model,
    random_tokens,
    transformers_logits,
    transformers_model,
)
from helpers.ranks import call_on_ranks
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reinforce_rl.errors import CheckpointError
from reinforce_rl.megatron import hf_weights
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.hf_weights import export_hf_folder, load_hf_weights
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.weight_map import EMBEDDING, weight_map

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES = {
    "tied, grouped": {},
    "untied, odd vocabulary": {"tied": False, "vocab_size": 63},
    "tied, odd vocabulary": {"vocab_size": 63},
    "multi-head": {"heads": 4, "groups": 4},
    "multi-query": {"heads": 4, "groups": 1},
    "SmolLM2's 9 heads in 3 groups": {"heads": 9, "groups": 3, "hidden": 36},
    "head_dim is not hidden / heads": {"head_dim": 16},
    "llama3 scaling": {"rope_scaling": LLAMA3_SCALING},
    "linear scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "several files": {"max_shard_size": "20KB"},
}
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
TEXT = (
    "The tide comes in twice a day because the Moon pulls at the sea, and the Earth turns below it."
)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers_both_ways(shape, mesh, tmp_path):
    folder = tiny_llama_folder(tmp_path / "source", **shape)
    tokens = random_tokens(shape.get("vocab_size", 64), 2, 100)
    lm = megatron_model(folder, mesh)
    theirs = transformers_model(folder)
    expected = transformers_logits(theirs, tokens)
    assert expected.std() > 0.5  # otherwise closeness would prove little
    torch.testing.assert_close(all_logits(lm, tokens), expected, atol=1e-5, rtol=0)

    exported = export_hf_folder(lm, folder, tmp_path / "exported")
    again = transformers_model(exported)
    assert torch.equal(transformers_logits(again, tokens), expected)
    assert set(again.state_dict()) == set(theirs.state_dict())
    assert not list(tmp_path.glob("*.part"))


def test_the_scaling_of_llama3_changes_the_frequencies(mesh, tmp_path):
    plain = megatron_model(tiny_llama_folder(tmp_path / "plain"), mesh)
    scaled = megatron_model(
        tiny_llama_folder(tmp_path / "scaled", rope_scaling=LLAMA3_SCALING), mesh
    )
    tokens = random_tokens(64, 1, 100)
    assert (all_logits(plain, tokens) - all_logits(scaled, tokens)).abs().max() > 0.01


def test_config_of_older_and_newer_transformers_is_read_alike(mesh, tmp_path):
    """transformers 5 moved `rope_theta` and `rope_scaling`, and renamed `torch_dtype`.

    In older versions both RoPE keys are at the top level.
    """
    folder = tiny_llama_folder(tmp_path / "source", rope_scaling=LLAMA3_SCALING)
    tokens = random_tokens(64, 2, 100)
    expected = all_logits(megatron_model(folder, mesh), tokens)
    values = json.loads((folder / "config.json").read_text())
    common = {
        key: value
        for key, value in values.items()
        if not key.startswith("rope_") and "dtype" not in key
    }
    theta = 10_000.0  # transformers' default, which the helper does not change
    older = {"rope_theta": theta, "rope_scaling": LLAMA3_SCALING, "torch_dtype": "float32"}
    newer = {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": theta}, "dtype": "float32"}
    for form in (older, newer):
        (folder / "config.json").write_text(json.dumps({**common, **form}))
        assert torch.equal(all_logits(megatron_model(folder, mesh), tokens), expected)


def test_exported_folder_has_the_tokenizer_and_replaces_an_older_one(mesh, tmp_path):
    from transformers import AutoTokenizer

    folder = tiny_llama_folder(tmp_path / "source")
    (folder / "trainer_state.json").write_text("{}")  # not part of the model: it is not exported
    out = tmp_path / "out"
    out.mkdir()
    (out / "stale.safetensors").write_text("old")
    export_hf_folder(megatron_model(folder, mesh), folder, out)
    assert not (out / "stale.safetensors").exists()
    assert not (out / "trainer_state.json").exists()
    assert (out / "model.safetensors").stat().st_mode & 0o444 == 0o444
    assert (
        AutoTokenizer.from_pretrained(out).get_vocab()
        == AutoTokenizer.from_pretrained(folder).get_vocab()
    )
    assert (
        AutoTokenizer.from_pretrained(out).chat_template
        == AutoTokenizer.from_pretrained(folder).chat_template
    )


def test_an_export_has_every_template_and_leaves_folders_alone(mesh, tmp_path):
    """`save_pretrained` writes named templates to a folder.

    A subfolder may have the name of a tokenizer's file.
    """
    from transformers import AutoTokenizer

    source = tiny_llama_folder(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(source)
    for name in ("tokenizer_backup", "vocab_old", "chat_templates"):
        (source / name).mkdir()
        (source / name / "tokenizer.json").write_text("{}")
    out = export_hf_folder(megatron_model(source, mesh), source, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    names = [path.name for path in out.iterdir() if path.is_dir()]
    assert names == ["additional_chat_templates"]


def test_export_of_a_bf16_checkpoint_trained_in_fp32_loads_as_fp32(mesh, tmp_path):
    """transformers takes the dtype from config.json.

    bfloat16 there would round the trained weights.
    """
    from transformers import AutoModelForCausalLM

    folder = tiny_llama_folder(tmp_path / "source")
    lm = megatron_model(folder, mesh)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    for keys in (
        {"dtype": "bfloat16"},
        {"torch_dtype": "bfloat16"},
        {"torch_dtype": "bfloat16", "dtype": "bfloat16"},
    ):
        (folder / "config.json").write_text(json.dumps({**config, **keys}))
        out = export_hf_folder(lm, folder, tmp_path / "out")
        assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.float32
        written = json.loads((out / "config.json").read_text())
        assert {key: written[key] for key in keys} == dict.fromkeys(keys, "float32")


@pytest.mark.parametrize(
    ("configured", "generation", "expected"),
    [
        (2, None, 2),
        (7, None, [2, 7]),
        (2, {"eos_token_id": [2, 5], "temperature": 0.7}, [2, 5]),
        (9, {"eos_token_id": 5, "temperature": 0.7}, [2, 5, 9]),
        (2, {"temperature": 0.7}, 2),
        (2, {"eos_token_id": [2, 999]}, [2, 999]),
    ],
)
def test_export_ends_in_generate_where_training_ended(
    configured, generation, expected, mesh, tmp_path
):
    """The tokenizer's end token is 2; training ends responses at all end tokens of the folder."""
    from transformers import AutoModelForCausalLM

    folder = tiny_llama_folder(tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": configured}))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(
            json.dumps({"do_sample": True, **generation})
        )
    out = export_hf_folder(megatron_model(folder, mesh), folder, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(out).generation_config
    ids = [
        token for token in torch.tensor(exported.eos_token_id).reshape(-1).tolist() if token < 64
    ]
    assert ids == [token for token in torch.tensor(expected).reshape(-1).tolist() if token < 64]
    assert exported.pad_token_id in (0, None)
    assert exported.temperature == (generation or {}).get("temperature", exported.temperature)


def test_export_to_a_full_disk_is_an_error_and_leaves_the_old_folder(mesh, tmp_path):
    folder = tiny_llama_folder(tmp_path / "source")
    lm = megatron_model(folder, mesh)
    out = export_hf_folder(lm, folder, tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # more bytes in the weights, fewer in the config
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with raises_error("model.folder.not_written", out):
            export_hf_folder(lm, folder, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (out / "model.safetensors").read_bytes() == before
    assert not list(tmp_path.glob("*.part"))


def edit_tensors(folder: Path, edit) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_missing_tensor(mesh, tmp_path):
    folder = tiny_llama_folder(tmp_path)
    edit_tensors(folder, lambda tensors: tensors.pop(K_PROJ))
    values = (K_PROJ, "model.safetensors", "(16, 32)")
    with raises_error("model.weights.not_of_config", *values):
        megatron_model(folder, mesh)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (K_PROJ, (8, 32)),
        ("model.layers.0.self_attn.q_proj.weight", (31, 32)),
        ("model.layers.0.self_attn.o_proj.weight", (32, 16)),
        ("model.layers.0.mlp.down_proj.weight", (32, 60)),
        ("model.layers.0.mlp.gate_proj.weight", (128, 32)),
        ("model.norm.weight", (16,)),
        # Missing rows must not be treated as padding, nor extra rows be cut off.
        ("model.embed_tokens.weight", (63, 32)),
        ("model.embed_tokens.weight", (65, 32)),
    ],
)
def test_wrong_shape(name, shape, mesh, tmp_path):
    folder = tiny_llama_folder(tmp_path)
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with raises_error("model.weights.not_of_config", name, shape):
        megatron_model(folder, mesh)


@pytest.mark.parametrize("size", [0, 5, 4000, -10])
def test_damaged_file(size, mesh, tmp_path):
    folder = tiny_llama_folder(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with raises_error("model.weights.not_readable", path):
        megatron_model(folder, mesh)


def test_no_weights(mesh, tmp_path):
    folder = tiny_llama_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    with raises_error("model.weights.missing", folder, "model.safetensors"):
        megatron_model(folder, mesh)


def test_pickled_weights_are_refused_with_advice(mesh, tmp_path):
    folder = tiny_llama_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with raises_error("model.weights.missing", "pytorch_model.bin", "save_pretrained"):
        megatron_model(folder, mesh)


@pytest.mark.parametrize(
    "name", ["qweight", "weight_scale", "weight_scale_inv", "scales", "weight.absmax", "SCB"]
)
def test_quantised_tensors_are_refused_in_one_sentence(name, mesh, tmp_path):
    folder = tiny_llama_folder(tmp_path)
    module = "model.layers.0.self_attn.q_proj"
    edit_tensors(folder, lambda tensors: tensors.update({f"{module}.{name}": torch.zeros(4)}))
    with raises_error("model.weights.quantised", folder, f"{module}.{name}") as caught:
        megatron_model(folder, mesh)
    assert "\n" not in str(caught.value)


def test_all_faults_of_a_folder_in_one_message(mesh, tmp_path):
    folder = tiny_llama_folder(tmp_path, layers=6)

    def edit(tensors):
        for layer in (0, 1, 2, 5):
            del tensors[f"model.layers.{layer}.mlp.up_proj.weight"]
            tensors[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.zeros(32)
        tensors[K_PROJ] = torch.zeros(8, 32)
        tensors["model.norm.weight"] = torch.zeros(32, dtype=torch.int8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # in older folders

    edit_tensors(folder, edit)
    with pytest.raises(CheckpointError) as caught:
        megatron_model(folder, mesh)
    check_error(caught.value, "model.weights.not_of_config", folder)
    _, *faults = str(caught.value).splitlines()
    expected = [
        (f"  {K_PROJ}: ", "(8, 32)", "(16, 32)"),
        ("  model.layers.N.mlp.up_proj.weight, N = 0, 1, 2, 5: ", "(64, 32)"),
        ("  model.layers.N.self_attn.q_proj.bias, N = 0, 1, 2, 5: ", "(32,)"),
        ("  model.norm.weight: ", "I8", "F64, F32, BF16, F16"),
    ]
    for fault, (start, *values) in zip(sorted(faults), expected, strict=True):
        assert fault.startswith(start)
        missing = [value for value in ("model.safetensors", *values) if value not in fault]
        assert not missing, fault


def test_output_layer_that_is_stored_although_tied(mesh, tmp_path):
    folder = tiny_llama_folder(tmp_path)
    expected = all_logits(megatron_model(folder, mesh), random_tokens(64, 1, 10))
    edit_tensors(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()})
    )
    assert torch.equal(all_logits(megatron_model(folder, mesh), random_tokens(64, 1, 10)), expected)
    edit_tensors(folder, lambda tensors: tensors["lm_head.weight"][5, 5].add_(1))
    values = ("tie_word_embeddings", "lm_head.weight", EMBEDDING)
    with raises_error("model.weights.not_tied", *values):
        megatron_model(folder, mesh)


class LiveBytes(TorchDispatchMode):
    """The largest total size of the tensors that are alive at the same time."""

    def __init__(self):
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: value for key, value in self._live.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out


class TestMemory:
    """The model has 600 kB, its largest parameter 25 kB."""

    @pytest.fixture
    def folder(self, tmp_path):
        return tiny_llama_folder(tmp_path / "source", layers=12, ffn=96, max_shard_size="100KB")

    def test_export_holds_one_file_and_one_parameter(self, folder, mesh, tmp_path, monkeypatch):
        # As if gathered from several ranks, which takes additional memory.
        monkeypatch.setattr(hf_weights, "_on_first_rank", lambda value, *_: [value.clone()])
        lm = megatron_model(folder, mesh)
        largest = max(parameter.nbytes for parameter in lm.parameters())
        assert sum(parameter.nbytes for parameter in lm.parameters()) > 5 * 100_000
        for max_bytes in (50_000, 100_000):
            with LiveBytes() as seen:
                export_hf_folder(lm, folder, tmp_path / "out", max_shard_bytes=max_bytes)
            assert max_bytes / 2 < seen.peak <= max_bytes + largest
            assert (
                max(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
                < max_bytes + 4096
            )

    def test_load_holds_one_tensor(self, folder, mesh, monkeypatch):
        lm = megatron_model(folder, mesh)
        read: list[StorageWeakRef] = []
        alive = []
        sizes = []
        original = HFFolder.read

        def recorded(self, *args):
            tensor = original(self, *args)
            read.append(StorageWeakRef(tensor.untyped_storage()))
            alive.append(sum(not reference.expired() for reference in read))
            sizes.append(tensor.nbytes)
            return tensor

        monkeypatch.setattr(HFFolder, "read", recorded)
        load_hf_weights(lm, HFFolder(folder))
        assert len(read) == 12 * 9 + 2
        assert max(alive) <= 2  # the previous tensor, until its name is rebound
        assert sum(sizes) == sum(parameter.nbytes for parameter in lm.parameters())


def test_a_rank_reads_its_part_only(mesh, tmp_path):
    """A rank reads its share of each matrix, and nothing for groups that are padding."""
    folder = HFFolder(tiny_llama_folder(tmp_path, heads=9, groups=3, hidden=36))
    arch = Architecture.from_folder(tmp_path)
    for rank, share in ((1, 1 / 3), (3, 0)):
        for row in weight_map(arch, 4):
            if row.split is None:
                continue
            part = row.part(rank)
            read = folder.read(row.hf, row.axis, part).numel() if part[0] < part[1] else 0
            assert read == math.prod(row.shape) * (share if "attn" in row.hf else 1 / 4)


class TestSeveralFiles:
    @pytest.fixture
    def folder(self, tmp_path):
        folder = tiny_llama_folder(tmp_path, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
        return folder

    def test_missing_shard(self, folder, mesh):
        shard = sorted(folder.glob("*.safetensors"))[1]
        shard.unlink()
        with raises_error("model.index.file_missing", shard.name):
            megatron_model(folder, mesh)

    def test_damaged_shard(self, folder, mesh):
        shard = sorted(folder.glob("*.safetensors"))[1]
        shard.write_bytes(shard.read_bytes()[:100])
        with raises_error("model.weights.not_readable", shard):
            megatron_model(folder, mesh)

    def test_tensor_that_only_the_index_knows(self, folder, mesh):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"][K_PROJ] = index["weight_map"]["model.norm.weight"]
        path.write_text(json.dumps(index))
        with raises_error("model.weights.not_of_config", K_PROJ):
            megatron_model(folder, mesh)

    @pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 1}'])
    def test_damaged_index(self, text, folder, mesh):
        index = folder / "model.safetensors.index.json"
        index.write_text(text)
        with raises_error("model.index.not_readable", index):
            megatron_model(folder, mesh)


@pytest.fixture(scope="module")
def expected():
    """Return tokens and transformers' logits."""
    from transformers import AutoTokenizer

    folder = smollm2_folder()
    text = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids[:, :20]
    tokens = {"text": text, "random": random_tokens(49152, 2, 40)}
    model = transformers_model(folder)
    return {name: (value, transformers_logits(model, value)) for name, value in tokens.items()}


@pytest.mark.more
def test_logits_on_one_rank_and_export(expected, mesh, tmp_path):
    lm = megatron_model(smollm2_folder(), mesh)
    for tokens, logits in expected.values():
        assert (all_logits(lm, tokens) - logits).abs().max() < 1e-4
    exported = export_hf_folder(lm, smollm2_folder(), tmp_path / "exported")
    assert_same_weights(exported, smollm2_folder())


def import_and_export(folders, out):
    """Return the logits; the models are exported below `out`."""
    logits = []
    with parallel_mesh(2) as mesh:
        for folder in folders:
            lm = megatron_model(folder, mesh)
            logits.append(all_logits(lm, random_tokens(lm.architecture.vocab_size, 2, 40)))
            export_hf_folder(lm, folder, out / folder.name)
    return logits


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Return (folder, logits and export of two tensor-parallel ranks) by model.

    The models need different kinds of padding.
    """
    root = tmp_path_factory.mktemp("two_ranks")
    shapes = {
        "tied": {},
        "untied_odd": {"vocab_size": 63, "tied": False},
        "odd_groups": {"heads": 9, "groups": 3, "hidden": 36, "vocab_size": 61},
        "one_group": {"heads": 4, "groups": 1, "head_dim": 16},
    }
    folders = [tiny_llama_folder(root / name, **shape) for name, shape in shapes.items()]
    with contextlib.suppress(pytest.skip.Exception):  # the small models do not need it
        folders.append(smollm2_folder())
    out = root / "out"
    logits = call_on_ranks(import_and_export, 2, folders, out)[0]
    return {
        folder.name: (folder, of_folder, out / folder.name)
        for folder, of_folder in zip(folders, logits, strict=True)
    }


@pytest.mark.more
@pytest.mark.parametrize("name", ["tied", "untied_odd", "odd_groups", "one_group"])
def test_small_models_on_two_ranks(name, two_ranks):
    folder, logits, exported = two_ranks[name]
    expected = transformers_logits(
        transformers_model(folder), random_tokens(logits.shape[-1], 2, 40)
    )
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert_same_weights(exported, folder)


@pytest.mark.more
def test_real_weights_on_two_ranks(two_ranks, expected):
    folder, logits, exported = two_ranks[smollm2_folder().name]
    assert (logits - expected["random"][1]).abs().max() < 1e-4
    assert_same_weights(exported, folder)


def assert_same_weights(folder: Path, other: Path) -> None:
    """Compare bit for bit: equal weights give equal logits in transformers."""
    weights = load_file(folder / "model.safetensors")
    others = load_file(other / "model.safetensors")
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert weight.dtype == others[name].dtype
        assert torch.equal(weight, others[name]), name
