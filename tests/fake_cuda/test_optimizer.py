"""Optimizer step, offloading and transfers on fake GPUs: kernels, syncs, bytes, NCCL."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import actor_of, rows_of, sequences, whole_batch
from helpers.fake_cuda.machine import Machine
from helpers.fake_cuda.mode import Ledger
from helpers.fake_cuda.workloads import check_collectives, kernels_by_name
from helpers.layouts import ALL_LAYOUTS, SETTINGS, Layout

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.megatron.checkpointer import Checkpointer, latest_checkpoint
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer

KINDS = pytest.mark.parametrize(
    ("dtype", "distributed"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["fp32", "bf16", "bf16 shared"],
)


def built_on(mesh: Any, folder: Path, dtype: torch.dtype, distributed: bool) -> tuple[Any, ...]:
    """Return the actor, megatron's optimizer and scheduler, and the optimizer that steps."""
    sharing = OptimConfig(distributed=distributed, overlap_grad_sync=distributed)
    actor = actor_of(folder, mesh, dtype=dtype, with_reference=False, optim=sharing)
    built = build_optimizer(actor.ddp, **SETTINGS)
    return actor, built, ActorOptimizer(*built, actor.ddp, overlap_restore=distributed)


@contextmanager
def trained(
    machine: Machine, folder: Path, dtype: torch.dtype, distributed: bool
) -> Iterator[tuple[Any, ...]]:
    """Train one step on one of two data-parallel ranks.

    Yields actor, megatron's parts, optimizer, and the memory of other objects.
    """
    gc.collect()  # free models of other tests, so that the measured memory is this one's
    others = machine.gpu.memory.bytes
    with machine.rank(0, 2), Layout().mesh() as mesh:
        actor, built, optimizer = built_on(mesh, folder, dtype, distributed)
        accumulate(actor)
        optimizer.step()
        yield actor, built, optimizer, others


def accumulate(actor: Any) -> None:
    actor.get_loss_and_metrics(rows_of(whole_batch(), [0, 3]), sequences(4))


@KINDS
def test_moments_can_be_there_before_the_first_step(machine, folders, dtype, distributed):
    """An engine on the same GPU sizes its cache by the free memory at its start."""
    with machine.rank(0, 2), Layout().mesh() as mesh:
        actor, _, optimizer = built_on(mesh, folders[2], dtype, distributed)
        gc.collect()  # leftovers of an earlier test must not be freed during this one
        before = machine.gpu.memory.bytes
        optimizer.allocate_moments()
        moments = machine.gpu.memory.bytes - before
        parameters = list(actor.lm.parameters())
        elements = sum(parameter.numel() for parameter in parameters)
        share = elements // 2 if distributed else elements
        # torch's allocator rounds up each tensor to 512 bytes.
        assert 2 * 4 * share <= moments <= 2 * (4 * share + 512 * len(parameters))
        accumulate(actor)
        with machine.gpu.counting() as ledger:
            assert not optimizer.step().skipped
        assert ledger.peak - ledger.start < 10_000


@KINDS
def test_a_step_waits_for_the_gpu_once_and_has_no_temporaries(machine, folders, dtype, distributed):
    with trained(machine, folders[2], dtype, distributed) as (actor, _, optimizer, _):
        accumulate(actor)
        with machine.gpu.counting() as ledger:
            assert not optimizer.step().skipped
        kernels = kernels_by_name(ledger)
        assert ledger.num_syncs == 1, ledger.syncs  # for the norm
        # of scalars; plain Adam's counters are as large as the model
        assert ledger.peak - ledger.start < 10_000
        assert kernels["_fused_adamw_"] == 2  # matrices with weight decay, norms without
        assert kernels["_foreach_norm"] == 1
        count = len(list(actor.lm.parameters()))
        copies = count if dtype == torch.bfloat16 else 0  # copies to the model's weights
        assert ledger.num_kernels <= 16 + copies, kernels
        expected = [("all_reduce", True)] if distributed else []
        assert [
            (call.kind, call.on_gpu) for call in ledger.collectives if call.kind != "all_gather"
        ] == (expected)


@KINDS
def test_only_the_weights_stay_while_responses_are_generated(machine, folders, dtype, distributed):
    with trained(machine, folders[2], dtype, distributed) as (actor, _, optimizer, others):
        weights = sum(p.nbytes for p in actor.lm.parameters())
        before = machine.gpu.memory.bytes
        with optimizer.offloaded():
            inside = machine.gpu.memory.bytes
        assert machine.gpu.memory.bytes == before
        elements = sum(p.numel() for p in actor.lm.parameters())
        share = 2 if distributed else 1
        main = 0 if dtype == torch.float32 else 4
        # Gradients, and this rank's moments and fp32 weights. Buckets are padded, allocations
        # rounded up.
        expected = elements * (4 + (8 + main) / share)
        assert before - inside == pytest.approx(expected, rel=0.04)
        # Besides the weights: Adam's step counters, scalars, RoPE's frequencies.
        assert weights <= inside - others <= weights + 1024 * len(list(actor.lm.parameters()))
        accumulate(actor)
        assert not optimizer.step().skipped


@KINDS
def test_a_restored_run_steps_on(machine, folders, tmp_path, dtype, distributed):
    """The step counters of a fused Adam must be restored to the GPU."""
    with trained(machine, folders[2], dtype, distributed) as (_, built, _, _):
        steps = [
            state["step"]
            for part in built[0].chained_optimizers
            for state in part.optimizer.state.values()
        ]
        types = {step.device.type for step in steps}
        assert types == {"cuda"}
    with machine.rank(0, 1), Layout().mesh() as mesh:
        sharing = OptimConfig(distributed=distributed)
        for is_new in (True, False):
            actor = actor_of(folders[2], mesh, dtype=dtype, with_reference=False, optim=sharing)
            built: Any = build_optimizer(actor.ddp, **SETTINGS)
            checkpointer = Checkpointer(tmp_path, mesh, actor.ddp, *built)
            if not is_new:
                checkpoint = latest_checkpoint(tmp_path)
                assert checkpoint is not None
                checkpointer.restore(checkpoint)
            accumulate(actor)
            ActorOptimizer(*built, actor.ddp).step()
            steps = [
                state["step"]
                for part in built[0].chained_optimizers
                for state in part.optimizer.state.values()
            ]
            assert {step.device.type for step in steps} == {"cuda"}
            if is_new:
                checkpointer.save(1, {"step": 1})


@pytest.mark.parametrize("name", ["TP2 PP2 SP", "PP2 CP2", "PP2 DP2 distributed optimizer"])
def test_stages_neither_exchange_shapes_nor_wait(machine, folders, name):
    layout = ALL_LAYOUTS[name]
    ledgers = {}
    for rank in range(layout.ranks):
        with machine.rank(rank, layout.ranks) as ledger, layout.mesh() as mesh:
            options: dict[str, Any] = {
                "model": layout.model,
                "dtype": layout.dtype,
                "updates": layout.updates,
            }
            options["optim"] = layout.optim
            actor = actor_of(folders[4], mesh, with_reference=False, micro_batch_size=1, **options)
            with machine.gpu.counting() as training:
                accumulate(actor)
        ledgers[rank] = ledger
        assert not [
            place for place in training.syncs if "synchronize" in place or "shapes" in place
        ]
        hidden = actor.lm.architecture.hidden_size
        moved = [call.bytes for call in training.collectives if call.kind in ("send", "recv")]
        assert moved
        for size in moved:
            assert size % (hidden * layout.dtype.itemsize) == 0
    check_collectives(ledgers)


def test_waits_of_any_length_are_not_on_the_gpu(machine):
    ledgers: dict[int, Ledger] = {}
    for rank in range(4):
        with machine.rank(rank, 4) as ledger, Layout(tp=2).mesh() as mesh:
            mesh.from_model_parallel_rank_0([1])
            mesh.gather_on_model_parallel_rank_0(rank)
            mesh.raise_if_any(None)
            mesh.any_rank(False)
            mesh.barrier()
            mesh.gather_over_dp(rank)
            mesh.sum_over_dp(torch.ones(3))
        assert ledger.num_syncs == 0
        assert len(ledger.collectives) >= 7
        assert not any(call.on_gpu for call in ledger.collectives), ledger.collectives
        ledgers[rank] = ledger
    check_collectives(ledgers)
