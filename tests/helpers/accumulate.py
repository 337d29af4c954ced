"""The gradient of any function of a whole model, accumulated as in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reinforce_rl.megatron import schedule


def accumulate_gradients(ddp: Any, micro_batches: Sequence[Any], loss_of: Callable[[Any, Any], Any]) -> float:
    """As `schedule.accumulate_gradients`, for a model on one stage and `loss_of(ddp, micro_batch)`; their sum."""
    return sum(schedule.accumulate_gradients(ddp, micro_batches, loss_of, lambda loss, _: (loss, loss.item())))
