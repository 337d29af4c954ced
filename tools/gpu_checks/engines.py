"""Engines on this GPU: log-probs of what they draw against transformers, at two temperatures.

Between the two an engine sleeps, wakes and gets other weights. Both model runners of vLLM are
tried: on GPUs it takes the second, with kernels in Triton; on a CPU it has the first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from helpers.models import tiny_llama_folder
from torch import Tensor

from gpu_checks.base import SKIP, Context, Finding, judged
from gpu_checks.runner import ROOT, is_installed
from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.evaluation.model import LENGTH, inference_config, load_actor
from reinforce_rl.generation.base import Generator
from reinforce_rl.launch.check_engine import compare_responses
from reinforce_rl.policy.build import configured_mesh
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel

TEMPERATURES = (1.0, 0.6)
TOLERANCE = 0.05  # nats a token on average, between bf16 and fp32
SCALE = 0.9  # of the weights, at the second temperature
SAMPLES = 4
MAX_TOKENS = 32
PROMPTS = [Prompt(number, "", tuple(range(5 + number, 13 + 2 * number))) for number in range(8)]
# Heads of 64, as attention kernels want them.
MODEL = {
    "vocab_size": 1024,
    "layers": 4,
    "hidden": 256,
    "heads": 4,
    "groups": 2,
    "ffn": 512,
    "logit_scale": 2.0,
}
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"


def check_tensorrt_llm(context: Context) -> Finding:
    """Once it has passed on a GPU, temperatures other than 1 may go with `generator_correction`."""
    with engine_of(context, "generation=tensorrt_llm") as actor:
        rows = gaps_of(actor, actor.generator, context.device)
    sentence = f"log-probs are within {largest(rows):.2g} nats of transformers' at each temperature"
    return judged(faults_of(rows), sentence, {"gaps": rows})


def check_vllm(context: Context) -> Finding:
    python = ENGINE_PYTHON if ENGINE_PYTHON.is_file() else None
    if python is None and not is_installed("vllm"):
        return Finding(SKIP, f"not installed: vllm, and there is no {ENGINE_PYTHON}")
    overrides = ["generation=vllm", "vllm.enforce_eager=true", f"engine.python={python or 'null'}"]
    rows: list[dict[str, object]] = []
    drawn: list[Completions] = []
    for number in (1, 2):
        os.environ[RUNNER] = str(number - 1)  # the engine's process inherits it
        with engine_of(context, *overrides) as actor:
            greedy = replace(actor.sampling, max_length=MAX_TOKENS, use_greedy=True)
            with actor.generator.awake():
                drawn.append(actor.generator.generate(PROMPTS, 1, greedy, seed=0))
            gaps = gaps_of(actor, actor.generator, context.device)
            rows += [{"runner": number, **row} for row in gaps]
    both = compare_responses(drawn[0], drawn[1], PROMPTS)
    faults = faults_of(rows)
    if not both.mean_gap <= TOLERANCE:
        faults.append(
            f"the runners' log-probs of the same tokens differ by {both.mean_gap:.2g} nats"
        )
    sentence = (
        f"both runners are within {largest(rows):.2g} nats of transformers, "
        f"and {both.mean_gap:.2g} apart in {both.common_tokens} common tokens"
    )
    return judged(faults, sentence, {"gaps": rows, "equal responses of both": both.equal_responses})


@contextlib.contextmanager
def engine_of(context: Context, *overrides: str) -> Iterator[MegatronGPTReinforceActorModel]:
    """Yield an actor with random weights and its engine, which is closed at the end."""
    folder = context.folder / "model"
    if not folder.exists():
        tiny_llama_folder(folder, **MODEL)
    values = {
        "trainer.precision": "bf16" if context.device == "cuda" else "32",
        "tensorrt_llm.free_gpu_memory_fraction": 0.2,
        "vllm.gpu_memory_utilization": 0.3,
        "engine.max_batch_size": len(PROMPTS) * SAMPLES,
        "engine.weight_bucket_megabytes": 1,  # several buckets
        "model.reinforce.length_params.max_length": MAX_TOKENS,
        LENGTH: max(len(prompt.tokens) for prompt in PROMPTS) + MAX_TOKENS,
    }
    settings = [*overrides, *(f"{key}={value}" for key, value in values.items())]
    cfg = inference_config(folder, settings, folder=context.folder / "run")
    with configured_mesh(cfg) as mesh:
        actor = load_actor(cfg, mesh)
        with contextlib.closing(actor.generator):
            yield actor


def gaps_of(
    actor: MegatronGPTReinforceActorModel, generator: Generator, device: str
) -> list[dict[str, object]]:
    """Draw at each temperature, with other weights at each.

    Returns how far the log-probs are from transformers'.
    """
    gaps: list[dict[str, object]] = []
    for number, temperature in enumerate(TEMPERATURES):
        if number:
            with torch.no_grad():
                for parameter in actor.lm.parameters():
                    parameter.mul_(SCALE)
        params = replace(actor.sampling, max_length=MAX_TOKENS, temperature=temperature)
        with generator.awake():
            completions = generator.generate(PROMPTS, SAMPLES, params, seed=7)
        if completions.log_probs is None:
            gaps.append({"temperature": temperature, "at it": float("nan"), "at 1": float("nan")})
            continue
        at_temperature, at_one = reference_log_probs(actor, completions, temperature, device)
        engine_log_probs = torch.cat(
            [
                row[:count]
                for row, count in zip(completions.log_probs, completions.lengths, strict=True)
            ]
        )
        gaps.append(
            {
                "temperature": temperature,
                "tokens": len(engine_log_probs),
                "at it": float((engine_log_probs - at_temperature).abs().mean()),
                "at 1": float((engine_log_probs - at_one).abs().mean()),
            }
        )
    return gaps


def reference_log_probs(
    actor: MegatronGPTReinforceActorModel, completions: Completions, temperature: float, device: str
) -> tuple[Tensor, Tensor]:
    """Return transformers' log-probs of all response tokens, at the temperature and at 1.

    Responses follow one another.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from reinforce_rl.megatron.hf_weights import hf_tensors

    tensors = {name: tensor.float() for name, tensor in hf_tensors(actor.lm) if tensor is not None}
    config = LlamaConfig.from_pretrained(actor.tokenizer.name_or_path, trust_remote_code=False)
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(tensors, strict=False)  # a tied output layer has no tensor
    model.tie_weights()
    model.eval().to(device)
    at_temperature = []
    at_one = []
    for row, count in enumerate(completions.lengths.tolist()):
        prompt = torch.tensor(PROMPTS[row // SAMPLES].tokens)
        response = completions.tokens[row, :count]
        with torch.no_grad():
            logits = (
                model(torch.cat([prompt, response])[None].to(device))
                .logits[0, len(prompt) - 1 : -1]
                .float()
                .cpu()
            )
        for scale, values in ((temperature, at_temperature), (1.0, at_one)):
            log_probs = (logits / scale).log_softmax(-1)
            values.append(log_probs.gather(1, response[:, None])[:, 0])
    return torch.cat(at_temperature), torch.cat(at_one)


def faults_of(rows: Sequence[dict[str, object]]) -> list[str]:
    """Say which log-probs a row has, if not the ones at its temperature."""
    faults = []
    for row in rows:
        at_it, at_one = (float(str(row[key])) for key in ("at it", "at 1"))
        if at_it <= TOLERANCE:
            continue
        which = f"runner {row['runner']}, " if "runner" in row else ""
        deviation = f"differ from transformers' by {at_it:.2g} nats"
        if at_one <= TOLERANCE:
            deviation = "are those at temperature 1"
        faults.append(f"{which}temperature {row['temperature']}: log-probs {deviation}")
    return faults


def largest(rows: Sequence[dict[str, object]]) -> float:
    return max(float(str(row["at it"])) for row in rows)
