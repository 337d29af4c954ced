"""Compare an engine's greedy responses and log-probs with the native engine's.

A weight update lies between two comparisons.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

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


def check_engine(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder")],
    engine: Literal["vllm", "tensorrt_llm", "native"] = "vllm",
    engine_python: Annotated[
        Path | None, typer.Option(help="of the engine's own environment")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='JSONL of {"prompt": TEXT} (default: eight texts)')
    ] = None,
    max_length: Annotated[int, typer.Option(help="response tokens")] = 64,
    precision: Literal["bf16", "32"] = "bf16",
    tensor_parallel: Annotated[int, typer.Option(help="ranks that share each matrix")] = 1,
    pipeline_parallel: Annotated[int, typer.Option(help="ranks that share the layers")] = 1,
    memory_fraction: Annotated[
        float,
        typer.Option(
            help="share for vLLM, of GPU memory; for TensorRT-LLM's cache, of free memory"
        ),
    ] = 0.5,
    bucket_megabytes: Annotated[
        int, typer.Option(help="size of a bucket of weights in transfer")
    ] = 512,
    log_folder: Path = Path("results/check_engine"),
    tolerance: Annotated[float, typer.Option(help="nats a token, on average")] = 0.05,
    layers: Annotated[
        bool, typer.Option("--layers", help="compare each layer even where log-probs agree")
    ] = False,
) -> None:
    """Compare an engine's greedy responses and log-probs with the native engine's, before and after
    a weight update.

    On one GPU, or with `torchrun --nproc-per-node 2 -m reinforce_rl check engine MODEL
    --tensor-parallel 2` on two that share the model.

    The update scales all weights, so that an engine that kept the old ones shows. It ends with code
    1 where the log-probs of common tokens differ by more than the tolerance on average, or where
    the update changed nothing. Where they differ, a table names the first layer that does, if the
    engine shows its layers.
    """
    import torch

    from reinforce_rl.data.batches import Prompt
    from reinforce_rl.data.tokenizer import load_tokenizer
    from reinforce_rl.evaluation.model import LENGTH, inference_config, load_actor, model_folder
    from reinforce_rl.generation.native.generator import NativeGenerator
    from reinforce_rl.megatron.model.layer_outputs import ROUNDING, layer_outputs, layer_table
    from reinforce_rl.policy.build import configured_mesh

    texts: Sequence[str] = TEXTS
    if prompts is not None:
        lines = prompts.read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    tokenizer = load_tokenizer(model_folder(model))
    asked = [Prompt(i, text, tuple(tokenizer(text)["input_ids"])) for i, text in enumerate(texts)]
    values = {
        "generation": engine,
        "trainer.precision": precision,
        "trainer.devices": tensor_parallel * pipeline_parallel,
        "model.tensor_model_parallel_size": tensor_parallel,
        "model.pipeline_model_parallel_size": pipeline_parallel,
        "model.reinforce.length_params.max_length": max_length,
        "tensorrt_llm.free_gpu_memory_fraction": memory_fraction,
        "vllm.gpu_memory_utilization": memory_fraction,
        "engine.python": "null" if engine_python is None else engine_python,
        "engine.weight_bucket_megabytes": bucket_megabytes,
        "engine.max_batch_size": len(asked),
        LENGTH: max(len(prompt.tokens) for prompt in asked) + max_length,
        # Long limits: no option raises them, and the first start of an engine may compile.
        "engine.start_timeout_seconds": 900,
        "engine.update_timeout_seconds": 300,
        "engine.request_timeout_seconds": 600,
        "trainer.collective_timeout_seconds": 3600,
    }
    cfg = inference_config(
        model, [f"{key}={value}" for key, value in values.items()], folder=log_folder
    )
    with configured_mesh(cfg) as mesh:
        actor = load_actor(cfg, mesh)
        # The plain decoder, even on a GPU.
        native = NativeGenerator(actor.lm, actor.tokenizer, is_static=False)
        params = replace(actor.sampling, use_greedy=True)
        comparisons = []
        log_probs = []
        with contextlib.closing(actor.generator) as other:
            for scale in (1.0, SCALE):
                with torch.no_grad():
                    for parameter in actor.lm.parameters():
                        parameter.mul_(scale)
                log_probs.append(native.generate(asked, 1, params, seed=0).log_probs)
                # Before the update, most of the engine's time is its start.
                comparison = compare(native, other, asked, params)
                comparisons.append(comparison)
                outputs = getattr(other, "layer_outputs", None)
                if outputs is not None and (layers or not comparison.mean_gap <= tolerance):
                    with other.awake():
                        both = layer_outputs(actor.lm, comparison.worst), outputs(comparison.worst)
                    if mesh.is_main:
                        hidden = (
                            "the engine shows no layers; vLLM does with vllm.enforce_eager=true"
                        )
                        print(layer_table(*both, ROUNDING[precision]) if both[1] else hidden)
        changed = not torch.equal(*log_probs)
        if mesh.is_main:
            print(f"native and {engine}, before the update: {comparisons[0]}")
            print(f"native and {engine}, after it:          {comparisons[1]}")
            if not changed:
                print(
                    "the update changed nothing of the native engine's responses, so this shows "
                    "nothing"
                )
    if not (changed and all(comparison.mean_gap <= tolerance for comparison in comparisons)):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Comparison:
    responses: int
    equal_responses: int  # equal token by token
    tokens: int  # of the first generator
    common_tokens: int  # before the first difference
    # absolute log-prob difference of common tokens, nats; NaN if a generator reports none
    mean_gap: float
    largest_gap: float  # as mean_gap
    # tokens of the prompt with the largest gap, and of its response before the first difference
    worst: tuple[int, ...]
    seconds: tuple[float, ...] = ()  # per generator

    def __str__(self) -> str:
        return (
            f"{self.equal_responses} of {self.responses} responses equal, {self.common_tokens} of "
            f"{self.tokens} tokens before a difference; log-probs there differ by "
            f"{self.mean_gap:.2g} on average, {self.largest_gap:.2g} at most; "
            f"{self.seconds[0]:.2f} s and {self.seconds[1]:.2f} s"
        )


def compare(
    first: Generator, second: Generator, prompts: Sequence[Prompt], params: SamplingParams
) -> Comparison:
    """Generate one response per prompt with both generators, and compare.

    `Comparison.seconds` includes waking up. `params` should be greedy, because noise makes
    responses differ.
    """
    completions = []
    seconds = []
    for generator in (first, second):
        start = time.perf_counter()
        with generator.awake():
            completions.append(generator.generate(prompts, 1, params, seed=0))
        seconds.append(time.perf_counter() - start)
    return replace(
        compare_responses(completions[0], completions[1], prompts), seconds=tuple(seconds)
    )


def compare_responses(
    left: Completions, right: Completions, prompts: Sequence[Prompt]
) -> Comparison:
    """Compare the responses of two generators, one per prompt."""
    import torch

    common = []
    for row in range(len(prompts)):
        count = min(int(left.lengths[row]), int(right.lengths[row]))
        differs = (left.tokens[row, :count] != right.tokens[row, :count]).nonzero()
        common.append(int(differs[0]) if len(differs) else count)
    equal = sum(
        count == int(left.lengths[row]) == int(right.lengths[row])
        for row, count in enumerate(common)
    )
    row = 0
    mean = math.nan
    largest = math.nan
    if left.log_probs is not None and right.log_probs is not None:
        pairs = zip(left.log_probs, right.log_probs, common, strict=True)
        each = [
            (left_row[:count] - right_row[:count]).abs() for left_row, right_row, count in pairs
        ]
        gaps = torch.cat(each)
        row = max(range(len(each)), key=lambda i: float(each[i].sum()))
        if len(gaps):
            mean = float(gaps.mean())
            largest = float(gaps.max())
    worst = (*prompts[row].tokens, *left.tokens[row, : common[row]].tolist())
    return Comparison(
        len(prompts), equal, int(left.lengths.sum()), sum(common), mean, largest, worst
    )
