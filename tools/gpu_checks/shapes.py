"""The shapes of the models, as their config.json has them. Their weights are drawn at random."""

from __future__ import annotations

from typing import Any

_LLAMA_3 = {
    "model_type": "llama",
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "pad_token_id": 128004,
}
_ROPE_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# Shows that everything runs. Heads in groups, as in the other models.
_TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "vocab_size": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_LLAMA_3_2_1B = {
    **_LLAMA_3,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": {**_ROPE_SCALING, "factor": 32.0},
    "tie_word_embeddings": True,
}
_LLAMA_3_1_8B = {
    **_LLAMA_3,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "rope_scaling": {**_ROPE_SCALING, "factor": 8.0},
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "135m": _SMOLLM2_135M,
    "1b": _LLAMA_3_2_1B,
    "8b": _LLAMA_3_1_8B,
}
