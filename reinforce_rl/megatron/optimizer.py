"""Megatron's data-parallel wrapper, optimizer and learning-rate schedule."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as megatron_finalize
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from reinforce_rl.megatron.in_place_gradients import add_gradients_in_place
from reinforce_rl.megatron.layer_spec import fuse_weight_gradients
from reinforce_rl.megatron.model import CausalLM
from reinforce_rl.megatron.optimizer_state import inner_optimizers

# NeMo's scheduler names -> megatron's decay styles.
SCHEDULES = {"constant": "constant", "linear": "linear", "CosineAnnealing": "cosine"}


@dataclass(frozen=True)
class OptimizerSettings:
    """Adam and its schedule, everything counted in optimizer steps.

    Attributes:
        lr: after the warm-up.
        min_lr: where linear and cosine schedules end.
        warmup_steps: the k-th step has k / warmup_steps of `lr`, so the first step does something.
        constant_steps: at the end, with `min_lr`.
        total_steps: of the whole run.
        clip_grad: bound on the gradient's norm over all parameters; 0 for none.
        fused: on a CPU, torch's Adam that goes over memory once.
    """

    lr: float
    min_lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    schedule: str
    warmup_steps: int
    constant_steps: int
    total_steps: int
    clip_grad: float
    fused: bool = True


@dataclass(frozen=True)
class DataParallelSettings:
    """How data-parallel ranks share their work.

    Attributes:
        distributed_optimizer: each rank holds and updates a part of the main weights and moments only (ZeRO stage 1).
        overlap_grad_sync: sum gradients over the ranks while the last backward pass still runs.
        in_place_gradients: on a CPU in float32, backward passes add to the gradient buffers; see `in_place_gradients`.
    """

    distributed_optimizer: bool = False
    overlap_grad_sync: bool = False
    in_place_gradients: bool = True


DEFAULT_DATA_PARALLEL = DataParallelSettings()


def wrap_data_parallel(
    lm: CausalLM, settings: DataParallelSettings = DEFAULT_DATA_PARALLEL
) -> DistributedDataParallel:
    """Gradients are accumulated in fp32 and summed, not averaged, over data- and context-parallel ranks."""
    ddp = DistributedDataParallel(
        lm.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            check_for_nan_in_grad=False,
            use_distributed_optimizer=settings.distributed_optimizer,
            overlap_grad_reduce=settings.overlap_grad_sync,
        ),
        lm,
    )
    if settings.in_place_gradients and lm.mesh.device.type == "cpu" and lm.config.params_dtype == torch.float32:
        add_gradients_in_place(lm)
    fuse_weight_gradients(lm)
    ddp.broadcast_params()
    return ddp


def build_optimizer(
    ddp: DistributedDataParallel, settings: OptimizerSettings
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam with decoupled weight decay on matrices, and its learning-rate schedule.

    The scheduler is stepped before each optimizer step, so the k-th step (from 1) uses the schedule at k.
    """
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=ddp.config.bf16,
            params_dtype=ddp.config.params_dtype,
            use_distributed_optimizer=ddp.ddp_config.use_distributed_optimizer,
        ),
        [ddp],
    )
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            # megatron passes no such option on. Others than torch's Adam, on a GPU, have no such group.
            if "fused" in group and all(parameter.is_cpu for parameter in group["params"]):
                group["fused"] = settings.fused
    warmup = settings.warmup_steps
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=warmup,
        # A schedule needs one step after the warm-up, if only to have an end.
        lr_decay_steps=max(settings.total_steps - settings.constant_steps, warmup + 1),
        lr_decay_style=SCHEDULES[settings.schedule],
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=max(settings.total_steps, 1),
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
    """What one optimizer step did.

    Attributes:
        grad_norm: over all parameters and ranks, before clipping.
        lr: the learning rate used.
        skipped: True where the gradient was not finite and nothing was changed.
    """

    grad_norm: float
    lr: float
    skipped: bool


class ActorOptimizer:
    """Applies the gradient that `schedule.accumulate_gradients` left in the buffers."""

    def __init__(self, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler):
        self._optimizer = optimizer
        self._scheduler = scheduler

    @contextlib.contextmanager
    def offloaded(self) -> Iterator[None]:
        """The optimizer's states are in host memory inside the block, where they were before it again afterwards.

        On a CPU they are there anyway, and nothing is done.
        """
        places = {id(tensor): tensor.device for tensor in self._states()}
        self._move({key: torch.device("cpu") for key in places})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            yield
        finally:
            self._move(places)

    def _states(self) -> Iterator[Tensor]:
        """Adam's moments: the tensors as large as their parameters."""
        for optimizer in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            for state in optimizer.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0)

    def _move(self, places: dict[int, torch.device]) -> None:
        for tensor in self._states():
            # Only the pointer moves, as for the reference policy: the optimizer keeps its tensor.
            tensor.data = tensor.data.to(places[id(tensor)])

    def step(self) -> OptimizerUpdate:
        """One step of schedule and optimizer, with clipping; a collective call."""
        self._scheduler.step(1)
        lr = float(self._optimizer.param_groups[0]["lr"])
        # A NaN would spoil weights and moments for good. Every rank sees the same norm, so all skip alike.
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return OptimizerUpdate(norm, lr, skipped=True)
        self._optimizer.step()
        return OptimizerUpdate(norm, lr, skipped=False)
