"""Compare an engine's greedy responses and log-probs with the native engine's, before and after a weight update.

On one GPU, or on two that share the model:
    python examples/check_generation.py MODEL
    torchrun --nproc-per-node 2 examples/check_generation.py MODEL --tensor-parallel 2

The update scales all weights, so that an engine that kept the old ones shows. It ends with code 1 where the log-probs
of common tokens differ by more than the tolerance on average, or where the update changed nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reinforce_rl.errors import ReinforceError

if TYPE_CHECKING:
    from reinforce_rl.data.batches import Completions, Prompt
    from reinforce_rl.generation.base import Generator, SamplingParams

TEXTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "Once upon a time",
    "The three primary colours are",
    "To be or not to be",
    "In 1969, people first",
    "A good friend is someone who",
)
SCALE = 0.97


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--engine", choices=("tensorrt_llm", "native"), default="tensorrt_llm")
    parser.add_argument(
        "--prompts", type=Path, help='JSONL file with {"prompt": TEXT} lines (default: eight of its own)'
    )
    parser.add_argument("--max-length", type=int, default=64, help="response tokens (default: 64)")
    parser.add_argument("--precision", choices=("bf16", "32"), default="bf16")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share each matrix (default: 1)")
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="ranks that share the layers (default: 1)")
    parser.add_argument(
        "--memory-fraction", type=float, default=0.5, help="of free GPU memory, for the engine's cache"
    )
    parser.add_argument(
        "--bucket-megabytes", type=int, default=512, help="of the weights that are on their way at a time"
    )
    parser.add_argument("--log-folder", type=Path, default=Path("results/check_generation"))
    parser.add_argument("--tolerance", type=float, default=0.05, help="nats a token, on average (default: 0.05)")
    options = parser.parse_args(arguments)
    try:
        return check(options)
    except ReinforceError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def check(options: argparse.Namespace) -> int:
    import torch

    from reinforce_rl.data.batches import Prompt
    from reinforce_rl.data.tokenizer import load_tokenizer
    from reinforce_rl.generation.base import SamplingParams
    from reinforce_rl.generation.native.generator import NativeGenerator
    from reinforce_rl.megatron.architecture import Architecture
    from reinforce_rl.megatron.hf_weights import HFFolder, load_hf_weights
    from reinforce_rl.megatron.mesh import parallel_mesh
    from reinforce_rl.megatron.model.model import CausalLM
    from reinforce_rl.trainer.build import DTYPES, stop_token_ids

    with parallel_mesh(options.tensor_parallel, options.pipeline_parallel) as mesh:
        tokenizer = load_tokenizer(options.model)
        architecture = Architecture.from_folder(options.model)
        lm = CausalLM(architecture, mesh, getattr(torch, DTYPES[options.precision]))
        load_hf_weights(lm, HFFolder(options.model))
        texts = TEXTS if options.prompts is None else _texts_of(options.prompts)
        prompts = [Prompt(i, text, tuple(tokenizer(text)["input_ids"])) for i, text in enumerate(texts)]
        stop_ids = stop_token_ids(architecture, tokenizer)
        params = SamplingParams(max_length=options.max_length, use_greedy=True, stop_token_ids=stop_ids)
        native = NativeGenerator(lm, tokenizer)
        engine: Generator = native
        if options.engine == "tensorrt_llm":
            from reinforce_rl.config.actor import TensorRTLLMConfig
            from reinforce_rl.generation.trtllm.generator import TensorRTLLMGenerator

            length = max(len(prompt.tokens) for prompt in prompts) + options.max_length
            config = TensorRTLLMConfig(
                max_batch_size=len(prompts),
                max_num_tokens=max(8192, length),
                free_gpu_memory_fraction=options.memory_fraction,
                weight_bucket_megabytes=options.bucket_megabytes,
                start_timeout_seconds=900,
                update_timeout_seconds=300,
                request_timeout_seconds=600,
            )
            engine = TensorRTLLMGenerator(
                lm, tokenizer, config, model=options.model, max_seq_len=length, log_folder=options.log_folder
            )
        try:
            before = native.generate(prompts, 1, params, seed=0)
            found = [compare(native, engine, prompts, params)]
            with torch.no_grad():
                for parameter in lm.parameters():
                    parameter.mul_(SCALE)
            after = native.generate(prompts, 1, params, seed=0)
            # The second waking; the first one's time is mostly the engine's start.
            found.append(compare(native, engine, prompts, params))
        finally:
            engine.close()
        assert before.log_probs is not None and after.log_probs is not None
        changed = before.log_probs.shape != after.log_probs.shape or not torch.equal(before.log_probs, after.log_probs)
        if mesh.is_main:
            print(f"native and {options.engine}, before the update: {found[0]}")
            print(f"native and {options.engine}, after it:          {found[1]}")
            if not changed:
                print("the update changed nothing of the native engine's responses, so this shows nothing")
        agree = all(one.mean_gap <= options.tolerance for one in found)
        return 0 if agree and changed else 1


@dataclass(frozen=True)
class Comparison:
    """Differences between two generators on the same prompts."""

    responses: int
    equal_responses: int  # equal token by token
    tokens: int  # of the first generator
    common_tokens: int  # before the first difference
    mean_gap: float  # absolute log-prob difference of common tokens, nats; NaN if a generator reports none
    largest_gap: float  # same
    seconds: tuple[float, float]  # per generator

    def __str__(self) -> str:
        return (
            f"{self.equal_responses} of {self.responses} responses equal, {self.common_tokens} of {self.tokens} "
            f"tokens before a difference; log-probs there differ by {self.mean_gap:.2g} on average, "
            f"{self.largest_gap:.2g} at most; {self.seconds[0]:.2f} s and {self.seconds[1]:.2f} s"
        )


def compare(first: Generator, second: Generator, prompts: Sequence[Prompt], params: SamplingParams) -> Comparison:
    """Generate one response per prompt with both and compare; waking them counts towards their time.

    `params` should be greedy, otherwise the noise makes them differ.
    """
    import torch

    (left, left_seconds), (right, right_seconds) = (_timed(one, prompts, params) for one in (first, second))
    common = [_common(left, right, row) for row in range(len(prompts))]
    equal = sum(count == int(left.lengths[row]) == int(right.lengths[row]) for row, count in enumerate(common))
    mean = largest = float("nan")
    if left.log_probs is not None and right.log_probs is not None:
        pairs = zip(left.log_probs, right.log_probs, common, strict=True)
        gaps = torch.cat([(one[:count] - other[:count]).abs() for one, other, count in pairs])
        mean, largest = (float(gaps.mean()), float(gaps.max())) if len(gaps) else (0.0, 0.0)
    return Comparison(
        responses=len(prompts),
        equal_responses=equal,
        tokens=int(left.lengths.sum()),
        common_tokens=sum(common),
        mean_gap=mean,
        largest_gap=largest,
        seconds=(left_seconds, right_seconds),
    )


def _timed(generator: Generator, prompts: Sequence[Prompt], params: SamplingParams) -> tuple[Completions, float]:
    start = time.perf_counter()
    with generator.awake():
        found = generator.generate(prompts, 1, params, seed=0)
    return found, time.perf_counter() - start


def _common(left: Completions, right: Completions, row: int) -> int:
    count = min(int(left.lengths[row]), int(right.lengths[row]))
    differs = (left.tokens[row, :count] != right.tokens[row, :count]).nonzero()
    return int(differs[0]) if len(differs) else count


def _texts_of(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines if line.strip()]


if __name__ == "__main__":
    sys.exit(main())
