"""Megatron's data-parallel wrapper, optimizer and learning-rate schedule."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as megatron_finalize
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.nn.utils import get_total_norm

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.megatron.cpu.in_place_gradients import add_gradients_in_place
from reinforce_rl.megatron.model.layers import fuse_weight_gradients
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.optimizer_state import HostCopies, attach_copies, inner_optimizers, large_states

# NeMo's scheduler names -> megatron's decay styles.
SCHEDULES = {"constant": "constant", "linear": "linear", "CosineAnnealing": "cosine"}


DEFAULT_OPTIM = OptimConfig()


def wrap_data_parallel(lm: CausalLM, optim: OptimConfig = DEFAULT_OPTIM) -> DistributedDataParallel:
    """Gradients are accumulated in fp32 and summed, not averaged, over data- and context-parallel ranks."""
    ddp = DistributedDataParallel(
        lm.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            check_for_nan_in_grad=False,
            use_distributed_optimizer=bool(optim.distributed),
            overlap_grad_reduce=bool(optim.overlap_grad_sync),
        ),
        lm,
    )
    if optim.in_place_gradients and lm.mesh.device.type == "cpu" and lm.config.params_dtype == torch.float32:
        add_gradients_in_place(lm)
    fuse_weight_gradients(lm)
    ddp.broadcast_params()
    return ddp


def build_optimizer(
    ddp: DistributedDataParallel, optim: OptimConfig, *, clip_grad: float, total_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam with decoupled weight decay on matrices, and its learning-rate schedule.

    The scheduler is stepped before each optimizer step, so the k-th step (from 1) uses the schedule at k, and the
    first step of a warm-up does something.

    Args:
        ddp: the wrapped model.
        optim: `model.optim`.
        clip_grad: bound on the gradient's norm over all parameters; 0 for none.
        total_steps: optimizer steps of the whole run.
    """
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=optim.sched.min_lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            clip_grad=clip_grad,
            bf16=ddp.config.bf16,
            params_dtype=ddp.config.params_dtype,
            use_distributed_optimizer=ddp.ddp_config.use_distributed_optimizer,
        ),
        [ddp],
    )
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            # megatron passes no such option on. The Adams of Apex and Transformer Engine are fused, without the key.
            if "fused" in group:
                group["fused"] = optim.fused
    schedule, warmup = optim.sched, optim.sched.warmup_steps
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=warmup,
        # A schedule needs one step after the warm-up, if only to have an end.
        lr_decay_steps=max(total_steps - schedule.constant_steps, warmup + 1),
        lr_decay_style=SCHEDULES[schedule.name],
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=max(total_steps, 1),
        wd_incr_style="constant",
        # A resumed run takes the number of steps from its checkpoint, everything else from its configuration.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    ddp.config.finalize_model_grads_func = _sum_gradients
    ddp.config.grad_scale_func = optimizer.scale_loss
    ddp.config.no_sync_func = ddp.no_sync
    return optimizer, scheduler


def _sum_gradients(model: list[Any], num_tokens: Tensor | None, **kwargs: Any) -> None:
    # The loss carries its global denominator already, so megatron's division by the token count is left out.
    megatron_finalize(model, None, **kwargs)


@dataclass(frozen=True)
class OptimizerUpdate:
    """Result of an optimizer step."""

    grad_norm: float  # over all parameters and ranks, before clipping
    lr: float  # the learning rate used
    skipped: bool  # True where the gradient was not finite and nothing was changed
    weights_lost: bool = False  # True where it was skipped and this rank's trained weights are not finite either


class ActorOptimizer:
    """Applies the gradient that `schedule.accumulate_gradients` left in the buffers.

    Args:
        ddp: the wrapped model, whose gradient buffers `offloaded` frees too; None leaves them.
        overlap_restore: `offloaded` ends before the states are back; the next step waits for them.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        ddp: DistributedDataParallel | None = None,
        *,
        overlap_restore: bool = False,
    ):
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._ddp = ddp
        self._parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
        self._on_gpu = torch.cuda.is_available()  # where it is, all of the model is there
        self._host = HostCopies(pin=self._on_gpu, overlap_restore=overlap_restore)
        attach_copies(optimizer, self._host)

    @contextlib.contextmanager
    def offloaded(self) -> Iterator[None]:
        """Free the GPU memory of moments, fp32 main weights and gradient buffers inside the block.

        The first two wait in host memory; the gradients are lost. Does nothing on a CPU.
        """
        if not self._on_gpu:
            yield
            return
        self._host.take(large_states(self._optimizer))
        if self._ddp is not None:
            self._ddp.offload_grad_buffers(synchronize=False, empty_cache=False)
        torch.cuda.empty_cache()  # an engine is another process
        try:
            yield
        finally:
            if self._ddp is not None:
                self._ddp.restore_grad_buffers(synchronize=False)
            self._host.give_back()

    def step(self) -> OptimizerUpdate:
        """One step of schedule and optimizer, with clipping; a collective call."""
        self._host.wait()
        self._scheduler.step(1)
        lr = float(self._optimizer.param_groups[0]["lr"])
        # A NaN would spoil weights and moments for good. Every rank sees the same norm, so all skip alike.
        self._optimizer.prepare_grads()
        norm = float(self._foreach_norm() if self._on_gpu else self._optimizer.get_grad_norm())
        if not math.isfinite(norm):
            weights = [p.detach() for part in self._parts for p in part.get_parameters()]
            return OptimizerUpdate(norm, lr, True, weights_lost=not get_total_norm(weights, foreach=True).isfinite())
        for part in self._parts:
            self._clip(part, norm)
        self._optimizer.step_with_ready_grads()
        return OptimizerUpdate(norm, lr, skipped=False)

    def _foreach_norm(self) -> float:
        """Compute megatron's `get_grad_norm` by foreach kernels: the GPU is waited for once, not once a parameter."""
        grads = [grad for part in self._parts for grad in part.get_main_grads_for_grad_norm()]
        if grads:
            squares = get_total_norm(grads, foreach=True).square()
        else:  # a rank whose shard holds nothing
            squares = torch.zeros((), device=self._optimizer.get_loss_scale().device)
        dist.all_reduce(squares, group=self._optimizer.get_grad_stats_parallel_group())
        return math.sqrt(squares.item())

    def _clip(self, part: Any, norm: float) -> None:
        """Scale one optimizer's gradients as megatron does; on a GPU by a foreach kernel."""
        bound, parameters = part.config.clip_grad, part.get_parameters()
        if bound <= 0 or not parameters:
            return
        if not self._on_gpu:
            clip_grad_by_total_norm_fp32(parameters, bound, norm)
        elif (coefficient := bound / (norm + 1e-6)) < 1:
            grads = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(grads, coefficient)  # type: ignore[reportPrivateImportUsage]
