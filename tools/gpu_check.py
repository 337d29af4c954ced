"""Proves this project's GPU path on one machine with one GPU, without a network, in ten minutes.

python tools/gpu_check.py                  every check, most valuable first; what is left when time is over is skipped
python tools/gpu_check.py --only machine attention --out results/gpu_check
python tools/gpu_check.py --fake           on fake CUDA tensors: does every line run? numbers are not real
python tools/gpu_check.py --device cpu     real numbers at tiny shapes, to test the checks themselves
python tools/gpu_check.py --only speed --shapes 8b --repeats 5 --minutes 30

The last line is `gpu_check: PASS` or `gpu_check: FAIL (names)`; the exit code is 0, 1, or 2 where nothing can be run.
See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_checks.base import CPU, CUDA, FAKE, SKIP, Finding
from gpu_checks.fakes import why_no_fakes
from gpu_checks.runner import ROOT, Check, is_installed, run
from gpu_checks.speed_options import CHECK as SPEED
from gpu_checks.speed_options import add_options, fault_of, given_options, options_of

ALL = (CUDA, CPU, FAKE)
REAL = (CUDA, CPU)
TRAINER = ("megatron.core", "transformers", "hydra", "omegaconf", "tritonclient")
TRTLLM = (*TRAINER, "tensorrt_llm")
CUDNN_LAST = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
CHECKS = (  # in order of value
    Check(
        "machine",
        "what there is, how fast it is",
        "gpu_checks.machine:check",
        90,
        5,
        ALL,
        ("torch",),
    ),
    Check(
        "correctness", "numbers as a CPU's in fp32", "gpu_checks.correctness:check", 180, 20, REAL
    ),
    Check(
        "attention", "finite and right at 20 lengths", "gpu_checks.attention:check", 90, 10, REAL
    ),
    Check(
        "cudnn-last",
        "attention again",
        "gpu_checks.attention:check",
        90,
        10,
        environment=CUDNN_LAST,
    ),
    Check(
        "trainer",
        "whole runs; save, kill, resume; LoRA",
        "gpu_checks.trainer:check",
        240,
        40,
        ALL,
        TRAINER,
    ),
    Check("ipc", "weights reach another process", "gpu_checks.ipc:check", 60, 15),
    Check(
        "generators",
        "weights reach ranks that only generate",
        "gpu_checks.generators:check",
        60,
        10,
        REAL,
    ),
    Check(
        "tensorrt-llm",
        "log-probs at two temperatures",
        "gpu_checks.engines:check_tensorrt_llm",
        300,
        60,
        needs=TRTLLM,
    ),
    Check(
        "vllm",
        "log-probs of both model runners",
        "gpu_checks.engines:check_vllm",
        420,
        90,
        needs=TRAINER,
    ),
    Check(
        "counts",
        "kernels and host syncs in budget",
        "gpu_checks.counts:check",
        120,
        15,
        (CUDA, FAKE),
    ),
    Check("memory", "peaks as planned", "gpu_checks.memory:check", 120, 15, (CUDA, FAKE)),
    Check(SPEED, "tokens/s and MFU beside transformers", "gpu_checks.speed:check", 240, 40, REAL),
    Check(
        "switches",
        "what changes kernels, on and off",
        "gpu_checks.switches:check",
        330,
        40,
        ALL,
        TRAINER,
    ),
)
# The first minute of a run says which versions and clocks everything after it depends on.
PRINTED_WHOLE = ("machine",)
COLOURS = {"PASS": "green", "FAIL": "red", "SKIP": "yellow"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [check.name for check in CHECKS]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", help="these checks, see --list"
    )
    parser.add_argument("--list", action="store_true", help="print the checks and end")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results/gpu_check", help="of the report: %(default)s"
    )
    parser.add_argument(
        "--minutes", type=float, default=10, help="of all checks together (%(default)s)"
    )
    parser.add_argument("--fake", action="store_true", help="on fake CUDA tensors")
    parser.add_argument("--device", choices=[CUDA, CPU], default=CUDA, help="%(default)s")
    add_options(parser)
    args = parser.parse_args()
    if not args.minutes > 0:
        parser.error(f"--minutes is {args.minutes:g}, expected above 0")
    options = given_options(args)
    if options and args.only is not None and SPEED not in args.only:
        parser.error(f"{', '.join(options)} are options of {SPEED}, which --only does not name")
    fault = fault_of(options_of(args.device, options))
    if fault is not None:
        parser.error(fault)
    return args


def chosen_checks(args: argparse.Namespace) -> list[Check]:
    """Return the checks of the command line, with the options that were given."""
    checks = [check for check in CHECKS if args.only is None or check.name in args.only]
    options = given_options(args)
    if not options:
        return checks
    with_options = []
    for check in checks:
        if check.name == SPEED:
            # Larger work than the check's own limit is for: it ends with the time of all.
            check = replace(check, options=options, seconds=60 * args.minutes, enough=check.seconds)
        with_options.append(check)
    return with_options


def why_not(mode: str) -> str | None:
    """Why nothing can be run here."""
    missing = [name for name in ("torch", "rich") if not is_installed(name)]
    if missing:
        return f"{sys.executable} has no {' and no '.join(missing)}; install what docs/gpu.md lists"
    if mode == FAKE:
        return why_no_fakes()
    # In a process of its own: a CUDA context here would take memory that the checks are to have.
    ask = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    if mode == CUDA and subprocess.run(ask, stderr=subprocess.DEVNULL, timeout=300).returncode:
        return "torch finds no GPU here; expected one, or --fake (fake CUDA tensors), or --device cpu (tiny shapes)"
    return None


def run_all(
    checks: list[Check],
    mode: str,
    out: Path,
    seconds: float,
    write_report: Callable[[list[Finding]], object],
) -> list[Finding]:
    """Run the checks in order within the time budget, with progress on the terminal.

    Args:
        checks: most valuable first.
        mode: CUDA, CPU or FAKE.
        out: folder of the report; each check gets a folder below it.
        seconds: budget of all checks together.
        write_report: called with the findings so far after each check, so that a run that is
            cut off has reported all that it saw.
    """
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    end = time.time() + seconds
    findings: list[Finding] = []
    for number, check in enumerate(checks, 1):
        left = end - time.time()
        with console.status(
            f"{number}/{len(checks)} {check.name}: {check.proves} ({left:.0f} s left)"
        ):
            finding = run(check, mode, out / check.name, left)
        findings.append(finding)
        write_report(findings)
        colour = COLOURS[finding.verdict]
        console.print(
            f"[{colour}]{finding.verdict}[/] {finding.name} {finding.seconds:.0f} s: ", end=""
        )
        console.print(finding.sentence, markup=False)
        if check.name in PRINTED_WHOLE:
            for name, value in finding.numbers.items():
                console.print(f"  {name}: {value}", markup=False)
        sys.stdout.flush()
    return findings


def main() -> int:
    args = arguments()
    checks = chosen_checks(args)
    if args.list:
        for check in checks:
            print(
                f"{check.name:12} {check.proves} ({', '.join(check.modes)}; at most {check.seconds:.0f} s)"
            )
        return 0
    mode = FAKE if args.fake else args.device
    reason = why_not(mode)
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    from gpu_checks.report import REPORT, verdict, write

    args.out.mkdir(parents=True, exist_ok=True)
    began = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    started = time.time()

    def write_report(findings: list[Finding]) -> Path:
        about = {
            "mode": mode,
            "began": began,
            "seconds": time.time() - started,
            "checks run": f"{len(findings)} of {len(checks)}",
        }
        return write(args.out, findings, about)

    findings = run_all(checks, mode, args.out, 60 * args.minutes, write_report)
    print(f"report: {args.out / REPORT}")
    skipped = [finding.name for finding in findings if finding.verdict == SKIP]
    if skipped:
        print(f"not run: {', '.join(skipped)}")
    print(f"gpu_check: {verdict(findings)}")
    return 0 if verdict(findings) == "PASS" else 1


if __name__ == "__main__":
    sys.exit(main())
