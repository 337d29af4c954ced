"""`torch.cuda` of a machine that is not there, and the tensor methods that would leave fake tensors."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from reinforce_rl.preflight.fake_cuda.mode import CUDA, FakeCuda

GPUS_OF_NODE = 8


class _Idle:
    """A stream or an event of a device on which everything has happened already."""

    cuda_stream = stream_id = device_index = 0
    device_type = 1
    device = CUDA

    def __init__(self, *args: Any, **options: Any):
        pass

    def _nothing(self, *args: Any) -> None: ...

    record = wait = synchronize = wait_stream = wait_event = __exit__ = _nothing

    def record_event(self, *args: Any) -> _Idle:
        return _Idle()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Idle) -> float:
        return 0.0

    def __enter__(self) -> _Idle:
        return self


def replace_device(gpu: FakeCuda, gigabytes: int) -> None:
    """Make torch report `GPUS_OF_NODE` GPUs of `gigabytes` GiB; this process uses the first."""
    _replace_cuda(gpu, gigabytes)
    _replace_tensor_methods(gpu)
    # A factory's values are made on the CPU and then copied, so that the mode sees the copy.
    torch._C._set_only_lift_cpu_tensors(True)
    FakeTensor._normalize_fake_device = staticmethod(  # type: ignore[method-assign]
        lambda device: CUDA if torch.device(device).type == "cuda" else torch.device(device)
    )
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
    torch._dynamo.config.disable = True  # what is compiled runs operator by operator: more kernels than on a GPU


def _replace_cuda(gpu: FakeCuda, gigabytes: int) -> None:
    cuda: Any = torch.cuda
    memory = gpu.memory
    total = gigabytes * 2**30
    properties = types.SimpleNamespace(
        name=f"fake GPU, {gigabytes} GiB",
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

    generator = types.SimpleNamespace(
        get_state=state,
        set_state=nothing,
        clone_state=state,
        graphsafe_set_state=nothing,
        graphsafe_get_state=state,
    )
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *args, **options: True,
        "device_count": lambda: GPUS_OF_NODE,
        "current_device": lambda: 0,
        "get_device_properties": lambda *args: properties,
        "get_device_name": lambda *args: properties.name,
        "get_device_capability": lambda *args: (properties.major, properties.minor),
        "synchronize": lambda *args: gpu.sync("cuda.synchronize"),
        "memory_allocated": lambda *args: memory.bytes,
        "max_memory_allocated": lambda *args: memory.peak,
        "memory_reserved": lambda *args: memory.bytes,
        "max_memory_reserved": lambda *args: memory.peak,
        "memory_stats": lambda *args: {},
        "mem_get_info": lambda *args: (total - memory.bytes, total),
        "reset_peak_memory_stats": reset_peak,
        "get_rng_state": state,
        "default_generators": [generator] * GPUS_OF_NODE,
        "current_stream": lambda *args: _Idle(),
        "default_stream": lambda *args: _Idle(),
        "stream": lambda *args: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: gpu.is_capturing,
        "Stream": _Idle,
        "Event": _Idle,
        "CUDAGraph": type("CUDAGraph", (_Graph,), {"_gpu": gpu}),
        "graph": _graph,
        "graph_pool_handle": lambda: (0, 0),
    }
    names = ("init", "_lazy_init", "set_device", "empty_cache", "ipc_collect", "set_stream", "set_rng_state")
    answers |= dict.fromkeys((*names, "manual_seed", "manual_seed_all"), nothing)
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = nothing
    torch._C._cuda_getDevice = lambda: 0  # type: ignore[attr-defined]


class _Graph:
    """A CUDA graph: what was counted at its capture is counted again at each replay, as one launch."""

    _gpu: FakeCuda

    def __init__(self, *args: Any, **options: Any):
        self._kernels: Any = None

    def capture_begin(self, *args: Any, **options: Any) -> None:
        self._before, self._gpu.is_capturing = self._gpu.ledger.kernels.copy(), True

    def capture_end(self) -> None:
        self._gpu.is_capturing = False
        self._kernels = self._gpu.ledger.kernels - self._before
        self._gpu.ledger.kernels = self._before  # a capture runs nothing

    def replay(self) -> None:
        if self._kernels is None:
            raise RuntimeError("a CUDA graph was replayed that was never captured")
        self._gpu.ledger.kernels.update(self._kernels)
        self._gpu.ledger.launches += 1

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def reset(self) -> None:
        self._kernels = None


@contextlib.contextmanager
def _graph(cuda_graph: _Graph, *args: Any, **options: Any) -> Iterator[None]:
    cuda_graph.capture_begin()
    try:
        yield
    finally:
        cuda_graph.capture_end()


def _replace_tensor_methods(gpu: FakeCuda) -> None:
    torch_tolist, torch_tensor, torch_resize = Tensor.tolist, torch.tensor, torch.UntypedStorage.resize_
    torch_data: Any = Tensor.data

    def known(tensor: Tensor, what: str) -> Tensor:
        if tensor.device.type == "cuda":
            gpu.sync(what)
        values = gpu.value(tensor)
        assert values is not None, f"{what}: the values of a tensor of {tuple(tensor.shape)} are not known"
        return values

    def numpy(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if tensor.device.type == "cuda":
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        return known(tensor, "numpy").numpy()

    def tensor(data: Any, *args: Any, **options: Any) -> Tensor:
        return torch_tensor(tree_map_only(FakeTensor, lambda one: one.item(), data), *args, **options)

    def set_data(tensor: Any, value: Tensor) -> None:
        fake: Any = gpu.as_fake(value)
        torch_data.__set__(tensor, fake)
        tensor.fake_device, tensor._value = fake.fake_device, getattr(fake, "_value", None)

    def resize(storage: Any, size: int) -> Any:
        resized = torch_resize(storage, size)
        gpu.memory.resized(storage)
        return resized

    def compiled(function: Any = None, **options: Any) -> Any:
        return (lambda inner: inner) if function is None else function

    methods: Any = FakeTensor
    methods.data = property(torch_data.__get__, set_data)
    methods.tolist = lambda self: torch_tolist(known(self, "tolist"))
    methods.numpy = numpy
    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    Tensor.cuda = lambda self, *args, **options: self.to(CUDA)  # type: ignore[method-assign]
    Tensor.pin_memory = lambda self, *args, **options: self  # type: ignore[method-assign]
    torch.tensor = tensor
    torch.compile = compiled  # type: ignore[assignment]
