"""Tiny models of every supported family, and tokens and prompts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.models import tiny_family_folder
from helpers.policies import random_prompts, random_tokens
from torch import Tensor

from reinforce_rl.data.batches import Prompt

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
NEW_TOKENS = 14


def family_folder(root: Path, name: str) -> Path:
    family, keys = MODELS[name]
    return tiny_family_folder(root / name, family, **keys)


def tokens_of(vocab_size: int) -> Tensor:
    """Return tokens [3, 40], longer than windows and original RoPE lengths."""
    return random_tokens(vocab_size, 3, 40)


def prompts_of(vocab_size: int) -> list[Prompt]:
    return random_prompts(vocab_size, (3, 11, 1, 7), seed=1)
