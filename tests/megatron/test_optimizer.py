"""The optimizer step, its schedule, and Adam's state.

The state is in host memory; checkpoints store it as rectangles.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.models import tiny_llama_folder
from helpers.policies import accumulate_gradients, megatron_model
from megatron.core.optimizer import clip_grads

from reinforce_rl.config.model import OptimConfig, ScheduleConfig
from reinforce_rl.megatron.optimizer import (
    ActorOptimizer,
    HostCopies,
    build_optimizer,
    inner_optimizers,
    large_states,
    rectangles,
    wrap_data_parallel,
)

LR = 1e-3
MIN_LR = 1e-4
WEIGHT_DECAY = 0.1
TOTAL_STEPS = 10
OPTIM = OptimConfig(
    lr=LR, weight_decay=WEIGHT_DECAY, betas=[0.9, 0.95], sched=ScheduleConfig(min_lr=MIN_LR)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama_folder(tmp_path_factory.mktemp("model"), layers=1)


def wrapped(folder, mesh, optim=OPTIM, clip_grad=0.0):
    ddp = wrap_data_parallel(megatron_model(folder, mesh))
    return ddp, ActorOptimizer(
        *build_optimizer(ddp, optim, clip_grad=clip_grad, total_steps=TOTAL_STEPS)
    )


def weighted_sum(ddp, weight):
    """Return a loss whose gradient is `weight` for every parameter."""
    return sum((p * weight).sum() for p in ddp.parameters())


def formula(schedule: ScheduleConfig, k: int) -> float:
    """Return the learning rate of the k-th step, counted from 1."""
    warmup = schedule.warmup_steps
    end = TOTAL_STEPS - schedule.constant_steps
    if k <= warmup:
        return LR * k / warmup
    if schedule.name == "constant":
        return LR
    if k > end:
        return MIN_LR
    done = (k - warmup) / (end - warmup)
    left = 1 - done if schedule.name == "linear" else (1 + math.cos(math.pi * done)) / 2
    return MIN_LR + left * (LR - MIN_LR)


@pytest.mark.parametrize("name", ("constant", "linear", "CosineAnnealing"))
@pytest.mark.parametrize(("warmup", "constant"), [(0, 0), (3, 0), (3, 2), (1, 9), (10, 0)])
def test_every_step_of_a_schedule(name, warmup, constant, folder, mesh):
    schedule = ScheduleConfig(
        name=name, warmup_steps=warmup, constant_steps=constant, min_lr=MIN_LR
    )
    ddp, optimizer = wrapped(folder, mesh, OptimConfig(lr=LR, sched=schedule))
    for k in range(1, 13):  # also beyond the end
        accumulate_gradients(ddp, [1e-3], weighted_sum)
        assert optimizer.step().lr == pytest.approx(formula(schedule, k), rel=1e-12)


def test_first_step_moves_the_weights_by_its_own_learning_rate(folder, mesh):
    """Adam's first step moves each weight by lr, so it shows the step's learning rate."""
    optim = OptimConfig(lr=LR, weight_decay=0.0, sched=ScheduleConfig(warmup_steps=4))
    ddp, optimizer = wrapped(folder, mesh, optim)
    before = [p.detach().clone() for p in ddp.parameters()]
    accumulate_gradients(ddp, [1.0], weighted_sum)
    optimizer.step()
    for old, new in zip(before, ddp.parameters(), strict=True):
        expected = torch.full_like(old, LR / 4)
        torch.testing.assert_close(old - new, expected, atol=2e-7, rtol=0)


def test_weight_decay_is_decoupled_and_spares_norms(folder, mesh):
    ddp, optimizer = wrapped(folder, mesh)
    before = {name: p.detach().clone() for name, p in ddp.named_parameters()}
    accumulate_gradients(ddp, [1.0], weighted_sum)
    optimizer.step()
    for name, new in ddp.named_parameters():
        decay = 0.0 if new.ndim == 1 else LR * WEIGHT_DECAY
        expected = before[name] * (1 - decay) - LR
        torch.testing.assert_close(new.detach(), expected, atol=2e-7, rtol=0)


def test_micro_batches_are_summed_and_their_shares_returned(folder, mesh):
    ddp, _ = wrapped(folder, mesh)
    share = accumulate_gradients(ddp, [0.25, -1.0, 3.0], weighted_sum)
    total = float(sum(p.detach().sum() for p in ddp.parameters()))
    assert share == pytest.approx(2.25 * total, rel=1e-4)
    for parameter in ddp.parameters():
        torch.testing.assert_close(parameter.main_grad, torch.full_like(parameter, 2.25))
    accumulate_gradients(ddp, [1.0], weighted_sum)  # the buffers are zeroed first
    for p in ddp.parameters():
        assert (p.main_grad == 1).all()


def test_gradient_norm_and_clipping(folder, mesh):
    ddp, optimizer = wrapped(folder, mesh, clip_grad=0.5)
    accumulate_gradients(ddp, [2.0], weighted_sum)
    update = optimizer.step()
    count = sum(p.numel() for p in ddp.parameters())
    assert update.grad_norm == pytest.approx(2.0 * math.sqrt(count), rel=1e-5)  # before clipping
    clipped = math.sqrt(sum(float(p.grad.square().sum()) for p in ddp.parameters()))
    assert clipped == pytest.approx(0.5, rel=1e-4)


def test_small_gradients_are_not_scaled_up(folder, mesh):
    ddp, optimizer = wrapped(folder, mesh, clip_grad=1e6)
    accumulate_gradients(ddp, [2.0], weighted_sum)
    optimizer.step()
    for p in ddp.parameters():
        assert (p.grad == 2.0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_changes_nothing(bad, folder, mesh):
    ddp, optimizer = wrapped(folder, mesh, clip_grad=1.0)
    accumulate_gradients(ddp, [1.0], weighted_sum)
    optimizer.step()
    before = [p.detach().clone() for p in ddp.parameters()]
    accumulate_gradients(ddp, [bad], weighted_sum)
    update = optimizer.step()
    assert update.skipped
    assert not math.isfinite(update.grad_norm)
    for a, b in zip(before, ddp.parameters(), strict=True):
        assert torch.equal(a, b)
    # The moments are finite: a later step is finite and not zero.
    accumulate_gradients(ddp, [1.0], weighted_sum)
    assert not optimizer.step().skipped
    for p in ddp.parameters():
        assert torch.isfinite(p).all()
    for a, b in zip(before, ddp.parameters(), strict=True):
        assert not torch.equal(a, b)


KINDS = pytest.mark.parametrize(
    ("dtype", "distributed"),
    [
        (torch.float32, False),
        (torch.float32, True),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
    ],
    ids=["fp32", "fp32 shared", "bf16", "bf16 shared"],
)
VALUES = (1.0, 0.5, -1.0, 30.0)


def of_kind(folder, mesh, dtype, distributed):
    optim = OPTIM.model_copy(update={"distributed": distributed, "in_place_gradients": False})
    ddp = wrap_data_parallel(megatron_model(folder, mesh, dtype), optim)
    built = build_optimizer(ddp, optim, clip_grad=1.0, total_steps=TOTAL_STEPS)
    return ddp, *built, ActorOptimizer(*built, ddp)


def weights_of(ddp):
    return torch.cat([p.detach().flatten().float() for p in ddp.parameters()])


def as_on_a_gpu(optimizer: ActorOptimizer, block_bytes: int = 10_000) -> ActorOptimizer:
    """Use the GPU code path with CPU tensors, and host memory in blocks that split tensors."""
    optimizer._on_gpu = True
    optimizer._host = HostCopies(pin=False, block_bytes=block_bytes)
    return optimizer


@KINDS
def test_moments_that_are_there_before_the_first_step_change_nothing(
    dtype, distributed, folder, mesh
):
    """An engine on the same GPU sizes its cache by the free memory before this step."""
    weights = []
    for early in (False, True):
        ddp, megatron, _, optimizer = of_kind(folder, mesh, dtype, distributed)
        if early:
            optimizer.allocate_moments()
        before = sum(tensor.nbytes for tensor in large_states(megatron))
        for value in VALUES:
            accumulate_gradients(ddp, [value], weighted_sum)
            optimizer.step()
        after = sum(tensor.nbytes for tensor in large_states(megatron))
        assert (before == after) == early
        weights.append(weights_of(ddp))
    assert torch.equal(*weights)


@KINDS
def test_a_step_takes_one_norm_and_is_megatrons_to_the_last_bit(
    dtype, distributed, folder, mesh, monkeypatch
):
    ddp, megatron, scheduler, _ = of_kind(folder, mesh, dtype, distributed)
    norms = []
    for value in VALUES:  # megatron's own step, which computes the norm again
        accumulate_gradients(ddp, [value], weighted_sum)
        scheduler.step(1)
        megatron.prepare_grads()
        norms.append(float(megatron.get_grad_norm()))
        megatron.step()
    expected = weights_of(ddp)
    ddp, megatron, _, optimizer = of_kind(folder, mesh, dtype, distributed)
    taken = []
    take = clip_grads.get_grad_norm_fp32
    place = "megatron.core.optimizer.optimizer.get_grad_norm_fp32"
    monkeypatch.setattr(place, lambda *args, **options: taken.append(0) or take(*args, **options))
    for value, norm in zip(VALUES, norms, strict=True):
        accumulate_gradients(ddp, [value], weighted_sum)
        assert optimizer.step().grad_norm == norm
    assert len(taken) == len(VALUES)
    assert torch.equal(weights_of(ddp), expected)


@KINDS
def test_the_step_of_a_gpu_equals_a_cpus(dtype, distributed, folder, mesh):
    steps = []
    for on_gpu in (False, True):
        ddp, _, _, optimizer = of_kind(folder, mesh, dtype, distributed)
        if on_gpu:
            as_on_a_gpu(optimizer)
        norms = []
        for value in VALUES:
            accumulate_gradients(ddp, [value], weighted_sum)
            norms.append(optimizer.step().grad_norm)
        steps.append((norms, weights_of(ddp)))
    assert steps[1][0] == pytest.approx(steps[0][0], rel=1e-6)
    torch.testing.assert_close(steps[1][1], steps[0][1], rtol=1e-6, atol=1e-8)


@KINDS
def test_offloading_frees_all_but_the_weights_and_brings_it_back_bit_for_bit(
    dtype, distributed, folder, mesh
):
    plain = of_kind(folder, mesh, dtype, distributed)
    away = of_kind(folder, mesh, dtype, distributed)
    optimizer = as_on_a_gpu(away[3])
    weight_bytes = sum(p.nbytes for p in away[0].parameters())
    for value in VALUES:
        states = list(large_states(away[1]))
        with optimizer.offloaded():
            for tensor in states:
                assert tensor.untyped_storage().nbytes() == 0
            for p in away[0].parameters():
                assert p.main_grad.untyped_storage().nbytes() == 0
            # These weights generate.
            assert torch.equal(weights_of(away[0]), weights_of(plain[0]))
        for ddp, step in ((plain[0], as_on_a_gpu(plain[3])), (away[0], optimizer)):
            accumulate_gradients(ddp, [value], weighted_sum)
            step.step()
    assert torch.equal(weights_of(away[0]), weights_of(plain[0]))
    pairs = zip(large_states(away[1]), large_states(plain[1]), strict=True)
    for state, other in pairs:
        assert torch.equal(state, other)
    kinds = 3 if dtype == torch.bfloat16 else 2  # moments, and fp32 weights of other dtypes
    elements = sum(p.numel() for p in away[0].parameters())
    assert sum(tensor.nbytes for tensor in large_states(away[1])) == 4 * kinds * elements
    assert weight_bytes == elements * dtype.itemsize
    with pytest.raises(RuntimeError, match="lost"), optimizer.offloaded():
        raise RuntimeError("lost")
    assert all(tensor.untyped_storage().nbytes() for tensor in large_states(away[1])), (
        "an error brings them back too"
    )


def test_nothing_is_moved_on_a_cpu(folder, mesh, monkeypatch):
    ddp, megatron, _, optimizer = of_kind(folder, mesh, torch.float32, False)
    accumulate_gradients(ddp, [1.0], weighted_sum)
    optimizer.step()
    monkeypatch.setattr(HostCopies, "take", lambda *args: pytest.fail("moved"))
    with optimizer.offloaded():
        for tensor in large_states(megatron):
            assert tensor.untyped_storage().nbytes()


def test_fused_adam_makes_the_steps_of_the_plain_one(folder, mesh):
    weights = []
    for fused in (False, True):
        ddp, optimizer = wrapped(
            folder, mesh, OPTIM.model_copy(update={"fused": fused}), clip_grad=1.0
        )
        inner = [
            group for part in inner_optimizers(optimizer.megatron) for group in part.param_groups
        ]
        settings = [group["fused"] for group in inner]
        assert settings == [fused] * len(inner)
        for k in range(1, 6):
            accumulate_gradients(ddp, [1e-3 * k, -2e-3], weighted_sum)
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in ddp.parameters()]))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-7)
    initial = torch.cat([p.flatten() for p in megatron_model(folder, mesh).parameters()])
    assert not torch.equal(weights[1], initial)


@pytest.mark.parametrize("shape", [(7,), (1,), (3, 5), (5, 1), (1, 6), (2, 3, 4)])
def test_rectangles_are_the_range_in_order(shape):
    whole = torch.arange(torch.Size(shape).numel())
    for start, end in itertools.combinations_with_replacement(range(len(whole) + 1), 2):
        cuts = rectangles(shape, start, end)
        cut = []
        for at, size in cuts:
            ends = map(sum, zip(at, size, strict=True))
            cut.append(whole.view(shape)[tuple(map(slice, at, ends))])
        expected = [torch.Size(size) for _, size in cuts]
        assert [part.shape for part in cut] == expected
        joined = torch.cat([whole[:0], *(part.flatten() for part in cut)])
        assert torch.equal(joined, whole[start:end])
        assert len(cuts) <= 2 * len(shape) - 1
    assert rectangles(shape, 5, 3) == []


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 4096])
def test_every_byte_comes_back_to_the_same_tensor_and_its_views(block_bytes):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in ((3, 5), (17,), (0,), (2, 2, 2))]
    tensors.append(torch.randn(9, generator=generator).to(torch.bfloat16))
    before = [tensor.clone() for tensor in tensors]
    view = tensors[0][1:, 2]
    copies = HostCopies(pin=False, block_bytes=block_bytes)
    for _ in range(2):
        copies.take(tensors)
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * len(tensors)
        assert [tensor.shape for tensor in tensors] == [tensor.shape for tensor in before]
        copies.give_back()
        for a, b in zip(tensors, before, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(view, before[0][1:, 2])
        tensors[1].add_(1)  # other bytes the second time
        before[1].add_(1)
    needed = sum(tensor.nbytes for tensor in tensors)
    assert len(copies._blocks) == -(-needed // block_bytes), (
        "no more host memory than is needed, and none twice"
    )


def test_a_part_of_a_storage_is_refused():
    whole = torch.zeros(10)
    with pytest.raises(ValueError, match="20 bytes cannot leave its storage of 40"):
        HostCopies(pin=False).take([whole[:5]])
    with pytest.raises(ValueError, match="cannot leave"):
        HostCopies(pin=False).take([torch.zeros(2, 3).t()])
    assert whole.untyped_storage().nbytes() == 40


def test_a_failed_take_frees_nothing():
    good = torch.ones(4)
    bad = torch.ones(4)[:2]
    with pytest.raises(ValueError, match="cannot leave"):
        HostCopies(pin=False).take([good, bad])
    assert torch.equal(good, torch.ones(4))
