"""Fake `torch.cuda`, and replacements for functions that would bypass fake tensors."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from helpers.fake_cuda.mode import CUDA, LOW_PRECISION, FakeCuda, is_cuda
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

GPUS_OF_NODE = 8
GIBIBYTES = 80  # reported by each GPU; exceeding it is no error
# The attention kernel is chosen in torch 2.13's order on Hopper: cuDNN, flash, memory-efficient,
# math, if its conditions hold and `torch.nn.attention.sdpa_kernel` allows it. This is a copy of
# ATen/native/transformers/cuda/sdp_utils.cpp by hand; it does not call torch.
_MAX_HEAD = 256  # head size of flash and cuDNN
_aten: Any = torch.ops.aten


class Idle:
    """A stream, an event or an asynchronous call that has already finished."""

    def __init__(self, *args: Any, **options: Any):
        pass

    def _nothing(self, *args: Any) -> None: ...

    record = _nothing
    wait = _nothing
    synchronize = _nothing
    wait_stream = _nothing
    wait_event = _nothing
    __exit__ = _nothing

    def record_event(self, *args: Any) -> Idle:
        return Idle()

    def __enter__(self) -> Idle:
        return self


def replace_device(gpu: FakeCuda) -> None:
    """Make torch report `GPUS_OF_NODE` GPUs of `GIBIBYTES`; this process uses the first."""
    _replace_cuda(gpu)
    _replace_tensor_methods(gpu)
    # Factories create values on the CPU and copy them, so that the mode sees the copy.
    torch._C._set_only_lift_cpu_tensors(True)
    FakeTensor._normalize_fake_device = staticmethod(_the_gpu)  # type: ignore[method-assign]
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
    # torch 2.11 would create a real tensor on the device here, despite `avoid_device_init`.
    fake_tensor.init_gpu_context = lambda device: None
    # A CUDA build calls the driver's library, which this machine may not have.
    torch.backends.cudnn.version = lambda: None
    torch._dynamo.config.disable = True  # run compiled code eagerly: more kernels than on a GPU


def _the_gpu(device: Any) -> torch.device:
    named = torch.device(device)
    return CUDA if named.type == "cuda" else named


def _replace_cuda(gpu: FakeCuda) -> None:
    cuda: Any = torch.cuda
    memory = gpu.memory
    total = GIBIBYTES * 2**30
    properties = types.SimpleNamespace(
        name=f"fake GPU, {GIBIBYTES} GiB",
        total_memory=total,
        major=9,
        minor=0,
        multi_processor_count=132,
        uuid="00000000-0000-0000-0000-000000000000",
    )

    def state(*args: Any, **options: Any) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def nothing(*args: Any, **options: Any) -> None:
        return None

    def reset_peak(*args: Any) -> None:
        memory.peak = memory.bytes

    def no_history(*args: Any, **options: Any) -> None:
        raise RuntimeError("fake CUDA keeps no history of allocations")

    generator = types.SimpleNamespace(get_state=state, clone_state=state, graphsafe_get_state=state)
    generator.set_state = nothing
    generator.graphsafe_set_state = nothing
    answers: dict[str, Any] = {
        "device_count": lambda: GPUS_OF_NODE,
        "current_device": lambda: 0,
        "get_device_properties": lambda *args: properties,
        "synchronize": lambda *args: gpu.sync("cuda.synchronize"),
        "memory_allocated": lambda *args: memory.bytes,
        "max_memory_allocated": lambda *args: memory.peak,
        "memory_stats": lambda *args: {},
        "mem_get_info": lambda *args: (total - memory.bytes, total),
        "reset_peak_memory_stats": reset_peak,
        "get_rng_state": state,
        "default_generators": [generator] * GPUS_OF_NODE,
        "stream": lambda *args: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: gpu.is_capturing,
        "CUDAGraph": type("CUDAGraph", (_Graph,), {"_gpu": gpu}),
        "graph": _Graph.capturing,  # takes the graph as its first argument
        "graph_pool_handle": lambda: (0, 0),
    }
    answers |= dict.fromkeys(("Stream", "Event", "current_stream", "default_stream"), Idle)
    answers |= dict.fromkeys(
        ("is_available", "is_initialized", "is_bf16_supported"),
        lambda *args, **options: True,
    )
    names = (
        "init",
        "_lazy_init",
        "set_device",
        "empty_cache",
        "ipc_collect",
        "set_stream",
        "set_rng_state",
    )
    answers |= dict.fromkeys((*names, "manual_seed", "manual_seed_all"), nothing)
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    cuda.nvtx.range_push = nothing
    cuda.nvtx.range_pop = nothing
    # A CUDA build would call the driver; a CPU build has no such function.
    cuda.memory._record_memory_history = no_history
    torch._C._cuda_getDevice = lambda: 0  # type: ignore[attr-defined]


class _Graph:
    # A CUDA graph; each replay counts the captured kernels again, as a single launch.

    _gpu: FakeCuda

    def __init__(self, *args: Any, **options: Any):
        self._kernels: Any = None

    @contextlib.contextmanager
    def capturing(self, *args: Any, **options: Any) -> Iterator[None]:
        before = self._gpu.ledger.kernels.copy()
        self._gpu.is_capturing = True
        try:
            yield
        finally:
            self._gpu.is_capturing = False
            self._kernels = self._gpu.ledger.kernels - before
            self._gpu.ledger.kernels = before  # a capture runs nothing

    def replay(self) -> None:
        if self._kernels is None:
            raise RuntimeError("a CUDA graph was replayed that was never captured")
        self._gpu.ledger.kernels.update(self._kernels)
        self._gpu.ledger.launches += 1


def _replace_tensor_methods(gpu: FakeCuda) -> None:
    torch_tolist = Tensor.tolist
    torch_tensor = torch.tensor
    torch_resize = torch.UntypedStorage.resize_
    torch_data: Any = Tensor.data

    def tolist(tensor: Tensor) -> Any:
        if tensor.device.type == "cuda":
            gpu.sync("tolist")
        return torch_tolist(gpu.known(tensor))

    def numpy(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if tensor.device.type == "cuda":
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first",
            )
        return gpu.known(tensor).numpy()

    def tensor(data: Any, *args: Any, **options: Any) -> Tensor:
        values = tree_map_only(FakeTensor, lambda scalar: scalar.item(), data)
        return torch_tensor(values, *args, **options)

    def set_data(tensor: Any, value: Tensor) -> None:
        fake: Any = gpu.as_fake(value)
        torch_data.__set__(tensor, fake)
        tensor.fake_device = fake.fake_device
        tensor._value = getattr(fake, "_value", None)

    def resize(storage: Any, size: int) -> Any:
        resized = torch_resize(storage, size)
        gpu.memory.resized(storage)
        return resized

    def compiled(function: Any = None, **options: Any) -> Any:
        return (lambda inner: inner) if function is None else function

    methods: Any = FakeTensor
    methods.data = property(torch_data.__get__, set_data)
    methods.tolist = tolist
    methods.numpy = numpy
    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    Tensor.cuda = lambda self, *args, **options: self.to(CUDA)  # type: ignore[method-assign]
    Tensor.pin_memory = lambda self, *args, **options: self  # type: ignore[method-assign]
    torch.tensor = tensor
    torch.compile = compiled  # type: ignore[assignment]


def replace_kernels(gpu: FakeCuda) -> None:
    """Patch `torch.nn.functional`; real tensors still use torch's own kernels."""
    torch_attention = F.scaled_dot_product_attention
    torch_norm = F.rms_norm

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if not is_cuda(query):
            return torch_attention(query, key, value, attn_mask, **options)
        is_causal = options.get("is_causal", False)
        scale = options.get("scale")
        for other in (key, value, attn_mask):
            if other is not None and other.device != query.device:
                raise RuntimeError(
                    f"attention of queries on {query.device} with a tensor on {other.device}",
                )
        heads = query.shape[1]
        if key.shape[1] != heads and not options.get("enable_gqa"):
            raise RuntimeError(
                f"attention of {heads} heads with {key.shape[1]} key heads without enable_gqa",
            )
        kernel = _choice(query, key, attn_mask, is_causal)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        if kernel == "math":
            unfused = _aten._scaled_dot_product_attention_math
            return unfused(
                query,
                key,
                value,
                attn_mask,
                0.0,
                is_causal,
                scale=factor,
                enable_gqa=True,
            )[0]
        if kernel == "flash" or (kernel == "cudnn" and attn_mask is None):
            return _aten._scaled_dot_product_flash_attention(
                query,
                key,
                value,
                0.0,
                is_causal,
                scale=factor,
            )[0]
        # cuDNN takes grouped keys; its costs are those of the efficient kernel.
        heads_of_group = heads // key.shape[1]
        if heads_of_group > 1:
            key = key.repeat_interleave(heads_of_group, 1)
            value = value.repeat_interleave(heads_of_group, 1)
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:
            zeros = torch.zeros(bias.shape, dtype=query.dtype, device=bias.device)
            bias = zeros.masked_fill(bias.logical_not(), float("-inf"))
        if bias is not None:
            bias = bias.expand(*query.shape[:3], key.shape[2])
        keeps = torch.is_grad_enabled() and query.requires_grad
        efficient = _aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, keeps, 0.0, is_causal, scale=factor)[0]

    def rms_norm(
        x: Tensor,
        shape: Any,
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        if not is_cuda(x):
            return torch_norm(x, shape, weight, eps)
        assert weight is not None
        if weight.device != x.device:
            raise RuntimeError(
                f"rms_norm of a tensor on {x.device} with a weight on {weight.device}",
            )
        return _Norm.apply(x, weight, gpu)  # type: ignore[return-value]

    F.scaled_dot_product_attention = attention
    F.rms_norm = rms_norm


def _choice(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> str:
    head_size = query.shape[-1]
    fits = query.dtype in LOW_PRECISION
    if head_size > _MAX_HEAD or head_size % 8:
        fits = False
    if is_causal and query.shape[2] != key.shape[2]:
        fits = False
    backends: Any = torch.backends.cuda
    if backends.cudnn_sdp_enabled() and fits:
        return "cudnn"
    if backends.flash_sdp_enabled() and fits and mask is None:
        return "flash"
    if backends.mem_efficient_sdp_enabled() and key.shape[1] == query.shape[1]:
        return "efficient"
    if backends.math_sdp_enabled():
        return "math"
    raise RuntimeError("No available kernel. Aborting execution.")


class _Norm(torch.autograd.Function):
    # One kernel forward and two backward, like torch on CUDA.

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gpu: FakeCuda) -> Tensor:
        rows = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        ctx.gpu = gpu
        gpu.launch("_fused_rms_norm", [x], nbytes=2 * x.nbytes)
        return torch.empty_like(x)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any,
        gradient: Tensor,
    ) -> tuple[Tensor, Tensor, None]:
        x, weight, _ = ctx.saved_tensors
        ctx.gpu.launch("_fused_rms_norm_backward", [x], launches=2, nbytes=4 * x.nbytes)
        return torch.empty_like(x), torch.empty_like(weight), None
