"""Proves this project's GPU path on one machine with one GPU, without a network, in ten minutes.

python tools/gpu_check.py                       every check, most valuable first; the rest is skipped when time is over
python tools/gpu_check.py --list
python tools/gpu_check.py --only machine attention --out results/gpu_check
python tools/gpu_check.py --fake                on fake CUDA tensors: does every line run? numbers are not real
python tools/gpu_check.py --device cpu          real numbers at a tiny shape, to test the checks themselves

The last line is `gpu_check: PASS` or `gpu_check: FAIL (names)`; the exit code is 0, 1, or 2 where nothing can be run.
See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from gpu_checks.base import CPU, CUDA, FAKE
from gpu_checks.runner import ROOT, Check, Outcome, run

ALL, REAL = (CUDA, CPU, FAKE), (CUDA, CPU)
TRAINER = ("megatron.core", "transformers", "hydra", "omegaconf", "pebble", "tritonclient")
CHECKS = (  # in order of value
    Check("machine", "what there is, how fast it is", "gpu_checks.machine:check", 90, 5, ALL, ("torch",)),
    Check("correctness", "numbers as a CPU's in fp32", "gpu_checks.correctness:check", 180, 20, REAL),
    Check("attention", "finite and right at 20 lengths", "gpu_checks.attention:check", 90, 10, REAL),
    Check(
        "attention-without-cudnn",
        "the same, torch's cuDNN kernel last",
        "gpu_checks.attention:check",
        90,
        10,
        (CUDA,),
        environment={"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"},
    ),
    Check("trainer", "whole runs; save, kill, resume; LoRA", "gpu_checks.trainer:check", 240, 60, ALL, TRAINER),
    Check("ipc", "weights reach another process", "gpu_checks.ipc:check", 60, 15),
    Check("counts", "kernels and host syncs in budget", "gpu_checks.counts:check", 120, 15, (CUDA, FAKE)),
    Check("memory", "peaks as planned", "gpu_checks.memory:check", 90, 15, (CUDA, FAKE)),
    Check("speed", "tokens/s and MFU beside transformers", "gpu_checks.speed:check", 240, 40),
    Check("switches", "what is off by default, on", "gpu_checks.switches:check", 240, 40, ALL, TRAINER),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these checks, see --list")
    parser.add_argument("--list", action="store_true", help="print the checks and end")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results/gpu_check", help="folder of the report: %(default)s"
    )
    parser.add_argument("--minutes", type=float, default=10, help="of all checks together (%(default)s)")
    parser.add_argument("--fake", action="store_true", help="on fake CUDA tensors")
    parser.add_argument("--device", choices=[CUDA, CPU], default=CUDA, help="%(default)s")
    args = parser.parse_args()
    if not args.minutes > 0:
        parser.error(f"--minutes is {args.minutes:g}, expected above 0")
    return args


def why_not(mode: str) -> str | None:
    """Why nothing can be run here."""
    missing = [name for name in ("torch", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found by {sys.executable}; install what docs/gpu.md lists"
    if mode == FAKE:
        from gpu_checks.fakes import why_not as why_no_fakes

        return why_no_fakes()
    # In a process of its own: a CUDA context here would take memory that the checks are to have.
    ask = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    if mode == CUDA and subprocess.run(ask, stderr=subprocess.DEVNULL, timeout=300).returncode:
        return "torch finds no GPU here; expected one, or --fake (fake CUDA tensors), or --device cpu (tiny shapes)"
    return None


def run_all(checks: list[Check], mode: str, out: Path, seconds: float) -> list[Outcome]:
    """One after the other, within so many seconds, with progress on the terminal."""
    from rich.console import Console

    console, end, outcomes = Console(highlight=False, soft_wrap=True), time.time() + seconds, []
    colours = {"PASS": "green", "FAIL": "red", "SKIP": "yellow"}
    for number, check in enumerate(checks, 1):
        with console.status(f"{number}/{len(checks)} {check.name}: {check.proves} ({end - time.time():.0f} s left)"):
            outcome = run(check, mode, out / check.name, end - time.time())
        outcomes.append(outcome)
        colour = colours[outcome.verdict]
        console.print(f"[{colour}]{outcome.verdict}[/{colour}] {check.name} {outcome.seconds:.0f} s: ", end="")
        console.print(outcome.sentence, markup=False)
    return outcomes


def commit() -> str:
    """Of the checkout, and whether it was changed."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def main() -> int:
    args = arguments()
    checks = [check for check in CHECKS if args.only is None or check.name in args.only]
    if args.list:
        for check in checks:
            print(f"{check.name:24} {check.proves} ({', '.join(check.modes)}; at most {check.seconds:.0f} s)")
        return 0
    mode = FAKE if args.fake else args.device
    reason = why_not(mode)
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    from gpu_checks.report import skipped_line, verdict, write

    args.out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    outcomes = run_all(checks, mode, args.out, 60 * args.minutes)
    about = {
        "mode": mode,
        "commit": commit(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.time() - started, 1),
    }
    print(f"report: {write(args.out, outcomes, about)}")
    if skipped := skipped_line(outcomes):
        print(skipped)
    found = verdict(outcomes)
    print(f"gpu_check: {found}")
    return 0 if found == "PASS" else 1


if __name__ == "__main__":
    sys.exit(main())
