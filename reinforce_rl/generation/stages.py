"""Passes without gradient through the stages of a pipeline.

Notation: b sequences of a pass, s positions, h hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from reinforce_rl.megatron.model import CausalLM


def through_stages(lm: CausalLM, tokens: Tensor, positions: Tensor | None, cache: Any) -> Tensor | None:
    """Hidden states [b, s, h] on the last stage, None on the others, which wait for each other in turn."""
    mesh = lm.mesh
    if mesh.pp_rank > 0:
        received = _room(lm, *tokens.shape)
        mesh.receive_from_stage(received, mesh.pp_rank - 1)
        lm.set_input_tensor(received)
    hidden = lm(tokens, positions, cache)
    if mesh.is_last_stage:
        return hidden
    mesh.send_to_stage(hidden.contiguous(), mesh.pp_rank + 1)
    return None


def last_of_prompts(lm: CausalLM, prompts: Sequence[Sequence[int]], pad_id: int, cache: Any) -> Tensor | None:
    """Prefill of prompts, for which the cache was told to `read`: [b, h] on the last stage, of their last tokens."""
    device = lm.mesh.device
    ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    rows = [torch.tensor(prompt) for prompt in prompts]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
    hidden = through_stages(lm, tokens.to(device), None, cache)
    return None if hidden is None else hidden[torch.arange(len(rows), device=device), ends]


def hand_on(lm: CausalLM, hidden: Tensor | None, rows: int) -> Tensor | None:
    """Give the next stage what this one computed and take what the one before did, of one token a row, at a time.

    Args:
        hidden: [1, b, h] for the next stage; None where it expects nothing.
        rows: b of what the stage before gives; 0 where it gives nothing.

    Returns:
        [1, b, h], or None.
    """
    mesh, group = lm.mesh, lm.mesh.pp_group
    received = _room(lm, rows, 1) if rows else None
    messages = []
    if hidden is not None:
        messages.append(dist.P2POp(dist.isend, hidden.contiguous(), group=group, group_peer=mesh.pp_rank + 1))
    if received is not None:
        messages.append(dist.P2POp(dist.irecv, received, group=group, group_peer=mesh.pp_rank - 1))
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
    return received


def _room(lm: CausalLM, rows: int, positions: int) -> Tensor:
    shape = (positions, rows, lm.architecture.hidden_size)
    return torch.empty(shape, dtype=lm.config.pipeline_dtype, device=lm.mesh.device)
