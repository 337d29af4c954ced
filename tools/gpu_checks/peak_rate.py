"""The rate that a model-FLOP utilisation is measured against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rloo_step.rates import matrix_rate

# Dense bf16 products with fp32 accumulation, 10^12 operations a second, by NVIDIA's data sheets.
# The first name that the device's name holds counts.
BF16_TERAFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.5,
    "H100": 989.4,
    "A100": 312.0,
    "A30": 165.0,
    "L40S": 362.05,
    "L40": 181.05,
    "L4": 121.0,
}
GPU_MATRIX_SIZE = 8192
# A CPU without bf16 instructions takes a minute for a product of 2048 x 2048.
CPU_MATRIX_SIZE = 512


@dataclass(frozen=True)
class PeakRate:
    """Floating-point operations a second, and where the number comes from."""

    flops: float
    source: str


def peak_rate(device: torch.device) -> PeakRate:
    """What the table has for the device in bf16, else what a large matrix product reaches."""
    size = CPU_MATRIX_SIZE
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = known_teraflops(name)
        if known is not None:
            return PeakRate(known * 1e12, f"data sheet of {name}, dense bf16")
        size = GPU_MATRIX_SIZE
    return PeakRate(
        matrix_rate(device, torch.bfloat16, matrix_size=size),
        f"measured, a product of {size} x {size} in bfloat16",
    )


def known_teraflops(name: str) -> float | None:
    """By a device's name; None where the table has it not."""
    return next((rate for part, rate in BF16_TERAFLOPS.items() if part in name), None)
