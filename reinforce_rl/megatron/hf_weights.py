"""Reads, checks and writes the weights of Hugging Face folders, by the table in `weight_map`.

Each rank reads only its slices; on export rank 0 holds at most one weight file and the parameter being gathered.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from reinforce_rl.config.end_tokens import GENERATION_CONFIG, read_end_tokens, with_end_tokens
from reinforce_rl.data.tokenizer import load_tokenizer, token_id
from reinforce_rl.errors import CheckpointError
from reinforce_rl.megatron.architecture import UNQUANTISED, Architecture
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.weight_files import INDEX_FILE, SINGLE_FILE, find_weight_files
from reinforce_rl.megatron.weight_map import EMBEDDING, OUTPUT_LAYER, OUTPUT_PARAMETER, SCORE_LAYER, Row, weight_map
from reinforce_rl.utils.files import replace_folder

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

# Tensors of AWQ, GPTQ, FP8, compressed-tensors, bitsandbytes and MLX.
_OF_QUANTISED = re.compile(
    r"\.(qweight|qzeros|g_idx|scales|weight_scale(_inv|_2)?|weight_packed|input_scale|SCB)$"
    r"|\.weight\.(absmax|quant_map|quant_state\..*)$"
)
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


class _Entry(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    dtype: str


class HFFolder:
    """Weights of a Hugging Face folder; the constructor reads only the files' headers. Faults are CheckpointErrors."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.files = find_weight_files(self.folder)
        self._entries: dict[str, _Entry] = {}
        self._stored_again: list[tuple[str, Path]] = []  # tensors that another shard holds too
        for path in self.files.paths:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 (a file is no dict)
                    if self.files.file_of.get(name, path) != path:
                        self._stored_again.append((name, path))
                        continue
                    if name in self._entries:  # the index does not name it, and two shards hold it
                        self._stored_again.append((name, path))
                        continue
                    header = file.get_slice(name)
                    self._entries[name] = _Entry(path, tuple(header.get_shape()), header.get_dtype())

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def names(self) -> list[str]:
        return sorted(self._entries)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def common_dtype(self, names: Iterable[str]) -> torch.dtype:
        """Return a dtype that holds all of these tensors' values."""
        dtypes = {self._entries[name].dtype for name in names if name in self._entries}
        return functools.reduce(torch.promote_types, (DTYPES[dtype] for dtype in sorted(dtypes)))

    def read(self, name: str, axis: int = 0, part: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor, or the range `part` of `axis`; the rest stays on disk."""
        with _opened(self._entries[name].file) as file:
            start, end = part or (None, None)
            return file.get_slice(name)[(slice(None),) * axis + (slice(start, end),)]

    def fingerprint(self) -> str:
        """Return a digest of every tensor's name, shape, dtype and first row, to tell two folders' weights apart.

        Training changes every row of a matrix, except embeddings of tokens that never occur.
        """
        digest = hashlib.sha256()
        for name in sorted(self._entries):
            entry = self._entries[name]
            digest.update(f"{name} {entry.shape} {entry.dtype} ".encode())
            digest.update(self.read(name, 0, (0, 1)).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: re.Pattern[str]) -> None:
        """Compare the headers with the model's shapes; CheckpointError lists all faults but `ignored` names."""
        quantised = [name for name in self._entries.keys() - expected.keys() if _OF_QUANTISED.search(name)]
        if quantised:
            raise CheckpointError(
                f"the weights in {self.folder} are quantised (it holds {min(quantised)}), and training needs them "
                f"whole; {UNQUANTISED}"
            )
        # Merge layers with the same fault, or a wrong config.json would fill the screen.
        faults: dict[tuple[str, str], list[str]] = {}

        def add(name: str, text: str) -> None:
            faults.setdefault((_LAYER.sub("N", name), text), []).extend(_LAYER.findall(name))

        for name, shape in expected.items():
            entry = self._entries.get(name)
            if entry is None:
                expected_in = self.files.file_of.get(name, self.files.listing)
                add(name, f"missing in {expected_in.name}; expected shape {shape}")
            elif entry.shape != shape:
                add(name, f"shape {entry.shape} in {entry.file.name}; by config.json it should be {shape}")
            elif entry.dtype not in DTYPES:
                add(name, f"{entry.dtype} in {entry.file.name}; expected one of {', '.join(DTYPES)}")
        for name, other in self._stored_again:
            entry = self._entries.get(name)
            if name in expected and entry is not None and not self._is_equal_in(name, other):
                add(name, f"stored in {entry.file.name} and, with other values, in {other.name}; keep one of them")
        for name in sorted(self._entries.keys() - expected.keys()):
            if not ignored.search(name):
                entry = self._entries[name]
                add(name, f"shape {entry.shape} in {entry.file.name}; a model of this config.json has no such tensor")
        lines = [f"{self.folder} does not hold what its config.json says:"]
        for (name, text), layers in faults.items():
            several = f", N = {', '.join(sorted(layers, key=int))}" if len(layers) > 1 else ""
            lines.append(f"  {name if several else name.replace('.N.', '.'.join(['', *layers, '']))}{several}: {text}")
        if faults:
            raise CheckpointError("\n".join(lines))

    def _is_equal_in(self, name: str, other: Path) -> bool:
        with _opened(other) as file:
            return torch.equal(self.read(name), file.get_tensor(name))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:  # safetensors raises an undocumented type for a damaged file
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


T = TypeVar("T")
Track = Callable[[Sequence[T]], Iterable[T]]  # iterates like `iter`; may show progress

# RoPE frequencies, stored in older folders; the model computes them.
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")
_NOT_OF_A_CLASSIFIER = re.compile(rf"{_COMPUTED.pattern}|^lm_head\.weight$")
SCORE = SCORE_LAYER.removesuffix(".weight")  # module of a classifier's head
STEP = "training_step"  # key of an exported config.json
# Config and tokenizer files copied into an exported folder.
_CARRIED_OVER = ("*config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt")
_CARRIED_OVER += ("chat_template*", "*.model")


def load_hf_weights(lm: CausalLM, folder: HFFolder, *, track: Track = iter, heads: Sequence[str] = ()) -> None:
    """Fill this rank's slice of the model, or all but a head that the folder lacks; faults as in `check_headers`.

    `heads` are modules of heads that the folder may hold besides the model; the first is the one that is used.
    """
    arch, rank = lm.architecture, lm.mesh.tp_rank
    rows, own = weight_map(arch, lm.mesh.tp_size), parameters_of(lm)
    check_headers(arch, folder, heads)
    if _lacks_head(arch, folder, heads):
        rows = [row for row in rows if row.hf != SCORE_LAYER]
        own.pop(SCORE_LAYER, None)
    if arch.tied_embeddings and OUTPUT_PARAMETER in own:
        # With tied weights, the pipeline's last stage has a copy of the embedding.
        rows = [*rows, *(replace(row, megatron=OUTPUT_PARAMETER) for row in rows if row.hf == EMBEDDING)]
    with torch.no_grad():
        for name, parts in track(_by_parameter(rows)):
            if name not in own:
                continue  # on another stage
            parameter = own.pop(name).zero_()  # padding stays zero
            for row in parts:
                start, end = row.part(rank)
                if start < end:
                    part = folder.read(row.hf, row.axis, (start, end))
                    row.place(parameter, rank).copy_(row.like_place(part))
                    if row.hf == EMBEDDING and _holds_tied_output(arch, folder):
                        _check_tied(folder, part, start, end)
    if own:
        raise RuntimeError(f"the weight map does not fill {', '.join(sorted(own))}")


def check_headers(arch: Architecture, folder: HFFolder, heads: Sequence[str] = ()) -> None:
    """Check names, shapes and dtypes of a folder's tensors without reading them; CheckpointError lists differences."""
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
    numbers = {str(i): layer.layer_number - 1 for i, layer in enumerate(layers)}  # megatron counts from 1
    return {
        re.sub(r"^(decoder\.layers\.)(\d+)", lambda found: found[1] + str(numbers[found[2]]), name): parameter
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
    """Yield (name, tensor) of the model in Hugging Face layout; a collective call that every rank must exhaust.

    The tensor, with its own memory, is on the first tensor-parallel rank of the first stage; elsewhere it is None.

    Gradients, say, are mapped as `values` keyed as in `parameters_of`, a part of `weight_map` as `rows`.
    """
    mesh = lm.mesh
    own = parameters_of(lm) if values is None else values
    dtype = dtype or next(value.dtype for value in own.values() if value is not None)  # frozen: no gradient
    stages = mesh.gather_over_pp(set(own))
    rows = weight_map(lm.architecture, mesh.tp_size) if rows is None else rows
    for name, of_parameter in track(_by_parameter(rows)):
        stage = next(i for i, names in enumerate(stages) if name in names)
        parts = None
        if stage == mesh.pp_rank:
            parts = _on_first_rank(own[name].detach().to(dtype), mesh, of_parameter[0].split is not None)
        for row in of_parameter:
            whole = None
            if parts is not None:
                whole = torch.empty(row.shape, dtype=dtype, device=device)
                for rank, part in enumerate(parts):
                    row.part_in(whole, rank).copy_(row.place(part, rank))
            yield row.hf, _on_first_stage(whole, row, dtype, device, stage, mesh)


def _by_parameter(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    return [(name, list(group)) for name, group in itertools.groupby(rows, lambda row: row.megatron)]


def _check_tied(folder: HFFolder, embedding: Tensor, start: int, end: int) -> None:
    if not torch.equal(embedding, folder.read(OUTPUT_LAYER, 0, (start, end))):
        fault = f"{folder.folder}: config.json says tie_word_embeddings, but {OUTPUT_LAYER} differs from {EMBEDDING}. "
        raise CheckpointError(f"{fault}Set tie_word_embeddings to false in config.json, or remove {OUTPUT_LAYER}")


def _on_first_rank(value: Tensor, mesh: Mesh, shared: bool) -> list[Tensor] | None:
    if mesh.tp_size == 1 or not shared:
        return [value] if mesh.tp_rank == 0 else None
    parts = [torch.empty_like(value) for _ in range(mesh.tp_size)] if mesh.tp_rank == 0 else None
    torch.distributed.gather(value.contiguous(), parts, group=mesh.tp_group, group_dst=0)
    return parts


def _on_first_stage(
    whole: Tensor | None, row: Row, dtype: torch.dtype, device: torch.device | str, stage: int, mesh: Mesh
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
    """Write a Hugging Face folder (weights, config, tokenizer) atomically; a collective call, the first rank writes.

    Args:
        source: folder whose config and tokenizer files are copied.
        values: written instead of the weights, keyed as in `parameters_of`.
        dtype: None for the model's.
        max_shard_bytes: per weight file, also what the first rank buffers. A larger tensor gets its own file.
        step: of training, for config.json; None if unknown.
        config_values: overrides for config.json.

    Raises CheckpointError: on every rank, if it cannot be written.
    """
    source, out, mesh = Path(source), Path(out), lm.mesh
    part = out.with_name(out.name + ".part")
    dtype = dtype or lm.config.params_dtype
    files = shard_files(weight_map(lm.architecture, mesh.tp_size), dtype, max_shard_bytes)

    def failed(error: BaseException) -> CheckpointError:
        shutil.rmtree(part, ignore_errors=True)
        return CheckpointError(f"cannot write the Hugging Face folder {out}: {error}")

    with mesh.together(failed):
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
    # Other data- and context-parallel ranks hold the same weights; they only wait at the end of each file.
    first_copy = mesh.dp_rank == mesh.cp_rank == 0
    tensors = hf_tensors(lm, values, dtype=dtype, track=track) if first_copy else iter(())
    for file, names in files.items():
        shard: Any = dict(itertools.islice(tensors, len(names)))  # tensors on the main rank, None elsewhere
        with mesh.together(failed):
            if mesh.is_main:
                save_tensors(shard, part / file)
        shard.clear()  # free it before the next one is gathered
    with mesh.together(failed):
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
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def carry_over(source: Path, out: Path) -> None:
    for file in sorted({file for pattern in _CARRIED_OVER for file in source.glob(pattern)}):
        shutil.copyfile(file, out / file.name)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors creates it with mode 0600


def _keep_end_tokens(folder: Path) -> None:
    """Make `generate` of transformers end at every token that ended the responses of training."""
    tokenizer_eos = None
    if (folder / "tokenizer_config.json").is_file():
        tokenizer_eos = token_id(load_tokenizer(folder).eos_token_id)
    end_tokens = read_end_tokens(folder, tokenizer_eos)
    if end_tokens.ids != end_tokens.of_generate:
        values = with_end_tokens(folder, end_tokens)
        (folder / GENERATION_CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _set_config(config: Path, dtype: torch.dtype, others: Mapping[str, Any]) -> None:
    values = json.loads(config.read_text(encoding="utf-8"))
    # "torch_dtype" before transformers 5, which reads both, "dtype" first.
    keys = [key for key in ("torch_dtype", "dtype") if key in values] or ["dtype"]
    values |= dict.fromkeys(keys, str(dtype).removeprefix("torch.")) | dict(others)
    if values[STEP] is None:
        del values[STEP]
    config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
