"""Policies of a Hugging Face folder, loaded by this project and by transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from reinforce_rl.data.batches import Prompt
from reinforce_rl.megatron import schedule
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.hf_weights import hf_tensors, load_hf_weights, parameters_of
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.log_probs import TokenScores, response_scores
from reinforce_rl.megatron.model.model import DEFAULT_OPTIONS, CausalLM, ModelOptions
from reinforce_rl.megatron.model.sequences import PaddedSequences


def accumulate_gradients(
    ddp: Any, micro_batches: Sequence[Any], loss_of: Callable[[Any, Any], Any]
) -> float:
    """Accumulate gradients of `loss_of(ddp, micro_batch)` on one pipeline stage.

    Returns the summed loss.
    """
    losses = schedule.accumulate_gradients(
        ddp, micro_batches, loss_of, lambda loss, _: (loss, loss.item())
    )
    return sum(losses)


def response_log_probs(
    model: torch.nn.Module,
    lm: CausalLM,
    sequences: Tensor,
    prompt_lengths: Tensor,
    response_lengths: Tensor,
    temperature: float,
    width: int,
    *,
    chunk_tokens: int,
    with_entropy: bool = False,
) -> TokenScores:
    """Return `response_scores` after a forward pass of a model without pipeline parallelism.

    `model` is `lm` or its data-parallel wrapper.
    """
    layout = PaddedSequences(lm, sequences, prompt_lengths, response_lengths)
    return response_scores(
        layout,
        layout.hidden(model),
        lm,
        temperature,
        width,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
    )


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
        outputs = []
        for out in self._found:
            hidden = out[0] if isinstance(out, tuple) else out
            outputs.append(hidden.reshape(len(tokens), -1))
        return outputs


@torch.no_grad()
def all_logits(lm: CausalLM, tokens: Tensor) -> Tensor:
    """Return logits [b, s, V]."""
    hidden = lm(tokens)
    rows = hidden.reshape(-1, hidden.shape[-1])
    return lm.full_logits(rows).view(*tokens.shape, -1)


@torch.no_grad()
def transformers_logits(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens).logits


def random_tokens(vocab_size: int, *shape: int, seed: int = 0) -> Tensor:
    """Return random token ids other than the special ones."""
    return torch.randint(4, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def random_prompts(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[Prompt]:
    tokens = random_tokens(vocab_size, len(lengths), max(lengths), seed=seed).tolist()
    prompts = []
    for index, length in enumerate(lengths):
        prompts.append(Prompt(index, "", tuple(tokens[index][:length])))
    return prompts


def named_gradients(model: Any) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def hf_gradients(lm: CausalLM, kind: Literal["grad", "main_grad"] = "grad") -> dict[str, Tensor]:
    """Return gradients under Hugging Face's names, on the first tensor-parallel rank only.

    The mapping of weights is linear, so it maps gradients too.
    """
    gradients: dict[str, Any] = {}
    for name, parameter in parameters_of(lm).items():
        gradients[name] = getattr(parameter, kind)
    return dict(hf_tensors(lm, gradients))


def padded_sequences(
    prompt_lengths: list[int], response_lengths: list[int], vocab_size: int, pad_id: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random right-padded sequences, prompt lengths and response lengths."""
    lengths = [a + b for a, b in zip(prompt_lengths, response_lengths, strict=True)]
    sequences = random_tokens(vocab_size, len(lengths), max(lengths))
    for row, length in enumerate(lengths):
        sequences[row, length:] = pad_id
    return sequences, torch.tensor(prompt_lengths), torch.tensor(response_lengths)


def brute_force_scores(
    model: Any,
    sequences: Tensor,
    prompt_lengths: Tensor,
    response_lengths: Tensor,
    *,
    temperature: float,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [N, width] from transformers' logits of each sequence."""
    log_probs = []
    entropies = []
    for tokens, prompt, response in zip(
        sequences, prompt_lengths.tolist(), response_lengths.tolist(), strict=True
    ):
        end = prompt + response
        logits = model(tokens[None, :end]).logits[0].float() / temperature
        table = torch.log_softmax(logits, dim=-1)[prompt - 1 : end - 1]
        padding = (0, width - response)
        of_tokens = table.gather(1, tokens[prompt:end, None])[:, 0]
        log_probs.append(torch.nn.functional.pad(of_tokens, padding))
        entropy = -(table.exp() * table).sum(dim=-1)
        entropies.append(torch.nn.functional.pad(entropy, padding))
    return torch.stack(log_probs), torch.stack(entropies)
