from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from reinforce_rl.generation.native.sampling import _negative_noise, position_keys, sample_seeds


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Return the native engine's noise, float32 [R, V], from keys int32 [R, 2]."""
    buffers = torch.empty((2, len(keys), vocab_size), dtype=torch.int32, device=keys.device)
    return _negative_noise(keys, buffers[0], buffers[1]).neg_()


def noise_keys(
    seed: int, prompt_ids: np.ndarray, sample_ids: np.ndarray, num_positions: int
) -> Tensor:
    """Return int32 keys [R, num_positions, 2] of (seed, prompt, sample, position)."""
    return position_keys(sample_seeds(seed, prompt_ids, sample_ids), num_positions)
