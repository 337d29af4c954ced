"""Align language models with REINFORCE and RLOO: a megatron-core actor, a reward model served by PyTriton.

Importing this package imports neither PyTriton, nor TensorRT-LLM, nor wandb: each is loaded where it is used.
"""

__version__ = "0.1.0"
