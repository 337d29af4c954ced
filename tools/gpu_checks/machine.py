"""What there is: GPU, driver, libraries, attention kernels, and the rates that it reaches."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

import torch

from gpu_checks.base import CUDA, FAKE, Context, Finding, best_seconds, judged

LIBRARIES = (
    *("megatron-core", "transformers", "numpy", "safetensors", "triton", "hydra-core", "omegaconf", "pebble"),
    *("tritonclient", "aiohttp", "transformer-engine", "flash-attn", "tensorrt-llm", "nvidia-pytriton"),
)
LEAST_SHARE = 0.4  # of a data sheet's rate; large products reach 0.7 to 0.8 of it
PRODUCT_TOLERANCE = 1e-2  # of a bf16 product, relative


def check(context: Context) -> Finding:
    numbers: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "cores": os.cpu_count(),
        "attention kernels": _chosen_kernels(context.device),
    }
    name = platform.machine()
    if context.device == CUDA:
        found = torch.cuda.get_device_properties(0)
        name = found.name
        numbers |= {
            "gpu": name,
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
        }
        numbers |= {"gigabytes": found.total_memory / 1e9, "gigabytes free": torch.cuda.mem_get_info()[0] / 1e9}
    if context.mode == FAKE:
        return judged([], "fake CUDA; no rate is measured", numbers)
    faults: list[str] = []
    if context.mode == CUDA:
        numbers |= {"driver": _driver(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    numbers |= _rates(context.device, faults)
    rate, copied = numbers["bf16 TFLOP/s"], numbers["copy GB/s"]
    missing = [name for name, version in numbers["libraries"].items() if version is None]
    there = f"{name}, bf16 products at {rate:.3g} TFLOP/s, copies at {copied:.3g} GB/s"
    return judged(faults, f"{there}; not installed: {', '.join(missing) or 'nothing'}", numbers)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip() or None
    except OSError:
        return None


def _chosen_kernels(device: str) -> dict[str, str]:
    """What torch's scaled_dot_product_attention takes where it is left to choose; 32 query heads on 8 groups."""

    def chosen(dtype: torch.dtype, masked: bool, length: int = 512) -> str:
        query = torch.empty(2, 32, length, 64, dtype=dtype, device=device, requires_grad=True)
        keys = torch.empty(2, 8, length, 64, dtype=dtype, device=device, requires_grad=True)
        mask = torch.ones(length, length, dtype=torch.bool, device=device).tril() if masked else None
        number = torch._fused_sdp_choice(query, keys, keys, attn_mask=mask, is_causal=not masked, enable_gqa=True)
        return torch.nn.attention.SDPBackend(number).name

    rows = {"bf16 causal": (torch.bfloat16, False), "bf16 masked": (torch.bfloat16, True)}
    rows |= {"fp32 causal": (torch.float32, False), "fp32 masked": (torch.float32, True)}
    found = {}
    for name, (dtype, masked) in rows.items():
        try:
            found[name] = chosen(dtype, masked)
        except (RuntimeError, NotImplementedError) as error:  # a private function, and none for fake tensors
            found[name] = f"unknown ({str(error).splitlines()[0][:80]})"
    return found


def _rates(device: str, faults: list[str]) -> dict[str, Any]:
    from one_gpu.peak import GPU_MATRIX_SIZE, known_teraflops
    from rloo_step.rates import matrix_rate

    size, megabytes = (GPU_MATRIX_SIZE, 1024) if device == CUDA else (256, 16)
    place = torch.device(device)
    numbers: dict[str, Any] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        numbers[f"{name} TFLOP/s"] = matrix_rate(place, dtype, matrix_size=size) / 1e12
    sheet = known_teraflops(torch.cuda.get_device_name()) if device == CUDA else None
    numbers["data sheet bf16 TFLOP/s"] = sheet
    if sheet is not None and numbers["bf16 TFLOP/s"] < LEAST_SHARE * sheet:
        faults.append(
            f"bf16 products reach {numbers['bf16 TFLOP/s']:.0f} of {sheet:.0f} TFLOP/s, expected at least "
            f"{LEAST_SHARE:.0%}; another program uses the GPU, or its clock is held low"
        )
    left, right = (torch.randn(512, 512, device=device) for _ in range(2))
    exact = left.double() @ right.double()
    error = float((left.bfloat16() @ right.bfloat16()).double().sub(exact).norm() / exact.norm())
    numbers["bf16 product's error"] = error
    if not error <= PRODUCT_TOLERANCE:
        faults.append(f"a bf16 product is off by {error:.1e}, expected at most {PRODUCT_TOLERANCE:g}")
    data = torch.ones(megabytes << 18, device=device)
    copy, host = torch.empty_like(data), torch.ones(megabytes << 18, pin_memory=device == CUDA)
    moved = data.numel() * 4 / 1e9
    numbers["copy GB/s"] = 2 * moved / best_seconds(lambda: copy.copy_(data), device)  # read and written
    numbers["to device GB/s"] = moved / best_seconds(lambda: data.copy_(host, non_blocking=True), device)
    numbers["to host GB/s"] = moved / best_seconds(lambda: host.copy_(data, non_blocking=True), device)
    return numbers
