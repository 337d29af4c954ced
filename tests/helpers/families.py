"""Tiny models of every supported family, evaluated by this project and by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.accumulate import accumulate_gradients
from helpers.models import tiny_family_folder
from helpers.policies import (
    all_logits,
    brute_force_entropies,
    brute_force_log_probs,
    megatron_model,
    padded_sequences,
    random_tokens,
    transformers_logits,
    transformers_model,
)
from megatron.core import tensor_parallel
from torch import Tensor

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.data.batches import Prompt, join_prompts_and_responses
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.hf_weights import export_hf_folder, hf_tensors, parameters_of
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.log_probs import response_scores
from reinforce_rl.megatron.model.sequences import PackedGroups, PaddedSequences
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
# Grouped, multi-head and multi-query attention; heads that need padding at TP=2; tied and untied
# embeddings; odd vocabulary sizes.
PADDED = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36, "vocab_size": 61}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope_scaling": LLAMA3_ROPE}),
    "llama_bias": (
        "llama",
        {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": False},
    ),
    "llama_bias_padded": ("llama", {"attention_bias": True, **PADDED}),
    "mistral": ("mistral", {"sliding_window": None, "tie_word_embeddings": False, "head_dim": 16}),
    "mistral_window": ("mistral", {"sliding_window": 7, "vocab_size": 63}),
    "qwen2": ("qwen2", {"num_key_value_heads": 1}),
    "qwen2_padded": ("qwen2", {**PADDED, "tie_word_embeddings": False}),
    "qwen2_yarn": ("qwen2", {"rope_scaling": YARN_ROPE}),
    "qwen2_window": (
        "qwen2",
        {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_padded": ("qwen3", {**PADDED, "head_dim": 8, "tie_word_embeddings": False}),
}
MAX_SHARD_BYTES = 20_000
PROMPT_LENGTHS = (3, 11, 1, 7)
NEW_TOKENS = 14
TEMPERATURE = 0.7
# Sequences to train on, longer than windows and original RoPE lengths; the last two share a prompt
# of one token.
TRAINED_PROMPTS = [11, 3, 1, 1]
TRAINED_RESPONSES = [9, 30, 38, 2]
GROUPS = (0, 1, 2, 2)


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
    """Return logits, responses, log-probs and gradients, and export the model to `out`."""
    lm = megatron_model(folder, mesh)
    vocab_size = lm.architecture.vocab_size
    tokens = tokens_of(vocab_size)
    results: dict[str, Any] = {"logits": all_logits(lm, tokens)}
    export_hf_folder(lm, folder, out, max_shard_bytes=MAX_SHARD_BYTES)

    exact = megatron_model(folder, mesh, torch.float64)  # float64 has no near ties between tokens
    prompts = [Prompt(i, "", tuple(prompt)) for i, prompt in enumerate(prompts_of(vocab_size))]
    params = SamplingParams(max_length=NEW_TOKENS, use_greedy=True, stop_token_ids=(2,))
    engine = NativeGenerator(exact, load_tokenizer(folder))
    made = engine.generate(prompts, 1, params, seed=0)
    results["responses"] = [
        row[:n] for row, n in zip(made.tokens.tolist(), made.lengths.tolist(), strict=True)
    ]
    alone = [engine.generate([prompt], 1, params, seed=0) for prompt in prompts]
    results["responses_alone"] = [completions.tokens[0].tolist() for completions in alone]
    results["drawn"] = drawn_here(engine, prompts)
    results["scores"] = scored_here(folder, mesh)

    ddp = wrap_data_parallel(lm)
    optim = OptimConfig(lr=1e-3, weight_decay=0.0, betas=[0.9, 0.95])
    optimizer = ActorOptimizer(*build_optimizer(ddp, optim, clip_grad=0.0, total_steps=10))

    def loss_of(model: Any, batch: Tensor) -> Tensor:
        hidden = model(batch[:, :-1])
        logits = lm.logits(hidden.reshape(-1, hidden.shape[-1]))
        return tensor_parallel.vocab_parallel_cross_entropy(
            logits[:, None], batch[:, 1:].reshape(-1, 1)
        ).mean()

    accumulate_gradients(ddp, [tokens], loss_of)
    gradients: dict[str, Any] = {
        name: parameter.main_grad  # type: ignore[attr-defined]
        for name, parameter in parameters_of(lm).items()
    }
    results["gradient"] = dict(hf_tensors(lm, gradients))
    results["norm"] = optimizer.step().grad_norm
    return results


def trained_sequences(vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return sequences, prompt lengths and response lengths.

    The samples of a group share a prompt.
    """
    sequences, prompts, responses = padded_sequences(TRAINED_PROMPTS, TRAINED_RESPONSES, vocab_size)
    sequences[3, 0] = sequences[2, 0]
    return sequences, prompts, responses


def weights_of_scores() -> tuple[Tensor, Tensor]:
    """Return the coefficients of log-probs and entropies in a loss; each token has its own."""
    both = torch.randn(
        2,
        len(TRAINED_RESPONSES),
        max(TRAINED_RESPONSES),
        generator=torch.Generator().manual_seed(3),
    )
    return both[0].double(), both[1].double()


def scored_here(folder: Path, mesh: Mesh) -> dict[str, Any]:
    """Return log-probs, entropies and their gradient in the training path, padded and packed."""
    lm = megatron_model(folder, mesh, torch.float64)
    batch = trained_sequences(lm.architecture.vocab_size)
    of_log_probs, of_entropies = weights_of_scores()
    layouts = {
        "padded": PaddedSequences(lm, *batch),
        "packed": PackedGroups(lm, *batch, torch.tensor(GROUPS)),
    }
    results: dict[str, Any] = {}
    for name, layout in layouts.items():
        hidden = layout.hidden(lm)
        width = max(TRAINED_RESPONSES)
        scores = response_scores(
            layout, hidden, lm, TEMPERATURE, width, chunk_tokens=7, with_entropy=True
        )
        assert scores.entropy is not None
        results[name] = {"log_probs": scores.log_probs.detach(), "entropy": scores.entropy.detach()}
        (of_log_probs * scores.log_probs + of_entropies * scores.entropy).sum().backward()
    gradients: dict[str, Any] = {
        name: parameter.grad for name, parameter in parameters_of(lm).items()
    }
    for name, gradient in gradients.items():
        # Each rank has its own heads' part; it is summed at the end of accumulation.
        if "q_layernorm" in name or "k_layernorm" in name:
            dist.all_reduce(gradient, group=mesh.tp_group)
    results["gradient"] = dict(hf_tensors(lm, gradients))
    return results


def scored_by_transformers(folder: Path) -> dict[str, Any]:
    model = transformers_model(folder, torch.float64)
    batch = trained_sequences(model.config.vocab_size)
    of_log_probs, of_entropies = weights_of_scores()
    options = {"temperature": TEMPERATURE, "width": max(TRAINED_RESPONSES)}
    log_probs = brute_force_log_probs(model, *batch, **options)
    entropy = brute_force_entropies(model, *batch, **options)
    (of_log_probs * log_probs + of_entropies * entropy).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "gradient": gradients}


def drawn_here(engine: NativeGenerator, prompts: list[Prompt]) -> dict[str, Any]:
    """Return sampled responses and the log-probs that the generator reports."""
    params = SamplingParams(max_length=NEW_TOKENS, temperature=TEMPERATURE, stop_token_ids=(2,))
    made = engine.generate(prompts, 2, params, seed=5)
    sequences, lengths = join_prompts_and_responses(made.repeat_to_samples(prompts), made, pad_id=0)
    return {
        "log_probs": made.log_probs,
        "sequences": sequences,
        "prompts": lengths,
        "responses": made.lengths,
    }


def computed_by_transformers(folder: Path) -> dict[str, Any]:
    model = transformers_model(folder)
    vocab_size = model.config.vocab_size
    tokens = tokens_of(vocab_size)
    results: dict[str, Any] = {"logits": transformers_logits(model, tokens)}

    logits = model(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    results["gradient"] = {name: parameter.grad for name, parameter in model.named_parameters()}
    results["norm"] = float(
        torch.stack([gradient.norm() for gradient in results["gradient"].values()]).norm()
    )

    results["scores"] = scored_by_transformers(folder)

    exact = transformers_model(folder, torch.float64)
    results["responses"] = []
    for prompt in prompts_of(vocab_size):
        row = torch.tensor([prompt])
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
        out = exact.generate(row, attention_mask=torch.ones_like(row), **options)
        results["responses"].append(out[0, len(prompt) :].tolist())
    return results
