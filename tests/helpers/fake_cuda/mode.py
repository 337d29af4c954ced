"""Operators of fake CUDA: each is checked and counted, and computes shapes only."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.flop_counter import flop_registry

CUDA = torch.device("cuda", 0)
ALLOCATION = 512  # bytes, granularity of torch's CUDA allocator
LOW_PRECISION = (torch.bfloat16, torch.float16)
# Small tensors, which steer control flow, carry real values on the CPU (`_value`), so that
# `.item()`, `nonzero` and boolean masks work. Unknown values are zeros, and results computed from
# them are kept finite. Larger tensors have no values.
MAX_INTEGERS = 1 << 21
MAX_FLOATS = 1 << 12
MAX_HOST_BYTES = 1 << 24
_RANDOM = {
    "normal_",
    "uniform_",
    "random_",
    "exponential_",
    "bernoulli_",
    "geometric_",
    "cauchy_",
    "log_normal_",
}
_NO_KERNEL = {"_has_compatible_shallow_copy_type", "_unsafe_view", "detach", "device", "lift_fresh"}
_NO_KERNEL |= {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "set_",
}
_ROW_COPIES = {
    "index",
    "index_select",
    "embedding",
    "gather",
    "index_copy_",
    "index_add_",
    "index_put_",
    "scatter_",
}
_CHUNK = 65536  # elements per chunk of torch's multi-tensor kernels
_CHUNKS = 320  # chunks per launch
_aten: Any = torch.ops.aten


class Kernel(NamedTuple):
    name: str  # of the ATen operator
    flops: int  # torch's formulas, halved for causal attention
    bytes: int  # read and written, a lower bound
    low_precision: bool  # bf16 or fp16


class Collective(NamedTuple):
    kind: str  # such as "all_reduce"; "_object" is appended for objects
    # global ranks of the group; for "send" and "recv" this rank and its peer
    ranks: tuple[int, ...]
    bytes: int  # of the whole tensor, gathered or before scattering; 0 for objects
    on_gpu: bool  # NCCL, otherwise gloo


@dataclass
class Ledger:
    kernels: Counter[Kernel] = field(default_factory=Counter)  # run on the device
    launches: int = 0  # by the host; a CUDA graph counts once
    syncs: Counter[str] = field(default_factory=Counter)  # host syncs by operation and line
    collectives: list[Collective] = field(default_factory=list)  # in order
    start: int = 0  # bytes of device memory, like `peak`
    peak: int = 0

    @property
    def num_kernels(self) -> int:
        return self.kernels.total()

    @property
    def num_syncs(self) -> int:
        return self.syncs.total()

    @property
    def flops(self) -> int:
        return sum(kernel.flops * count for kernel, count in self.kernels.items())

    @property
    def bytes(self) -> int:
        return sum(kernel.bytes * count for kernel, count in self.kernels.items())


class Memory:
    """Live storages on the device; each counts once, however many views it has."""

    def __init__(self) -> None:
        self.bytes = 0
        self.peak = 0
        self._live: dict[int, int] = {}

    def track(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._live[storage._cdata] = 0
            self.resized(storage)
            weakref.finalize(storage, self._free, storage._cdata)

    def resized(self, storage: Any) -> None:
        if storage._cdata in self._live:
            size = -(-storage.nbytes() // ALLOCATION) * ALLOCATION
            self.bytes += size - self._live[storage._cdata]
            self._live[storage._cdata] = size
            self.peak = max(self.peak, self.bytes)

    def _free(self, key: int) -> None:
        self.bytes -= self._live.pop(key, 0)


class ThreadSafeFakeTensorMode(FakeTensorMode):
    """A `FakeTensorMode` for several threads.

    torch keeps the state of a call on the mode. A generator rank computes on one thread while
    another receives weights, and each of them would read the other's state.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        super().__init__(allow_non_fake_inputs=True)

    @property
    def in_kernel_invocation(self) -> bool:
        return getattr(self._thread, "in_kernel_invocation", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._thread.in_kernel_invocation = value

    @property
    def enter_stack(self) -> list[Any]:
        if not hasattr(self._thread, "enter_stack"):
            self._thread.enter_stack = []
        return self._thread.enter_stack

    @enter_stack.setter
    def enter_stack(self, value: list[Any]) -> None:
        self._thread.enter_stack = value


class FakeCuda(TorchDispatchMode):
    """While active, tensors on "cuda" are fake; CPU tensors are unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = ThreadSafeFakeTensorMode()
        self.ledger = Ledger()  # of the current phase
        self.memory = Memory()  # in all phases
        self.is_capturing = False  # a CUDA graph is being captured

    @contextlib.contextmanager
    def counting(self) -> Iterator[Ledger]:
        before = self.ledger
        self.ledger = Ledger(start=self.memory.bytes)
        self.memory.peak = self.memory.bytes
        try:
            yield self.ledger
        finally:
            self.ledger.peak = self.memory.peak
            self.ledger = before

    def sync(self, operation: str) -> None:
        """Record a host sync, with the innermost line of this package or megatron."""
        if self.is_capturing:
            raise RuntimeError(f"{operation}: operation not permitted when stream is capturing")
        where = ""
        frame = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if "fake_cuda" not in file and ("reinforce_rl" in file or "/megatron/" in file):
                folder, name = file.split("/")[-2:]
                where = f" {folder}/{name}:{frame.f_lineno}"
                break
            frame = frame.f_back
        self.ledger.syncs[operation + where] += 1

    def launch(
        self,
        name: str,
        tensors: list[Tensor],
        *,
        flops: int = 0,
        launches: int = 1,
        nbytes: int = -1,
    ) -> None:
        on_device = [tensor for tensor in tensors if is_cuda(tensor)]
        if nbytes < 0:
            nbytes = sum(tensor.nbytes for tensor in on_device)
        low = any(tensor.dtype in LOW_PRECISION for tensor in on_device)
        kernel = Kernel(name, flops // launches, nbytes // launches, low)
        self.ledger.kernels[kernel] += launches
        self.ledger.launches += 0 if self.is_capturing else launches

    def value(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a small tensor, zeros if unknown, or None for a large tensor."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        values: Tensor | None = getattr(tensor, "_value", None)
        if values is not None and (values.shape, values.dtype) != (tensor.shape, tensor.dtype):
            values = None  # stale: `tensor.data = ...` replaced the tensor
        if values is None and _is_small(tensor):
            values = torch.zeros(tensor.shape, dtype=tensor.dtype)
            tensor._value = values  # type: ignore[attr-defined]
            tensor._is_guess = True  # type: ignore[attr-defined]
        return values

    def wrap(self, values: Tensor, device: torch.device) -> Tensor:
        with self.fake:
            out = torch.empty_strided(
                values.shape,
                values.stride(),
                dtype=values.dtype,
                device=device,
            )
        if _is_small(out):
            out._value = values  # type: ignore[attr-defined]
        if is_cuda(out):
            self.memory.track(out)
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        if device is None and not tensors:
            device = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        to_cuda = device is not None and torch.device(device).type == "cuda"
        if not to_cuda and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        special = self._special(func, name, args, kwargs)
        if special is not NotImplemented:
            return special
        self._count_host_copies(name, args, kwargs, to_cuda=to_cuda)
        if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
            args, kwargs = tree_map_only(Tensor, self.as_fake, (args, kwargs))
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except (fake_tensor.DynamicOutputShapeException, fake_tensor.DataDependentOutputException):
            return self._by_values(func, args, kwargs)
        except Exception as error:
            if not getattr(error, "__notes__", None):
                where = [(tuple(t.shape), str(t.dtype), str(t.device)) for t in tensors]
                # `add_note` needs Python 3.11.
                error.__notes__ = [f"in {func} of {where}"]  # type: ignore[attr-defined]
            raise
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._carry_values(func, args, kwargs, tensors, outputs)
        self._count(func, args, kwargs, tensors, out, outputs)
        return out

    def _special(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        # Handle what fake tensors cannot do or a real device would refuse; otherwise
        # NotImplemented.
        first: Any = args[0] if args else None
        if name in _RANDOM:
            self.launch(name, [first])
            return first
        if name == "_local_scalar_dense":
            if is_cuda(first):
                self.sync("item")
            values = self.value(first)
            return 0 if values is None else values.item()
        if name == "equal":
            self.sync("equal")
            left = self.value(args[0])
            right = self.value(args[1])
            return left is not None and right is not None and torch.equal(left, right)
        if name in ("is_pinned", "_pin_memory"):
            return first if name == "_pin_memory" else False
        if name == "_to_copy" and is_cuda(first):
            target = torch.device(kwargs.get("device") or CUDA)
            if target.type == "cpu":
                return self._to_host(first, kwargs)
        if name == "copy_" and not isinstance(first, FakeTensor):
            if len(args) < 3 or not args[2]:
                self.sync("copy_ to cpu")
            values = self.value(args[1])
            return first if values is None else first.copy_(values)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            if name != "index" and is_cuda(first) and not is_cuda(args[2]) and args[2].dim():
                raise RuntimeError(f"{name}: values on the CPU into a tensor on {first.device}")
            masks = [index for index in args[1] if index is not None]
            is_mask = name != "index" and len(masks) == 1 and masks[0].dtype == torch.bool
            if is_mask and not args[2].dim() and not is_cuda(args[2]):
                # torch turns a scalar value into masked_fill_, which does not sync.
                mask = masks[0]
                while mask.dim() < first.dim():
                    mask = self.__torch_dispatch__(_aten.unsqueeze.default, (), (mask, -1))
                return self.__torch_dispatch__(
                    _aten.masked_fill_.Tensor,
                    (),
                    (first, mask, args[2]),
                )
            if any(map(_is_mask, args[1])):
                indices = self._without_masks(args[1])
                return self.__torch_dispatch__(func, (), (first, indices, *args[2:]), kwargs)
        return NotImplemented

    def _to_host(self, source: Tensor, kwargs: Any) -> Any:
        if not kwargs.get("non_blocking"):
            self.sync("to cpu")
        dtype = kwargs.get("dtype") or source.dtype
        values = self.value(source)
        if values is not None:
            return values.to(dtype, copy=True)
        if source.nbytes <= MAX_HOST_BYTES:
            return torch.zeros(source.shape, dtype=dtype)
        with self.fake:
            return torch.empty(source.shape, dtype=dtype, device="cpu")

    def _without_masks(self, indices: Any) -> list[Any]:
        without_masks: list[Any] = []
        for index in indices:
            if _is_mask(index):
                if is_cuda(index):
                    self.sync("boolean index")
                values = self.value(index)
                is_unknown = f"a mask of {tuple(index.shape)} is too large to know its values"
                assert values is not None, is_unknown
                for positions in values.nonzero(as_tuple=True):
                    without_masks.append(self.wrap(positions, index.device))
            else:
                without_masks.append(index)
        return without_masks

    def _by_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Compute a value-dependent operator on the CPU from known values.
        device = next(leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        if device.type == "cuda":
            self.sync(func._schema.name.split("::")[1])
            self.launch(func._schema.name.split("::")[1], [], launches=2)
        values, options = tree_map_only(Tensor, self.known, (args, kwargs))
        results = func(*values, **options)
        return tree_map_only(Tensor, lambda tensor: self.wrap(tensor, device), results)

    def known(self, tensor: Tensor) -> Tensor:
        values = self.value(tensor)
        assert values is not None, f"the values of a tensor of {tuple(tensor.shape)} are not known"
        return values

    def as_fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        return self.wrap(tensor.detach(), torch.device("cpu"))

    def _count_host_copies(self, name: str, args: Any, kwargs: Any, *, to_cuda: bool) -> None:
        # Record a sync for a blocking copy from the host, and for an index on the host.
        is_from_host = name == "_to_copy" and to_cuda and not is_cuda(args[0])
        if is_from_host and not kwargs.get("non_blocking"):
            self.sync("to cuda")
        elif name == "copy_" and is_cuda(args[0]) and not is_cuda(args[1]):
            if (len(args) < 3 or not args[2]) and args[1].dim():
                self.sync("copy_ to cuda")
        elif name in ("index", "index_put", "index_put_") and is_cuda(args[0]):
            for index in args[1]:
                if isinstance(index, Tensor) and not is_cuda(index):
                    self.sync("index on cpu")

    def _carry_values(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        if not any(map(_is_small, outputs)):
            return
        if any(out.numel() > 2 * MAX_INTEGERS for out in outputs):
            return
        if any(self.value(tensor) is None for tensor in inputs):
            return
        values, options = tree_map(self._on_cpu, (args, kwargs))
        options.pop("pin_memory", None)
        try:
            results = func(*values, **options)
        except RuntimeError:
            return  # a GPU-only operator
        is_guess = any(getattr(tensor, "_is_guess", False) for tensor in inputs)
        for out, value in zip(outputs, tree_leaves(results), strict=False):
            if not _is_small(out):
                continue
            if "empty" in func._schema.name:
                value.zero_()
            elif is_guess and value.is_floating_point():
                # For instance, the log of an unknown sum.
                value = value.masked_fill(~value.isfinite(), 0.0)
            out._value = value  # type: ignore[attr-defined]
            out._is_guess = is_guess  # type: ignore[attr-defined]

    def _on_cpu(self, leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            return self.value(leaf)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def _count(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        out: Any,
        outputs: list[Tensor],
    ) -> None:
        name = func._schema.name.split("::")[1]
        made = [tensor for tensor in outputs if is_cuda(tensor)]
        for tensor in made:
            self.memory.track(tensor)
        if not made and not any(map(is_cuda, inputs)):
            return
        if name in _NO_KERNEL or (func.is_view and not func._schema.is_mutable):
            return
        launches = 1
        nbytes = -1
        if name.startswith(("_foreach", "_fused_adam")):
            tensors = next(arg for arg in args if _is_list_of_tensors(arg))
            chunks = sum(-(-tensor.numel() // _CHUNK) for tensor in tensors)
            of_tensors = math.ceil(len(tensors) / 30)
            launches = max(math.ceil(chunks / _CHUNKS), of_tensors)
        elif name in _ROW_COPIES:
            rows = inputs[-1] if func._schema.is_mutable else made[0]
            nbytes = 3 * rows.nbytes
        flops = _flops(func, args, kwargs, out)
        if name == "_flash_attention_forward" and kwargs.get("seqused_k") is not None:
            # Keys are in a paged pool; each sequence reads `seqused_k` of them.
            starts = self.known(args[3]).long()
            used = self.known(kwargs["seqused_k"]).long()
            query, key = args[:2]
            numbers = key.shape[1] * key.shape[2]  # per key
            pairs = (starts.diff() * used).sum()
            read = int(used.sum()) * numbers * key.element_size()
            flops = 4 * numbers * int(pairs)
            nbytes = 2 * (query.nbytes + read)
        self.launch(name, [*inputs, *made], flops=flops, launches=launches, nbytes=nbytes)


def is_cuda(tensor: Tensor) -> bool:
    """Return whether this is a fake CUDA tensor; reading `device` would dispatch an operator."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def _is_list_of_tensors(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and bool(arg) and isinstance(arg[0], Tensor)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _is_small(tensor: Tensor) -> bool:
    limit = MAX_FLOATS if tensor.is_floating_point() else MAX_INTEGERS
    return tensor.numel() <= limit and not tensor.is_complex()


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0
    names = [argument.name for argument in func._schema.arguments]
    inputs = dict(zip(names, args, strict=False)) | kwargs
    if "query" not in inputs or "key" not in inputs:
        return int(formula(*args, **kwargs, out_val=out))
    query: Tensor = inputs["query"]
    key: Tensor = inputs["key"]
    # torch 2.11's formulas reject fewer key heads than query heads, which the kernels accept.
    # Shapes are [b, heads, s, d], but [..., heads, d] for flash's operator.
    heads = 1 if "scaled_dot_product" in func._schema.name else query.dim() - 2
    for name in ("key", "value"):
        shape = list(inputs[name].shape)
        shape[heads] = query.shape[heads]
        inputs[name] = torch.empty(shape, device="meta")
    positional = [inputs[name] for name, _ in zip(names, args, strict=False)]
    flops = formula(*positional, **{name: inputs[name] for name in kwargs}, out_val=out)
    if inputs.get("is_causal") and query.shape[-2] == key.shape[-2]:
        flops //= 2  # the kernel skips blocks above the diagonal
    return int(flops)
