"""The real vLLM on this machine's CPU, with models it supports: head sizes of 32 or more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from helpers.environments import engine_environment
from helpers.models import tiny_llama_folder
from helpers.tiny_run import compose, tiny_overrides

from reinforce_rl.config.load import load_config
from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.engine.generator import EngineGenerator
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.monitoring.records import read_tokens, rollout_files
from reinforce_rl.policy.build import build_actor

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
    shape = {"vocab_size": 32, "max_positions": 16, **SHAPE, **keys}
    return tiny_llama_folder(folder / "model", layers=2, logit_scale=2.0, **shape)


def generator_of(folder: Path, mesh: Mesh, *overrides: str) -> tuple[CausalLM, EngineGenerator]:
    """Return the model below `folder` and its configured engine."""
    config = load_config(compose(*tiny_overrides(folder), *overrides))
    tokenizer = load_tokenizer(config.pretrained_checkpoint.restore_from_path)
    actor = build_actor(config, mesh, tokenizer, trains=False, with_reference=False)
    assert isinstance(actor.generator, EngineGenerator)
    return actor.lm, actor.generator


def draw(generator: EngineGenerator, seed: int = 3) -> Completions:
    with generator.awake():
        return generator.generate(PROMPTS, NUM_SAMPLES, PARAMS, seed)


@torch.no_grad()
def change_weights(lm: CausalLM, seed: int = 0) -> None:
    """Change every weight, each by a different share."""
    random = torch.Generator().manual_seed(seed)
    for parameter in lm.parameters():
        share = 0.2 * torch.rand(parameter.shape, generator=random)
        parameter.mul_(1 + share.to(parameter.dtype))


@torch.no_grad()
def log_prob_gap(
    logits_of: Callable[[torch.Tensor], torch.Tensor], completions: Completions
) -> float:
    """Return the largest difference to a model's log-probs at the sampling temperature."""
    assert completions.log_probs is not None
    largest = 0.0
    for row, length in enumerate(completions.lengths.tolist()):
        prompt = PROMPTS[row // NUM_SAMPLES].tokens
        response = completions.tokens[row, :length]
        tokens = torch.cat([torch.tensor(prompt), response])
        logits = logits_of(tokens[None])[0]
        logits = logits[len(prompt) - 1 : -1]
        table = torch.log_softmax(logits.float() / PARAMS.temperature, -1)
        log_probs = table.gather(1, response[:, None])[:, 0]
        gaps = (log_probs - completions.log_probs[row, :length]).abs()
        largest = max(largest, float(gaps.max()))
    return largest


def check_log_probs(folder: Path) -> None:
    """Assert that three steps' samples have the trainer's log-probs, so their ratio is 1."""
    for step in (1, 2, 3):
        rows = read_tokens(rollout_files(folder / "run")[step])
        trainer_log_probs = torch.cat([torch.tensor(row.policy_log_probs) for row in rows])
        engine_log_probs = torch.cat([torch.tensor(row.generator_log_probs) for row in rows])
        assert trainer_log_probs.shape == engine_log_probs.shape
        assert len(trainer_log_probs) > 16
        gaps = trainer_log_probs - engine_log_probs
        ratios = gaps.exp()
        assert float(gaps.abs().max()) < TOLERANCE
        assert float((ratios - 1).abs().max()) < TOLERANCE


def processes_of(generator: EngineGenerator) -> dict[str, psutil.Process]:
    """Return the processes of an engine with one worker."""
    assert generator._engine is not None
    assert generator._engine._child is not None
    host = psutil.Process(generator._engine._child.pid)
    core = _children(host)[0]
    (worker,) = _children(core)
    return {"host": host, "EngineCore": core, "Worker": worker}


def _children(process: psutil.Process) -> list[psutil.Process]:
    # A child without this word is a resource tracker.
    return [child for child in process.children() if "spawn_main" in " ".join(child.cmdline())]


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
