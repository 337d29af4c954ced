"""Lets megatron-core 0.16 run without CUDA. Does nothing if CUDA is available.

megatron-core hard-codes CUDA (`device="cuda"`, `tensor.type() == "torch.cuda.FloatTensor"`), and
has no setting for it. On a CPU, therefore, the global `torch` of each `megatron.core.*` module is a
facade that forwards to torch, except for `cuda` and tensor factories given a CUDA device; its RNG
tracker uses the CPU generator; and `Tensor.type()` and `Tensor.cuda()` behave as for a CUDA tensor
when called inside megatron.core. All other modules keep the real torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import logging
import sys
import types
import warnings
from typing import Any

import torch

_MEGATRON = "megatron.core"
_CPU = torch.device("cpu")
_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "ones",
    "ones_like",
)
_FACTORIES += ("rand", "randint", "randn", "tensor", "zeros", "zeros_like")


class _Done:
    """Replaces torch.cuda.Event and torch.cuda.Stream.

    The CPU runs in order, and its work is already complete.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def record(self, *args: Any) -> None: ...

    wait = record
    wait_stream = record
    wait_event = record
    synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Done) -> float:
        return 0.0

    def record_event(self, *args: Any) -> _Done:
        return _Done()


def _on_cpu(factory: Any) -> Any:
    """Wrap a tensor factory to map CUDA devices to the CPU and ignore pinning."""

    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapper


def _facade_of(module: types.ModuleType, replacements: dict[str, Any]) -> types.ModuleType:
    facade = types.ModuleType(module.__name__)
    facade.__dict__.update(
        {k: v for k, v in vars(module).items() if k != "__name__"} | replacements
    )
    return facade


def _torch_facade() -> types.ModuleType:
    rng_state = {"get_rng_state": lambda *args, **kwargs: torch.get_rng_state()}
    replacements: dict[str, Any] = {
        **rng_state,
        "random": _facade_of(torch.cuda.random, rng_state),
        "current_device": lambda: _CPU,
        "device_count": lambda: 1,
        "set_device": lambda *args: None,
        "synchronize": lambda *args, **kwargs: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda *args: 0,
        "manual_seed": torch.manual_seed,
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "current_stream": _Done,
        "default_stream": _Done,
        "stream": lambda *args: contextlib.nullcontext(),
        "Stream": _Done,
        "Event": _Done,
    }
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    # torch creates some attributes on first use. PEP 562 lets the facade find them then.
    late = {"__getattr__": functools.partial(getattr, torch)}
    return _facade_of(torch, {**factories, **late, "cuda": _facade_of(torch.cuda, replacements)})


class _RebindOnImport(importlib.abc.MetaPathFinder):
    """Installs the facade in megatron.core modules that are imported later."""

    def __init__(self, facade: types.ModuleType):
        self._facade = facade
        self._searching = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if not fullname.startswith(_MEGATRON) or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_and_rebind(module: types.ModuleType) -> None:
                execute(module)
                _rebind(module, self._facade)

            spec.loader.exec_module = exec_and_rebind  # type: ignore[method-assign]
        return spec


def _rebind(module: types.ModuleType, facade: types.ModuleType) -> None:
    if module.__dict__.get("torch") is torch:
        module.__dict__["torch"] = facade


def _called_from_megatron() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").startswith(_MEGATRON)


def _patch_tensor_methods() -> None:
    original_type = torch.Tensor.type
    original_cuda = torch.Tensor.cuda

    @functools.wraps(original_type)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original_type(self, dtype, *args, **kwargs)
        name = original_type(self)
        return name.replace("torch.", "torch.cuda.", 1) if _called_from_megatron() else name

    @functools.wraps(original_cuda)
    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_from_megatron() else original_cuda(self, *args, **kwargs)

    torch.Tensor.type = type_  # type: ignore[method-assign]
    torch.Tensor.cuda = cuda  # type: ignore[method-assign]


def _import_megatron() -> None:
    """Import megatron.core without two slow parts, which take two thirds of the import time.

    jit_fuser is torch.compile, which loads dynamo and inductor and looks for a C++ compiler. wandb
    is for megatron's engine. Neither is used here.
    """
    if _MEGATRON in sys.modules:
        torch.compiler.set_stance("force_eager")
        return
    compile_ = torch.compile
    has_wandb = "wandb" in sys.modules
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compile_
        if not has_wandb:
            del sys.modules["wandb"]


def _patch_rng_tracker() -> None:
    import megatron.core.tensor_parallel.random as tracker

    # megatron-core 0.16 passes a state to torch's own `_lazy_call`, despite any facade, and that
    # call waits for CUDA.
    tracker._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


@functools.cache
def enable_cpu_support() -> bool:
    """Patch megatron-core for machines without CUDA.

    Returns False, with nothing patched, if CUDA is available.
    """
    # Irrelevant start-up warnings: Transformer Engine, Apex and CUDA graph scopes are not used
    # here.
    for text in ("Transformer Engine", "Apex", "transformer_engine", "full scope is deprecated"):
        warnings.filterwarnings("ignore", message=f".*{text}.*")
    # megatron uses names that torch 2.13 deprecates, and each rank would warn.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|megatron)\.")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if torch.cuda.is_available():
        return False
    _import_megatron()
    facade = _torch_facade()
    for name, module in list(sys.modules.items()):
        if name.startswith(_MEGATRON):
            _rebind(module, facade)
    sys.meta_path.insert(0, _RebindOnImport(facade))
    _patch_rng_tracker()
    _patch_tensor_methods()
    return True
