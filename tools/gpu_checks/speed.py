"""Tokens a second and model-FLOP utilisation beside plain PyTorch and transformers, by `benchmarks/gpu.py`."""

from __future__ import annotations

from typing import Any

import gpu
import torch
from one_gpu.measure import measure
from one_gpu.peak import peak_rate
from one_gpu.shapes import SHAPES
from one_gpu.workload import GENERATION, OURS, PHASES, Workload

from gpu_checks.base import CUDA, Context, Finding, best_seconds, judged
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import parallel_mesh

WORKLOAD = Workload(prompts=8, group=8, prompt_tokens=256, response_tokens=128, micro_batch=8)
LEAST_SECONDS = {"135m": 30, "1b": 50, "8b": 70}  # without which a shape is not begun
LEAST_SPEEDUP = 0.8  # of the plain side's seconds over ours


def check(context: Context) -> Finding:
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    numbers: dict[str, Any] = {"rows": rows}
    with parallel_mesh() as mesh:
        peak = peak_rate(mesh.device, torch.bfloat16, None)
        numbers["MFU is of"] = f"{peak.flops / 1e12:.0f} TFLOP/s ({peak.source})"
        numbers["copy GB/s"] = bandwidth = copy_bandwidth()
        for shape, least in LEAST_SECONDS.items():
            if context.left() < least:
                numbers[f"{shape} left out"] = f"{context.left():.0f} s left, {least} are wanted"
                continue
            arch = Architecture.from_hf(SHAPES[shape], shape)
            results = measure(gpu.builders(arch, mesh, torch.bfloat16, WORKLOAD), 1, mesh.device)
            report = gpu.shape_report(results, WORKLOAD, arch, peak)
            for row in report["rows"]:
                rows.append({"shape": shape, **{name: value for name, value in row.items() if name != "samples"}})
                if row["side"] == OURS and row["phase"] == GENERATION and row["seconds"]:
                    # A decode step reads each weight once, in bf16.
                    least_time = WORKLOAD.response_tokens * 2 * report["parameters"] / (1e9 * bandwidth)
                    rows[-1]["times the weights' reading"] = row["seconds"] / least_time
            faults += too_slow(shape, report["speedups"])
            numbers |= {f"{shape}: speedup of {phase}": report["speedups"][phase] for phase in PHASES}
    ours = [row for row in rows if row["side"] == OURS and row["tokens_per_second"] and row["phase"] in PHASES[:2]]
    told = [f"{row['shape']} {row['phase']} {row['tokens_per_second']:.0f} tokens/s" for row in ours]
    if not told:
        faults.append("nothing was measured")
    return judged(faults, ", ".join(told), numbers)


def too_slow(shape: str, speedups: dict[str, float | None]) -> list[str]:
    """Phases in which transformers is clearly faster."""
    return [
        f"{shape}: {phase} has {speedup:.2f} of transformers' speed, expected at least {LEAST_SPEEDUP}"
        for phase, speedup in speedups.items()
        if speedup is not None and speedup < LEAST_SPEEDUP
    ]


def copy_bandwidth() -> float:
    """GB/s, read and written."""
    data = torch.ones(1 << 28, device=CUDA)
    copy = torch.empty_like(data)
    return 2 * data.numel() * 4 / 1e9 / best_seconds(lambda: copy.copy_(data), CUDA)
