"""megatron's data-parallel wrapper, optimizer and learning-rate schedule, and Adam's state.

Adam's state can move to the host, and is saved in checkpoints.

Checkpoints do not depend on the distributed optimizer: each rank writes its part as rectangles of
whole tensors. megatron's own format gathers 12 bytes a parameter on each rank. With torch's Adam it
fails before the first step, and loads one step count for all parameters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as megatron_finalize
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.megatron.cpu.fast import add_gradients_in_place
from reinforce_rl.megatron.model.layers import fuse_weight_gradients
from reinforce_rl.megatron.model.model import CausalLM

DEFAULT_OPTIM = OptimConfig()


def wrap_data_parallel(lm: CausalLM, optim: OptimConfig = DEFAULT_OPTIM) -> DistributedDataParallel:
    """Wrap the model for data parallelism.

    Gradients accumulate in fp32 and are summed, not averaged, over data and context parallelism.
    """
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=bool(optim.distributed),
        overlap_grad_reduce=bool(optim.overlap_grad_sync),
    )
    ddp = DistributedDataParallel(lm.config, config, lm)
    if (
        optim.in_place_gradients
        and lm.mesh.device.type == "cpu"
        and lm.config.params_dtype == torch.float32
    ):
        add_gradients_in_place(lm)
    fuse_weight_gradients(lm)
    ddp.broadcast_params()
    return ddp


def build_optimizer(
    ddp: DistributedDataParallel, optim: OptimConfig, *, clip_grad: float, total_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Build Adam, with decoupled weight decay on matrices, and its learning-rate schedule.

    The schedule is over `total_steps` optimizer steps. It is stepped before each optimizer step, so
    the first rate of a warm-up is not 0. `clip_grad` 0 disables clipping.
    """
    schedule = optim.sched
    warmup = optim.sched.warmup_steps
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=schedule.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=clip_grad,
        bf16=ddp.config.bf16,
        params_dtype=ddp.config.params_dtype,
        use_distributed_optimizer=ddp.ddp_config.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, [ddp])
    for group in chain(*(inner.param_groups for inner in inner_optimizers(optimizer))):
        # megatron has no option for it. The Adams of Apex and Transformer Engine are fused, and do
        # not have this key.
        if "fused" in group:
            group["fused"] = optim.fused
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=warmup,
        # megatron requires at least one step after the warm-up.
        lr_decay_steps=max(total_steps - schedule.constant_steps, warmup + 1),
        lr_decay_style="cosine" if schedule.name == "CosineAnnealing" else schedule.name,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=max(total_steps, 1),
        wd_incr_style="constant",
        # A resumed run uses only the step count of its checkpoint.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    # The loss has its global denominator, so skip megatron's division by the number of tokens.
    ddp.config.finalize_model_grads_func = lambda model, num_tokens, **kwargs: megatron_finalize(
        model, None, **kwargs
    )
    ddp.config.grad_scale_func = optimizer.scale_loss
    ddp.config.no_sync_func = ddp.no_sync
    return optimizer, scheduler


@dataclass(frozen=True)
class OptimizerUpdate:
    grad_norm: float  # over all parameters and ranks, before clipping
    lr: float
    skipped: bool  # the gradient was not finite; no weight changed
    weights_lost: bool = False  # skipped, and this rank's weights are not finite either


class ActorOptimizer:
    """Applies the gradients accumulated by `schedule.accumulate_gradients`.

    Args:
        ddp: gradient buffers that `offloaded` also frees; None keeps them.
        overlap_restore: leave `offloaded` before the states are restored; the next step waits for
            them.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        ddp: DistributedDataParallel | None = None,
        *,
        overlap_restore: bool = False,
    ):
        self.megatron = optimizer
        self.scheduler = scheduler
        self._ddp = ddp
        self._parts = _parts_of(optimizer)
        self._on_gpu = torch.cuda.is_available()  # the whole model is then on the GPU
        self._host = HostCopies(pin=self._on_gpu, overlap_restore=overlap_restore)
        setattr(optimizer, _COPIES, self._host)

    def allocate_moments(self) -> None:
        """Allocate Adam's moments now, as zeros, rather than at the first step.

        For an engine on the same GPU, which takes a share of the free memory when it starts.
        """
        for main in _main_parameters(self.megatron):
            for name in MOMENTS:
                main.moment(name)

    @contextlib.contextmanager
    def offloaded(self) -> Iterator[None]:
        """Move moments and fp32 main weights to host memory inside the block, and drop gradients.

        No-op on a CPU.
        """
        if not self._on_gpu:
            yield
            return
        self._host.take(large_states(self.megatron))
        if self._ddp is not None:
            self._ddp.offload_grad_buffers(synchronize=False, empty_cache=False)
        torch.cuda.empty_cache()  # an engine in another process needs the memory
        try:
            yield
        finally:
            if self._ddp is not None:
                self._ddp.restore_grad_buffers(synchronize=False)
            self._host.give_back()

    def step(self) -> OptimizerUpdate:
        """Step the schedule and the optimizer, with gradient clipping; a collective call."""
        self._host.wait()
        self.scheduler.step(1)
        lr = float(self.megatron.param_groups[0]["lr"])
        # A NaN would corrupt weights and moments. The norm is global, so all ranks skip the step.
        self.megatron.prepare_grads()
        norm = float(self._foreach_norm() if self._on_gpu else self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            weights = [p.detach() for part in self._parts for p in part.get_parameters()]
            return OptimizerUpdate(
                norm, lr, True, weights_lost=not get_total_norm(weights, foreach=True).isfinite()
            )
        for part in self._parts:
            self._clip(part, norm)
        self.megatron.step_with_ready_grads()
        return OptimizerUpdate(norm, lr, skipped=False)

    def _foreach_norm(self) -> float:
        """Compute megatron's `get_grad_norm` with foreach kernels.

        They need one GPU sync, not one per parameter.
        """
        grads = [grad for part in self._parts for grad in part.get_main_grads_for_grad_norm()]
        # The norm of an empty shard is a 0 on the host.
        squares = (
            get_total_norm(grads, foreach=True).square().to(self.megatron.get_loss_scale().device)
        )
        dist.all_reduce(squares, group=self.megatron.get_grad_stats_parallel_group())
        return math.sqrt(squares.item())

    def _clip(self, part: Any, norm: float) -> None:
        bound = part.config.clip_grad
        parameters = part.get_parameters()
        if bound <= 0 or not parameters:
            return
        if not self._on_gpu:
            clip_grad_by_total_norm_fp32(parameters, bound, norm)
        elif bound / (norm + 1e-6) < 1:
            total_norm = torch.tensor(norm, device=self.megatron.get_loss_scale().device)
            clip_grads_with_norm_(parameters, bound, total_norm, foreach=True)


# torch rounds pinned allocations up to a power of two, so blocks of this size waste no memory.
BLOCK_BYTES = 2**28
_COPIES = "reinforce_rl_host_copies"
PREFIX = "optimizer.state."  # followed by the kind of state and the parameter's key
MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "fp32_param"
STEP = "step"


class HostCopies:
    """Moves tensors to host memory and back, and reuses the host buffers, as pinning is slow.

    Storage is resized to zero and back, as in FSDP, so tensors and views stay the same objects.
    With `overlap_restore`, call `wait` before using the tensors.
    """

    def __init__(self, *, pin: bool, overlap_restore: bool = False, block_bytes: int = BLOCK_BYTES):
        self._pin = pin
        self._overlap = overlap_restore
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []
        self._away: list[Tensor] = []
        self._stream: Any = None
        self._event: Any = None

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copy contiguous tensors, each with its own storage, to the host and free their memory.

        Raises ValueError for other tensors.
        """
        self.wait()
        away = list(tensors)
        for tensor in away:
            if (
                size := tensor.untyped_storage().nbytes()
            ) != tensor.nbytes or not tensor.is_contiguous():
                raise ValueError(
                    f"a tensor of {tensor.nbytes} bytes cannot leave its storage of {size} bytes"
                )
        for host, part in self._pieces(away):
            host.copy_(part, non_blocking=True)
        if self._pin:
            torch.cuda.current_stream().synchronize()
        for tensor in away:
            tensor.untyped_storage().resize_(0)
        self._away = away

    def give_back(self) -> None:
        """Restore the tensors given to `take`."""
        tensors = self._away
        self._away = []
        for tensor in tensors:
            tensor.untyped_storage().resize_(tensor.nbytes)
        overlaps = self._overlap and self._pin
        if overlaps:
            self._stream = self._stream or torch.cuda.Stream()
            # Kernels that were launched before may still use this memory.
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream) if overlaps else contextlib.nullcontext():
            for host, part in self._pieces(tensors):
                part.copy_(host, non_blocking=True)
        self._event = self._stream.record_event() if overlaps else None

    def wait(self) -> None:
        """Make the current stream wait for an overlapped `give_back`."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
            self._event = None

    def _pieces(self, tensors: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (host, device) pairs of uint8 [n] views, split at host-block boundaries."""
        block = 0
        offset = 0
        for tensor in tensors:
            flat = tensor.detach().view(-1).view(torch.uint8)
            start = 0
            while start < len(flat):
                if block == len(self._blocks):
                    memory = torch.empty(self._block_bytes, dtype=torch.uint8)
                    self._blocks.append(memory.pin_memory() if self._pin else memory)
                size = min(len(flat) - start, self._block_bytes - offset)
                yield self._blocks[block][offset : offset + size], flat[start : start + size]
                start = start + size
                offset = offset + size
                if offset == self._block_bytes:
                    block = block + 1
                    offset = 0


def adam_state(optimizer: MegatronOptimizer, model: dict[str, Any]) -> dict[str, Any]:
    """Return the sharded Adam state for `dist_checkpointing`; loading writes in place.

    The state holds the step count, both moments, and fp32 weights if the dtype of `model`, the
    sharded parameters, is lower. Missing state is created with its values at step 0.
    """
    if (copies := getattr(optimizer, _COPIES, None)) is not None:
        copies.wait()  # states may still be in transfer from the host
    sharded = {
        id(entry.data): (name, entry) for name, entry in model.items() if hasattr(entry, "data")
    }
    state: dict[str, Any] = {STEP: _step_of(optimizer)}
    for main in _main_parameters(optimizer):
        name, entry = sharded[id(main.parameter)]
        tensors = {key: main.moment(key) for key in MOMENTS}
        if main.tensor.dtype != main.parameter.dtype:
            tensors[MAIN] = main.tensor.detach()
        for kind, tensor in tensors.items():
            parts = _parts(entry, f"{PREFIX}{kind}.", tensor.view(-1), main)
            state |= {f"{kind}.{name}.{number}": part for number, part in enumerate(parts)}
    return state


def set_adam_step(optimizer: MegatronOptimizer, step: float) -> None:
    """Set every parameter's step count. Call it after loading, which fills the tensors."""
    for inner in inner_optimizers(optimizer):
        if _counts_by_parameter(inner):
            for state in inner.state.values():  # not one tensor: each is incremented in place
                state[STEP] = _step_count(inner, state[MOMENTS[0]], step)
        else:
            for group in inner.param_groups:
                group[STEP] = int(step)


@dataclass(frozen=True)
class _Main:
    parameter: Tensor  # of the model
    # The tensor that Adam updates: the parameter, its fp32 copy, or a flat range of either.
    tensor: Tensor
    start: int  # offset of the range in the flattened parameter
    shared: bool  # sharded over data- and context-parallel ranks
    inner: Any  # inner optimizer

    def moment(self, name: str) -> Tensor:
        state = self.inner.state[self.tensor]
        if STEP not in state and _counts_by_parameter(self.inner):
            state[STEP] = _step_count(self.inner, self.tensor, 0.0)
        if name not in state:
            state[name] = torch.zeros_like(self.tensor)
        return state[name]


def _main_parameters(optimizer: MegatronOptimizer) -> Iterator[_Main]:
    for part in _parts_of(optimizer):
        inner = part.optimizer
        if isinstance(part, DistributedOptimizer):
            for parameter, (group, place) in part.model_param_group_index_map.items():
                buffer, dtype, bucket = part.model_param_gbuf_map[parameter]
                ranges = part.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]
                start = ranges["param"].start
                yield _Main(
                    parameter, inner.param_groups[group]["params"][place], start, True, inner
                )
            continue
        pairs = [
            (parameter, parameter)
            for parameter in chain(*(group["params"] for group in inner.param_groups))
        ]
        if isinstance(part, Float16OptimizerWithFloat16Params):
            pairs = [
                *zip(
                    chain(*part.float16_groups), chain(*part.fp32_from_float16_groups), strict=True
                )
            ]
            pairs += [(parameter, parameter) for parameter in chain(*part.fp32_from_fp32_groups)]
        for parameter, tensor in pairs:
            yield _Main(parameter, tensor, 0, False, inner)


def _parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def inner_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the torch, Apex or Transformer Engine optimizers that megatron wraps."""
    return [part.optimizer for part in _parts_of(optimizer)]


def _counts_by_parameter(inner: Any) -> bool:
    # Apex's and Transformer Engine's fused Adams, which megatron prefers, keep the step in the
    # group.
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def _step_count(inner: Any, tensor: Tensor, step: float) -> Tensor:
    fused = any(group.get("fused") for group in inner.param_groups)
    return torch.full(
        (), float(step), dtype=torch.float32, device=tensor.device if fused else "cpu"
    )


def large_states(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield moments and fp32 main weights, the states as large as the parameters."""
    for _, states in states_by_weight(optimizer):
        yield from states.values()


def states_by_weight(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield each parameter of the model with its `large_states` on this rank."""
    for main in _main_parameters(optimizer):
        state = main.inner.state.get(main.tensor, {})
        states = {
            kind: value
            for kind, value in state.items()
            if isinstance(value, Tensor) and value.dim() > 0
        }
        if main.tensor.dtype != main.parameter.dtype:
            states[MAIN] = main.tensor
        yield main.parameter, states


def _step_of(optimizer: MegatronOptimizer) -> float:
    # All parameters share one step count; a rank without parameters returns 0.
    inners = inner_optimizers(optimizer)
    holders = (
        inner.state.values() if _counts_by_parameter(inner) else inner.param_groups
        for inner in inners
    )
    return float(next((holder.get(STEP, 0.0) for holder in chain(*holders)), 0.0))


def _parts(
    entry: ShardedTensor | ShardedTensorFactory, prefix: str, flat: Tensor, main: _Main
) -> Iterator[ShardedTensor]:
    """Cut a parameter-shaped tensor, or a flat range of it, into rectangles of whole tensors.

    The rectangles are views.
    """
    pieces: Any = [entry]
    if isinstance(entry, ShardedTensorFactory):  # several tensors, concatenated
        pieces = entry.build_fn(entry.key, entry.data, entry.replica_id, None)
    end = main.start + len(flat)
    before = 0
    for piece in pieces:
        size = math.prod(piece.local_shape)
        element_range = max(main.start - before, 0), min(end - before, size)
        axes = piece.prepend_axis_num
        for offset, shape in rectangles(piece.local_shape, *element_range):
            first = before + int(np.ravel_multi_index(offset, piece.local_shape)) - main.start
            yield replace(
                piece,
                key=prefix + piece.key,
                data=flat[first : first + math.prod(shape)].view((1,) * axes + shape),
                dtype=flat.dtype,
                local_shape=(1,) * axes + shape,
                global_offset=tuple(
                    a + b for a, b in zip(piece.global_offset, (0,) * axes + offset, strict=True)
                ),
                axis_fragmentations=None,  # not a regular grid
                prepend_axis_num=0,
                # The last number is the data- and context-parallel rank. Each writes its own range.
                replica_id=(*piece.replica_id[:-1], 0) if main.shared else piece.replica_id,
            )
        before += size


def rectangles(
    shape: Sequence[int], start: int, end: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offset, shape) of rectangles that cover elements start .. end-1 of a flat tensor."""
    if len(shape) == 1:
        return [((start,), (end - start,))] if start < end else []
    row = math.prod(shape[1:])
    # Range of whole rows.
    first = -(-start // row)
    last = end // row

    def within(number: int, low: int, high: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        parts = rectangles(shape[1:], low - number * row, high - number * row)
        return [((number, *offset), (1, *size)) for offset, size in parts]

    whole = [((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if first < last else []
    return (
        within(first - 1, start, min(end, first * row))
        + whole
        + within(last, max(first, last) * row, end)
    )
