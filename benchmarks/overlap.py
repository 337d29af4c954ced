"""Print what generation on separate ranks hides: a step's time with colocated ranks, and apart.

python benchmarks/overlap.py                          (five minutes; both phases sleep)
python benchmarks/overlap.py --generate 2 --train 1   (seconds)

Runs the trainer of the tests' tiny model with one trainer and one generator; both sleep, so two
cores are enough. "floor" is the time of the steps if the shorter phase were hidden entirely.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.slow_generation import generating  # noqa: E402
from helpers.tiny_run import metrics_of  # noqa: E402
from helpers.trainer_processes import TrainerProcesses  # noqa: E402

FINISHED = "rollout_order=finished"
APART = ["placement=disaggregated", "generation_ranks=1"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--generate", type=float, default=2.0, help="seconds that a step's generation sleeps"
    )
    parser.add_argument("--train", type=float, default=2.0, help="seconds that an update sleeps")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    settings = [f"trainer.reinforce.max_steps={args.steps}", "trainer.reinforce.max_epochs=10"]
    settings += ["trainer.reinforce.save_interval=0", "model.reinforce.rollout_micro_batch_size=4"]
    floor = max(args.generate, args.train)
    table = Table(
        "placement",
        "k",
        "step, s",
        "of the sum",
        "above the floor",
        "waits for rollouts, s",
        "sends weights, s",
    )
    processes = TrainerProcesses()
    try:
        for name, ranks, overrides in [
            ("colocated", 1, []),
            *((f"apart, k = {k}", 2, [*APART, f"max_staleness={k}"]) for k in (0, 1, 2)),
            *(
                (f"finished first, k = {k}", 2, [*APART, FINISHED, f"max_staleness={k}"])
                for k in (1, 2)
            ),
        ]:
            with tempfile.TemporaryDirectory() as folder:
                options = {"step_seconds": args.train, "patches": [generating(args.generate)]}
                processes.start(Path(folder), *settings, *overrides, ranks=ranks, **options)
                if processes.wait() != 0:
                    sys.exit((Path(folder) / "log").read_text(encoding="utf-8"))
                # The first steps fill the queue, the last ones have nothing left to generate beside
                # them.
                lines = metrics_of(Path(folder))[4:-3]
            step, waits, sends = (
                statistics.median(line.get(f"timers/{phase}", 0.0) for line in lines)
                for phase in ("step_time", "generate", "send_weights")
            )
            place, _, k = name.partition(", k = ")
            shares = f"{step / (args.generate + args.train):.2f}", f"{step / floor - 1:+.0%}"
            table.add_row(place, k, f"{step:.2f}", *shares, f"{waits:.2f}", f"{sends:.3f}")
    finally:
        processes.close()
    Console(width=119).print(table)


if __name__ == "__main__":
    main()
