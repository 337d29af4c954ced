"""Transfers between pipeline stages: shapes are known and need not be exchanged."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.batches import VOCAB_SIZE, actor_of, gradient_of, sequences, whole_batch
from helpers.models import tiny_llama_folder
from helpers.ranks import call_on_ranks
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.schedule import _Ahead

HIDDEN = 36


def exchange_of_stages(folder, tp):
    """Check the tensors that two stages exchange for unequal lengths."""
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


@pytest.mark.parametrize(
    "tp_size", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["PP2", "TP2 PP2 SP"]
)
def test_stages_send_each_other_hidden_states_only(tp_size, tmp_path):
    folder = tiny_llama_folder(
        tmp_path, vocab_size=VOCAB_SIZE, heads=9, groups=3, hidden=HIDDEN, layers=4, seed=5
    )
    call_on_ranks(exchange_of_stages, 2 * tp_size, folder, tp_size, timeout=240)


def test_shapes_come_in_the_order_of_one_forward_one_backward():
    """A middle stage takes a micro-batch early, once, for its shape.

    It keeps the shapes for the gradients.
    """
    made = []

    def micro_batches():
        for size in (3, 1, 2, 5):
            made.append(size)
            yield size

    ahead = _Ahead(micro_batches(), lambda size: (size, 1, 8))
    assert ahead.next_shape() == (3, 1, 8)
    assert next(ahead) == 3
    assert ahead.next_shape() == (1, 1, 8)
    assert next(ahead) == 1
    assert made == [3, 1]
    assert ahead.next_gradient_shape() == (3, 1, 8)
    assert ahead.next_shape() == (2, 1, 8)
    assert next(ahead) == 2
    expected = [(1, 1, 8), (2, 1, 8)]
    assert [ahead.next_gradient_shape() for _ in range(2)] == expected
    # a first stage needs no forward shape
    assert next(ahead) == 5
    assert ahead.next_gradient_shape() == (5, 1, 8)
