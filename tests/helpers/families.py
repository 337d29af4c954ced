"""Tiny models of every supported family, computed here and by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.accumulate import accumulate_gradients
from helpers.models import tiny_family_folder
from helpers.policies import all_logits, megatron_model, random_tokens, transformers_logits, transformers_model
from megatron.core import tensor_parallel
from torch import Tensor

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.hf_weights import export_hf_folder, hf_tensors, parameters_of
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.optimizer import (
    ActorOptimizer,
    build_optimizer,
    wrap_data_parallel,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# Grouped, multi-head and multi-query; heads that need padding at TP=2; tied and not; odd vocabularies.
PADDED = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36, "vocab_size": 61}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope_scaling": LLAMA3_ROPE}),
    "llama_bias": ("llama", {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama_bias_padded": ("llama", {"attention_bias": True, **PADDED}),
    "mistral": ("mistral", {"sliding_window": None, "tie_word_embeddings": False, "head_dim": 16}),
    "mistral_window": ("mistral", {"sliding_window": 7, "vocab_size": 63}),
    "qwen2": ("qwen2", {"num_key_value_heads": 1}),
    "qwen2_padded": ("qwen2", {**PADDED, "tie_word_embeddings": False}),
    "qwen2_yarn": ("qwen2", {"rope_scaling": YARN_ROPE}),
    "qwen2_window": ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_padded": ("qwen3", {**PADDED, "head_dim": 8, "tie_word_embeddings": False}),
}
MAX_SHARD_BYTES = 20_000
PROMPT_LENGTHS = (3, 11, 1, 7)
NEW_TOKENS = 14


def family_folder(root: Path, name: str) -> Path:
    family, keys = MODELS[name]
    return tiny_family_folder(root / name, family, **keys)


def tokens_of(vocab_size: int) -> Tensor:
    """Return tokens [3, 40], longer than windows and original RoPE lengths."""
    return random_tokens(vocab_size, 3, 40)


def prompts_of(vocab_size: int) -> list[list[int]]:
    tokens = random_tokens(vocab_size, len(PROMPT_LENGTHS), max(PROMPT_LENGTHS), seed=1).tolist()
    return [row[:length] for row, length in zip(tokens, PROMPT_LENGTHS, strict=True)]


def computed_here(folder: Path, mesh: Mesh, out: Path) -> dict[str, Any]:
    """Return logits, greedy responses (batched and alone), gradient of `loss` and its norm; export to `out`."""
    lm = megatron_model(folder, mesh)
    vocab_size = lm.architecture.vocab_size
    tokens = tokens_of(vocab_size)
    found: dict[str, Any] = {"logits": all_logits(lm, tokens)}
    export_hf_folder(lm, folder, out, max_shard_bytes=MAX_SHARD_BYTES)

    exact = megatron_model(folder, mesh, torch.float64)  # two tokens that nearly tie do not happen
    prompts = [Prompt(i, "", tuple(prompt)) for i, prompt in enumerate(prompts_of(vocab_size))]
    params = SamplingParams(max_length=NEW_TOKENS, use_greedy=True, stop_token_ids=(2,))
    engine = NativeGenerator(exact, load_tokenizer(folder))
    made = engine.generate(prompts, 1, params, seed=0)
    found["responses"] = [row[:n] for row, n in zip(made.tokens.tolist(), made.lengths.tolist(), strict=True)]
    alone = [engine.generate([prompt], 1, params, seed=0) for prompt in prompts]
    found["responses_alone"] = [one.tokens[0].tolist() for one in alone]

    ddp = wrap_data_parallel(lm)
    optim = OptimConfig(lr=1e-3, weight_decay=0.0, betas=[0.9, 0.95])
    optimizer = ActorOptimizer(*build_optimizer(ddp, optim, clip_grad=0.0, total_steps=10))

    def loss_of(model: Any, batch: Tensor) -> Tensor:
        hidden = model(batch[:, :-1])
        logits = lm.logits(hidden.reshape(-1, hidden.shape[-1]))
        return tensor_parallel.vocab_parallel_cross_entropy(logits[:, None], batch[:, 1:].reshape(-1, 1)).mean()

    accumulate_gradients(ddp, [tokens], loss_of)
    gradients: dict[str, Any] = {
        name: parameter.main_grad  # type: ignore[attr-defined]
        for name, parameter in parameters_of(lm).items()
    }
    found["gradient"] = dict(hf_tensors(lm, gradients))
    found["norm"] = optimizer.step().grad_norm
    return found


def computed_by_transformers(folder: Path) -> dict[str, Any]:
    model = transformers_model(folder)
    vocab_size = model.config.vocab_size
    tokens = tokens_of(vocab_size)
    found: dict[str, Any] = {"logits": transformers_logits(model, tokens)}

    logits = model(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    found["gradient"] = {name: parameter.grad for name, parameter in model.named_parameters()}
    found["norm"] = float(torch.stack([gradient.norm() for gradient in found["gradient"].values()]).norm())

    exact = transformers_model(folder, torch.float64)
    found["responses"] = []
    for prompt in prompts_of(vocab_size):
        row = torch.tensor([prompt])
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
        out = exact.generate(row, attention_mask=torch.ones_like(row), **options)
        found["responses"].append(out[0, len(prompt) :].tolist())
    return found
