"""A policy of a Hugging Face folder in this project's form and in transformers', for comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_weights import HFFolder, load_hf_weights
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model import CausalLM


def megatron_model(folder: Path, mesh: Mesh, dtype: torch.dtype = torch.float32) -> CausalLM:
    lm = CausalLM(Architecture.from_folder(folder), mesh, dtype)
    load_hf_weights(lm, HFFolder(folder))
    return lm.eval()


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


@torch.no_grad()
def all_logits(lm: CausalLM, tokens: Tensor) -> Tensor:
    """[b, s, V], as transformers gives them."""
    hidden = lm(tokens)
    return lm.full_logits(hidden.reshape(-1, hidden.shape[-1])).view(*tokens.shape, -1)


@torch.no_grad()
def transformers_logits(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens).logits


def random_tokens(vocab_size: int, *shape: int, seed: int = 0) -> Tensor:
    """Tokens without the special ones."""
    return torch.randint(4, vocab_size, shape, generator=torch.Generator().manual_seed(seed))
