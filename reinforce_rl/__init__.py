"""Align language models with REINFORCE and RLOO: a megatron-core actor, a reward model served by PyTriton.

Importing this package imports neither PyTriton, nor TensorRT-LLM, nor wandb: each is loaded where it is used.
"""

import os

from reinforce_rl.aliases import install

__version__ = "0.1.0"

# On a CPU, torch then asks for pages of 2 MiB under its large tensors: most of the time that fresh memory costs is in
# faults of pages of 4 KiB. torch reads it when it first allocates; whoever has set it keeps what they set.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

install()
