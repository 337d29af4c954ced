"""LoRA updates for the real vLLM, sent separately or merged into the weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.errors import raises_error
from helpers.policies import all_logits
from helpers.vllm_engine import (
    TOLERANCE,
    draw,
    generator_of,
    log_prob_gap,
    vllm_model,
    vllm_overrides,
)

from reinforce_rl.generation.engine import generator as of_engine
from reinforce_rl.generation.engine.generator import EngineGenerator
from reinforce_rl.megatron.lora import updates_of
from reinforce_rl.megatron.model.model import CausalLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


LORA = "model.peft.peft_scheme=lora"
TUNING = "model.peft.lora_tuning"
EVERY = (LORA, f"{TUNING}.adapter_dim=3", f"{TUNING}.alpha=7")
SOME_MODULES = f"{TUNING}.target_modules=[q_proj,v_proj,o_proj,up_proj]"
SOME = (LORA, f"{TUNING}.adapter_dim=2", f"{TUNING}.alpha=3", SOME_MODULES)


def engine_of(folder, mesh, *overrides: str) -> tuple[CausalLM, EngineGenerator]:
    """The vocabulary is not a multiple of vLLM's padding."""
    vllm_model(folder, vocab_size=61)
    return generator_of(folder, mesh, *vllm_overrides(), *overrides)


@torch.no_grad()
def change_updates(lm: CausalLM, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for updates in updates_of(lm):
        for parameter in updates.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random) * 0.2)


@pytest.mark.parametrize(
    ("settings", "workers", "alone"),
    [
        pytest.param(EVERY, 1, True, id="alone"),
        pytest.param(SOME, 2, True, id="some_alone_on_two_workers"),
        pytest.param(EVERY, 1, False, id="merged"),
    ],
)
def test_samples_are_of_the_present_updates(tmp_path, mesh, monkeypatch, settings, workers, alone):
    sent = []
    send = of_engine.send_weights
    monkeypatch.setattr(
        of_engine, "send_weights", lambda *args, **options: (sent.append(1), send(*args, **options))
    )
    lm, generator = engine_of(tmp_path, mesh, *settings, f"vllm.load_adapters={alone}")
    generator._arguments = replace(generator._arguments, tensor_parallel_size=workers)
    completions = []
    for seed in range(3):
        completions.append(draw(generator))
        assert log_prob_gap(partial(all_logits, lm), completions[-1]) < TOLERANCE
        change_updates(lm, seed)
    generator.close()
    assert len({tuple(drawn.tokens.flatten().tolist()) for drawn in completions}) == 3
    assert len(sent) == (1 if alone else 3)


def test_an_update_that_is_not_what_was_sent_ends_the_run_by_name(tmp_path, mesh, monkeypatch):
    write = of_engine.write_adapter

    def wrong(tensors, *rest):
        name = next(
            name for name in tensors if name.endswith("layers.1.self_attn.v_proj.lora_B.weight")
        )
        write({**tensors, name: tensors[name] + 1e-3}, *rest)

    monkeypatch.setattr(of_engine, "write_adapter", wrong)
    _, generator = engine_of(tmp_path, mesh, *EVERY)
    generator._was_restarted = True  # otherwise it would be tried twice
    values = ("1 LoRA matrices", "model.layers.1.self_attn.v_proj.lora_B")
    with raises_error("generation.engine.failed_again", *values):
        draw(generator)
    generator.close()
