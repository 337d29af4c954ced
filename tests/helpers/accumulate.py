"""Gradient accumulation for any loss of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reinforce_rl.megatron import schedule


def accumulate_gradients(
    ddp: Any, micro_batches: Sequence[Any], loss_of: Callable[[Any, Any], Any]
) -> float:
    """Accumulate gradients of `loss_of(ddp, micro_batch)` on one pipeline stage.

    Returns the summed loss.
    """
    return sum(
        schedule.accumulate_gradients(
            ddp, micro_batches, loss_of, lambda loss, _: (loss, loss.item())
        )
    )
