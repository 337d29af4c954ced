"""Align language models with REINFORCE and RLOO: a megatron-core actor, a reward model served by PyTriton.

Importing this package does not import torch, PyTriton, TensorRT-LLM or wandb; `train` does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from reinforce_rl.aliases import install

if TYPE_CHECKING:
    from reinforce_rl.launch.api import Run, train

__all__ = ["Run", "train"]
__version__ = "0.1.0"

# Large CPU tensors get 2 MiB pages, as 4 KiB page faults dominate the cost of fresh memory. torch reads the variable
# at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

install()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from reinforce_rl.launch import api

    return getattr(api, name)
