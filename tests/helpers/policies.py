"""Policies of a Hugging Face folder, loaded by this project and by transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.hf_weights import load_hf_weights
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import DEFAULT_OPTIONS, CausalLM, ModelOptions


def megatron_model(
    folder: str | Path,
    mesh: Mesh,
    dtype: torch.dtype = torch.float32,
    options: ModelOptions = DEFAULT_OPTIONS,
) -> CausalLM:
    lm = CausalLM(Architecture.from_folder(folder), mesh, dtype, options)
    load_hf_weights(lm, HFFolder(folder))
    return lm.eval()


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    ).eval()


class LayersOfTransformers:
    """An engine that exposes its layers; `disturb` changes the layers first."""

    def __init__(self, folder: Path, disturb: Callable[[Any], None] = lambda layers: None):
        self._model = transformers_model(folder)
        self._layers = self._model.model.layers
        self._found: list[Tensor] = []
        with torch.no_grad():
            disturb(self._layers)
        for layer in self._layers:
            layer.register_forward_hook(lambda _layer, _inputs, out: self._found.append(out))

    @torch.no_grad()
    def layer_outputs(self, tokens: Sequence[int]) -> list[Tensor]:
        self._found.clear()
        self._model(torch.tensor([tokens]))
        return [
            (out[0] if isinstance(out, tuple) else out).reshape(len(tokens), -1)
            for out in self._found
        ]


@torch.no_grad()
def all_logits(lm: CausalLM, tokens: Tensor) -> Tensor:
    """Return logits [b, s, V]."""
    hidden = lm(tokens)
    return lm.full_logits(hidden.reshape(-1, hidden.shape[-1])).view(*tokens.shape, -1)


@torch.no_grad()
def transformers_logits(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens).logits


def random_tokens(vocab_size: int, *shape: int, seed: int = 0) -> Tensor:
    """Return random token ids other than the special ones."""
    return torch.randint(4, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def padded_sequences(
    prompt_lengths: list[int], response_lengths: list[int], vocab_size: int, pad_id: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random right-padded sequences, prompt lengths and response lengths."""
    lengths = [a + b for a, b in zip(prompt_lengths, response_lengths, strict=True)]
    sequences = random_tokens(vocab_size, len(lengths), max(lengths))
    for row, length in enumerate(lengths):
        sequences[row, length:] = pad_id
    return sequences, torch.tensor(prompt_lengths), torch.tensor(response_lengths)


def brute_force_log_probs(
    model: Any,
    sequences: Tensor,
    prompt_lengths: Tensor,
    response_lengths: Tensor,
    temperature: float,
    width: int,
) -> Tensor:
    """Return [N, width] from transformers' logits of each unpadded sequence."""
    tables = _response_tables(model, sequences, prompt_lengths, response_lengths, temperature)
    rows = []
    for table, tokens, prompt in zip(tables, sequences, prompt_lengths.tolist(), strict=True):
        row = [table[t, tokens[prompt + t]] for t in range(len(table))]
        rows.append(torch.stack(row + [torch.zeros(())] * (width - len(row))))
    return torch.stack(rows)


def brute_force_entropies(
    model: Any,
    sequences: Tensor,
    prompt_lengths: Tensor,
    response_lengths: Tensor,
    temperature: float,
    width: int,
) -> Tensor:
    """Return -sum p log p, [N, width], from transformers' logits."""
    tables = _response_tables(model, sequences, prompt_lengths, response_lengths, temperature)
    rows = [-(table.exp() * table).sum(dim=-1) for table in tables]
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])


def _response_tables(
    model: Any,
    sequences: Tensor,
    prompt_lengths: Tensor,
    response_lengths: Tensor,
    temperature: float,
) -> list[Tensor]:
    """Return each sequence's log p over the vocabulary at response positions: [response, V]."""
    tables = []
    for tokens, prompt, response in zip(
        sequences, prompt_lengths.tolist(), response_lengths.tolist(), strict=True
    ):
        logits = model(tokens[None, : prompt + response]).logits[0].float() / temperature
        tables.append(torch.log_softmax(logits, dim=-1)[prompt - 1 : prompt - 1 + response])
    return tables
