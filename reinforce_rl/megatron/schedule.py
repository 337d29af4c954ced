"""Passes over micro-batches by megatron's own schedules, with or without a pipeline of stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

MicroBatch = TypeVar("MicroBatch")
Result = TypeVar("Result")


def forward_passes(
    model: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    hidden_of: Callable[[torch.nn.Module, MicroBatch], Tensor],
    result_of: Callable[[Tensor, MicroBatch], Result],
) -> list[Result]:
    """Run every micro-batch through all stages, without gradient.

    Args:
        model: the whole model, or this rank's stage of it.
        micro_batches: the same on every rank of a block.
        hidden_of: runs the model; what it gives is what the next stage goes on with.
        result_of: of the hidden states on the last stage.

    Returns:
        the results on the last stage, in order; nothing on the others.
    """

    def loss_of(hidden: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Result]:
        return hidden, result_of(hidden, micro_batch)

    with torch.no_grad():
        return _run(model, micro_batches, hidden_of, loss_of, forward_only=True)


def accumulate_gradients(
    ddp: DistributedDataParallel,
    micro_batches: Sequence[MicroBatch],
    hidden_of: Callable[[DistributedDataParallel, MicroBatch], Tensor],
    loss_of: Callable[[Tensor, MicroBatch], tuple[Tensor, Result]],
) -> list[Result]:
    """Sum the gradients of all micro-batches on all data- and context-parallel ranks into the gradient buffers.

    Args:
        ddp: the wrapped model; its gradients are zeroed first.
        micro_batches: at least one on every rank, or the ranks' collectives would not meet; the same on every rank of
            a block.
        hidden_of: runs the model; what it gives is what the next stage goes on with.
        loss_of: on the last stage, the micro-batch's share of the global loss, a scalar with gradient, and whatever
            is wanted besides.

    Returns:
        what `loss_of` gave besides, in order, on the last stage; nothing on the others.
    """
    ddp.zero_grad_buffer()
    for parameter in ddp.parameters():
        # The fp32 optimizer leaves the buffer itself here. Autograd would add to it, and megatron's hook once more,
        # so that the first micro-batch counted twice from the second step on.
        parameter.grad = None
    return _run(ddp, micro_batches, hidden_of, loss_of, forward_only=False)


def _run(
    model: torch.nn.Module,
    micro_batches: Sequence[Any],
    hidden_of: Callable[[Any, Any], Tensor],
    loss_of: Callable[[Tensor, Any], tuple[Tensor, Any]],
    *,
    forward_only: bool,
) -> list[Any]:
    def forward_step(iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable]:
        micro_batch = next(iterator)
        hidden = hidden_of(model, micro_batch)

        def finish(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            loss, result = loss_of(hidden, micro_batch)
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), result  # no tokens to divide by

        return hidden, finish

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=[model],  # type: ignore[arg-type]
        num_microbatches=len(micro_batches),
        seq_length=1,  # of pipeline buffers, whose shapes travel with the tensors here
        micro_batch_size=1,
        forward_only=forward_only,
    )
