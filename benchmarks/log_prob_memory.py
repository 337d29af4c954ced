"""Print memory and time of log-probs, forward and backward: chunked head against whole logits.

python benchmarks/log_prob_memory.py        (a few minutes; 5 GB of memory)
python benchmarks/log_prob_memory.py --vocab 49152 --hidden 576 --tokens 256 --chunks 256

The second command shows what the entropy costs. Memory is the peak growth of the process over its
size with the inputs; every row is a separate process. Times are the best of `--repeats`, and the
rows take turns, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import psutil
import torch
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Case:
    """One row. `chunk_tokens` None is the plain way: log_softmax of whole logits, by autograd."""

    vocab: int
    hidden: int
    tokens: int
    chunk_tokens: int | None
    entropy: str  # "no", "value" or "gradient"


@dataclass(frozen=True)
class Result:
    """Of a forward and backward pass; memory is the peak in bytes, less the inputs."""

    memory: int
    wall_seconds: float
    cpu_seconds: float


def run_once(case: Case) -> Result:
    from reinforce_rl.megatron.mesh import parallel_mesh
    from reinforce_rl.megatron.model.log_probs import chunked_log_probs
    from reinforce_rl.megatron.model.model import VocabShard

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(case.tokens, case.hidden, generator=generator).requires_grad_()
    # In place: a second copy here would hide as much of the peak below.
    weight = (
        torch.randn(case.vocab, case.hidden, generator=generator)
        .div_(case.hidden**0.5)
        .requires_grad_()
    )
    targets = torch.randint(0, case.vocab, (case.tokens,), generator=generator)
    with_entropy = case.entropy != "no"
    with parallel_mesh() as mesh:
        before = psutil.Process().memory_info().rss
        wall = time.perf_counter()
        cpu = time.process_time()
        if case.chunk_tokens is None:
            table = torch.log_softmax(hidden @ weight.t(), dim=-1)
            log_probs = table.gather(1, targets[:, None])[:, 0]
            entropy = -(table.exp() * table).sum(dim=-1) if with_entropy else None
        else:
            shard = VocabShard(0, case.vocab, mesh.tp_group)
            log_probs, entropy = chunked_log_probs(
                hidden,
                weight,
                targets,
                shard,
                temperature=1.0,
                chunk_tokens=case.chunk_tokens,
                with_entropy=with_entropy,
            )
        loss = log_probs.sum()
        if entropy is not None and case.entropy == "gradient":
            loss = loss + 0.01 * entropy.sum()
        loss.backward()
        wall = time.perf_counter() - wall
        cpu = time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Result(peak - before, wall, cpu)


def run_in_new_process(case: Case) -> Result:
    command = [sys.executable, "-W", "ignore", __file__, "--case", json.dumps(asdict(case))]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
        encoding="utf-8",
        errors="replace",
    )
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=128 * 1024)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", help="used by the script itself: one row, as JSON")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(asdict(run_once(Case(**json.loads(args.case))))))
        return

    cases = [
        Case(args.vocab, args.hidden, args.tokens, chunk, entropy)
        for entropy in ("no", "value", "gradient")
        for chunk in (None, *args.chunks)
    ]
    rounds = [[run_in_new_process(case) for case in cases] for _ in range(args.repeats)]
    best = [
        Result(
            max(result.memory for result in results),
            min(result.wall_seconds for result in results),
            min(result.cpu_seconds for result in results),
        )
        for results in zip(*rounds, strict=True)
    ]
    table = Table(
        title=f"{args.tokens} tokens, vocabulary {args.vocab}, hidden {args.hidden}, float32"
    )
    for column in ("logits", "entropy", "peak memory, MB", "CPU seconds", "ratio", "wall seconds"):
        table.add_column(column, justify="left" if column in ("logits", "entropy") else "right")
    for case, result in zip(cases, best, strict=True):
        name = "whole" if case.chunk_tokens is None else f"{case.chunk_tokens} at a time"
        ratio = f"{result.cpu_seconds / best[0].cpu_seconds:.2f}"
        numbers = (
            f"{result.memory / 1e6:.0f}",
            f"{result.cpu_seconds:.2f}",
            ratio,
            f"{result.wall_seconds:.2f}",
        )
        table.add_row(name, case.entropy, *numbers)
    Console().print(table)


if __name__ == "__main__":
    main()
