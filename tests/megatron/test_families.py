"""Each family on one rank and on two tensor-parallel ranks, against transformers.

Logits, gradients, greedy responses, log-probs and entropies of the training path with their
gradients, and the generator's log-probs are compared. The exported folder has the same tensors for
any number of ranks, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.families import MODELS, NEW_TOKENS, family_folder, prompts_of, tokens_of
from helpers.policies import (
    accumulate_gradients,
    all_logits,
    brute_force_scores,
    hf_gradients,
    megatron_model,
    named_gradients,
    padded_sequences,
    transformers_logits,
    transformers_model,
)
from helpers.ranks import call_on_ranks
from megatron.core import tensor_parallel
from safetensors.torch import load_file
from torch import Tensor

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.data.batches import Prompt, join_prompts_and_responses
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.hf_weights import export_hf_folder, parameters_of
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.megatron.model.log_probs import response_scores
from reinforce_rl.megatron.model.sequences import PackedGroups, PaddedSequences
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer, wrap_data_parallel

MAX_SHARD_BYTES = 20_000
TEMPERATURE = 0.7
# Sequences to train on, longer than windows and original RoPE lengths; the last two share a prompt
# of one token.
TRAINED_PROMPTS = [11, 3, 1, 1]
TRAINED_RESPONSES = [9, 30, 38, 2]
GROUPS = (0, 1, 2, 2)

# Two ranks take longer; these models cover every family, with and without padding.
ON_TWO_RANKS = ("llama_bias_padded", "mistral_window", "qwen2_padded", "qwen3", "qwen3_padded")
every_model = pytest.mark.parametrize("name", MODELS)
models_on_two_ranks = pytest.mark.parametrize("name", ON_TWO_RANKS)


def computed_here(folder: Path, mesh: Mesh, out: Path) -> dict[str, Any]:
    """Return logits, responses, log-probs and gradients, and export the model to `out`."""
    lm = megatron_model(folder, mesh)
    vocab_size = lm.architecture.vocab_size
    tokens = tokens_of(vocab_size)
    results: dict[str, Any] = {"logits": all_logits(lm, tokens)}
    export_hf_folder(lm, folder, out, max_shard_bytes=MAX_SHARD_BYTES)

    exact = megatron_model(folder, mesh, torch.float64)  # float64 has no near ties between tokens
    prompts = prompts_of(vocab_size)
    params = SamplingParams(max_length=NEW_TOKENS, use_greedy=True, stop_token_ids=(2,))
    engine = NativeGenerator(exact, load_tokenizer(folder))
    made = engine.generate(prompts, 1, params, seed=0)
    lengths = made.lengths.tolist()
    rows = zip(made.tokens.tolist(), lengths, strict=True)
    results["responses"] = [row[:length] for row, length in rows]
    alone = [engine.generate([prompt], 1, params, seed=0) for prompt in prompts]
    results["responses_alone"] = [completions.tokens[0].tolist() for completions in alone]
    results["drawn"] = drawn_here(engine, prompts)
    results["scores"] = scored_here(folder, mesh)

    ddp = wrap_data_parallel(lm)
    optim = OptimConfig(lr=1e-3, weight_decay=0.0, betas=[0.9, 0.95])
    optimizer = ActorOptimizer(*build_optimizer(ddp, optim, clip_grad=0.0, total_steps=10))

    def loss_of(model: Any, batch: Tensor) -> Tensor:
        hidden = model(batch[:, :-1])
        logits = lm.logits(hidden.reshape(-1, hidden.shape[-1]))
        return tensor_parallel.vocab_parallel_cross_entropy(
            logits[:, None], batch[:, 1:].reshape(-1, 1)
        ).mean()

    accumulate_gradients(ddp, [tokens], loss_of)
    results["gradient"] = hf_gradients(lm, "main_grad")
    results["norm"] = optimizer.step().grad_norm
    return results


def trained_sequences(vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return sequences, prompt lengths and response lengths.

    The samples of a group share a prompt.
    """
    sequences, prompts, responses = padded_sequences(TRAINED_PROMPTS, TRAINED_RESPONSES, vocab_size)
    sequences[3, 0] = sequences[2, 0]
    return sequences, prompts, responses


def weights_of_scores() -> tuple[Tensor, Tensor]:
    """Return the coefficients of log-probs and entropies in a loss; each token has its own."""
    both = torch.randn(
        2,
        len(TRAINED_RESPONSES),
        max(TRAINED_RESPONSES),
        generator=torch.Generator().manual_seed(3),
    )
    return both[0].double(), both[1].double()


def scored_here(folder: Path, mesh: Mesh) -> dict[str, Any]:
    """Return log-probs, entropies and their gradient in the training path, padded and packed."""
    lm = megatron_model(folder, mesh, torch.float64)
    batch = trained_sequences(lm.architecture.vocab_size)
    of_log_probs, of_entropies = weights_of_scores()
    layouts = {
        "padded": PaddedSequences(lm, *batch),
        "packed": PackedGroups(lm, *batch, torch.tensor(GROUPS)),
    }
    results: dict[str, Any] = {}
    for name, layout in layouts.items():
        hidden = layout.hidden(lm)
        width = max(TRAINED_RESPONSES)
        scores = response_scores(
            layout, hidden, lm, TEMPERATURE, width, chunk_tokens=7, with_entropy=True
        )
        assert scores.entropy is not None
        results[name] = {
            "log_probs": scores.log_probs.detach(),
            "entropy": scores.entropy.detach(),
        }
        (of_log_probs * scores.log_probs + of_entropies * scores.entropy).sum().backward()
    for name, parameter in parameters_of(lm).items():
        # Each rank has its own heads' part; it is summed at the end of accumulation.
        if "q_layernorm" in name or "k_layernorm" in name:
            dist.all_reduce(parameter.grad, group=mesh.tp_group)
    results["gradient"] = hf_gradients(lm)
    return results


def scored_by_transformers(folder: Path) -> dict[str, Any]:
    model = transformers_model(folder, torch.float64)
    batch = trained_sequences(model.config.vocab_size)
    of_log_probs, of_entropies = weights_of_scores()
    options = {"temperature": TEMPERATURE, "width": max(TRAINED_RESPONSES)}
    log_probs, entropy = brute_force_scores(model, *batch, **options)
    (of_log_probs * log_probs + of_entropies * entropy).sum().backward()
    return {
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "gradient": named_gradients(model),
    }


def drawn_here(engine: NativeGenerator, prompts: list[Prompt]) -> dict[str, Any]:
    """Return sampled responses and the log-probs that the generator reports."""
    params = SamplingParams(
        max_length=NEW_TOKENS,
        temperature=TEMPERATURE,
        stop_token_ids=(2,),
    )
    made = engine.generate(prompts, 2, params, seed=5)
    prompts_of_samples = made.repeat_to_samples(prompts)
    sequences, lengths = join_prompts_and_responses(prompts_of_samples, made, pad_id=0)
    return {
        "log_probs": made.log_probs,
        "sequences": sequences,
        "prompts": lengths,
        "responses": made.lengths,
    }


def computed_by_transformers(folder: Path) -> dict[str, Any]:
    model = transformers_model(folder)
    vocab_size = model.config.vocab_size
    tokens = tokens_of(vocab_size)
    results: dict[str, Any] = {"logits": transformers_logits(model, tokens)}

    logits = model(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    results["gradient"] = named_gradients(model)
    norms = [gradient.norm() for gradient in results["gradient"].values()]
    results["norm"] = float(torch.stack(norms).norm())

    results["scores"] = scored_by_transformers(folder)

    exact = transformers_model(folder, torch.float64)
    results["responses"] = []
    for prompt in prompts_of(vocab_size):
        row = torch.tensor([prompt.tokens])
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
        out = exact.generate(row, attention_mask=torch.ones_like(row), **options)
        results["responses"].append(out[0, len(prompt.tokens) :].tolist())
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def folders(root):
    return {name: family_folder(root, name) for name in MODELS}


@pytest.fixture(scope="module")
def expected(folders):
    return {name: computed_by_transformers(folder) for name, folder in folders.items()}


def computed_on_two_ranks(folders, out):
    with parallel_mesh(2) as mesh:
        return {name: computed_here(folders[name], mesh, out / name) for name in ON_TWO_RANKS}


@pytest.fixture(scope="module")
def on_two_ranks(root, folders):
    """Return the results by model; the ranks export to `root`/out."""
    return call_on_ranks(computed_on_two_ranks, 2, folders, root / "out", timeout=240)[0]


@every_model
def test_one_rank(name, folders, expected, mesh, tmp_path):
    computed = computed_here(folders[name], mesh, tmp_path / "out")
    assert_equal(computed, expected[name])
    assert_scored_alike(computed, expected[name], folders[name])
    assert_same_weights(tmp_path / "out", folders[name])


@models_on_two_ranks
def test_two_ranks(name, root, folders, expected, on_two_ranks):
    computed = on_two_ranks[name]
    assert_equal(computed, expected[name])
    assert_scored_alike(computed, expected[name], folders[name])
    assert_same_weights(root / "out" / name, folders[name])
    again = transformers_model(root / "out" / name)
    assert torch.equal(
        transformers_logits(again, tokens_of(again.config.vocab_size)), expected[name]["logits"]
    )


def assert_equal(computed: dict, expected: dict) -> None:
    assert expected["logits"].std() > 0.5  # otherwise closeness would prove little
    torch.testing.assert_close(computed["logits"], expected["logits"], atol=1e-5, rtol=0)
    assert computed["responses"] == computed["responses_alone"] == expected["responses"]
    assert len({tuple(response) for response in computed["responses"]}) > 1
    assert computed["gradient"].keys() == expected["gradient"].keys()
    for key, gradient in expected["gradient"].items():
        assert gradient.abs().max() > 1e-6
        torch.testing.assert_close(
            computed["gradient"][key], gradient, atol=1e-6, rtol=1e-4, msg=key
        )
    # Parameters on several ranks count once, padding not at all.
    assert computed["norm"] == pytest.approx(expected["norm"], rel=1e-4)


def assert_scored_alike(computed: dict, expected: dict, folder: Path) -> None:
    """Log-probs of training and generation equal transformers' softmax at the temperature."""
    ours = computed["scores"]
    theirs = expected["scores"]
    assert theirs["log_probs"].std() > 0.5
    for layout in ("padded", "packed"):
        for name in ("log_probs", "entropy"):
            torch.testing.assert_close(
                ours[layout][name].float(), theirs[name].float(), atol=1e-5, rtol=0
            )
    assert ours["gradient"].keys() == theirs["gradient"].keys()
    for key, gradient in theirs["gradient"].items():
        both_layouts = 2 * gradient
        torch.testing.assert_close(
            ours["gradient"][key], both_layouts, atol=1e-4, rtol=1e-4, msg=key
        )
    drawn = computed["drawn"]
    of_tokens = brute_force_scores(
        transformers_model(folder, torch.float64),
        drawn["sequences"],
        drawn["prompts"],
        drawn["responses"],
        temperature=TEMPERATURE,
        width=drawn["log_probs"].shape[1],
    )[0]
    assert len(drawn["responses"].unique()) > 1 or bool((drawn["responses"] > 1).all())
    torch.testing.assert_close(drawn["log_probs"], of_tokens.detach().float(), atol=1e-5, rtol=0)


def assert_same_weights(folder: Path, other: Path) -> None:
    weights = all_tensors(folder)
    others = all_tensors(other)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert weight.dtype == others[name].dtype
        assert torch.equal(weight, others[name]), name


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@models_on_two_ranks
def test_files_keep_to_their_size(name, root, on_two_ranks):
    files = sorted((root / "out" / name).glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        tensors = load_file(file)
        assert (
            sum(tensor.nbytes for tensor in tensors.values()) <= MAX_SHARD_BYTES
            or len(tensors) == 1
        )
