"""Tensors that two stages exchange for unequal lengths. Usage: stage_shapes.py FOLDER SP"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from helpers.batches import actor_of, gradient_of, sequences, whole_batch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from reinforce_rl.megatron.mesh import parallel_mesh

HIDDEN = 36


def main() -> None:
    folder = sys.argv[1]
    tp = int(sys.argv[2])
    sent: list[torch.Tensor] = []
    exchange = dist.batch_isend_irecv

    def recorded(operations: list) -> list:
        sent.extend(operation.tensor for operation in operations if operation.op is dist.isend)
        return exchange(operations)

    def refused(*args: object) -> None:
        raise AssertionError("stages told each other shapes")

    dist.batch_isend_irecv = recorded
    P2PCommunicator._communicate_shapes = refused  # type: ignore[method-assign]
    with parallel_mesh(tp, 2, sequence_parallel=tp > 1) as mesh:
        for shared_prefix in (False, True):
            actor = actor_of(
                folder, mesh, micro_batch_size=3, with_reference=False, shared_prefix=shared_prefix
            )
            actor.get_loss_and_metrics(whole_batch(), sequences(10))
            # One per micro-batch, and of several lengths; forward or, on the second stage,
            # backward.
            assert {tensor.dtype for tensor in sent} == {torch.float32}
            assert {tensor.shape[-1] for tensor in sent} == {HIDDEN}
            lengths = [tensor.shape[0] for tensor in sent]
            assert len(lengths) == 4, lengths
            assert len(set(lengths)) > 1, lengths
            assert gradient_of(actor).isfinite().all()
            sent.clear()
    print("all checks passed")


if __name__ == "__main__":
    main()
