"""Align language models with REINFORCE and RLOO: a megatron-core actor, a reward model served by PyTriton.

Importing this package does not import PyTriton, TensorRT-LLM or wandb.
"""

import os

from reinforce_rl.aliases import install

__version__ = "0.1.0"

# Large CPU tensors get 2 MiB pages, as 4 KiB page faults dominate the cost of fresh memory. torch reads the variable
# at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

install()
