"""Kernels and host syncs of a decode step, a micro-batch and an optimizer step, against budgets.

Counted in two sizes: their difference is free of what a call does once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType

from gpu_checks.base import FAKE, Context, Finding, judged
from gpu_checks.fakes import counting
from gpu_checks.our_side import OurSide
from gpu_checks.shapes import SHAPES
from gpu_checks.workload import Workload
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import parallel_mesh

# few layers: what a step costs grows by as much with each
SHAPE = "135m"
LAYERS = 2
BUDGETS = Path(__file__).with_name("budgets.json")
# of kernels on a GPU: what fake CUDA counts as one may be several there, such as a split product
SLACK = 1.25
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch")
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@dataclass(frozen=True)
class Counts:
    """Kernels on the device, launches by the host and host syncs of a piece of work."""

    kernels: float
    launches: float
    syncs: float

    def each_of(self, times: int, less: Counts) -> Counts:
        """A repetition, where this holds `times` more of them than `less` does."""
        return Counts(
            *((many - few) / times for many, few in zip(astuple(self), astuple(less), strict=True))
        )


def check(context: Context) -> Finding:
    short, long = (Workload(4, 4, 64, tokens, 4) for tokens in (4, 8))
    few, many = (Workload(prompts, 2, 64, 16, 2) for prompts in (2, 4))
    arch = Architecture.from_hf({**SHAPES[SHAPE], "num_hidden_layers": LAYERS})
    with parallel_mesh() as mesh:

        def of(phase: str, workload: Workload) -> Counts:
            work = OurSide(arch, mesh, torch.bfloat16, workload, drawn=context.mode != FAKE).work()
            # Kernels are chosen and states made in a first call; an optimizer step wants a
            # gradient.
            for before in (
                ("training", phase, "training") if phase == "optimizer step" else (phase,)
            ):
                work[before]()
            return counted(context, work[phase])

        per = {
            "decode step": of("generation", long).each_of(4, of("generation", short)),
            "training micro-batch": of("training", many).each_of(2, of("training", few)),
            "log-prob micro-batch": of("log-probs", many).each_of(2, of("log-probs", few)),
            "optimizer step": of("optimizer step", few),
        }
    rows, faults = compared(
        per, json.loads(BUDGETS.read_text(encoding="utf-8")), 1.0 if context.mode == FAKE else SLACK
    )
    summary = ", ".join(
        f"{name} {counts.launches:.0f} launches, {counts.syncs:.1f} syncs"
        for name, counts in per.items()
    )
    return judged(faults, f"{SHAPE} of {LAYERS} layers: {summary}", {"counts": rows})


def compared(
    per: dict[str, Counts], budgets: dict[str, dict[str, float]], slack: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """A row of each work with its budgets, and what is above them; kernels may be `slack` times as many."""
    rows = []
    faults = []
    for name, counts in per.items():
        row: dict[str, Any] = {"work": name, "launches": counts.launches}
        for kind, budget in budgets[name].items():
            measured = getattr(counts, kind)
            allowed = slack * budget if kind == "kernels" else budget
            row |= {kind: measured, f"{kind} allowed": allowed}
            if not measured <= allowed:
                faults.append(f"{name}: {measured:.1f} {kind}, allowed {allowed:g}")
        rows.append(row)
    return rows, faults


def counted(context: Context, work: Callable[[], object]) -> Counts:
    """Count one call; on a GPU with torch's profiler."""
    if context.mode == FAKE:
        with counting() as ledger:
            work()
        return Counts(ledger.num_kernels, ledger.launches, ledger.num_syncs)
    measured = _profiled(work)
    # The profiler waits for the GPU once by itself, and `_profiled` does: neither is the work's.
    syncs_of_nothing = _profiled(lambda: None).syncs
    return Counts(measured.kernels, measured.launches, measured.syncs - syncs_of_nothing)


def _profiled(work: Callable[[], object]) -> Counts:
    """All that torch's profiler sees of one call and of the wait after it."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as record:
        work()
        torch.cuda.synchronize()
    return of_events(record.events() or ())


def of_events(events: Iterable[Any]) -> Counts:
    """From the profiler's events: kernels and copies on the device; calls of the runtime by name on the host."""
    events = list(events)
    on_device = [
        event
        for event in events
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    calls = [event.name for event in events if event.device_type == DeviceType.CPU]
    launches = sum(name.startswith(LAUNCHES) for name in calls)
    return Counts(len(on_device), launches, sum(name in SYNCS for name in calls))
