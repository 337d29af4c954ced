"""What there is: GPU, driver, libraries, attention kernels, and the rates that it reaches."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

import torch
from torch.cuda import nccl

from gpu_checks.base import CUDA, FAKE, Context, Finding, best_seconds, judged

LIBRARIES = (
    *("megatron-core", "transformers", "numpy", "safetensors", "triton", "hydra-core", "omegaconf"),
    *(
        "tritonclient",
        "aiohttp",
        "transformer-engine",
        "flash-attn",
        "tensorrt-llm",
        "nvidia-pytriton",
    ),
)
LEAST_SHARE = 0.4  # of a data sheet's rate; large products reach 0.7 to 0.8 of it
PRODUCT_TOLERANCE = 1e-2  # of a bf16 product, relative
# What a GPU's speed depends on: the clocks now and at most, in MHz, its heat and its power.
SMI_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
    "power.limit",
)


def check(context: Context) -> Finding:
    numbers: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        "libraries": {name: _version(name) for name in LIBRARIES},
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if context.device == CUDA else None,
    }
    if context.mode == FAKE:
        return judged([], "fake CUDA; no rate is measured", numbers)
    faults: list[str] = []
    numbers["attention kernels"] = _chosen_kernels(context.device)
    if context.mode == CUDA:
        properties = torch.cuda.get_device_properties(0)
        numbers |= {
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
        }
        numbers |= {
            "GB": properties.total_memory / 1e9,
            "GB free": torch.cuda.mem_get_info()[0] / 1e9,
        }
        numbers["nccl"] = ".".join(map(str, nccl.version()))
        numbers["nvidia-smi at rest"] = _nvidia_smi()
    numbers |= _rates(context.device, faults)
    if context.mode == CUDA:
        numbers["nvidia-smi after it"] = _nvidia_smi()
    missing = (
        ", ".join(name for name, version in numbers["libraries"].items() if version is None)
        or "nothing"
    )
    rates = f"bf16 products at {numbers['bf16 TFLOP/s']:.3g} TFLOP/s, copies at {numbers['copy GB/s']:.3g} GB/s"
    return judged(
        faults,
        f"{numbers['gpu'] or platform.machine()}, {rates}; not installed: {missing}",
        numbers,
    )


def _nvidia_smi() -> dict[str, str] | str:
    """Driver and clocks by nvidia-smi's names, or why there are none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    first_gpu = done.stdout.strip().partition("\n")[0].split(", ")
    if done.returncode or len(first_gpu) != len(SMI_FIELDS):
        return f"exit code {done.returncode}: {(done.stdout + done.stderr).strip()[:200]}"
    return dict(zip(SMI_FIELDS, first_gpu, strict=True))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _chosen_kernels(device: str) -> dict[str, str]:
    """What torch's scaled_dot_product_attention takes where it is left to choose; 32 query heads on 8 groups."""
    kernels = {}
    for dtype in (torch.bfloat16, torch.float32):
        for masked in (False, True):
            query, keys = (
                torch.empty(2, heads, 512, 64, dtype=dtype, device=device) for heads in (32, 8)
            )
            mask = torch.ones(512, 512, dtype=torch.bool, device=device).tril() if masked else None
            options = {"attn_mask": mask, "is_causal": not masked, "enable_gqa": True}
            number = torch._fused_sdp_choice(query.requires_grad_(), keys, keys, **options)  # type: ignore[attr-defined]
            name = f"{str(dtype)[6:]} {'masked' if masked else 'causal'}"
            kernels[name] = torch.nn.attention.SDPBackend(number).name
    return kernels


def _rates(device: str, faults: list[str]) -> dict[str, Any]:
    from rloo_step.rates import matrix_rate

    from gpu_checks.peak_rate import GPU_MATRIX_SIZE, known_teraflops

    size, count = (GPU_MATRIX_SIZE, 1 << 28) if device == CUDA else (256, 1 << 22)
    types = {"bf16": torch.bfloat16, "fp32": torch.float32}
    numbers: dict[str, Any] = {
        f"{name} TFLOP/s": matrix_rate(torch.device(device), dtype, matrix_size=size) / 1e12
        for name, dtype in types.items()
    }
    rate = numbers["bf16 TFLOP/s"]
    sheet = known_teraflops(torch.cuda.get_device_name()) if device == CUDA else None
    if sheet is not None and rate < LEAST_SHARE * sheet:
        faults.append(
            f"bf16 products reach {rate:.0f} of {sheet:.0f} TFLOP/s, expected at least {LEAST_SHARE:.0%}; another "
            "program uses the GPU, or its clock is held low"
        )
    left, right = (torch.randn(512, 512, device=device) for _ in range(2))
    exact = left.double() @ right.double()
    error = float((left.bfloat16() @ right.bfloat16()).double().sub(exact).norm() / exact.norm())
    if not error <= PRODUCT_TOLERANCE:
        faults.append(
            f"a bf16 product is off by {error:.1e}, expected at most {PRODUCT_TOLERANCE:g}"
        )
    data, host = torch.ones(count, device=device), torch.ones(count, pin_memory=device == CUDA)
    copy = torch.empty_like(data)
    moved = 4 * count / 1e9
    numbers |= {"data sheet bf16 TFLOP/s": sheet, "bf16 product's error": error}
    # read and written
    numbers["copy GB/s"] = 2 * moved / best_seconds(lambda: copy.copy_(data), device)
    numbers["to device GB/s"] = moved / best_seconds(
        lambda: data.copy_(host, non_blocking=True), device
    )
    numbers["to host GB/s"] = moved / best_seconds(
        lambda: host.copy_(data, non_blocking=True), device
    )
    return numbers
