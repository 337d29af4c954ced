"""One RLOO step of this project's trainer against one of TRL's RLOOTrainer, on the same machine in the same run.

make bench                                                  (SmolLM2-135M, fp32; about 10 minutes on 2 cores)
make bench BENCH_ARGS="--prompt-tokens 256 --group 8"
python benchmarks/compare_trl.py --short                    (a tiny random model, one pair: does it work at all?)

TRL gets an environment of its own, .venv-peers. The sides take turns, each in a process of its own: the same model,
prompts, samples a prompt, response tokens, beta, threads and reward function. Sequences in a pass are each side's own
setting: all for TRL, unless told, and what is shipped here. The first step of a process does not count: the
optimizer's moments are made in it. That both did the same is checked; if not, there is no table. The last line of the
output is `speedup: N.NNx memory: N.NN`.
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
    """The Python of TRL's environment, which is made where it is missing."""
    command = [sys.executable, ROOT / "tools/make_environment.py", "peers", folder]
    subprocess.run(command, check=True, timeout=ENVIRONMENT_SECONDS)
    return folder / "bin" / "python"


def model_folder(model: Path | None, short: bool, scratch: Path) -> Path:
    """The model that was asked for."""
    if model is not None:
        return model.absolute()
    if short:
        sys.path.insert(0, str(ROOT / "tests"))
        from helpers.models import tiny_llama_folder

        return tiny_llama_folder(scratch / "model", vocab_size=128)
    from reinforce_rl.launch.smollm2 import DEFAULT_FOLDER, prepare_smollm2

    return prepare_smollm2(ROOT / DEFAULT_FOLDER)


def workload_of(args: argparse.Namespace, model: Path) -> Workload:
    """Of the first pair."""
    from reinforce_rl.data.tokenizer import load_tokenizer

    steps = WARM_UP_STEPS + args.steps
    return Workload(
        model=str(model),
        prompts=make_prompts(load_tokenizer(model), steps, args.prompts, args.prompt_tokens),
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
    """The sides in turns; who begins alternates too."""
    measured = []
    for number in range(pairs):
        seeded = replace(workload, seed=workload.seed + number)
        reports = {}
        sides = {OURS: Path(sys.executable), PEER: python}
        for module in sides if number % 2 == 0 else reversed(sides):
            reports[module] = run_side(sides[module], module, seeded, seconds)
            step = reports[module].steps[-1].seconds
            progress = f"pair {number + 1} of {pairs}: {reports[module].side}, {step:.2f} s a step"
            console.print(f"{progress}, load {os.getloadavg()[0]:.1f}", highlight=False)
        pair = Pair(reports[OURS], reports[PEER])
        check_same(seeded, pair)
        measured.append(pair)
    return measured


def machine() -> dict[str, object]:
    """What the numbers depend on."""
    model = next(
        (
            line
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    return {
        "cpu": model.partition(":")[2].strip() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def show(comparison: Comparison, pair: Pair, workload: Workload, console: Console) -> None:
    shape = f"{len(workload.prompts[0])} prompts x {workload.group}, {workload.prompt_tokens} + "
    batches = f"{workload.own_batch or 'as shipped'} and {workload.batch}"
    shape += f"{workload.response_tokens} tokens, {batches} in a pass, beta {workload.beta:g}"
    table = Table(
        title=f"{Path(workload.model).name}, {pair.ours.dtype}: {shape}, {workload.threads} threads"
    )
    table.add_column("median seconds of a step")
    for name in (pair.ours.side, pair.peer.side, "ratio"):
        table.add_column(name, justify="right")
    for row in comparison.rows:
        if row is comparison.rows[-1]:
            table.add_section()
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}x"
        table.add_row(row.name, f"{row.ours:.3f}", f"{row.peer:.3f}", ratio)
    table.add_section()
    gigabytes = (f"{count / 1e9:.2f}" for count in (comparison.ours_bytes, comparison.peer_bytes))
    table.add_row("peak resident memory, GB", *gigabytes, f"{comparison.memory:.2f}")
    console.print(table)
    console.print(
        "speedup of each pair: " + " ".join(f"{ratio:.2f}" for ratio in comparison.pair_speedups),
        highlight=False,
    )


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a side is ended too
    args = arguments()
    counts = ("prompts", "group", "prompt_tokens", "response_tokens", "pairs", "steps", "threads")
    if wrong := [
        f"--{name.replace('_', '-')} is {vars(args)[name]}"
        for name in counts
        if vars(args)[name] < 1
    ]:
        print(f"{', '.join(wrong)}; expected at least 1", file=sys.stderr)
        return 2
    if args.batch and args.prompts * args.group % args.batch:
        print(
            f"--batch {args.batch} does not divide {args.prompts} x {args.group} sequences",
            file=sys.stderr,
        )
        return 2
    console = Console(width=119)
    progress = Console(stderr=True)
    before = machine()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            python = peers_python(args.environment)
            workload = workload_of(args, model_folder(args.model, args.short, Path(scratch)))
            pairs = run_pairs(workload, args.pairs, python, args.deadline, progress)
    except (NotTheSame, SideFailed, ReinforceError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    comparison = compare(pairs, workload.warm_up_steps)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    written = {
        "machine": {"before": before, "after": machine()},
        "workload": asdict(workload),
        "comparison": {
            **asdict(comparison),
            "speedup": comparison.speedup,
            "memory": comparison.memory,
        },
        "pairs": [asdict(pair) for pair in pairs],
    }
    args.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    show(comparison, pairs[0], workload, console)
    load = before["load"][0]  # type: ignore[index]
    sentence = f"{before['cpu']}, {before['cores']} cores; load {load:.1f} before"
    console.print(sentence, highlight=False)
    console.print(f"everything: {args.out}", highlight=False)
    print(f"speedup: {comparison.speedup:.2f}x memory: {comparison.memory:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
