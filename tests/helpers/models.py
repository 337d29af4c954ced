"""The real model that tests share, and small random models."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from helpers.tiny_tokenizer import write_tiny_tokenizer

from reinforce_rl.errors import ReinforceError
from reinforce_rl.launch.smollm2 import DEFAULT_FOLDER, prepare_smollm2

ROOT = Path(__file__).parents[2]


@functools.cache
def smollm2_folder() -> Path:
    """Return the folder of SmolLM2-135M-Instruct below the repository's root.

    It is created once, in about 20 s. If the weights can neither be found nor created, the calling
    test is skipped; with `CI` set it fails.
    """
    folder = ROOT / DEFAULT_FOLDER
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):  # tests run in several processes
        try:
            return prepare_smollm2(folder)
        except ReinforceError as error:
            if os.environ.get("CI"):
                raise
            import pytest  # benchmarks also use this module, without pytest

            pytest.skip(f"the weights of SmolLM2-135M-Instruct are not here: {error}")


def tiny_llama_folder(
    folder: str | Path,
    *,
    vocab_size: int = 64,
    tied: bool = True,
    heads: int = 4,
    groups: int = 2,
    layers: int = 2,
    hidden: int = 32,
    ffn: int = 64,
    head_dim: int | None = None,
    max_positions: int = 256,
    rope_scaling: dict[str, Any] | None = None,
    logit_scale: float = 1.0,
    seed: int = 0,
    max_shard_size: int | str = "1GB",
) -> Path:
    """Write a random Llama with the tiny tokenizer as a Hugging Face folder.

    All weights are random, norms included, so that swapped tensors show; they only depend on the
    seed. pad, bos and eos are 0, 1 and 2.

    Args:
        logit_scale: about the standard deviation of the logits; 0 gives the uniform distribution.
        max_shard_size: smaller values give several files and an index.
    """
    keys: dict[str, Any] = {} if rope_scaling is None else {"rope_scaling": rope_scaling}
    return tiny_family_folder(
        folder,
        "llama",
        seed=seed,
        logit_scale=logit_scale,
        max_shard_size=max_shard_size,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim or hidden // heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        **keys,
    )


def tiny_family_folder(
    folder: str | Path,
    family: str,
    *,
    head: str = "AutoModelForCausalLM",
    seed: int = 0,
    logit_scale: float = 2.0,
    max_shard_size: int | str = "1GB",
    **keys: Any,
) -> Path:
    """Like `tiny_llama_folder`, for any `model_type`, config.json keys and class with a head."""
    import transformers

    folder = Path(folder)
    values = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **keys,
    }
    config = transformers.AutoConfig.for_model(family, **values)
    model = getattr(transformers, head).from_config(config)
    randomize(model, seed, logit_scale)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return write_tiny_tokenizer(folder, vocab_size=values["vocab_size"])


@torch.no_grad()
def randomize(model: Any, seed: int, logit_scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(".bias"):
            parameter.copy_(0.5 * noise)
        elif parameter.ndim == 1:
            parameter.copy_(1.0 + 0.1 * noise)
        elif "embed_tokens" in name or "lm_head" in name:
            parameter.copy_(noise * logit_scale / parameter.shape[1] ** 0.5)
        else:
            parameter.copy_(noise / parameter.shape[1] ** 0.5)
