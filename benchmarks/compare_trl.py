"""Compare one RLOO step of this project's trainer with one of TRL's RLOOTrainer.

make bench                                   (SmolLM2-135M, fp32; about 10 minutes on 2 cores)
make bench BENCH_ARGS="--prompt-tokens 256 --group 8"
python benchmarks/compare_trl.py --short     (a tiny random model, one pair, to see that it works)

TRL gets its own environment, .venv-peers. The sides take turns on the same machine, each in its own
process, with the same model, prompts, samples a prompt, response tokens, beta, threads and reward
function. The number of sequences in a pass is each side's setting: all of them for TRL unless
--batch is given, and the shipped size here. The first step of a process does not count, since it
allocates the optimizer's moments. The script checks that both sides did the same work, and prints
no table if they did not. The last line of the output is `speedup: N.NNx memory: N.NN`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

from rloo_step.comparison import Comparison, NotTheSame, Pair, check_same, compare  # noqa: E402
from rloo_step.inputs import make_prompts  # noqa: E402
from rloo_step.processes import OURS, PEER, SideFailed, run_side  # noqa: E402
from rloo_step.workload import Workload  # noqa: E402

from reinforce_rl.errors import ReinforceError  # noqa: E402

WARM_UP_STEPS = 1
ENVIRONMENT_SECONDS = 1200
COUNTS = ("prompts", "group", "prompt_tokens", "response_tokens", "pairs", "steps", "threads")
SHORT = {
    "pairs": 1,
    "prompts": 2,
    "group": 2,
    "prompt_tokens": 8,
    "response_tokens": 6,
    "threads": 1,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="Hugging Face folder; default: SmolLM2-135M-Instruct, made if missing",
    )
    parser.add_argument("--prompts", type=int, default=4, help="a step (%(default)s)")
    parser.add_argument("--group", type=int, default=4, help="samples a prompt, G (%(default)s)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=64, help="of each prompt (%(default)s)"
    )
    parser.add_argument(
        "--response-tokens", type=int, default=48, help="of each response (%(default)s)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        help="sequences in one of TRL's log-prob and training passes; default: all",
    )
    parser.add_argument(
        "--own-batch", type=int, help="in one of this project's; default: the shipped size"
    )
    parser.add_argument(
        "--beta", type=float, default=0.05, help="of the KL (%(default)s); 0: no reference policy"
    )
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first pair; each pair has its own (%(default)s)"
    )
    parser.add_argument(
        "--pairs", type=int, default=5, help="of runs, one of each side (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=1, help="of a run that count (%(default)s)")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="of each side (%(default)s)",
    )
    parser.add_argument(
        "--deadline", type=float, default=1800, help="seconds that one run may take (%(default)s)"
    )
    parser.add_argument(
        "--environment", type=Path, default=ROOT / ".venv-peers", help="TRL's, made if missing"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results/bench/compare_trl.json"), help="%(default)s"
    )
    parser.add_argument(
        "--short", action="store_true", help="a tiny random model, one pair of small steps"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides of this project's side"
    )
    parser_defaults = SHORT if "--short" in sys.argv[1:] else {}
    parser.set_defaults(**parser_defaults)
    return parser.parse_args()


def peers_python(folder: Path) -> Path:
    """The Python of TRL's environment; makes the environment if it is missing."""
    command = [sys.executable, ROOT / "tools/make_environment.py", "peers", folder]
    subprocess.run(command, check=True, timeout=ENVIRONMENT_SECONDS)
    return folder / "bin" / "python"


def model_folder(model: Path | None, short: bool, scratch: Path) -> Path:
    if model is not None:
        return model.absolute()
    if short:
        sys.path.insert(0, str(ROOT / "tests"))
        from helpers.models import tiny_llama_folder

        return tiny_llama_folder(scratch / "model", vocab_size=128)
    from reinforce_rl.launch.smollm2 import DEFAULT_FOLDER, prepare_smollm2

    return prepare_smollm2(ROOT / DEFAULT_FOLDER)


def workload_of(args: argparse.Namespace, model: Path) -> Workload:
    """The workload of the first pair."""
    from reinforce_rl.data.tokenizer import load_tokenizer

    steps = WARM_UP_STEPS + args.steps
    tokenizer = load_tokenizer(model)
    return Workload(
        model=str(model),
        prompts=make_prompts(tokenizer, steps, args.prompts, args.prompt_tokens),
        warm_up_steps=WARM_UP_STEPS,
        group=args.group,
        prompt_tokens=args.prompt_tokens,
        response_tokens=args.response_tokens,
        beta=args.beta,
        lr=args.lr,
        seed=args.seed,
        threads=args.threads,
        batch=args.batch or args.prompts * args.group,
        own_batch=args.own_batch,
        overrides=args.overrides,
    )


def run_pairs(
    workload: Workload, pairs: int, python: Path, seconds: float, console: Console
) -> list[Pair]:
    """Run the sides in turns; the side that begins alternates too."""
    measured = []
    for number in range(pairs):
        seeded = replace(workload, seed=workload.seed + number)
        reports = {}
        sides = {OURS: Path(sys.executable), PEER: python}
        order = list(sides)
        if number % 2:
            order.reverse()
        for module in order:
            report = run_side(sides[module], module, seeded, seconds)
            reports[module] = report
            step = report.steps[-1].seconds
            load, _, _ = os.getloadavg()
            progress = f"pair {number + 1} of {pairs}: {report.side}, {step:.2f} s a step"
            console.print(f"{progress}, load {load:.1f}", highlight=False)
        pair = Pair(reports[OURS], reports[PEER])
        check_same(seeded, pair)
        measured.append(pair)
    return measured


def cpu_model() -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("model name"):
            _, _, name = line.partition(":")
            return name.strip()
    return platform.machine()


def machine() -> dict[str, object]:
    """The parts of the machine's state that the numbers depend on."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "time": now.isoformat(timespec="seconds"),
    }


def title_of(workload: Workload, pair: Pair) -> str:
    name = Path(workload.model).name
    prompts = len(workload.prompts[0])
    own_batch = workload.own_batch or "as shipped"
    parts = [
        f"{name}, {pair.ours.dtype}: {prompts} prompts x {workload.group}",
        f"{workload.prompt_tokens} + {workload.response_tokens} tokens",
        f"{own_batch} and {workload.batch} in a pass",
        f"beta {workload.beta:g}",
        f"{workload.threads} threads",
    ]
    return ", ".join(parts)


def show(comparison: Comparison, pair: Pair, workload: Workload, console: Console) -> None:
    table = Table(title=title_of(workload, pair))
    table.add_column("median seconds of a step")
    for name in (pair.ours.side, pair.peer.side, "ratio"):
        table.add_column(name, justify="right")
    for row in comparison.rows:
        if row is comparison.rows[-1]:
            table.add_section()
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}x"
        table.add_row(row.name, f"{row.ours:.3f}", f"{row.peer:.3f}", ratio)
    table.add_section()
    ours = f"{comparison.ours_bytes / 1e9:.2f}"
    peer = f"{comparison.peer_bytes / 1e9:.2f}"
    table.add_row("peak resident memory, GB", ours, peer, f"{comparison.memory:.2f}")
    console.print(table)
    speedups = " ".join(f"{ratio:.2f}" for ratio in comparison.pair_speedups)
    console.print(f"speedup of each pair: {speedups}", highlight=False)


def fault_of(args: argparse.Namespace) -> str:
    """The sentence about options that cannot be run; empty if all can."""
    too_small = []
    for name in COUNTS:
        value = getattr(args, name)
        if value < 1:
            option = name.replace("_", "-")
            too_small.append(f"--{option} is {value}")
    if too_small:
        return f"{', '.join(too_small)}; expected at least 1"
    if args.batch and args.prompts * args.group % args.batch:
        return f"--batch {args.batch} does not divide {args.prompts} x {args.group} sequences"
    return ""


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a side is ended too
    args = arguments()
    fault = fault_of(args)
    if fault:
        print(fault, file=sys.stderr)
        return 2
    console = Console(width=119)
    progress = Console(stderr=True)
    before = machine()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            python = peers_python(args.environment)
            model = model_folder(args.model, args.short, Path(scratch))
            workload = workload_of(args, model)
            pairs = run_pairs(workload, args.pairs, python, args.deadline, progress)
    except (NotTheSame, SideFailed, ReinforceError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    comparison = compare(pairs, workload.warm_up_steps)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "machine": {"before": before, "after": machine()},
        "workload": asdict(workload),
        "comparison": {
            **asdict(comparison),
            "speedup": comparison.speedup,
            "memory": comparison.memory,
        },
        "pairs": [asdict(pair) for pair in pairs],
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(comparison, pairs[0], workload, console)
    load = before["load"][0]  # type: ignore[index]
    sentence = f"{before['cpu']}, {before['cores']} cores; load {load:.1f} before"
    console.print(sentence, highlight=False)
    console.print(f"everything: {args.out}", highlight=False)
    print(f"speedup: {comparison.speedup:.2f}x memory: {comparison.memory:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
