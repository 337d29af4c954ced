"""Peak of the device's memory in each phase of a step, against what `preflight` plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gpu_checks.base import FAKE, Context, Finding, judged
from gpu_checks.measure import free, free_bytes
from gpu_checks.our_side import OurSide, memory_plan
from gpu_checks.shapes import SHAPES
from gpu_checks.workload import Workload
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.runtime.phases import PeakMemory

TOLERANCE = 0.10
WORKLOAD = Workload(prompts=8, group=8, prompt_tokens=448, response_tokens=64, micro_batch=4)
# on fake tensors, where a layer and a decode step take a while and teach nothing new
FEW_LAYERS = 4
FEW_TOKENS = 8


def check(context: Context) -> Finding:
    with parallel_mesh() as mesh:
        for shape in ("1b", "135m"):
            config = SHAPES[shape]
            workload = WORKLOAD
            if context.mode == FAKE:
                config = {**config, "num_hidden_layers": FEW_LAYERS}
                workload = replace(workload, response_tokens=FEW_TOKENS)
            arch = Architecture.from_hf(config, shape)
            plan = memory_plan(arch, torch.bfloat16, mesh.device, workload)
            if 1.3 * plan.peak < free_bytes(mesh.device):
                break
        side = OurSide(arch, mesh, torch.bfloat16, workload, drawn=context.mode != FAKE)
        work = side.work()
        work["training"]()  # Adam's moments are made in the first step
        work["optimizer step"]()
        planned = {phase.name: (plan.held + phase.total) / 1e9 for phase in plan.phases}
        rows: list[dict[str, Any]] = []
        for name, call in work.items():
            free(mesh.device)
            peak = PeakMemory(mesh.device)
            peak.start()
            call()
            gigabytes = peak.gigabytes()
            rows.append(
                {
                    "phase": name,
                    "GB": gigabytes,
                    "planned GB": planned[name],
                    "ratio": gigabytes / planned[name],
                }
            )
    ratios = [row["ratio"] for row in rows]
    return judged(
        off_plan(rows),
        f"{shape}: {min(ratios):.2f} to {max(ratios):.2f} of what is planned",
        {"phases": rows},
    )


def off_plan(rows: list[dict[str, Any]]) -> list[str]:
    """Phases that take other than what is planned for them."""
    return [
        f"{row['phase']} takes {row['GB']:.2f} GB, {row['planned GB']:.2f} are planned; {TOLERANCE:.0%} are allowed"
        for row in rows
        if not abs(row["ratio"] - 1) <= TOLERANCE
    ]
