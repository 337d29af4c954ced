"""Print how long a generation phase takes with the fixed split and with the work queue, on ranks of unequal speed.

torchrun --nproc-per-node 4 benchmarks/work_queue.py                   (half a minute; the generator sleeps)
torchrun --nproc-per-node 4 benchmarks/work_queue.py --slowness 1 1 1 1 --spread 1.5

A micro-batch takes its own time, drawn from a log-normal distribution, times the slowness of the rank that takes it.
"least" is the time in which all ranks would be done at once, if work could be divided at will.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from reinforce_rl.algorithms.work_queue import FixedSplit, WorkQueue
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.rollout import Completions, Prompt

SAMPLES, TOKENS = 4, 256


def phase(mesh: Mesh, share: list[list[Prompt]], slowness: list[float], *, queue: bool) -> list[tuple[float, int]]:
    """Seconds of the phase, exchange included, and micro-batches taken, of each rank."""
    mesh.barrier()
    started = time.perf_counter()
    work = WorkQueue(mesh, share) if queue else FixedSplit(share)
    parts = []
    for prompts in work:
        time.sleep(slowness[mesh.dp_rank] * sum(prompt.metadata["seconds"] for prompt in prompts))
        rows = SAMPLES * len(prompts)
        tokens = torch.zeros((rows, TOKENS), dtype=torch.long)
        parts.append(Completions(tokens, torch.full((rows,), TOKENS), ("length",) * rows, torch.zeros((rows, TOKENS))))
    work.close()
    mesh.check_together(None)
    assert len(work.to_owners(parts)) == len(share)
    return mesh.gather_over_dp((time.perf_counter() - started, len(parts)))


def arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slowness", type=float, nargs="+", default=[3.0, 1.0, 1.0, 1.0], help="of each rank")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4, 8, 16], help="of a rank's share")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a share, on a rank of slowness 1, on average")
    parser.add_argument("--spread", type=float, default=0.3, help="deviation of the logarithm of a micro-batch's time")
    parser.add_argument("--repeats", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    options, table = arguments(), Table("micro-batches a rank", "split", "seconds", "least", "taken by each rank")
    with parallel_mesh() as mesh:
        for count in options.micro_batches:
            draw = random.Random(count)
            seconds = [
                [options.seconds / count * draw.lognormvariate(0, options.spread) for _ in range(count)]
                for _ in range(mesh.dp_size)
            ]
            share = [
                [Prompt(i, "a prompt", tuple(range(64)), {"seconds": value})]
                for i, value in enumerate(seconds[mesh.dp_rank], mesh.dp_rank * count)
            ]
            least = sum(map(sum, seconds)) / sum(1 / slowness for slowness in options.slowness)
            for name in ("fixed", "queue"):
                found = [phase(mesh, share, options.slowness, queue=name == "queue") for _ in range(options.repeats)]
                best = min(found, key=lambda ranks: max(ranks)[0])
                taken = " ".join(str(number) for _, number in best)
                table.add_row(str(count), name, f"{max(best)[0]:.2f}", f"{least:.2f}", taken)
        if mesh.is_main:
            Console(width=100).print(table)


if __name__ == "__main__":
    main()
