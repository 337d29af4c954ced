"""Tokens a second and model-FLOP utilisation beside plain PyTorch and transformers.

Both sides have the same random weights, prompts, lengths and micro-batches; transformers generates
by its own `generate`, with scaled_dot_product_attention, and trains with autocast and fused AdamW.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from rloo_step.parts import parts_of

from gpu_checks import our_side, plain_side
from gpu_checks.base import CPU, CUDA, Context, Finding, best_seconds, judged
from gpu_checks.measure import Builder, Results, Side, measure
from gpu_checks.peak_rate import PeakRate, peak_rate
from gpu_checks.shapes import SHAPES
from gpu_checks.speed_options import SpeedOptions, options_of
from gpu_checks.training_flops import training_flops
from gpu_checks.workload import GENERATION, OURS, PHASES, PHASES_OF, PLAIN, TRAINING, Workload
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh

# Without which a shape is not begun.
LEAST_SECONDS = {"tiny": 10, "135m": 30, "1b": 50, "8b": 70}
LEAST_SPEEDUP = 0.8  # of the plain side's seconds over ours
COPIED = {CUDA: 1 << 28, CPU: 1 << 22}  # fp32 numbers


def check(context: Context) -> Finding:
    options = options_of(context.mode, context.options)
    workload = workload_of(options)
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    numbers: dict[str, Any] = {"rows": rows}
    with parallel_mesh() as mesh:
        peak = peak_rate(mesh.device)
        bandwidth = copy_bandwidth(context)
        numbers["MFU is of"] = f"{peak.flops / 1e12:.4g} TFLOP/s ({peak.source})"
        numbers["copy GB/s"] = bandwidth
        for shape in options.shapes:
            least = LEAST_SECONDS[shape]
            if context.left() < least:
                numbers[f"{shape} left out"] = f"{context.left():.0f} s left, {least} are wanted"
                continue
            arch = Architecture.from_hf(SHAPES[shape], shape)
            results = measure(builders(arch, mesh, workload), options.repeats, mesh.device)
            of_shape = rows_of(shape, results, workload, arch, peak)
            add_weight_reading(of_shape, workload, arch, bandwidth)
            rows += of_shape
            speedups = {phase: results.speedup(phase) for phase in PHASES}
            if context.mode == CUDA:  # a CPU's seconds say nothing about a GPU
                faults += too_slow(shape, speedups)
            for phase, speedup in speedups.items():
                numbers[f"{shape}: speedup of {phase}"] = speedup
    measured = []
    for row in rows:
        if row["side"] == OURS and row["phase"] in PHASES[:2] and row["tokens_per_second"]:
            speed = f"{row['tokens_per_second']:.0f} tokens/s"
            measured.append(f"{row['shape']} {row['phase']} {speed}")
    if not measured:
        faults.append("nothing was measured")
    return judged(faults, ", ".join(measured), numbers)


def workload_of(options: SpeedOptions) -> Workload:
    return Workload(
        prompts=options.prompts,
        group=options.group,
        prompt_tokens=options.prompt_tokens,
        response_tokens=options.response_tokens,
        micro_batch=options.micro_batch,
    )


def builders(arch: Architecture, mesh: Mesh, workload: Workload) -> list[Builder]:
    """Both sides of one shape, in bf16."""
    dtype = torch.bfloat16

    def build_ours() -> Side:
        return our_side.OurSide(arch, mesh, dtype, workload)

    def build_plain() -> Side:
        return plain_side.PlainSide(arch, mesh.device, dtype, workload)

    least_of_ours: Callable[[str], int] = functools.partial(
        our_side.least_bytes,
        arch,
        dtype,
        mesh.device,
        workload,
    )
    least_of_plain: Callable[[str], int] = functools.partial(plain_side.least_bytes, arch, dtype)
    return [
        Builder(OURS, PHASES_OF[OURS], least_of_ours, build_ours),
        Builder(PLAIN, PHASES_OF[PLAIN], least_of_plain, build_plain),
    ]


def rows_of(
    shape: str,
    results: Results,
    workload: Workload,
    arch: Architecture,
    peak: PeakRate,
) -> list[dict[str, Any]]:
    """A row of each phase and side; None is not known or makes no sense."""
    flops = training_flops(arch, workload)
    rows = []
    for phase in PHASES:
        for side, phases in PHASES_OF.items():
            if phase in phases:
                row = row_of(side, phase, results, workload, flops, peak)
                rows.append({"shape": shape, **row})
    return rows


def row_of(
    side: str,
    phase: str,
    results: Results,
    workload: Workload,
    flops: float,
    peak: PeakRate,
) -> dict[str, Any]:
    seconds = results.median(side, phase)
    samples = results.samples.get((side, phase), [])
    tokens = workload.tokens
    if phase == GENERATION:
        tokens = workload.sequences * workload.response_tokens
    row: dict[str, Any] = {
        "side": side,
        "phase": phase,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "mfu": flops / seconds / peak.flops if seconds and phase == TRAINING else None,
        "gigabytes": results.gigabytes(side, phase),
        "skipped": results.skipped.get((side, phase)),
    }
    if len(samples) > 1:
        row["rounds"] = [sample.seconds for sample in samples]
    if samples and samples[0].parts:
        row["parts"] = samples[0].parts
    return row


def add_weight_reading(
    rows: list[dict[str, Any]],
    workload: Workload,
    arch: Architecture,
    bandwidth: float,
) -> None:
    """Say how many times as long our generation takes as the reading of its weights."""
    for row in rows:
        if row["side"] == OURS and row["phase"] == GENERATION and row["seconds"]:
            # A decode step reads each weight once, in bf16.
            gigabytes = workload.response_tokens * 2 * parts_of(arch).all / 1e9
            row["times the weights' reading"] = row["seconds"] * bandwidth / gigabytes


def too_slow(shape: str, speedups: dict[str, float | None]) -> list[str]:
    """Phases in which transformers is clearly faster."""
    faults = []
    for phase, speedup in speedups.items():
        if speedup is not None and speedup < LEAST_SPEEDUP:
            of_speed = f"{speedup:.2f} of transformers' speed"
            faults.append(f"{shape}: {phase} has {of_speed}, expected at least {LEAST_SPEEDUP}")
    return faults


def copy_bandwidth(context: Context) -> float:
    """GB/s, read and written."""
    data = torch.ones(COPIED[context.mode], device=context.device)
    copy = torch.empty_like(data)
    seconds = best_seconds(lambda: copy.copy_(data), context.device)
    return 2 * data.numel() * 4 / 1e9 / seconds
