"""Locates where two models differ: the residual stream after each decoder layer.

Layer outputs are [tokens, hidden], float32 on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.schedule import forward_passes

ROUNDING = {"32": 1e-3, "bf16": 0.1}  # SmolLM2 differs from transformers by 2e-6 and 0.03 at most


def layer_outputs(lm: CausalLM, tokens: Sequence[int]) -> list[Tensor]:
    """Return the trainer's layer outputs for `tokens` on every rank of a block.

    A collective call over the block; not with context parallelism.
    """
    outputs: list[Tensor] = []

    def keep(_layer: object, _inputs: object, output: tuple[Tensor, ...]) -> None:
        hidden = output[0]  # [s, b, h]
        if lm.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=lm.mesh.tp_group)
        outputs.append(hidden[: len(tokens), 0].float().cpu())

    with contextlib.ExitStack() as hooks:
        for layer in lm.decoder.layers:
            hooks.enter_context(layer.register_forward_hook(keep))
        ids = torch.tensor([tokens], device=lm.mesh.device)
        forward_passes(
            lm,
            [ids],
            lambda lm, ids: lm(ids),
            lambda *_: None,
            lambda ids: lm.stage_shape(*ids.shape),
        )
    return [layer for stage in lm.mesh.gather_over_pp(outputs) for layer in stage]


def layer_table(outputs: Sequence[Tensor], others: Sequence[Tensor], tolerance: float) -> str:
    """Return a table of each layer's differences, and where to look for their cause.

    Differences are relative to the norm of a token's vector in `outputs`.
    """
    lines = ["layer  mean difference  largest (at token)"]
    difference = None
    for number, (left, right) in enumerate(zip(outputs, others, strict=True), 1):
        gaps = (left - right).norm(dim=1) / left.norm(dim=1)
        largest, token = gaps.max(0)
        lines.append(f"{number:5}  {float(gaps.mean()):15.2g}  {float(largest):.2g} ({int(token)})")
        if difference is None and not float(largest) <= tolerance:
            # The first token attends only to itself.
            suspects = (
                "RoPE, window, scale, Q, K"
                if gaps[0] <= tolerance
                else "the first token too: V, O, MLP, norms"
            )
            difference = (
                f"they diverge in layer {number}, by more than {tolerance:g}; look at {suspects}"
            )
    no_difference = (
        f"no layer differs by more than {tolerance:g}: "
        "look at the final norm, the output layer and the log-probs"
    )
    return "\n".join([*lines, difference or no_difference])
