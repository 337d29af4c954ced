"""Reads, checks and writes the weights of Hugging Face folders, by the table in `weight_map`.

Each rank reads only its slices. On export rank 0 holds at most one weight file and the parameter
that is being gathered.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from reinforce_rl.config.end_tokens import GENERATION_CONFIG, read_end_tokens, with_end_tokens
from reinforce_rl.data.tokenizer import load_tokenizer, token_id
from reinforce_rl.errors import CheckpointError, key_of
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.weight_files import INDEX_FILE, NAMED_FILE, SINGLE_FILE
from reinforce_rl.megatron.weight_map import (
    EMBEDDING,
    OUTPUT_LAYER,
    OUTPUT_PARAMETER,
    SCORE_LAYER,
    Row,
    weight_map,
)
from reinforce_rl.utils.files import make_readable, naming, replace_folder, space_note
from reinforce_rl.utils.untrusted_files import check_regular, link_root, read_json

T = TypeVar("T")
Track = Callable[[Sequence[T]], Iterable[T]]  # iterates like `iter`; may show progress

# RoPE frequencies, which older folders store and the model computes.
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")
_NOT_OF_A_CLASSIFIER = re.compile(rf"{_COMPUTED.pattern}|^lm_head\.weight$")
SCORE = SCORE_LAYER.removesuffix(".weight")  # module of a classifier's head
STEP = "training_step"  # key of an exported config.json
# Config and tokenizer files copied into an exported folder.
_CARRIED_OVER = (
    "*config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
)
_CARRIED_OVER += ("chat_template*", "additional_chat_templates/*.jinja", "*.model")


def load_hf_weights(
    lm: CausalLM, folder: HFFolder, *, track: Track = iter, heads: Sequence[str] = ()
) -> None:
    """Fill this rank's slice of the model, except a head that the folder lacks.

    `heads` are modules of heads that the folder may hold besides the model; the first is used.
    Raises the errors of `check_headers`.
    """
    arch = lm.architecture
    rank = lm.mesh.tp_rank
    rows = weight_map(arch, lm.mesh.tp_size)
    unfilled = parameters_of(lm)
    check_headers(arch, folder, heads)
    if _lacks_head(arch, folder, heads):
        rows = [row for row in rows if row.hf != SCORE_LAYER]
        unfilled.pop(SCORE_LAYER, None)
    if arch.tied_embeddings and OUTPUT_PARAMETER in unfilled:
        # With tied weights, the pipeline's last stage has a copy of the embedding.
        rows = [
            *rows,
            *(replace(row, megatron=OUTPUT_PARAMETER) for row in rows if row.hf == EMBEDDING),
        ]
    with torch.no_grad():
        for name, parts in track(_by_parameter(rows)):
            if name not in unfilled:
                continue  # on another stage
            parameter = unfilled.pop(name).zero_()  # padding stays zero
            for row in parts:
                start, end = row.part(rank)
                if start < end:
                    part = folder.read(row.hf, row.axis, (start, end))
                    row.place(parameter, rank).copy_(row.like_place(part))
                    if row.hf == EMBEDDING and _holds_tied_output(arch, folder):
                        _check_tied(folder, part, start, end)
    if unfilled:
        raise RuntimeError(f"the weight map does not fill {', '.join(sorted(unfilled))}")


def check_headers(arch: Architecture, folder: HFFolder, heads: Sequence[str] = ()) -> None:
    """Check names, shapes and dtypes of a folder's tensors without reading the tensors.

    Raises CheckpointError, which lists the differences.
    """
    shapes = {row.hf: row.shape for row in weight_map(arch, 1)}
    if _lacks_head(arch, folder, heads):
        del shapes[SCORE_LAYER]
    if _holds_tied_output(arch, folder):
        shapes[OUTPUT_LAYER] = shapes[EMBEDDING]
    ignored = _COMPUTED if arch.num_labels is None else _NOT_OF_A_CLASSIFIER
    if heads:
        modules = "|".join(re.escape(module) for module in (SCORE, *heads))
        ignored = re.compile(rf"{ignored.pattern}|^(?:{modules})\.")
    folder.check(shapes, ignored)


def _holds_tied_output(arch: Architecture, folder: HFFolder) -> bool:
    """Return True if the folder stores the output layer although it is tied to the embedding."""
    return arch.tied_embeddings and OUTPUT_LAYER in folder


def _lacks_head(arch: Architecture, folder: HFFolder, heads: Sequence[str]) -> bool:
    if arch.num_labels is None:
        return False
    return (*heads, SCORE)[0] != SCORE or SCORE_LAYER not in folder


def parameters_of(lm: CausalLM) -> dict[str, Tensor]:
    """Return this rank's parameters by name, with global layer numbers."""
    layers: Any = lm.decoder.layers
    # megatron counts from 1
    numbers = {str(i): layer.layer_number - 1 for i, layer in enumerate(layers)}
    return {
        re.sub(
            r"^(decoder\.layers\.)(\d+)", lambda match: match[1] + str(numbers[match[2]]), name
        ): parameter
        for name, parameter in lm.named_parameters()
    }


def hf_tensors(
    lm: CausalLM,
    values: Mapping[str, Tensor] | None = None,
    *,
    rows: list[Row] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    track: Track = iter,
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (name, tensor) of the model in Hugging Face layout.

    A collective call that every rank must exhaust. The tensor, with its own memory, is on the first
    tensor-parallel rank of the first stage; elsewhere it is None.

    `values`, such as gradients, are mapped in place of the weights, keyed as in `parameters_of`.
    `rows` are a part of `weight_map`.
    """
    mesh = lm.mesh
    local_values = parameters_of(lm) if values is None else values
    # A frozen parameter has no gradient.
    dtype = dtype or next(value.dtype for value in local_values.values() if value is not None)
    stages = mesh.gather_over_pp(set(local_values))
    rows = weight_map(lm.architecture, mesh.tp_size) if rows is None else rows
    for name, of_parameter in track(_by_parameter(rows)):
        stage = next(i for i, names in enumerate(stages) if name in names)
        parts = None
        if stage == mesh.pp_rank:
            parts = _on_first_rank(
                local_values[name].detach().to(dtype), mesh, of_parameter[0].split is not None
            )
        for row in of_parameter:
            whole = None
            if parts is not None:
                whole = torch.empty(row.shape, dtype=dtype, device=device)
                for rank, part in enumerate(parts):
                    row.part_in(whole, rank).copy_(row.place(part, rank))
            yield row.hf, _on_first_stage(whole, row, dtype, device, stage, mesh)


def _by_parameter(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    return [
        (name, list(group)) for name, group in itertools.groupby(rows, lambda row: row.megatron)
    ]


def _check_tied(folder: HFFolder, embedding: Tensor, start: int, end: int) -> None:
    if not torch.equal(embedding, folder.read(OUTPUT_LAYER, 0, (start, end))):
        raise CheckpointError(
            f"{folder.folder}: tie_word_embeddings is true in config.json, "
            f"but {OUTPUT_LAYER} differs from {EMBEDDING}. Set it to false there, "
            f"or remove {OUTPUT_LAYER}",
            key="model.weights.not_tied",
        )


def _on_first_rank(value: Tensor, mesh: Mesh, shared: bool) -> list[Tensor] | None:
    if mesh.tp_size == 1 or not shared:
        return [value] if mesh.tp_rank == 0 else None
    parts = [torch.empty_like(value) for _ in range(mesh.tp_size)] if mesh.tp_rank == 0 else None
    torch.distributed.gather(value.contiguous(), parts, group=mesh.tp_group, group_dst=0)
    return parts


def _on_first_stage(
    whole: Tensor | None,
    row: Row,
    dtype: torch.dtype,
    device: torch.device | str,
    stage: int,
    mesh: Mesh,
) -> Tensor | None:
    if stage == 0 or mesh.tp_rank:
        return whole
    if whole is not None:
        mesh.send_to_stage(whole.to(mesh.device), 0)
    elif mesh.pp_rank == 0:
        received = torch.empty(row.shape, dtype=dtype, device=mesh.device)
        mesh.receive_from_stage(received, stage)
        return received.to(device)
    return None


def export_hf_folder(
    lm: CausalLM,
    source: str | Path,
    out: str | Path,
    *,
    values: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    track: Track = iter,
    step: int | None = None,
    config_values: Mapping[str, Any] | None = None,
) -> Path:
    """Write a Hugging Face folder (weights, config, tokenizer) atomically.

    A collective call; the first rank writes.

    Args:
        source: folder whose config and tokenizer files are copied.
        values: to write instead of the weights, keyed as in `parameters_of`.
        dtype: of the files; None for the model's dtype.
        max_shard_bytes: per weight file, which the first rank holds in memory. A larger tensor gets
            a file to itself.
        step: number of training steps, for config.json; None if unknown.
        config_values: overrides for config.json.

    Raises CheckpointError on every rank if the folder cannot be written.
    """
    source = Path(source)
    out = Path(out)
    mesh = lm.mesh
    part = out.with_name(out.name + ".part")
    dtype = dtype or lm.config.params_dtype
    files = shard_files(weight_map(lm.architecture, mesh.tp_size), dtype, max_shard_bytes)

    def failed(error: BaseException) -> CheckpointError:
        space = space_note(error, part)  # before the files are deleted
        shutil.rmtree(part, ignore_errors=True)
        sentence = f"cannot write the Hugging Face folder {out}: {error}{space}"
        return CheckpointError(sentence, key=key_of(error, "model.folder.not_written"))

    with mesh.raise_on_all_ranks(failed):
        if mesh.is_main:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            carry_over(source, part)
            _set_config(part / "config.json", dtype, {STEP: step, **(config_values or {})})
            if lm.architecture.num_labels is None:
                _keep_end_tokens(part)
            if len(files) > 1:
                total = sum(size for names in files.values() for size in names.values())
                file_of = {name: file for file, names in files.items() for name in names}
                index = {"metadata": {"total_size": total}, "weight_map": file_of}
                (part / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    # Other data- and context-parallel ranks hold the same weights. They only wait at the end of
    # each file.
    first_copy = mesh.dp_rank == mesh.cp_rank == 0
    tensors = hf_tensors(lm, values, dtype=dtype, track=track) if first_copy else iter(())
    for file, names in files.items():
        # Tensors on the main rank, None on the others.
        shard: Any = dict(itertools.islice(tensors, len(names)))
        with mesh.raise_on_all_ranks(failed):
            if mesh.is_main:
                save_tensors(shard, part / file)
        shard.clear()  # free it before the next one is gathered
    with mesh.raise_on_all_ranks(failed):
        if mesh.is_main:
            replace_folder(part, out)
    return out


def shard_files(rows: list[Row], dtype: torch.dtype, max_bytes: int) -> dict[str, dict[str, int]]:
    """Return, per file name, the bytes of each tensor in it, in order."""
    shards: list[dict[str, int]] = [{}]
    for row in rows:
        size = math.prod(row.shape) * dtype.itemsize
        if shards[-1] and sum(shards[-1].values()) + size > max_bytes:
            shards.append({})
        shards[-1][row.hf] = size
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {
        f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard
        for i, shard in enumerate(shards, 1)
    }


def carry_over(source: Path, out: Path) -> None:
    for path in sorted({path for pattern in _CARRIED_OVER for path in source.glob(pattern)}):
        if path.is_file():  # the name of a folder may match too
            check_regular(path, within=link_root(source))
            copy = out / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    with naming(path):
        save_file(tensors, path, metadata={"format": "pt"})
    make_readable(path)  # safetensors creates it with mode 0600


def _keep_end_tokens(folder: Path) -> None:
    """Make `generate` of transformers stop at every token that ended responses in training."""
    tokenizer_eos = None
    if (folder / "tokenizer_config.json").is_file():
        tokenizer_eos = token_id(load_tokenizer(folder).eos_token_id)
    end_tokens = read_end_tokens(folder, tokenizer_eos)
    if end_tokens.ids != end_tokens.of_generate:
        values = with_end_tokens(folder, end_tokens)
        (folder / GENERATION_CONFIG).write_text(
            json.dumps(values, indent=2) + "\n", encoding="utf-8"
        )


def _set_config(config: Path, dtype: torch.dtype, others: Mapping[str, Any]) -> None:
    values = read_json(config)
    # The key is "torch_dtype" before transformers 5, which reads both keys, "dtype" first.
    keys = [key for key in ("torch_dtype", "dtype") if key in values] or ["dtype"]
    values |= dict.fromkeys(keys, str(dtype).removeprefix("torch.")) | dict(others)
    if values[STEP] is None:
        del values[STEP]
    values.pop(NAMED_FILE, None)  # the exported files have the usual names
    config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
