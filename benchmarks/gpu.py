"""Generation, training and a whole RLOO step on one GPU, beside transformers and plain PyTorch on the same shapes.

python benchmarks/gpu.py                                       (135M, 1B and 8B in bf16)
python benchmarks/gpu.py --shapes 1b --prompts 32 --group 8 --out gpu.json
python benchmarks/gpu.py --shapes tiny --device cpu            (does it work at all? seconds)

Needs PyTorch, megatron-core, transformers, psutil and rich, and neither a network nor files of a model: weights are
random. Log-probs on the device are held against the CPU's first; where they are off, nothing is measured and the exit
code is 1. The last lines are key=value pairs, one line a shape and phase. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

from one_gpu.shapes import SHAPES  # noqa: E402

if TYPE_CHECKING:
    import torch
    from one_gpu.measure import Builder, Results
    from one_gpu.peak import PeakRate
    from one_gpu.workload import Workload

    from reinforce_rl.megatron.architecture import Architecture
    from reinforce_rl.megatron.mesh import Mesh

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
# On a CPU sums in another order differ by 1e-6 here; a wrong weight makes 1e-2.
TOLERANCE = 1e-3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m", "1b", "8b"], help="%(default)s")
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step (%(default)s)")
    parser.add_argument("--group", type=int, default=8, help="samples a prompt (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of each prompt (%(default)s)")
    parser.add_argument("--response-tokens", type=int, default=256, help="of each response (%(default)s)")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences in one training pass (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, in which the sides alternate (%(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="cuda where there is one, else cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of weights and products (%(default)s)")
    parser.add_argument("--peak-tflops", type=float, help="of the device, instead of a table's or a measured rate")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of log-probs in fp32, nats (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/bench/gpu.json"), help="%(default)s")
    args = parser.parse_args()
    counts = ("prompts", "group", "prompt_tokens", "response_tokens", "micro_batch", "repeats")
    for name in counts:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected at least 1")
    length = args.prompt_tokens + args.response_tokens
    for shape in args.shapes:
        if length > SHAPES[shape]["max_position_embeddings"]:
            parser.error(f"{length} tokens exceed the {SHAPES[shape]['max_position_embeddings']} positions of {shape}")
    if args.group < 2:
        parser.error("--group is 1; RLOO compares the samples of a prompt, expected at least 2")
    return args


def checked(
    args: argparse.Namespace, archs: dict[str, Architecture], mesh: Mesh, dtype: torch.dtype
) -> tuple[dict[str, Any], list[str]]:
    """What each shape's log-probs deviate by, for the file; and what exceeds the tolerance."""
    import torch
    from one_gpu.correctness import deviations, is_checked

    written, faults = {}, []
    for shape, arch in archs.items():
        if not is_checked(arch):
            print(f"{shape}: log-probs are not checked, the CPU would take too long")
            written[shape] = None
            continue
        found = deviations(arch, mesh, list(dict.fromkeys((torch.float32, dtype))))
        written[shape] = [asdict(one) for one in found]
        for one in found:
            told = f"{shape}: log-probs in {one.dtype} are off by {one.largest:.1e} at most, {one.mean:.1e} on average"
            print(f"{told} (nats, against transformers on the CPU in float32)")
        if not found[0].largest <= args.tolerance:
            faults.append(
                f"{shape}: log-probs on {mesh.device} in float32 differ from the CPU's by {found[0].largest:.2e}, "
                f"expected at most {args.tolerance:g} (--tolerance)"
            )
    return written, faults


def builders(arch: Architecture, mesh: Mesh, dtype: torch.dtype, workload: Workload) -> list[Builder]:
    """Both sides of one shape."""
    from one_gpu import ours, plain
    from one_gpu.measure import Builder
    from one_gpu.workload import OURS, PHASES_OF, PLAIN

    def builder(name: str, least: Any, build: Any, place: Any) -> Builder:
        return Builder(name, PHASES_OF[name], least, functools.partial(build, arch, place, dtype, workload))

    return [
        builder(OURS, functools.partial(ours.least_bytes, arch, dtype, mesh.device, workload), ours.OurSide, mesh),
        builder(PLAIN, functools.partial(plain.least_bytes, arch, dtype), plain.PlainSide, mesh.device),
    ]


def row_of(
    name: str, phase: str, results: Results, workload: Workload, flops: float, peak: PeakRate
) -> dict[str, Any]:
    """A side's phase, for table and file; None is not known or makes no sense."""
    from one_gpu.workload import GENERATION, TRAINING

    seconds = results.median(name, phase)
    tokens = workload.sequences * workload.response_tokens if phase == GENERATION else workload.tokens
    samples = results.samples.get((name, phase), [])
    return {
        "side": name,
        "phase": phase,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "mfu": flops / seconds / peak.flops if seconds and phase == TRAINING else None,
        "gigabytes": results.gigabytes(name, phase),
        "skipped": results.skipped.get((name, phase)),
        "samples": [asdict(sample) for sample in samples],
    }


def shape_report(results: Results, workload: Workload, arch: Architecture, peak: PeakRate) -> dict[str, Any]:
    """All of a shape, for table and file."""
    from one_gpu.flops import training_flops
    from one_gpu.workload import PHASES, PHASES_OF
    from rloo_step.parts import parts_of

    flops = training_flops(arch, workload)
    rows = [
        row_of(name, phase, results, workload, flops, peak)
        for phase in PHASES
        for name, phases in PHASES_OF.items()
        if phase in phases
    ]
    speedups = {phase: results.speedup(phase) for phase in PHASES}
    return {"parameters": parts_of(arch).all, "training_flops": flops, "rows": rows, "speedups": speedups}


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def show(reports: dict[str, Any], workload: Workload, dtype: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=119)
    shape = (
        f"{workload.prompts} prompts x {workload.group}, {workload.prompt_tokens} + {workload.response_tokens} tokens"
    )
    table = Table(title=f"{shape}, {workload.micro_batch} in a training pass, {dtype}; medians")
    for name in ("shape", "phase", "side"):
        table.add_column(name)
    for name in ("seconds", "tokens/s", "MFU", "peak GB", "speedup"):
        table.add_column(name, justify="right")
    for name, report in reports.items():
        for row in report["rows"]:
            first = row["side"] == report["rows"][0]["side"]
            speedup = number(report["speedups"][row["phase"]], ".2f") if first else ""
            mfu = number(row["mfu"] and 100 * row["mfu"], ".1f") + ("" if row["mfu"] is None else " %")
            cells = number(row["seconds"], ".3f"), number(row["tokens_per_second"], ".0f"), mfu
            table.add_row(name, row["phase"], row["side"], *cells, number(row["gigabytes"], ".2f"), speedup)
        table.add_section()
    console.print(table)
    for name, report in reports.items():
        for row in report["rows"]:
            if row["skipped"]:
                console.print(f"{name}: {row['phase']} by {row['side']} is skipped: {row['skipped']}", highlight=False)


def last_lines(reports: dict[str, Any]) -> list[str]:
    """One a shape and phase; ours_ and plain_ are the sides, - is what there is not."""
    from one_gpu.workload import OURS, PHASES

    lines = []
    for name, report in reports.items():
        for phase in PHASES:
            words = [f"shape={name}", f"phase={phase}"]
            for row in report["rows"]:
                if row["phase"] == phase:
                    side = "ours" if row["side"] == OURS else "plain"
                    words += [
                        f"{side}_seconds={number(row['seconds'], '.4f')}",
                        f"{side}_tokens_per_second={number(row['tokens_per_second'], '.1f')}",
                        f"{side}_mfu={number(row['mfu'], '.4f')}",
                        f"{side}_gb={number(row['gigabytes'], '.3f')}",
                    ]
            lines.append(" ".join([*words, f"speedup={number(report['speedups'][phase], '.3f')}"]))
    return lines


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on."""
    import torch

    packages = ("torch", "megatron-core", "transformers")
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "kind": device.type,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def run(args: argparse.Namespace, mesh: Mesh) -> int:
    """Check, measure, show and write; the exit code."""
    import torch
    from one_gpu.measure import measure
    from one_gpu.peak import peak_rate
    from one_gpu.workload import Workload

    from reinforce_rl.megatron.architecture import Architecture

    dtype = getattr(torch, DTYPES[args.dtype])
    workload = Workload(args.prompts, args.group, args.prompt_tokens, args.response_tokens, args.micro_batch)
    archs = {shape: Architecture.from_hf(SHAPES[shape], shape) for shape in args.shapes}
    before = machine(mesh.device)
    print(json.dumps(before))
    correctness, faults = checked(args, archs, mesh, dtype)
    peak, reports = None, {}
    if not faults:
        peak = peak_rate(mesh.device, dtype, args.peak_tflops)
        print(f"peak rate: {peak.flops / 1e12:.3f} TFLOP/s ({peak.source})", flush=True)
        for shape, arch in archs.items():
            results = measure(builders(arch, mesh, dtype, workload), args.repeats, mesh.device)
            reports[shape] = shape_report(results, workload, arch, peak)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    written = {
        "machine": before,
        "settings": {**vars(args), "out": str(args.out)},
        "correctness": correctness,
        "faults": faults,
        "peak": None if peak is None else asdict(peak),
        "shapes": reports,
    }
    args.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if faults:
        print("\n".join(f"error: {fault}" for fault in faults), file=sys.stderr)
        return 1
    show(reports, workload, args.dtype)
    print(f"everything: {args.out}")
    print("\n".join(last_lines(reports)))
    return 0


def main() -> int:
    args = arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: everything here asks it whether there is a GPU
    import torch

    from reinforce_rl.megatron.mesh import parallel_mesh

    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: --device cuda, but torch finds no GPU; expected one, or --device cpu", file=sys.stderr)
        return 1
    with parallel_mesh() as mesh:
        return run(args, mesh)


if __name__ == "__main__":
    sys.exit(main())
