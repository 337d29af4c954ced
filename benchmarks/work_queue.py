"""Print how long a generation phase takes with the fixed split and with the work queue, on ranks of unequal speed.

torchrun --nproc-per-node 4 benchmarks/work_queue.py                   (half a minute; the generator sleeps)
torchrun --nproc-per-node 4 benchmarks/work_queue.py --slowness 1 1 1 1 --spread 1.5
torchrun --nproc-per-node 4 benchmarks/work_queue.py --engine fake     (TensorRT-LLM's fake of the tests, one a rank)

A micro-batch takes its own time, drawn from a log-normal distribution, times the slowness of the rank that takes it:
that many milliseconds as its prompt has tokens. "least" is the time in which all ranks would be done at once, if work
could be divided at will.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.rollout.work_queue import WorkQueue

SAMPLES = 4
TOKENS = 256
SECONDS_A_TOKEN = 0.001
LONGEST = 100_000  # tokens
Generate = Callable[[list[Prompt]], Completions]


@contextlib.contextmanager
def sleeping(slowness: float) -> Iterator[Generate]:
    """A generator that sleeps."""

    def generate(prompts: list[Prompt]) -> Completions:
        time.sleep(slowness * SECONDS_A_TOKEN * sum(len(prompt.tokens) for prompt in prompts))
        rows = SAMPLES * len(prompts)
        tokens = torch.zeros((rows, TOKENS), dtype=torch.long)
        return Completions(
            tokens, torch.full((rows,), TOKENS), ("length",) * rows, torch.zeros((rows, TOKENS))
        )

    yield generate


@contextlib.contextmanager
def engine(mesh: Mesh, slowness: float, folder: Path) -> Iterator[Generate]:
    """The adapter of TensorRT-LLM on the fake of the tests, which sleeps in a process of its own."""
    from helpers.engine_fake import install_fake

    from reinforce_rl.config.engines import EngineConfig, TensorRTLLMConfig
    from reinforce_rl.data.tokenizer import load_tokenizer
    from reinforce_rl.generation.base import SamplingParams
    from reinforce_rl.generation.engine.generator import EngineGenerator
    from reinforce_rl.generation.trtllm.adapter import TensorRTLLM
    from reinforce_rl.megatron.architecture import Architecture
    from reinforce_rl.megatron.model.model import CausalLM

    install_fake(folder / "engine", model="scripted", seconds_a_token=slowness * SECONDS_A_TOKEN)
    config = EngineConfig(
        max_batch_size=SAMPLES,
        max_num_tokens=LONGEST,
        weight_bucket_megabytes=1,
        start_timeout_seconds=300,
        update_timeout_seconds=300,
        request_timeout_seconds=300,
    )
    lm = CausalLM(Architecture.from_folder(folder / "model"), mesh, torch.float32)
    tokenizer = load_tokenizer(folder / "model")
    where = {"model": folder / "model", "log_folder": folder / "log"}
    generator = EngineGenerator(
        lm, tokenizer, TensorRTLLM(TensorRTLLMConfig()), config, max_seq_len=LONGEST, **where
    )
    params = SamplingParams(max_length=TOKENS, stop_token_ids=(2,))
    with contextlib.closing(generator), generator.awake():
        yield lambda prompts: generator.generate(prompts, SAMPLES, params, seed=1)


def phase(
    mesh: Mesh, share: list[list[Prompt]], generate: Generate, *, queue: bool
) -> list[tuple[float, int]]:
    """Seconds of the phase, exchange included, and micro-batches taken, of each rank."""
    mesh.barrier()
    started = time.perf_counter()
    work = WorkQueue(mesh, share, shared=queue)
    parts = [generate(list(prompts)) for prompts in work]
    work.close()
    mesh.raise_if_any(None)
    assert len(work.to_owners(parts)) == len(share)
    return mesh.gather_over_dp((time.perf_counter() - started, len(parts)))


def write_model(folder: Path) -> None:
    """For the engine; before torch.distributed begins, since transformers then writes on rank 0 only."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from helpers.models import tiny_llama_folder

    tiny_llama_folder(
        folder / "model", vocab_size=32, layers=1, hidden=16, ffn=32, max_positions=16
    )


def arguments() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--slowness", type=float, nargs="+", default=[3.0, 1.0, 1.0, 1.0], help="of each rank"
    )
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=[2, 4, 8, 16], help="of a rank's share"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="of a share, on a rank of slowness 1, on average"
    )
    parser.add_argument(
        "--spread",
        type=float,
        default=0.3,
        help="deviation of the logarithm of a micro-batch's time",
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--engine", choices=("sleep", "fake"), default="sleep")
    return parser.parse_args()


def main() -> None:
    options, table = (
        arguments(),
        Table("micro-batches a rank", "split", "seconds", "least", "taken by each rank"),
    )
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.engine == "fake":
            write_model(folder)
        mesh = stack.enter_context(parallel_mesh())
        slowness = options.slowness[mesh.dp_rank]
        make = engine(mesh, slowness, folder) if options.engine == "fake" else sleeping(slowness)
        generate = stack.enter_context(make)
        for count in options.micro_batches:
            draw = random.Random(count)
            seconds = [
                [
                    options.seconds / count * draw.lognormvariate(0, options.spread)
                    for _ in range(count)
                ]
                for _ in range(mesh.dp_size)
            ]
            share = [
                [Prompt(i, "a prompt", (0,) * round(value / SECONDS_A_TOKEN))]
                for i, value in enumerate(seconds[mesh.dp_rank], mesh.dp_rank * count)
            ]
            least = sum(map(sum, seconds)) / sum(1 / slowness for slowness in options.slowness)
            phases_of: dict[str, list[list[tuple[float, int]]]] = {"fixed": [], "queue": []}
            for _ in range(options.repeats):
                for name, phases in phases_of.items():
                    phases.append(phase(mesh, share, generate, queue=name == "queue"))
            for name, phases in phases_of.items():
                best = min(phases, key=lambda ranks: max(ranks)[0])
                taken = " ".join(str(number) for _, number in best)
                table.add_row(str(count), name, f"{max(best)[0]:.2f}", f"{least:.2f}", taken)
        if mesh.is_main:
            Console(width=100).print(table)


if __name__ == "__main__":
    main()
