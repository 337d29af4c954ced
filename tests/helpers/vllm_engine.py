"""The real vLLM on this machine's CPU, with models it supports: head sizes of 32 or more."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from helpers.environments import engine_environment
from helpers.models import tiny_llama_folder
from helpers.policies import all_logits
from helpers.tiny_run import compose, tiny_overrides

from reinforce_rl.config.load import load_config
from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.engine.generator import EngineGenerator
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.hf_weights import load_hf_weights
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.monitoring.records import read_tokens, rollout_files
from reinforce_rl.policy.build import build_generator

SHAPE: dict[str, Any] = {"hidden": 64, "heads": 2, "groups": 2, "ffn": 64}
PROMPTS = [Prompt(7, "tea", (6, 7, 8)), Prompt(9, "to", (6, 9))]
PARAMS = SamplingParams(max_length=8, temperature=0.7, stop_token_ids=(2, 5))
NUM_SAMPLES = 4
TOLERANCE = 2e-4  # of log-probs in fp32
OF_RUNS = ("trainer.reinforce.max_epochs=2", "trainer.reinforce.max_steps=3")
SMOLLM2 = (
    "model.encoder_seq_length=64",
    "model.reinforce.length_params.max_length=12",
    "model.optim.lr=1e-5",
    "trainer.reinforce.initial_policy_kl_penalty=0",
    "engine.weight_bucket_megabytes=64",
)
SMALL_BUCKET = 16384  # bytes; the setting's minimum is a megabyte


def vllm_overrides() -> list[str]:
    return [
        "generation=vllm",
        f"engine.python={engine_environment()}",
        "engine.weight_bucket_megabytes=1",
    ]


def vllm_model(folder: Path, **keys: Any) -> Path:
    """Write the model of a run in `folder`."""
    return tiny_llama_folder(
        folder / "model",
        vocab_size=32,
        layers=2,
        max_positions=16,
        logit_scale=2.0,
        **{**SHAPE, **keys},
    )


def engine_generator(
    folder: Path, mesh: Mesh, *overrides: str, dtype: torch.dtype = torch.float32
) -> tuple[CausalLM, EngineGenerator]:
    """Return the model below `folder` and its vLLM generator."""
    return generator_of(folder, mesh, *vllm_overrides(), *overrides, dtype=dtype)


def generator_of(
    folder: Path, mesh: Mesh, *overrides: str, dtype: torch.dtype = torch.float32
) -> tuple[CausalLM, EngineGenerator]:
    """Return the model below `folder` and its configured engine."""
    config = load_config(compose(*tiny_overrides(folder), *overrides))
    model = config.pretrained_checkpoint.restore_from_path
    lm = CausalLM(Architecture.from_folder(model), mesh, dtype)
    load_hf_weights(lm, HFFolder(model))
    generator = build_generator(config, lm, load_tokenizer(model))
    assert isinstance(generator, EngineGenerator)
    return lm, generator


def draw(generator: EngineGenerator, seed: int = 3) -> Completions:
    with generator.awake():
        return generator.generate(PROMPTS, NUM_SAMPLES, PARAMS, seed)


@torch.no_grad()
def change_weights(lm: CausalLM, seed: int = 0) -> None:
    """Change every weight, each by a different share."""
    random = torch.Generator().manual_seed(seed)
    for parameter in lm.parameters():
        parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=random).to(parameter.dtype))


def log_prob_gap(lm: CausalLM, completions: Completions) -> float:
    """Return the largest difference to this model's log-probs at the sampling temperature."""
    assert completions.log_probs is not None
    largest = 0.0
    for row, length in enumerate(completions.lengths.tolist()):
        prompt = PROMPTS[row // NUM_SAMPLES].tokens
        response = completions.tokens[row, :length]
        logits = all_logits(lm, torch.cat([torch.tensor(prompt), response])[None])[
            0, len(prompt) - 1 : -1
        ]
        log_probs = torch.log_softmax(logits.float() / PARAMS.temperature, -1).gather(
            1, response[:, None]
        )[:, 0]
        largest = max(largest, float((log_probs - completions.log_probs[row, :length]).abs().max()))
    return largest


def check_log_probs(folder: Path) -> None:
    """Assert that three steps' samples have the trainer's log-probs, so their ratio is 1."""
    for step in (1, 2, 3):
        rows = read_tokens(rollout_files(folder / "run")[step])
        trainer_log_probs = torch.cat([torch.tensor(row.policy_log_probs) for row in rows])
        engine_log_probs = torch.cat([torch.tensor(row.generator_log_probs) for row in rows])
        assert trainer_log_probs.shape == engine_log_probs.shape
        assert len(trainer_log_probs) > 16
        assert float((trainer_log_probs - engine_log_probs).abs().max()) < TOLERANCE
        assert float(((trainer_log_probs - engine_log_probs).exp() - 1).abs().max()) < TOLERANCE


def processes_of(generator: EngineGenerator) -> dict[str, psutil.Process]:
    """Return the engine's processes: host, EngineCore, and Worker or Worker 0, 1, ..."""
    assert generator._engine is not None
    assert generator._engine._child is not None
    return processes_below(psutil.Process(generator._engine._child.pid))


def processes_below(host: psutil.Process) -> dict[str, psutil.Process]:
    core = next((child for child in host.children() if _is_of_vllm(child)), None)
    workers = [] if core is None else [child for child in core.children() if _is_of_vllm(child)]
    names = (
        [f"Worker {i}" for i in range(len(workers))]
        if len(workers) > 1
        else ["Worker"] * len(workers)
    )
    return {
        "host": host,
        **({} if core is None else {"EngineCore": core}),
        **dict(zip(names, workers, strict=True)),
    }


def _is_of_vllm(process: psutil.Process) -> bool:
    # Otherwise it is a resource tracker.
    return any("spawn_main" in word for word in process.cmdline())


def wait_for_the_end(processes: Iterable[psutil.Process], seconds: float = 60.0) -> None:
    """Assert that these processes end within `seconds`; kill the remaining ones."""
    _, alive = psutil.wait_procs(list(processes), seconds)
    left = [
        process
        for process in alive
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
    for process in left:
        process.kill()
    assert not left, f"still there after {seconds:g} s: {left}"
