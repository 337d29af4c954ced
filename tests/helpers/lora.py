"""Models with non-zero LoRA updates, evaluated by this project and by PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.accumulate import accumulate_gradients
from helpers.families import family_folder, tokens_of
from helpers.policies import all_logits, megatron_model, transformers_model
from megatron.core import tensor_parallel
from torch import Tensor

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.checkpointer import Checkpointer
from reinforce_rl.megatron.hf_weights import export_hf_folder, hf_tensors, parameters_of
from reinforce_rl.megatron.lora import (
    PROJECTIONS,
    LoraSettings,
    MergedWeights,
    adapter_rows,
    add_lora,
    export_adapter,
    lora_map,
    peft_config,
)
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.optimizer import (
    ActorOptimizer,
    build_optimizer,
    wrap_data_parallel,
)

EVERY = LoraSettings(rank=3, alpha=7.0, targets=PROJECTIONS, seed=5)
SOME = LoraSettings(rank=2, alpha=3.0, targets=("q_proj", "v_proj", "o_proj", "up_proj"), seed=5)
# Groups that need padding at TP=2, biases and head norms; both kinds of targets.
CASES = {"llama_bias_padded": EVERY, "qwen3": SOME, "qwen3_padded": EVERY}
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, betas=[0.9, 0.95])


def case_folder(root: Path, name: str) -> Path:
    return family_folder(root, name)


def random_updates(
    folder: Path, settings: LoraSettings, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return A and B under PEFT's names, large enough to change every logit."""
    generator = torch.Generator().manual_seed(3)
    rows = [
        m for row in lora_map(Architecture.from_folder(folder), 1, settings) for m in (row.a, row.b)
    ]
    return {row.hf: 0.15 * torch.randn(row.shape, generator=generator).to(dtype) for row in rows}


@torch.no_grad()
def load_updates(lm: CausalLM, values: dict[str, Tensor]) -> None:
    parameters = parameters_of(lm)
    for row in (row for row in adapter_rows(lm) if row.megatron in parameters):
        # the other rows belong to another stage
        row.place(parameters[row.megatron], lm.mesh.tp_rank).copy_(
            row.part_in(values[row.hf], lm.mesh.tp_rank)
        )


def whole_updates(lm: CausalLM, values: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Return updates or gradients under PEFT's names, on the first tensor-parallel rank only."""
    return dict(hf_tensors(lm, values, rows=adapter_rows(lm)))  # type: ignore[arg-type]


def lora_model(
    folder: Path, mesh: Mesh, settings: LoraSettings, dtype: torch.dtype = torch.float32
) -> CausalLM:
    lm = megatron_model(folder, mesh, dtype)
    add_lora(lm, settings)
    load_updates(lm, random_updates(folder, settings, dtype))
    return lm


def computed_here(folder: Path, mesh: Mesh, settings: LoraSettings, out: Path) -> dict[str, Any]:
    """Train a step and write the folders `merged`, `adapter` and `checkpoints`.

    A collective call.
    """
    fresh = megatron_model(folder, mesh, torch.float64)
    add_lora(fresh, settings)
    results: dict[str, Any] = {"initial": whole_updates(fresh)}

    exact = lora_model(folder, mesh, settings, torch.float64)
    tokens = tokens_of(exact.architecture.vocab_size)

    def loss_of(model: Any, lm: CausalLM) -> Tensor:
        hidden = model(tokens[:, :-1])
        logits = lm.logits(hidden.reshape(-1, hidden.shape[-1]))
        return tensor_parallel.vocab_parallel_cross_entropy(
            logits[:, None], tokens[:, 1:].reshape(-1, 1)
        ).mean()

    results["logits"] = all_logits(exact, tokens)
    # megatron's cross entropy is float32 only, so the gradient is that of the tokens' log-probs.
    loss = loss_in_float64(exact, tokens)
    loss.backward()
    results["loss"] = loss.item()
    results["gradient"] = whole_updates(
        exact, {name: p.grad for name, p in parameters_of(exact).items() if p.grad is not None}
    )

    lm = lora_model(folder, mesh, settings)
    ddp = wrap_data_parallel(lm)
    parts = build_optimizer(ddp, OPTIM, clip_grad=0.0, total_steps=10)
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    accumulate_gradients(ddp, [None], lambda model, _: loss_of(model, lm))
    results["norm"] = ActorOptimizer(*parts).step().grad_norm
    results["changed"] = [
        name for name, p in lm.named_parameters() if not torch.equal(p, before[name])
    ]
    results["after"] = whole_updates(lm)
    results["logits after"] = all_logits(lm, tokens)
    export_hf_folder(lm, folder, out / "merged", values=MergedWeights(lm))
    export_adapter(lm, folder, out / "adapter")
    Checkpointer(out / "checkpoints", mesh, ddp, *parts).save(1, {})
    return results


def loss_in_float64(lm: CausalLM, tokens: Tensor) -> Tensor:
    from helpers.log_probs import response_log_probs

    ones = torch.ones(len(tokens), dtype=torch.long)
    width = tokens.shape[1] - 1
    scores = response_log_probs(
        lm, lm, tokens, ones, ones * width, temperature=1.0, width=width, chunk_tokens=50
    )
    return -scores.log_probs.mean()


def peft_model(folder: Path, settings: LoraSettings, dtype: torch.dtype) -> Any:
    """Return PEFT's model with `random_updates`."""
    from peft import LoraConfig, get_peft_model

    values = {
        k: v
        for k, v in peft_config(settings, folder).items()
        if k not in ("peft_type", "inference_mode")
    }
    model = get_peft_model(
        transformers_model(folder, dtype), LoraConfig(**values), autocast_adapter_dtype=False
    )
    parameters = peft_parameters(model)
    updates = random_updates(folder, settings, dtype)
    assert parameters.keys() == updates.keys()
    with torch.no_grad():
        for name, value in updates.items():
            parameters[name].copy_(value)
    return model.eval()


def peft_parameters(model: Any) -> dict[str, Any]:
    """Return the trained parameters under PEFT's names without their prefix."""
    return {
        name.removeprefix("base_model.model.").replace(".default.weight", ".weight"): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def computed_by_peft(folder: Path, settings: LoraSettings) -> dict[str, Any]:
    model = peft_model(folder, settings, torch.float64)
    tokens = tokens_of(model.config.vocab_size)
    with torch.no_grad():
        results: dict[str, Any] = {"logits": model(tokens).logits}
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    results["loss"] = loss.item()
    results["gradient"] = {
        name: parameter.grad for name, parameter in peft_parameters(model).items()
    }
    return results
