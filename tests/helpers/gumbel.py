from __future__ import annotations

import torch
from torch import Tensor

from reinforce_rl.generation.native.sampling import _negative_noise


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Return the native engine's noise float32 [R, V] from keys int32 [R, 2]."""
    buffers = torch.empty((2, len(keys), vocab_size), dtype=torch.int32, device=keys.device)
    return _negative_noise(keys, buffers[0], buffers[1]).neg_()
