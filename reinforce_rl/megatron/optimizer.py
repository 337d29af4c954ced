"""megatron's data-parallel wrapper, optimizer and learning-rate schedule."""

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
    """Wrap the model; gradients accumulate in fp32 and are summed, not averaged, over data and context parallelism."""
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
    """Build Adam, with decoupled weight decay on matrices, and its learning-rate schedule.

    The scheduler is stepped before each optimizer step, so the first step of a warm-up has a non-zero rate.

    Args:
        clip_grad: maximum global gradient norm; 0 disables clipping.
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
        # megatron requires at least one step after the warm-up.
        lr_decay_steps=max(total_steps - schedule.constant_steps, warmup + 1),
        lr_decay_style=SCHEDULES[schedule.name],
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=max(total_steps, 1),
        wd_incr_style="constant",
        # A resumed run takes only the step count from its checkpoint.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    ddp.config.finalize_model_grads_func = _sum_gradients
    ddp.config.grad_scale_func = optimizer.scale_loss
    ddp.config.no_sync_func = ddp.no_sync
    return optimizer, scheduler


def _sum_gradients(model: list[Any], num_tokens: Tensor | None, **kwargs: Any) -> None:
    # The loss carries its global denominator, so skip megatron's division by token count.
    megatron_finalize(model, None, **kwargs)


@dataclass(frozen=True)
class OptimizerUpdate:
    grad_norm: float  # over all parameters and ranks, before clipping
    lr: float
    skipped: bool  # the gradient was not finite; nothing changed
    weights_lost: bool = False  # skipped, and this rank's weights are not finite either


class ActorOptimizer:
    """Applies the gradients accumulated by `schedule.accumulate_gradients`.

    Args:
        ddp: gradient buffers that `offloaded` also frees; None keeps them.
        overlap_restore: leave `offloaded` before the states are back; the next step waits for them.
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
        self._on_gpu = torch.cuda.is_available()  # then the whole model is
        self._host = HostCopies(pin=self._on_gpu, overlap_restore=overlap_restore)
        attach_copies(optimizer, self._host)

    @contextlib.contextmanager
    def offloaded(self) -> Iterator[None]:
        """Move moments and fp32 main weights to host memory inside the block, and drop gradients; no-op on a CPU."""
        if not self._on_gpu:
            yield
            return
        self._host.take(large_states(self._optimizer))
        if self._ddp is not None:
            self._ddp.offload_grad_buffers(synchronize=False, empty_cache=False)
        torch.cuda.empty_cache()  # an engine in another process needs it
        try:
            yield
        finally:
            if self._ddp is not None:
                self._ddp.restore_grad_buffers(synchronize=False)
            self._host.give_back()

    def step(self) -> OptimizerUpdate:
        """Step the schedule and the optimizer, with clipping; a collective call."""
        self._host.wait()
        self._scheduler.step(1)
        lr = float(self._optimizer.param_groups[0]["lr"])
        # A NaN would corrupt weights and moments. The norm is global, so all ranks skip together.
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
        """Compute megatron's `get_grad_norm` by foreach kernels: one GPU sync, not one per parameter."""
        grads = [grad for part in self._parts for grad in part.get_main_grads_for_grad_norm()]
        if grads:
            squares = get_total_norm(grads, foreach=True).square()
        else:  # empty shard
            squares = torch.zeros((), device=self._optimizer.get_loss_scale().device)
        dist.all_reduce(squares, group=self._optimizer.get_grad_stats_parallel_group())
        return math.sqrt(squares.item())

    def _clip(self, part: Any, norm: float) -> None:
        bound, parameters = part.config.clip_grad, part.get_parameters()
        if bound <= 0 or not parameters:
            return
        if not self._on_gpu:
            clip_grad_by_total_norm_fp32(parameters, bound, norm)
        elif (coefficient := bound / (norm + 1e-6)) < 1:
            grads = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(grads, coefficient)  # type: ignore[reportPrivateImportUsage]
