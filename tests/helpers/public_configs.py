"""Shapes from the config.json of well-known models, and their parameter counts."""

from __future__ import annotations

from typing import Any

BASE = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_2_7B = {
    **BASE,
    "num_key_value_heads": 32,
    "torch_dtype": "float16",
    "model_type": "llama",
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "vocab_size": 32000,
}
LLAMA_3_1_8B = {
    **BASE,
    "model_type": "llama",
    "attention_bias": False,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA_3_2_1B = {
    **LLAMA_3_1_8B,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
    "intermediate_size": 8192,
    "rope_scaling": {**LLAMA_3_1_8B["rope_scaling"], "factor": 32.0},
    "head_dim": 64,
}
LLAMA_3_1_70B = {
    **LLAMA_3_1_8B,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "intermediate_size": 28672,
}
MISTRAL_7B_V0_1 = {
    **BASE,
    "model_type": "mistral",
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
MISTRAL_7B_V0_3 = {
    **MISTRAL_7B_V0_1,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32768,
}
QWEN2_5_7B = {
    **BASE,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "model_type": "qwen2",
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN2_5_0_5B = {
    **QWEN2_5_7B,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "sliding_window": 32768,
    "vocab_size": 151936,
}
QWEN3_8B = {
    **BASE,
    "num_hidden_layers": 36,
    "rms_norm_eps": 1e-06,
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_0_6B = {
    **QWEN3_8B,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
    "intermediate_size": 3072,
    "max_window_layers": 28,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-2-7b": LLAMA_2_7B,
    "Llama-3.1-8B": LLAMA_3_1_8B,
    "Llama-3.2-1B": LLAMA_3_2_1B,
    "Mistral-7B-v0.1": MISTRAL_7B_V0_1,
    "Mistral-7B-v0.3": MISTRAL_7B_V0_3,
    "Qwen2.5-0.5B": QWEN2_5_0_5B,
    "Qwen2.5-7B": QWEN2_5_7B,
    "Qwen3-0.6B": QWEN3_0_6B,
    "Qwen3-8B": QWEN3_8B,
}
PARAMETERS = {
    "Llama-2-7b": 6_738_415_616,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
}
