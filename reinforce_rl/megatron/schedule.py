"""Forward and backward passes over micro-batches, with or without a pipeline, by megatron."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

Result = TypeVar("Result")


# (model, micro-batch): runs the model and returns the next stage's input
HiddenOf = Callable[[Any, Any], Tensor]
ShapeOf = Callable[[Any], tuple[int, ...]]  # `CausalLM.stage_shape` of a micro-batch


def forward_passes(
    model: torch.nn.Module,
    micro_batches: Sequence[Any],
    hidden_of: HiddenOf,
    result_of: Callable[[Tensor, Any], Result],
    shape_of: ShapeOf | None = None,
) -> list[Result]:
    """Run every micro-batch without gradient.

    Returns the results in order on the last stage, [] on the others. The micro-batches are the same
    on every rank of a block. `shape_of` may be None without a pipeline.
    """

    def loss_of(hidden: Tensor, micro_batch: Any) -> tuple[Tensor, Result]:
        return hidden, result_of(hidden, micro_batch)

    with torch.no_grad():
        return _run(model, micro_batches, hidden_of, loss_of, shape_of, True)


def accumulate_gradients(
    ddp: DistributedDataParallel,
    micro_batches: Sequence[Any],
    hidden_of: HiddenOf,
    loss_of: Callable[[Tensor, Any], tuple[Tensor, Result]],
    shape_of: ShapeOf | None = None,
) -> list[Result]:
    """Zero the gradient buffers, then sum the gradients of all micro-batches into them.

    The sum is over data- and context-parallel ranks too.

    Each rank needs a micro-batch, or collectives would mismatch. On the last stage `loss_of`
    returns a micro-batch's share of the global loss and a result. The results are returned in order
    on the last stage, [] on the others.
    """
    ddp.zero_grad_buffer()
    for parameter in ddp.parameters():
        # The fp32 optimizer leaves the buffer as `.grad`. Autograd and megatron's hook would both
        # add to it.
        parameter.grad = None
    return _run(ddp, micro_batches, hidden_of, loss_of, shape_of, False)


def _run(
    model: torch.nn.Module,
    parts: Sequence[Any],
    hidden_of: HiddenOf,
    loss_of: Any,
    shape_of: Any,
    forward_only: bool,
) -> list[Any]:
    def forward_step(iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable]:
        micro_batch = next(iterator)
        hidden = hidden_of(model, micro_batch)

        def finish(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            loss, result = loss_of(hidden, micro_batch)
            # 0 tokens: megatron does not divide.
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), result

        return hidden, finish

    iterator = iter(parts)
    options = {}
    if model.config.pipeline_model_parallel_size > 1:  # type: ignore[union-attr]
        assert shape_of is not None
        iterator = _Ahead(iterator, shape_of)
        groups = ProcessGroupCollection.use_mpu_process_groups(
            ["tp", "pp", "cp", "dp_cp", "embd", "pos_embd"]
        )
        options = {
            "p2p_communicator": _KnownShapes(groups.pp, model.config, iterator),
            "pg_collection": groups,
        }
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterator,
        model=[model],  # type: ignore[arg-type]
        num_microbatches=len(parts),
        seq_length=1,  # unused: `_KnownShapes` provides the pipeline's shapes
        micro_batch_size=1,
        forward_only=forward_only,
        **options,
    )


class _Ahead:
    """Iterates over micro-batches, and gives the shapes sent between stages, in their order."""

    def __init__(self, micro_batches: Iterator[Any], shape_of: ShapeOf):
        self._micro_batches = micro_batches
        self._shape_of = shape_of
        self._next: deque[Any] = deque()  # at most one, fetched for its shape and not run yet
        self._unanswered: deque[tuple[int, ...]] = deque()  # shapes of pending gradients

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Any:
        micro_batch = self._next.popleft() if self._next else next(self._micro_batches)
        self._unanswered.append(self._shape_of(micro_batch))
        return micro_batch

    def next_shape(self) -> tuple[int, ...]:
        self._next.append(next(self._micro_batches))
        return self._shape_of(self._next[0])

    def next_gradient_shape(self) -> tuple[int, ...]:
        return self._unanswered.popleft()


class _KnownShapes(P2PCommunicator):
    """megatron's pipeline communicator with shapes that each stage computes.

    Exchanging the shapes would sync the GPU.
    """

    def __init__(self, group: Any, config: Any, ahead: _Ahead):
        super().__init__(group, config)
        self._ahead = ahead

    def _communicate_shapes(
        self, to_next: Any, to_previous: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Any, Any]:
        shape = self._ahead.next_shape() if recv_prev else (0, 0, 0)
        return shape, self._ahead.next_gradient_shape() if recv_next else (0, 0, 0)
