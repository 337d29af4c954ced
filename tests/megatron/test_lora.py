"""LoRA against PEFT on one rank and on two tensor-parallel ranks.

Logits, loss, gradients, norms and exported folders are compared.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from helpers.families import NEW_TOKENS, family_folder, prompts_of, tokens_of
from helpers.lora import EVERY, SOME, load_updates, lora_model, random_updates
from helpers.policies import (
    accumulate_gradients,
    all_logits,
    megatron_model,
    response_log_probs,
    transformers_logits,
    transformers_model,
)
from helpers.ranks import call_on_ranks
from safetensors.torch import load_file
from torch import Tensor

from reinforce_rl.config.model import LoraTarget, OptimConfig
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.checkpointer import Checkpointer
from reinforce_rl.megatron.convert import load_weights
from reinforce_rl.megatron.hf_weights import export_hf_folder, hf_tensors, parameters_of
from reinforce_rl.megatron.lora import (
    PROJECTIONS,
    LoraSettings,
    MergedWeights,
    adapter_rows,
    add_lora,
    export_adapter,
    initial_a,
    lora_map,
    peft_config,
    updates_off,
)
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer, wrap_data_parallel

# Groups that need padding at TP=2, biases and head norms; both kinds of targets.
CASES = {"llama_bias_padded": EVERY, "qwen3": SOME, "qwen3_padded": EVERY}
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, betas=[0.9, 0.95])

every_case = pytest.mark.parametrize("name", CASES)


def whole_updates(lm: CausalLM, values: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Return updates or gradients under PEFT's names, on the first tensor-parallel rank only."""
    return dict(hf_tensors(lm, values, rows=adapter_rows(lm)))  # type: ignore[arg-type]


def computed_here(folder: Path, mesh: Mesh, settings: LoraSettings, out: Path) -> dict[str, Any]:
    """Train a step and write the folders `merged`, `adapter` and `checkpoints`.

    A collective call.
    """
    fresh = megatron_model(folder, mesh, torch.float64)
    add_lora(fresh, settings)
    results: dict[str, Any] = {"initial": whole_updates(fresh)}

    exact = lora_model(folder, mesh, settings, torch.float64)
    tokens = tokens_of(exact.architecture.vocab_size)

    results["logits"] = all_logits(exact, tokens)
    loss = loss_of(exact, exact, tokens)
    loss.backward()
    results["loss"] = loss.item()
    results["gradient"] = whole_updates(
        exact, {name: p.grad for name, p in parameters_of(exact).items() if p.grad is not None}
    )

    lm = lora_model(folder, mesh, settings)
    ddp = wrap_data_parallel(lm)
    parts = build_optimizer(ddp, OPTIM, clip_grad=0.0, total_steps=10)
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    accumulate_gradients(ddp, [tokens], lambda model, tokens: loss_of(model, lm, tokens))
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


def loss_of(model: Any, lm: CausalLM, tokens: Tensor) -> Tensor:
    """Return the cross entropy in any dtype; megatron's is float32 only."""
    ones = torch.ones(len(tokens), dtype=torch.long)
    width = tokens.shape[1] - 1
    scores = response_log_probs(
        model, lm, tokens, ones, ones * width, temperature=1.0, width=width, chunk_tokens=50
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


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def folders(root):
    return {name: family_folder(root, name) for name in CASES}


@pytest.fixture(scope="module")
def by_peft(folders):
    return {name: computed_by_peft(folders[name], settings) for name, settings in CASES.items()}


@pytest.fixture(scope="module")
def one_rank(folders, mesh, root):
    return {
        name: computed_here(folders[name], mesh, CASES[name], root / "one" / name) for name in CASES
    }


def computed_on_two_ranks(folders, out):
    """Return the results of each case; check an MLP with sequence parallelism."""
    with parallel_mesh(2) as mesh:
        results = {
            name: computed_here(folders[name], mesh, settings, out / name)
            for name, settings in CASES.items()
        }
        whole, shared = (
            mlp_gradients(folders["llama_bias_padded"], mesh, flag) for flag in (False, True)
        )
    torch.testing.assert_close(shared["output"], whole["output"][shared["own"]], atol=1e-12, rtol=0)
    for name, gradient in whole["gradients"].items():
        assert gradient.abs().max() > 1e-3
        torch.testing.assert_close(
            shared["gradients"][name], gradient, atol=1e-11, rtol=0, msg=name
        )
    return results


def mlp_gradients(folder: Path, mesh: Mesh, sequence_parallel: bool) -> dict[str, Any]:
    """Return output and gradients of the first MLP.

    With sequence parallelism each rank has half of the positions.
    """
    lm = megatron_model(folder, mesh, torch.float64)
    mlp: Any = lm.decoder.layers[0].mlp
    for layer in (mlp.linear_fc1, mlp.linear_fc2):
        layer.sequence_parallel = sequence_parallel
    mlp.linear_fc1.allreduce_dgrad = not sequence_parallel
    add_lora(lm, EVERY)
    load_updates(lm, random_updates(folder, EVERY, torch.float64))
    x, weight = torch.randn(
        2, 6, 2, 36, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    x.requires_grad_()
    local_rows = slice(3 * mesh.tp_rank, 3 * mesh.tp_rank + 3) if sequence_parallel else slice(None)
    output, _ = mlp(x[local_rows])
    (output * weight[local_rows]).sum().backward()
    parameters = {name: p for name, p in mlp.named_parameters() if p.requires_grad}
    gradients = {"x": x.grad, **{name: p.grad for name, p in parameters.items()}}
    if sequence_parallel:
        # megatron does this at the end of a batch for parameters that are marked
        assert x.grad is not None
        for value in (
            x.grad,
            *(p.grad for p in parameters.values() if getattr(p, "sequence_parallel", False)),
        ):
            torch.distributed.all_reduce(value, group=mesh.tp_group)
    return {"output": output.detach(), "own": local_rows, "gradients": gradients}


@pytest.fixture(scope="module")
def two_ranks(folders, root):
    return call_on_ranks(computed_on_two_ranks, 2, folders, root / "two", timeout=240)[0]


@pytest.fixture(params=["one", "two"])
def lora_results(request):
    """Return (folder name, results) for each number of ranks."""
    return request.param, request.getfixturevalue(
        f"{request.param}_rank{'s' if request.param == 'two' else ''}"
    )


@every_case
def test_equals_peft(name, lora_results, by_peft):
    """In float64, although transformers computes norms and RoPE in float32."""
    ranks, results = lora_results
    mine = results[name]
    expected = by_peft[name]
    assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    torch.testing.assert_close(mine["logits"], expected["logits"], atol=1e-5, rtol=0)
    assert mine["gradient"].keys() == expected["gradient"].keys()
    for key, gradient in expected["gradient"].items():
        assert gradient.abs().max() > 1e-5, key
        difference = (mine["gradient"][key] - gradient).norm() / gradient.norm()
        assert difference < 1e-5, f"{key} on {ranks}: {difference}"


@every_case
def test_the_updates_change_the_logits(name, folders, by_peft):
    """Otherwise the test above would prove nothing."""
    base = transformers_model(folders[name], torch.float64)
    difference = (
        transformers_logits(base, tokens_of(base.config.vocab_size)) - by_peft[name]["logits"]
    )
    assert difference.abs().mean() > 0.2


@every_case
def test_a_step_changes_the_updates_alone(name, lora_results, by_peft):
    results = lora_results[1][name]
    assert results["changed"]
    for parameter in results["changed"]:
        assert ".lora." in parameter
    # Parameters on several ranks count once, padding not at all.
    gradients = by_peft[name]["gradient"].values()
    expected = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    assert results["norm"] == pytest.approx(expected, rel=1e-5)


@every_case
def test_two_ranks_start_and_step_as_one(name, one_rank, two_ranks):
    for key, value in one_rank[name]["initial"].items():
        assert torch.equal(two_ranks[name]["initial"][key], value), key
        assert bool(value.any()) == ("lora_A" in key)
    assert two_ranks[name]["loss"] == pytest.approx(one_rank[name]["loss"], rel=1e-12)
    for key, gradient in one_rank[name]["gradient"].items():
        torch.testing.assert_close(
            two_ranks[name]["gradient"][key], gradient, atol=1e-12, rtol=1e-9, msg=key
        )
    for key, value in one_rank[name]["after"].items():
        torch.testing.assert_close(two_ranks[name]["after"][key], value, atol=1e-5, rtol=0, msg=key)


@every_case
def test_exported_folders(name, lora_results, folders, root):
    """Both folders contain the model after a step.

    One is merged; the other is an adapter that PEFT adds to the base model.
    """
    from peft import PeftModel

    ranks, results = lora_results
    out = root / ranks / name
    expected = results[name]["logits after"]
    tokens = tokens_of(expected.shape[-1])
    merged = transformers_logits(transformers_model(out / "merged"), tokens)
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=0)
    peft = PeftModel.from_pretrained(transformers_model(folders[name]), out / "adapter").eval()
    torch.testing.assert_close(transformers_logits(peft, tokens), expected, atol=1e-5, rtol=0)
    assert not list(out.glob("*.part"))


@every_case
def test_merged_folder_differs_in_its_targets_only(name, lora_results, folders, root):
    base = load_file(folders[name] / "model.safetensors")
    model_file = root / lora_results[0] / name / "merged" / "model.safetensors"
    merged = load_file(model_file)
    assert merged.keys() == base.keys()
    changed = {key for key in base if not torch.equal(base[key], merged[key])}
    targets = {
        row.base.hf for row in lora_map(Architecture.from_folder(folders[name]), 1, CASES[name])
    }
    assert changed == targets


def test_at_the_start_the_logits_equal_the_base(folders, mesh):
    lm = megatron_model(folders["qwen3"], mesh)
    tokens = tokens_of(lm.architecture.vocab_size)
    before = all_logits(lm, tokens)
    add_lora(lm, EVERY)
    assert torch.equal(all_logits(lm, tokens), before)


def test_updates_off_is_the_base(folders, mesh):
    base = megatron_model(folders["qwen3"], mesh)
    lm = lora_model(folders["qwen3"], mesh, EVERY)
    tokens = tokens_of(base.architecture.vocab_size)
    adapted = all_logits(lm, tokens)
    with pytest.raises(RuntimeError, match="inside"), updates_off(lm):
        assert torch.equal(all_logits(lm, tokens), all_logits(base, tokens))
        raise RuntimeError("inside")
    assert torch.equal(all_logits(lm, tokens), adapted)
    assert not torch.equal(adapted, all_logits(base, tokens))


def test_generation_uses_the_updates(folders, mesh, tmp_path):
    """Compare greedy responses, with the KV cache, to the merged model in transformers."""
    name = "qwen3"
    lm = lora_model(folders[name], mesh, CASES[name], torch.float64)
    export_hf_folder(lm, folders[name], tmp_path / "merged", values=MergedWeights(lm))
    prompts = prompts_of(lm.architecture.vocab_size)
    params = SamplingParams(max_length=NEW_TOKENS, use_greedy=True)
    tokenizer = load_tokenizer(folders[name])

    def responses(model) -> list[list[int]]:
        return (
            NativeGenerator(model, tokenizer).generate(prompts, 1, params, seed=0).tokens.tolist()
        )

    merged = transformers_model(tmp_path / "merged", torch.float64)
    options = {
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "max_new_tokens": NEW_TOKENS,
    }
    expected = []
    for prompt in prompts:
        row = torch.tensor([prompt.tokens])
        tokens = merged.generate(row, attention_mask=torch.ones_like(row), **options)
        expected.append(tokens[0, row.shape[1] :].tolist())
    assert responses(lm) == expected
    assert responses(megatron_model(folders[name], mesh, torch.float64)) != expected


@every_case
def test_a_checkpoint_of_two_ranks_on_one(name, two_ranks, folders, mesh, root):
    """Padding is removed."""
    lm = megatron_model(folders[name], mesh)
    add_lora(lm, CASES[name])
    checkpoint = root / "two" / name / "checkpoints" / "step_00000001"
    load_weights(lm, checkpoint)
    for key, value in whole_updates(lm).items():
        assert torch.equal(value, two_ranks[name]["after"][key]), key


def test_initial_a_has_pefts_distribution():
    row = lora_map(wide_architecture(), 1, LoraSettings(64, 1.0, ("q_proj",), seed=1))[0].a
    a = initial_a(row, seed=1)
    assert a.shape == (64, 1024)
    bound = 1 / math.sqrt(1024)  # sqrt(6 / ((1 + 5) in)), the bound of kaiming_uniform_(a=sqrt(5))
    assert bound * 0.999 < a.abs().max() <= bound
    assert a.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert torch.equal(a, initial_a(row, seed=1))
    assert not torch.equal(a, initial_a(row, seed=2))


def wide_architecture() -> Architecture:
    return Architecture.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 8,
            "hidden_size": 1024,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 8,
        }
    )


def test_layers_and_projections_start_differently(one_rank):
    matrices = [
        value for key, value in one_rank["llama_bias_padded"]["initial"].items() if "lora_A" in key
    ]
    assert (
        len({float(matrix.sum()) for matrix in matrices}) == len(matrices) == 2 * len(PROJECTIONS)
    )


def test_recomputed_layers_have_the_same_gradients(folders, mesh):
    gradients = []
    for recompute in (False, True):
        lm = lora_model(folders["qwen3"], mesh, EVERY, torch.float64).train()
        if recompute:
            lm.config.recompute_granularity = "full"
            lm.config.recompute_method = "uniform"
            lm.config.recompute_num_layers = 1
        loss_of(lm, lm, tokens_of(lm.architecture.vocab_size)).backward()
        grads = [p.grad for p in lm.parameters() if p.requires_grad]
        gradients.append(grads)
    for plain, other in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, other, atol=1e-12, rtol=0)


def test_names_of_the_configuration():
    assert (*PROJECTIONS, "all") == get_args(LoraTarget)
    assert LoraSettings.from_names(4, 2.0, ["all"], 0).targets == PROJECTIONS
    some = LoraSettings.from_names(4, 2.0, ["down_proj", "q_proj"], 0)
    assert some.targets == ("q_proj", "down_proj")
    assert some.scale == 0.5
