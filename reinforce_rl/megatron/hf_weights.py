"""Weights between a Hugging Face folder and a tensor-parallel megatron model, both ways.

megatron's layout differs in two places: q, k and v are one matrix, interleaved group by group (q heads of group 0,
k of group 0, v of group 0, q heads of group 1, ...), and gate and up projections are one matrix, gate first on each
rank. Padding for tensor parallelism is described at `Architecture.padded`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforce_rl.errors import CheckpointError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model import CausalLM

ReadTensor = Callable[[str], Tensor]

# What an exported folder takes over from the one that the model came from: config and tokenizer.
_CARRIED_OVER = (
    "*config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.model",
)


class HFFolder:
    """The safetensors of a Hugging Face folder, read tensor by tensor."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._file_of = self._index()

    def _index(self) -> dict[str, Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                names = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{index} cannot be read: {error!r}; expected a JSON object weight_map"
                ) from error
            missing = sorted({file for file in names.values() if not (self.folder / file).is_file()})
            if missing:
                raise CheckpointError(f"{index} names files that are not there: {', '.join(missing)}")
            return {name: self.folder / file for name, file in names.items()}
        single = self.folder / "model.safetensors"
        if not single.is_file():
            raise CheckpointError(
                f"{self.folder} holds neither model.safetensors nor model.safetensors.index.json; "
                "expected a Hugging Face folder with safetensors (pickled .bin weights are not read)"
            )
        with _opened(single) as file:
            return dict.fromkeys(file.keys(), single)

    def __call__(self, name: str) -> Tensor:
        """One tensor by its Hugging Face name.

        Raises:
            CheckpointError: no such tensor, or its file is damaged.
        """
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}; is this a Llama-family checkpoint?")
        with _opened(self._file_of[name]) as file:
            return file.get_tensor(name)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:  # safetensors raises its own, undocumented type for a damaged file
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def load_hf_weights(lm: CausalLM, read: ReadTensor) -> None:
    """Fill this rank's slice of the model.

    Args:
        lm: the model, of any tensor-parallel size.
        read: gives a whole tensor by its Hugging Face name, as `HFFolder` does.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the architecture says.
    """
    arch, mesh = lm.architecture, lm.mesh
    own = dict(lm.named_parameters())
    with torch.no_grad():
        for name, value in _megatron_tensors(arch, mesh, _checked(arch, read)):
            own.pop(name).copy_(value)
    if own:
        raise CheckpointError(f"parameters that the checkpoint did not fill: {', '.join(sorted(own))}")


def _checked(arch: Architecture, read: ReadTensor) -> ReadTensor:
    """Refuses tensors of other shapes than the architecture's, which padding or broadcasting would hide."""
    h, d = arch.hidden_size, arch.head_size
    shapes = {
        "embed_tokens": (arch.vocab_size, h),
        "lm_head": (arch.vocab_size, h),
        "q_proj": (arch.num_heads * d, h),
        "k_proj": (arch.num_groups * d, h),
        "v_proj": (arch.num_groups * d, h),
        "o_proj": (h, arch.num_heads * d),
        "gate_proj": (arch.ffn_size, h),
        "up_proj": (arch.ffn_size, h),
        "down_proj": (h, arch.ffn_size),
    }

    def checked(name: str) -> Tensor:
        tensor = read(name)
        expected = shapes.get(name.split(".")[-2], (h,))  # the rest are norms
        if tensor.shape != expected:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)} in the checkpoint; by config.json it should be {expected}"
            )
        return tensor

    return checked


def _megatron_tensors(arch: Architecture, mesh: Mesh, read: ReadTensor) -> Iterator[tuple[str, Tensor]]:
    sizes = arch.padded(mesh.tp_size)

    def column(weight: Tensor) -> Tensor:
        return weight.chunk(mesh.tp_size, 0)[mesh.tp_rank]

    def vocabulary(weight: Tensor) -> Tensor:
        return column(_pad_rows(weight, sizes.vocab_size))

    yield "embedding.word_embeddings.weight", vocabulary(read("model.embed_tokens.weight"))
    for layer in range(arch.num_layers):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        yield ours + "input_layernorm.weight", read(theirs + "input_layernorm.weight")
        yield ours + "pre_mlp_layernorm.weight", read(theirs + "post_attention_layernorm.weight")
        q, k, v = (read(f"{theirs}self_attn.{part}_proj.weight") for part in "qkv")
        yield ours + "self_attention.linear_qkv.weight", column(_join_qkv(arch, q, k, v, sizes.num_groups))
        output = read(theirs + "self_attn.o_proj.weight")
        padded = _pad_rows(output.t(), sizes.num_heads * arch.head_size)
        yield ours + "self_attention.linear_proj.weight", column(padded).t()
        gate, up = (column(read(f"{theirs}mlp.{part}_proj.weight")) for part in ("gate", "up"))
        yield ours + "mlp.linear_fc1.weight", torch.cat((gate, up))
        yield ours + "mlp.linear_fc2.weight", column(read(theirs + "mlp.down_proj.weight").t()).t()
    yield "decoder.final_layernorm.weight", read("model.norm.weight")
    if not arch.tied_embeddings:
        yield "output_layer.weight", vocabulary(read("lm_head.weight"))


def hf_tensors(lm: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """The model's weights in Hugging Face names and shapes, one at a time, on the CPU.

    A collective call: every tensor-parallel rank must run the iterator to its end. Each rank gets the whole tensors.
    """
    arch, mesh = lm.architecture, lm.mesh
    own = {name: parameter.detach() for name, parameter in lm.named_parameters()}

    def gather(name: str, dim: int = 0) -> Tensor:
        return _gather_over_tp(own[name], mesh, dim).cpu()

    yield "model.embed_tokens.weight", gather("embedding.word_embeddings.weight")[: arch.vocab_size]
    for layer in range(arch.num_layers):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        yield theirs + "input_layernorm.weight", own[ours + "input_layernorm.weight"].cpu()
        yield theirs + "post_attention_layernorm.weight", own[ours + "pre_mlp_layernorm.weight"].cpu()
        q, k, v = _split_qkv(arch, gather(ours + "self_attention.linear_qkv.weight"))
        yield theirs + "self_attn.q_proj.weight", q
        yield theirs + "self_attn.k_proj.weight", k
        yield theirs + "self_attn.v_proj.weight", v
        output = gather(ours + "self_attention.linear_proj.weight", dim=1)
        yield theirs + "self_attn.o_proj.weight", output[:, : arch.num_heads * arch.head_size]
        fc1 = gather(ours + "mlp.linear_fc1.weight").view(mesh.tp_size, 2, -1, arch.hidden_size)
        yield theirs + "mlp.gate_proj.weight", fc1[:, 0].reshape(-1, arch.hidden_size)
        yield theirs + "mlp.up_proj.weight", fc1[:, 1].reshape(-1, arch.hidden_size)
        yield theirs + "mlp.down_proj.weight", gather(ours + "mlp.linear_fc2.weight", dim=1)
    yield "model.norm.weight", own["decoder.final_layernorm.weight"].cpu()
    if not arch.tied_embeddings:
        yield "lm_head.weight", gather("output_layer.weight")[: arch.vocab_size]


def export_hf_folder(lm: CausalLM, source: str | Path, out: str | Path) -> Path:
    """Write the model as a Hugging Face folder that transformers loads: weights, config and tokenizer files.

    A collective call of all ranks; the first one writes. The folder appears whole or not at all.

    Args:
        lm: the model.
        source: the folder it came from, whose config and tokenizer files are carried over.
        out: the folder to write; replaced where it exists.

    Raises:
        CheckpointError: it cannot be written.
    """
    from safetensors.torch import save_file

    source, out = Path(source), Path(out)
    writer = lm.mesh.is_main
    tensors = {name: tensor.contiguous().clone() for name, tensor in hf_tensors(lm) if writer}
    failure: Exception | None = None
    if writer:
        part = out.with_name(out.name + ".part")
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            for file in sorted({file for pattern in _CARRIED_OVER for file in source.glob(pattern)}):
                shutil.copyfile(file, part / file.name)
            _set_dtype(part / "config.json", lm.config.params_dtype)
            save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
            (part / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
            shutil.rmtree(out, ignore_errors=True)
            os.replace(part, out)
        except Exception as error:  # safetensors raises its own, undocumented type where the disk is full
            shutil.rmtree(part, ignore_errors=True)
            failure = CheckpointError(f"cannot write the Hugging Face folder {out}: {error}")
    lm.mesh.check_together(failure)
    return out


def _set_dtype(config: Path, dtype: torch.dtype) -> None:
    """transformers loads a folder in the dtype its config names, so that must be the dtype of the weights."""
    values = json.loads(config.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in values else "dtype"  # its name before transformers 5
    values[key] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _join_qkv(arch: Architecture, q: Tensor, k: Tensor, v: Tensor, num_groups: int) -> Tensor:
    """[heads * d, h] and twice [groups * d, h] to [groups' * (heads / groups + 2) * d, h], zero groups added."""
    d, groups = arch.head_size, arch.num_groups
    parts = [t.view(groups, -1, d, arch.hidden_size) for t in (q, k, v)]
    joined = torch.cat(parts, dim=1)
    return _pad_rows(joined, num_groups).reshape(-1, arch.hidden_size)


def _split_qkv(arch: Architecture, joined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of `_join_qkv`."""
    d, h = arch.head_size, arch.hidden_size
    per_group = arch.num_heads // arch.num_groups
    grouped = joined.view(-1, per_group + 2, d, h)[: arch.num_groups]
    q, k, v = grouped[:, :per_group], grouped[:, per_group], grouped[:, per_group + 1]
    return q.reshape(-1, h), k.reshape(-1, h), v.reshape(-1, h)


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    if tensor.shape[0] == rows:
        return tensor
    return torch.cat((tensor, tensor.new_zeros((rows - tensor.shape[0], *tensor.shape[1:]))))


def _gather_over_tp(tensor: Tensor, mesh: Mesh, dim: int) -> Tensor:
    if mesh.tp_size == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(mesh.tp_size)]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=mesh.tp_group)
    return torch.cat(parts, dim=dim)
